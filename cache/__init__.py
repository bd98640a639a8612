"""Is there already an answer? An exact cache in Redis and a semantic cache in a worker process.

Must not import the gateway, the policies, the engine or an HTTP library. Importing this imports no
torch, FAISS or transformers: `cache.semantic` and `cache.encoder` are for the worker and for tests.
Read `fingerprint.py` first, then `exact/` and `decision/`.
"""

from cache.eligibility import Controls, Outcome, Refusal, store_refusal
from cache.entry import (
    CacheError,
    CacheUnavailable,
    CacheWorkerUnavailable,
    Entry,
    HitKind,
    Purge,
    Recorded,
)
from cache.exact.cache import CacheLimits, CacheStats, ExactCache, Lookup, LookupMiss, PurgeResult, Sample, StoreResult
from cache.fingerprint import FIELDS, FieldKind, Fingerprint, Partition, fingerprint, partition
from cache.query import Hit, Miss, MissReason, Near, Neighbourhood, Query, Trial
from cache.verdicts.judges import EqualityJudge, Judge, Judgement, Panel, QAPair, Ruling
from cache.verdicts.records import AnswerRef, Reply, Scope, Source, Suspension, Verdict
from cache.verdicts.store import VerdictStore
from cache.worker.client import SemanticClient, TextTooLong
from cache.worker.messages import Embedded, Status, WorkerState

__all__ = [
    "FIELDS",
    "AnswerRef",
    "CacheError",
    "CacheLimits",
    "CacheStats",
    "CacheUnavailable",
    "CacheWorkerUnavailable",
    "Controls",
    "Embedded",
    "Entry",
    "EqualityJudge",
    "ExactCache",
    "FieldKind",
    "Fingerprint",
    "Hit",
    "HitKind",
    "Judge",
    "Lookup",
    "LookupMiss",
    "Miss",
    "MissReason",
    "Near",
    "Neighbourhood",
    "Opinion",
    "Outcome",
    "Panel",
    "Partition",
    "Purge",
    "PurgeResult",
    "Query",
    "Recorded",
    "Refusal",
    "Reply",
    "Ruling",
    "Sample",
    "Scope",
    "SemanticClient",
    "Source",
    "Status",
    "StoreResult",
    "Suspension",
    "TextTooLong",
    "Told",
    "Trial",
    "Verdict",
    "VerdictStore",
    "WorkerState",
    "fingerprint",
    "partition",
    "store_refusal",
]
