"""Chat completions that are stored, with the official client: read, listed, changed, deleted, and never another team's."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e.gateway import deployment
from tests.e2e.upstream import Upstream
from tests.e2e.worker import Host, NewHost

_PARTS: list[Any] = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]


@pytest.fixture
async def host(new_host: NewHost, upstream: Upstream) -> Host:
    """A worker with two models of one deployment each."""
    host = await new_host({name: [deployment(upstream.url, name)] for name in ("mock", "other")})
    assert await host.parts.writer.step()
    return host


async def store(host: Host, content: Any, **more: Any) -> Any:
    fields = {"model": "mock", "messages": [{"role": "user", "content": content}], "store": True, **more}
    return await host.client.chat.completions.create(**fields)


async def test_a_stored_completion_is_read_changed_and_deleted(host: Host) -> None:
    """As it was sent, with its request's settings; its messages one by one; its metadata change alone."""
    chats = host.client.chat.completions
    made = await store(host, _PARTS, metadata={"a": "b"}, temperature=0.5)
    kept = (await chats.retrieve(made.id)).to_dict()
    assert {name: kept[name] for name in made.to_dict()} == made.to_dict()
    assert (kept["metadata"], kept["temperature"]) == ({"a": "b"}, 0.5)
    (message,) = (await chats.messages.list(made.id)).data
    assert (message.content, [one.text for one in message.content_parts or ()]) == (None, ["What is", "this?"])  # type: ignore[union-attr]
    changed = (await chats.update(made.id, metadata={"c": "d"})).to_dict()
    assert changed == (await chats.retrieve(made.id)).to_dict() == {**kept, "metadata": {"c": "d"}}
    gone = await chats.delete(made.id)
    assert (gone.object, gone.deleted) == ("chat.completion.deleted", True)
    for read in (chats.retrieve, chats.delete, chats.messages.list):
        with pytest.raises(openai.NotFoundError):
            await read(made.id)


async def test_a_cached_or_streamed_completion_is_stored_under_its_own_id(host: Host) -> None:
    """Each request has an object, also where one answer serves them all; without `store` there is none."""
    chats = host.client.chat.completions
    whole = [await store(host, "hello") for _ in range(2)]
    ids = [one.id for one in whole]
    for _ in range(2):
        chunks = [chunk async for chunk in await store(host, "hello", stream=True)]
        assert len({chunk.id for chunk in chunks}) == 1
        ids.append(chunks[0].id)
    assert len(set(ids)) == 4
    assert {(await chats.retrieve(id)).choices[0].message.content for id in ids} == {
        whole[0].choices[0].message.content
    }
    plain = await store(host, "hello", store=False)
    with pytest.raises(openai.NotFoundError):
        await chats.retrieve(plain.id)


async def test_completions_are_listed_in_pages(host: Host) -> None:
    """Oldest first or last, of a model, with metadata; messages too."""
    chats = host.client.chat.completions
    made = [(await store(host, str(number), metadata={"even": str(number % 2 == 0)})).id for number in range(5)]
    other = (await store(host, "x", model="other")).id
    assert [one.id async for one in chats.list(limit=2)] == [*made, other]
    assert [one.id async for one in chats.list(limit=4, order="desc")] == [other, *made[::-1]]
    assert [one.id async for one in chats.list(metadata={"even": "True"}, limit=2)] == made[::2]
    model = (await chats.retrieve(other)).model
    assert other in [one.id async for one in chats.list(model=model)]
    turns: Any = [{"role": "user", "content": str(number)} for number in range(3)]
    long = await store(host, "", messages=turns)
    assert [one.content async for one in chats.messages.list(long.id, limit=2)] == ["0", "1", "2"]
    assert [one.content async for one in chats.messages.list(long.id, limit=2, order="desc")] == ["2", "1", "0"]
    for act in (chats.list(after="nothing"), chats.messages.list(long.id, after="nothing")):
        with pytest.raises(openai.NotFoundError, match="in this list"):
            await act


async def test_completions_are_their_teams_alone(host: Host) -> None:
    """Another team finds none, and a team that keeps nothing is answered all the same."""
    made = await store(host, "hello")
    team_id, other = await host.team()
    parts = host.parts
    with pytest.raises(openai.NotFoundError):
        await other.chat.completions.retrieve(made.id)
    assert [one async for one in other.chat.completions.list()] == []
    with pytest.raises(openai.NotFoundError):
        await other.responses.retrieve(made.id)
    fields: Any = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "store": True}
    kept, conversation = await other.chat.completions.create(**fields), await other.conversations.create()
    await parts.accounts.update_team(team_id, store_s_max=0)
    await parts.accounts.refresh()
    for change, one in ((other.chat.completions.update, kept), (other.conversations.update, conversation)):
        with pytest.raises(openai.PermissionDeniedError, match="Nothing is kept here for this team"):
            await change(one.id, metadata={"note": "new"})
    await other.chat.completions.delete(kept.id)
    unkept = await other.chat.completions.create(**fields)
    assert unkept.choices[0].message.content
    assert [one async for one in other.chat.completions.list()] == []
