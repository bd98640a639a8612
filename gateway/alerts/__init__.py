"""Alerts before a budget is used up: the log and a webhook.

Must not import `api`, `admin` or `learning`; requests do not pass through it. Read `watch.py`
first.
"""
