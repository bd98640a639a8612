"""Is there already an answer? An exact-prefix cache in Redis and a semantic cache in a worker process.

Knows no HTTP, teams, money or models. Importing this imports no torch, FAISS or transformers: `cache.semantic`, `cache.embedder`
and `cache.index` are for the worker and for who runs a `SemanticCache` inline.
"""

from cache.client import SemanticClient, TextTooLong
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
from cache.exact import CacheLimits, CacheStats, ExactCache, Lookup, LookupMiss, PurgeResult, Sample, StoreResult
from cache.findings import AnswerRef, Finding, Reply, Scope, Source, Suspension
from cache.fingerprint import FIELDS, FieldKind, Fingerprint, Partition, fingerprint, partition
from cache.judge import EqualityJudge, Judge, Opinion, Panel, Ruling, Told
from cache.messages import (
    Embedded,
    Hit,
    Miss,
    MissReason,
    Near,
    Neighbourhood,
    Query,
    Status,
    Trial,
    WorkerState,
)
from cache.verdicts import VerdictStore

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
    "Finding",
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
    "VerdictStore",
    "WorkerState",
    "fingerprint",
    "partition",
    "store_refusal",
]
