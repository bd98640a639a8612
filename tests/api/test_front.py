"""The way to `/v1` as clients take it: with a slash too many, without the `/v1`, from a browser, or for what nobody serves here."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.api.asgi import Receive, Scope, Send, send_whole
from gateway.api.front import Front
from gateway.api.headers import base_headers


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    named = scope.get("path_params", {}).get("model")
    asked = f"{scope['method']} {scope['path']}{f' for {named}' if named else ''}"
    await send_whole(send, 200, [(b"x-asked", asked.encode())], b"")


_ROUTES: dict[str, Any] = {
    "/v1/chat/completions": {"POST": _echo},
    "/v1/models": {"GET": _echo},
    "/v1/models/*": {"GET": _echo},
    "/v1/rerank": {"POST": _echo},
    "/v1/files/{file}": {"GET": _echo, "DELETE": _echo},
    "/v1/files/{file}/content": {"GET": _echo},
}


async def ask(method: str, path: str, **headers: str) -> httpx.Response:
    """One request through the front; what is not its own is echoed with 200 too."""
    transport = httpx.ASGITransport(Front(_echo, _ROUTES))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.request(method, f"http://gateway{path}", headers=headers)


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/", "/v1//chat/completions", "//v1/chat/completions", "///v1/chat//completions//"],
)
async def test_slashes_too_many_are_none(path: str) -> None:
    """A base URL that ends in a slash before a path that begins with one is no other address."""
    assert (await ask("POST", path)).headers["x-asked"] == "POST /v1/chat/completions"


async def test_a_models_name_keeps_its_slashes() -> None:
    """Below `/v1/models` a path is a name, encoded or not."""
    assert (await ask("GET", "/v1/models/org/name")).headers["x-asked"] == "GET /v1/models/org/name"
    assert (await ask("GET", "/v1/models/org%2Fname/")).headers["x-asked"] == "GET /v1/models/org/name"
    assert (await ask("GET", "/v1/models/")).headers["x-asked"] == "GET /v1/models"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/openai/v1/chat/completions", "POST /v1/chat/completions"),
        ("/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", "POST /v1/chat/completions for gpt-4o"),
        ("/openai/deployments/org/name/chat/completions", "POST /v1/chat/completions for org/name"),
        ("/openai/deployments/org%2Fname/chat/completions/", "POST /v1/chat/completions for org/name"),
        (f"/openai/deployments/{'x' * 50_000}/chat/completions", f"POST /v1/chat/completions for {'x' * 50_000}"),
        # not a way to any other route
        ("/openai/deployments/..%2F..%2Fadmin/chat/completions", "POST /v1/chat/completions for ../../admin"),
    ],
)
async def test_azures_paths_lead_to_the_same_endpoints(path: str, asked: str) -> None:
    """The deployment in the path is the model; the rest of the path chooses the endpoint, and a query nothing."""
    assert (await ask("POST", path)).headers["x-asked"] == asked


async def test_azures_paths_have_the_same_limits() -> None:
    """A model list by its own method, and 404 or 405 in OpenAI's shape for all that `/v1` does not have."""
    assert (await ask("GET", "/openai/models?api-version=1")).headers["x-asked"] == "GET /v1/models"
    assert (await ask("GET", "/openai/v1/models/a/b")).headers["x-asked"] == "GET /v1/models/a/b"
    assert (await ask("GET", "/openai/deployments/a/chat/completions")).headers["allow"] == "POST"
    unnamed = "/openai/deployments//chat/completions"
    for path in (unnamed, "/openai/deployments/a/files", "/openai/deployments/a"):
        reply = await ask("POST", path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/openai/v1/chat/completions",
        "/v1/chat/completions/chat/completions",
        "/v1/chat/completion",
    ],
)
async def test_a_wrong_base_url_is_told_the_right_one(path: str) -> None:
    """Who doubled the `/v1`, gave the endpoint as base URL or misspelt the path reads what was meant."""
    error = (await ask("POST", path)).json()["error"]
    assert error["code"] == "unknown_url"
    assert "did you mean /v1/chat/completions?" in error["message"]
    assert len((await ask("POST", path + "x" * 60_000)).content) < 1000


@pytest.mark.parametrize("path", ["/v1", "/v1/files", "/v1/messages", "/v1/chat", "/v1/realtime"])
async def test_what_nobody_serves_is_told_what_there_is(path: str) -> None:
    """A route of OpenAI's or of another API that is not here: 404 in OpenAI's shape, with the place of those that are."""
    reply = await ask("POST", path)
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert "/docs" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "known"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/rerank", "/v1/rerank"),
        ("POST", "/v2/rerank", "/v1/rerank"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/models/org/name", "/v1/models/org/name"),
        ("DELETE", "/files/file-1/", "/v1/files/file-1"),
    ],
)
async def test_a_path_without_its_version_is_served(method: str, path: str, known: str) -> None:
    """By Cohere's, Jina's and vLLM's names of `/v1/rerank`, and with a base URL that lacks its end or, where Anthropic's
    client adds its own, has it."""
    assert (await ask(method, path)).headers["x-asked"] == f"{method} {known}"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files/file-1", "DELETE, GET, HEAD"),
        ("DELETE", "/v1/files/file-1/content", "GET, HEAD"),
        ("DELETE", "/files/file-1/content", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_paths_own(method: str, path: str, allowed: str) -> None:
    """Also below an id, where the paths differ; what is not there at all is a 404."""
    reply = await ask(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert (await ask("GET", "/v1/files/file-1/nothing")).status_code == 404


async def test_a_browser_may_ask_and_read() -> None:
    """A preflight is answered without a key, and every response to a page can be read by it, refusals too."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    reply = await ask("OPTIONS", "/v1/chat/completions", origin="https://page.example", **asked)
    assert (reply.status_code, reply.content) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == "*"
    assert reply.headers["access-control-allow-methods"] == "POST"
    assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert (await ask("OPTIONS", "/v1/nope", origin="https://page.example")).status_code == 204, (
        "or it can't read the 404"
    )
    asked_for = (("POST", "/v1/chat/completions", 200), ("GET", "/v1/nope", 404), ("PUT", "/v1/models", 405))
    for method, path, status in asked_for:
        reply = await ask(method, path, origin="https://page.example")
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, "*")
        assert "access-control-allow-origin" not in (await ask(method, path)).headers


async def test_no_page_reads_what_a_cookie_opens() -> None:
    """Outside of `/v1` nothing is shared: the dashboard knows its visitor by a cookie, which browsers send by themselves."""
    reply = await ask("GET", "/admin/api/teams", origin="https://page.example")
    assert "access-control-allow-origin" not in reply.headers


async def test_head_asks_what_get_asks() -> None:
    """Balancers and monitors ask with HEAD; where only POST is taken it is refused as itself."""
    assert (await ask("HEAD", "/v1/models")).status_code == 200
    assert (await ask("HEAD", "/healthz")).headers["x-asked"] == "GET /healthz"
    assert (await ask("HEAD", "/v1/chat/completions")).headers["allow"] == "POST"


async def test_a_clients_own_id_of_a_request_comes_back() -> None:
    """The gateway's then has a name of its own; without one it is the id."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, 200, base_headers("req_1"), b"")

    transport = httpx.ASGITransport(Front(_echo, {"/v1/models": {"GET": answer}}))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        named = await client.get("/v1/models", headers={"x-request-id": "mine"})
        plain = await client.get("/v1/models")
    assert (named.headers["x-request-id"], named.headers["x-sameway-request-id"]) == ("mine", "req_1")
    assert (plain.headers["x-request-id"], plain.headers.get("x-sameway-request-id")) == ("req_1", None)
