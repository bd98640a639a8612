"""One interface to all generators: `Backend.stream(request)`, an asynchronous iterator of chunks.

Must not import `deployments`, `journey` or any room above them: a backend knows one deployment and
no money. Read `base.py` first; then `openai/`, `local/` and `managed.py`, one kind of backend each.
`dialect.py` says how servers of one kind differ, and `fitting.py` says a request so.
"""
