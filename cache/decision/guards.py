"""Which neighbour may answer a prompt: the seam, and a conservative fixed rule behind it.

Pure: texts and similarities in, a verdict with a reason for each neighbour out. Knows no Redis, no index and no answers.
`cache.decision.rule` has the rule that learns; this one needs no verdicts, and is its start. Invariant: a neighbour is served
only if every guard
passes; a caller's `error_max` only ever tightens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache.decision.features import Neighbour, WordCounts
from cache.decision.model import Learner, Row, Vector
from cache.decision.text_features import Reading, is_inverted, is_negated, read
from cache.decision.words import LIGHT_WORDS
from cache.worker.messages import MissReason, Query


@dataclass(slots=True)
class Scene:
    """What a namespace knows beside its keys: its words, what verdicts have taught (None: none yet), how many would-be hits
    there were, and how many hits since the last request that was generated, with the errors to expect of them."""

    words: WordCounts = field(default_factory=WordCounts)
    learner: Learner | None = None
    accepted: int = 0
    served: int = 0
    risked: float = 0.0


@dataclass(frozen=True, slots=True)
class Assessment:
    """What a decision was made of, for the verdict that may follow. `ranked` has the entries that a fresh answer should be
    compared with, the likeliest first, each of another group; `evidence`, `p` and `is_vetoed` are of the first. `chance` is with
    which probability a request like this one is generated: 1 where it was not to be served."""

    ranked: tuple[bytes, ...]
    evidence: Vector
    p: float
    chance: float
    is_vetoed: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """`served` is the place of the neighbour whose answer may be served; `reasons` has, for each, why not (None: it may)."""

    served: int | None
    reasons: tuple[MissReason | None, ...]
    assessment: Assessment | None = None


class Verifier(Protocol):
    """Decides from evidence. The neighbours come nearest first, at least one."""

    def decide(self, query: Query, neighbours: Sequence[Neighbour], scene: Scene) -> Verdict: ...

    def learn(self, row: Row, scene: Scene) -> None:
        """Take in what a comparison told."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The least cosine at which a neighbour is served, by how its content words differ from the prompt's; the first the lowest."""

    same: float  # the same content words
    added: float  # one text has further content words
    changed: float  # each has content words that the other lacks


class FixedVerifier:
    """Fixed thresholds by lexical relation, and guards. A smaller `error_max` takes a stricter row, below the last one nothing."""

    def decide(self, query: Query, neighbours: Sequence[Neighbour], scene: Scene | None = None) -> Verdict:
        """Needs no scene."""
        thresholds = _thresholds(query.error_max)
        if thresholds is None:
            return Verdict(None, (MissReason.STRICT,) * len(neighbours))
        asked = read(query.text)
        reasons = tuple(self._reason(asked, neighbour, thresholds) for neighbour in neighbours)
        served = next((place for place, reason in enumerate(reasons) if reason is None), None)
        return Verdict(served, reasons)

    def learn(self, row: Row, scene: Scene) -> None:
        """It does not."""

    def _reason(self, asked: Reading, neighbour: Neighbour, thresholds: Thresholds) -> MissReason | None:
        if neighbour.similarity < thresholds.same:
            return MissReason.FAR
        known = read(neighbour.text)
        guard = difference(asked, known)
        if guard is not None:
            return guard
        if is_stale(asked, neighbour):
            return MissReason.TIME
        return _too_different(asked, known, neighbour.similarity, thresholds)


def difference(asked: Reading, known: Reading) -> MissReason | None:
    """The first thing that two texts commit to differently, however similar they are, or None."""
    if asked.numbers != known.numbers:
        return MissReason.NUMBERS
    if is_negated(asked, known):
        return MissReason.POLARITY
    if _has_other_names(asked, known) or asked.owners != known.owners:
        return MissReason.NAMES
    if is_inverted(asked, known):
        return MissReason.DIRECTION
    if asked.forms != known.forms or asked.scopes != known.scopes or _asks_otherwise(asked.question, known.question):
        return MissReason.FORM
    if asked.times != known.times or asked.dates != known.dates:
        return MissReason.TIME
    if asked.content_set != known.content_set and not (asked.is_latin and known.is_latin):
        return MissReason.WORDS  # an encoder of English sees little of other scripts: much of them is one unknown token
    return None


def _has_other_names(asked: Reading, known: Reading) -> bool:
    """A name or a quotation of one that the other text does not say at all, in whatever case."""
    return not (asked.names <= set(known.words) and known.names <= set(asked.words)) or asked.quotes != known.quotes


def _asks_otherwise(one: str, other: str) -> bool:
    """Another kind of answer; "how much is" and "what is" ask for the same."""
    return one != other and {one, other} != {"", "amount"}


def _too_different(asked: Reading, known: Reading, similarity: float, thresholds: Thresholds) -> MissReason | None:
    if is_long(asked, known):
        return None if asked.words == known.words else MissReason.WORDS
    mine, theirs = asked.content_set - known.content_set, known.content_set - asked.content_set
    if is_drowned(asked, known):
        return MissReason.WORDS
    if mine and theirs:
        return None if similarity >= thresholds.changed else MissReason.WORDS
    is_same = (mine | theirs) <= LIGHT_WORDS
    return None if similarity >= (thresholds.same if is_same else thresholds.added) else MissReason.FAR


def is_stale(asked: Reading, neighbour: Neighbour) -> bool:
    """The prompt is about now, and the answer was given too long ago."""
    return bool(asked.times) and neighbour.age_s > FRESH_S


def is_drowned(asked: Reading, known: Reading) -> bool:
    """Words that differ move a cosine by about their share of the text: of more than a question's length it tells too little."""
    is_wordy = max(len(asked.words), len(known.words)) > QUESTION_WORDS
    return is_wordy and not (asked.content_set ^ known.content_set) <= LIGHT_WORDS


def is_long(asked: Reading, known: Reading) -> bool:
    """A long template drowns the few words that differ: of such, only the very same words are served."""
    return max(len(asked.words), len(known.words)) > LONG_WORDS


QUESTION_WORDS = 16
LONG_WORDS = 40
FRESH_S = 600.0
"""For so long may the answer to a prompt about now be served again."""

# No fixed cosine holds a bound on every traffic. These were measured with all-MiniLM-L6-v2 on assistants' queries (CLINC150 and
# HWU64, streamed into an empty cache, wrong hits over requests): 0.3 and 0.5% at 25 and 15% hits; 0.1 and 0.4% at 16 and 7% hits.
_TABLE: tuple[tuple[float, Thresholds], ...] = (
    (0.01, Thresholds(same=0.80, added=0.90, changed=0.95)),
    (0.005, Thresholds(same=0.90, added=0.95, changed=0.98)),
)


def _thresholds(error_max: float | None) -> Thresholds | None:
    """The row for an error bound: the default's where none is given, None where no row is strict enough."""
    if error_max is None:
        return _TABLE[0][1]
    return next((thresholds for bound, thresholds in _TABLE if error_max >= bound), None)
