"""Do two short answers state the same fact? By what their words commit to, and by their vectors.

Knows texts and an encoder. Of itself it can tell little: an answer that explains is never guessed at. Invariant: numbers, polarity
and names that differ are never the same, however similar the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.decision.guards import difference
from cache.decision.text_features import Reading, read
from cache.encoder.types import Encoded
from cache.query import MissReason
from cache.verdicts.judges import Opinion, Ruling

SHORT_WORDS = 25  # of an answer that states a fact; a longer one explains
_SAME_COSINE = 0.93
_SURE_COSINE = 0.97  # where each has a content word that the other lacks
_OTHER_COSINE = 0.6
_OTHER_COSINE_TERSE = 0.8  # answers of a word or two: their other words are all they say
_TERSE_WORDS = 3

_NAME = "agreement"
_STANCES = {"yes": "yes", "yeah": "yes", "yep": "yes", "correct": "yes", "true": "yes"}
_STANCES |= {"no": "no", "nope": "no", "incorrect": "no", "wrong": "no", "false": "no"}


def agree(fresh: str, cached: str, encode: Callable[[Sequence[str]], Encoded]) -> Opinion:
    """Whether a cached answer says what a fresh one does. Encodes both where their words leave it open."""
    one, other = read(fresh), read(cached)
    if not one.words or not other.words or max(len(one.words), len(other.words)) > SHORT_WORDS:
        return Opinion(Ruling.UNKNOWN, _NAME, "too long to compare by meaning")
    guard = difference(one, other)
    if {_stance(one), _stance(other)} == {"yes", "no"}:
        return Opinion(Ruling.DIFFERENT, _NAME, "one says yes, the other no")
    if guard in (MissReason.NUMBERS, MissReason.POLARITY):
        return Opinion(Ruling.DIFFERENT, _NAME, f"{guard} differ")
    if guard is MissReason.NAMES and one.names and other.names and not one.names & other.names:
        return Opinion(Ruling.DIFFERENT, _NAME, "names differ")
    mine, its = encode([fresh, cached]).vectors
    cosine = float(mine @ its)
    is_swapped = bool(one.content_set - other.content_set and other.content_set - one.content_set)
    ruling = Ruling.UNKNOWN
    is_guarded = guard is not None or one.negations != other.negations  # two negations are not always none
    if not is_guarded and cosine >= (_SURE_COSINE if is_swapped else _SAME_COSINE):
        ruling = Ruling.SAME
    is_terse = max(len(one.content), len(other.content)) <= _TERSE_WORDS
    if is_swapped and cosine < (_OTHER_COSINE_TERSE if is_terse else _OTHER_COSINE):
        ruling = Ruling.DIFFERENT
    return Opinion(ruling, _NAME, f"similarity {cosine:.2f}")


def _stance(one: Reading) -> str:
    """What an answer that begins with yes or no says; empty for any other."""
    return _STANCES.get(one.words[0], "")
