"""Statistics of recent traffic: counts in Redis by minute, hour and day, and the latest requests.

Each worker sums records in memory and sends its sums to Redis once a second, one script a bucket. A
query adds the buckets of its window. Knows no SQL; the ledger, not this, defines the spend, and a
worker that is killed loses a second of statistics. Team ids and model aliases must come from the
configuration, never from a request: each is part of a hash's field. `buckets` defines the fields.

Invariant: every record counts in exactly one kind (`KINDS`) of each resolution; the hit rate is
hits / (hits + misses).
"""

import asyncio
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec

from cache.stored import reader
from gateway.accounts import HitsRow
from gateway.journey.record import PATHS, Record, flat, of_flat
from gateway.settings import NEAR_SIMILARITY_MIN
from gateway.telemetry import buckets
from gateway.telemetry.checks import CheckCounts, asked, reported
from gateway.telemetry.judge_error import RulingCounts
from gateway.telemetry.measured_error import Hour, Pair
from gateway.telemetry.summary import DeploymentTally, Summary, Sums, Window, fold_checks, fold_rulings
from policies.redis import Redis

_PREFIX = "sameway:stats:"
_ROUTES_KEY = "sameway:routes"
_NEAR_KEY = "sameway:near"
_ROUTES_MAX = 2_000
_NEAR_MAX = 1_000
_TOGETHER_MAX = 1_000  # records that are summed at once
_LATEST_PER_FLUSH = 100  # records that a worker keeps of each second, the newest ones
_UNSENT_MAX = 600  # buckets kept while Redis is away, of about three hours; drops the oldest
_READ_AHEAD = 200  # entries of a stream in one reply

_ADD = """
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
_READ = "return redis.call('HGETALL', KEYS[1])"
_DROP = """
for i = 1, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
return 1
"""
_LOG = """
for i = 2, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'r', ARGV[i]) end
return 1
"""
_LATEST = "return redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', ARGV[2])"

_encoder = msgspec.msgpack.Encoder()
_read = reader(msgspec.msgpack.Decoder(dict[str, Any]))


class _Resolution(msgspec.Struct, frozen=True):
    """Buckets of one length, each kept for `kept_s` seconds."""

    letter: str
    length_s: int
    kept_s: int

    def key(self, at_s: int) -> str:
        return f"{_PREFIX}{self.letter}:{at_s // self.length_s * self.length_s}"


_MINUTE = _Resolution("m", 60, 3 * 3_600)
_HOUR = _Resolution("h", 3_600, 9 * 86_400)
_DAY = _Resolution("d", 86_400, 62 * 86_400)
_RESOLUTIONS = (_MINUTE, _HOUR, _DAY)


class _Shape(msgspec.Struct, frozen=True):
    """The buckets of a window."""

    resolution: _Resolution
    buckets: int  # read from Redis
    per_point: int  # of them in one point of the series


_SHAPES = {
    Window.HOUR: _Shape(_MINUTE, 60, 1),
    Window.DAY: _Shape(_HOUR, 24, 1),
    Window.WEEK: _Shape(_HOUR, 168, 6),
    Window.MONTH: _Shape(_DAY, 30, 1),
}


CERTIFIED_KEY = f"{_PREFIX}certificates"
_CERTIFIED_KEPT_S = 400 * 86_400  # after the last request
_HITS = "hits"
_TRUTH_BUCKETS = 24  # hours that the measured error looks back


class Page(msgspec.Struct, frozen=True):
    """Some of the latest records, the newest first."""

    records: tuple[Record, ...]
    cursor: str | None  # of the next page; None if this is the last


def _amounts(records: Sequence[Record]) -> Iterator[tuple[str, int]]:
    """Each letter with its sum over `records`."""
    yield buckets.REQUESTS, len(records)
    for letter, read in _TALLIED:
        yield letter, round(sum(map(read, records)))
    for letter, read in _LATENCIES:
        steps = Counter(map(buckets.step, [ms for ms in map(read, records) if ms is not None]))
        yield from ((f"{letter}{step}", count) for step, count in steps.items())


_OF_RECORDS = {**buckets.TALLIED, "u": "is_baseline_unknown"}
_TALLIED = [(letter, attrgetter(PATHS[name])) for letter, name in _OF_RECORDS.items()]
_LATENCIES = (buckets.TTFT, attrgetter("times.ttft_ms")), (buckets.DURATION, attrgetter("times.duration_ms"))


class Stats:
    """This worker's counters, and queries over those of all workers. `clock` gives unix seconds."""

    def __init__(self, redis: Redis, clock: Callable[[], float]) -> None:
        self._redis = redis
        self._clock = clock
        self._records: list[Record] = []  # not in the sums yet
        self._truths = Counter[tuple[int, int, str, str, tuple[str, ...]]]()  # the same
        self._routes: deque[Record] = deque(maxlen=_LATEST_PER_FLUSH)
        self._near: deque[Record] = deque(maxlen=_LATEST_PER_FLUSH)
        self._unsent: dict[str, _Bucket] = {}
        self._hours: dict[int, Hour] = {}  # by start; past hours only
        self._hits: dict[tuple[int, int, str, str], list[int]] = {}  # by hour, team, source and alias
        self._certified = _Bucket(_CERTIFIED_KEPT_S)
        self.certificates: dict[Pair, str] = {}  # ids of the current ones; without an entry: the first, ""
        self.certified_hits: dict[Pair, int] = {}  # semantic ones since their starts, as last read

    def add(self, record: Record) -> None:
        """Count one finished request, in memory, together with others."""
        self._records.append(record)
        if len(self._records) == _TOGETHER_MAX:
            self._gather()

    def add_truth(self, team_id: int, model: str, letters: Iterable[str], certificate: str | None = None) -> str:
        """Count an event of a semantic hit by its letters (`checks`), for `certificate` or the
        current one.

        Returns the certificate that it counts for: what becomes of the event later counts there
        too.
        """
        if certificate is None:
            certificate = self.certificates.get((team_id, model), "")
        self._truths[int(self._clock()) // 60, team_id, model, certificate, tuple(letters)] += 1
        return certificate

    def add_report(self, team_id: int, model: str, is_wrong: bool) -> None:
        """Count a client's report on a semantic hit."""
        self.add_truth(team_id, model, reported(is_wrong=is_wrong))

    def add_question(self, team_id: int, model: str, cost_microusd: int) -> None:
        """Count a question to a judge model about a team's answers."""
        self._count(int(self._clock()) // 60, team_id, buckets.TRUTH, model, asked(cost_microusd))

    def add_rulings(self, judge: str, other: str, counts: RulingCounts) -> None:
        """Count pairs of answers that both judges ruled on."""
        self._count(
            int(self._clock()) // 60, "", buckets.JUDGES, f"{judge}\n{other}", buckets.amounts(buckets.RULED, counts)
        )

    async def saved(self) -> dict[int, int]:
        """What the cache has saved each team in the last 30 days, in µUSD: what its answers had
        cost when they were generated. Errors of the client pass through.
        """
        summary = await self.query(Window.MONTH)
        return {team_id: tally.avoided_microusd for team_id, tally in summary.by_team.items()}

    def _certify(self, team_id: int, certificate: str, model: str, counted: Iterable[tuple[str, int]]) -> None:
        self._certified.add(
            {buckets.field_name(letter, team_id, certificate, model): amount for letter, amount in counted}
        )

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
                *(self._send(key) for key in list(self._unsent)),
                self._send_certified(),
                self._log(_ROUTES_KEY, _ROUTES_MAX, routes),
                self._log(_NEAR_KEY, _NEAR_MAX, near),
            ]
        )

    def _gather(self) -> None:
        """Add the sums since the last call to the buckets of each resolution."""
        for (at, owner, alias, certificate, letters), count in self._truths.items():
            events = [(letter, count) for letter in letters]
            self._count(at, owner, buckets.TRUTH, alias, events)
            self._certify(owner, certificate, alias, events)
        self._truths.clear()
        records, self._records = self._records, []
        self._routes.extend(records)
        alike: dict[tuple[int, int, str, str, str, str | None], list[Record]] = {}
        deployments: dict[tuple[int, str], DeploymentTally] = defaultdict(DeploymentTally)
        for record in records:
            request, cache = record.request, record.cache
            kind = buckets.kind_of(cache.source, record.ended.status, record.ended.error)
            minute = int(request.at_s) // 60
            surface = buckets.BATCH_LINES if request.batch else request.operation
            deployment = record.answer.deployment if record.answer.attempts else None
            alike.setdefault((minute, request.team_id, kind, request.alias, surface, deployment), []).append(record)
            if kind == "miss" and cache.similarity is not None and cache.similarity >= NEAR_SIMILARITY_MIN:
                self._near.append(record)
        for (minute, team_id, kind, model, surface, deployment), some in alike.items():
            counted = dict(_amounts(some))
            if deployment is not None:
                tally = deployments[minute, deployment]
                tally.completion_tokens += counted["c"]
                tally.cost_microusd += counted["$"]
            tried = Counter([(one.name, one.verdict) for record in some for one in record.answer.attempts])
            for (name, verdict), count in tried.items():
                deployments[minute, name].ok += count * (verdict == "ok")
                deployments[minute, name].failed += count * (verdict in ("error", "denied"))
            self._count(minute, team_id, kind, model, counted.items())
            told = [(buckets.SURFACE + letter, counted[letter]) for letter in (buckets.REQUESTS, *buckets.TALLIED)]
            self._count(minute, team_id, f"{surface}/{kind}", model, told)
            if kind in buckets.HITS:
                hits = self._hits.setdefault((minute // 60, team_id, kind, model), [0, 0, 0])
                for place, letter in enumerate((buckets.REQUESTS, "u", "sv")):
                    hits[place] += counted[letter]
            if kind in buckets.ANSWERED and team_id:
                answered = [(buckets.REQUESTS, len(some))]
                answered += [(_HITS, len(some))] if kind == "semantic" else []
                self._certify(team_id, self.certificates.get((team_id, model), ""), model, answered)
        for (minute, name), tally in deployments.items():
            self._count(minute, "", buckets.DEPLOYMENT, name, buckets.amounts(buckets.TRIED, tally))
        while len(self._unsent) > _UNSENT_MAX:
            self._unsent.pop(next(iter(self._unsent)))

    def take_hits(self) -> list[HitsRow]:
        """The hits since the last call, for the ledger: by hour, team, source and alias."""
        self._gather()
        taken, self._hits = self._hits, {}
        return [
            HitsRow(
                id=secrets.token_hex(12),
                at_ms=hour * 3_600_000,
                team_id=team_id,
                alias=alias,
                source=source,
                requests=requests,
                unknown=unknown,
                baseline_microusd=baseline,
            )
            for (hour, team_id, source, alias), (requests, unknown, baseline) in taken.items()
        ]

    def _count(
        self, minute: int, team_id: int | str, kind: str, model: str, counted: Iterable[tuple[str, int]]
    ) -> None:
        fields = {buckets.field_name(letter, team_id, kind, model): amount for letter, amount in counted if amount}
        for resolution in _RESOLUTIONS:
            key = resolution.key(minute * 60)
            bucket = self._unsent.get(key)
            if bucket is None:
                bucket = self._unsent[key] = _Bucket(resolution.kept_s)
            bucket.add(fields)

    async def _send(self, key: str) -> None:
        bucket = self._unsent.pop(key)
        try:
            await self._add(key, bucket)
        except BaseException:
            self._unsent.setdefault(key, _Bucket(bucket.kept_s)).add(bucket.fields)
            raise

    async def _send_certified(self) -> None:
        """Like a bucket, but none of it is ever dropped: its parts belong together."""
        sent, self._certified = self._certified, _Bucket(_CERTIFIED_KEPT_S)
        try:
            if sent.fields:
                await self._add(CERTIFIED_KEY, sent)
        except BaseException:
            self._certified.add(sent.fields)
            raise

    async def _add(self, key: str, bucket: "_Bucket") -> None:
        arguments = [part for pair in bucket.fields.items() for part in pair]
        await self._redis.eval(_ADD, 1, key, bucket.kept_s, *arguments)

    async def drop_certified(self, over: Iterable[tuple[Pair, str]]) -> None:
        """Remove the counts of certificates that are over. Errors of the client pass through."""
        gone = set(over)
        reply = await self._redis.eval(_READ, 1, CERTIFIED_KEY)
        fields = [
            buckets.field_name(field.letter, field.team_id, field.kind, field.model)
            for field, _ in buckets.read_fields(reply)
            if ((field.team_id, field.model), field.kind) in gone
        ]
        if fields:
            await self._redis.eval(_DROP, 1, CERTIFIED_KEY, *fields)

    async def certified(self) -> dict[tuple[Pair, str], CheckCounts]:
        """The counts of all certificates, by team, alias and id.

        Errors of the client pass through.
        """
        found: dict[tuple[Pair, str], CheckCounts] = {}
        for field, amount in buckets.read_fields(await self._redis.eval(_READ, 1, CERTIFIED_KEY)):
            counts = found.setdefault(((field.team_id, field.model), field.kind), CheckCounts())
            if field.letter == buckets.REQUESTS:
                counts.requests += amount
            elif field.letter == _HITS:
                counts.hits += amount
            else:
                counts.count(field.letter, amount)
        return found

    async def _log(self, key: str, length_max: int, records: list[Record]) -> None:
        if records:
            await self._redis.eval(_LOG, 1, key, length_max, *(_encoder.encode(flat(record)) for record in records))

    async def query(self, window: Window, *, team_id: int | None = None, model: str | None = None) -> Summary:
        """The sums of the window that ends now, of one team or one model if given.

        Errors of the client pass through.
        """
        shape = _SHAPES[window]
        length_s = shape.resolution.length_s
        end = (int(self._clock()) // length_s + 1) * length_s
        start = end - shape.buckets * length_s
        starts = range(start, end, length_s)
        replies = await _abreast(self._redis.eval(_READ, 1, shape.resolution.key(at)) for at in starts)
        sums = Sums(team_id, model)
        for first in range(0, shape.buckets, shape.per_point):
            fields = chain.from_iterable(map(buckets.read_fields, replies[first : first + shape.per_point]))
            sums.add_point(starts[first], shape.per_point * length_s, fields)
        return sums.summary(window, start, end)

    async def hours(self) -> list[Hour]:
        """The last day's checks, reports and rulings, by hour, the oldest first.

        Errors of the client pass through.
        """
        now = int(self._clock()) // _HOUR.length_s * _HOUR.length_s
        starts = [now - back * _HOUR.length_s for back in reversed(range(_TRUTH_BUCKETS))]
        day: list[Hour] = []
        for at in starts:  # one at a time: a bucket may have a thousand fields, and the loop serves requests in between
            found = self._hours.get(at)
            if found is None:
                checks: dict[Pair, CheckCounts] = {}
                found = Hour(at, checks, {})
                for field, amount in buckets.read_fields(await self._redis.eval(_READ, 1, _HOUR.key(at))):
                    fold_checks(checks, field, amount)
                    fold_rulings(found.rulings, field, amount)
                if at < now - _HOUR.length_s:  # no worker counts in a past hour
                    self._hours[at] = found
            day.append(found)
        for gone in self._hours.keys() - set(starts):
            del self._hours[gone]
        return day

    def unsent(self, matches: Callable[[Record], bool]) -> Record | None:
        """The newest request that matches, among those that this worker has not sent yet."""
        self._gather()
        return next((record for record in reversed(self._routes) if matches(record)), None)

    async def routes(self, matches: Callable[[Record], bool], *, before: str = "", limit: int = 50) -> Page:
        """The latest requests that match, the newest first; `before` is the previous page's cursor."""
        return await self._latest(_ROUTES_KEY, matches, before, limit)

    async def near_misses(self, matches: Callable[[Record], bool], *, before: str = "", limit: int = 50) -> Page:
        """The latest misses with a similarity of NEAR_SIMILARITY_MIN or more, the newest first."""
        return await self._latest(_NEAR_KEY, matches, before, limit)

    async def _latest(self, key: str, matches: Callable[[Record], bool], before: str, limit: int) -> Page:
        found: list[Record] = []
        cursor = before
        while True:
            reply = await self._redis.eval(_LATEST, 1, key, f"({cursor}" if cursor else "+", _READ_AHEAD)
            for entry_id, (_, data) in reply:
                cursor = entry_id.decode()
                try:
                    record = of_flat(_read(data))
                except msgspec.DecodeError:
                    continue  # of another version
                if matches(record):
                    found.append(record)
                    if len(found) == limit:
                        return Page(tuple(found), cursor)
            if len(reply) < _READ_AHEAD:
                return Page(tuple(found), None)


async def _abreast(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results of all calls, with 32 running at once: a pool of connections is limited."""
    gate = asyncio.Semaphore(32)

    async def one(call: Awaitable[Any]) -> Any:
        async with gate:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


class _Bucket(msgspec.Struct):
    """Increments for one hash, which Redis keeps for `kept_s` seconds."""

    kept_s: int
    fields: dict[str, int] = {}

    def add(self, fields: Mapping[str, int]) -> None:
        """Add the amounts of `fields`."""
        for field, amount in fields.items():
            self.fields[field] = self.fields.get(field, 0) + amount
