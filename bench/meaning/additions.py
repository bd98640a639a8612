"""Additions to cached questions: a question is cached, and asked again with something before or after it.

A line of the file has `kind`, `language` and `text`, in which `{}` stands for the question, and may have `{words}`: its last words
again. Of most kinds the answer to the plain question is wrong for the longer one; of the kind `courtesy` it is right. Knows no
table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.labelled import Request, request_of
from bench.meaning.stream import Traffic

FILE = Path(__file__).parent.parent / "data" / "additions.jsonl"
COURTESY = "courtesy"
_REPEATED = 3  # words


@dataclass(frozen=True, slots=True)
class Addition:
    kind: str
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class AdditionSent:
    """`is_served`: any answer was; `is_asked`: the verifier had a question; `is_reversed`: the longer request was the cached one."""

    addition: Addition
    is_reversed: bool
    is_served: bool
    is_asked: bool
    is_verified: bool


def load_additions(path: Path = FILE) -> list[Addition]:
    """Raises OSError or ValueError."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Addition(row["kind"], row["language"], row["text"]) for row in rows]


def send_additions(
    additions: Sequence[Addition], questions: Mapping[str, Sequence[str]], traffic: Traffic
) -> list[AdditionSent]:
    """Each addition with each question of its language, both ways round; a language without questions takes the English ones."""
    sent = []
    for addition in additions:
        for question in questions.get(addition.language) or questions["en"]:
            plain, longer = _request(question, "plain"), _longer(addition, question)
            for cached, other in ((plain, longer), (longer, plain)):
                traffic.store(cached)
                outcome = traffic.probe(other)
                traffic.drop(cached)
                sent.append(
                    AdditionSent(
                        addition=addition,
                        is_reversed=cached is longer,
                        is_served=outcome.served is not None,
                        is_asked=outcome.questions > 0,
                        is_verified=outcome.is_verified,
                    )
                )
    return sent


def longer_text(addition: Addition, question: str) -> str:
    last = " ".join(question.rstrip("?!. ").split()[-_REPEATED:])
    return addition.text.replace("{words}", last).replace("{}", question)


def _longer(addition: Addition, question: str) -> Request:
    is_harmless = addition.kind == COURTESY
    return _request(longer_text(addition, question), "plain" if is_harmless else "longer")


def _request(text: str, label: str) -> Request:
    return request_of({"text": text, "label": f"addition {label}"}, f"addition {text}")


def table(sent: Sequence[AdditionSent]) -> list[str]:
    """Lines of additions served the plain answer, and of the other way round, by kind and in all but courtesies."""
    lines = [
        f"{'kind':22} {'sent':>5} {'served':>7} {'verified':>8} {'asked':>6}   {'reversed: served':>16} {'asked':>6}"
    ]
    kinds = sorted({one.addition.kind for one in sent})
    groups = {kind: [one for one in sent if one.addition.kind == kind] for kind in kinds}
    groups["all but courtesies"] = [one for one in sent if one.addition.kind != COURTESY]
    for name, rows in groups.items():
        there, back = ([one for one in rows if one.is_reversed is way] for way in (False, True))
        lines.append(
            f"{name:22} {len(there):5d} {sum(one.is_served for one in there):7d} {sum(one.is_verified for one in there):8d} "
            f"{sum(one.is_asked for one in there):6d}   {sum(one.is_served for one in back):16d} {sum(one.is_asked for one in back):6d}"
        )
    return lines
