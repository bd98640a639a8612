"""A prompt to look up by meaning, and the decision that answers it: plain msgspec values, in a
process and on a socket.

Knows no rule, no index and no socket.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cache.fingerprint import Partition

ERROR_MAX = 0.01
"""The error bound where no configuration sets one: the share of requests that may be answered wrongly."""

BOUND_MIN = 0.002
"""A stricter bound than any that was measured: nothing is served by meaning."""


class Query(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to look up semantically.

    `error_max` tightens the configured bound, as a share of requests. If it was tightened because
    too many answers were wrong, `untightened` is the bound before.
    `is_try`: the decision is only shown and not counted. `context` has the texts that the prompt is
    asked after, as a `Fingerprint` has them. `may_ask`: a verifier may be asked about what is not
    certain.
    """

    partition: Partition
    compat: bytes
    text: str
    error_max: float | None = None
    untightened: float | None = None
    is_try: bool = False
    context: str = ""
    may_ask: bool = False

    @property
    def namespace(self) -> bytes:
        """What is searched: the prompts of its partition and compat."""
        return self.partition + self.compat


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """The facts of a decision, for the verdict that may follow.

    `ranked` has the entries to compare a fresh answer with, the likeliest first, each of another
    group. `features` (float32, little-endian) and `p` are of the first; empty features mean that a
    veto decided. `chance` is the probability that the two answers are compared: that of a check of a
    hit, 1 of a miss. `rule` names the features. `peers` are further entries of the first one's
    group. `hits` is how many hits the namespace had before. `differing` has the
    digests of the pieces by which the context of the first entry differs (`cache.decision.pieces`).
    `risk` is the probability that an answer which a verifier called right is wrong; 0 of any other.
    """

    ranked: tuple[bytes, ...]
    features: bytes = b""
    p: float = 0.0
    chance: float = 1.0
    rule: bytes = b""
    peers: tuple[bytes, ...] = ()
    hits: int = 0
    differing: tuple[bytes, ...] = ()
    risk: float = 0.0


class MissReason(StrEnum):
    """The reasons for a semantic miss. Metrics count them by these names."""

    EMPTY = "empty"  # nothing is cached for this partition and compat
    CUT = "cut"  # the same, as answers to it are cut by a limit that is not the request's own
    TOO_LONG = "too_long"  # the prompt does not fit the encoder's window, or has what is no token of it
    DOCUMENTS = "documents"  # cached prompts have another context, of which no verdicts say that it does not matter
    FAR = "far"  # the nearest entry is not similar enough
    NUMBERS = "numbers"  # near, but numbers, dates or units differ
    MARKS = "marks"  # near, but codes, links, signs or hidden characters differ
    WORDS = "words"  # near, but words that carry the question differ
    UNSURE = "unsure"  # near, but too likely to be wrong for the error bound
    STRICT = "strict"  # near, but the error bound asked for is stricter than anything measured
    SUSPENDED = "suspended"  # would be served, but its answer was found wrong and is not cleared
    # would be served, but too many answers were wrong lately: the bound has tightened itself
    TIGHTENED = "tightened"
    LOADING = "loading"  # the encoder is not ready
    TIMEOUT = "timeout"  # the worker did not answer in time
    UNAVAILABLE = "unavailable"  # the worker is away
    INDEX = "index"  # the vector engine is away, or did not answer in time


class Near(msgspec.Struct, frozen=True, array_like=True):
    """A cached prompt of the same partition and compat. `similarity` is the cosine; `reason` is why
    it may not be served. `group` names the prompts with an equal answer, of which there are `keys`;
    `right` and `wrong` are the verdicts on serving that answer.
    """

    similarity: float
    text: str
    exact: bytes
    reason: MissReason | None = None
    group: bytes = b""
    keys: int = 1
    right: float = 0.0
    wrong: float = 0.0


class Hit(msgspec.Struct, frozen=True, array_like=True, tag="hit"):
    """Entry `exact` answers the prompt; it was stored for `text`. `differing` has the pieces of both
    contexts that differ, as `Asked` has them.
    """

    exact: bytes
    similarity: float
    text: str
    trial: Trial | None = None
    differing: tuple[tuple[str, str], ...] = ()


class Miss(msgspec.Struct, frozen=True, array_like=True, tag="miss"):
    """Nothing may be served; `nearest` is what came closest."""

    reason: MissReason
    nearest: Near | None = None
    trial: Trial | None = None


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """An entry whose answer may be right for the prompt. `text` is the prompt that it was stored for,
    `p` the probability that its answer is right. `differing` has the pieces of both contexts that
    differ, each as (of the prompt, of the entry); one of them may be empty. `features` are those that a
    trial of this entry has. `wording` is the nearest wording of that answer, if it is nearer than the
    entry's own prompt.
    """

    exact: bytes
    group: bytes
    similarity: float
    text: str
    p: float
    differing: tuple[tuple[str, str], ...] = ()
    features: bytes = b""
    wording: bytes = b""

    def trial(self, of_first: Trial | None) -> Trial:
        """Its own trial, of a decision with this one."""
        first = of_first or Trial(())
        if first.ranked[:1] == (self.exact,):
            return Trial(first.ranked[:1], first.features, first.p, rule=first.rule)
        return Trial((self.exact,), self.features, rule=first.rule)


class Undecided(msgspec.Struct, frozen=True, array_like=True, tag="undecided"):
    """No answer is certain. A verifier may find one of `candidates` right: at most four, of different
    groups, the likeliest first. Without its word the decision is `miss`.
    """

    candidates: tuple[Asked, ...]
    miss: Miss


LookupResult = Hit | Miss | Undecided


class Neighbourhood(msgspec.Struct, frozen=True, array_like=True, tag="near"):
    """The decision for a prompt and its neighbours, the nearest first. `p_min` is the p that would
    be served, None while too few verdicts have come to say; `verdicts` is how many have.
    """

    decision: LookupResult
    neighbours: tuple[Near, ...]
    p_min: float | None = None
    verdicts: int = 0
