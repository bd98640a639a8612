"""What the semantic cache learns from: comparisons of answers, checks of hits, reports of clients.

Must not import `api` or `admin`; no request waits for anything here. Read `comparisons.py` first;
`build.py` puts the parts together.
"""
