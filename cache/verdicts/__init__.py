"""Verdicts on cached answers: the judges that make them, their records, and the store that keeps
them in Redis.

Must not import `semantic` or `worker`. Read `records.py` first.
"""

from cache.verdicts.judges import EQUALITY, PROSE, Judge, Judgement, QAPair, Ruling, equal, is_refusal
from cache.verdicts.records import AnswerRef, Scope, ServedReply, Source, Suspension, Verdict
from cache.verdicts.store import VerdictStore

__all__ = [
    "EQUALITY",
    "PROSE",
    "AnswerRef",
    "Judge",
    "Judgement",
    "QAPair",
    "Ruling",
    "Scope",
    "ServedReply",
    "Source",
    "Suspension",
    "Verdict",
    "VerdictStore",
    "equal",
    "is_refusal",
]
