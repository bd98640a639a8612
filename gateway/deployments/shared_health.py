"""One state of health of each deployment for all workers and hosts, in Redis.

    sameway:{health}:D            string  the state, as JSON: sums of the estimate, the breakers
    sameway:{health}:D:probe:B:N  string  a probe of breaker B in state N has begun

D is a digest of the deployment's name, address, model, headers and keys, so that another
configuration begins anew, and another key in a file. The digest of a deployment that only one host
reaches includes that host.

An exchange sends a worker's observations since the last exchange and returns the sums of all
workers; it is one script, in the background. Estimates are sums under exponential forgetting, which
add up in any order. A breaker's state has a number: a worker that opens or closes it writes the
next number, and the first of two simultaneous writes counts.

Knows no requests. Invariants: times in Redis are Redis' own, and workers get durations; a value
that no worker wrote is replaced; without Redis a worker goes on alone.
"""

import asyncio
import random
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from urllib.parse import urlsplit

import msgspec
from redis.exceptions import RedisError

from cache.redis_link import RedisLink
from gateway.deployments.deployment import Deployment
from gateway.settings import Settings, is_loopback
from policies.breaker import CALLERS_MAX, Asker, Health, News
from policies.estimate import HALF_LIFE_S, KEEP_PER_OBSERVATION, SUMS

_PREFIX = "sameway:{health}:"
_TTL_MS = 86_400_000
_PROBE_MS = 8_000
_REST_S_MAX = 3_700.0
_BREAKERS_MAX = 64
_WORDS_MAX = 8_000
_EXCHANGE_EVERY_S = 0.5
_SOON_S = 0.1
_SUM_MAX = 1e15
_WEIGHT_MAX = 1.01 / (1.0 - KEEP_PER_OBSERVATION)

# KEYS: one for each deployment. ARGV: the sums' half-life in ms, the time to live, the longest rest
# in ms, the most breakers, the most failures in a row, then for each deployment {what its
# observations leave of the sums, sums, news by breaker}. Answers for each {sums, states by
# breaker}, as JSON.
_EXCHANGE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local NOTHING = {0, false, {}, false, 0, 0, 0, '', '', '*'}
local function merged(known, news)
  local until_ms, version = known.until_ms or 0, known.version or 0
  if until_ms > now + tonumber(ARGV[3]) then known, until_ms, version = {}, 0, 0 end
  local is_taken = news[4] and news[1] == version
  local state, count = {row = news[2] and {} or known.row or {}, good = known.good == true or news[2]}, 0
  for unit in pairs(news[3]) do state.row[unit] = 1 end
  for _ in pairs(state.row) do count = count + 1 end
  if count > tonumber(ARGV[5]) then state.row = news[3] end
  if is_taken then
    state.version, state.openings, state.cause, state.denial = version + 1, news[5], news[8], news[9]
    state.covers = news[10]
    state.until_ms = news[6] > 0 and now + news[6] * 1000 or 0
    state.alone_ms = news[6] > 0 and now + news[7] * 1000 or 0
  else
    state.version, state.openings = version, known.openings or 0
    state.until_ms, state.alone_ms = until_ms, known.alone_ms or 0
    state.cause, state.denial, state.covers = known.cause or '', known.denial or '', known.covers or ''
  end
  local rest, alone = 0, 0
  if state.until_ms > 0 then
    rest, alone = math.max(1, state.until_ms - now) / 1000, math.max(0, state.alone_ms - now) / 1000
  end
  return state, {
    state.version, state.good, state.row, false, state.openings, rest, alone, state.cause, state.denial,
    state.covers, is_taken
  }
end
local function exchanged(known, sent)
  local at = known.at or 0
  if at > now + 60000 then known, at = {}, now end
  local sums, breakers = known.sums or {}, known.breakers or {}
  local keep = 0.5 ^ (math.max(0, now - at) / tonumber(ARGV[1])) * sent[1]
  local state, answers, count = {sums = {}, at = now, breakers = {}}, {}, 0
  for n = 1, #sent[2] do state.sums[n] = (sums[n] or 0) * keep + sent[2][n] end
  for path in pairs(sent[3]) do breakers[path] = breakers[path] or {} end
  for path, breaker in pairs(breakers) do
    if count < tonumber(ARGV[4]) or sent[3][path] then
      count = count + 1
      state.breakers[path], answers[path] = merged(breaker, sent[3][path] or NOTHING)
    end
  end
  return cjson.encode(state), cjson.encode({state.sums, answers})
end
local replies = {}
for i, key in ipairs(KEYS) do
  local sent = cjson.decode(ARGV[i + 5])
  local is_sound, state, reply = pcall(function() return exchanged(cjson.decode(redis.call('GET', key)), sent) end)
  if not is_sound then state, reply = exchanged({}, sent) end
  if sent[1] ~= 1 or next(sent[3]) then redis.call('SET', key, state, 'PX', ARGV[2]) end
  replies[i] = reply
end
return replies
"""


class _HealthReply(msgspec.Struct, frozen=True, array_like=True):
    sums: tuple[float, ...]
    states: dict[str, News]

    @property
    def is_sound(self) -> bool:
        """Whether its values are in the ranges that workers write."""
        sums = self.sums
        return (
            len(sums) == SUMS
            and all(-_SUM_MAX <= one <= _SUM_MAX for one in sums)
            and all(-1e-6 <= sums[weight] <= _WEIGHT_MAX for weight in (0, 5, 8))
            and min(sums[1], sums[2], sums[3], sums[7], sums[9]) >= -1e-6
            and all(_is_sound(path, state) for path, state in self.states.items())
        )


def _is_sound(path: str, state: News) -> bool:
    words = " ".join((path, state.cause, state.denial, state.covers, *state.row))
    return 0 <= state.rest_s <= _REST_S_MAX and len(words) <= _WORDS_MAX and words.isprintable()


class Exchanged:
    """One deployment's part in the exchanges, with the sums of the last exchange."""

    def __init__(self, deployment: Deployment, key: str, clock: Callable[[], float]) -> None:
        self.deployment = deployment
        self.key = key
        self.key_values = deployment.keys.values
        self._clock = clock
        self._base = (0.0,) * SUMS
        self._base_calls = 0
        self._base_at_s = clock()
        self._sent = (self._base, 0, self._base_at_s)
        self._news: dict[str, News] = {}
        self._is_reset = False

    def reset(self) -> None:
        """Forget the failures and the estimate, also other workers'."""
        self.deployment.health.reset()
        self.deployment.estimate.restore((0.0,) * SUMS)
        self._is_reset = True

    def outgoing(self) -> bytes:
        """The message for the next exchange: the worker's observations since the last exchange."""
        estimate = self.deployment.estimate
        calls, sums = estimate.calls_seen, estimate.sums()
        self._sent = (sums, calls, self._clock())
        breakers = self.deployment.health.breakers
        self._news = {path: one.news() for path, one in breakers.items() if one.is_to_be_sent}
        kept_share = KEEP_PER_OBSERVATION ** (calls - self._base_calls)
        learned = self._beyond(sums, self._base, kept_share, self._base_at_s) if kept_share < 1.0 else (0.0,) * SUMS
        if self._is_reset:
            kept_share, learned = 0.0, sums
        return msgspec.json.encode((kept_share, learned, self._news))

    def failed(self) -> None:
        """Put the news back into the breakers, because the message was not sent."""
        for path, news in self._news.items():
            self.deployment.health.breaker(path).put_back(news)

    def incoming(self, data: bytes) -> bool:
        """Adopt the shared state. Returns False, and changes nothing, if no worker can have written
        it.
        """
        try:
            reply = msgspec.json.decode(data, type=_HealthReply)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if not reply.is_sound:
            return False
        estimate = self.deployment.estimate
        self._is_reset = False
        sums, calls, at_s = self._sent
        kept_share = KEEP_PER_OBSERVATION ** (estimate.calls_seen - calls)
        since = self._beyond(estimate.sums(), sums, kept_share, at_s)
        self._base, self._base_calls, self._base_at_s = reply.sums, calls, at_s
        estimate.restore(_clean([one * kept_share + more for one, more in zip(reply.sums, since, strict=True)]))
        for path, state in reply.states.items():
            self.deployment.health.breaker(path).adopt(state)
        return True

    def _beyond(self, sums: Sequence[float], base: Sequence[float], share: float, at_s: float) -> tuple[float, ...]:
        """The part of `sums` that this worker added to `base` since `at_s`."""
        keep = share * 0.5 ** (max(0.0, self._clock() - at_s) / HALF_LIFE_S)
        return tuple([one - keep * before for one, before in zip(sums, base, strict=True)])


def _clean(sums: list[float]) -> tuple[float, ...]:
    """The sums without small negative values from rounding. Only the sum of logarithms (6) may be
    negative.
    """
    return tuple([one if place == 6 else max(0.0, one) for place, one in enumerate(sums)])


class SharedHealth:
    """Keeps the breakers and estimates of `deployments` equal on all workers and hosts."""

    def __init__(
        self,
        settings: Settings,
        deployments: Sequence[Deployment] | Callable[[], Sequence[Deployment]],
        link: RedisLink,
        clock: Callable[[], float] = time.monotonic,
        host: str | None = None,
    ) -> None:
        self._link = link
        self._settings = settings
        self._clock = clock
        self._in_turn = asyncio.Lock()  # a reset exchanges beside the loop
        self._host = host or socket.gethostname()
        self._deployments = deployments if callable(deployments) else lambda: deployments
        self.exchanged: list[Exchanged] = []
        self._follow()

    def _follow(self) -> None:
        """Take in the replicas that have come, and leave out those that have gone."""
        known, now = {id(shared.deployment): shared for shared in self.exchanged}, self._deployments()
        for shared in self.exchanged:
            if shared.deployment.keys.values != shared.key_values:  # it begins anew
                shared.deployment.health = Health(self._clock, random.random)
                del known[id(shared.deployment)]
        if list(known) == list(map(id, now)):
            return
        self.exchanged = [known.get(id(one)) or self._exchanged(one) for one in now]

    def _exchanged(self, deployment: Deployment) -> Exchanged:
        key = _PREFIX + identity(deployment, self._settings, self._host)
        shared = Exchanged(deployment, key, self._clock)
        deployment.claim = partial(self._claim, shared)
        return shared

    async def run(self) -> None:
        """Exchange regularly, and soon after a failure. Raises RedisError."""
        while True:
            await self.exchange()
            for _ in range(int(_EXCHANGE_EVERY_S / _SOON_S)):
                await asyncio.sleep(_SOON_S)
                if any(one.has_news for shared in self.exchanged for one in shared.deployment.health.breakers.values()):
                    break

    async def reset(self, deployments: Sequence[Deployment]) -> None:
        """Forget the failures and the estimates of deployments, on every host. Raises RedisError."""
        names = {deployment.name for deployment in deployments}
        for shared in self.exchanged:
            if shared.deployment.name in names:
                shared.reset()
        await self.exchange()

    async def exchange(self) -> None:
        """Send this worker's observations, and adopt the state of all workers. Raises RedisError."""
        if self.exchanged:
            async with self._in_turn:
                self._follow()
                await self._exchange()

    async def _exchange(self) -> None:
        keys = [shared.key for shared in self.exchanged]
        limits = (int(HALF_LIFE_S * 1000), _TTL_MS, int(_REST_S_MAX * 1000), _BREAKERS_MAX, CALLERS_MAX)
        news = [shared.outgoing() for shared in self.exchanged]
        try:
            replies = await self._link.eval(_EXCHANGE, len(keys), *keys, *limits, *news)
        except BaseException:
            for shared in self.exchanged:
                shared.failed()
            raise
        for shared, reply in zip(self.exchanged, replies, strict=True):
            if not shared.incoming(reply):
                shared.failed()
                await self._link.execute_command("DEL", shared.key)

    async def _claim(self, shared: Exchanged, asker: Asker) -> bool:
        """Claim the right to probe now. Returns whether this worker has it; without Redis it has."""
        try:
            for name in shared.deployment.health.probed(asker):
                key = f"{shared.key}:probe:{name}"
                if not await self._link.execute_command("SET", key, "1", "NX", "PX", _PROBE_MS):
                    return False
        except RedisError:
            return True
        return True


def identity(deployment: Deployment, settings: Settings, host: str) -> str:
    """The digest of a deployment's configuration, for the key of its state.

    It includes `host` if only this host reaches the deployment. It reveals no API key.
    """
    config = deployment.settings
    url = urlsplit(config.base_url or "")
    is_here = url.netloc == "unix:" or is_loopback(url.hostname or "")
    where = [host, str(settings.run_dir)] if config.engine else [host] if is_here else []
    facts = (where, deployment.name, config.backend, config.engine, config.model, config.base_url, config.headers)
    secret = deployment.keys.values
    key = (settings.secret or "").encode()[:64]
    return blake2b(msgspec.json.encode((facts, secret)), key=key, digest_size=16, person=b"sw.health").hexdigest()
