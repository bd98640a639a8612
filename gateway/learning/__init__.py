"""Verifiers, and what teaches the semantic cache: comparisons, checks of hits, reports of clients.

Must not import `api` or `admin`. A request waits for a verifier (stage 6), and for nothing else here.
Read `comparisons.py` first, then `verifiers.py`; `build.py` puts the parts together.
"""
