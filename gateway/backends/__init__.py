"""One seam to all that generates: `Backend.stream(request)`, an asynchronous iterator of chunks.

It must not import deployments, the journey or money. Read `base.py` first.
"""
