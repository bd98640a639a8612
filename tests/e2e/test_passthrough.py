"""A provider's own paths, as a hostile client of one of two teams sees them, through a started gateway."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.settings import DeploymentSettings
from tests.e2e.gateway import API_KEY, WITHOUT_EMBEDDER, Gateway, run_gateway, wait_for

UPSTREAM_KEY = "sk-upstream-0123456789abcdef"
ALLOWED = [
    "POST /responses", "GET /responses/*", "DELETE /responses/*", "POST /vector_stores", "GET /vector_stores",
    "GET /vector_stores/*", "GET /vector_stores/*/files", "POST /files", "GET /files/*/content", "GET /status",
    "POST /jobs", "DELETE /jobs/*", "GET /jobs/*", "GET /jobs/*/moved", "GET /jobs/*/denied", "GET /jobs/*/content", "GET /maps",
    "POST /chat/completions", "POST /search", "POST /embeddings", "POST /listen", "POST /listen/*", "POST /full",
]  # fmt: skip


class Provider(ThreadingHTTPServer):
    """Remembers every request; gives objects new ids, and lists all that it gave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.numbers = itertools.count(1)
        self.stores: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Provider

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def answer(self) -> None:
        size, raw = int(self.headers.get("content-length") or 0), b""
        if self.path == "/v1/full":  # it answers before it has read
            size, self.close_connection = 0, True
        if self.path in ("/v1/listen", "/v1/full"):
            digest, given = hashlib.sha256(), size
            while size > 0:
                size -= len(piece := self.rfile.read(min(size, 1 << 16)))
                digest.update(piece)
            raw = f"{given} {digest.hexdigest()}".encode()
        else:
            raw = self.rfile.read(size)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers, raw))
        path, number = self.path.partition("?")[0], next(self.server.numbers)
        kind, status, body = "application/json", 200, b"{}"
        match self.command, path.removeprefix("/v1").split("/")[1:]:
            case "POST", ["responses"]:
                asked, usage = json.loads(raw), {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
                response = {"id": f"resp_{number:08}", "output": [{"id": f"msg_{number:08}"}], "usage": usage}
                body = json.dumps(response).encode()
                if asked.get("stream"):
                    kind = "text/event-stream"
                    events = [{"type": "response.created", "response": {"id": response["id"]}}]
                    events.append({"type": "response.completed", "response": response})
                    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
            case "POST", ["vector_stores"]:
                self.server.stores.append(f"vs_{number:08}")
                body = json.dumps({"id": self.server.stores[-1], "object": "vector_store"}).encode()
            case "GET", ["vector_stores"]:
                data = [{"id": one} for one in self.server.stores]
                body = json.dumps(
                    {"object": "list", "data": data, "first_id": data[0]["id"] if data else None}
                ).encode()
            case "POST", ["files"]:
                body = json.dumps({"id": f"file-{number:08}", "bytes": len(raw)}).encode()
            case "GET", ["files", _, "content"]:
                kind, body = "application/octet-stream", b"\x00content" * 1000
            case "POST", ["jobs"]:
                status, body = 201, json.dumps({"id": f"job-{number:08}"}).encode()
            case "DELETE", ["jobs", _]:
                status, body = 204, b""
            case "GET", ["jobs", _, "moved"]:
                status, body = 302, b"{}"
            case "GET", ["jobs", _, "denied"]:
                status, body = 401, json.dumps({"error": {"message": f"no scope {UPSTREAM_KEY}"}}).encode()
            case "GET", ["jobs", _, "content"]:
                body = gzip.compress(b'{"big": "' + b"a" * 1_000_000 + b'"}')
            case "GET", ["jobs", _]:
                status, body = 404, json.dumps({"error": {"message": f"gone {UPSTREAM_KEY}"}}).encode()
            case "POST", ["full"]:
                status, body = 413, json.dumps({"error": {"message": "too large"}}).encode()
            case "GET", ["maps"]:
                body = json.dumps({"objects": {one: {"id": one} for one in self.server.stores}}).encode()
            case "POST", ["search"]:
                body = json.dumps({"found": [{"id": one} for one in self.server.stores]}).encode()
            case "POST", ["messages"]:
                asked = json.loads(raw)
                body = json.dumps({"id": f"msg_{number}", "usage": {"input_tokens": 7, "output_tokens": 1}}).encode()
            case "POST", ["chat", "completions"]:
                kind, chunk = "text/event-stream", {"id": f"c-{number}", "choices": [{"delta": {"content": "x"}}]}
                wants = (json.loads(raw).get("stream_options") or {}).get("include_usage")
                last = {"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 4}}
                events = [json.dumps(one) for one in (chunk, *([last] if wants else []))]
                body = "".join(f"data: {one}\n\n" for one in (*events, "[DONE]")).encode()
            case _, ["responses", "resp_gone"]:
                status, body = 404, json.dumps({"error": {"message": f"gone {UPSTREAM_KEY}"}}).encode()
            case _, ["status"]:
                body = b'{"ok": true}'
            case _, [*_, last]:
                body = json.dumps({"id": last}).encode()
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Set-Cookie", "a=b"), ("X-Upstream-Key", UPSTREAM_KEY)):
            self.send_header(name, value)
        if body[:2] == b"\x1f\x8b":
            self.send_header("Content-Encoding", "gzip")
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/evil")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if b'"hang"' in raw:
            self.wfile.write(body[: body.index(b"\n\n") + 2])
            self.wfile.flush()
            self.connection.settimeout(20)
            self.rfile.read(1)
            self.close_connection = True
            return
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = do_PUT = answer  # noqa: N815


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def gateway(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    url = f"http://127.0.0.1:{provider.server_port}/v1"
    known = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0, "request_usd": 0}
    common = {"backend": "openai", "base_url": url, "api_key_env": "UP_KEY"}
    models = {
        "m": {"deployments": [{**common, "name": "up", "model": "m", "price": known, "passthrough": ALLOWED}]},
        "s": {
            "deployments": [
                {**common, "name": "stateless", "model": "m", "price": known, "passthrough": ["POST /responses"]}
            ]
        },
        "u": {"deployments": [{**common, "name": "unpriced", "model": "no-such", "passthrough": ["POST /responses"]}]},
        "a": {
            "deployments": [
                {
                    **common,
                    "backend": "anthropic",
                    "name": "claude",
                    "model": "m",
                    "price": known,
                    "passthrough": ["POST /v1/messages"],
                }
            ]
        },
        "off": {"deployments": [{**common, "name": "off", "model": "m", "price": known}]},
    }
    folder: Path = tmp_path_factory.mktemp("passthrough")
    with run_gateway(
        folder, {**WITHOUT_EMBEDDER, "models": models, "workers": 2}, env={"UP_KEY": UPSTREAM_KEY}
    ) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def other(gateway: Gateway) -> str:
    """The key of another team."""
    team = gateway.admin("POST", "/teams", json={"name": "other"})["id"]
    return str(gateway.admin("POST", f"/teams/{team}/keys", json={"name": "k"})["plaintext"])


def ask(gateway: Gateway, method: str, path: str, key: str = API_KEY, to: str = "up", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
    return httpx.request(method, f"{gateway.root}/passthrough/{to}{path}", headers=headers, timeout=30, **more)


def raw_status(gateway: Gateway, target: bytes) -> int:
    """The status of a GET whose target is sent byte by byte."""
    host, port = gateway.root.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    head = (
        b"GET "
        + target
        + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        + API_KEY.encode()
        + b"\r\nConnection: close\r\n\r\n"
    )
    connection.connect()
    connection.sock.sendall(head)
    answer = b""
    while part := connection.sock.recv(65536):
        answer += part
    connection.close()
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_objects_belong_to_the_team_that_made_them(gateway: Gateway, provider: Provider, other: str) -> None:
    """What one team's POST made is a 404 for another, in paths, bodies, queries and lists, whole and streamed."""
    made = ask(gateway, "POST", "/responses", json={"model": "m", "input": "hi"}).json()["id"]
    with httpx.stream("POST", f"{gateway.root}/passthrough/up/responses", json={"model": "m", "stream": True, "input": "x"},
                      headers={"authorization": f"Bearer {API_KEY}"}, timeout=30) as reply:  # fmt: skip
        events = reply.read().decode()
        assert reply.headers["content-type"].startswith("text/event-stream")
    streamed = json.loads(events.split("data: ")[1])["response"]["id"]
    for id in (made, streamed):
        assert ask(gateway, "GET", f"/responses/{id}").json() == {"id": id}
        before = len(provider.requests)
        for method in ("GET", "DELETE"):
            assert ask(gateway, method, f"/responses/{id}", other).status_code == 404
        for body in (
            {"previous_response_id": id},
            {"input": [{"type": "item_reference", "id": id}]},
            {"conversation": id},
        ):
            assert ask(gateway, "POST", "/responses", other, json={"model": "m", **body}).status_code == 404
        assert ask(gateway, "GET", "/vector_stores", other, params={"after": id}).status_code == 404
        assert len(provider.requests) == before
    assert ask(gateway, "POST", "/responses", json={"model": "m", "previous_response_id": made}).status_code == 200
    mine, theirs = (ask(gateway, "POST", "/vector_stores", key, json={}).json()["id"] for key in (API_KEY, other))
    assert [one["id"] for one in ask(gateway, "GET", "/vector_stores", other).json()["data"]] == [theirs]
    found = ask(gateway, "GET", "/vector_stores").json()
    assert ([one["id"] for one in found["data"]], found["first_id"]) == ([mine], mine)
    file = ask(gateway, "POST", "/files", files={"file": ("a", b"a" * 300_000)}, data={"purpose": "x"}).json()["id"]
    assert len(ask(gateway, "GET", f"/files/{file}/content").content) == 8000
    assert ask(gateway, "GET", f"/files/{file}/content", other).status_code == 404


def test_no_credential_passes_either_way(gateway: Gateway, provider: Provider) -> None:
    """Of the client's headers only named ones are sent, with the deployment's key; only the content type comes back."""
    sent = {
        "cookie": "c=1", "x-forwarded-for": "1.2.3.4", "openai-organization": "org", "x-custom": "y", "connection": "x-custom",
        "openai-beta": "assistants=v2", "te": "trailers", "proxy-authorization": "Basic x", "x-api-key": API_KEY,
    }  # fmt: skip
    reply = ask(gateway, "GET", "/status", headers=sent)
    _, _, headers, _ = provider.requests[-1]
    assert headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert API_KEY not in str(headers)
    assert headers["openai-beta"] == "assistants=v2"
    assert not {"cookie", "x-forwarded-for", "openai-organization", "x-custom", "te", "x-api-key"} & set(headers)
    assert UPSTREAM_KEY not in str(reply.headers) + reply.text
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("PUT", "/responses", 405, "method_not_allowed"),
        ("DELETE", "/vector_stores", 404, "path_not_allowed"),
        ("GET", "/models", 404, "path_not_allowed"),
        ("GET", "/responses/resp_unknown", 404, "not_found"),
        ("GET", "/status?key=abc", 400, "invalid_query"),
        ("GET", "/status?api_key=abc", 400, "invalid_query"),
        ("GET", "/status?a=%0d%0aX:1", 400, "invalid_query"),
    ],
)
def test_what_is_not_listed_is_refused(
    gateway: Gateway, provider: Provider, method: str, path: str, status: int, code: str
) -> None:
    """A refusal names its reason, and nothing reaches the provider."""
    before = len(provider.requests)
    reply = ask(gateway, method, path)
    assert (reply.status_code, reply.json()["error"]["code"], len(provider.requests)) == (status, code, before)
    assert ask(gateway, "POST", "/responses", to="off", json={"model": "m"}).status_code == 404


PIECES = st.sampled_from(
    [
        "..",
        ".",
        "/",
        "//",
        "%2e",
        "%2E%2e",
        "%2f",
        "%5c",
        "\\",
        "%00",
        "%0d%0a",
        "%252e",
        ";",
        "#",
        "?",
        "@evil",
        "responses",
        "vector_stores",
        "status",
        "*",
        "admin",
        "http://evil/",
        "%c0%ae",
        "..;",
        "up",
        "passthrough",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(PIECES, max_size=6))
def test_only_listed_paths_reach_the_provider(gateway: Gateway, provider: Provider, parts: list[str]) -> None:
    """Whatever a target is made of, the provider sees a listed path or nothing."""
    before = len(provider.requests)
    raw_status(gateway, ("/passthrough/up/" + "".join(parts)).encode())
    for method, path, _, _ in provider.requests[before:]:
        assert (method, path.partition("?")[0]) in {("GET", "/v1/status"), ("GET", "/v1/vector_stores")}


def test_no_other_target_gets_past_the_address(gateway: Gateway, provider: Provider) -> None:
    """Absolute targets, doubled slashes and encoded names reach a listed path of this provider, or nothing."""
    before = len(provider.requests)
    for target in (
        b"http://evil/passthrough/up/status", b"//passthrough/up/status", b"/v1/../passthrough/up/status", b"/passthrough/u%70/status",
        b"/passthrough/up%2fstatus", b"/passthrough/up/%2e%2e/admin", b"/passthrough//up/status", b"/passthrough/up/status/",
        b"/passthrough/up/status#x", b"/passthrough/up/status?a=b%23", b"/passthrough/up\\..\\status", b"/passthrough/off/status",
    ):  # fmt: skip
        raw_status(gateway, target)
    for method, path, headers, _ in provider.requests[before:]:
        assert (method, path.partition("?")[0]) == ("GET", "/v1/status")
        assert headers["host"] == f"127.0.0.1:{provider.server_port}"


def test_money_and_models(gateway: Gateway, provider: Provider) -> None:
    """Reported tokens are charged; another model, or one without a price, is refused; ids that no path reads are not kept."""
    reply = ask(gateway, "POST", "/responses", json={"model": "m", "input": "hi"})
    id = reply.headers["x-request-id"]
    assert reply.headers["x-sameway-cost-usd"] == "0.000020"
    wait_for(lambda: any(one["request_id"] == id for one in gateway.records()))
    found = next(one for one in gateway.records() if one["request_id"] == id)
    assert (found["route"], found["prompt_tokens"], found["completion_tokens"]) == ("passthrough", 10, 5)
    assert ask(gateway, "GET", f"/responses/{reply.json()['id']}").headers["x-sameway-cost-usd"] == "0.000000"
    other_model = ask(gateway, "POST", "/responses", json={"model": "dear", "input": "hi"})
    assert (other_model.status_code, other_model.json()["error"]["param"]) == (400, "model")
    unpriced = ask(gateway, "POST", "/responses", to="unpriced", json={"input": "hi"})
    assert (unpriced.status_code, unpriced.json()["error"]["code"]) == (400, "price_unknown")
    ask(gateway, "POST", "/responses", to="stateless", json={"model": "m", "input": "hi", "store": True})
    assert json.loads(provider.requests[-1][3])["store"] is False


def test_an_absent_object_is_no_fault_of_the_deployment(gateway: Gateway) -> None:
    """A 404, a 401 and a redirect pass as errors, without the key or the address, and the deployment stays in use."""
    job = ask(gateway, "POST", "/jobs", json={}).json()["id"]
    for path, status in (("", 404), ("/moved", 502), ("/denied", 424)):
        for _ in range(10):
            reply = ask(gateway, "GET", f"/jobs/{job}{path}", follow_redirects=False)
            assert (reply.status_code, UPSTREAM_KEY in reply.text, "location" in reply.headers) == (
                status,
                False,
                False,
            )
    assert ask(gateway, "GET", "/status").status_code == 200


def test_an_answer_comes_as_it_is(gateway: Gateway) -> None:
    """Its status, of an empty one and of HEAD, too; a compressed one is plain, and the connection serves the next."""
    with httpx.Client(
        base_url=f"{gateway.root}/passthrough/up", headers={"authorization": f"Bearer {API_KEY}"}
    ) as client:
        made = client.post("/jobs", json={})
        job = made.json()["id"]
        assert made.status_code == 201
        assert len(client.get(f"/jobs/{job}/content").json()["big"]) == 1_000_000
        assert (client.head("/status").status_code, client.head("/status").content) == (200, b"")
        gone = client.delete(f"/jobs/{job}")
        assert (gone.status_code, gone.content, "content-length" in gone.headers) == (204, b"", False)
        assert "transfer-encoding" not in gone.headers
        assert client.options("/jobs").status_code == 204
        assert client.get("/status").json() == {"ok": True}


def test_what_cannot_be_shown_to_belong_is_refused(gateway: Gateway, provider: Provider, other: str) -> None:
    """Another team's ids under any name, twice in a query, in lists of other shapes and in answers that list them all."""
    mine, theirs = (ask(gateway, "POST", "/vector_stores", key, json={}).json()["id"] for key in (API_KEY, other))
    for path in ("/maps", "/maps?stream=true"):
        assert ask(gateway, "GET", path).json()["error"]["code"] == "list_not_shown"
    assert ask(gateway, "POST", "/search", json={}).status_code == 403
    listed = ask(gateway, "GET", "/vector_stores", json={"stream": True}).json()["data"]
    assert theirs not in [one["id"] for one in listed]
    before = len(provider.requests)
    for query in (
        f"after={theirs}&after={mine}", f"filter[file_ids][]={theirs}", f"fileId={theirs}", f"x.after={theirs}", f"before={mine},{theirs}",
    ):  # fmt: skip
        assert ask(gateway, "GET", f"/vector_stores?{query}").status_code == 404, query
    for body in ({"a": [{"dataset_id": theirs}]}, {"cachedContent": theirs}, {"x": {"vectorStoreIds": [mine, theirs]}}):
        assert ask(gateway, "POST", "/jobs", json=body).status_code == 404, body
    for name, value in (
        ("file_ids[]", [mine, theirs]), ("video[id]", theirs), ("video", json.dumps({"id": theirs})), ("file_ids", f'["{theirs}"]'),
        ("video", f'{{"id": "{theirs}", "id": "{mine}"}}'), ("video", f'\ufeff{{"id": "{theirs}", "a": NaN}}'),
    ):  # fmt: skip
        reply = ask(gateway, "POST", "/files", data={name: value}, files={"file": ("a", b"a")})
        assert reply.status_code == 404, name
    named = f'{{"file_id": "{theirs}"}}'
    for status, text in (
        (404, named), (404, f'\ufeff\n {{"a": 1}}\n{{"body": [{{"vector_store_ids": ["{mine}", "{theirs}"]}}]}}\n'),
        (404, named.replace("file", "fil\\u0065")), (404, named.replace(": ", ":\n")), (404, f"[{named}]"),
        (404, f'{{"metadata": [\n{named}\n, "container"\n]}}'), (415, f'{{"a":\n{named}}}' + " " * (256 << 10)),
        (415, f'{{"file_id": "{theirs}", "file_id": "{mine}"}}'), (415, named[:-1] + ", }"),
    ):  # fmt: skip
        for name in ("a", "a.txt", "a.jsonl"):
            reply = ask(gateway, "POST", "/files", data={"purpose": "x"}, files={"file": (name, text.encode())})
            assert reply.status_code == status, text
    for encoding in ("utf-16", "utf-16-be", "utf-32-le"):
        reply = ask(gateway, "POST", "/files", files={"file": ("a.json", named.encode(encoding))})
        assert reply.status_code == 415, encoding
    deep = "[" * 90_000 + f'{{"id": "{theirs}"}}' + "]" * 90_000
    assert ask(gateway, "POST", "/files", data={"video": deep}, files={"file": ("a", b"a")}).status_code == 400
    stores = ask(gateway, "POST", "/files", data={"response[store]": "true"}, files={"file": ("a", b"a")})
    assert stores.json()["error"]["param"] == "store"
    assert ask(gateway, "GET", "/status?a=%2561fter").status_code == 400
    assert len(provider.requests) == before
    for text in (
        f'{{"custom_id": "1"}}\n{{"file_id": "{mine}"}}\n',
        "[1] a file_id",
        '{"id": "row"}\n' * 90_000,
        '\ufeff[\n {"spec": {"containers": [\n  1]}}\n]\n',
        f"see file_id {theirs}",
    ):
        reply = ask(gateway, "POST", "/files", files={"file": ("a", text.encode())})
        assert reply.status_code == (415 if text[0] == "[" else 200), text[:99]


def test_every_cost_is_known_before_it_is_made(gateway: Gateway, provider: Provider) -> None:
    """A stream reports its tokens; a missing report is an estimate and called one; what would report none is refused."""
    spent = charged(gateway, ask(gateway, "POST", "/chat/completions", json={"messages": [], "stream": True}))
    assert (spent["prompt_tokens"], spent["completion_tokens"], spent.get("usage_estimated", False)) == (30, 4, False)
    assert charged(gateway, ask(gateway, "POST", "/embeddings", json={"input": "x"})).get("usage_estimated") is True
    assert charged(gateway, ask(gateway, "POST", "/jobs", json={})).get("usage_estimated", False) is False
    before = len(provider.requests)
    for body, param in (({"background": True}, "background"), ({"x": [{"store": True}]}, "store")):
        refused = ask(gateway, "POST", "/responses", json={"input": "x", **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert len(provider.requests) == before
    spent = charged(gateway, ask(gateway, "POST", "/v1/messages", to="claude", json={"max_tokens": 9, "messages": []}))
    assert (spent["prompt_tokens"], spent["completion_tokens"]) == (7, 1)
    _, path, headers, raw = provider.requests[-1]
    assert (path, headers["x-api-key"], headers["anthropic-version"]) == ("/v1/messages", UPSTREAM_KEY, "2023-06-01")
    assert json.loads(raw) == {"max_tokens": 9, "messages": [], "model": "m"}


def charged(gateway: Gateway, reply: httpx.Response) -> dict[str, Any]:
    """The record of a request."""
    assert reply.status_code < 300, reply.text
    id = reply.headers["x-request-id"]
    wait_for(lambda: any(one["request_id"] == id for one in gateway.records()))
    return next(one for one in gateway.records() if one["request_id"] == id)


def test_a_large_body_passes_through_memory_in_pieces(gateway: Gateway, provider: Provider) -> None:
    """Sounds of 48 MB, announced and in chunks, arrive as they are at a flat memory; no way past the limits and checks."""
    piece, pieces = bytes(range(256)) * 4096, 48
    whole, kind = hashlib.sha256(piece * pieces).hexdigest(), {"content-type": "audio/l16;rate=16000"}

    def peak() -> int:
        status = [Path(f"/proc/{one.pid}/status").read_text() for one in gateway.children("gateway worker")]
        return sum(int(text.split("VmHWM:")[1].split()[0]) for text in status)

    before, sizes = peak(), {"content-length": str(len(piece) * pieces)}
    for headers in (kind, {**kind, **sizes}):
        reply = ask(gateway, "POST", "/listen", headers=headers, content=iter([piece] * pieces))
        assert (reply.status_code, reply.headers["x-sameway-cost-usd"]) == (200, "0.000000"), reply.text
        _, path, sent, raw = provider.requests[-1]
        assert (path, sent["content-type"], raw) == ("/v1/listen", kind["content-type"], f"{48 << 20} {whole}".encode())
    assert peak() - before < 30_000
    reached = len(provider.requests)
    for type, content, status in (
        ("application/octet-stream", b'\xef\xbb\xbf \n{"file_id": "file-1"}', 415),
        ("application/octet-stream", b"\xff\xfe[\0", 415),
        ("text/plain", b"a", 415),
        ("audio/wav; a=b/c", b"a", 415),
        ("audio/wav", iter([piece] * 65), 413),
    ):
        reply = ask(gateway, "POST", "/listen", headers={"content-type": type}, content=content)
        assert reply.status_code == status, (type, reply.text)
    assert ask(gateway, "POST", "/responses", headers=kind, content=b"a").status_code == 415
    assert ask(gateway, "POST", "/listen/file-of-another", headers=kind, content=b"a").status_code == 404
    early = ask(gateway, "POST", "/full", headers=kind, content=iter([piece] * pieces))
    assert (early.status_code, early.json()["error"]["message"].count("too large")) == (413, 1), early.text
    host, port = gateway.root.removeprefix("http://").split(":")
    reached = len(provider.requests)
    with socket.create_connection((host, int(port))) as left:
        head = f"POST /passthrough/up/listen HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        left.sendall(f"{head}Content-Type: audio/wav\r\nContent-Length: 4000000\r\n\r\n".encode() + piece)
    wait_for(lambda: gateway.records()[-1]["status"] == 499)
    assert len(provider.requests) == reached


def test_keys_budgets_and_operators_hold(gateway: Gateway, provider: Provider) -> None:
    """A key for other models, a spent budget and a drained deployment are refused, and nothing is sent."""
    team = gateway.admin("POST", "/teams", json={"name": "poor"})["id"]
    limited = gateway.admin("POST", f"/teams/{team}/keys", json={"name": "l", "models": ["m"]})["plaintext"]
    poor = gateway.admin("POST", f"/teams/{team}/keys", json={"name": "p"})["plaintext"]
    gateway.admin("POST", f"/teams/{team}/budgets", json={"window": "day", "limit_microusd": 10, "is_hard": True})
    before = len(provider.requests)
    wait_for(
        lambda: (
            ask(gateway, "POST", "/responses", poor, json={"input": "x"}).json()["error"]["code"]
            == "insufficient_quota"
        )
    )
    assert ask(gateway, "GET", "/status", limited).status_code == 403
    assert len(provider.requests) == before
    assert ask(gateway, "GET", "/status", poor).status_code == 200
    for act, status in (("drain", 503), ("enable", 200)):
        gateway.admin("POST", f"/deployments/{act}", json={"name": "up"})
        wait_for(lambda status=status: ask(gateway, "GET", "/status").status_code == status)


def test_a_client_that_leaves_keeps_what_it_made(gateway: Gateway, provider: Provider, other: str) -> None:
    """The object of a stream that its client left is the team's, and is charged."""
    with httpx.stream("POST", f"{gateway.root}/passthrough/up/responses", json={"stream": True, "input": "hang"},
                      headers={"authorization": f"Bearer {API_KEY}"}, timeout=30) as reply:  # fmt: skip
        id, request_id = json.loads(next(reply.iter_lines())[6:])["response"]["id"], reply.headers["x-request-id"]
    wait_for(lambda: ask(gateway, "GET", f"/responses/{id}").status_code == 200)
    assert ask(gateway, "GET", f"/responses/{id}", other).status_code == 404
    wait_for(lambda: any(one["request_id"] == request_id for one in gateway.records()))


@pytest.mark.parametrize(
    ("rules", "price", "words"),
    [
        (["POST /files"], {"input_usd_per_mtok": 1}, "request_usd"),
        (["PUT /files/*"], None, "request_usd"),
        (["POST /threads/*/messages"], None, "request_usd"),
        (["POST /batches"], {"request_usd": 1}, "POST /batches"),
        (["GET /a/../b"], None, "GET /a/../b"),
        (["POST /files"], {"request_usd": 0}, ""),
        (["POST /responses", "GET /files/*"], None, ""),
    ],
)
def test_a_rule_without_a_price_stops_the_start(rules: list[str], price: dict[str, float] | None, words: str) -> None:
    """A path that reports no tokens needs the price of a request, and a batch's lines can't be checked."""
    given = {
        "backend": "openai",
        "base_url": "http://x",
        "model": "m",
        "name": "up",
        "passthrough": rules,
        "price": price,
    }
    with pytest.raises(ValidationError, match=words) if words else nullcontext():
        DeploymentSettings.model_validate(given)
