"""The exact cache: the answer to an equal request, in this process and in Redis.

Must not import a room that knows meaning (`decision`, `encoder`, `semantic`, `verdicts`). Read
`cache.py` first.
"""

from cache.exact.cache import CacheLimits, CacheStats, ExactCache, Lookup, LookupMiss, PurgeResult, Sample, StoreResult
from cache.exact.pointers import Pointer, Verified

__all__ = [
    "CacheLimits",
    "CacheStats",
    "ExactCache",
    "Lookup",
    "LookupMiss",
    "Pointer",
    "PurgeResult",
    "Sample",
    "StoreResult",
    "Verified",
]
