"""Verdicts on cached answers: the judges that make them, their records, and the store that keeps them in Redis.

Must not import `semantic` or `worker`. Read `records.py` first.
"""
