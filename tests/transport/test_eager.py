"""A coroutine that was begun: its first wait is on its way before anybody awaits it, and awaiting it is awaiting the coroutine."""

from __future__ import annotations

import asyncio

import pytest

from gateway.transport.eager import Eager


async def test_two_that_were_begun_wait_together() -> None:
    """Both have asked before either is awaited, they are awaited in any order, and no task is made."""
    asked: list[asyncio.Future[int]] = []

    async def ask() -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asked.append(answer)
        return await answer + await later()

    async def later() -> int:
        await asyncio.sleep(0)
        return 10

    tasks = len(asyncio.all_tasks())
    one, other = Eager(ask()), Eager(ask())
    assert len(asked) == 2
    asyncio.get_running_loop().call_soon(asked[1].set_result, 2)
    asyncio.get_running_loop().call_soon(asked[0].set_result, 1)
    assert (await other, await one) == (12, 11)
    assert len(asyncio.all_tasks()) == tasks


async def test_one_that_need_not_wait_has_its_result() -> None:
    """A coroutine that ended at once gives its result, or its error, when it is awaited and not before."""

    async def seven() -> int:
        return 7

    async def fail() -> int:
        raise KeyError("no")

    one, other = Eager(seven()), Eager(fail())
    assert await one == 7
    with pytest.raises(KeyError):
        await other


async def test_errors_and_cancellation_reach_the_coroutine() -> None:
    """What the awaited future raises, and a cancellation of who awaits, arrive inside, where they can be handled."""
    seen: list[str] = []

    async def ask(answer: asyncio.Future[int]) -> int:
        try:
            return await answer
        except ValueError:
            seen.append("error")
            return -1
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    loop = asyncio.get_running_loop()
    broken: asyncio.Future[int] = loop.create_future()
    begun = Eager(ask(broken))
    broken.set_exception(ValueError())
    assert await begun == -1

    async def wait() -> None:
        await Eager(ask(loop.create_future()))

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["error", "cancelled"]
