"""Alerts before a budget is used up: the log and a webhook.

Must not import `api`, `admin` or `learning`; no request passes through it. Read `watch.py` first.
"""
