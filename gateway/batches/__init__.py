"""Files and batches of teams: rows in SQL, contents in a folder.

Must not import `api`, `admin` or `app`; the endpoints of its lines are given to it. Read `work.py`
first: it runs the lines of a batch, which `lines.py` parses; `BatchRunner._call`
makes a request of each.
"""
