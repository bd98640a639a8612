"""Guards: reasons that forbid serving the answer of one prompt to another.

Pure: takes the features of two texts, a similarity and an age, and returns a reason or None. Knows
no neighbours and no model. Invariant: two texts that commit to different numbers, names, directions
or forms differ here, however similar they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cache.decision.text_features import TextFeatures, is_cased_otherwise, is_inverted, is_negated
from cache.decision.words import (
    ASKED_FOR,
    ASKING_WHETHER,
)
from cache.query import MissReason

# words after "how much" that do not say of what
_AFTER_MUCH = frozenset(("", "of", "mor", "extra", "less", "to", "for", "i", "on", "in"))


def difference(query: TextFeatures, known: TextFeatures) -> MissReason | None:
    """The first thing that two texts commit to differently, however similar they are, or None."""
    for reason in _commitments(query, known):
        return reason
    # "how much is" and "what is" ask for the same, as do "how long" and "how many days"
    kinds = {query.question, known.question}
    asks_otherwise = len(kinds) > 1 and kinds not in ({"", "amount"}, {"amount", "count"})
    if asks_otherwise:
        return MissReason.FORM
    if query.content_set != known.content_set and not (query.is_latin and known.is_latin):
        # an encoder of English sees little of other scripts: much of them is one unknown token
        return MissReason.WORDS
    return None


def _commitments(query: TextFeatures, known: TextFeatures) -> Iterator[MissReason]:
    """The kinds of what two texts commit to differently."""
    if _has_other_numbers(query, known):
        yield MissReason.NUMBERS
    if is_negated(query, known):
        yield MissReason.POLARITY
    if _has_other_names(query, known) or query.owners != known.owners:
        yield MissReason.NAMES
    if is_inverted(query, known) or _is_turned(query, known):
        yield MissReason.DIRECTION
    if query.forms != known.forms or query.scopes != known.scopes or has_other_mood(query, known):
        yield MissReason.FORM
    if query.times != known.times or query.dates != known.dates:
        yield MissReason.TIME


_TURNED = {"from": "to", "to": "from", "before": "after", "after": "before", "over": "under", "under": "over"}


def _is_turned(query: TextFeatures, known: TextFeatures) -> bool:
    """Whether one goes to where the other comes from."""
    others = known.roles - query.roles
    return any((_TURNED.get(preposition), word) in others for preposition, word in query.roles)


def has_other_mood(query: TextFeatures, known: TextFeatures) -> bool:
    """Whether one asks if a thing can be, the other if it must be, will be or was: "Can it be
    frozen?", "Should it be frozen?". Or one asks for yes or no, the other when, who or how much.
    """
    kinds, others = _kinds(query, known), _kinds(known, query)
    if _asks_further(query, known):
        return True
    if kinds - others and others - kinds:
        return True
    mine, theirs = query.moods - ASKED_FOR, known.moods - ASKED_FOR
    is_whether, is_same = "?" in kinds & others, query.content_set == known.content_set
    if is_whether and (mine ^ theirs) - {"can"}:
        return True
    if mine and theirs and (kinds & others or not kinds | others) and mine | theirs != {"must", "should"}:
        return mine.isdisjoint(theirs)
    return is_same and not (mine ^ theirs).isdisjoint(("can",) if is_whether else ("did", "will"))


def _asks_further(query: TextFeatures, known: TextFeatures) -> bool:
    """Whether one asks for more things than the other: "When and where is it?", "When is it?"."""
    return query.asks != known.asks and max(query.asks, known.asks) > 1


def _kinds(left: TextFeatures, right: TextFeatures) -> frozenset[str]:
    """The things that the left text asks for. "How much" before a verb asks for a cost, before a noun for a
    count; elsewhere it is read as in the right text."""
    kinds = left.moods & ASKED_FOR
    if left.question in kinds and left.asks < 2:
        return frozenset((left.question,))  # "When do prices rise?"
    after = next((follower for word, follower in itertools.pairwise((*left.tokens, "")) if word == "much"), "")
    if "much" in kinds and after not in _AFTER_MUCH:
        return kinds - {"much"} | ({"cost"} if after in ASKING_WHETHER else {"many"})
    if "much" not in kinds:
        return kinds
    return kinds - {"much"} | (frozenset() if "cost" in kinds else {"cost", "many"} & right.moods or {"many"})


def _has_other_numbers(query: TextFeatures, known: TextFeatures) -> bool:
    """Another number, unit, sign or operator, or a name that another case makes another one."""
    return query.numbers != known.numbers or query.marks != known.marks or is_cased_otherwise(query, known)


def _has_other_names(query: TextFeatures, known: TextFeatures) -> bool:
    """A name or a quotation of one that the other text does not say at all, in whatever case."""
    return not (query.names <= set(known.tokens) and known.names <= set(query.tokens)) or query.quotes != known.quotes


LONG_WORDS = 40
