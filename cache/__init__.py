"""Finds answers that exist already: an exact cache in Redis and a semantic cache in a worker
process.

Must not import the gateway, the policies, the engine or an HTTP library. Importing this imports no
torch, FAISS or transformers: `cache.semantic` and `cache.encoder` are for the worker and for tests.
Verdicts on answers are in `cache.verdicts`. Read `fingerprint.py` first.
"""

from cache.eligibility import Controls, Outcome
from cache.entry import CacheUnavailable, CacheWorkerUnavailable, Entry, Purge, Recorded
from cache.exact import CacheLimits, ExactCache, Lookup
from cache.fingerprint import Fingerprint, Partition, fingerprint, partition
from cache.query import Hit, Miss, MissReason, Query, Trial
from cache.worker import SemanticClient

__all__ = [
    "CacheLimits",
    "CacheUnavailable",
    "CacheWorkerUnavailable",
    "Controls",
    "Entry",
    "ExactCache",
    "Fingerprint",
    "Hit",
    "Lookup",
    "Miss",
    "MissReason",
    "Outcome",
    "Partition",
    "Purge",
    "Query",
    "Recorded",
    "SemanticClient",
    "Trial",
    "fingerprint",
    "partition",
]
