"""What a team keeps here is its own, on every route that names a thing: the routes are the document's own list."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.api.openapi import PATHS
from tests.e2e.gateway import API_KEY, deployment
from tests.e2e.upstream import Upstream
from tests.e2e.worker import Host, NewHost

_NOT_OWNED = {"/v1/models/{model}"}
_DIGITS = re.compile(r"[0-9a-f]{32}")


@pytest.fixture
async def host(new_host: NewHost, upstream: Upstream) -> AsyncIterator[Host]:
    """A worker with one model, which waits before it answers in the background."""
    slow = deployment(upstream.url, "slow", "mock?delay_ms=60000")
    host = await new_host({"mock": [deployment(upstream.url, "plain")], "slow": [slow]}, shutdown_grace_s=1)
    renewing = asyncio.create_task(host.parts.background.run())
    yield host
    renewing.cancel()


class Owner:
    """A team, its key, and the ids of what it keeps."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=20)
        self.ids: list[str] = []

    async def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        return await self._http.request(method, path, **request)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def make(self, path: str, **request: Any) -> str:
        """A new thing; returns its id."""
        reply = await self.ask("POST", path, **request)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        self.ids.append(str(found.get("id") or found["data"][0]["id"]))
        return self.ids[-1]

    async def make_all(self) -> None:
        """One of each kind of thing."""
        response = {"model": "mock", "input": "a secret"}
        made = await self.make("/responses", json=response)
        self.ids.append((await self.ask("GET", f"/responses/{made}")).json()["output"][0]["id"])
        self.ids.append((await self.ask("GET", f"/responses/{made}/input_items")).json()["data"][0]["id"])
        await self.make("/responses", json={"model": "slow", "input": "a secret", "background": True, "stream": False})
        talk = await self.make("/conversations", json={"metadata": {"a": "secret"}})
        await self.make(f"/conversations/{talk}/items", json={"items": [{"role": "user", "content": "a secret"}]})
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "mock"}}
        file = await self.make("/files", files={"file": ("in.jsonl", json.dumps(line))}, data={"purpose": "batch"})
        batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        await self.make("/batches", json=batch)
        chat = {"model": "mock", "messages": [{"role": "user", "content": "a secret"}]}
        await self.make("/chat/completions", json={**chat, "store": True})
        message = {"custom_id": "a", "params": {**chat, "max_tokens": 9}}
        await self.make("/messages/batches", json={"requests": [message]})

    async def state(self) -> list[str]:
        """All that it can read by id."""
        found = []
        for method, template in _routes():
            if method == "GET":
                for path in paths(template, self.ids):
                    text = (await self.ask("GET", path)).text
                    found.append(re.sub("req_[0-9a-f]{32}", "", text) if text.startswith('{"type":"error"') else text)
        return found


def _routes() -> list[tuple[str, str]]:
    """The methods and paths under `/v1` that name a thing a team may own."""
    named = {path: item for path, item in PATHS.items() if "{" in path and path not in _NOT_OWNED}
    return [(method.upper(), path) for path, item in named.items() for method in item]


def paths(template: str, ids: list[str]) -> list[str]:
    """The path with each of the ids, in each place."""
    places = re.findall(r"\{\w+\}", template)
    found = []
    for chosen in itertools.product(ids, repeat=len(places)):
        path = template.removeprefix("/v1")
        for place, id in zip(places, chosen, strict=True):
            path = path.replace(place, id)
        found.append(path)
    return found


def bodies(id: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests whose bodies name a thing."""
    asked = {"model": "mock", "input": "x"}
    reference = [{"type": "item_reference", "id": id}]
    batch = {"input_file_id": id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return [
        ("/responses", {**asked, "previous_response_id": id}),
        ("/responses", {**asked, "previous_response_id": id, "background": True}),
        ("/responses", {**asked, "conversation": id}),
        ("/responses", {**asked, "input": reference}),
        ("/responses/input_tokens", {**asked, "conversation": id}),
        ("/responses/input_tokens", {**asked, "previous_response_id": id}),
        ("/responses/input_tokens", {**asked, "input": reference}),
        ("/batches", batch),
    ]


def body_of(method: str, template: str) -> Any:
    """A body that the route takes, so that an id is what it refuses; None: it has none."""
    if method != "POST":
        return None
    return {"items": [{"role": "user", "content": "x"}]} if template.endswith("/items") else {"metadata": {}}


def _never(text: str) -> str:
    """The text with ids that never were."""
    return _DIGITS.sub("0" * 32, text)


async def test_a_team_finds_nothing_of_anothers(host: Host) -> None:
    """On each route, with each id in each place, in each direction: the same bytes as for an id that never was,
    and the owner keeps all; with its own ids each route works."""
    owners = [Owner(host.url, API_KEY)]
    team = await host.parts.accounts.create_team("another")
    owners.append(Owner(host.url, (await host.parts.accounts.create_key(team.id, "key")).plaintext))
    try:
        for owner in owners:
            await owner.make_all()
        await host.parts.pipeline.drain()  # what is kept of an answer may follow its reply
        before = [await owner.state() for owner in owners]
        for one, other in (owners, owners[::-1]):
            for method, template in _routes():
                asked = body_of(method, template)
                for path in paths(template, other.ids):
                    theirs, never = [await one.ask(method, place, json=asked) for place in (path, _never(path))]
                    assert theirs.status_code in (400, 404), (method, path)
                    both = [(reply.status_code, _never(reply.text)) for reply in (theirs, never)]
                    assert both[0] == both[1], (method, path)
            for id in other.ids:
                for path, body in bodies(id):
                    theirs, never = await one.ask("POST", path, json=body), await one.ask(
                        "POST", path, json=json.loads(_never(json.dumps(body)))
                    )  # fmt: skip
                    assert theirs.status_code in (400, 404), (path, body)
                    assert (theirs.status_code, _never(theirs.text)) == (never.status_code, never.text), (path, body)
            mixed = [path for _, path in _routes() if path.count("{") > 1]
            for path in (found for template in mixed for found in paths(template, [one.ids[4], *other.ids])):
                if any(id in path for id in other.ids):
                    assert (await one.ask("GET", path)).status_code == 404, path
            for owned, _, listed in [("/files", 0, other), ("/batches", 0, other)]:
                text = (await one.ask("GET", owned)).text
                assert not any(id in text for id in listed.ids)
        assert [await owner.state() for owner in owners] == before
        for method, template in sorted(_routes(), key=lambda route: (route[0] == "DELETE", -len(route[1]))):
            asking = [
                owners[0].ask(method, path, json=body_of(method, template)) for path in paths(template, owners[0].ids)
            ]
            statuses = [one.status_code for one in await asyncio.gather(*asking)]
            assert 200 in statuses or 409 in statuses, (method, template)
    finally:
        for owner in owners:
            await owner.aclose()
