"""What all workers and hosts know of the replicas of one deployment, in Redis.

    sameway:{replicas:D}:work      hash    by worker: when, and its work at each replica
    sameway:{replicas:D}:metrics   hash    by replica: its latest reading; by `at ` and it: when it was due
    sameway:{replicas:D}:prefixes  stream  the blocks that a replica reads: worker, replica, digests

D is a digest of the deployment's name. An exchange tells this worker's work, takes the
others' and the readings, and says which replicas' metrics are due: the first worker that asks reads
them for all, so that a server is asked once in an interval and not once by each worker. Knows no
requests. Invariants: work that was told more than `_STALE_MS` ago counts no more; without Redis a
worker goes on with its own requests in flight.
"""

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from cache.redis_link import RedisLink
from gateway.backends.openai.backend import OpenAIBackend
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.deployments.replicas import Replicas
from gateway.deployments.server_metrics import reading_of
from gateway.deployments.told import TOLD, digest_of
from gateway.transport.http_client import TransportError
from policies.replicas import Backlog, Reading, Work, pooled

_BUSY_S, _IDLE_S = 0.1, 1.0
_READ_BUSY_MS, _READ_IDLE_MS = 250, 1_000
_REREAD_S = 5.0
_STALE_MS = 2_500
_TTL_MS = 600_000
_METRICS_WITHIN_S = 1.0
_PREFIXES_MAX = 2_000
_PREFIXES_AT_ONCE = 200
_BLOCK = 8  # bytes of a digest

# `TOLD` of work, with KEYS[2] metrics. ARGV then its work as JSON, the interval of readings in ms, how
# long readings last in ms, and the replicas' names. Answers {others' work, readings by replica (false
# without one), the numbers of the replicas whose metrics are due}.
_EXCHANGE = """
tell(ARGV[3])
local readings, due = {}, {}
for i = 6, #ARGV do
  local at = tonumber(redis.call('HGET', KEYS[2], 'at ' .. ARGV[i]) or 0)
  readings[#readings + 1] = redis.call('HGET', KEYS[2], ARGV[i])
  if math.abs(now - at) >= tonumber(ARGV[4]) then
    redis.call('HSET', KEYS[2], 'at ' .. ARGV[i], now)
    due[#due + 1] = i - 6
  end
end
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return {others, readings, due}
"""


class _Shared:
    """One deployment's replicas, with what was told and heard of them last."""

    def __init__(self, replicas: Replicas, link: RedisLink, worker: str) -> None:
        self._replicas = replicas
        self._link = link
        self._worker = worker
        self._key = "sameway:{replicas:" + digest_of(replicas.name) + "}:"
        self._seen = "0"

    @property
    def is_busy(self) -> bool:
        return any(backlog.sent.running for backlog in self._backlogs().values())

    async def exchange(self) -> None:
        """Tell this worker's work and its prefixes, and take all others'. Raises RedisError."""
        await asyncio.gather(self._exchange_work(), self._exchange_prefixes())
        prefixes, replicas = self._replicas.prefixes, self._replicas.by_name
        siblings = pooled([replica.estimate.figures() for replica in replicas.values()])
        for name, backlog in self._backlogs().items():
            backlog.siblings = siblings
            if backlog.has_restarted:
                backlog.has_restarted = False
                prefixes.forget(name)
            if backlog.reading is not None and backlog.reading.kv_tokens:
                prefixes.resize(name, backlog.reading.kv_tokens)

    def _backlogs(self) -> dict[str, Backlog]:
        return {d.name: d.backlog for d in self._replicas.by_url.values() if d.backlog is not None}

    async def _exchange_work(self) -> None:
        backlogs, replicas = self._backlogs(), self._replicas.by_name
        sent = msgspec.json.encode({name: backlog.sent for name, backlog in backlogs.items()})
        arguments = (self._worker, _STALE_MS, sent, _READ_BUSY_MS if self.is_busy else _READ_IDLE_MS, _TTL_MS)
        keys = (self._key + "work", self._key + "metrics")
        work, readings, due = await self._link.eval(TOLD + _EXCHANGE, 2, *keys, *arguments, *backlogs)
        of_others = [_decoded(each, dict[str, Work]) or {} for each in work]
        for (name, backlog), data in zip(backlogs.items(), readings, strict=True):
            parts = [others[name] for others in of_others if name in others]
            backlog.others = Work(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))
            backlog.take(_decoded(data, Reading) if data else None)
        names = list(backlogs)
        await asyncio.gather(*(self._read(names[number], replicas[names[number]]) for number in due))

    async def _read(self, name: str, replica: Deployment) -> None:
        """Read a replica's metrics for all workers; one that has none to tell loses its reading."""
        assert isinstance(replica.backend, OpenAIBackend)
        reading = None
        try:
            async with asyncio.timeout(_METRICS_WITHIN_S):
                reading = reading_of(await replica.backend.metrics())
        except (TransportError, TimeoutError):
            pass
        if reading is None:
            await self._link.execute_command("HDEL", self._key + "metrics", name)
        else:
            await self._link.execute_command("HSET", self._key + "metrics", name, msgspec.json.encode(reading))

    async def _exchange_prefixes(self) -> None:
        key, prefixes = self._key + "prefixes", self._replicas.prefixes
        names = self._replicas.by_name
        sending: list[Awaitable[Any]] = []
        for name, chain in [prefixes.news.popleft() for _ in range(len(prefixes.news))]:
            if name in names:
                fields = ("worker", self._worker, "replica", name, "blocks", b"".join(chain))
                sending.append(self._link.execute_command("XADD", key, "MAXLEN", "~", _PREFIXES_MAX, "*", *fields))
                sending.append(self._link.execute_command("PEXPIRE", key, _TTL_MS))
            else:
                prefixes.news.append((name, chain))  # another list's replica
        await asyncio.gather(*sending)
        count = ("COUNT", _PREFIXES_AT_ONCE)
        for _, entries in await self._link.execute_command("XREAD", *count, "STREAMS", key, self._seen) or ():
            for entry_id, fields in entries:
                self._seen = entry_id
                worker, name, blocks = (fields[field] for field in (b"worker", b"replica", b"blocks"))
                if worker.decode() != self._worker and (name := name.decode()) in names:
                    prefixes.note(name, [blocks[at : at + _BLOCK] for at in range(0, len(blocks), _BLOCK)])


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:  # no worker wrote it
        return None


class SharedLoad:
    """Keeps the replicas of `fleet`, their queues and their prefixes equal on all workers and hosts."""

    def __init__(self, fleet: Fleet, link: RedisLink) -> None:
        self._fleet = fleet
        worker = os.urandom(8).hex()
        self.shared = [_Shared(one, link, worker) for lists in fleet.replicas.values() for one in lists]

    async def follow(self) -> None:
        """Read the lists of replicas again and again."""
        while True:
            await asyncio.sleep(_REREAD_S)
            await self._fleet.reread()

    async def run(self) -> None:
        """Exchange as often as there is something to tell. Raises RedisError."""
        while True:
            try:
                await asyncio.gather(*(shared.exchange() for shared in self.shared))
            except RedisError:
                for replica in self._fleet.deployments:
                    if replica.backlog is not None:  # what others told grows old
                        replica.backlog.others = Work()
                        replica.backlog.take(None)
                raise
            await asyncio.sleep(_BUSY_S if any(shared.is_busy for shared in self.shared) else _IDLE_S)
