"""People: who an OpenID provider says they are, and what its groups may do here.

Must not import `admin` or `api`. Knows no pages and no requests: it gets tokens and gives claims, roles
and identities. Read `provider.py` first.
"""
