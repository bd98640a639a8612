"""Hand-written transports. Must not import any other room of the gateway. Read `http_server.py` first.

    module                         replaces                  CPU, of the library's
    http_server                    uvicorn's request cycle   three quarters a request
    http_client, http_pool         aiohttp's client          a third a whole answer, half a stream
    eager                          a task for each call      a fraction: a task costs several calls

The figures are in docs/benchmarks.md; tests/transport holds each to the library's behaviour.
"""
