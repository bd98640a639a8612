"""Files and batches of teams: rows in SQL, contents in a folder.

Must not import `api`, `admin` or `app`; its caller passes the endpoints that lines name. Read
`work.py` first: it runs the lines of a batch, which `lines.py` parses; `BatchRunner._call` sends
each as a request.
"""
