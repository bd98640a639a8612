"""The state that verdicts have made: models, the tallies of answers, and which are out of service.

Knows no keys, vectors, Redis or answers, only their names. The name of an answer is its entry's id
and its time, so an answer made anew starts anew; the name of a group of equal answers is that of
its first. Invariant: the state depends on the records and their order within a partition alone, not
on which entries are there or when they came: a rebuild and a follower agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from cache.decision.model import LearnedModel, Row
from cache.decision.rule import NamespaceCounters, NamespaceState, Rule
from cache.fingerprint import DIGEST_BYTES, Partition
from cache.verdicts.records import AnswerCleared, AnswerJudged, AnswerSuspended, VerdictRecord

_VOUCHED, _VOUCHED_PAIRS = 12, 3  # right verdicts of as many, and of how many pairs of texts in the place
_LINES_MAX = 4_096  # of a namespace; the oldest go first
_LINE_BYTES = 8  # of the digest of a differing piece, which say what both sides share
_OTHERS_MAX = 8  # models of an alias or a partition that a further namespace starts from; the latest
_LEARNED = 400  # verdicts from which on a namespace's model is one of them
_GROUPS_MAX = 20_000  # of a namespace, whose tallies are kept; the oldest go first
# namespaces with a model of their own: about 10 kB each, before their verdicts
_TALLIED_MAX = 5_000
# the cosine of prompts from which on it is of interest whether judges can tell their answers apart
_NEAR = 0.6
_SAME_QUESTION = 0.5  # the p from which on two questions count as the same one


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
    """Right and wrong verdicts by group, how many would-be hits the audits stand for, and how many
    answers to near prompts the judges called different or could not tell.
    """

    tallies: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    audited: float = 0.0
    different: float = 0.0
    unknown: float = 0.0
    unasked: float = 0.0  # of these, and a judge that costs was not asked
    # by what both sides of a differing piece share: right and wrong verdicts beside it, and what they have apart
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
        # by partition and alias, "" for all: models of namespaces that have learned, the latest at the
        # end
        self._learned: dict[bytes, dict[str, list[LearnedModel]]] = {}

    def of(self, namespace: bytes) -> NamespaceState:
        """The state of a namespace, empty where it has none yet."""
        state = self._states.get(namespace)
        if state is None:
            learned = self._learned.setdefault(namespace[:DIGEST_BYTES], {"": []})
            state = self._states[namespace] = NamespaceState(others=learned[""])
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
        # else a hit that the rule had not decided, or one that counted when no judge could tell
        if trial.chance < 1.0 and trial.features and not verdict.is_late:
            tallied.audited += 1.0 / trial.chance
            before = state.counters
            state.counters = replace(before, accepted=max(before.accepted, int(tallied.audited)))
        if verdict.is_right is not None:
            right, wrong = tallied.tallies.get(record.other, (0.0, 0.0))
            more = (verdict.weight, 0.0) if verdict.is_right else (0.0, verdict.weight)
            tallied.tallies[record.other] = (right + more[0], wrong + more[1])
            if len(tallied.tallies) > _GROUPS_MAX:
                del tallied.tallies[next(iter(tallied.tallies))]
            # a wrong answer to another question says nothing of the context
            for piece in trial.differing if verdict.is_right or trial.p >= _SAME_QUESTION else ():
                line = tallied.lines.setdefault(piece[:_LINE_BYTES], _Line())
                line.right, line.wrong = line.right + verdict.is_right, line.wrong + (not verdict.is_right)
                if len(line.pairs) < _VOUCHED_PAIRS:
                    line.pairs.add(piece[_LINE_BYTES:])
                if len(tallied.lines) > _LINES_MAX:
                    del tallied.lines[next(iter(tallied.lines))]
        if trial.features and trial.rule == self._rule_name:
            row = Row(
                trial=trial,
                is_right=verdict.is_right,
                judge_chance=verdict.judge_chance,
                flips=verdict.flips,
                is_late=verdict.is_late,
                group=record.other,
            )
            if row.similarity >= _NEAR:
                state.discernment = _discernment(tallied, row)
            known = _verdicts(state.model)
            of_alias = self._learned[record.partition].get(verdict.alias)
            state.model = self._rule.learn(row, state.model, of_alias or state.others)
            if state.model is not None and known < _LEARNED <= _verdicts(state.model):
                for alias in {"", verdict.alias}:
                    self._teach_others(record.partition, alias, state.model)
        if len(self._tallied) > _TALLIED_MAX:
            self._unlearn(next(iter(self._tallied)))

    def _teach_others(self, partition: Partition, alias: str, model: LearnedModel) -> None:
        """Further namespaces of the alias start from this model, too."""
        learned = self._learned[partition].setdefault(alias, [])
        learned.append(model)
        del learned[:-_OTHERS_MAX]

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
        for learned in self._learned[namespace[:DIGEST_BYTES]].values():
            learned[:] = [one for one in learned if one is not state.model]
        state.model, state.discernment = None, 1.0
        state.counters = NamespaceCounters(cold=state.counters.cold)
        if not state.word_counts.texts:
            del self._states[namespace]


def _verdicts(model: LearnedModel | None) -> int:
    return model.certain.verdicts if model is not None else 0


def _discernment(tallied: _GroupTallies, row: Row) -> float:
    """The share of the near answers not found equal that the judges call different, after `row`.
    An asked comparison stands for those like it that were not asked.
    """
    if row.is_late:
        tallied.unknown = max(0.0, tallied.unknown - 1)
    if row.judge_chance == 0.0:
        tallied.unasked += 1
    elif not row.is_right:
        tallied.different += row.stands_for if row.is_right is False else 0.0
        tallied.unknown += row.stands_for if row.is_right is None else 0.0
    tallied.unasked -= row.stands_for - 1
    return (tallied.different + 1) / (tallied.different + tallied.unknown + max(0.0, tallied.unasked) + 1)
