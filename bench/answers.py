"""Answers to labelled requests: the label itself, or one of several free texts of it, drawn anew each time.

Knows no cache and no policy. `Pools` reads a file of lines with `label` and `answers`. `Ideal` judges by the labels, `Product` as a
gateway does: equality, then agreement of short answers, then perhaps a judge model that errs in a share of its verdicts. Invariant:
the draws follow from the seed alone, so a run can be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.labelled import Labelled
from cache.encoder.types import Encoded
from cache.verdicts import EqualityJudge, QAPair, Ruling
from cache.verdicts.judges import agree
from gateway.settings import NEAR_SIMILARITY_MIN

_OPENINGS = (
    "", "Sure. ", "Of course. ", "Happy to help. ", "Good question. ", "Here is how it works. ", "No problem. ", "Let me explain. ",
    "I can help with that. ", "Thanks for getting in touch. ", "Right. ", "Glad you asked. ",
)  # fmt: skip
_CLOSINGS = (
    "", " Hope that helps.", " Let me know if anything is unclear.", " Is there anything else?", " Just ask if you need more.",
    " I'm here if you need me.", " Does that answer your question?", " Feel free to ask more.", " Take care.",
    " Happy to explain further.", " That should do it.", " Tell me if it doesn't work.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pools:
    """The answers of each label. `is_varied`: an opening and a closing around each, so that hardly two are equal."""

    texts: Mapping[str, Sequence[str]]
    is_varied: bool = False

    def draw(self, label: str, random: random.Random) -> str:
        text = random.choice(self.texts[label])
        return random.choice(_OPENINGS) + text + random.choice(_CLOSINGS) if self.is_varied else text

    def of(self, one: Labelled) -> Labelled:
        """The requests of a set that have answers here and no dialogue before them."""
        some = tuple(request for request in one.requests if request.label in self.texts and len(request.messages) == 1)
        return Labelled(one.name, some)


def load_pools(path: Path, *, is_varied: bool = False, is_label: bool = False) -> Pools:
    """`is_label`: the answer is the label itself. Raises OSError or ValueError for anything but lines with `label` and `answers`."""
    texts: dict[str, Sequence[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row.get("answers"):
            raise ValueError(f"{path}: a line has no answers; expected an object with `label` and a list `answers`")
        texts[str(row["label"])] = (str(row["label"]),) if is_label else tuple(row["answers"])
    return Pools(texts, is_varied)


class Judging(Protocol):
    """Generates answers and compares them; None says that no judge can tell."""

    def generate(self, exact: bytes, text: str, label: str) -> None:
        """The answer of entry `exact` to the prompt `text`."""

    def teaches(self, similarity: float, *, is_audit: bool) -> bool:
        """Whether a comparison after a lookup with this similarity of the nearest prompt is one that all judges are asked about."""

    def is_same(self, fresh: bytes, cached: bytes, *, is_asked: bool) -> bool | None:
        """Whether two entries have the same answer. `is_asked`: all judges may say."""


class Ideal:
    """The labels are compared, and the result is wrong with a probability of `noise`."""

    def __init__(self, noise: float, random: random.Random) -> None:
        self._labels: dict[bytes, str] = {}
        self._noise = noise
        self._random = random

    def generate(self, exact: bytes, text: str, label: str) -> None:
        self._labels[exact] = label

    def teaches(self, similarity: float, *, is_audit: bool) -> bool:
        return True

    def is_same(self, fresh: bytes, cached: bytes, *, is_asked: bool) -> bool | None:
        return (self._labels[fresh] == self._labels[cached]) is not (self._random.random() < self._noise)


class Product:
    """The judges of a gateway. `model_noise`: the share of its verdicts in which a judge model errs; None: there is none."""

    def __init__(
        self,
        pools: Pools,
        encode: Callable[[Sequence[str]], Encoded],
        model_noise: float | None,
        random: random.Random,
    ) -> None:
        self._pools = pools
        self._encode = encode
        self._model_noise = model_noise
        self._random = random
        self._equality = EqualityJudge()
        self._answers: dict[bytes, QAPair] = {}
        self._labels: dict[bytes, str] = {}
        self._rulings: dict[tuple[str, str], Ruling] = {}

    def generate(self, exact: bytes, text: str, label: str) -> None:
        self._answers[exact] = QAPair(text, self._pools.draw(label, self._random))
        self._labels[exact] = label

    def teaches(self, similarity: float, *, is_audit: bool) -> bool:
        return self._model_noise is None or is_audit or similarity >= NEAR_SIMILARITY_MIN

    def is_same(self, fresh: bytes, cached: bytes, *, is_asked: bool) -> bool | None:
        one, other = self._answers[fresh], self._answers[cached]
        ruling = self._rulings.get((one.answer, other.answer))
        if ruling is None:
            ruling = self._rulings[one.answer, other.answer] = self._compared(one, other)
        if ruling is Ruling.UNKNOWN and self._model_noise is not None and is_asked:
            return (self._labels[fresh] == self._labels[cached]) is not (self._random.random() < self._model_noise)
        return None if ruling is Ruling.UNKNOWN else ruling is Ruling.SAME

    def _compared(self, one: QAPair, other: QAPair) -> Ruling:
        try:
            self._equality.judge(one, other).send(None)
        except StopIteration as done:  # it awaits nothing
            if done.value.ruling is not Ruling.UNKNOWN:
                return Ruling(done.value.ruling)
        return agree(one.answer, other.answer, self._encode).ruling
