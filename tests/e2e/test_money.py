"""Budgets that hold, and a ledger that agrees with them."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI, RateLimitError

from tests.e2e.gateway import WITHOUT_EMBEDDER, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream

_fresh = itertools.count()


def new_team(gateway: Gateway, limit_usd: float | None = None, **fields: Any) -> tuple[int, str]:
    """A team with a key and, where a limit is given, a hard budget a day."""
    team = gateway.admin("POST", "/teams", json={"name": f"money {next(_fresh)}", **fields})
    key = gateway.admin("POST", f"/teams/{team['id']}/keys", json={"name": "k"})
    if limit_usd is not None:
        budget = {"window": "day", "limit_microusd": round(limit_usd * 1e6), "is_hard": True}
        gateway.admin("POST", f"/teams/{team['id']}/budgets", json=budget)
    return team["id"], key["plaintext"]


def ledger_microusd(gateway: Gateway, team_id: int) -> int:
    """The sum of a team's ledger rows in SQL."""
    total, cursor = 0, None
    while True:
        page = gateway.admin("GET", "/ledger", params={"team_id": team_id, **({"cursor": cursor} if cursor else {})})
        total += sum(row["cost_microusd"] for row in page["rows"])
        cursor = page["cursor"]
        if not cursor:
            return total


def budget_of(gateway: Gateway, team_id: int) -> Any:
    return gateway.admin("GET", f"/teams/{team_id}/budgets")["budgets"][0]


def test_a_budget_is_never_passed(gateway: Gateway, upstream: Upstream) -> None:
    """Forty requests at once against a budget for a few: what is spent stays under it, no hold stays, the ledger agrees."""
    team_id, key = new_team(gateway, limit_usd=0.006)
    with ThreadPoolExecutor(20) as pool:
        replies = list(
            pool.map(lambda i: gateway.chat(f"spend {team_id} {i}", model="dear", key=key, max_tokens=900), range(40))
        )
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {200, 429}
    assert all(int(reply.headers["retry-after"]) > 0 for reply in replies if reply.status_code == 429)
    wait_for(lambda: budget_of(gateway, team_id)["held_microusd"] == 0)
    state = budget_of(gateway, team_id)
    assert 0 < state["spent_microusd"] <= 6000
    wait_for(lambda: ledger_microusd(gateway, team_id) == state["spent_microusd"])
    costs = [float(r.headers["x-sameway-cost-usd"]) for r in replies if r.status_code == 200]
    assert round(sum(costs) * 1e6) == state["spent_microusd"]


@pytest.fixture
def workers(upstream_process: Upstream, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway of two workers, whose one model costs half a cent for ten tokens."""
    dear = deployment(upstream_process.url, "dear", output_tokens_max=50) | {"price": {"output_usd_per_mtok": 500.0}}
    with run_gateway(
        tmp_path, {**WITHOUT_EMBEDDER, "workers": 2, "models": {"dear": {"deployments": [dear]}}}
    ) as gateway:
        gateway.wait_ready()
        yield gateway


@pytest.mark.long
def test_racing_calls_of_a_run_never_pass_its_budget(workers: Gateway) -> None:
    """600 calls at once, over both workers, against a run's $1.25: what is held and spent stays under it, also while
    they run; another run is served; the refusal says what to do, in each surface's shape.
    """
    gateway = workers
    team_id, key = new_team(gateway)
    limit = {"axis": "session", "window": "total", "limit_microusd": 1_250_000}
    made = gateway.admin("POST", f"/teams/{team_id}/budgets", json=limit)
    run = {"authorization": f"Bearer {key}", "x-sameway-session": f"run {team_id}"}
    seen = list[int]()

    def ask(number: int, path: str = "/chat/completions") -> httpx.Response:
        body = {"model": "dear", "max_tokens": 50, "messages": [{"role": "user", "content": f"run {team_id} {number}"}]}
        return client.post(f"{gateway.base_url}{path}", json=body, headers=run)

    with httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        with ThreadPoolExecutor(40) as pool:
            asking = [pool.submit(ask, number) for number in range(600)]
            while not all(each.done() for each in asking):
                state = budget_of(gateway, team_id)
                seen.append(state["spent_microusd"] + state["held_microusd"])
        statuses = [each.result().status_code for each in asking]
        assert set(statuses) == {200, 402}
        assert 0 < max(seen) <= 1_250_000
        messages = ask(0, "/messages")
        assert (messages.status_code, messages.json()["error"]["type"]) == (402, "billing_error")
        assert "Stop here and tell your user" in messages.json()["error"]["message"]
        run["x-sameway-session"] = "another"
        assert ask(0).status_code == 200
    wait_for(lambda: budget_of(gateway, team_id)["held_microusd"] == 0)
    values = gateway.admin("GET", f"/budgets/{made['id']}/values")["values"]
    (spent,) = [each["spent"] for each in values if each["value"] == f"run {team_id}"]
    assert 1_250_000 - 30_000 < spent <= 1_250_000
    sums = gateway.admin("GET", "/ledger/sums", params={"team_id": team_id, "by": "session"})["sums"]
    assert {row["session"]: row["cost_microusd"] for row in sums}[f"run {team_id}"] == spent


def test_a_broke_team_gets_its_cached_answers(gateway: Gateway, upstream: Upstream) -> None:
    """Out of money: refused once and not retried by the SDK, while cached answers are still served."""
    team_id, key = new_team(gateway)
    first = gateway.chat("cached before", model="dear", key=key)
    assert first.status_code == 200
    gateway.admin("POST", f"/teams/{team_id}/budgets", json={"window": "month", "limit_microusd": 100, "is_hard": True})
    upstream.reset()
    with (
        OpenAI(base_url=gateway.base_url, api_key=key, max_retries=2) as client,
        pytest.raises(RateLimitError) as refused,
    ):
        client.chat.completions.create(model="dear", messages=[{"role": "user", "content": "new"}])
    body: Any = refused.value.body
    assert body["code"] == "insufficient_quota"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert "more than the whole budget" in body["message"]
    assert "retry-after" not in refused.value.response.headers  # the next window has no more room
    assert upstream.seen().generations == 0

    def refusals() -> int:
        return len([r for r in gateway.records() if r.get("team_id") == team_id and r["status"] == 429])

    wait_for(lambda: refusals() == 1)
    again = gateway.chat("cached before", model="dear", key=key)
    assert again.headers["x-sameway-cache"] == "exact"
    assert again.content == first.content


def test_a_soft_budget_warns_and_serves(gateway: Gateway) -> None:
    """A soft budget that is passed refuses nobody."""
    team_id, key = new_team(gateway)
    gateway.admin("POST", f"/teams/{team_id}/budgets", json={"window": "hour", "limit_microusd": 1, "is_hard": False})
    assert gateway.chat("soft one", model="dear", key=key).status_code == 200
    assert gateway.chat("soft two", model="dear", key=key).status_code == 200


def test_a_failed_generation_costs_nothing(gateway: Gateway) -> None:
    """A hold whose generation never began is released, and there is no row."""
    team_id, key = new_team(gateway, limit_usd=1.0)
    assert gateway.chat("fails", model="rejecting", key=key).status_code == 400
    wait_for(lambda: budget_of(gateway, team_id)["held_microusd"] == 0)
    assert budget_of(gateway, team_id)["spent_microusd"] == 0


def test_rate_limits(gateway: Gateway) -> None:
    """Requests a minute hold for a team, the headers say how many are left, and a refusal says when to come back."""
    _, key = new_team(gateway, requests_per_min=3)
    replies = [gateway.chat(f"limited {next(_fresh)}", key=key) for _ in range(5)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies[:3]] == ["2", "1", "0"]
    assert replies[0].headers["x-ratelimit-limit-requests"] == "3"
    assert replies[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(replies[3].headers["retry-after"]) <= 60


def test_keys_are_limited_and_revoked(gateway: Gateway) -> None:
    """A key may be kept to some models, and stops working when it is revoked."""
    team_id, _ = new_team(gateway)
    made = gateway.admin("POST", f"/teams/{team_id}/keys", json={"name": "narrow", "models": ["mock"]})
    assert gateway.chat("may", key=made["plaintext"]).status_code == 200
    assert gateway.chat("may not", model="dear", key=made["plaintext"]).status_code == 403
    gateway.admin("DELETE", f"/keys/{made['key']['id']}")
    assert gateway.chat("may", key=made["plaintext"]).status_code == 401


def test_the_bound_that_is_held_is_sent(gateway: Gateway, upstream: Upstream) -> None:
    """Where a budget holds money for an answer of some length, the deployment is told that length; without a budget it is not."""
    _, held = new_team(gateway, limit_usd=1.0)
    _, free = new_team(gateway)
    gateway.chat(f"bounded {next(_fresh)}", model="dear", key=held)
    gateway.chat(f"unbounded {next(_fresh)}", model="dear", key=free)
    gateway.chat(f"own bound {next(_fresh)}", model="dear", key=held, max_completion_tokens=7)
    bodies = [request["body"] for request in upstream.seen().requests]
    assert [body.get("max_tokens") for body in bodies] == [1000, None, 7]


def test_clients_who_leave_early_leave_no_hold(gateway: Gateway) -> None:
    """Clients that go away at any moment of a request hold nobody's money for longer than their request."""
    team_id, key = new_team(gateway, limit_usd=5.0)
    headers = {"authorization": f"Bearer {key}"}

    def leave(number: int) -> None:
        body = {"model": "slow", "messages": [{"role": "user", "content": f"leaving {number}"}], "stream": True}
        with contextlib.suppress(httpx.TransportError):
            timeout = httpx.Timeout(5.0, read=0.001 * (number % 30))
            httpx.post(f"{gateway.base_url}/chat/completions", json=body, headers=headers, timeout=timeout)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(leave, range(90)))
    wait_for(lambda: budget_of(gateway, team_id)["held_microusd"] == 0, 10, lambda: str(budget_of(gateway, team_id)))


def test_hits_cost_no_tokens(gateway: Gateway) -> None:
    """A tokens-a-minute limit is charged for generations, corrected to what they really took, and not for hits."""
    _, key = new_team(gateway, tokens_per_min=2000)
    asked = f"tokens {next(_fresh)}"
    first = gateway.chat(asked, key=key, max_tokens=100)
    assert first.headers["x-ratelimit-limit-tokens"] == "2000"
    for _ in range(40):
        hit = gateway.chat(asked, key=key, max_tokens=100)
        assert hit.status_code == 200
        assert hit.headers["x-sameway-cache"] == "exact"
    assert int(hit.headers["x-ratelimit-remaining-tokens"]) > 1900
    refused = gateway.chat(f"tokens {next(_fresh)}", key=key, max_tokens=5000)
    assert refused.status_code == 429
    assert refused.headers["x-should-retry"] == "false"


def test_one_money_has_one_total(gateway: Gateway, upstream: Upstream) -> None:
    """Ledger, its sums and files, savings, budget, statistics and metrics agree to the µUSD on misses, hits, a failover, and
    clients that left before the first token and amid a stream; and so do savings, sums by key and session, and statistics on
    what was saved."""
    team_id, key = new_team(gateway, limit_usd=50.0)
    whose = {"team_id": team_id}

    def spent_in_metrics() -> int:
        lines = gateway.observe("/metrics").text.splitlines()
        return sum(round(float(line.split()[-1]) * 1e6) for line in lines if line.startswith("sameway_cost_usd_total{"))

    before = spent_in_metrics()
    for asked in ("total 1", "total 1", "total 1", "total 2"):
        assert gateway.chat(asked, key=key).status_code == 200
    assert gateway.chat("total 3", "flaky", key).status_code == 200
    for model, is_stream in (("slow", True), ("late", False)):
        body = {"model": model, "messages": [{"role": "user", "content": "total left"}], "stream": is_stream}
        headers = {"authorization": f"Bearer {key}"}
        url, timeout = f"{gateway.base_url}/chat/completions", httpx.Timeout(5.0, read=0.5)
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", url, json=body, headers=headers, timeout=timeout) as reply,
        ):
            next(reply.iter_lines())

    def totals() -> dict[str, int]:
        savings = gateway.admin("GET", "/savings", params=whose)
        [summed] = gateway.admin("GET", "/ledger/sums", params=whose)["sums"]
        files = {
            path: list(csv.DictReader(gateway.observe(f"/admin/api/{path}.csv?team_id={team_id}").text.splitlines()))
            for path in ("ledger", "ledger/sums", "savings")
        }
        return {
            "ledger": ledger_microusd(gateway, team_id),
            "sums": summed["cost_microusd"],
            "savings": savings["spent_microusd"] + savings["unknown_cost_microusd"],
            "budget": budget_of(gateway, team_id)["spent_microusd"],
            "statistics": gateway.admin("GET", "/stats", params={"team": team_id})["total"]["cost_microusd"],
            "metrics": spent_in_metrics() - before,
            "rows of a file": sum(int(row["cost_microusd"]) for row in files["ledger"]),
            "sums of a file": sum(int(row["cost_microusd"]) for row in files["ledger/sums"]),
            "lines of a file": sum(int(row["amount_microusd"]) for row in files["savings"] if row["line"] == "spent"),
        }

    wait_for(
        lambda: gateway.admin("GET", "/ledger/sums", params=whose)["sums"][0]["requests"] == 5,
        20,
        lambda: str(totals()),
    )
    wait_for(lambda: len({*totals().values()}) == 1 and totals()["ledger"] > 0, 10, lambda: str(totals()))

    def saved() -> dict[str, int]:
        by = {
            groups: sum(
                one["saved_microusd"]
                for one in gateway.admin("GET", "/ledger/sums", params={**whose, "by": groups})["sums"]
            )
            for groups in ("", "key", "session", "model,day")
        }
        savings, stats = (
            gateway.admin("GET", "/savings", params=whose),
            gateway.admin("GET", "/stats", params={"team": team_id}),
        )
        return {**by, "savings": savings["saved_microusd"], "statistics": stats["total"]["saved_microusd"]}

    wait_for(lambda: len({*saved().values()}) == 1 and saved()["savings"] > 0, 10, lambda: str(saved()))
