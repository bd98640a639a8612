"""The hosts of one Redis: which are there, with which version and configuration.

    sameway:hosts    hash  by `HOST:FOLDER PID`: the worker's state as JSON, with Redis' time in seconds

Each worker writes its own field every few seconds. Times are Redis' own, because hosts' clocks
differ. Knows no requests. Invariant: a worker that is silent for a day is forgotten.
"""

import os
import socket
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.settings import FIXED, Settings
from gateway.version import VERSION, build
from policies.redis import RedisCommands

BEAT_S = 5.0
_KEY = "sameway:hosts"
_SILENT_S = 4 * BEAT_S
_FORGOTTEN_S = 86_400
_BEAT = """
local now = tonumber(redis.call('TIME')[1])
redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
local fields = redis.call('HGETALL', KEYS[1])
for i = 2, #fields, 2 do
  if tonumber(string.match(fields[i], '^%d+') or 0) < now - ARGV[3] then redis.call('HDEL', KEYS[1], fields[i - 1]) end
end
return 1
"""
_HOSTS = "return {redis.call('TIME')[1], redis.call('HGETALL', KEYS[1])}"


class _Worker(msgspec.Struct, frozen=True):
    """The state of one worker; `serves_s` are the seconds since its start."""

    version: str
    build: str
    config: str
    serves_s: float


class Host(msgspec.Struct, frozen=True):
    """One host. `configs` are the digests of its workers' configurations, `versions` their versions
    with the build: more than one of either while it changes. `silent_s` are the seconds since its
    last sign of life, `serves_s` those for which its oldest worker runs.
    """

    name: str
    workers: int
    versions: tuple[str, ...]
    configs: tuple[str, ...]
    serves_s: float
    silent_s: float
    is_here: bool

    @property
    def is_away(self) -> bool:
        return self.silent_s > _SILENT_S


class Hosts:
    """This worker's sign of life, and those of all. `clock` gives seconds that never decrease."""

    def __init__(self, settings: Settings, redis: RedisCommands, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._redis = redis
        self._clock = clock
        self._started_s = clock()
        self._here = f"{socket.gethostname()}:{settings.data_dir.absolute()}"

    async def beat(self) -> None:
        """Tell the others of this worker. Errors of the client pass through."""
        state = _Worker(VERSION, build(), config_digest(self._settings), self._clock() - self._started_s)
        field = f"{self._here} {os.getpid()}"
        await self._redis.eval(_BEAT, 1, _KEY, field, msgspec.json.encode(state), _FORGOTTEN_S)

    async def leave(self) -> None:
        """Take this worker out. Errors of the client pass through."""
        await self._redis.execute_command("HDEL", _KEY, f"{self._here} {os.getpid()}")

    async def all(self) -> list[Host]:
        """All hosts by name. Errors of the client pass through."""
        now, fields = await self._redis.eval(_HOSTS, 1, _KEY)
        workers: dict[str, list[tuple[float, _Worker]]] = {}
        for field, value in zip(fields[::2], fields[1::2], strict=True):
            if (said := _said(value)) is not None:
                name = field.decode("utf-8", "replace").rpartition(" ")[0]
                workers.setdefault(name, []).append((float(now) - said[0], said[1]))
        return [self._host(name, workers[name]) for name in sorted(workers)]

    def _host(self, name: str, workers: list[tuple[float, _Worker]]) -> Host:
        silent_s = max(0.0, min(silent for silent, _ in workers))
        # of a host that is away, those that it had last
        alive = [worker for silent, worker in workers if silent <= max(_SILENT_S, silent_s + BEAT_S)]
        return Host(
            name=name,
            workers=len(alive),
            versions=tuple(sorted({f"{worker.version} ({worker.build})" for worker in alive})),
            configs=tuple(sorted({worker.config for worker in alive})),
            serves_s=max(worker.serves_s for worker in alive),
            silent_s=silent_s,
            is_here=name == self._here,
        )


def _said(value: bytes) -> tuple[int, _Worker] | None:
    """When a worker wrote, and its state; None for what is written as this version does not."""
    at_s, _, state = value.partition(b" ")
    try:
        return int(at_s), msgspec.json.decode(state, type=_Worker)
    except ValueError:
        return None


def config_digest(settings: Settings) -> str:
    """The digest of all settings that a reload changes. It reveals no key."""
    given: dict[str, Any] = settings.model_dump(mode="json", exclude=set(FIXED))
    key = (settings.secret or "").encode()[:64]
    return blake2b(msgspec.json.encode(given, order="sorted"), key=key, digest_size=4).hexdigest()
