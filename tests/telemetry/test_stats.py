"""Counts over time on a real Redis: what a query answers after several workers have counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.journey.record import Attempt
from gateway.telemetry import measured_error
from gateway.telemetry.buckets import step
from gateway.telemetry.measured_error import Cell, CheckCounts
from gateway.telemetry.stats import Stats
from gateway.telemetry.summary import StatsWindow, percentiles
from tests.services import run_redis
from tests.telemetry.records import AT_S, hit, miss


class Clock:
    """Time that a test moves."""

    def __init__(self, now_s: float = AT_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


async def test_workers_add_up(redis: Redis) -> None:
    """What two workers counted is one summary: kinds, money, tokens, time, teams, models and deployments."""
    left, right = Stats(redis, Clock()), Stats(redis, Clock())
    left.add(miss())
    left.add(hit())
    right.add(hit(cache="semantic", team_id=2, alias="large"))
    right.add(miss(status=429, error="insufficient_quota", attempts=(), cost_microusd=0))
    of_no_fault = (Attempt("gpt", "too long", 1.0, is_refusal=True), Attempt("gpt", "cancelled", 1.0))
    left.add(miss(deployment="gpt", attempts=of_no_fault, cost_microusd=0))
    right.add(miss(status=502, error="upstream", attempts=(Attempt("gpt", "refused", 3.0),), cost_microusd=0))
    await left.flush()
    await right.flush()
    summary = await Stats(redis, Clock()).query(StatsWindow.HOUR)
    assert summary.total.by_kind == {"miss": 2, "exact": 1, "semantic": 1, "refused": 1, "failed": 1}
    assert summary.total.hit_rate == pytest.approx(2 / 4)
    assert summary.total.cost_microusd == 120
    assert summary.total.saved_microusd == 240
    assert summary.total.saved_ms == 596
    assert summary.total.saved_tokens == 102
    assert {team: tally.requests for team, tally in summary.by_team.items()} == {1: 5, 2: 1}
    assert summary.by_model["large"].by_kind == {"semantic": 1}
    assert summary.by_surface["chat"] == summary.total
    assert (summary.by_deployment["local"].ok, summary.by_deployment["gpt"].failed) == (1, 1)
    assert summary.by_deployment["local"].cost_microusd == 120


async def test_a_query_can_be_of_one_team_or_one_model(redis: Redis) -> None:
    """Filters narrow the total and the series alike."""
    stats = Stats(redis, Clock())
    stats.add(hit(alias="odd|name"))
    stats.add(hit(team_id=2))
    await stats.flush()
    by_team = await stats.query(StatsWindow.DAY, team_id=2)
    by_model = await stats.query(StatsWindow.DAY, model="odd|name")
    assert by_team.total.requests == by_model.total.requests == 1
    assert sum(point.tally.requests for point in by_team.series) == 1
    assert set(by_model.by_model) == {"odd|name"}


async def test_each_request_counts_in_one_surface(redis: Redis) -> None:
    """By its route, or as a line of a batch, of all workers; filters narrow surfaces too, and their sums are the total."""
    left, right = Stats(redis, Clock()), Stats(redis, Clock())
    left.add(miss(route="messages"))
    right.add(hit(route="messages", alias="odd|na/me"))
    left.add(miss(route="messages", status=429, error="insufficient_quota", attempts=(), cost_microusd=0))
    right.add(miss(route="responses", status=502, error="upstream"))
    left.add(miss(batch="batch_1"))
    right.add(hit(route="files", cache="bypass", team_id=2))
    await left.flush()
    await right.flush()
    summary = await left.query(StatsWindow.HOUR)
    by_kind = {surface: tally.by_kind for surface, tally in summary.by_surface.items()}
    assert by_kind == {
        "messages": {"miss": 1, "exact": 1, "refused": 1},
        "responses": {"failed": 1},
        "batch_lines": {"miss": 1},
        "files": {"bypass": 1},
    }
    told = summary.by_surface["messages"]
    assert (told.cost_microusd, told.hit_rate, told.saved_microusd, told.saved_tokens) == (120, 0.5, 120, 51)
    for name in ("requests", "cost_microusd", "saved_microusd", "prompt_tokens"):
        assert sum(getattr(one, name) for one in summary.by_surface.values()) == getattr(summary.total, name)
    assert set((await left.query(StatsWindow.DAY, team_id=2)).by_surface) == {"files"}
    assert set((await left.query(StatsWindow.DAY, model="odd|na/me")).by_surface) == {"messages"}


@pytest.mark.parametrize(
    ("window", "points", "reach_s"),
    [
        (StatsWindow.HOUR, 60, 3_600),
        (StatsWindow.DAY, 24, 86_400),
        (StatsWindow.WEEK, 28, 7 * 86_400),
        (StatsWindow.MONTH, 30, 30 * 86_400),
    ],
)
async def test_a_window_shows_its_time_and_no_other(
    redis: Redis, window: StatsWindow, points: int, reach_s: int
) -> None:
    """Each window has its points, ends now, counts what is inside and forgets what is older."""
    clock = Clock()
    stats = Stats(redis, clock)
    stats.add(hit())
    await stats.flush()
    summary = await stats.query(window)
    assert len(summary.series) == points
    assert summary.end_s - summary.start_s == reach_s
    assert summary.start_s <= AT_S < summary.end_s
    assert summary.series[-1].tally.requests == summary.total.requests == 1
    clock.now_s = AT_S + reach_s
    assert (await stats.query(window)).total.requests == 0


async def test_what_is_old_leaves_redis(redis: Redis) -> None:
    """Every bucket has a time to live."""
    stats = Stats(redis, Clock())
    stats.add(hit())
    await stats.flush()
    keys = await redis.keys("sameway:{stats}:*")
    assert len(keys) == 4
    for key in keys:
        assert await redis.ttl(key) > 0


async def test_counts_survive_an_outage_of_redis() -> None:
    """What could not be handed over is handed over later, once."""
    with run_redis() as server:
        client = Redis.from_url(server.url, retry=None)
        stats = Stats(client, Clock())
        server.stop()
        for _ in range(3):
            stats.add(hit())
            with pytest.raises(RedisConnectionError):
                await stats.flush()
        server.start()
        stats.add(hit())
        await stats.flush()
        await stats.flush()
        assert (await stats.query(StatsWindow.HOUR)).total.requests == 4
        await client.aclose()


async def test_the_latest_routes_come_newest_first_in_pages(redis: Redis) -> None:
    """Pages join without a gap or a repeat, and filters hold on every page."""
    stats = Stats(redis, Clock())
    for number in range(25):
        stats.add(miss(request_id=f"req_{number}", team_id=number % 2))
    await stats.flush()
    first = await stats.routes(lambda record: record.request.team_id == 1, limit=5)
    second = await stats.routes(lambda record: record.request.team_id == 1, before=first.cursor or "", limit=50)
    assert [record.request.id for record in first.records] == [f"req_{n}" for n in (23, 21, 19, 17, 15)]
    assert [record.request.id for record in second.records] == [f"req_{n}" for n in (13, 11, 9, 7, 5, 3, 1)]
    assert second.cursor is None
    assert first.records[0] == miss(request_id="req_23", team_id=1)
    stats.add(miss(request_id="req_25", team_id=1))
    stats.add(miss(request_id="req_26", team_id=0))
    await stats.flush()
    later = await stats.routes(lambda record: record.request.team_id == 1, after=first.newest)
    assert [record.request.id for record in later.records] == ["req_25"]
    assert (await stats.routes(lambda _: True, after=later.newest)).records == ()


async def test_the_list_of_routes_is_bounded(redis: Redis) -> None:
    """Of a burst the newest are kept, and the whole list never grows past its cap by much."""
    stats = Stats(redis, Clock())
    for second in range(30):
        for number in range(150):
            stats.add(miss(request_id=f"req_{second}_{number}"))
        await stats.flush()
    assert 2_000 <= await redis.xlen("sameway:routes") <= 2_200
    page = await stats.routes(lambda _: True, limit=1)
    assert page.records[0].request.id == "req_29_149"


async def test_near_misses_are_those_that_were_close(redis: Redis) -> None:
    """A miss with a similarity is a near miss; a hit, and a miss without, are not."""
    stats = Stats(redis, Clock())
    stats.add(miss(similarity=0.87, miss_reason="numbers_differ"))
    stats.add(miss())
    stats.add(hit(cache="semantic", similarity=0.97))
    await stats.flush()
    page = await stats.near_misses(lambda _: True)
    assert [(record.cache.similarity, record.cache.miss_reason) for record in page.records] == [
        (0.87, "numbers_differ")
    ]


@given(st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=200))
def test_a_percentile_is_within_ten_percent(values_ms: list[float]) -> None:
    """Whatever the values, the histogram's percentiles are those of the sorted list, give or take 10%."""
    histogram: dict[int, int] = {}
    for value_ms in values_ms:
        histogram[step(value_ms)] = histogram.get(step(value_ms), 0) + 1
    found = percentiles(histogram)
    ordered = sorted(values_ms)
    for share, got in ((0.5, found.p50_ms), (0.95, found.p95_ms), (0.99, found.p99_ms)):
        exact = ordered[-(-int(share * 100) * len(ordered) // 100) - 1]
        assert got == pytest.approx(exact, rel=0.1)


async def test_a_question_that_fails_is_no_client_s_failure(redis: Redis) -> None:
    """What the gateway asks for itself counts neither as failed nor as refused."""
    stats = Stats(redis, Clock())
    for status, error in ((200, ""), (502, "upstream_failed"), (499, "client_gone")):
        stats.add(miss(route="verify", cache="bypass", status=status, error=error))
    await stats.flush()
    assert (await stats.query(StatsWindow.DAY)).total.by_kind == {"bypass": 3}


async def test_latencies_of_hits_and_misses_are_told_apart(redis: Redis) -> None:
    """The summary and each point have the hits' and the misses' time to first token."""
    stats = Stats(redis, Clock())
    stats.add(hit(ttft_ms=1.0))
    stats.add(miss(ttft_ms=800.0))
    await stats.flush()
    summary = await stats.query(StatsWindow.HOUR)
    assert summary.ttft["hit"].p50_ms == pytest.approx(1.0, rel=0.1)
    assert summary.ttft["miss"].p50_ms == pytest.approx(800, rel=0.1)
    assert summary.ttft["all"].count == 2
    assert summary.series[-1].ttft_miss.p95_ms == pytest.approx(800, rel=0.1)
    assert summary.series[0].ttft_hit.p50_ms is None


async def test_checks_and_reports_of_a_day_add_up(redis: Redis) -> None:
    """By team and model, beside the requests they stand for; asked again, and when the hours have passed, they are the same."""
    clock = Clock()
    stats, other = Stats(redis, clock), Stats(redis, clock)
    for worker in (stats, other):
        worker.add(hit(cache="semantic"))
        worker.add(miss())
        worker.add_checks(1, "small", measured_error.checked(0.3, False, "a|b", is_verified=True))
        worker.add_checks(1, "small", measured_error.checked(0.03, None, "", is_verified=False))
        worker.add_checks(1, "small", measured_error.reported(is_wrong=True))
        await worker.flush()
    team, model = hit().request.team_id, hit().request.alias

    async def day() -> dict[tuple[int, str], CheckCounts]:
        total: dict[tuple[int, str], CheckCounts] = {}
        for hour in await stats.hours():
            for pair, counts in hour.counts.items():
                total.setdefault(pair, CheckCounts()).add(counts)
        return total

    for back_h in (0, 5, 5, 23):
        clock.now_s = AT_S + 3_600 * back_h
        samples = await day()
        assert (samples[team, model].requests, samples[team, model].hits) == (4, 2)
        found = samples[1, "small"]
        assert found.cells == {300: Cell(wrong=2), 30: Cell(open=2)}
        assert found.verified == {300: Cell(wrong=2)}
        assert (found.judges, found.reported_wrong) == ({"a/b": 2}, 2)
    assert (await stats.query(StatsWindow.DAY)).samples[1, "small"] == found
    assert (await stats.query(StatsWindow.DAY)).total.requests == 4
    counted = (await stats.certified())[(team, model), ""]
    assert (counted.requests, counted.hits) == (4, 2)
    clock.now_s = AT_S + 3_600 * 24
    assert (1, "small") not in await day()


async def test_what_is_no_statistic_is_passed_over(redis: Redis) -> None:
    """Damaged fields and records hide none of the others."""
    stats = Stats(redis, Clock())
    stats.add(hit())
    await stats.flush()
    for key in await redis.keys("sameway:{stats}:*"):
        for field in (
            b"\xff|1|exact|chat|small",
            b"requests|1",
            b"requests|team|exact|chat|small",
            b"by_kind|1|exact|chat|small",
        ):
            await redis.hset(key, field, 1)
        await redis.hset(key, "requests|2|exact|chat|small", "no number")
    for data in (b"\xc1", b"\x81\xaarequest_id\xa1\xff"):
        await redis.xadd("sameway:routes", {"r": data})
    assert (await stats.query(StatsWindow.HOUR)).total.requests == 1
    assert len((await stats.routes(lambda record: True)).records) == 1
