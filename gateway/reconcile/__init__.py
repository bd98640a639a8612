"""`sameway reconcile`: a provider's own export of usage or cost beside the ledger, by day and
model.

May import the accounts, the deployments' facts and the settings; a running gateway needs none of
it. Read `export.py` first.
"""
