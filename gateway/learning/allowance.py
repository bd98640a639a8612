"""A team's allowance for judging its answers: 2% of what the cache has saved it in the last 30
days.

    sameway:judging:TEAM   hash   UTC day -> µUSD reserved or spent on it

Knows no judges. Invariants: a question's worst case is reserved before it is asked, in one script
for all workers and hosts; a worker that is killed in between leaves the reservation spent; savings
that cannot be told are 0.
"""

import time
from collections.abc import Awaitable, Callable, Mapping

from redis.exceptions import RedisError

from gateway.loggers import get_logger
from policies.redis import RedisCommands

SHARE = 0.02
DAYS = 30
_DAY_S = 86_400
_KEPT_S = 40 * _DAY_S
_FRESH_S = 30.0
_log = get_logger()

# KEYS: the team's hash. ARGV: amount, allowance, today, first day, kept_s. Answers whether it fits.
_RESERVE = """
local total, days = 0, redis.call('HGETALL', KEYS[1])
for i = 1, #days, 2 do
  if tonumber(days[i]) < tonumber(ARGV[4]) then redis.call('HDEL', KEYS[1], days[i])
  else total = total + tonumber(days[i + 1]) end
end
if total + tonumber(ARGV[1]) > tonumber(ARGV[2]) then return 0 end
redis.call('HINCRBY', KEYS[1], ARGV[3], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
"""
_SETTLE = "return redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])"
_READ = "return redis.call('HVALS', KEYS[1])"

Saved = Callable[[], Awaitable[Mapping[int, int]]]
"""What the cache has saved each team in the last 30 UTC days, today included, in µUSD."""


class Allowance:
    """The allowances of all teams. `clock` gives unix seconds."""

    def __init__(self, redis: RedisCommands, saved: Saved, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._saved = saved
        self._clock = clock
        self._known: Mapping[int, int] = {}
        self._known_day = 0
        self._known_until = 0.0
        self._days: dict[int, int] = {}  # of the latest reservation of a team

    async def reserve(self, team_id: int, amount_microusd: int) -> bool:
        """Take an amount from the allowance; False where it does not suffice, or Redis is away."""
        try:
            today = int(self._clock()) // _DAY_S
            left = int(SHARE * (await self._savings(today)).get(team_id, 0))
            if left < amount_microusd:
                return False
            arguments = (amount_microusd, left, today, today - DAYS + 1, _KEPT_S)
            self._days[team_id] = today
            return bool(await self._redis.eval(_RESERVE, 1, _key(team_id), *arguments))
        except (RedisError, OSError) as error:
            _log.info("judging_not_paid", reason=f"{type(error).__name__}: {error}")
            return False

    async def settle(self, team_id: int, amount_microusd: int, cost_microusd: int) -> None:
        """Give back the part of a reservation that was not spent. If Redis fails, it counts as
        spent.
        """
        try:
            day = self._days.get(team_id, int(self._clock()) // _DAY_S)
            await self._redis.eval(_SETTLE, 1, _key(team_id), day, cost_microusd - amount_microusd)
        except (RedisError, OSError) as error:
            _log.info("judging_not_settled", reason=f"{type(error).__name__}: {error}")

    async def state(self, team_id: int) -> tuple[int, int]:
        """The amount that is spent or reserved, and the whole allowance, in µUSD. Raises
        RedisError.
        """
        saved = await self._savings(int(self._clock()) // _DAY_S)
        spent = await self._redis.eval(_READ, 1, _key(team_id))
        return sum(map(int, spent)), int(SHARE * saved.get(team_id, 0))

    async def _savings(self, today: int) -> Mapping[int, int]:
        now = self._clock()
        if now >= self._known_until or today != self._known_day:
            self._known, self._known_day, self._known_until = await self._saved(), today, now + _FRESH_S
        return self._known


def _key(team_id: int) -> str:
    return f"sameway:judging:{team_id}"
