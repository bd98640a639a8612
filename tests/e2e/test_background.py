"""Real workers, two of them, killed: what was acknowledged as stored is there, and what was generated has failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.gateway import API_KEY, WITHOUT_EMBEDDER, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream


@pytest.fixture(scope="module")
def gateway(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers, a quick model, slower ones, and one that takes longer than any test."""
    url, tmp_path = upstream_process.url, tmp_path_factory.mktemp("background")
    models = {
        "mock": {"deployments": [deployment(url, "plain")]},
        "words": {"deployments": [deployment(url, "words", "mock?chunks=40;pace_ms=50")]},
        "late": {"deployments": [deployment(url, "late", "mock?delay_ms=6500")]},
        "slow": {"deployments": [deployment(url, "slow", "mock?delay_ms=100000")]},
    }
    config: dict[str, Any] = {"workers": 2, "engines": {}, **WITHOUT_EMBEDDER, "models": models}
    with run_gateway(tmp_path, config) as made:
        made.wait_ready()
        yield made


def test_killed_workers_lose_nothing_that_was_acknowledged(gateway: Gateway, upstream: Upstream) -> None:
    """Responses and conversations are there whole; a response in the background has failed, and is not made again."""
    with OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=5) as client:
        talk = client.conversations.create()
        asked = client.responses.create(model="slow", input="too long", background=True)
        wait_for(lambda: upstream.seen().generations == 1)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda n: client.responses.create(model="mock", input=f"n {n}"), range(40)))
        said = client.responses.create(model="mock", input="remember", conversation=talk.id)
        for worker in gateway.children("gateway worker"):
            worker.kill()
        gateway.wait_ready()
        for one in made:
            assert client.responses.retrieve(one.id).output_text == one.output_text
        items = client.conversations.items.list(talk.id).data
        assert [item.id for item in items] == [said.output[0].id, client.responses.input_items.list(said.id).data[0].id]
        wait_for(lambda: client.responses.retrieve(asked.id).status == "failed", 30)
        error = client.responses.retrieve(asked.id).error
        assert error is not None
        assert "ended before it was complete" in error.message
        assert upstream.seen().generations == 42


def test_a_stop_waits_for_what_has_no_client(gateway: Gateway, upstream: Upstream) -> None:
    """Workers that are stopped end a response and the lines of a batch that run; those not begun run elsewhere, each once."""
    with OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=5) as client:
        body = {"model": "late", "messages": [{"role": "user", "content": "line"}]}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines = json.dumps(line) + "\n" + json.dumps({**line, "custom_id": "b", "body": {**body, "model": "mock"}})
        file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        asked = client.responses.create(model="late", input="a while", background=True)
        wait_for(lambda: upstream.seen().generations == 3, 30)
        for worker in gateway.children("gateway worker"):
            worker.terminate()
        gateway.wait_ready()
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
        output = client.files.content(client.batches.retrieve(batch.id).output_file_id or "").text.splitlines()
        assert sorted(json.loads(one)["custom_id"] for one in output) == ["a", "b"]
        assert client.responses.retrieve(asked.id).status == "completed"
        assert upstream.seen().generations == 3


def test_a_stream_goes_on_at_another_connection(gateway: Gateway) -> None:
    """The client leaves after a few events; others read the rest while it is generated, each event once."""
    with OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=5) as client:
        begun = client.responses.create(model="words", input="count", background=True, stream=True)
        first: list[Any] = []
        for event in begun:
            first.append(event)
            if len(first) == 8:
                break
        begun.close()
        id = first[0].response.id
        for _ in range(4):  # at whichever worker takes it
            resumed = client.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number)
            events = [*first, *resumed]
            assert [one.sequence_number for one in events] == list(range(len(events)))
            assert events[-1].type == "response.completed"
        assert client.responses.retrieve(id).to_dict() == events[-1].response.to_dict()
