"""The endpoints of `/v1`: HTTP in, SSE out, on raw ASGI.

Must not import `admin`; it knows the wire and makes no decision: `pipeline.answer` does. Read
`chat.py` first; `headers.py` sets the response headers, `front.py` finds the endpoint.
"""
