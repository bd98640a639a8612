"""Answers to labelled requests: the label itself, or one of several free texts of it, drawn anew each time.

Knows no cache and no policy. `Pools` reads a file of lines with `label` and `answers`. `Ideal` judges by the labels, `Product` as a
gateway does: equality, the judge of prose, then perhaps a judge model that errs in a share of its
replies, through the gateway's own code. Invariant: the draws follow from the seed alone, so a run can be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.labelled import Labelled
from cache import Trial
from cache.encoder.types import Encoded
from cache.verdicts import Judgement, QAPair, Ruling, equal
from cache.verdicts.prose import Answers, Sketch, sketch
from gateway.learning.comparisons import LIKELY
from gateway.learning.verifier import NO_ANSWER, Verifier, second_opinion

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
        """The requests of a set that have answers here and no dialogue before them, but for a system prompt."""
        some = tuple(
            request
            for request in one.requests
            if request.label in self.texts and all(turn["role"] == "system" for turn in request.messages[:-1])
        )
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

    questions: int  # to a judge model, till now

    def begin(self, trial: Trial) -> None:
        """The comparisons of this trial follow."""

    def is_same(self, fresh: bytes, cached: bytes) -> bool | None:
        """Whether two entries have the same answer."""


class Ideal:
    """The labels are compared, and the result is wrong with a probability of `noise`."""

    questions = 0

    def __init__(self, noise: float, random: random.Random) -> None:
        self._labels: dict[bytes, str] = {}
        self._noise = noise
        self._random = random

    def generate(self, exact: bytes, text: str, label: str) -> None:
        self._labels[exact] = label

    def begin(self, trial: Trial) -> None:
        """Nothing to draw."""

    def is_same(self, fresh: bytes, cached: bytes) -> bool | None:
        return (self._labels[fresh] == self._labels[cached]) is not (self._random.random() < self._noise)


class Product:
    """The judges of a gateway. `model_noise`: the share of its replies in which a judge model errs; None: there is none.

    `is_steadfast`: it errs about a pair of answers in both orders or in none.
    """

    def __init__(
        self,
        pools: Pools,
        encode: Callable[[Sequence[str]], Encoded],
        model_noise: float | None,
        random: random.Random,
        *,
        is_steadfast: bool = False,
    ) -> None:
        self._pools = pools
        self._encode = encode
        self._model_noise = model_noise
        self._random = random
        self._answers: dict[bytes, QAPair] = {}
        self._owners: dict[str, str] = {}
        self._errs: dict[frozenset[str], bool] | None = {} if is_steadfast else None
        self._judge = Verifier("model", self._reply) if model_noise is not None else None
        self._trial: Trial | None = None
        self._said: dict[bytes, Judgement] = {}  # of the judges without a model, on the answers of a trial
        self.questions = 0
        self._prose = Answers()
        self._sketches: dict[bytes, Sketch] = {}

    def generate(self, exact: bytes, text: str, label: str) -> None:
        made = QAPair(text, self._pools.draw(label, self._random))
        self._owners[made.answer] = label
        self.keep(exact, made)

    def keep(self, exact: bytes, made: QAPair) -> None:
        """Entry `exact` has this answer to this prompt."""
        self._answers[exact] = made
        self._sketches[exact] = sketch(made.answer, self._encode)
        self._prose.add(exact, self._encode([made.prompt]).vectors[0], self._sketches[exact])

    def begin(self, trial: Trial) -> None:
        self._trial = trial

    def is_same(self, fresh: bytes, cached: bytes) -> bool | None:
        one, other = self._answers[fresh], self._answers[cached]
        trial, self._trial = self._trial, None
        if trial is not None:  # all of a trial at once, as a gateway does
            ranked = trial.ranked or (cached,)
            self._said = {exact: equal(one.answer, self._answers[exact].answer) for exact in ranked}
            left = [exact for exact in ranked if self._said[exact].ruling is Ruling.UNKNOWN]
            prose = self._prose.judge(self._sketches[fresh], fresh, left)
            self._said.update(zip(left, prose, strict=True))
        ruling = self._said[cached].ruling
        if ruling is Ruling.UNKNOWN and self._judge is not None:
            ruling = self._asked(one, other, trial)
        return None if ruling is Ruling.UNKNOWN else ruling is Ruling.SAME

    def _asked(self, one: QAPair, other: QAPair, trial: Trial | None) -> Ruling:
        """What the judge model says; of the first comparison of a trial with a second opinion, as a gateway asks for it."""
        assert self._judge is not None
        judgement = _run(self._judge.judge(one, other))
        if judgement.why == NO_ANSWER:
            return Ruling.UNKNOWN
        if trial is not None and judgement.ruling is not Ruling.SAME and trial.p >= LIKELY and trial.peers:
            peers = [self._answers[peer] for peer in trial.peers]
            judgement = _run(second_opinion(self._judge, judgement, one, peers))
        return Ruling(judgement.ruling)

    async def _reply(self, body: dict[str, Any]) -> bytes:
        """The judge model's reply to one question."""
        self.questions += 1
        told = json.loads(body["messages"][-1]["content"])
        one, other = told["answer_a"], told["answer_b"]
        is_wrong = self._random.random() < (self._model_noise or 0.0)
        if self._errs is not None:
            is_wrong = self._errs.setdefault(frozenset((one, other)), is_wrong)
        word = "SAME" if (self._owners[one] == self._owners[other]) is not is_wrong else "DIFFERENT"
        return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": word}}]}).encode()


@dataclass(frozen=True, slots=True)
class PairsJudged:
    """Rulings on annotated pairs: `same` of `count` are the same; errors are among the `ruled`."""

    name: str
    count: int
    same: int
    ruled: int
    false_same: int
    false_different: int


_PAIR = Trial(())


def judge_pairs(path: Path, encode: Callable[[Sequence[str]], Encoded]) -> list[PairsJudged]:
    """The rulings of the judges without a model on pairs of answers, all of them in one namespace.

    A line has `id`, prompts `a` and `b`, answers `a1`, `a2`, `b1`, and two annotations of (a1, b1) and of (a1, a2); pairs on which
    these differ are left out. Odd ids, for choosing, are apart from even ones. Raises OSError or ValueError.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    product = Product(Pools({}), encode, None, random.Random(0))
    for row in rows:
        for field in ("a1", "a2", "b1"):
            product.keep(f"{row['id']} {field}".encode(), QAPair(row[field[0]], row[field]))
    found = []
    for fields in ("a1_b1", "a1_a2"):
        for parity in (1, 0):
            some = [row for row in rows if int(row["id"][1:]) % 2 == parity and row[fields] == row[f"{fields}_second"]]
            one, other = fields.split("_")
            rulings = []
            for row in some:
                product.begin(_PAIR)
                ruling = product.is_same(f"{row['id']} {other}".encode(), f"{row['id']} {one}".encode())
                rulings.append((row[fields] == "same", ruling))
            found.append(
                PairsJudged(
                    name=f"{one}, {other}, {'odd' if parity else 'even'}",
                    count=len(rulings),
                    same=sum(truth for truth, _ in rulings),
                    ruled=sum(ruling is not None for _, ruling in rulings),
                    false_same=rulings.count((False, True)),
                    false_different=rulings.count((True, False)),
                )
            )
    return found


def _run(work: Coroutine[Any, Any, Judgement]) -> Judgement:
    """The result of what awaits nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        found: Judgement = done.value
        return found
    raise RuntimeError("it awaits something")
