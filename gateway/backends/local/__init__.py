"""Local engines, over a unix socket. Must not import another kind of backend. Read `backend.py`."""
