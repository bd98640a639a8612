"""Certificates: since when each team and alias counts its wrong answers, and on what ground.

A certificate starts with a team's first request for an alias. A new one starts where an admin asks,
or where the bound, the embedder, the rule or the judges have changed: what was counted before says
nothing about them. `Stats` counts; the starts are here, one field of a Redis hash each. Workers
read them every few seconds; what a worker counted for an old one in between is dropped. Invariant:
an event and what becomes of it count for the same certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from cache.stored import reader
from gateway.accounts import Team
from gateway.journey.semantic import Bounds
from gateway.loggers import get_logger
from gateway.telemetry.measured_error import CheckCounts, Pair
from gateway.telemetry.stats import Stats
from policies.redis import RedisCommands

_KEY = "sameway:certificates"
_READ = "return redis.call('HGETALL', KEYS[1])"
_REPLACE = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
_UNREADABLE = "its start could not be read"
_DROP = "return redis.call('HDEL', KEYS[1], ARGV[1])"


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


class Certificate(msgspec.Struct, frozen=True):
    """A certificate and its counts."""

    start: CertificateStart
    counts: CheckCounts


_log = get_logger()
_encoder = msgspec.msgpack.Encoder()
_read = reader(msgspec.msgpack.Decoder(CertificateStart))


class Certificates:
    """The certificates of all teams and aliases. `clock` gives unix seconds."""

    def __init__(
        self, redis: RedisCommands, stats: Stats, bounds: Bounds, judges: str, clock: Callable[[], float]
    ) -> None:
        self._redis = redis
        self._stats = stats
        self._bounds = bounds
        self._judges = judges
        self._clock = clock
        self._lost: set[Pair] = set()  # whose starts could not be read

    async def update(self, teams: Iterable[Team], embedder: str, rule: str) -> dict[Pair, Certificate]:
        """Start new certificates, drop those that are over, and return all.

        `embedder` and `rule` are empty while the cache worker is away. Errors of the client pass
        through.
        """
        known = {team.id: team for team in teams}
        counted = await self._stats.certified()  # first: whatever is counted has its start already
        starts = await self._starts()
        certificates: dict[Pair, Certificate] = {}
        for pair in dict.fromkeys([*starts, *self._lost, *(pair for pair, _ in counted)]):
            team, start = known.get(pair[0]), starts.get(pair)
            if team is None:
                await self._redis.eval(_DROP, 1, _KEY, _field(pair))
                continue
            error_max = self._bounds.error_max(team, pair[1])
            basis = Basis(error_max, self._judges, embedder, rule)
            after = self._made(basis, _UNREADABLE) if pair in self._lost else self._after(start, basis)
            if after != start and await self._replace(pair, start, after):
                if start is not None and after.id != start.id:
                    _log.info("certificate_started", team=team.name, model=pair[1], why=after.why)
                start = after
            self._lost.discard(pair)
            if start is not None:
                certificates[pair] = Certificate(start, counted.get((pair, start.id), CheckCounts()))
        self._stats.certificates = {pair: certificate.start.id for pair, certificate in certificates.items()}
        self._stats.certified_hits = {pair: certificate.counts.hits for pair, certificate in certificates.items()}
        over = [(pair, id) for pair, id in counted if pair not in certificates or certificates[pair].start.id != id]
        if over:
            await self._stats.drop_certified(over)
        return certificates

    async def read(self) -> dict[Pair, Certificate]:
        """All current certificates. Errors of the client pass through."""
        counted = await self._stats.certified()
        return {
            pair: Certificate(start, counted.get((pair, start.id), CheckCounts()))
            for pair, start in (await self._starts()).items()
        }

    async def recall(self) -> None:
        """Let this worker count for the current certificates. Errors of the client pass through."""
        self._stats.certificates = {pair: start.id for pair, start in (await self._starts()).items()}

    async def restart(self, team: Team, alias: str, why: str) -> None:
        """Start a new certificate. Errors of the client pass through."""
        pair = team.id, alias
        start = (await self._starts()).get(pair)
        basis = Basis(self._bounds.error_max(team, alias), self._judges)
        if start is not None:
            basis = msgspec.structs.replace(basis, embedder=start.basis.embedder, rule=start.basis.rule)
        after = self._made(basis, why)
        if await self._replace(pair, start, after):
            self._stats.certificates[pair] = after.id
            _log.info("certificate_started", team=team.name, model=alias, why=why)

    def _after(self, start: CertificateStart | None, basis: Basis) -> CertificateStart:
        if start is None:
            return CertificateStart("", self._clock(), basis)
        before = start.basis
        basis = msgspec.structs.replace(
            basis, embedder=basis.embedder or before.embedder, rule=basis.rule or before.rule
        )
        why = _why(before, basis)
        # what was not known yet is no change
        return self._made(basis, why) if why else msgspec.structs.replace(start, basis=basis)

    def _made(self, basis: Basis, why: str) -> CertificateStart:
        now = self._clock()
        return CertificateStart(str(int(now * 1000)), now, basis, why)

    async def _starts(self) -> dict[Pair, CertificateStart]:
        reply = await self._redis.eval(_READ, 1, _KEY)
        starts: dict[Pair, CertificateStart] = {}
        for name, data in zip(reply[::2], reply[1::2], strict=True):
            try:
                starts[_pair(name)] = _read(data)
            except (msgspec.DecodeError, ValueError):  # damaged, or of another version: a new one starts
                _log.warning("certificate_unreadable", field=name.decode(errors="backslashreplace"))
                await self._redis.eval(_DROP, 1, _KEY, name)
                self._lost.update(_pairs(name))
        return starts

    async def _replace(self, pair: Pair, before: CertificateStart | None, after: CertificateStart) -> bool:
        """Store a start. Returns False if another worker stored one before."""
        expected = _encoder.encode(before) if before is not None else b""
        return bool(await self._redis.eval(_REPLACE, 1, _KEY, _field(pair), expected, _encoder.encode(after)))


def _field(pair: Pair) -> str:
    return f"{pair[0]}:{pair[1]}"


def _pair(name: bytes) -> Pair:
    team, _, alias = name.decode().partition(":")
    return int(team), alias


def _pairs(name: bytes) -> list[Pair]:
    """The pair that a field names, if it names one."""
    try:
        return [_pair(name)]
    except ValueError:
        return []


def _why(before: Basis, now: Basis) -> str:
    """The change in words; empty if the two are equal."""
    if before.error_max != now.error_max:
        return f"the bound changed from {before.error_max:.4g} to {now.error_max:.4g}"
    for name, old, new in (
        ("embedder", before.embedder, now.embedder),
        ("rule", before.rule, now.rule),
        ("judges", before.judges, now.judges),
    ):
        if old and new and old != new:
            return f"the {name} changed from {old} to {new}"
    return ""
