"""Batches stores for Redis: one script call stores the entries of one tick and partition.

Knows no keys and no entries, only the script's arguments (`cache.exact.scripts.PUT`). Invariants: a
submitted entry is sent, even if its caller no longer waits; each caller gets its own part of the
reply, and all callers get a failure; a partition is listed before it has an entry, because a purge
of everything reads the list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from cache.exact.scripts import PUT
from cache.redis_client import Redis

_TOGETHER_MAX = 64

Defer = Callable[[Callable[[], None]], object]
"""Schedules the callback that sends the gathered entries."""


class BatchTerms(msgspec.Struct, frozen=True):
    """The common part of one call: the script's keys and limits, and the key that lists the
    partition.
    """

    keys: tuple[str, ...]
    size_max: int
    warm_ttl_ms: int
    half_life_ms: int
    list_key: str
    partition: bytes


class BatchItem(msgspec.Struct):
    """One entry: the script's arguments and keys for it, and the commands that follow the script."""

    argv: tuple[Any, ...]
    more_keys: Sequence[str]
    commands: Sequence[tuple[Any, ...]]
    now_ms: int
    stored: asyncio.Future[list[Any]] = msgspec.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class StoreBatch:
    """Gathers entries and stores them together. `defer` None: until the end of the event loop's
    tick.
    """

    def __init__(self, redis: Redis, defer: Defer | None) -> None:
        self._redis = redis
        self._defer = defer or (lambda leave: asyncio.get_running_loop().call_soon(leave))
        # by the first of their keys
        self._waiting: dict[str, tuple[BatchTerms, list[BatchItem]]] = {}

    def store(self, terms: BatchTerms, item: BatchItem) -> Awaitable[list[Any]]:
        """Returns `[what became of it, evicted...]`, see `PUT`. Raises the client's errors."""
        _, items = self._waiting.setdefault(terms.keys[0], (terms, []))
        items.append(item)
        if len(items) == _TOGETHER_MAX:
            self._leave()
        elif len(self._waiting) == len(items) == 1:
            self._defer(self._leave)
        return item.stored

    def _leave(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for terms, items in waiting.values():
            self._send(terms, items, is_listed=False)

    def _send(self, terms: BatchTerms, items: list[BatchItem], is_listed: bool) -> None:
        keys = (*terms.keys, *chain.from_iterable(item.more_keys for item in items))
        now_ms = max(item.now_ms for item in items)
        common_arguments = (now_ms, terms.size_max, int(is_listed), terms.warm_ttl_ms, terms.half_life_ms)
        entries = chain.from_iterable(item.argv for item in items)
        commands = chain.from_iterable(item.commands for item in items)
        replies = asyncio.gather(
            self._redis.eval(PUT, len(keys), *keys, *common_arguments, *entries),
            *(self._redis.execute_command(*command) for command in commands),
        )
        replies.add_done_callback(partial(self._answered, terms, items))

    def _answered(self, terms: BatchTerms, items: list[BatchItem], replies: asyncio.Future[list[Any]]) -> None:
        if _failed(items, replies):
            return
        stored_each = replies.result()[0]
        if not stored_each:
            listing = ("ZADD", terms.list_key, items[0].now_ms // 1000, terms.partition)
            listed = asyncio.ensure_future(self._redis.execute_command(*listing))
            listed.add_done_callback(partial(self._listed, terms, items))
            return
        for item, stored in zip(items, stored_each, strict=True):
            if not item.stored.done():
                item.stored.set_result(stored)

    def _listed(self, terms: BatchTerms, items: list[BatchItem], reply: asyncio.Future[Any]) -> None:
        if not _failed(items, reply):
            self._send(terms, items, is_listed=True)


def _failed(items: list[BatchItem], reply: asyncio.Future[Any]) -> bool:
    """Whether the call failed; if so, pass the error to every waiting caller."""
    error = asyncio.CancelledError() if reply.cancelled() else reply.exception()
    if error is None:
        return False
    for one in items:
        if not one.stored.done():
            one.stored.set_exception(error)
    return True
