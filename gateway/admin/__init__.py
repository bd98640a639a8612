"""The admin plane: an API under /admin/api and a dashboard at /admin on the same values.

Must not import `api`: it reads records and changes accounts and caches, never a request. Read
`views.py` first: one function for each thing that a page and the API both show.
"""
