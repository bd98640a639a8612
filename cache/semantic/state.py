"""The state that verdicts have made: models, the tallies of answers, and which are out of service.

Knows no keys, vectors, Redis or answers, only their names. The name of an answer is its entry's id
and its time, so an answer made anew starts anew; the name of a group of equal answers is that of
its first. Invariant: the state depends on the records and their order within a partition alone, not
on which entries are there or when they came: a rebuild and a follower agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np

from cache.decision.features import SIMILARITY
from cache.decision.model import Row
from cache.decision.rule import NamespaceState, Rule
from cache.fingerprint import Partition
from cache.query import Trial
from cache.verdicts.records import AnswerCleared, AnswerJudged, AnswerSuspended, VerdictRecord

_VOUCHED, _VOUCHED_PAIRS = 12, 3  # right verdicts of as many, and of how many pairs of texts in the place
_LINES_MAX = 4_096  # of a namespace; the oldest go first
_WORDINGS_MAX = 50_000  # of a namespace; the oldest go first
_LINE_BYTES = 8  # of the digest of a differing piece, which say what both sides share
_SAME_QUESTION = 0.7  # the cosine from which on a wrong answer counts against the pieces that differ
_GROUPS_MAX = 20_000  # of a namespace, whose tallies are kept; the oldest go first
# namespaces with a model of their own: about 10 kB each, before their verdicts
_TALLIED_MAX = 5_000


@dataclass(slots=True)
class _Line:
    right: int = 0
    wrong: int = 0
    pairs: set[bytes] = field(default_factory=set)

    @property
    def is_vouched(self) -> bool:
        return self.right >= _VOUCHED and not self.wrong and len(self.pairs) >= _VOUCHED_PAIRS


@dataclass(slots=True)
class _GroupTallies:
    """Right and wrong verdicts by group, how many hits the checks stand for, and, by what both
    sides of a differing piece share, the verdicts beside it and what the sides have apart. `wordings`
    counts the signs that an answer is right for a wording.
    """

    tallies: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    checked: float = 0.0
    wordings: dict[bytes, int] = field(default_factory=dict)
    lines: dict[bytes, _Line] = field(default_factory=dict)


class NamespaceStates:
    """The states of all namespaces. `rule_name` names the features that `rule` learns from;
    verdicts on others are skipped.
    """

    def __init__(self, rule: Rule, rule_name: bytes) -> None:
        self._rule = rule
        self._rule_name = rule_name
        self._states: dict[bytes, NamespaceState] = {}
        self._tallied: dict[bytes, _GroupTallies] = {}
        self._suspended: dict[Partition, set[bytes]] = {}

    def of(self, namespace: bytes) -> NamespaceState:
        """The state of a namespace, empty where it has none yet."""
        state = self._states.get(namespace)
        if state is None:
            state = self._states[namespace] = NamespaceState()
        return state

    def tallies(self, namespace: bytes) -> Mapping[bytes, tuple[float, float]]:
        """Right and wrong verdicts on serving the answer of each group that had any."""
        tallied = self._tallied.get(namespace)
        return tallied.tallies if tallied is not None else {}

    def vouches(self, namespace: bytes, differing: Iterable[bytes]) -> bool:
        """Whether no answer was wrong beside any of these differing pieces, and enough were right."""
        tallied = self._tallied.get(namespace)
        lines = tallied.lines if tallied is not None else {}
        return all((line := lines.get(one[:_LINE_BYTES])) is not None and line.is_vouched for one in differing)

    def knows(self, namespace: bytes, wording: bytes) -> bool:
        """Whether two yes say that the answer of a wording is right for it: its own, and one beside it."""
        tallied = self._tallied.get(namespace)
        return tallied is not None and tallied.wordings.get(wording, 0) > 1

    def suspended(self, partition: Partition) -> Set[bytes]:
        """The names of what is out of service."""
        return self._suspended.get(partition, frozenset())

    def learn(self, record: VerdictRecord) -> None:
        """Take in one record."""
        if isinstance(record, AnswerSuspended):
            self._suspended.setdefault(record.partition, set()).add(record.name)
        elif isinstance(record, AnswerCleared):
            self._suspended.get(record.partition, set()).discard(record.name)
            if record.name.startswith(b"g"):
                self._take_back(record.partition, record.name[1:])
        else:
            self._judge(record)

    def _judge(self, record: AnswerJudged) -> None:
        verdict = record.verdict
        name, trial = record.partition + verdict.compat, verdict.trial
        state, tallied = self.of(name), self._tallied.pop(name, None) or _GroupTallies()
        self._tallied[name] = tallied  # the latest at the end
        # else a hit that the rule had not decided
        if trial.chance < 1.0 and trial.features:
            tallied.checked += 1.0 / trial.chance
            state.counters = replace(state.counters, hits=max(state.counters.hits, int(tallied.checked)))
        if verdict.is_right is not None:
            right, wrong = tallied.tallies.get(record.other, (0.0, 0.0))
            tallied.tallies[record.other] = (right + verdict.is_right, wrong + (not verdict.is_right))
            if len(tallied.tallies) > _GROUPS_MAX:
                del tallied.tallies[next(iter(tallied.tallies))]
            if verdict.is_right and verdict.wordings:
                _count_wordings(tallied.wordings, *verdict.wordings)
            if trial.differing and trial.features:
                _count_lines(tallied.lines, trial, is_right=verdict.is_right)
        if trial.features and trial.rule == self._rule_name:
            state.model = self._rule.learn(Row(trial, verdict.is_right, record.other), state.model)
        if len(self._tallied) > _TALLIED_MAX:
            self._unlearn(next(iter(self._tallied)))

    def _take_back(self, partition: Partition, group: bytes) -> None:
        """An admin cleared a group: its wrong verdicts are forgotten.

        The model keeps the row, among thousands: it is about features, and the clearing is about
        one answer.
        """
        for namespace, tallied in self._tallied.items():
            if namespace.startswith(partition) and group in tallied.tallies:
                tallied.tallies[group] = (tallied.tallies[group][0], 0.0)

    def leave(self, namespace: bytes) -> None:
        """The namespace has no keys any more: its state goes, unless verdicts have made something
        of it.
        """
        if namespace not in self._tallied:
            self._states.pop(namespace, None)

    def clear(self) -> None:
        """Forget all verdicts, before they are read anew. Words belong to the keys and stay."""
        self._suspended.clear()
        for namespace in list(self._tallied):
            self._unlearn(namespace)

    def _unlearn(self, namespace: bytes) -> None:
        del self._tallied[namespace]
        state = self._states[namespace]
        state.model, state.counters = None, replace(state.counters, hits=0)  # what was served is still to be told
        if not (state.word_counts.texts or state.counters.served):
            del self._states[namespace]


def _count_wordings(counts: dict[bytes, int], new: bytes, near: bytes = b"") -> None:
    """Count a yes for the wording that was asked about; it and the one beside it vouch for each other."""
    is_beside = near in counts
    counts[new] = counts.get(new, 0) + 1 + is_beside
    if is_beside:
        counts[near] += 1
    if len(counts) > _WORDINGS_MAX:
        del counts[next(iter(counts))]


def _count_lines(lines: dict[bytes, _Line], trial: Trial, *, is_right: bool) -> None:
    """Count a verdict for the pieces of context that differ. A wrong answer to another question says
    nothing of the context.
    """
    similarity = float(np.frombuffer(trial.features, "<f4")[SIMILARITY])
    for piece in trial.differing if is_right or similarity >= _SAME_QUESTION else ():
        line = lines.setdefault(piece[:_LINE_BYTES], _Line())
        line.right, line.wrong = line.right + is_right, line.wrong + (not is_right)
        if len(line.pairs) < _VOUCHED_PAIRS:
            line.pairs.add(piece[_LINE_BYTES:])
        if len(lines) > _LINES_MAX:
            del lines[next(iter(lines))]
