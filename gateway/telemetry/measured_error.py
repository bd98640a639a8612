"""How often answers by meaning are wrong: checks, one interval from them, and what follows from it.

**Checks.** Of the hits a share s is drawn by chance (`gateway.learning.checks`), before anything is
known of the answer. A drawn one is served, its request is generated beside it, and judges compare the
two answers. A check counts when it ends, by its s: right, wrong, or open where no judge could tell.
Workers and hosts add their counts in any order.

**Interval.** A check has the weight w = s^-0.6: between equal weights, which say most while the share
of wrong hits stays as it is, and 1 / s, the hits that it stands for. The checks say as much as
n = (sum of w)² / (sum of w²) equal ones, of which x = n · (sum of w of the wrong ones) / (sum of w)
are wrong (Kish, 1965; Korn and Graubard, 1998). If a share p of the hits is wrong, then for any odds
ratio r

    r^x / (1 - p + r p)^n

is a likelihood ratio, whose expectation is 1 after each check. So is the mean over a few r, and it
ever passes 1 / α with probability α at most, however often one looks (Ville, 1939; Robbins, 1970;
Waudby-Smith and Ramdas, 2023). The p at which it has passed are excluded: with r below 1 those above
the upper limit, with r above 1 those below the lower one. An open check counts as wrong at the upper
limit and as right at the lower one (Manski, 1990). With unequal weights n and x are approximations;
`tests/telemetry/test_measured_error.py` simulates that the interval has the truth in 95% of streams
at every moment, also where the share doubles later.

**Certificates.** An interval starts with a team's first request for an alias. A new one starts where
an admin asks, or where the bound, the embedder, the rule or the judges change: what was counted
before says nothing about them. `Stats` counts; the starts are fields of a Redis hash.

**Tightening.** Where the lower limit of the last day is above the bound, only a stricter bound serves
until it is not. Invariants: a bound only tightens, to the least of the gateway's, the team's, the
alias's and the request's; workers that see the same counts decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cache.stored import reader
from gateway.accounts import Team
from gateway.journey.semantic import Bounds
from gateway.loggers import get_logger
from gateway.telemetry import buckets
from policies.redis import RedisCommands

Pair = tuple[int, str]
"""A team's id and an alias."""

UPPER_MISSED, LOWER_MISSED = 0.048, 0.002  # the probability that a limit ever fails; together 5%
_BELOW = ((0.25, 0.9), (0.5, 0.1))  # odds ratios and their weights
_ABOVE = ((2.0, 0.25), (5.0, 0.25), (20.0, 0.25), (100.0, 0.25))
_STEPS = 24
_STRICTNESS_MIN, _STRICTNESS_MAX = 0.05, 0.5
_PER_MILLE = 1_000
_WEIGHT = 0.6
_VERIFIED, _JUDGE = "verified_", "judge"


class Cell(msgspec.Struct):
    """The checks that were drawn with one share."""

    right: int = 0
    wrong: int = 0
    open: int = 0

    @property
    def all(self) -> int:
        return self.right + self.wrong + self.open


class CheckCounts(msgspec.Struct):
    """Counts of one team and alias over some time. The keys of cells are shares in thousandths."""

    requests: int = 0  # answered, from the cache or not; identical ones in flight count once
    hits: int = 0  # semantic ones
    verified_hits: int = 0  # those that a verifier allowed
    cells: dict[int, Cell] = {}
    verified: dict[int, Cell] = {}  # of `cells`, the checks of what a verifier had allowed
    judges: dict[str, int] = {}  # checks by the judge that settled them
    reported_wrong: int = 0
    reported_right: int = 0
    questions: int = 0  # to a judge model about its answers
    judging_microusd: int = 0

    def add(self, other: CheckCounts) -> None:
        """Add `other` to this."""
        for name in self.__struct_fields__:
            if isinstance(amount := getattr(other, name), int):
                setattr(self, name, getattr(self, name) + amount)
        for mine, theirs in ((self.cells, other.cells), (self.verified, other.verified)):
            for share, cell in theirs.items():
                for name in Cell.__struct_fields__:
                    buckets.add(mine.setdefault(share, Cell()), name, getattr(cell, name))
        for judge, count in other.judges.items():
            self.judges[judge] = self.judges.get(judge, 0) + count

    def count(self, name: str, amount: int = 1) -> None:
        """Add an event's amount; unknown names are ignored."""
        name, _, detail = name.partition(":")
        if name == _JUDGE:
            self.judges[detail] = self.judges.get(detail, 0) + amount
        elif not detail:
            buckets.add(self, name, amount)
        elif detail.isdecimal() and 0 < int(detail) <= _PER_MILLE:
            cells = self.verified if name.startswith(_VERIFIED) else self.cells
            buckets.add(cells.setdefault(int(detail), Cell()), name.removeprefix(_VERIFIED), amount)

    @property
    def of_verifier(self) -> CheckCounts:
        """What a verifier allowed, alone."""
        return CheckCounts(self.requests, self.verified_hits, self.verified_hits, self.verified, self.verified)

    @property
    def checks(self) -> int:
        return sum(cell.all for cell in self.cells.values())

    @property
    def wrong(self) -> int:
        return sum(cell.wrong for cell in self.cells.values())

    @property
    def open(self) -> int:
        return sum(cell.open for cell in self.cells.values())

    @property
    def is_empty(self) -> bool:
        """True before the first semantic hit, check or report of a wrong answer."""
        return not (self.hits or self.reported_wrong or self.cells)


def checked(share: float, is_right: bool | None, judge: str, *, is_verified: bool) -> tuple[str, ...]:
    """The events of a check that ended; `is_right` is None where no judge could tell."""
    event = f"{'open' if is_right is None else 'right' if is_right else 'wrong'}:{max(1, round(share * _PER_MILLE))}"
    settled = () if is_right is None else (f"{_JUDGE}:{judge.replace('|', '/')}",)
    return (event, f"{_VERIFIED}{event}", *settled) if is_verified else (event, *settled)


def reported(*, is_wrong: bool) -> tuple[str, ...]:
    """The events of a report on a hit."""
    return ("reported_wrong" if is_wrong else "reported_right",)


class Measured(msgspec.Struct, frozen=True):
    """The share of all requests that a semantic hit answered wrongly, with its interval.

    `estimate` is None before the first check or report, and while more checks are open than settled.
    It is never 0: half a wrong one is added to those that were found (Jeffreys).
    """

    estimate: float | None
    low: float
    high: float


def measure(counts: CheckCounts, judge_error: float = 0.0) -> Measured:
    """The interval, of all requests. Judges may err in a share of `judge_error` of their verdicts, on
    right answers and on wrong ones. Reports are certain, and only raise.
    """
    if not counts.requests:
        return Measured(None, 0.0, 1.0)
    hit_share = min(1.0, counts.hits / counts.requests)
    count, wrong, open_ = _effective(counts.cells)
    reports = min(1.0, counts.reported_wrong / counts.requests)
    low = hit_share * _limit(max(0.0, wrong - judge_error * count), count, _ABOVE, LOWER_MISSED)
    low = max(low, _limit(counts.reported_wrong, counts.requests, _ABOVE, LOWER_MISSED))
    high = min(1.0, _limit(wrong + open_, count, _BELOW, UPPER_MISSED) / (1.0 - judge_error)) * hit_share
    # decision: reports-only-raise
    estimate, settled = reports or None, count - open_
    if settled > open_:
        estimate = max(reports, low, min(high, hit_share * (wrong + 0.5) / (settled + 1.0)))
    return Measured(estimate, low, max(low, reports, high))


def _effective(cells: Mapping[int, Cell]) -> tuple[float, float, float]:
    """How many equal checks the weighted ones are worth, and how many of these are wrong and open."""
    weighed = [((_PER_MILLE / share) ** _WEIGHT, cell) for share, cell in cells.items() if cell.all]
    total = sum(weight * cell.all for weight, cell in weighed)
    if not total:
        return 0.0, 0.0, 0.0
    scale = total / sum(weight * weight * cell.all for weight, cell in weighed)
    wrong, open_ = (scale * sum(weight * getattr(cell, name) for weight, cell in weighed) for name in ("wrong", "open"))
    return scale * total, wrong, open_


def _limit(wrong: float, count: float, ratios: Sequence[tuple[float, float]], missed: float) -> float:
    """The share next to `wrong` / `count` that is excluded: above it with ratios below 1, below it with
    others; without one 1, or 0.
    """
    estimate, end = (wrong / count if count else 0.0), float(ratios is _BELOW)

    def is_excluded(share: float) -> bool:
        bets = [
            math.log(weight) + wrong * math.log(ratio) - count * math.log1p((ratio - 1.0) * share)
            for ratio, weight in ratios
        ]
        top = max(bets)
        return top + math.log(sum(math.exp(bet - top) for bet in bets)) >= -math.log(missed)

    if not count or not is_excluded(end):
        return end
    inside, outside = estimate, end
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if is_excluded(middle) else (middle, outside)
    return outside


class CheckedPeriod(msgspec.Struct):
    """The checks and reports of some time, and the requests that they stand for."""

    start_s: int
    counts: dict[Pair, CheckCounts] = {}

    def add(self, field: buckets.Field, amount: int) -> None:
        """Add one field of the statistics, if it is of an answer, a check or a report."""
        is_answer = field.count == buckets.REQUESTS and field.kind in buckets.ANSWERED
        if is_answer or field.kind == buckets.CHECKS:
            counts = self.counts.setdefault((field.team_id, field.model), CheckCounts())
            counts.count(field.count, amount)
            if is_answer and field.kind == "semantic":
                counts.hits += amount


@dataclass(frozen=True, slots=True)
class LiveError:
    """The measured error of one team and alias over a day, and its bound, which is multiplied with
    `strictness`: below 1 where it has tightened itself.
    """

    pair: Pair
    team: str
    measured: Measured
    error_max: float
    strictness: float

    @property
    def alias(self) -> str:
        return self.pair[1]


class MeasuredErrors:
    """This worker's measured errors of all teams and aliases; updates the strictness in `bounds`.

    Judges may err in a share of `judge_error`.
    """

    def __init__(self, bounds: Bounds, judge_error: float = 0.0) -> None:
        self.bounds = bounds
        self.judge_error = judge_error
        self.live: tuple[LiveError, ...] = ()

    def measure(self, counts: CheckCounts) -> Measured:
        """`measure`, with this gateway's judges."""
        return measure(counts, self.judge_error)

    def update(
        self, hours: Sequence[CheckedPeriod], teams: Iterable[Team], certificates: Mapping[Pair, Certificate]
    ) -> list[LiveError]:
        """Measure again from the hours of the last day. Of a certificate that is younger, its own counts
        are taken. Returns the errors whose bound has begun to be tightened, or no longer is.
        """
        names, before, live = {team.id: team for team in teams}, set(self.bounds.strictness), list[LiveError]()
        for pair in dict.fromkeys(pair for hour in hours for pair in hour.counts):
            team, day, certificate = names.get(pair[0]), CheckCounts(), certificates.get(pair)
            for hour in hours:
                day.add(hour.counts.get(pair, CheckCounts()))
            if certificate is not None and certificate.start.since_s > hours[0].start_s:
                day = certificate.counts
            if team is None or day.is_empty:
                continue
            measured, error_max, strictness = self.measure(day), self.bounds.error_max(team, pair[1]), 1.0
            if measured.low > error_max:
                share = error_max / (measured.estimate or measured.low)
                strictness = min(_STRICTNESS_MAX, max(_STRICTNESS_MIN, share))
            live.append(LiveError(pair, team.name, measured, error_max, strictness))
        self.live = tuple(live)
        self.bounds.strictness.clear()
        self.bounds.strictness.update({error.pair: error.strictness for error in live if error.strictness < 1.0})
        return [error for error in live if (error.pair in before) != (error.strictness < 1.0)]


_KEY = "sameway:certificates"
_READ = "return redis.call('HGETALL', KEYS[1])"
_REPLACE = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
_DROP = "return redis.call('HDEL', KEYS[1], ARGV[1])"
_log = get_logger()


class Basis(msgspec.Struct, frozen=True):
    """The bound, the judges, the embedder and the rule that a certificate holds for. The embedder
    and the rule are empty while the cache worker is away.
    """

    error_max: float
    judges: str
    embedder: str = ""
    rule: str = ""


class CertificateStart(msgspec.Struct, frozen=True):
    """The start of a certificate. `why` says what ended the certificate before; it is empty for the
    first.
    """

    id: str
    since_s: float
    basis: Basis
    why: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its counts."""

    start: CertificateStart
    counts: CheckCounts


_encoder = msgspec.msgpack.Encoder()
_read = reader(msgspec.msgpack.Decoder(CertificateStart))


class CertifiedCounts(Protocol):
    """What counts for certificates: `certificates` has the ids of those that it counts for."""

    certificates: dict[Pair, str]

    async def certified(self) -> dict[tuple[Pair, str], CheckCounts]:
        """The counts of all, by team, alias and id."""

    async def drop_certified(self, over: Iterable[tuple[Pair, str]]) -> None:
        """Remove the counts of those that are over."""


class Certificates:
    """The certificates of all teams and aliases. `clock` gives unix seconds. Errors of the Redis
    client pass through all methods.
    """

    def __init__(
        self, redis: RedisCommands, stats: CertifiedCounts, bounds: Bounds, judges: str, clock: Callable[[], float]
    ) -> None:
        self._redis = redis
        self._stats = stats
        self._bounds = bounds
        self.judges = judges
        self._clock = clock

    async def update(self, teams: Iterable[Team], embedder: str, rule: str) -> dict[Pair, Certificate]:
        """Start new certificates, drop those that are over, and return all.

        `embedder` and `rule` are empty while the cache worker is away.
        """
        known, starts = {team.id: team for team in teams}, dict[Pair, CertificateStart]()
        counted = await self._stats.certified()  # first: whatever is counted has its start already
        stored = await self._stored()
        for pair in dict.fromkeys([*stored, *(pair for pair, _ in counted)]):
            team, data = known.get(pair[0]), stored.get(pair, b"")
            if team is None:
                await self._redis.eval(_DROP, 1, _KEY, _field(pair))
                continue
            basis = Basis(self._bounds.error_max(team, pair[1]), self.judges, embedder, rule)
            before = _decoded(data)
            start = self._after(before, basis, is_first=not data)
            if start == before or await self._replace(pair, data, start):
                starts[pair] = start
                if start.why and (before is None or start.id != before.id):
                    _log.info("certificate_started", team=team.name, model=pair[1], why=start.why)
            elif before is not None:  # another worker was first
                starts[pair] = before
        self._stats.certificates = {pair: start.id for pair, start in starts.items()}
        if over := [(pair, id) for pair, id in counted if pair not in starts or starts[pair].id != id]:
            await self._stats.drop_certified(over)
        return {
            pair: Certificate(start, counted.get((pair, start.id), CheckCounts())) for pair, start in starts.items()
        }

    async def read(self) -> dict[Pair, Certificate]:
        """All current certificates."""
        counted = await self._stats.certified()
        starts = {pair: _decoded(data) for pair, data in (await self._stored()).items()}
        return {
            pair: Certificate(start, counted.get((pair, start.id), CheckCounts()))
            for pair, start in starts.items()
            if start is not None
        }

    async def recall(self) -> None:
        """Let this worker count for the current certificates."""
        self._stats.certificates = {pair: one.start.id for pair, one in (await self.read()).items()}

    async def restart(self, team: Team, alias: str, why: str) -> None:
        """Start a new certificate."""
        data = (await self._stored()).get((team.id, alias), b"")
        before, basis = _decoded(data), Basis(self._bounds.error_max(team, alias), self.judges)
        if before is not None:
            basis = msgspec.structs.replace(basis, embedder=before.basis.embedder, rule=before.basis.rule)
        after = self._made(basis, why)
        if await self._replace((team.id, alias), data, after):
            self._stats.certificates[team.id, alias] = after.id
            _log.info("certificate_started", team=team.name, model=alias, why=why)

    def _after(self, before: CertificateStart | None, basis: Basis, *, is_first: bool) -> CertificateStart:
        if before is None:
            made = self._made(basis, "its start could not be read")
            return CertificateStart("", made.since_s, basis) if is_first else made
        # what is not known now is no change
        known = {name: value for name, value in msgspec.structs.asdict(basis).items() if value != ""}
        changed = [name for name, value in known.items() if getattr(before.basis, name) not in ("", value)]
        now = msgspec.structs.replace(before.basis, **known)
        if not changed:
            return msgspec.structs.replace(before, basis=now)
        name = changed[0]
        what = {"error_max": "bound"}.get(name, name)
        return self._made(now, f"the {what} changed from {getattr(before.basis, name)} to {getattr(now, name)}")

    def _made(self, basis: Basis, why: str) -> CertificateStart:
        now = self._clock()
        return CertificateStart(str(int(now * 1000)), now, basis, why)

    async def _stored(self) -> dict[Pair, bytes]:
        """The stored starts. A field that names no team and alias is dropped."""
        reply, stored = await self._redis.eval(_READ, 1, _KEY), dict[Pair, bytes]()
        for name, data in zip(reply[::2], reply[1::2], strict=True):
            team, _, alias = name.decode(errors="replace").partition(":")
            if team.isdecimal():
                stored[int(team), alias] = data
            else:
                _log.warning("certificate_unreadable", field=name.decode(errors="backslashreplace"))
                await self._redis.eval(_DROP, 1, _KEY, name)
        return stored

    async def _replace(self, pair: Pair, before: bytes, after: CertificateStart) -> bool:
        """Store a start. Returns False if another worker stored one before."""
        return bool(await self._redis.eval(_REPLACE, 1, _KEY, _field(pair), before, _encoder.encode(after)))


def _field(pair: Pair) -> str:
    return f"{pair[0]}:{pair[1]}"


def _decoded(data: bytes) -> CertificateStart | None:
    """The start; None where it can't be read: it is damaged, or of another version."""
    try:
        return _read(data) if data else None
    except msgspec.DecodeError:
        return None
