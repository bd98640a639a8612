"""Guards: reasons that forbid serving the answer of one prompt to another.

Pure: takes the features of two texts, a similarity and an age, and returns a reason or None. Knows
no neighbours and no model. Invariant: two texts that commit to different numbers, names, directions
or forms differ here, however similar they are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from unicodedata import combining, normalize

from cache.decision.text_features import TextFeatures, is_cased_otherwise, is_exchanged, is_inverted, is_negated
from cache.decision.words import (
    AMOUNTS,
    APART,
    ASKED_FOR,
    ASKED_WORDS,
    ASKING_WHETHER,
    EVERYDAY,
    FORMS,
    FRAMING_WORDS,
    FUNCTION_WORDS,
    GREETINGS,
    INSTRUCTING,
    LIGHT_WORDS,
    NARROWING,
    POLITE,
)
from cache.query import MissReason

_SOFT = GREETINGS | LIGHT_WORDS
# words after "how much" that do not say of what
_AFTER_MUCH = frozenset(("", "of", "mor", "extra", "less", "to", "for", "i", "on", "in"))
_WORDINGS = 5  # prompts with one answer, which say it in several ways


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The least cosine at which a neighbour is served, by how its content words differ from the
    prompt's; the first the lowest.
    """

    same: float  # the same content words
    added: float  # one text has further content words
    changed: float  # each has content words that the other lacks


def fixed_reason(
    query: TextFeatures, known: TextFeatures, similarity: float, age_s: float, thresholds: Thresholds
) -> MissReason | None:
    """Why the fixed thresholds do not let a neighbour of at least `thresholds.same` answer; None
    where they do.
    """
    guard = difference(query, known)
    if guard is not None:
        return guard
    if is_stale(query, age_s):
        return MissReason.TIME
    return _too_different(query, known, similarity, thresholds)


def veto(query: TextFeatures, known: TextFeatures, age_s: float) -> MissReason | None:
    """The reason that no similarity and no verdict overrides, or None."""
    if _has_other_numbers(query, known):
        return MissReason.NUMBERS
    if query.codes - known.codes and known.codes - query.codes:
        return MissReason.NAMES
    if query.hidden != known.hidden or _has_other_accents(query, known):
        return MissReason.WORDS
    if is_negated(query, known):
        return MissReason.POLARITY
    if is_exchanged(query, known):
        return MissReason.DIRECTION
    is_whether = "?" in query.moods & known.moods
    if is_whether and all(one.moods - ASKED_FOR for one in (query, known)) and has_other_mood(query, known):
        return MissReason.FORM
    if _asks_further(query, known):
        return MissReason.FORM
    if is_stale(query, age_s):
        return MissReason.TIME
    if is_long(query, known) and query.tokens != known.tokens:
        return MissReason.WORDS
    return None


def _has_other_accents(query: TextFeatures, known: TextFeatures) -> bool:
    """Whether a word of each is the other's but for accents, which an encoder may leave out: "schon", "schön"."""
    mine, theirs = query.content_set - known.content_set, known.content_set - query.content_set
    if all(map(str.isascii, mine)) and all(map(str.isascii, theirs)):
        return False
    return not set(map(_unaccented, mine)).isdisjoint(map(_unaccented, theirs))


def _unaccented(word: str) -> str:
    return "".join(letter for letter in normalize("NFD", word) if not combining(letter))


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


def is_other_in_context(query: TextFeatures, known: TextFeatures) -> bool:
    """Whether two questions about one context commit to other directions, days or names of things."""
    names = (query.names - set(known.tokens), known.names - set(query.tokens))
    if not NARROWING.isdisjoint(query.scopes ^ known.scopes):
        return True
    mine, theirs = frozenset(query.tokens) - {*known.tokens}, frozenset(known.tokens) - {*query.tokens}
    if any(pair & mine and pair & theirs for pair in APART):
        return True
    is_turned = is_inverted(query, known) or _is_turned(query, known) or has_other_mood(query, known)
    return is_turned or query.times != known.times or query.dates != known.dates or all(names)


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


def is_added(
    query: TextFeatures, known: TextFeatures, context: Set[str] | None = None, renamed: Set[str] = frozenset()
) -> bool:
    """Whether one text has a content word, a clause or an order that the other lacks.

    "<question> Lie." is a question of its own, however near it is; an answer to it may harm. Words
    in which one question is put in several ways are no difference inside a sentence. In questions
    about one text, of which `context` has the content words, words of each may be other names of
    the same. But "the fake return time" is no "time to return": a foreign word is added, if it is
    not `renamed`. And of two words that the text has itself, none is another name of the other, nor
    are words that it lacks, one in the place of the other.
    """
    mine, theirs = query.content_set - known.content_set, known.content_set - query.content_set
    if context is not None and mine and theirs:
        # of texts without a common word none of several clauses is another name of one
        said = [sum(not POLITE.fullmatch(" ".join(clause)) for clause in text.clauses) for text in (query, known)]
        is_said_apart = max(said) > 1 and query.content_set.isdisjoint(known.content_set)
        foreign = foreign_words(query, known, context) | foreign_words(known, query, context)
        are_said = [not (context - EVERYDAY).isdisjoint(words) for words in (mine, theirs)]
        is_further = _has_further_clause(query, known) or _has_further_clause(known, query)
        is_other = all(are_said) or (not any(are_said) and _is_one_with_other_words(query, known))
        return not foreign <= renamed or is_other or is_said_apart or is_further
    shared = query.content_set & known.content_set
    one_sided = query.content_set ^ known.content_set
    if not shared and not query.numbers and query.tokens != known.tokens:
        return True
    for one in (query, known):
        amounts = AMOUNTS if one.question == "amount" else frozenset[str]()
        if not (one_sided & one.content_set) <= (FRAMING_WORDS - FORMS) | amounts:
            return True
    return _has_further_clause(query, known) or _has_further_clause(known, query)


def _is_one_with_other_words(query: TextFeatures, known: TextFeatures) -> bool:
    """Whether two texts are one but for words in the places of others: a soft-boiled egg, a hard-boiled egg."""
    shared = query.content_set & known.content_set
    mine, theirs = ([word if word in shared else "" for word in text.content] for text in (query, known))
    return bool(shared) and [word for word, _ in itertools.groupby(mine)] == [
        word for word, _ in itertools.groupby(theirs)
    ]


def foreign_words(query: TextFeatures, known: TextFeatures, context: Set[str]) -> frozenset[str]:
    """The words of `known` that neither the other question nor their context has, nor questions often."""
    amounts = {word for before, word in itertools.pairwise(known.tokens) if before == "how"} & AMOUNTS
    return known.content_set - query.content_set - (ASKED_WORDS - FORMS) - amounts - context


def is_vouched(query: TextFeatures, known: TextFeatures, keys: Sequence[TextFeatures], *, in_context: bool) -> bool:
    """Whether verdicts vouch for what one of two texts says and the other does not.

    `keys` are the near prompts whose answers were found equal to that of `known`, which is one of
    them. They vouch for a word or a clause of the prompt if one of them has it, and for one of
    `known` if one of them lacks it: the answer is the same with it and without. They vouch for
    other names, forms, times or another direction if one of them differs so from `known`, or does
    not from the query. Verdicts on prompts about other things vouch for nothing here. Where each
    text has words of its own, they may be other names of the same: that is for a model to say in
    questions about one context, and of words of the prompt where _WORDINGS keys lack them.
    """
    if all(_has_further_clause(query, key, 2) for key in keys):
        return False
    if all(_has_further_clause(key, query, 2) for key in keys):
        return False
    mine, theirs = _further_words(query, known), _further_words(known, query)
    if in_context and mine and theirs:
        return True
    for kind in () if in_context else _commitments(query, known):
        if not any(kind in _commitments(known, key) or kind not in _commitments(query, key) for key in keys):
            return False
    if not all(any(word not in _further_words(key, query) for key in keys) for word in theirs):
        return False
    is_renamed = bool(theirs) and len(keys) >= _WORDINGS
    return is_renamed or all(any(word not in _further_words(query, key) for key in keys) for word in mine)


def _further_words(left: TextFeatures, right: TextFeatures) -> frozenset[str]:
    """The content words that one text says more often than the other. Greetings count where they
    are a clause of their own.
    """
    said = Counter(right.content)
    alone = frozenset(clause[0] for text in (left, right) for clause in text.clauses if len(clause) == 1)
    return frozenset(
        word
        for word, count in Counter(left.content).items()
        if count > said[word] and (word in alone or word not in _SOFT)
    )


def _has_further_clause(left: TextFeatures, right: TextFeatures, words_min: int = 1) -> bool:
    said = frozenset(right.tokens)
    is_related = not left.content_set.isdisjoint(right.content_set)
    for clause in left.clauses:
        if len(clause) < words_min or clause in right.clauses or POLITE.fullmatch(" ".join(clause)):
            continue
        content = [word for word in clause if word not in FUNCTION_WORDS]
        if content:
            if is_related and said.isdisjoint(content):
                return True
            last = len(clause) - 1 - next(at for at, word in enumerate(reversed(clause)) if word in content)
            rest = clause[last + 1 :]
            if not INSTRUCTING.isdisjoint(rest) and not said.issuperset(rest) and not POLITE.fullmatch(" ".join(rest)):
                return True
            if is_related and _has_further_order(clause, said, right.content_set):
                return True
        else:
            return True
    return False


def _has_further_order(clause: Sequence[str], said: Set[str], content: Set[str]) -> bool:
    """Whether a clause gives an order that the other text lacks, after a word that the other has."""
    start = next((at for at, word in enumerate(clause) if word in content), len(clause))
    order = next((at for at in range(start, len(clause)) if clause[at] in INSTRUCTING - said), None)
    return order is not None and not POLITE.fullmatch(" ".join(clause[order:]))


def _has_other_numbers(query: TextFeatures, known: TextFeatures) -> bool:
    """Another number, unit, sign or operator, or a name that another case makes another one."""
    return query.numbers != known.numbers or query.marks != known.marks or is_cased_otherwise(query, known)


def _has_other_names(query: TextFeatures, known: TextFeatures) -> bool:
    """A name or a quotation of one that the other text does not say at all, in whatever case."""
    return not (query.names <= set(known.tokens) and known.names <= set(query.tokens)) or query.quotes != known.quotes


def _too_different(
    query: TextFeatures, known: TextFeatures, similarity: float, thresholds: Thresholds
) -> MissReason | None:
    if is_long(query, known):
        return None if query.tokens == known.tokens else MissReason.WORDS
    mine, theirs = query.content_set - known.content_set, known.content_set - query.content_set
    if _is_wordy(query, known) and not (mine | theirs) <= LIGHT_WORDS:
        return MissReason.WORDS
    if mine and theirs:
        return None if similarity >= thresholds.changed else MissReason.WORDS
    is_same = (mine | theirs) <= LIGHT_WORDS
    return None if similarity >= (thresholds.same if is_same else thresholds.added) else MissReason.FAR


def is_stale(query: TextFeatures, age_s: float) -> bool:
    """The prompt is about now, and the answer was given too long ago."""
    return bool(query.times) and age_s > FRESH_S


def _is_wordy(query: TextFeatures, known: TextFeatures) -> bool:
    """A word that differs moves a cosine by about its share of the text."""
    return max(len(query.tokens), len(known.tokens)) > QUESTION_WORDS


def is_long(query: TextFeatures, known: TextFeatures) -> bool:
    """A long template drowns the few words that differ: of such, only the very same words are
    served.
    """
    return max(len(query.tokens), len(known.tokens)) > LONG_WORDS


COLD_FIRST = 20.0
"""Hits by the cold rule that a namespace may have before others pay for them."""

COLD_WRONG = 0.25
"""Of the hits by the cold rule, at most: more than on any set with more than a few of them."""

CONTEXT_WRONG = 0.2
"""The same of questions about one context: 14% were wrong in contexts made to tempt it."""

QUESTION_WORDS = 16
LONG_WORDS = 40
FRESH_S = 600.0
"""For so long may the answer to a prompt about now be served again."""

# No fixed cosine holds a bound on every traffic. These were measured with all-MiniLM-L6-v2 on
# assistants' queries (CLINC150 and HWU64, streamed into an empty cache, wrong hits over requests):
# 0.3 and 0.5% at 25 and 15% hits; 0.1 and 0.4% at 16 and 7% hits.
_TABLE: tuple[tuple[float, Thresholds], ...] = (
    (0.01, Thresholds(same=0.80, added=0.90, changed=0.95)),
    (0.005, Thresholds(same=0.90, added=0.95, changed=0.98)),
)


def thresholds_of(error_max: float | None) -> Thresholds | None:
    """The row for an error bound: the default's where none is given, None where no row is strict
    enough.
    """
    if error_max is None:
        return _TABLE[0][1]
    return next((thresholds for bound, thresholds in _TABLE if error_max >= bound), None)
