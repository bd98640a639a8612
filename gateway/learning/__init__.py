"""Comparisons of answers, checks of hits and reports of clients: they teach the semantic cache.

Must not import `api` or `admin`; no request waits for anything here. Read `comparisons.py` first;
`build.py` puts the parts together.
"""
