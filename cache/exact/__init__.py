"""The exact cache: the answer to an equal request, in this process and in Redis.

Must not import a room that knows meaning (`decision`, `encoder`, `semantic`, `verdicts`). Read
`cache.py` first.
"""

from cache.exact.cache import CacheLimits, ExactCache, Lookup, LookupMiss
from cache.exact.pointers import Verified

__all__ = [
    "CacheLimits",
    "ExactCache",
    "Lookup",
    "LookupMiss",
    "Verified",
]
