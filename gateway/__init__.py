"""The gateway: HTTP in, answers out; the processes of a host, accounts in SQL and the dashboard.

The only package that imports the other three. Its rooms are folders in an order: each imports only
rooms below it (see ARCHITECTURE.md). Read `pipeline.py` first: it is the journey of a request.
"""
