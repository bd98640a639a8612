"""What people say of answers: which responses are looked for, and how long."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from gateway.journey.turn import arrived_at, new_id
from gateway.learning.reports import Reports
from gateway.telemetry.stats import Stats
from tests.telemetry.records import hit


class Looked(Stats):
    """Counts how often the latest requests of all workers are read."""

    times = 0

    async def routes(self, *arguments: Any, **options: Any) -> Any:
        self.times += 1
        return await super().routes(*arguments, **options)


def reports_of(stats: Stats) -> Reports:
    absent = cast(Any, None)  # neither verdicts nor entries are needed to find a request
    return Reports(absent, absent, stats, lambda *_: None, flushed_s=0.0)


@pytest.mark.parametrize(
    ("id", "times"),
    [
        ("req_unknown", 1),
        ("chatcmpl-1", 1),
        ("req_" + "f" * 32, 1),
        ("req_" + "z" * 32, 1),
        (new_id(time.time() - 7_200), 1),
        (new_id(time.time()), 2),
        (new_id(time.time() + 2), 2),
    ],
    ids=["unknown", "foreign", "of no time", "malformed", "two hours old", "new", "of a clock ahead"],
)
async def test_only_what_may_have_just_finished_is_waited_for(redis: Redis, id: str, times: int) -> None:
    """A response that another worker gave this second is not in Redis yet; an id that can't be one's is answered at once."""
    stats = Looked(redis, time.time)
    assert await reports_of(stats).find(id) is None
    assert stats.times == times


async def test_what_this_worker_just_did_is_found_before_anyone_else_knows(redis: Redis) -> None:
    """Of this team only, and without a look at Redis; handed over it is still found."""
    stats = Looked(redis, time.time)
    id = new_id(time.time())
    stats.add(hit(request_id=id, team_id=1))
    found = await reports_of(stats).find(id, 1)
    assert found is not None
    assert stats.times == 0
    assert await reports_of(stats).find("req_" + "0" * 32, 1) is None
    await stats.flush()
    assert await reports_of(stats).find(id, 1) == found


def test_an_id_says_when_its_request_came() -> None:
    """To the millisecond; what is no id of ours says nothing."""
    at_s = time.time()
    assert arrived_at(new_id(at_s)) == pytest.approx(at_s, abs=0.001)
    assert new_id(at_s) != new_id(at_s)
    assert [arrived_at(other) for other in ("", "req_1", "chatcmpl-" + "0" * 32)] == [None, None, None]
