"""What the semantic cache must show, on the sets of one folder: each goal with and without a verifier, measured, and whether it is met.

A goal without a figure is stated alone. Knows how to run nothing: it is given the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.meaning.rows import Result, pooled
from bench.meaning.trials import TrialRow

_FIRST_HIT = 20
_PARTS = {
    "longprompts": {"rag": 15, "template": 5, "system": 15, "dialogue": 15},
    "documents": dict.fromkeys(
        ("xml", "markdown", "json", "cited", "paste", "history", "table", "code", "template"), None
    ),
}
_STREAMS = {"clinc150": (65, 50), "hwu64": (50, 38), "hwu64_slots": (25, 16), "qqp_mix": (10, 6)}
_NEVER = ("numbers_asdiv", "canard_multiturn")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. `is_met` is None where the figure is only stated."""

    text: str
    is_met: bool | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    asked: str  # with a verifier; without any
    with_verifier: Cell
    without: Cell


@dataclass(frozen=True, slots=True)
class Runs:
    """The measurements that goals are made of; each takes whether there is a verifier.

    `streams` takes a set's folder and its parts (None: all, each alone; several: joined) and how many requests Zipf draws (None: each
    once); `live` does the same through a real gateway, with free answers.
    """

    streams: Callable[[bool, str, tuple[str, ...] | None, int | None], list[Result]]
    live: Callable[[bool, str, tuple[str, ...], int | None], list[Result]] | None
    pairs: Callable[[bool], list[TrialRow]]
    moving: Callable[[bool], list[TrialRow]]
    additions: Callable[[bool], list[TrialRow]]
    shift: Callable[[bool], list[Result]]
    embedding_ms: Callable[[], float]


def goals(runs: Runs) -> Iterator[Goal]:
    """One after the other, as they are measured."""
    rows: dict[bool, list[Result]] = {True: [], False: []}
    yield from _support(runs, rows)
    yield from _parts(runs, rows)
    yield from _streams(runs, rows)
    yield from _pairs(runs)
    yield from _moving(runs)
    yield from _additions(runs)
    yield from _shift(runs)
    yield _bound(rows)
    yield _time(runs, rows)


def _both(measure: Callable[[bool], Cell], name: str, asked: str) -> Goal:
    return Goal(name, asked, measure(True), measure(False))


def _support(runs: Runs, rows: dict[bool, list[Result]]) -> Iterator[Goal]:
    measure = runs.live or runs.streams
    for part, zipf in (("plain", None), ("system", None), ("plain+system", 1_500)):

        def cell(has_verifier: bool, part: str = part, zipf: int | None = zipf) -> Cell:
            own = measure(has_verifier, "support", tuple(part.split("+")), zipf)
            rows[has_verifier] += own
            share = _share(own)
            first = [row.until_hit for row in own]
            text = f"{share:.1f}%, first hit after {', '.join('none' if one is None else str(one) for one in first)}"
            if not has_verifier:
                return Cell(text)
            return Cell(text, share >= 60 and all(one is not None and one <= _FIRST_HIT for one in first))

        where = "live" if runs.live is not None else "in process"
        name = f"support/{part}, {'once' if zipf is None else f'{zipf} by Zipf'}, {where}: share of the possible"
        yield _both(cell, name, f">= 60%, first hit <= {_FIRST_HIT}; stated")


def _parts(runs: Runs, rows: dict[bool, list[Result]]) -> Iterator[Goal]:
    for folder, parts in _PARTS.items():
        measured = {has: runs.streams(has, folder, None, None) for has in (True, False)}
        for has, own in measured.items():
            rows[has] += own
        yield from (_part(measured, folder, part, least) for part, least in parts.items())


def _part(measured: dict[bool, list[Result]], folder: str, part: str, least: int | None) -> Goal:
    def cell(has_verifier: bool) -> Cell:
        share = _share([row for row in measured[has_verifier] if row.set == f"{folder}/{part}"])
        least_here = 40 if has_verifier else least
        return Cell(f"{share:.1f}%", None if least_here is None else share >= least_here)

    return _both(
        cell, f"{folder}/{part}: share of the possible", f">= 40%; {'stated' if least is None else f'>= {least}%'}"
    )


def _streams(runs: Runs, rows: dict[bool, list[Result]]) -> Iterator[Goal]:
    for name, least in _STREAMS.items():

        def cell(has_verifier: bool, name: str = name, least: tuple[int, int] = least) -> Cell:
            own = runs.streams(has_verifier, name, None, None)
            rows[has_verifier] += own
            requests, hits, wrong, _, _ = pooled(own)
            share = 100 * hits / max(1, requests)
            asked = f", last tenth asked {_last_asked(own):.0f}%" if has_verifier else ""
            text = f"{share:.1f}%, wrong {100 * wrong / max(1, requests):.2f}%{asked}"
            return Cell(text, share >= least[0 if has_verifier else 1])

        yield _both(cell, f"{name}: hits of all requests", f">= {least[0]}%; >= {least[1]}%")
    for name in _NEVER:

        def never(has_verifier: bool, name: str = name) -> Cell:
            own = runs.streams(has_verifier, name, None, None)
            rows[has_verifier] += own
            wrong = sum(row.wrong for row in own)
            return Cell(f"{wrong} of {sum(row.requests for row in own)}", wrong == 0)

        yield _both(never, f"{name}: wrong", "0; 0")


def _pairs(runs: Runs) -> Iterator[Goal]:
    measured = {has: runs.pairs(has) for has in (True, False)}
    for is_cold in (True, False):
        where = "cold" if is_cold else "beside verdicts"

        def different(has_verifier: bool, is_cold: bool = is_cold) -> Cell:
            own = [row for row in measured[has_verifier] if row.is_cold is is_cold and not row.is_harmless]
            return _harm(own, has_verifier, 0 if is_cold else 1 / 200)

        def same(has_verifier: bool, is_cold: bool = is_cold) -> Cell:
            own = [row for row in measured[has_verifier] if row.is_cold is is_cold and row.is_harmless]
            served, count = sum(row.served for row in own), sum(row.count for row in own)
            share = 100 * served / max(1, count)
            return Cell(f"{served} of {count} ({share:.0f}%)", share >= 60 if has_verifier else None)

        least = "0" if is_cold else "<= 1 in 200"
        yield _both(different, f"near pairs, {where}: different served", f"<= 3 in 100 asked; {least}")
        yield _both(same, f"near pairs, {where}: same served", ">= 60%; stated")


def _moving(runs: Runs) -> Iterator[Goal]:
    measured = {has: runs.moving(has) for has in (True, False)}

    def count(has_verifier: bool, kind: str, ages: Sequence[str]) -> tuple[int, int]:
        own = [row for row in measured[has_verifier] if row.group in {f"{kind}, {age}" for age in ages}]
        return sum(row.served for row in own), sum(row.count for row in own)

    for kind in ("moves, with a time word", "moves, without"):

        def cell(has_verifier: bool, kind: str = kind) -> Cell:
            served, of = count(has_verifier, kind, ("an hour", "a day"))
            return Cell(f"{served} of {of}", served == 0 if has_verifier or kind != "moves, without" else None)

        yield _both(cell, f"{kind}, an hour and a day old: served", "0; " + ("stated" if "out" in kind else "0"))

    def stays(has_verifier: bool) -> Cell:
        fresh, _ = count(has_verifier, "stays", ("a second",))
        aged, _ = count(has_verifier, "stays", ("a day",))
        return Cell(f"{aged} of {fresh}", aged >= 0.9 * fresh if has_verifier else None)

    yield _both(stays, "look-alikes that stay: hits a day old, of those a second old", ">= 90%; stated")


def _additions(runs: Runs) -> Iterator[Goal]:
    measured = {has: runs.additions(has) for has in (True, False)}
    for is_harmless in (False, True):
        for is_cold in (True, False):

            def cell(has_verifier: bool, is_harmless: bool = is_harmless, is_cold: bool = is_cold) -> Cell:
                own = [
                    row for row in measured[has_verifier] if row.is_cold is is_cold and row.is_harmless is is_harmless
                ]
                if is_harmless:
                    return Cell(f"{sum(row.served for row in own)} of {sum(row.count for row in own)}")
                return _harm(own, has_verifier, 0)

            where = "cold" if is_cold else "beside verdicts"
            what = "courtesies" if is_harmless else "additions"
            asked = "stated; stated" if is_harmless else "<= 3 in 100 asked; 0"
            yield _both(cell, f"{what} to cached questions, both ways, {where}: served", asked)


def _shift(runs: Runs) -> Iterator[Goal]:
    measured = {has: runs.shift(has) for has in (True, False)}

    def of(has_verifier: bool, policy: str) -> tuple[int, int, int, int, int]:
        return pooled([row for row in measured[has_verifier] if row.policy == policy])

    def other(has_verifier: bool) -> Cell:
        (requests, hits, wrong, _, _), (_, hits_alone, wrong_alone, _, _) = (
            of(has_verifier, policy) for policy in ("after other", "alone")
        )
        text = f"wrong {wrong} (alone {wrong_alone}) of {requests}, hits {hits} (alone {hits_alone})"
        return Cell(text, wrong <= max(wrong_alone, 0.01 * requests))

    def kept(has_verifier: bool) -> Cell:
        hits, alone = of(has_verifier, "later, other")[1], of(has_verifier, "later half")[1]
        return Cell(f"{hits} of {alone}", hits >= 0.9 * alone)

    yield _both(other, "another topic after the first", "wrong as if cold")
    yield _both(kept, "hits of the first topic kept", ">= 90%")


def _bound(rows: dict[bool, list[Result]]) -> Goal:
    def cell(has_verifier: bool) -> Cell:
        requests, _, wrong, _, failed = pooled(rows[has_verifier])
        over = [name for name in {_folder(row) for row in rows[has_verifier]} if _is_over(rows[has_verifier], name)]
        text = f"{100 * wrong / max(1, requests):.2f}% of all, {failed} halves fail"
        return Cell(text + (f", over 1%: {', '.join(sorted(over))}" if over else ""), not failed and not over)

    return _both(cell, "wrong, pooled over the seeds and parts of each set", "<= 1%, no half fails")


def _is_over(rows: Sequence[Result], name: str) -> bool:
    own = [row for row in rows if _folder(row) == name]
    requests, _, wrong, _, _ = pooled(own)
    return wrong > own[0].error_max * requests


def _folder(row: Result) -> str:
    """Parts are small: their wrong ones are pooled."""
    return row.set.partition("/")[0]


def _time(runs: Runs, rows: dict[bool, list[Result]]) -> Goal:
    embedding_ms = runs.embedding_ms()

    def cell(has_verifier: bool) -> Cell:
        times = [row.decision_ms_p50 for row in rows[has_verifier] if row.set in _STREAMS and row.decision_ms_p50]
        slowest = max(times, default=0.0)
        text = f"decision {slowest:.2f} ms, embedding {embedding_ms:.2f} ms"
        return Cell(text, None if has_verifier else slowest <= 0.2 * embedding_ms)

    return _both(cell, "a hit's time, slowest stream", "the verifier's + 5 ms; p50 <= 1.2 x embedding")


def _harm(rows: Sequence[TrialRow], has_verifier: bool, share: float) -> Cell:
    """Requests that were served what is wrong for them."""
    served, count, asked = (sum(getattr(row, field) for row in rows) for field in ("served", "count", "asked"))
    if not has_verifier:
        return Cell(f"{served} of {count}", served <= share * count)
    return Cell(f"{served} of {count}, {asked} asked", served <= 0.03 * asked)


def _share(rows: Sequence[Result]) -> float:
    _, hits, wrong, possible, _ = pooled(rows)
    return 100 * (hits - wrong) / max(1, possible)


def _last_asked(rows: Sequence[Result]) -> float:
    return 100 * sum(row.asked_last for row in rows) / max(1, sum(row.requests / 10 for row in rows))


def line(goal: Goal) -> str:
    def shown(cell: Cell) -> str:
        mark = "" if cell.is_met is None else "met: " if cell.is_met else "NOT MET: "
        return mark + cell.text

    return f"| {goal.name} | {goal.asked} | {shown(goal.with_verifier)} | {shown(goal.without)} |"


HEADINGS = "| goal | asked: with a verifier; without | with a verifier | without any |\n| --- | --- | --- | --- |"
