"""What is asked: each scenario's traffic, and the request bodies that make it.

Knows no system: models and headers come from the running one. Invariant: bodies depend on the scenario, the system's model
name and `salt` alone, so every system is asked the same, and no repetition is asked what an earlier one was.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.lab.native import UNIQUE
from bench.lab.systems import Setup


class Traffic(enum.Enum):
    """How requests relate to earlier ones."""

    UNIQUE = enum.auto()  # each is new
    REPEATED = enum.auto()  # each was answered before the measurement
    PARAPHRASED = enum.auto()  # each says what was answered before in other words
    RESPELLED = enum.auto()  # each is what was answered before, spelled otherwise: its words find the entry
    ZIPF = enum.auto()  # cold at first; the i-th most popular of ZIPF_BODIES is asked 1/i as often as the first


REPEATED_BODIES = 64
ZIPF_BODIES = 2_000
_ZIPF_DRAWS = 200_000
_SYSTEM_PROMPT = (
    "You are a helpful assistant of a small company. Answer briefly, in plain words, and say so when you do not know."
)
_FILLER = (
    "The quarterly report lists orders, returns and open questions of every region, and what was promised to whom. "
)
_TASKS = (
    "reset my password", "track my parcel", "cancel my subscription", "change my delivery address", "return a damaged item",
    "download my invoice", "update my credit card", "close my account", "contact customer support", "apply a discount code",
    "book a meeting room", "export my data", "enable dark mode", "invite a colleague", "restore a deleted file",
    "connect a printer", "set up a mailing list", "merge two accounts", "request a refund", "renew my passport",
    "boil an egg", "bake sourdough bread", "learn to play the guitar", "train for a marathon", "repair a flat tyre",
    "grow tomatoes indoors", "clean a cast iron pan", "remove a coffee stain", "write a cover letter", "start a podcast",
)  # fmt: skip
_ASKED, _RESPELLED = "How do I {}?", "how do I {}"
_FORMS = (
    "how can I {}?", "how would I {}?", "how should I {}?", "how could I {}?", "how might I {}?", "how do I {}, please?",
    "how may I {}?", "how exactly do I {}?", "what is the way to {}?", "how do you {}?", "how can you {}?",
)  # fmt: skip
_OPENINGS = ("", "so ", "well, ", "please, ", "please tell me, ", "tell me: ", "excuse me, ", "hello, ", "okay, ")
_CLOSINGS = ("", " Thanks.", " Thank you!", " Many thanks.", " Please help.")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way of asking. `rate_of` names a closed-loop scenario: the open loop runs at half of what that one reached."""

    name: str
    setup: Setup
    traffic: Traffic = Traffic.UNIQUE
    connections: tuple[int, ...] = (32,)
    is_stream: bool = False
    pace_ms: int = 0
    prompt_bytes: int = 200
    is_budgeted: bool = True
    rate_of: str | None = None
    is_quick: bool = False  # part of --quick
    is_direct: bool = False  # measured against the bare upstream too

    @property
    def reaches_upstream(self) -> bool:
        return self.traffic is Traffic.UNIQUE


ALL = (1, 32, 256)
SCENARIOS = (
    Scenario("miss", Setup.MISS, connections=ALL, is_quick=True, is_direct=True),
    Scenario("miss-stream", Setup.MISS, connections=ALL, is_stream=True, is_quick=True, is_direct=True),
    Scenario("miss-paced", Setup.MISS, connections=ALL, is_stream=True, pace_ms=10, is_direct=True),
    Scenario("miss-8k", Setup.MISS, prompt_bytes=8_192, is_direct=True),
    Scenario("miss-64k", Setup.MISS, prompt_bytes=65_536, is_direct=True),
    Scenario("miss-unbudgeted", Setup.MISS, is_budgeted=False),
    Scenario("miss-open", Setup.MISS, rate_of="miss"),
    Scenario("hit-memory", Setup.HIT_MEMORY, Traffic.REPEATED, connections=ALL, is_quick=True),
    Scenario("hit-memory-stream", Setup.HIT_MEMORY, Traffic.REPEATED, is_stream=True, is_quick=True),
    Scenario("hit-redis", Setup.HIT_REDIS, Traffic.REPEATED, connections=ALL, is_quick=True),
    Scenario("hit-redis-stream", Setup.HIT_REDIS, Traffic.REPEATED, is_stream=True),
    Scenario("hit-open", Setup.HIT_MEMORY, Traffic.REPEATED, rate_of="hit-memory"),
    Scenario("zipf", Setup.HIT_MEMORY, Traffic.ZIPF),
    Scenario("semantic-hit", Setup.SEMANTIC, Traffic.PARAPHRASED, connections=(1, 32), is_quick=True),
    Scenario("repeated-paraphrase", Setup.WORDS, Traffic.RESPELLED, connections=(1, 32)),
    Scenario("miss-traced", Setup.TRACED),
    Scenario("hit-traced", Setup.TRACED, Traffic.REPEATED),
    Scenario("miss-2-workers", Setup.TWO_WORKERS),
    Scenario("hit-2-workers", Setup.TWO_WORKERS, Traffic.REPEATED),
)


@dataclass(frozen=True, slots=True)
class Bodies:
    """Request bodies on disk, as the load tool reads them. `first` are asked before the measurement, where that is needed."""

    asked: Path
    first: Path | None = None
    first_count: int = 0
    order: Path | None = None


def write_bodies(scenario: Scenario, model: str, salt: str, folder: Path) -> Bodies:
    """Writes the scenario's bodies under `folder`."""
    asked = folder / f"{salt}.jsonl"
    match scenario.traffic:
        case Traffic.UNIQUE:
            texts = [_filled(f"Request {UNIQUE} of run {salt}. ", scenario.prompt_bytes)]
            return Bodies(_write(asked, scenario, model, texts))
        case Traffic.REPEATED:
            texts = [_filled(f"Question {n} of run {salt}. ", scenario.prompt_bytes) for n in range(REPEATED_BODIES)]
            _write(asked, scenario, model, texts)
            return Bodies(asked, asked, len(texts))
        case Traffic.PARAPHRASED | Traffic.RESPELLED:
            first = _write(folder / f"{salt}-first.jsonl", scenario, model, map(_ASKED.format, _TASKS))
            is_new = scenario.traffic is Traffic.PARAPHRASED
            texts = _paraphrases(salt) if is_new else list(map(_RESPELLED.format, _TASKS))
            return Bodies(_write(asked, scenario, model, texts), first, len(_TASKS))
        case Traffic.ZIPF:
            texts = [_filled(f"Topic {n} of run {salt}. ", scenario.prompt_bytes) for n in range(ZIPF_BODIES)]
            order = folder / f"{salt}.order"
            order.write_bytes(struct.pack(f"<{_ZIPF_DRAWS}I", *_zipf(salt)))
            return Bodies(_write(asked, scenario, model, texts), order=order)


def _filled(start: str, size: int) -> str:
    return start + (_FILLER * (size // len(_FILLER) + 1))[: max(0, size - len(start))]


def _paraphrases(salt: str) -> list[str]:
    """Distinct texts, in an order that `salt` shuffles: two repetitions ask them in different orders."""
    combined = itertools.product(_OPENINGS, _FORMS, _CLOSINGS, _TASKS)
    texts = [f"{opening}{form.format(task)}{closing}" for opening, form, closing, task in combined]
    texts = [text[0].upper() + text[1:] for text in texts]
    random.Random(salt).shuffle(texts)
    return texts


def _zipf(salt: str) -> Iterator[int]:
    total = list(itertools.accumulate(1.0 / rank for rank in range(1, ZIPF_BODIES + 1)))
    rng = random.Random(salt)
    return (bisect.bisect(total, rng.random() * total[-1], hi=ZIPF_BODIES - 1) for _ in range(_ZIPF_DRAWS))


def _write(path: Path, scenario: Scenario, model: str, texts: Iterator[str] | list[str] | map[str]) -> Path:
    with path.open("w") as file:
        for text in texts:
            messages = [{"role": "system", "content": _SYSTEM_PROMPT}, {"role": "user", "content": text}]
            body: dict[str, object] = {"model": model, "messages": messages, "temperature": 0.2, "max_tokens": 256}
            file.write(json.dumps({**body, "stream": True} if scenario.is_stream else body) + "\n")
    return path
