"""Alerts before a budget is used up: by the log, a webhook and e-mail.

Must not import `api`, `admin` or `learning`; requests do not pass through it. Read `watch.py`
first.
"""
