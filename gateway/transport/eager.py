"""A coroutine that starts now and is awaited later, in the same task.

Calls that a stage of the pipeline starts together share one round trip to Redis. Replaces
`asyncio.gather`, which makes a task of each call; a task costs several times as much as the call.
Python 3.12 has eager tasks; this does for 3.11 what the pipeline needs.
`tests/transport/test_eager.py` compares it with `await`.

Knows no Redis. Invariant: awaiting an `Eager` has the result of awaiting its coroutine, errors and
cancellation included. The coroutine must await futures only: a coroutine that reads its current
task, as a time-out does, is not allowed.
"""

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from gateway.exceptions import fresh

T = TypeVar("T")


class Eager(Generic[T]):
    """A started coroutine: await it once. An `Eager` made by `done` may be awaited many times.

    If it is never awaited, its coroutine is closed without a warning.
    """

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
        """An `Eager` that already has its result."""
        eager: Eager[T] = Eager.__new__(Eager)
        eager._coroutine = eager._waits_for = eager._error = None
        eager._result = result
        return eager

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine = self._coroutine
        if coroutine is None:
            if self._error is not None:
                raise fresh(self._error)
            return self._result
        error: BaseException | None = None
        must_wait = self._waits_for is None or not self._waits_for.done()  # None: a pause of one tick
        if not must_wait:
            self._waits_for._asyncio_future_blocking = False  # the result is here: the task need not wait
        while True:
            if must_wait:
                try:
                    yield self._waits_for
                except BaseException as thrown:
                    error = thrown
            # a future references its exception, which references this frame: keep neither
            must_wait, self._waits_for = True, None
            try:
                self._waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
            except StopIteration as end:
                # a coroutine's result by definition
                return end.value  # type: ignore[no-any-return]
            finally:
                error = None
