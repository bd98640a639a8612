"""A coroutine eager now and awaited later, in the same task.

What a stage of the pipeline issues to Redis before it waits shares one round trip. `asyncio.gather` would make a task of each call,
and a task costs several times what the call does; Python 3.12's eager tasks come closer, on 3.11 this is the part of them that is
needed. Knows no Redis. Invariant: awaiting a `Eager` is awaiting its coroutine, errors and cancellation included. It is for coroutines
that wait for futures: one that asks which task it is in (a time-out does) must not be eager here and awaited elsewhere.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Eager(Generic[T]):
    """Await it once. One that is never awaited is closed where it waits, without a word."""

    __slots__ = ("_coroutine", "_error", "_result", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._waits_for: Any = None
        self._error: Exception | None = None
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration as end:
            self._result: T = end.value
        except Exception as error:
            self._error = error
        else:
            self._coroutine = coroutine

    @staticmethod
    def done(result: T) -> "Eager[T]":
        """One that had nothing to wait for."""
        eager: Eager[T] = Eager.__new__(Eager)
        eager._coroutine = eager._waits_for = eager._error = None
        eager._result = result
        return eager

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, waits_for = self._coroutine, self._waits_for
        if coroutine is None:
            if self._error is not None:
                raise self._error
            return self._result
        if asyncio.isfuture(waits_for) and waits_for.done():
            waits_for._asyncio_future_blocking = False  # it has come meanwhile: no task need be told to wait for it
            step, argument = coroutine.send, None
        else:
            step, argument = yield from _waited(coroutine, waits_for)
        while True:
            try:
                waits_for = step(argument)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # a coroutine's result by definition
            step, argument = yield from _waited(coroutine, waits_for)


def _waited(coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, tuple[Any, Any]]:
    """Wait; how the coroutine goes on, and with what."""
    try:
        yield waits_for
    except BaseException as error:
        return coroutine.throw, error
    return coroutine.send, None
