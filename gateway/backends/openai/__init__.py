"""OpenAI-compatible servers. Must not import another kind of backend. Read `backend.py` first."""
