"""Two hosts: gateways that share a Redis, a PostgreSQL, a bucket for files and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from openai import OpenAI
from redis import Redis

from policies.holds import LEDGER_STREAM, READY_KEY
from tests.e2e.gateway import ADMIN_KEY, API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.test_money import budget_of, ledger_microusd, new_team
from tests.e2e.upstream import Upstream
from tests.services import PostgresServer, RedisServer, S3Server, run_postgres, run_redis, run_s3

_BATCH_LINES = int(os.environ.get("SAMEWAY_TEST_BATCH_LINES", "400"))  # 2,000 take a minute

ENV = {"SAMEWAY_SECRET": "one secret for every host, or no host reads the other's cache"}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with run_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with run_redis() as server:
        yield server


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with run_s3() as server:
        yield server


@pytest.fixture(scope="module")
def hosts(
    upstream_process: Upstream,
    postgres: PostgresServer,
    redis: RedisServer,
    store: S3Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Gateway, Gateway]]:
    """Two gateways on one Redis and one database; the first start of both at once makes the schema once."""
    with contextlib.ExitStack() as stack:
        config: dict[str, Any] = {
            "redis_url": redis.url,
            "database_url": postgres.create_database(),
            "cache": {"is_semantic": False},
            "budgets": {"hold_lease_s": 5},
            "batches": {"files_url": store.url},
            "models": {
                "dear": {"deployments": [deployment(upstream_process.url, "dear", output_tokens_max=1000)]},
                "slow": {"deployments": [deployment(upstream_process.url, "slow", "mock?delay_ms=1000")]},
                "late": {"deployments": [deployment(upstream_process.url, "late", "mock?delay_ms=100")]},
            },
        }
        folders: list[Path] = [tmp_path_factory.mktemp(name) for name in ("east", "west")]
        with ThreadPoolExecutor(2) as pool:
            starting = [
                pool.submit(stack.enter_context, run_gateway(folder, config, env={**ENV, **store.env}))
                for folder in folders
            ]
            east, west = (each.result() for each in starting)
        east.wait_ready()
        west.wait_ready()
        yield east, west


def test_a_key_made_on_one_host_opens_the_other(hosts: tuple[Gateway, Gateway]) -> None:
    """Accounts are one: a key made here is known there, and revoked here is refused there."""
    east, west = hosts
    team_id, key = new_team(east)
    wait_for(lambda: west.chat("hello", model="dear", key=key).status_code == 200)
    key_id = west.admin("GET", f"/teams/{team_id}/keys")["keys"][0]["id"]
    east.admin("DELETE", f"/keys/{key_id}")
    wait_for(lambda: west.chat("hello", model="dear", key=key).status_code == 401)


def test_an_id_that_postgresql_does_not_take_is_not_there(hosts: tuple[Gateway, Gateway]) -> None:
    """A NUL in an id is the client's 404, and no failure of the database that clients ask again about."""
    east, _ = hosts
    headers = {"authorization": f"Bearer {API_KEY}"}
    for path in ("batches", "files", "responses", "conversations", "models"):
        assert httpx.get(f"{east.base_url}/{path}/a%00b", headers=headers).status_code == 404
    assert httpx.post(f"{east.base_url}/batches/a%00b/cancel", headers=headers).status_code == 404


def test_what_one_host_was_told_the_other_answers(hosts: tuple[Gateway, Gateway], upstream: Upstream) -> None:
    """The cache is one: an answer recorded by one host is an exact hit of the other."""
    east, west = hosts
    first = east.chat("who answers this?", model="dear")
    again = west.chat("who answers this?", model="dear")
    kinds = first.headers["x-sameway-cache"], again.headers["x-sameway-cache"]
    assert kinds in (("miss", "exact"), ("miss", "coalesced"))  # it may still be recorded
    assert again.content == first.content
    assert upstream.seen().generations == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_one_host_is_asked_the_other_waits_for(
    hosts: tuple[Gateway, Gateway], upstream: Upstream, is_stream: bool
) -> None:
    """The same request at two hosts at once is generated once; the other host replays the stored answer, for nothing."""
    content = f"who answers this at once? {is_stream}"
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: hosts[i % 2].chat(content, model="slow", stream=is_stream), range(8)))
    assert {reply.status_code for reply in replies} == {200}
    assert Counter(reply.headers["x-sameway-cache"] for reply in replies) == {"miss": 1, "coalesced": 7}
    assert upstream.seen().generations == 1


def test_a_leader_that_is_killed_is_not_awaited(hosts: tuple[Gateway, Gateway], upstream: Upstream) -> None:
    """The worker that makes an answer is killed: the host that waits for it makes the answer itself."""
    east, west = hosts
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(east.chat, "who dies of this?", "slow")
        wait_for(lambda: upstream.seen().generations == 1)
        following = pool.submit(west.chat, "who dies of this?", "slow")
        for worker in east.children("gateway worker"):
            worker.kill()
        reply = following.result(20)
        assert leading.exception(20) is not None
    assert (reply.status_code, reply.headers["x-sameway-cache"]) == (200, "miss")
    assert upstream.seen().generations == 2
    east.wait_ready()


def test_one_budget_holds_over_both_hosts(hosts: tuple[Gateway, Gateway]) -> None:
    """Forty requests over two hosts against money for a few: never passed, nothing held, one row for each that was paid."""
    east, west = hosts
    team_id, key = new_team(east, limit_usd=0.006)
    wait_for(lambda: west.chat("known?", model="dear", key=key, max_tokens=1).status_code == 200)
    with ThreadPoolExecutor(20) as pool:
        replies = list(
            pool.map(
                lambda i: hosts[i % 2].chat(f"spend {team_id} {i}", model="dear", key=key, max_tokens=900), range(40)
            )
        )
    assert {reply.status_code for reply in replies} == {200, 429}
    wait_for(lambda: budget_of(east, team_id)["held_microusd"] == 0, 5)  # before its lease ends
    spent = budget_of(west, team_id)["spent_microusd"]
    assert 0 < spent <= 6000
    wait_for(lambda: ledger_microusd(west, team_id) == spent)


def test_both_hosts_run_a_batch_and_each_is_killed(hosts: tuple[Gateway, Gateway], store: S3Server) -> None:
    """Its lines run on both, and its files lie in a bucket, which is away for a while; the workers of one host and then of
    the other are killed in the middle: each line is there once, and the ledger is exact."""
    east, west = hosts
    team_id, key = new_team(east, limit_usd=10.0)
    names = [f"line-{number}" for number in range(_BATCH_LINES)]

    def body(name: str) -> dict[str, Any]:
        return {"model": "late", "messages": [{"role": "user", "content": f"{team_id} {name}"}], "max_tokens": 5}

    url = "/v1/chat/completions"
    lines = [json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body(name)}) for name in names]
    with OpenAI(base_url=west.base_url, api_key=key, max_retries=3) as client:
        wait_for(lambda: west.chat("known?", model="dear", key=key).status_code == 200)
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch_id = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h").id
        wait_for(lambda: batch_lines(east) > 0 and batch_lines(west) > 0, 30)
        for worker in east.children("gateway worker"):
            worker.kill()
        done = batch_lines(west)
        wait_for(lambda: batch_lines(west) > done, 30)
        wait_for(lambda: batch_lines(east) > 0, 30)
        store.pause()
        for worker in west.children("gateway worker"):
            worker.kill()
        store.go_on()
        west.wait_ready()
        wait_for(lambda: client.batches.retrieve(batch_id).status == "completed", 120)
        batch = client.batches.retrieve(batch_id)
        assert batch.output_file_id is not None
        assert batch.error_file_id is None
        output = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in output) == sorted(names)
    east.wait_ready()
    wait_for(lambda: budget_of(west, team_id)["held_microusd"] == 0, 60)
    wait_for(lambda: ledger_microusd(west, team_id) == budget_of(west, team_id)["spent_microusd"], 20)


def batch_lines(gateway: Gateway) -> int:
    """The lines of batches that this host has answered."""
    found = re.search(r'sameway_batch_lines_total\{outcome="ok"\} (\d+)', gateway.observe("/metrics").text)
    return int(found[1]) if found else 0


def test_a_change_on_one_host_is_the_others_too(hosts: tuple[Gateway, Gateway], upstream_process: Upstream) -> None:
    """A model in the database is used by both; a file is each host's own: one that is wrong leaves its host as it was, and says
    so."""
    east, west = hosts
    model = {"deployments": [deployment(upstream_process.url, "shared")]}
    east.admin("POST", "/config/models", json={"alias": "shared", "model": model})
    assert east.chat("anew", model="shared").status_code == 200
    wait_for(lambda: west.chat("anew", model="shared").status_code == 200)
    west.admin("POST", "/config/models", json={"alias": "shared", "model": None})
    wait_for(lambda: east.chat("anew", model="shared").status_code == 404)

    files = [host.folder / "sameway.yaml" for host in hosts]
    before = [file.read_text() for file in files]
    more = yaml.safe_load(before[0])
    more["models"]["more"] = {"deployments": [deployment(upstream_process.url, "more")]}
    try:
        files[1].write_text(before[1].replace("output_tokens_max: 1000", "output_tokens_max: some"))
        files[0].write_text(yaml.safe_dump(more))
        east.admin("POST", "/config/reload")
        wait_for(lambda: east.chat("anew", model="more").status_code == 200)
        problems = lambda: [one["message"] for one in west.admin("GET", "/status")["problems"]]  # noqa: E731
        wait_for(lambda: any("models.dear.deployments.0.output_tokens_max" in one for one in problems()))
        assert west.chat("anew", model="more").status_code == 404
        assert west.chat("anew", model="late").status_code == 200
        files[1].write_text(yaml.safe_dump(more))
        wait_for(lambda: west.chat("anew", model="more").status_code == 200)
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    for host in hosts:
        wait_for(lambda host=host: host.chat("anew", model="more").status_code == 404)


def test_a_database_that_is_gone_is_not_missed(hosts: tuple[Gateway, Gateway], postgres: PostgresServer) -> None:
    """PostgreSQL crashes: requests go on from memory and Redis, and the ledger has every row once it is back."""
    east, west = hosts
    team_id, key = new_team(east, limit_usd=1.0)
    wait_for(lambda: west.chat("known?", model="dear", key=key).status_code == 200)
    postgres.kill()
    try:
        replies = [gateway.chat(f"without {i}", model="dear", key=key) for i in range(3) for gateway in hosts]
        assert {reply.status_code for reply in replies} == {200}
        for path, own in (
            ("/v1/batches", key),
            (f"/v1/conversations/conv_{0:032x}", key),
            ("/admin/api/teams", ADMIN_KEY),
        ):
            refused = httpx.get(f"{west.root}{path}", headers={"authorization": f"Bearer {own}"}, timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
        wait_for(lambda: counted(hosts, "sameway_ledger_failures_total") > 0, 20)
    finally:
        postgres.start()
    wait_for(lambda: budget_of(east, team_id)["held_microusd"] == 0, 5)  # before its lease ends
    spent = budget_of(east, team_id)["spent_microusd"]
    wait_for(lambda: ledger_microusd(west, team_id) == spent, 20)


def test_what_the_ledgers_writer_corrects_is_counted(hosts: tuple[Gateway, Gateway], redis: RedisServer) -> None:
    """An entry that is no row, and a count of spend that was wrong, are in the metrics of the host that met them."""
    wrong, drift = "sameway_ledger_rows_set_aside_total", "sameway_ledger_drift_usd_total"
    team_id, key = new_team(hosts[0], limit_usd=1.0)
    wait_for(lambda: hosts[0].chat("spend", model="dear", key=key).status_code == 200)
    wait_for(lambda: ledger_microusd(hosts[1], team_id) > 0, 20)
    assert (counted(hosts, wrong), counted(hosts, drift)) == (0.0, 0.0)
    with Redis.from_url(redis.url) as link:
        link.xadd(LEDGER_STREAM, {"row": b"none", "team": team_id, "at_ms": 1, "cost": 0})
        link.hincrby(f"sameway:{{money}}:spend:{team_id}:total", "spent", 1_500_000)
        link.delete(READY_KEY)
    wait_for(lambda: counted(hosts, wrong) == 1.0 and counted(hosts, drift) == 1.5, 20)


def counted(hosts: tuple[Gateway, Gateway], metric: str) -> float:
    """A counter of both hosts."""
    told = [re.search(rf"^{metric} (\S+)$", host.observe("/metrics").text, re.M) for host in hosts]
    return sum(float(one[1]) for one in told if one is not None)


def test_a_host_that_dies_leaves_no_money_behind(hosts: tuple[Gateway, Gateway], upstream: Upstream) -> None:
    """Every process of a host is killed in the middle of its answers: the other goes on, and what it held comes back."""
    east, west = hosts
    team_id, key = new_team(west, limit_usd=1.0)
    wait_for(lambda: east.chat("known?", model="dear", key=key).status_code == 200)
    assert east.process is not None
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(east.chat, f"dying {i}", "dear", key) for i in range(20)]
        family = [psutil.Process(east.process.pid), *psutil.Process(east.process.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)
        for request in asked:
            request.exception()
    assert west.chat("still there?", model="dear", key=key).status_code == 200
    wait_for(lambda: budget_of(west, team_id)["held_microusd"] == 0, 60)
    spent = budget_of(west, team_id)["spent_microusd"]
    wait_for(lambda: ledger_microusd(west, team_id) == spent, 20)
