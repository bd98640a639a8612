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

from redis.exceptions import RedisError

from cache.redis_link import RedisLink
from gateway.deployments.fleet import Fleet
from gateway.deployments.slots import Slots
from gateway.deployments.told import TOLD, digest_of

_LIFE_MS = 5_000
_EVERY_S, _WAITING_S, _PAUSE_S = 1.0, 0.05, 0.002
_SPARE = 4  # each worker keeps a part in so many ready

# `TOLD` of parts. ARGV then the slots wanted, taken, spare ones, slots in all. Answers {slots that it may
# hold, those that it need not give back, workers}. A part is what is wanted, what is held, and when it
# last got more: who waits longest goes before others.
_SHARE = """
local function read(part) return string.match(part or '', '^(%d+) (%d+) (%d+)$') end
local want, taken, limit = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6])
local _, before, served = read(mine)
local held, wanted, since = 0, want, tonumber(served or 0)
for _, part in ipairs(others) do
  local w, h = read(part)
  held, wanted = held + (h or 0), wanted + (w or 0)
end
local most, least = want + tonumber(ARGV[5]), want
if wanted > limit then most, least = math.ceil(limit * want / wanted), math.floor(limit * want / wanted) end
for _, part in ipairs(others) do
  local w, h, s = read(part)
  if w and tonumber(w) > tonumber(h) and tonumber(s) < since then most = math.max(taken, least) end
end
local granted = math.max(0, math.min(most, limit - held))
if granted > tonumber(before or 0) or want <= granted then since = now end
tell(string.format('%d %d %d', want, math.max(granted, taken), since))
return {granted, least, #others + 1}
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
        key = "sameway:{slots}:" + digest_of(name)
        want, limit = slots.wanted, slots.slots_max
        numbers = (min(want, limit), slots.taken, limit // (_SPARE * self._workers), limit)
        try:
            granted, least, workers = await self._link.eval(TOLD + _SHARE, 1, key, self._worker, _LIFE_MS, *numbers)
        except RedisError:
            part = max(1, limit // self._workers)
            slots.grant(part, part, is_refused=part < want)
            raise
        self._workers = max(self._workers, workers)
        slots.grant(granted, least, is_refused=granted < want)
