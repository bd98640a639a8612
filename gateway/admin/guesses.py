"""Wrong keys of late, by the client's network: after a few, the next try must wait.

Five wrong keys are free. After each further one the network's next key is not read for a pause, of
1 s at first and twice as long each time, up to a minute. An hour without a wrong key forgets all.
Knows no keys and no HTTP. Invariant: a network's pauses hold for itself alone, and for one endpoint
alone, so that a scraper with an old key does not shut out an admin at the same address; at most
4,096 of both are kept, and the one that has been quiet longest makes room.

    sameway:{guesses}:tries    hash    by endpoint and network: wrong keys, when the last, its pause
    sameway:{guesses}:latest   zset    the same by when the last came
"""

import contextlib
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from policies.redis import RedisCommands

_FREE = 5
_PAUSE_S_MAX = 60.0
_FORGOTTEN_AFTER_S = 3_600.0
_KEPT_MAX = 4_096
_IPV6_PREFIX = 56  # a customer's usual share (RFC 6177)


@dataclass(slots=True)
class _Tries:
    wrong: int
    last_s: float
    pause_s: float


# KEYS tries, latest. ARGV endpoint and network, what to do, free tries, the longest pause, when a try is
# forgotten, how many are kept; times in ms. Answers the ms until the network's next key is read.
_TRY = """
local time, field = redis.call('TIME'), ARGV[1]
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local wrong, at, pause = string.match(redis.call('HGET', KEYS[1], field) or '', '^(%d+) (%d+) (%d+)$')
if not wrong or now - at > tonumber(ARGV[5]) then wrong, at, pause = 0, 0, 0 end
if ARGV[2] == 'forget' then
  redis.call('HDEL', KEYS[1], field)
  redis.call('ZREM', KEYS[2], field)
  return 0
elseif ARGV[2] == 'add' then
  wrong, at, pause = wrong + 1, now, 0
  local beyond = wrong - tonumber(ARGV[3])
  if beyond > 0 then pause = math.min(1000 * 2 ^ math.min(beyond - 1, 10), tonumber(ARGV[4])) end
  redis.call('HSET', KEYS[1], field, string.format('%d %d %d', wrong, at, pause))
  redis.call('ZADD', KEYS[2], now, field)
  for _, old in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1 - tonumber(ARGV[6]))) do
    redis.call('HDEL', KEYS[1], old)
    redis.call('ZREM', KEYS[2], old)
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
end
return math.max(0, at + pause - now)
"""
_KEYS = ("sameway:{guesses}:tries", "sameway:{guesses}:latest")
_LIMITS = (_FREE, int(_PAUSE_S_MAX * 1000), int(_FORGOTTEN_AFTER_S * 1000), _KEPT_MAX)


class Guesses:
    """The wrong keys that all workers and hosts have seen, by endpoint and network; without `redis`
    those of this worker, the longest quiet first. `clock` gives steady seconds.
    """

    def __init__(self, clock: Callable[[], float], redis: RedisCommands | None = None) -> None:
        self._clock = clock
        self._redis = redis
        self.tries: dict[str, _Tries] = {}

    async def wait_s(self, endpoint: str, client: str) -> float:
        """The seconds until a key of `client`, an IP address, is read; 0 if it is read now."""
        return await self._told("wait", endpoint, client)

    async def add(self, endpoint: str, client: str) -> float:
        """Count a wrong key; returns the seconds until the network's next key is read."""
        return await self._told("add", endpoint, client)

    async def forget(self, endpoint: str, client: str) -> None:
        """Forget the wrong keys of a client that has the right one."""
        await self._told("forget", endpoint, client)

    async def _told(self, act: str, endpoint: str, client: str) -> float:
        name = f"{endpoint} {network_of(client)}"
        seen_here_s = self._told_here(act, name)
        if self._redis is not None:
            with contextlib.suppress(RedisError):
                return float(await self._redis.eval(_TRY, 2, *_KEYS, name, act, *_LIMITS)) / 1000.0
        return seen_here_s

    def _told_here(self, act: str, name: str) -> float:
        now_s, tries = self._clock(), self.tries.get(name)
        if act == "wait":
            return 0.0 if tries is None else max(0.0, tries.last_s + tries.pause_s - now_s)
        self.tries.pop(name, None)
        if act == "forget":
            return 0.0
        wrong = 1 if tries is None or now_s - tries.last_s > _FORGOTTEN_AFTER_S else tries.wrong + 1
        pause_s = min(2.0 ** min(wrong - _FREE - 1, 10), _PAUSE_S_MAX) if wrong > _FREE else 0.0
        if len(self.tries) >= _KEPT_MAX:
            del self.tries[next(iter(self.tries))]
        self.tries[name] = _Tries(wrong, now_s, pause_s)
        return pause_s


def network_of(client: str) -> str:
    """The addresses that count as one client: an IPv4 address, or a /56 of IPv6 addresses."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:  # a unix socket has none
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))
