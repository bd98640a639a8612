"""What a stream came to: a row of figures, and its line in a table. Knows no cache."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from bench.labelled import Request
from bench.meaning.stream import Outcome
from bench.meaning.verifier import PRICE

_REFUTED = 0.01  # a half fails if as many wrong answers are less likely than this at the bound
_PARTS = 10
_VERSION = re.compile(r"(?<=d\d\d)v\d")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. Exact repeats are counted in `exact` alone; `possible` are the other requests whose label had come before.

    `hits` by meaning and `wrong` ones among them, of these `verified` and `verified_wrong` on the verifier's word; `checks`: hits
    that were checked. `halves`: requests, hits and wrong hits of the first and the second half, `failed` how many of them refute the
    bound. `tenths`: hits in each tenth. `asked` requests had a question of the verifier, `asked_last` of the last tenth; `money` is
    what all questions cost as a share of what all requests cost without a cache; `added_s` the mean time that they added to a miss.
    `until_hit`: requests from the first possible hit to the first hit, None without one.
    """

    set: str
    policy: str
    error_max: float
    seed: int
    judge_noise: float
    verifier: str
    requests: int
    exact: int
    hits: int
    wrong: int
    possible: int
    verified: int
    verified_wrong: int
    checks: int
    halves: tuple[tuple[int, int, int], ...]
    failed: int
    tenths: tuple[int, ...]
    asked: int
    asked_last: int
    questions: int
    judge_questions: int
    money: float
    added_s: float
    until_hit: int | None
    wrong_kinds: dict[str, int]
    decision_ms_p50: float | None

    @property
    def share(self) -> float:
        """The right hits among the possible ones."""
        return (self.hits - self.wrong) / max(1, self.possible)


def counted(
    outcomes: Sequence[Outcome],
    *,
    name: str,
    policy: str,
    error_max: float,
    seed: int,
    judge_noise: float = 0.0,
    verifier: str = "",
    judge_questions: int = 0,
) -> Result:
    """The row of a stream."""
    rest = [one for one in outcomes if not one.is_exact]
    hits = [one.served is not None for one in rest]
    wrong = [one for one in rest if one.is_wrong]
    known: set[str] = set()
    possible = []
    for one in outcomes:
        if not one.is_exact:
            possible.append(one.request.label in known)
        known.add(one.request.label)
    halves = tuple(
        (len(part), sum(one.served is not None for one in part), sum(one.is_wrong for one in part))
        for part in (rest[: len(rest) - len(rest) // 2], rest[len(rest) - len(rest) // 2 :])
    )
    edges = [len(rest) * at // _PARTS for at in range(_PARTS + 1)]
    questions = sum(one.questions for one in rest)
    first_possible = next((at for at, is_possible in enumerate(possible) if is_possible), None)
    first_hit = next((at for at, is_hit in enumerate(hits) if is_hit), None)
    misses = [one for one in rest if one.served is None]
    times = [one.decision_ms for one in rest if one.decision_ms]
    return Result(
        set=name,
        policy=policy,
        error_max=error_max,
        seed=seed,
        judge_noise=judge_noise,
        verifier=verifier,
        requests=len(rest),
        exact=len(outcomes) - len(rest),
        hits=sum(hits),
        wrong=len(wrong),
        possible=sum(possible),
        verified=sum(one.is_verified for one in rest),
        verified_wrong=sum(one.is_verified for one in wrong),
        checks=sum(one.is_checked for one in rest),
        halves=halves,
        failed=sum(is_refuted(count, own_wrong, error_max) for count, _, own_wrong in halves),
        tenths=tuple(sum(hits[start:end]) for start, end in itertools.pairwise(edges)),
        asked=sum(one.questions > 0 for one in rest),
        asked_last=sum(one.questions > 0 for one in rest[edges[-2] :]),
        questions=questions,
        judge_questions=judge_questions,
        money=(questions + judge_questions) * PRICE / max(1, len(outcomes)),
        added_s=statistics.fmean(one.waited_s for one in misses) if misses else 0.0,
        until_hit=None if first_hit is None or first_possible is None else first_hit - first_possible,
        wrong_kinds=dict(Counter(kind(one.request, one.served) for one in wrong if one.served is not None)),
        decision_ms_p50=statistics.median(times) if times else None,
    )


def is_refuted(count: int, wrong: int, error_max: float) -> bool:
    """Whether so many wrong answers of `count` are less likely than 1% where their share is `error_max`: the exact binomial tail."""
    if not wrong or not count:
        return False
    log = math.log(error_max), math.log1p(-error_max)
    fewer = math.fsum(
        math.exp(
            math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * log[0] + (count - k) * log[1]
        )
        for k in range(wrong)
    )
    return 1 - fewer < _REFUTED


def kind(request: Request, served: Request) -> str:
    """In what the served request differs from the one that it was served to, by the names of a set's labels."""
    label, other = request.label, served.label
    if request.note == "moves":
        return "moves"
    if _VERSION.sub("", label) == _VERSION.sub("", other):
        return "same fact, other version" if request.note.startswith("same fact") else "other version"
    if "depends" in request.note and label.rpartition("/")[0] == other.rpartition("/")[0]:
        return "variant"
    if label[:-1] == other[:-1] and label[-1:] in "ab":
        return "other dialogue of the pair"
    return "near" if served.id and served.id == request.near else "other"


HEADINGS = (
    f"{'set':22} {'policy':11} {'verifier':13} {'bound':>6} {'noise':>5} {'seed':>4} {'requests':>8} {'hit %':>6} {'wrong %':>7} "
    f"{'possible %':>10} {'of possible':>11} {'verified %':>10} {'asked %':>7} {'last':>5} {'money %':>7} {'added s':>7} {'ms':>6}"
    "  hits by tenths"
)


def line(row: Result) -> str:
    def share(count: int) -> float:
        return 100 * count / max(1, row.requests)

    last = max(1, row.requests - row.requests * (_PARTS - 1) // _PARTS)
    sizes = [row.requests * (at + 1) // _PARTS - row.requests * at // _PARTS for at in range(_PARTS)]
    tenths = " ".join(f"{100 * hits / max(1, size):.0f}" for hits, size in zip(row.tenths, sizes, strict=True))
    ms = "" if row.decision_ms_p50 is None else f"{row.decision_ms_p50:.2f}"
    return (
        f"{row.set:22} {row.policy:11} {row.verifier or '-':13} {row.error_max:6.3f} {row.judge_noise:5.2f} {row.seed:4d} "
        f"{row.requests:8d} {share(row.hits):6.1f} {share(row.wrong):7.2f} {share(row.possible):10.1f} {100 * row.share:11.1f} "
        f"{share(row.verified):10.1f} {share(row.asked):7.1f} {100 * row.asked_last / last:5.1f} {100 * row.money:7.2f} "
        f"{row.added_s:7.2f} {ms:>6}  {tenths}"
        + (f"  {row.exact} exact" if row.exact else "")
        + (f"  {row.checks} checks" if row.checks else "")
        + (f"  first hit after {row.until_hit}" if row.until_hit is not None else "")
        + (f"  {row.judge_questions} to the judge" if row.judge_questions else "")
        + "".join(
            f"  {count} {what}"
            for what, count in sorted(row.wrong_kinds.items())
            if row.wrong_kinds != {"other": count}
        )
        + (f"  {row.failed} FAILED" if row.failed else "")
    )


def pooled(rows: Iterable[Result]) -> tuple[int, int, int, int, int]:
    """Requests, hits, wrong hits, possible hits and halves that fail, over several streams."""
    rows = list(rows)
    return (
        sum(row.requests for row in rows),
        sum(row.hits for row in rows),
        sum(row.wrong for row in rows),
        sum(row.possible for row in rows),
        sum(row.failed for row in rows),
    )
