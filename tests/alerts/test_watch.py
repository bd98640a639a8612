"""Alerts of budgets: once a window, by a clock of the test's own, to a receiver that checks the signature."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from redis.asyncio import Redis
from structlog.testing import capture_logs

from gateway.accounts.accounts import Accounts
from gateway.alerts.mail import Mail
from gateway.alerts.watch import KEPT_S, QUEUE_MAX, VALUES_TOLD, AlertWatch, Channel
from gateway.alerts.webhook import Webhook
from gateway.app import create_app
from gateway.settings import AlertSettings, Settings
from policies import Budgets, Hold, WindowKind
from policies.counters import Need
from policies.holds import READY_KEY, Charge
from policies.windows import USER, Unit
from tests.e2e.worker import keep_collector
from tests.services import RedisServer
from tests.world import until

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
START_S = datetime(2096, 6, 1, tzinfo=UTC).timestamp()  # far from the present: Redis expires nothing
DAY_S = 86_400.0
QUEUE, LOCK = "sameway:{alerts}:queue", "sameway:{alerts}:lock"


@dataclass
class Receiver:
    """A server that answers with `statuses`, then 200, and keeps what it got."""

    port: int = 0
    statuses: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=t"

    @property
    def marks(self) -> list[tuple[str, int | None]]:
        """The type and the threshold of each message."""
        bodies = [json.loads(body) for _, body in self.got]
        return [(body["type"], body["data"]["percent"]) for body in bodies]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(made.statuses.pop(0) if made.statuses else 200)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


class Place:
    """A team with budgets, a clock, and as many workers as a test makes."""

    def __init__(self, redis: Redis, accounts: Accounts, team_id: int) -> None:
        self.redis = redis
        self.accounts = accounts
        self.team_id = team_id
        self.now_s = START_S
        self.budgets = Budgets(redis, lambda: self.now_s)
        self.outcomes: list[tuple[str, str]] = []
        self._webhooks: list[Channel] = []
        self._spent = 0

    def worker(self, url: str | None = None, **settings: Any) -> AlertWatch:
        channels: dict[str, Channel] = {}
        if url is not None:
            channels["webhook"] = Webhook(url, SECRET)
            self._webhooks.append(channels["webhook"])
        given = AlertSettings(**settings)
        if given.smtp_host is not None:
            channels["email"] = Mail(given, timeout_s=1.0)
        return AlertWatch(
            self.redis,
            self.accounts,
            self.budgets,
            given,
            channels,
            count=lambda *outcome: self.outcomes.append(outcome),
            clock=lambda: self.now_s,
        )

    async def budget(self, limit: int, window: WindowKind = WindowKind.MONTH, **fields: Any) -> int:
        return (await self.accounts.create_budget(self.team_id, window, limit, **fields)).id

    async def spend(self, microusd: int) -> None:
        self._spent += 1
        assert await self.budgets.settle(self.budgets.unreserved(f"h{self._spent}", self.team_id), microusd, b"{}")

    def close(self) -> None:
        for webhook in self._webhooks:
            webhook.aclose()


@pytest.fixture
async def place(redis: Redis, tmp_path: Path) -> AsyncIterator[Place]:
    accounts = Accounts(f"sqlite:///{tmp_path / 'sameway.db'}", clock=lambda: made.now_s)
    made = Place(redis, accounts, 0)
    await accounts.open()
    made.team_id = (await accounts.create_team("acme")).id
    yield made
    made.close()
    await accounts.close()


def reached(*percents: int) -> list[tuple[str, int]]:
    return [("budget.threshold_reached", percent) for percent in percents]


async def test_each_threshold_is_sent_once_a_window(place: Place, receiver: Receiver) -> None:
    """At 49% there is nothing; then one message a threshold, and all again in the next month."""
    await place.budget(1_000_000)
    place.now_s += 29.9 * DAY_S  # so late that nothing is used up before the end at its pace
    worker = place.worker(receiver.url)
    for spend, expected in ((499_999, ()), (1, (50,)), (299_999, (50,)), (1, (50, 80)), (300_000, (50, 80, 100))):
        await place.spend(spend)
        for _ in range(2):
            place.now_s += 5
            assert await worker.step()
        assert receiver.marks == reached(*expected)
    place.now_s += DAY_S
    await place.spend(800_000)
    await worker.step()
    assert receiver.marks == [*reached(50, 80, 100, 50, 80), ("budget.exhaustion_projected", None)]


async def test_a_message_is_signed_and_says_what_happened(place: Place, receiver: Receiver) -> None:
    """The verifier of OpenAI's client, for the same standard, takes it; an altered one it does not."""
    budget_id = await place.budget(2_000_000)
    place.now_s += 29.9 * DAY_S
    await place.spend(1_000_000)
    with capture_logs() as lines:
        await place.worker(receiver.url).step()
    ((headers, body),) = receiver.got
    hooks = OpenAI(api_key="-", webhook_secret=SECRET).webhooks
    hooks.verify_signature(body.decode(), headers, tolerance=10**10)
    with pytest.raises(Exception, match="signature"):
        hooks.verify_signature(body.decode().replace("1000000", "1"), headers, tolerance=10**10)
    assert headers["webhook-timestamp"] == str(int(place.now_s))
    data = json.loads(body)["data"]
    assert (data["budget_id"], data["spent"], data["limit"], data["unit"]) == (budget_id, 1_000_000, 2_000_000, "money")
    assert data["text"] == "The month budget of team acme has reached 50%: $1 of $2"
    assert [(line["event"], line["budget_id"], line["percent"]) for line in lines] == [("budget_alert", budget_id, 50)]


async def test_a_budget_that_ends_before_its_window_is_announced_once(place: Place, receiver: Receiver) -> None:
    """10% after three of thirty days is the plan; 20% is not, and says when nothing is left."""
    await place.budget(1_000_000)
    await place.budget(1_000_000, WindowKind.TOTAL)  # it has no end
    place.now_s += 3 * DAY_S
    worker = place.worker(receiver.url)
    await place.spend(100_000)
    await worker.step()
    assert receiver.got == []
    await place.spend(100_000)
    for _ in range(3):
        place.now_s += 5
        await worker.step()
    ((_, body),) = receiver.got
    message = json.loads(body)
    assert (message["type"], message["data"]["percent"]) == ("budget.exhaustion_projected", None)
    assert message["data"]["used_up_at"].startswith("2096-06-16T")


async def test_two_workers_and_a_restart_send_it_once(place: Place, receiver: Receiver) -> None:
    """One has the lock; after a kill the next one goes on, knows what was sent and sends what was not."""
    await place.budget(1_000_000, WindowKind.TOTAL)
    one, two = place.worker(receiver.url), place.worker(receiver.url)
    receiver.statuses = [500]
    await place.spend(600_000)
    assert await one.step()
    assert not await two.step()
    await place.redis.delete(LOCK)  # as its lease ends
    assert await two.step()
    assert len(receiver.got) == 1
    place.now_s += 5
    assert await two.step()
    assert receiver.marks == reached(50, 50)
    ids = {headers["webhook-id"] for headers, _ in receiver.got}
    stamps = [int(headers["webhook-timestamp"]) for headers, _ in receiver.got]
    assert len(ids) == 1
    assert stamps[1] == stamps[0] + 5
    await place.redis.delete(LOCK)
    place.now_s += DAY_S
    assert await place.worker(receiver.url).step()
    assert len(receiver.got) == 2


async def test_workers_that_both_have_the_lock_raise_it_once(place: Place) -> None:
    """The mark decides, and not the lock."""
    await place.budget(1_000_000, WindowKind.TOTAL)
    await place.spend(600_000)
    for _ in range(2):
        await place.redis.delete(LOCK)
        await place.worker("http://127.0.0.1:9/").step()
    assert await place.redis.zcard(QUEUE) == 1


async def test_a_receiver_that_is_away_is_asked_less_and_less_for_a_day(place: Place, receiver: Receiver) -> None:
    """Redirects are failures like others and are not followed; then the message is dropped, with a line."""
    await place.budget(1_000_000, WindowKind.TOTAL)
    await place.spend(600_000)
    worker = place.worker(receiver.url)
    receiver.statuses = [302, 404, 503] * 100
    with capture_logs() as lines:
        for _ in range(int((KEPT_S + 7_200) / 300)):
            await worker.step()
            place.now_s += 300
            await place.redis.delete(LOCK)
    assert 10 < len(receiver.got) < 25
    assert all(headers["host"] == f"127.0.0.1:{receiver.port}" for headers, _ in receiver.got)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == [
        "budget_alert",
        "alert_not_delivered",
    ]
    assert "redirects are not followed" in str(lines)
    assert "token" not in str(lines)
    assert await place.redis.zcard(QUEUE) == 0


async def test_the_queue_is_bounded_and_passes_over_what_is_no_message(place: Place, receiver: Receiver) -> None:
    """A full queue takes no more and says so; damaged bytes leave it, and what is behind them is sent."""
    await place.budget(1_000_000, WindowKind.TOTAL)
    await place.redis.zadd(QUEUE, {f"later-{i}": (START_S + DAY_S) * 1000 for i in range(QUEUE_MAX)})
    worker = place.worker(receiver.url)
    await place.spend(500_000)
    with capture_logs() as lines:
        await worker.step()
    assert [line["event"] for line in lines] == ["budget_alert", "alert_not_queued"]
    await place.redis.delete(QUEUE)
    await place.redis.zadd(QUEUE, {b"\xff\x00": 1})
    await place.spend(300_000)
    place.now_s += 5
    await worker.step()
    assert receiver.marks == reached(80)


async def test_a_new_limit_and_a_reset_are_alerted_anew(place: Place) -> None:
    """Half of a higher limit is another half; and a budget that counts from 0 has its thresholds before it."""
    await place.accounts.update_budget(await place.budget(1_000_000, WindowKind.TOTAL), limit=1_000_001)
    (budget,) = await place.accounts.list_budgets()
    worker = place.worker()
    await place.spend(1_000_000)
    seen = []
    for limit in (1_000_001, 2_000_000, 2_000_000):
        await place.accounts.update_budget(budget.id, limit=limit)
        place.now_s += 5
        with capture_logs() as lines:
            await worker.step()
        seen.append([line["percent"] for line in lines])
    assert seen == [[50, 80], [50], []]
    assert await place.redis.zcard(QUEUE) == 0


async def test_nothing_is_raised_where_nothing_is_asked_for(place: Place) -> None:
    """Without thresholds and projections there are no lines; nor for a limit of requests that none has used."""
    await place.budget(1_000_000)
    await place.budget(0, unit=Unit.REQUESTS)
    place.now_s += 3 * DAY_S
    with capture_logs() as lines:
        await place.worker().step()
        await place.spend(900_000)
        await place.worker(thresholds=[], is_projected=False).step()
    assert lines == []


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("https://hooks.example/x?token=t", True),
        ("http://127.0.0.1:8000/x", True),
        ("http://[::1]/x", True),
        ("http://localhost/x", True),
        ("http://hooks.example/x", False),
        ("http://127.0.0.1.evil.example/x", False),
        ("http://10.0.0.1/x", False),
        ("https://user:secret-word@hooks.example/x", False),
        ("https://hooks.example/x\r\nevil: 1", False),
        ("file:///etc/passwd", False),
    ],
)
def test_a_webhook_is_encrypted_or_on_this_host(url: str, is_good: bool) -> None:
    """`is_http_allowed` is the way to another host without TLS; a refusal shows no secret of the URL."""
    given: Any = {"webhook_url": url}
    if is_good:
        assert Settings(alerts=given, alerts_secret=SECRET).alerts.webhook_url == url
        with pytest.raises(ValueError, match="found without a secret, expected SAMEWAY_ALERTS_SECRET"):
            Settings(alerts=given)
        return
    with pytest.raises(ValueError, match=r"alerts\.webhook_url: found") as refusal:
        Settings(alerts=given, alerts_secret=SECRET)
    assert "secret-word" not in str(refusal.value).partition("[type=")[0]
    if url.startswith("http:"):
        allowed: Any = {**given, "is_http_allowed": True}
        assert Settings(alerts=allowed, alerts_secret=SECRET).alerts.webhook_url == url


async def test_a_worker_of_the_application_alerts(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of a started worker finds the budget and sends its alerts."""
    alerts: Any = {"webhook_url": receiver.url}
    settings = Settings(data_dir=tmp_path, redis_url=redis_server.url, alerts=alerts, alerts_secret=SECRET)
    accounts = Accounts(settings.sql_url)
    await accounts.open()
    team = await accounts.create_team("acme")
    await accounts.create_budget(team.id, WindowKind.TOTAL, 1_000_000)
    await accounts.close()
    budgets = Budgets(redis)
    assert await budgets.settle(budgets.unreserved("h", team.id), 800_000, b"{}")
    keep_collector(monkeypatch)
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        await until(lambda: len(receiver.got) == 2)
    assert receiver.marks == reached(50, 80)
    assert await redis.get(LOCK) is None


async def _spend_by(place: Place, budget_id: int, users: dict[str, int]) -> None:
    """Requests of these users, charged what each may cost."""
    budget = next(one for one in await place.accounts.list_budgets() if one.id == budget_id)
    for user, microusd in users.items():
        hold = await place.budgets.reserve(
            f"of {user}", place.team_id, [budget], Need(microusd, values={USER: user}), 60
        )
        assert isinstance(hold, Hold)
        charges = [Charge(taken.name, taken.field, microusd, taken.keep_until_ms) for taken in hold.more]
        assert await place.budgets.settle(hold, microusd, b"{}", charges)


async def test_no_user_takes_the_alert_of_another(place: Place, receiver: Receiver) -> None:
    """Each value of a budget on each has its own, also where its name begins like one that came first."""
    budget = await place.budget(1_000_000, WindowKind.TOTAL, axis=USER)
    await place.redis.set(READY_KEY, "1")
    worker = place.worker(receiver.url)
    long = "u" * 100
    for users in ({long + "1": 1_000_000}, {long + "2": 500_000, "alice": 850_000}):
        await _spend_by(place, budget, users)
        for _ in range(2):
            place.now_s += 5
            assert await worker.step()
    told = [(data["value"], data["percent"]) for _, body in receiver.got for data in [json.loads(body)["data"]]]
    shown = long[:64]
    assert told[:3] == [(shown, 50), (shown, 80), (shown, 100)]
    assert sorted(told[3:]) == sorted([(shown, 50), ("alice", 50), ("alice", 80)])


async def test_a_flood_of_users_is_told_of_as_it_doubles(place: Place, receiver: Receiver) -> None:
    """After the first ones a message says how many there are; the next window begins anew."""
    budget = await place.budget(1_000_000, WindowKind.MONTH, axis=USER)
    await place.redis.set(READY_KEY, "1")
    worker = place.worker(receiver.url, thresholds=[80], is_projected=False)
    for count in (30, 70):
        await _spend_by(place, budget, {f"{count}-{i}": 800_000 for i in range(count)})
        place.now_s += 5
        await worker.step()
    told = [json.loads(body)["data"]["text"] for _, body in receiver.got]
    assert len(told) == VALUES_TOLD + 2  # and the 32nd and the 64th
    assert told[-1].endswith("has reached 80%: $0.8 of $1; so it is for 99 more")
    place.now_s += 31 * DAY_S
    await _spend_by(place, budget, {"later": 800_000})
    await worker.step()
    assert json.loads(receiver.got[-1][1])["data"]["value"] == "later"
