"""The trials of the semantic cache that are no stream: pairs, a shift of topic, additions, questions that move with time.

Each prints its table and returns its figures. Knows no flags.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bench.labelled import Labelled, Request
from bench.meaning import additions as added
from bench.meaning import moving, pairs
from bench.meaning.rows import Result, counted, line
from bench.meaning.shift import labels_apart, shift
from bench.meaning.stream import Traffic
from bench.meaning.vectors import Recall
from bench.meaning.verifier import PlayedVerifier

_QUESTIONS = 3
_LANGUAGES = {"German": "de", "Spanish": "es", "French": "fr"}


class TrialRow(msgspec.Struct, frozen=True, kw_only=True):
    """Of `count` requests to which the stored answer was wrong (`is_harmless`: right) so many were served, of these so many on the
    verifier's word; so many were asked about."""

    trial: str
    group: str
    is_cold: bool
    is_harmless: bool
    count: int
    served: int
    verified: int
    asked: int


class Trials:
    """`traffic` makes a cache with a judge and without a verifier, for a seed; `verifier` makes a verifier, or None."""

    def __init__(
        self,
        embedder: Recall,
        traffic: Callable[[int], Traffic],
        verifier: Callable[[int], PlayedVerifier | None],
        show: Callable[[str], None],
    ) -> None:
        self._embedder = embedder
        self._traffic = traffic
        self._verifier = verifier
        self._show = show

    def pairs(
        self, rows: Sequence[dict[str, Any]], beside: Sequence[Request], verdicts: int, seed: int = 0
    ) -> list[TrialRow]:
        """Each pair alone, cold and beside so many verdicts that came of other requests."""
        self._embedder.want(pairs.texts_of(rows))
        found: list[TrialRow] = []
        for is_cold, traffic in self._caches(beside, verdicts, seed):
            sent = pairs.send_pairs(rows, traffic)
            for by in ("part", "language", "kind"):
                for text in pairs.table(sent, by):
                    self._show(text)
            for is_same in (False, True):
                own = [one for one in sent if one.is_same is is_same and one.part != "long"]
                found.append(
                    TrialRow(
                        trial="pairs",
                        group="same" if is_same else "different",
                        is_cold=is_cold,
                        is_harmless=is_same,
                        count=len(own),
                        served=sum(one.is_served for one in own),
                        verified=sum(one.is_verified for one in own),
                        asked=sum(one.candidates > 0 for one in own),
                    )
                )
        return found

    def additions(
        self, questions: Mapping[str, Sequence[str]], beside: Sequence[Request], verdicts: int, seed: int = 0
    ) -> list[TrialRow]:
        """Each addition with each question, cold and beside so many verdicts."""
        kinds = added.load_additions()
        self._embedder.want(added.longer_text(one, each) for one in kinds for each in questions["en"])
        found: list[TrialRow] = []
        for is_cold, traffic in self._caches(beside, verdicts, seed):
            sent = added.send_additions(kinds, questions, traffic)
            for text in added.table(sent):
                self._show(text)
            for is_reversed in (False, True):
                for is_harmless in (False, True):
                    own = [
                        one
                        for one in sent
                        if one.is_reversed is is_reversed and (one.addition.kind == added.COURTESY) is is_harmless
                    ]
                    group = ("courtesies" if is_harmless else "additions") + (", reversed" if is_reversed else "")
                    found.append(
                        TrialRow(
                            trial="additions",
                            group=group,
                            is_cold=is_cold,
                            is_harmless=is_harmless,
                            count=len(own),
                            served=sum(one.is_served for one in own),
                            verified=sum(one.is_verified for one in own),
                            asked=sum(one.is_asked for one in own),
                        )
                    )
        return found

    def moving(self, requests: Sequence[Request], beside: Sequence[Request], seed: int = 0) -> list[TrialRow]:
        """Questions asked again after a time, cold and beside the verdicts on other requests of their writer."""
        found = []
        for is_cold, traffic in self._caches(beside, len(beside), seed):
            for row in moving.ask_again(requests, traffic):
                self._show(f"{row.age:10} {row.kind:24} {row.count:4d} {row.served:4d} served")
                is_right = row.kind == "stays" or row.age == "a second"
                found.append(
                    TrialRow(
                        trial="moving",
                        group=f"{row.kind}, {row.age}",
                        is_cold=is_cold,
                        is_harmless=is_right,
                        count=row.count,
                        served=row.served,
                        verified=0,
                        asked=0,
                    )
                )
        return found

    def shift(self, first: Labelled, second: Labelled, count: int, seed: int, error_max: float) -> list[Result]:
        """The second topic alone and after the first; the later half of the first without and with the second between."""

        def traffic() -> Traffic:
            made = self._traffic(seed)
            made.verifier = self._verifier(seed)
            return made

        requests = [labels_apart(one).shuffled(seed, many) for one, many in ((first, 2 * count), (second, count))]
        for own in requests:
            self._embedder.want(request.query.text for request in own)
        made = shift(requests[0], requests[1], traffic)
        rows = []
        for policy, name, outcomes in (
            ("alone", second.name, made.alone),
            ("after other", second.name, made.after),
            ("later half", first.name, made.kept_alone),
            ("later, other", first.name, made.kept),
        ):
            rows.append(counted(outcomes, name=name, policy=policy, error_max=error_max, seed=seed))
            self._show(line(rows[-1]))
        return rows

    def _caches(self, beside: Sequence[Request], verdicts: int, seed: int) -> list[tuple[bool, Traffic]]:
        """A cold cache, and one with verdicts; a verifier comes only now, and is not asked for them."""
        self._embedder.want(request.query.text for request in beside)
        cold, warm = self._traffic(seed), self._traffic(seed)
        count = pairs.warm(warm, beside, verdicts)
        for traffic in (cold, warm):
            traffic.verifier = self._verifier(seed)
        self._show(f"cold, and beside {count} verdicts:")
        return [(True, cold), (False, warm)]


def questions_of(sets: Sequence[Labelled], seed: int) -> dict[str, list[str]]:
    """Some questions of each language; of the first set in English."""
    draw = random.Random(seed)
    found = {"en": [one.query.text for one in draw.sample(list(sets[0].requests), _QUESTIONS)]}
    for note, language in _LANGUAGES.items():
        texts = [request.query.text for one in sets for request in one.requests if request.note == note]
        if len(texts) >= _QUESTIONS:
            found[language] = draw.sample(texts, _QUESTIONS)
    return found
