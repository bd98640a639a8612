"""Statistics of recent traffic: counts in Redis by minute, hour and day, and the latest requests.

Each worker sums records in memory, once for each minute, and sends its sums to Redis twice a second:
one script adds them to the minute, its hour and its day. A query adds the buckets of its window.
Knows no SQL; the ledger, not this, defines the spend, and a worker that is killed loses a second of
statistics. Team ids and model aliases must come from the configuration, never from a request: each
is part of a hash's field. `buckets` defines the fields.

Invariant: every record counts in exactly one kind (`KINDS`) of each resolution; the hit rate is
hits / (hits + misses).
"""

import asyncio
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from cache.stored import reader
from gateway.accounts import HitsRow
from gateway.accounts.row import CHECKING
from gateway.journey.record import PATHS, Record, VerifierFacts, flat, of_flat
from gateway.settings import NEAR_SIMILARITY_MIN
from gateway.telemetry import buckets
from gateway.telemetry.measured_error import CheckCounts, CheckedPeriod, Pair
from gateway.telemetry.summary import StatsWindow, Summary, WindowSums
from policies.redis import RedisCommands

# one Redis slot, as a script adds to a minute, an hour and a day
_PREFIX = "sameway:{stats}:"
_ROUTES_KEY = "sameway:routes"
_NEAR_KEY = "sameway:near"
_ROUTES_MAX = 2_000
_NEAR_MAX = 1_000
_TOGETHER_MAX = 1_000  # records that are summed at once
_LATEST_PER_FLUSH = 100  # records that a worker keeps of each half second, the newest ones
_PARTS_MAX = 2_000  # sums of hits of a team by their labels until the ledger has them; further ones are by key
_UNSENT_MAX = 180  # minutes kept while Redis is away; drops the oldest
_READ_AHEAD = 200  # entries of a stream in one reply

# KEYS: hashes. ARGV: for each the seconds that it is kept, then fields and amounts that are added to all.
_ADD = """
for number, key in ipairs(KEYS) do
  for i = #KEYS + 1, #ARGV, 2 do redis.call('HINCRBY', key, ARGV[i], ARGV[i + 1]) end
  redis.call('EXPIRE', key, ARGV[number])
end
return 1
"""
_READ = "return redis.call('HGETALL', KEYS[1])"
_LOG = """
for i = 2, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'r', ARGV[i]) end
return 1
"""
_LATEST = "return redis.call('XREVRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])"

_encoder = msgspec.msgpack.Encoder()
_read = reader(msgspec.msgpack.Decoder(dict[str, Any]))


_HitsLabels = tuple[int, int, str, str]
_PartLabels = tuple[int, str, str, str]


class _Bucket(NamedTuple):
    """A hash of counts, which Redis keeps for `kept_s` seconds after its last change."""

    key: str
    kept_s: int


class _Resolution(msgspec.Struct, frozen=True):
    """Buckets of one length."""

    letter: str
    length_s: int
    kept_s: int

    def bucket(self, at_s: int) -> _Bucket:
        return _Bucket(f"{_PREFIX}{self.letter}:{at_s // self.length_s * self.length_s}", self.kept_s)


_MINUTE = _Resolution("m", 60, 3 * 3_600)
_HOUR = _Resolution("h", 3_600, 9 * 86_400)
_DAY = _Resolution("d", 86_400, 62 * 86_400)


@lru_cache(16)
def _buckets_of(minute: int) -> tuple[_Bucket, ...]:
    return tuple([resolution.bucket(minute * 60) for resolution in (_MINUTE, _HOUR, _DAY)])


class _WindowShape(msgspec.Struct, frozen=True):
    """The buckets of a window."""

    resolution: _Resolution
    buckets: int  # read from Redis
    per_point: int  # of them in one point of the series


_SHAPES = {
    StatsWindow.HOUR: _WindowShape(_MINUTE, 60, 1),
    StatsWindow.DAY: _WindowShape(_HOUR, 24, 1),
    StatsWindow.WEEK: _WindowShape(_HOUR, 168, 6),
    StatsWindow.MONTH: _WindowShape(_DAY, 30, 1),
}


CERTIFIED_KEY = f"{_PREFIX}certificates"
_CERTIFIED = (_Bucket(CERTIFIED_KEY, 400 * 86_400),)
_CHECKED_HOURS = 24  # that the measured error looks back


class Page(msgspec.Struct, frozen=True):
    """Some of the latest records, the newest first. `newest` is the place of the newest of all, those
    that do not match included; empty without any.
    """

    records: tuple[Record, ...]
    cursor: str | None  # of the next page; None if this is the last
    newest: str


def _reader(name: str) -> Callable[[Record], Any]:
    """A reader of a record's field by the name that it has outside this process."""
    return attrgetter(PATHS[name])


# the sums of records, by the counts of `Tally`
_SUMMED = {
    "prompt_tokens": _reader("prompt_tokens"),
    "completion_tokens": _reader("completion_tokens"),
    "cached_tokens": _reader("cached_tokens"),
    "cost_microusd": _reader("cost_microusd"),
    "avoided_microusd": _reader("avoided_microusd"),
    "saved_microusd": _reader("saved_microusd"),
    "uncompared": _reader("is_baseline_unknown"),
    "saved_ms": _reader("saved_ms"),
}
_LATENCIES: dict[str, Callable[[Record], float | None]] = {
    buckets.TTFT: _reader("ttft_ms"),
    buckets.DURATION: _reader("duration_ms"),
    buckets.VERIFIED: lambda record: record.verifier.verify_ms or None,  # no wait where it only observes
}
_UNVERIFIED = VerifierFacts()
_OF_DEPLOYMENTS = ("completion_tokens", "cost_microusd")
_TRIED = {"ok": "ok", "error": "failed", "denied": "failed"}  # the counts of `DeploymentTally`, by an attempt's verdict
_LABELS = ("team_id", "cache", "status", "error", "alias", "batch", "route", "deployment")
_labels_of = attrgetter(*[PATHS[name] for name in _LABELS])
_hit_of = attrgetter("request", "money")


def _sums_of(kind: str, records: Sequence[Record]) -> dict[str, int]:
    """The counts of records of one kind."""
    sums = {name: round(sum(map(read, records))) for name, read in _SUMMED.items()}
    sums[buckets.REQUESTS] = len(records)
    if kind in buckets.HITS:
        sums["saved_completion_tokens"] = sums.pop("completion_tokens")
        sums["saved_tokens"] = sums.pop("prompt_tokens") + sums["saved_completion_tokens"]
    for record in records:
        if record.verifier != _UNVERIFIED:
            for name, amount in _verified(record).items():
                sums[name] = sums.get(name, 0) + amount
    for latency, read in _LATENCIES.items():
        steps = Counter(map(buckets.step, [ms for ms in map(read, records) if ms is not None]))
        sums.update({f"{latency}:{step}": count for step, count in steps.items()})
    return sums


def _verified(record: Record) -> dict[str, int]:
    """What a request adds to the counts of its verifier."""
    facts, is_hit = record.verifier, record.cache.source == "semantic"
    is_said = facts.verdict in ("yes", "remembered")
    return {
        "asked_requests": facts.verdict not in ("", "remembered"),
        "confirmed_requests": facts.verdict == "yes",
        "verified_hits": is_hit and is_said,
        "verified_saved_microusd": record.money.saved_microusd if is_hit and is_said else 0,
        "would_hits": facts.would_serve != "",
        "would_saved_microusd": facts.would_save_microusd,
    }


class Stats:
    """This worker's counters, and queries over those of all workers. `clock` gives unix seconds."""

    def __init__(self, redis: RedisCommands, clock: Callable[[], float]) -> None:
        self._redis = redis
        self._clock = clock
        self._records: list[Record] = []  # not in the sums yet
        self._routes: deque[Record] = deque(maxlen=_LATEST_PER_FLUSH)
        self._near: deque[Record] = deque(maxlen=_LATEST_PER_FLUSH)
        # the counts by field, by the buckets that they are added to
        self._unsent = defaultdict[tuple[_Bucket, ...], Counter[str]](Counter)
        self._hours: dict[int, CheckedPeriod] = {}  # by start; past hours only
        # by hour, team, source and alias, then by key, user, tags and session: the hits, those without a baseline, the baselines
        self._hits = defaultdict[_HitsLabels, dict[_PartLabels, list[int]]](dict)
        self.certificates: dict[Pair, str] = {}  # ids of the current ones; without an entry: the first, ""

    def add(self, record: Record) -> None:
        """Count one finished request, in memory, together with others."""
        self._records.append(record)
        if len(self._records) == _TOGETHER_MAX:
            self._gather()

    def add_checks(self, team_id: int, model: str, events: Iterable[str]) -> None:
        """Count events of hits by meaning, checks or reports (`measured_error`), for the current certificate."""
        certificate, counts = self.certificates.get((team_id, model), ""), dict.fromkeys(events, 1)
        self._count(self._now(), counts, team_id, buckets.CHECKS, model)
        self._count(_CERTIFIED, counts, team_id, certificate, model)

    def add_question(self, team_id: int, model: str, cost_microusd: int) -> None:
        """Count a question to a verifier about answers for a team's requests."""
        counts = {"questions": 1, "judging_microusd": cost_microusd}
        self._count(self._now(), counts, team_id, buckets.CHECKS, model)

    async def saved(self) -> dict[int, int]:
        """The µUSD that the cache saved each team in the last 30 days: the cost of its answers when
        they were generated. Errors of the client pass through.
        """
        summary = await self.query(StatsWindow.MONTH)
        return {team_id: tally.avoided_microusd for team_id, tally in summary.by_team.items()}

    async def flush(self) -> None:
        """Send the sums to Redis. Errors of the client pass through; unsent sums stay for the next
        call.

        A call that timed out may have succeeded, and then counts twice. Statistics tolerate that.
        """
        self._gather()
        routes, near = list(self._routes), list(self._near)
        self._routes.clear()
        self._near.clear()
        await _abreast(
            [
                *map(self._send, list(self._unsent)),
                self._log(_ROUTES_KEY, _ROUTES_MAX, routes),
                self._log(_NEAR_KEY, _NEAR_MAX, near),
            ]
        )

    def _gather(self) -> None:
        """Add the records since the last call to the sums."""
        records, self._records = self._records, []
        self._routes.extend(records)
        self._near.extend([record for record in records if record.cache.similarity is not None and _is_near(record)])
        alike = defaultdict[tuple[int, tuple[Any, ...]], list[Record]](list)
        for record in records:
            alike[int(record.request.at_s) // 60, _labels_of(record)].append(record)
        for (minute, labels), group in alike.items():
            team_id, cache, status, error, model, batch, route, deployment = labels
            # a question that failed is no request of a client that did
            kind = "bypass" if route in CHECKING else buckets.kind_of(cache, status, error)
            sums, minute_buckets = _sums_of(kind, group), _buckets_of(minute)
            self._count(minute_buckets, sums, team_id, kind, model, buckets.BATCH_LINES if batch else route)
            if kind in buckets.HITS:
                self._add_hits(self._hits[minute // 60, team_id, kind, model], group)
            else:
                self._count_deployments(minute_buckets, deployment, kind, group, sums)
            if kind in buckets.ANSWERED and team_id and route not in CHECKING:
                certificate = self.certificates.get((team_id, model), "")
                counts = {"requests": len(group), "hits": len(group) if kind == "semantic" else 0}
                self._count(_CERTIFIED, counts, team_id, certificate, model)
        minutes = [key for key in self._unsent if key is not _CERTIFIED]
        for oldest in minutes[: max(0, len(minutes) - _UNSENT_MAX)]:
            del self._unsent[oldest]

    def _add_hits(self, parts: dict[_PartLabels, list[int]], hits: Sequence[Record]) -> None:
        for request, money in map(_hit_of, hits):
            labels = (request.key_id, request.user, request.tags, request.session)
            sums = parts.get(labels)
            if sums is None:
                sums = parts.setdefault(labels if len(parts) < _PARTS_MAX else (request.key_id, "", "", ""), [0, 0, 0])
            sums[0] += 1
            sums[1] += money.is_baseline_unknown
            sums[2] += money.saved_microusd

    def _count_deployments(
        self,
        minute_buckets: tuple[_Bucket, ...],
        deployment: str,
        kind: str,
        group: Sequence[Record],
        sums: Mapping[str, int],
    ) -> None:
        """Count the attempts of a group, whose sums are `sums`."""
        tried = [record for record in group if record.answer.attempts]
        if len(tried) < len(group):
            sums = _sums_of(kind, tried)
        counts = {name: sums[name] for name in _OF_DEPLOYMENTS}
        self._count(minute_buckets, counts, "", buckets.DEPLOYMENT, deployment)
        for (name, verdict), count in Counter(
            [(a.name, a.verdict) for one in tried for a in one.answer.attempts]
        ).items():
            if verdict in _TRIED:
                self._count(minute_buckets, {_TRIED[verdict]: count}, "", buckets.DEPLOYMENT, name)

    def take_hits(self) -> list[HitsRow]:
        """The hits since the last call, for the ledger."""
        self._gather()
        taken = list(self._hits.items())
        self._hits.clear()
        return [
            HitsRow(
                id=secrets.token_hex(12), at_ms=hour * 3_600_000, team_id=team_id, key_id=key_id, alias=alias, source=source,
                user=user, tags=tags, session=session, requests=requests, unknown=unknown, baseline_microusd=saved,
            )
            for (hour, team_id, source, alias), parts in taken
            for (key_id, user, tags, session), (requests, unknown, saved) in parts.items()
        ]  # fmt: skip

    def _now(self) -> tuple[_Bucket, ...]:
        """The buckets of this minute."""
        return _buckets_of(int(self._clock()) // 60)

    def _count(
        self,
        into: tuple[_Bucket, ...],
        counts: Mapping[str, int],
        team_id: int | str,
        kind: str,
        model: str,
        surface: str = "",
    ) -> None:
        unsent = self._unsent[into]
        for name, amount in counts.items():
            if amount:
                unsent[buckets.field_name(name, team_id, kind, surface, model)] += amount

    async def _send(self, to: tuple[_Bucket, ...]) -> None:
        counts = self._unsent.pop(to)
        keys, kept_s = zip(*to, strict=True)
        try:
            if counts:
                await self._redis.eval(_ADD, len(to), *keys, *kept_s, *chain.from_iterable(counts.items()))
        except BaseException:
            self._unsent[to].update(counts)
            raise

    async def drop_certified(self, over: Iterable[tuple[Pair, str]]) -> None:
        """Remove the counts of certificates that are over. Errors of the client pass through."""
        gone = set(over)
        fields = [
            buckets.field_name(field.count, field.team_id, field.kind, field.surface, field.model)
            for field, _ in buckets.read_fields(await self._redis.eval(_READ, 1, CERTIFIED_KEY))
            if ((field.team_id, field.model), field.kind) in gone
        ]
        if fields:
            await self._redis.execute_command("HDEL", CERTIFIED_KEY, *fields)

    async def certified(self) -> dict[tuple[Pair, str], CheckCounts]:
        """The counts of all certificates, by team, alias and id.

        Errors of the client pass through.
        """
        certified = defaultdict[tuple[Pair, str], CheckCounts](CheckCounts)
        for field, amount in buckets.read_fields(await self._redis.eval(_READ, 1, CERTIFIED_KEY)):
            certified[(field.team_id, field.model), field.kind].count(field.count, amount)
        return certified

    async def _log(self, key: str, length_max: int, records: list[Record]) -> None:
        if records:
            await self._redis.eval(_LOG, 1, key, length_max, *(_encoder.encode(flat(record)) for record in records))

    async def query(self, window: StatsWindow, *, team_id: int | None = None, model: str | None = None) -> Summary:
        """The sums of the window that ends now, of one team or one model if given.

        Errors of the client pass through.
        """
        shape = _SHAPES[window]
        length_s = shape.resolution.length_s
        end = (int(self._clock()) // length_s + 1) * length_s
        start = end - shape.buckets * length_s
        starts = range(start, end, length_s)
        replies = await _abreast(self._redis.eval(_READ, 1, shape.resolution.bucket(at).key) for at in starts)
        sums = WindowSums(team_id, model)
        for first in range(0, shape.buckets, shape.per_point):
            fields = chain.from_iterable(map(buckets.read_fields, replies[first : first + shape.per_point]))
            sums.add_point(starts[first], shape.per_point * length_s, fields)
        return sums.summary(window, start, end)

    async def hours(self) -> list[CheckedPeriod]:
        """The last day's checks and reports, by hour, the oldest first.

        Errors of the client pass through.
        """
        length_s = _HOUR.length_s
        now = int(self._clock()) // length_s * length_s
        starts = range(now - (_CHECKED_HOURS - 1) * length_s, now + 1, length_s)
        day: dict[int, CheckedPeriod] = {}
        for (
            start
        ) in starts:  # one at a time: a bucket may have a thousand fields, and the loop serves requests in between
            day[start] = self._hours.get(start) or CheckedPeriod(start)
            if start not in self._hours:
                for field, amount in buckets.read_fields(await self._redis.eval(_READ, 1, _HOUR.bucket(start).key)):
                    day[start].add(field, amount)
        # no worker counts in an hour before the last
        self._hours = {start: hour for start, hour in day.items() if start < now - length_s}
        return list(day.values())

    def unsent(self, matches: Callable[[Record], bool]) -> Record | None:
        """The newest request that matches, among those that this worker has not sent yet."""
        self._gather()
        return next((record for record in reversed(self._routes) if matches(record)), None)

    async def routes(
        self, matches: Callable[[Record], bool], *, before: str = "", after: str = "", limit: int = 50
    ) -> Page:
        """The latest requests that match, the newest first; `before` is the previous page's cursor,
        `after` an earlier page's `newest`.
        """
        return await self._latest(_ROUTES_KEY, matches, before, limit, after)

    async def near_misses(self, matches: Callable[[Record], bool], *, before: str = "", limit: int = 50) -> Page:
        """The latest misses with a similarity of NEAR_SIMILARITY_MIN or more, the newest first."""
        return await self._latest(_NEAR_KEY, matches, before, limit)

    async def _latest(
        self, key: str, matches: Callable[[Record], bool], before: str, limit: int, after: str = ""
    ) -> Page:
        records: list[Record] = []
        cursor, newest, oldest = before, after, f"({after}" if after else "-"
        while True:
            reply = await self._redis.eval(_LATEST, 1, key, f"({cursor}" if cursor else "+", oldest, _READ_AHEAD)
            if reply and not cursor:
                newest = reply[0][0].decode()
            for entry_id, (_, data) in reply:
                cursor = entry_id.decode()
                try:
                    record = of_flat(_read(data))
                except msgspec.DecodeError:
                    continue  # of another version
                if matches(record):
                    records.append(record)
                    if len(records) == limit:
                        return Page(tuple(records), cursor, newest)
            if len(reply) < _READ_AHEAD:
                return Page(tuple(records), None, newest)


def _is_near(record: Record) -> bool:
    """True for a miss with a similar entry."""
    cache = record.cache
    return (cache.similarity or 0.0) >= NEAR_SIMILARITY_MIN and cache.source == "miss" and record.ended.status < 400


async def _abreast(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results of all calls, with 32 running at once: a pool of connections is limited."""
    gate = asyncio.Semaphore(32)

    async def one(call: Awaitable[Any]) -> Any:
        async with gate:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))
