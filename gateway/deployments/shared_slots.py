"""`concurrency_max` over all workers and hosts: each worker's part of a deployment's slots, in Redis.

    sameway:{slots}:D     hash    by worker: when, the slots that it wants, and those that it may hold

D is a digest of the deployment's name. A worker asks for the slots that run and wait there, and for a
few more of many; it gets them where others leave room. Where more are wanted than there are, each is
entitled to its part by what it wants: who holds more gives back each slot that ends, and who has had
none for longest is first. Knows no requests.
Invariants: the parts of all workers together are at most `concurrency_max`, but for requests that run
on in a worker whose part has expired; without Redis each worker has an equal part, and at least one.
"""

import asyncio
import contextlib
import os
from hashlib import blake2b

from redis.exceptions import RedisError

from cache.redis_link import RedisLink
from gateway.deployments.fleet import Fleet
from gateway.deployments.slots import Slots

_LIFE_MS = 5_000
_EVERY_S, _WAITING_S, _PAUSE_S = 1.0, 0.05, 0.002
_SPARE = 4  # each worker keeps a part in so many ready

# KEYS parts. ARGV worker, slots wanted, taken, spare ones, slots in all, life of a part in ms. Answers
# {slots that it may hold, those that it need not give back, workers}. A part has, after the time: what
# is wanted, what is held, and when it last got more: who waits longest goes before others.
_SHARE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local want, taken, limit = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])
local parts, held, wanted, workers, before, served = redis.call('HGETALL', KEYS[1]), 0, want, 1, 0, 0
local others = {}
for i = 1, #parts, 2 do
  local at, w, h, s = string.match(parts[i + 1], '^(%d+) (%d+) (%d+) (%d+)$')
  if not at or math.abs(now - at) > tonumber(ARGV[6]) then redis.call('HDEL', KEYS[1], parts[i])
  elseif parts[i] == ARGV[1] then before, served = tonumber(h), tonumber(s)
  else
    held, wanted, workers = held + h, wanted + w, workers + 1
    if tonumber(w) > tonumber(h) then others[#others + 1] = tonumber(s) end
  end
end
local most, least = want + tonumber(ARGV[4]), want
if wanted > limit then most, least = math.ceil(limit * want / wanted), math.floor(limit * want / wanted) end
for _, since in ipairs(others) do if since < served then most = math.max(taken, least) end end
local granted = math.max(0, math.min(most, limit - held))
if granted > before or want <= granted then served = now end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %d %d %d', now, want, math.max(granted, taken), served))
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {granted, least, workers}
"""


class SharedSlots:
    """Keeps this worker's parts. `workers` are those of a host, which share the slots without Redis."""

    def __init__(self, fleet: Fleet, link: RedisLink, workers: int) -> None:
        self._fleet = fleet
        self._link = link
        self._workers = workers
        self._worker = os.urandom(8).hex()
        self._woken = asyncio.Event()

    def limited(self) -> dict[str, Slots]:
        """The slots of the deployments with a limit, by name; new ones are taken over."""
        shared = {d.name: d.slots for d in self._fleet.deployments if d.settings.concurrency_max is not None}
        for slots in shared.values():
            slots.share(self._woken.set)
        return shared

    async def run(self) -> None:
        """Ask as often as parts must be renewed, and while requests wait. Raises RedisError."""
        while True:
            self._woken.clear()
            await self.exchange()
            await asyncio.sleep(_PAUSE_S)  # what wakes it meanwhile goes together
            is_waiting = any(slots.waiting for slots in self.limited().values())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAITING_S if is_waiting else _EVERY_S):
                    await self._woken.wait()

    async def exchange(self) -> None:
        """Ask for this worker's part of each deployment's slots. Raises RedisError."""
        await asyncio.gather(*(self._exchange(name, slots) for name, slots in self.limited().items()))

    async def _exchange(self, name: str, slots: Slots) -> None:
        key = "sameway:{slots}:" + blake2b(name.encode(), digest_size=8).hexdigest()
        want, limit = slots.wanted, slots.slots_max
        numbers = (min(want, limit), slots.taken, limit // (_SPARE * self._workers), limit, _LIFE_MS)
        try:
            granted, least, workers = await self._link.eval(_SHARE, 1, key, self._worker, *numbers)
        except RedisError:
            part = max(1, limit // self._workers)
            slots.grant(part, part, is_refused=part < want)
            raise
        self._workers = max(self._workers, workers)
        slots.grant(granted, least, is_refused=granted < want)
