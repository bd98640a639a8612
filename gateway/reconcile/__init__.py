"""`sameway reconcile`: compares a provider's export of usage or cost with the ledger, by day and
model.

May import the accounts, the deployments' facts and the settings; a running gateway does not import
it. Read `export.py` first.
"""
