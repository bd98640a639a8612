"""What the cache, the routes and the teams did lately: counts in Redis by minute, hour and day, and the latest routes.

Each worker adds records up in memory and hands its sums to Redis once a second, one script per bucket; a query adds the
buckets of its window up. Knows no SQL and no money that matters: the ledger is the truth about spend, this is the
overview, and a second of it is lost with a worker that is killed. Team ids and model aliases must come from the
configuration, never from a request as it came: each is a field of a hash.

A bucket is a hash: field `metric|team|kind|model` (the model last: it may hold anything), value an integer. summary.py
adds them up.

Invariant: every record is in exactly one kind (`KINDS`) of each resolution; the hit rate is hits / (hits + misses).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from gateway.journey.record import Record
from gateway.settings import NEAR_SIMILARITY_MIN
from gateway.telemetry.measured_error import Sample
from gateway.telemetry.summary import (
    SAMPLE_SCALE,
    DeploymentTally,
    Folded,
    Point,
    Summary,
    Tally,
    Window,
    fold,
    fold_deployment,
    fold_sample,
    kind_of,
    read_fields,
    step,
)
from policies.redis import Redis

_PREFIX = "sameway:stats:"
_ROUTES_KEY = "sameway:routes"
_NEAR_KEY = "sameway:near"
_ROUTES_MAX = 2_000
_NEAR_MAX = 1_000
_LATEST_PER_FLUSH = 100  # a worker's routes kept of each second; the newest win
_UNSENT_MAX = 600  # buckets held while Redis is away, about three hours of them; the oldest go first
_READ_AHEAD = 200  # entries of a stream in one reply

_ADD = """
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
_READ = "return redis.call('HGETALL', KEYS[1])"
_LOG = """
for i = 2, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'r', ARGV[i]) end
return 1
"""
_LATEST = "return redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', ARGV[2])"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class _Resolution(msgspec.Struct, frozen=True):
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
    resolution: _Resolution
    buckets: int  # read from Redis
    per_point: int  # of them in one point of the series


_SHAPES = {
    Window.HOUR: _Shape(_MINUTE, 60, 1),
    Window.DAY: _Shape(_HOUR, 24, 1),
    Window.WEEK: _Shape(_HOUR, 168, 6),
    Window.MONTH: _Shape(_DAY, 30, 1),
}


_TRUTH_BUCKETS = 24  # hours that the measured error looks back


class Page(msgspec.Struct, frozen=True):
    """Some of the latest records, the newest first."""

    records: tuple[Record, ...]
    cursor: str | None  # ask for those before it; None where there are no more


class _Sums:
    """One worker's sums of one minute, team, kind and model."""

    __slots__ = ("cached", "completion", "cost", "duration", "prompt", "requests", "saved", "saved_ms", "ttft")

    def __init__(self) -> None:
        self.requests = self.prompt = self.completion = self.cached = 0
        self.cost = self.saved = 0
        self.saved_ms = 0.0
        self.ttft: dict[int, int] = {}
        self.duration: dict[int, int] = {}

    def add(self, record: Record) -> None:
        self.requests += 1
        self.prompt += record.prompt_tokens
        self.completion += record.completion_tokens
        self.cached += record.cached_tokens
        self.cost += record.cost_microusd
        self.saved += record.saved_microusd
        self.saved_ms += record.saved_ms
        bucket = step(record.duration_ms)
        self.duration[bucket] = self.duration.get(bucket, 0) + 1
        if record.ttft_ms is not None:
            bucket = step(record.ttft_ms)
            self.ttft[bucket] = self.ttft.get(bucket, 0) + 1

    def fields(self) -> Iterable[tuple[str, int]]:
        yield from (("r", self.requests), ("p", self.prompt), ("c", self.completion), ("k", self.cached))
        yield from (("$", self.cost), ("s", self.saved), ("ms", round(self.saved_ms)))
        yield from ((f"t{bucket}", count) for bucket, count in self.ttft.items())
        yield from ((f"d{bucket}", count) for bucket, count in self.duration.items())


class Stats:
    """The counters of this worker and the queries over everyone's. `clock` is unix time in seconds."""

    def __init__(self, redis: Redis, clock: Callable[[], float]) -> None:
        self._redis = redis
        self._clock = clock
        self._sums: dict[tuple[int, int, str, str], _Sums] = {}
        self._deployments: dict[tuple[int, str], DeploymentTally] = {}
        self._routes: deque[Record] = deque(maxlen=_LATEST_PER_FLUSH)
        self._near: deque[Record] = deque(maxlen=_LATEST_PER_FLUSH)
        self._unsent: dict[str, _Bucket] = {}
        self._hours: dict[int, dict[tuple[int, str], Sample]] = {}  # by start; of those that are over

    def add(self, record: Record) -> None:
        """Counts one finished request; memory only, about 2 us."""
        kind = kind_of(record.cache, record.status, record.error)
        minute = int(record.at_s) // 60
        key = (minute, record.team_id, kind, record.alias)
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = _Sums()
        sums.add(record)
        self._routes.append(record)
        if kind == "miss" and record.similarity is not None and record.similarity >= NEAR_SIMILARITY_MIN:
            self._near.append(record)
        if record.attempts:
            self._add_attempts(record, minute)

    def _add_attempts(self, record: Record, minute: int) -> None:
        for attempt in record.attempts:
            tally = self._deployments.setdefault((minute, attempt.name), DeploymentTally())
            tally.ok += attempt.verdict == "ok"
            tally.failed += attempt.verdict == "error"
        tally = self._deployments.setdefault((minute, record.deployment), DeploymentTally())
        tally.completion_tokens += record.completion_tokens
        tally.cost_microusd += record.cost_microusd

    def add_check(self, team_id: int, model: str, is_wrong: bool, weight: float) -> None:
        """Counts a would-be hit that was compared, which stands for `weight` served ones."""
        weights = (("w", weight), ("q", weight * weight), ("x", weight * is_wrong))
        scaled = [(metric, round(amount * SAMPLE_SCALE)) for metric, amount in weights]
        self._add_truth(team_id, model, [("n", 1), ("b", int(is_wrong)), *scaled])

    def add_report(self, team_id: int, model: str, is_wrong: bool) -> None:
        """Counts what somebody said of an answer by meaning."""
        self._add_truth(team_id, model, [("fw" if is_wrong else "fr", 1)])

    def _add_truth(self, team_id: int, model: str, amounts: list[tuple[str, int]]) -> None:
        fields = [(f"{metric}|{team_id}|truth|{model}", amount) for metric, amount in amounts if amount]
        self._count(int(self._clock()) // 60, fields)

    async def flush(self) -> None:
        """Hands the sums to Redis. Raises what the client raises; what was not taken is kept for the next call.

        A call that timed out may have been taken: then its second counts twice. An overview can bear that.
        """
        self._gather()
        routes, near = list(self._routes), list(self._near)
        self._routes.clear()
        self._near.clear()
        await _abreast(
            [
                *(self._send(key) for key in list(self._unsent)),
                self._log(_ROUTES_KEY, _ROUTES_MAX, routes),
                self._log(_NEAR_KEY, _NEAR_MAX, near),
            ]
        )

    def _gather(self) -> None:
        """Moves the sums of the last second into the buckets of each resolution."""
        sums, self._sums = self._sums, {}
        deployments, self._deployments = self._deployments, {}
        for (minute, team_id, kind, model), one in sums.items():
            tail = f"{team_id}|{kind}|{model}"
            self._count(minute, [(f"{metric}|{tail}", amount) for metric, amount in one.fields() if amount])
        for (minute, name), tally in deployments.items():
            fields = (
                ("ok", tally.ok),
                ("no", tally.failed),
                ("c", tally.completion_tokens),
                ("$", tally.cost_microusd),
            )
            self._count(minute, [(f"{metric}||deployment|{name}", amount) for metric, amount in fields if amount])
        while len(self._unsent) > _UNSENT_MAX:
            self._unsent.pop(next(iter(self._unsent)))

    def _count(self, minute: int, fields: list[tuple[str, int]]) -> None:
        for resolution in _RESOLUTIONS:
            key = resolution.key(minute * 60)
            bucket = self._unsent.get(key)
            if bucket is None:
                bucket = self._unsent[key] = _Bucket(resolution.kept_s)
            for field, amount in fields:
                bucket.fields[field] = bucket.fields.get(field, 0) + amount

    async def _send(self, key: str) -> None:
        bucket = self._unsent.pop(key)
        try:
            arguments = [part for pair in bucket.fields.items() for part in pair]
            await self._redis.eval(_ADD, 1, key, bucket.kept_s, *arguments)
        except BaseException:
            late = self._unsent.setdefault(key, _Bucket(bucket.kept_s))
            for field, amount in bucket.fields.items():
                late.fields[field] = late.fields.get(field, 0) + amount
            raise

    async def _log(self, key: str, length_max: int, records: list[Record]) -> None:
        if records:
            await self._redis.eval(_LOG, 1, key, length_max, *(_encoder.encode(record) for record in records))

    async def query(self, window: Window, *, team_id: int | None = None, model: str | None = None) -> Summary:
        """Everything counted in the window that ends now, of one team or one model where asked."""
        shape = _SHAPES[window]
        length_s = shape.resolution.length_s
        end = (int(self._clock()) // length_s + 1) * length_s
        start = end - shape.buckets * length_s
        starts = range(start, end, length_s)
        replies = await _abreast(self._redis.eval(_READ, 1, shape.resolution.key(at)) for at in starts)
        total = Folded()
        by_team: dict[int, Tally] = {}
        by_model: dict[str, Tally] = {}
        by_deployment: dict[str, DeploymentTally] = {}
        samples: dict[tuple[int, str], Sample] = {}
        series: list[Point] = []
        for first in range(0, shape.buckets, shape.per_point):
            point = Folded()
            for reply in replies[first : first + shape.per_point]:
                for field, amount in read_fields(reply):
                    if field.kind == "deployment":
                        fold_deployment(by_deployment.setdefault(field.model, DeploymentTally()), field, amount)
                    elif team_id in (None, field.team_id) and model in (None, field.model):
                        fold_sample(samples, field, amount)
                        if field.kind == "truth":
                            continue
                        for folded in (total, point):
                            folded.fold(field, amount)
                        fold(by_team.setdefault(field.team_id, Tally()), field, amount)
                        fold(by_model.setdefault(field.model, Tally()), field, amount)
            series.append(point.point(starts[first], shape.per_point * length_s))
        return Summary(
            window=window,
            start_s=start,
            end_s=end,
            total=total.tally,
            by_team=by_team,
            by_model=by_model,
            by_deployment=by_deployment,
            series=tuple(series),
            ttft=total.percentiles("t"),
            duration=total.percentiles("d"),
            samples=samples,
        )

    async def samples(self) -> dict[tuple[int, str], Sample]:
        """What tells the error of answers by meaning, by team and model, of the last day. Raises what the client raises."""
        now = int(self._clock()) // _HOUR.length_s * _HOUR.length_s
        starts = [now - back * _HOUR.length_s for back in range(_TRUTH_BUCKETS)]
        total: dict[tuple[int, str], Sample] = {}
        for at in starts:  # one after the other: each may hold a thousand fields, and others want the loop in between
            found = self._hours.get(at)
            if found is None:
                found = {}
                for field, amount in read_fields(await self._redis.eval(_READ, 1, _HOUR.key(at))):
                    fold_sample(found, field, amount)
                if at < now - _HOUR.length_s:  # nobody counts in it any more
                    self._hours[at] = found
            for key, sample in found.items():
                total.setdefault(key, Sample()).add(sample)
        for gone in self._hours.keys() - set(starts):
            del self._hours[gone]
        return total

    def unsent(self, matches: Callable[[Record], bool]) -> Record | None:
        """The newest request that matches among those that only this worker knows yet."""
        return next((record for record in reversed(self._routes) if matches(record)), None)

    async def routes(self, matches: Callable[[Record], bool], *, before: str = "", limit: int = 50) -> Page:
        """The latest requests that match, the newest first; `before` is the last page's cursor."""
        return await self._latest(_ROUTES_KEY, matches, before, limit)

    async def near_misses(self, matches: Callable[[Record], bool], *, before: str = "", limit: int = 50) -> Page:
        """The latest requests that came close to a cached answer (NEAR_SIMILARITY_MIN) and did not get it, newest first."""
        return await self._latest(_NEAR_KEY, matches, before, limit)

    async def _latest(self, key: str, matches: Callable[[Record], bool], before: str, limit: int) -> Page:
        found: list[Record] = []
        cursor = before
        while True:
            reply = await self._redis.eval(_LATEST, 1, key, f"({cursor}" if cursor else "+", _READ_AHEAD)
            for entry_id, (_, data) in reply:
                cursor = entry_id.decode()
                record = _decoder.decode(data)
                if matches(record):
                    found.append(record)
                    if len(found) == limit:
                        return Page(tuple(found), cursor)
            if len(reply) < _READ_AHEAD:
                return Page(tuple(found), None)


async def _abreast(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """All calls' results, a few dozen on their way at once: a pool of connections has an end."""
    gate = asyncio.Semaphore(32)

    async def one(call: Awaitable[Any]) -> Any:
        async with gate:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


class _Bucket(msgspec.Struct):
    """Increments on their way to one hash."""

    kept_s: int
    fields: dict[str, int] = {}
