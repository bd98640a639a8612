"""Replicas of a deployment: their list, their metrics, and what workers tell each other of them through a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cache.redis_link import RedisLink
from gateway.app import create_app, served
from gateway.deployments.fleet import Fleet, build_fleet
from gateway.deployments.replicas import addresses, blocks_of
from gateway.deployments.server_metrics import reading_of
from gateway.deployments.shared_load import SharedLoad
from gateway.settings import Settings
from policies.replicas import Reading
from tests.e2e.gateway import API_KEY
from tests.services import RedisServer

METRICS = {
    "vllm": """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 8.5e+03
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 4000.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
""",
    "vllm 0": """vllm:num_requests_running{model_name="m"} 4.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.75
vllm:prompt_tokens_total{model_name="m"} 8500.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 4000.0
vllm:cache_config_info{num_gpu_blocks="1000",block_size="16"} 1.0
""",
    "sglang": """sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 2
sglang:token_usage{model_name="m"} 0.75
sglang:max_total_num_tokens{model_name="m"} 16000
sglang:prompt_tokens_total{model_name="m"} 8.5e+03
sglang:cached_tokens_total{model_name="m",cache_source="device"} 4000.0
""",
}


@pytest.mark.parametrize("kind", METRICS)
def test_the_metrics_of_each_server_mean_the_same(kind: str) -> None:
    """By their names in each kind and version; sums over engines, and the fullest one's memory."""
    assert reading_of(METRICS[kind]) == Reading(4.0, 2.0, 0.75, 16_000.0, 8_500.0, 4_000.0)


@pytest.mark.parametrize("text", ["", "<html>", "up 1", "vllm:num_requests_running NaN", "vllm:num_requests_waiting 3"])
def test_other_texts_tell_nothing(text: str) -> None:
    """No running requests are told, so nothing is guessed."""
    assert reading_of(text) is None


def test_a_prompt_that_grows_keeps_its_blocks() -> None:
    """A turn more leaves all full blocks of the turns before; another system prompt, other tools or another salt leave none."""
    said: list[dict[str, str]] = [{"role": "system", "content": "x" * 1_000}, {"role": "user", "content": "y" * 800}]
    first = blocks_of({"messages": said})
    more = blocks_of({"messages": [*said, {"role": "assistant", "content": "z" * 600}]})
    assert len(first) == 3
    assert more[:3] == first
    assert len(more) > 3
    for other in ({"messages": [{"role": "system", "content": "X" + "x" * 999}]}, {"messages": said, "tools": [{}]}):
        assert not set(blocks_of(other)) & set(first)
    assert not set(blocks_of({"messages": said}, b"salt")) & set(first)


async def test_names_are_resolved(tmp_path: Path) -> None:
    """A name means each of its addresses; what is listed twice is there once; a file's empty lines and comments mean nothing."""
    (tmp_path / "list").write_text("# ours\nhttp://10.0.0.1:8000/v1\n\n  http://10.0.0.2:8000/v1 \n")
    listed = ["dns://localhost:8000/v1", f"file://{tmp_path}/list", "http://10.0.0.1:8000/v1"]
    found = await addresses(listed)
    assert "http://127.0.0.1:8000/v1" in found
    assert found[-2:] == ["http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1"]


def fleet_of(folder: Path, *replicas: str, **more: Any) -> Fleet:
    deployment = {"name": "pool", "backend": "openai", "model": "m", "price": {}, "replicas": replicas, **more}
    models: Any = {"mock": {"deployments": [deployment]}}
    no_embedder: Any = None
    return build_fleet(Settings(data_dir=folder, models=models), lambda: 0.0, no_embedder)


async def test_a_list_is_read_again(tmp_path: Path) -> None:
    """Who comes is asked, who goes is not, who stays keeps its state and its use; a file that is away changes nothing."""
    path = tmp_path / "list"
    fleet = fleet_of(tmp_path, f"file://{path}")
    await fleet.start()
    assert [d.group for d in fleet.deployments] == ["pool"]  # nowhere, yet answered for
    path.write_text("http://10.0.0.1:8000/v1\nhttp://10.0.0.2:8000/v1\n")
    fleet.take_uses({"pool": "drained"})
    await fleet.reread()
    one, two = fleet.deployments
    assert [one.name, two.name] == ["pool/10.0.0.1:8000", "pool/10.0.0.2:8000"]
    assert [one.use, two.use] == ["drained", "drained"]
    fleet.take_uses({"pool": "drained", two.name: ""})
    assert [one.use, two.use] == ["drained", ""]
    fleet.take_uses({two.name: "", "pool": "drained"})  # the latest act is about all
    assert [one.use, two.use] == ["drained", "drained"]
    path.write_text("http://10.0.0.2:8000/v1\nhttp://10.0.0.3:8000/v1\n")
    await fleet.reread()
    assert [d.name for d in fleet.deployments] == ["pool/10.0.0.2:8000", "pool/10.0.0.3:8000"]
    assert fleet.deployments[0] is two
    path.unlink()
    await fleet.reread()
    assert len(fleet.deployments) == 2
    await fleet.aclose()


class Server:
    """A model's server: counts what it is asked, tells what `metrics` says, and answers each chat with its port."""

    def __init__(self) -> None:
        self.metrics = METRICS["vllm"]
        self.reads = 0
        self.prompts: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next((int(h[15:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
                body = await reader.readexactly(size)
                if head.startswith(b"GET /metrics "):
                    self.reads += 1
                    kind, told = "text/plain", self.metrics.encode()
                else:
                    self.prompts.append(json.loads(body)["messages"][-1]["content"])
                    kind, told = "text/event-stream", _answer(f"by {writer.get_extra_info('sockname')[1]}")
                lines = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(told)}\r\n\r\n"
                writer.write(lines.encode() + told)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _answer(text: str) -> bytes:
    chunk: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 500, "completion_tokens": 2, "total_tokens": 502}
    events = [chunk | {"choices": [delta]}, chunk | {"choices": [end]}, chunk | {"choices": [], "usage": usage}]
    return b"".join(f"data: {json.dumps(one)}\n\n".encode() for one in events) + b"data: [DONE]\n\n"


@asynccontextmanager
async def running(count: int) -> AsyncIterator[tuple[list[Server], list[str]]]:
    """So many servers, with their base URLs."""
    servers = [Server() for _ in range(count)]
    listening = [await asyncio.start_server(one.serve, "127.0.0.1", 0) for one in servers]
    try:
        yield servers, [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}/v1" for one in listening]
    finally:
        for one in listening:
            one.close()


async def test_workers_tell_each_other(redis_server: RedisServer, redis: Redis, tmp_path: Path) -> None:
    """Their work, the prefixes and the readings of all replicas are known to both; a server is read once for both; one that has
    begun anew holds nothing; without Redis each has its own requests."""
    async with running(2) as (servers, urls):
        fleets = [fleet_of(tmp_path, *urls) for _ in range(2)]
        links = [RedisLink(redis_server.url, 1.0) for _ in fleets]
        loads = [SharedLoad(fleet, link) for fleet, link in zip(fleets, links, strict=True)]

        async def exchange() -> None:
            for _ in range(2):
                for load in loads:
                    await load.shared[0].exchange()

        for fleet in fleets:
            await fleet.start()
        (here, _), (there, _) = (fleet.deployments for fleet in fleets)
        assert here.backlog is not None
        assert there.backlog is not None
        place = here.backlog.enter(700)
        prefixes = [fleet.aliases["mock"].prefixes for fleet in fleets]
        assert prefixes[0] is not None
        assert prefixes[1] is not None
        prefixes[0].read(here.name, (b"12345678", b"abcdefgh"))
        await exchange()
        assert there.backlog.others.tokens == 700
        assert (here.backlog.others.tokens, here.backlog.sent.tokens) == (0, 700)
        assert prefixes[1].warm((b"12345678", b"abcdefgh"), 256) == {here.name: 256}
        assert there.backlog.reading == here.backlog.reading == reading_of(METRICS["vllm"])
        assert [server.reads for server in servers] == [1, 1]
        place.leave()
        servers[0].metrics = METRICS["vllm"].replace("8.5e+03", "12")
        await redis.delete(*[key async for key in redis.scan_iter("sameway:*metrics")])  # the next one is due
        await exchange()
        assert there.backlog.others.tokens == 0
        assert prefixes[1].warm((b"12345678",), 128) == {}
        there.backlog.enter(40)
        for link in links:
            await link.aclose()
        await fleets[0].aclose()
        await fleets[1].aclose()
        away = RedisLink("redis://127.0.0.1:1", 0.2)
        with pytest.raises(RedisError):
            await SharedLoad(fleets[1], away).run()
        await away.aclose()
        assert (there.backlog.ahead_tokens(), there.backlog.reading) == (40, None)


async def test_an_agent_stays_with_its_prefix(redis_server: RedisServer, redis: Redis, tmp_path: Path) -> None:
    """Turns of one session go to one replica, other sessions to others too; bills name the deployment; a dead replica's sessions go on."""
    async with running(3) as (_, urls):
        deployment = {"name": "pool", "backend": "openai", "model": "m", "price": {}, "replicas": urls}
        settings = Settings(
            data_dir=tmp_path,
            redis_url=redis_server.url,
            api_key=API_KEY,
            engines={},
            cache={"is_semantic": False},  # type: ignore[arg-type]
            models={"mock": {"deployments": [deployment]}},  # type: ignore[dict-item]
        )
        app = create_app(settings)
        async with app.router.lifespan_context(app):
            transport, headers = httpx.ASGITransport(served(app)), {"authorization": f"Bearer {API_KEY}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:

                async def turn(said: list[dict[str, str]]) -> str:
                    body = {"model": "mock", "messages": said}
                    reply = await client.post("/v1/chat/completions", json=body)
                    assert reply.status_code == 200, reply.text
                    answer = reply.json()["choices"][0]["message"]["content"]
                    said += [
                        {"role": "assistant", "content": answer},
                        {"role": "user", "content": "go on " + "z" * 600},
                    ]
                    return str(reply.headers["x-sameway-backend"])

                sessions: list[list[dict[str, str]]] = [
                    [{"role": "user", "content": f"session {number}: " + f"{number} " * 4_000}] for number in range(6)
                ]
                homes = [await turn(said) for said in sessions]
                assert [{await turn(said) for _ in range(4)} for said in sessions] == [{home} for home in homes]
                before = len(app.state.parts.fleet.deployments)
                (gone,) = [d for d in app.state.parts.fleet.deployments if d.name == homes[0]]
                gone.use = "disabled"
                again = {await turn(sessions[0]) for _ in range(3)}
            assert (before, len(again)) == (3, 1)
            assert homes[0] not in again
