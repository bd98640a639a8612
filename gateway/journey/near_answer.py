"""The answer to the nearest cached prompt, which was not served: a local engine takes it for a draft of the new one.

Guesses that come from it are verified token by token, so it changes no answer, only how many steps one takes. Invariants: it
is of the request's own partition and compat, as a hit would be; it is asked for beside the money, so that it adds no
round trip where anything else is asked of Redis; whatever fails, there is no draft; a guess is no use of the answer, and
keeps it from no eviction.
"""

import msgspec

from cache import Entry, ExactCache, Lookup
from gateway.journey.generation import Job
from gateway.journey.storing import answer_text, chunks_of
from gateway.settings import NEAR_SIMILARITY_MIN
from gateway.transport.eager import Eager
from gateway.wire.fold import fold

_CHUNKS_BYTES_MAX = 64 << 10  # reading a longer one would hold others up
_TEXT_CHARS_MAX = 16 << 10


def begin(job: Job, exact: ExactCache) -> Eager[Lookup] | None:
    """Ask for the nearest answer, where one is near and a deployment could use it."""
    trial, similarity = job.trial, job.turn.record.similarity
    if trial is None or not trial.ranked or similarity is None or similarity < NEAR_SIMILARITY_MIN:
        return None
    if not job.alias.has_engine:
        return None
    return Eager(exact.lookup_entry(job.fingerprint, trial.ranked[0], is_served=False))


def text_of(entry: Entry | None) -> str:
    """What the entry's answer says, or as much of it as is worth reading; nothing where it is no text."""
    if entry is None or entry.chunks_bytes > _CHUNKS_BYTES_MAX:
        return ""
    try:
        whole = fold(chunks_of(entry))
    except msgspec.DecodeError:  # recorded as it came, with something wrong where nobody had to look
        return ""
    return (answer_text(whole) or "")[:_TEXT_CHARS_MAX]
