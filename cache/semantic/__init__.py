"""The semantic cache: which cached answer means the same?

The index of prompts, what verdicts have taught about them, and the follower that keeps both equal
to Redis. Must not import `worker`. Imports FAISS: a gateway worker must not import this room. Read
`cache.py` first.
"""
