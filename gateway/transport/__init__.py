"""Hand-written transports, and one primitive of the event loop. Must not import any other room.

http_server        replaces uvicorn's request cycle: 25 to 30 µs of CPU a request instead of 34 to
40 http_client, _pool replace aiohttp's client: a third of its CPU for a whole answer, half for a
stream redis_connection   and redis_link replace redis-py's asyncio connection, which took a third
of a miss eager              replaces tasks for calls that are begun together: a task costs several
calls

Figures: docs/benchmarks.md, "What a request costs". Each is held to the library's behaviour by
tests: test_protocol, test_http1, test_redis_link, test_eager. Read `redis_link.py` first.
"""
