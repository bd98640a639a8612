"""The deployments of this worker: backends with their prices, breakers and live estimates.

Must not import `journey` or any room above it: it knows no teams, budgets or caches. Read
`deployment.py` first, then `alias.py`; `build.py` chooses the kind of backend.
"""
