"""Pairs of near requests, each alone: the answer of one is cached, and the other is asked.

A line has `id`, `a`, `b`, `same` (the same answer is right for both), `part`, `kind` and `language`. The cache is cold, or has seen
so many verdicts on another topic in the same namespace. Nothing is learned from a pair. Knows no table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.labelled import Request, request_of
from bench.meaning.stream import Traffic


@dataclass(frozen=True, slots=True)
class PairSent:
    """What became of a pair. `candidates`: how many answers the verifier was asked about; `is_served`: any answer was served;
    `is_other`: it was not the pair's own."""

    part: str
    kind: str
    language: str
    is_same: bool
    candidates: int
    is_served: bool
    is_other: bool
    is_verified: bool


def load_pairs(path: Path) -> list[dict[str, Any]]:
    """Raises OSError or ValueError."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return rows


def texts_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [row[side] for row in rows for side in ("a", "b")]


def send_pairs(rows: Sequence[dict[str, Any]], traffic: Traffic) -> list[PairSent]:
    """Each pair in an order of its own name: its first text is cached, the second one asked."""
    found = []
    for row in rows:
        first, second = (_request(row, side) for side in ("a", "b"))
        traffic.store(first)
        outcome = traffic.probe(second)
        traffic.drop(first)
        found.append(
            PairSent(
                part=row["part"],
                kind=row["kind"],
                language=row["language"],
                is_same=row["same"],
                candidates=outcome.candidates if outcome.questions else 0,
                is_served=outcome.served is not None,
                is_other=outcome.served is not None and outcome.served.exact != first.exact,
                is_verified=outcome.is_verified,
            )
        )
    return found


def _request(row: dict[str, Any], side: str) -> Request:
    label = row["id"] if row["same"] else f"{row['id']} {side}"
    return request_of({"text": row[side], "label": label, "id": row["id"]}, f"pair {row['id']} {side}")


def warm(traffic: Traffic, requests: Iterable[Request], verdicts: int) -> int:
    """Stream requests until so many verdicts have come of their answers; how many have."""
    for request in requests:
        if traffic.verdicts >= verdicts:
            break
        traffic.send(request)
    return traffic.verdicts


def table(found: Sequence[PairSent], by: str) -> list[str]:
    """Lines of different and same pairs served, by `part`, `kind` or `language`."""
    lines = [
        f"{by:18} {'different':>9} {'served':>7} {'verified':>8} {'asked':>6}   {'same':>5} {'served':>7} {'%':>5} {'asked':>6}"
    ]
    for name in sorted({getattr(one, by) for one in found}):
        rows = [one for one in found if getattr(one, by) == name]
        different, same = [one for one in rows if not one.is_same], [one for one in rows if one.is_same]
        served = sum(one.is_served for one in same)
        lines.append(
            f"{name:18} {len(different):9d} {sum(one.is_served for one in different):7d} "
            f"{sum(one.is_verified for one in different):8d} {sum(one.candidates > 0 for one in different):6d}   "
            f"{len(same):5d} {served:7d} {100 * served / max(1, len(same)):5.1f} {sum(one.candidates > 0 for one in same):6d}"
        )
    return lines
