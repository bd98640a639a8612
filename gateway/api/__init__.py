"""The endpoints of `/v1`: HTTP in, SSE out, on raw ASGI.

Must not import `admin`. Parses requests and renders answers; `pipeline.answer` makes every
decision. Read `chat.py` first; `headers.py` sets the response headers, `front.py` finds the
endpoint.
"""
