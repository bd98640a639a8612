"""Transports. Must not import any other room of the gateway. Read `http_server.py` first.

    module                         what it is                      CPU, of the library's
    http_server                    granian, with additions
    http_client, http_pool         instead of aiohttp's client     a third a whole answer, half a stream
    eager                          instead of a task a call        a fraction: a task costs several calls
    contents                       a folder or a bucket for files  a bucket by obstore, a folder by our own calls

The figures are in docs/benchmarks.md; tests/transport compares each with the library's behaviour.
"""
