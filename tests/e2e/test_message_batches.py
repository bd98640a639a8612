"""Batches of messages by Anthropic's own client: each request has one result, and belongs to its team."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.e2e.gateway import API_KEY, deployment
from tests.e2e.test_batches import run
from tests.e2e.upstream import Upstream
from tests.e2e.worker import Host, NewHost

_NEVER = f"msgbatch_{'0' * 32}"


@pytest.fixture
async def host(new_host: NewHost, upstream: Upstream) -> Host:
    """A worker with one deployment, which speaks OpenAI's API."""
    host = await new_host({"mock": [deployment(upstream.url, "plain")]})
    assert await host.parts.writer.step()
    return host


@pytest.fixture
async def claude(host: Host) -> AsyncIterator[AsyncAnthropic]:
    async with claude_of(host, API_KEY) as client:
        yield client


def claude_of(host: Host, key: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=host.url.removesuffix("/v1"), api_key=key, max_retries=0, timeout=20)


def asked(custom_id: str, **more: Any) -> Any:
    message = {"model": "mock", "max_tokens": 20, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "params": {**message, **more}}


async def results_of(claude: AsyncAnthropic, id: str) -> dict[str, Any]:
    return {one.custom_id: one.result async for one in await claude.messages.batches.results(id)}


async def test_each_request_has_a_result(host: Host, claude: AsyncAnthropic) -> None:
    """A message, or an error in Anthropic's shape; counts and times say where the batch stands."""
    batches = claude.messages.batches
    made = await batches.create(
        requests=[asked("a"), asked("b"), asked("c", model="nothing"), asked("d", max_tokens=0)]
    )
    assert (made.type, made.processing_status, made.results_url, made.ended_at) == (
        "message_batch",
        "in_progress",
        None,
        None,
    )
    assert (made.request_counts.processing, made.expires_at > made.created_at) == (4, True)
    with pytest.raises(anthropic.ConflictError, match="has not ended"):
        await claude.get(f"/v1/messages/batches/{made.id}/results", cast_to=object)
    await run(host)
    ended = await batches.retrieve(made.id)
    counts = ended.request_counts
    assert (ended.processing_status, ended.ended_at is not None) == ("ended", True)
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 2, 2, 0, 0)
    results = await results_of(claude, made.id)
    assert {name: one.type for name, one in results.items()} == {
        "a": "succeeded", "b": "succeeded", "c": "errored", "d": "errored",
    }  # fmt: skip
    assert (results["a"].message.type, results["a"].message.content[0].type) == ("message", "text")
    assert results["c"].error.error.type == "not_found_error"
    assert results["d"].error.error.type == "invalid_request_error"
    assert (await host.client.batches.retrieve(made.id.removeprefix("msg"))).status == "completed"


async def test_a_cancelled_batch_says_which_requests_did_not_run(host: Host, claude: AsyncAnthropic) -> None:
    """They are canceled, not errored; what has ended can neither be cancelled again nor lives on in its files."""
    batches = claude.messages.batches
    made = await batches.create(requests=[asked("a"), asked("b")])
    assert (await batches.cancel(made.id)).processing_status == "canceling"
    with pytest.raises(anthropic.APIStatusError, match="has not ended"):
        await batches.delete(made.id)
    await run(host)
    ended = await batches.retrieve(made.id)
    assert (ended.processing_status, ended.request_counts.canceled, ended.request_counts.errored) == ("ended", 2, 0)
    assert {one.type for one in (await results_of(claude, made.id)).values()} == {"canceled"}
    assert (await batches.delete(made.id)).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await batches.retrieve(made.id)
    assert (host.names, [one async for one in host.client.files.list()]) == ([], [])


async def test_batches_are_listed_both_ways(host: Host, claude: AsyncAnthropic) -> None:
    """Newest first, in pages after or before an id; batches of other endpoints are not among them."""
    batches = claude.messages.batches
    made = [(await batches.create(requests=[asked(str(number))])).id for number in range(5)]
    file = await host.client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    await host.client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert [one.id async for one in batches.list(limit=2)] == made[::-1]
    page = await batches.list(before_id=made[1], limit=2)
    assert ([one.id for one in page.data], page.has_more) == ([made[3], made[2]], True)


async def test_a_batch_is_its_teams_alone(host: Host, claude: AsyncAnthropic) -> None:
    """Another team's id, one that never was and one of another kind get the same refusal, in Anthropic's shape."""
    made = await claude.messages.batches.create(requests=[asked("a")])
    _, other = await host.team()
    async with claude_of(host, other.api_key) as stranger:
        for client, id in ((stranger, made.id), (claude, _NEVER), (claude, made.id.removeprefix("msg"))):
            for act in (
                client.messages.batches.retrieve,
                client.messages.batches.cancel,
                client.messages.batches.delete,
            ):
                with pytest.raises(anthropic.NotFoundError) as refused:
                    await act(id)
                assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_what_is_no_batch_is_refused(host: Host, claude: AsyncAnthropic) -> None:
    """Before a file is written: no request, a name twice, a name that is too long."""
    for requests in ([], [asked("a"), asked("a")], [asked("x" * 65)]):
        with pytest.raises(anthropic.BadRequestError, match="requests"):
            await claude.messages.batches.create(requests=requests)
    assert host.names == []
