"""What a client is told when it does not get an answer: OpenAI's shape, the right status, never a stack trace."""

from __future__ import annotations

import contextlib
import re
import socket
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.api.spelling import warnings
from gateway.app import create_app
from gateway.settings import Settings
from gateway.wire.texts import texts_in
from gateway.wire.types import CHAT
from tests.e2e.gateway import API_KEY, Gateway, wait_for
from tests.e2e.test_routing import record_of
from tests.e2e.upstream import Upstream
from tests.services import RedisServer

USER = {"role": "user", "content": "hello"}


def assert_openai_shape(reply: httpx.Response) -> dict[str, Any]:
    """The error object, checked for its shape."""
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in reply.text
    assert ".py" not in reply.text
    return error


def post(gateway: Gateway, content: bytes | None = None, key: str = API_KEY, **arguments: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx.post(f"{gateway.base_url}/chat/completions", content=content, headers=headers, timeout=30, **arguments)


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"", 400, None, "invalid_json"),
        (b"{", 400, None, "invalid_json"),
        (b"[]", 400, None, "invalid_json"),
        (b'{"model": "mock", "messages": "\xff"}', 400, None, "invalid_json"),
        (b"[" * 100_000, 400, None, "invalid_json"),
        ({"messages": [USER]}, 400, "model", "missing_required_parameter"),
        ({"model": "mock"}, 400, "messages", "missing_required_parameter"),
        ({"model": "mock", "messages": []}, 400, "messages", "invalid_value"),
        ({"model": "mock", "messages": [{"content": "hi"}]}, 400, "messages[0].role", "missing_required_parameter"),
        ({"model": "mock", "messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
        ({"model": "mock", "messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "invalid_type"),
        ({"model": 5, "messages": [USER]}, 400, "model", "invalid_type"),
        (
            {"model": "mock", "messages": [USER, {"role": "user"}]},
            400,
            "messages[1].content",
            "missing_required_parameter",
        ),
        (
            {"model": "mock", "messages": [{"role": "system"}, USER]},
            400,
            "messages[0].content",
            "missing_required_parameter",
        ),
        (
            {"model": "mock", "messages": [USER, {"role": "user", "content": None}]},
            400,
            "messages[1].content",
            "invalid_type",
        ),
        (
            {"model": "mock", "messages": [USER, {"role": "tool", "tool_call_id": "c"}]},
            400,
            "messages[1].content",
            "missing_required_parameter",
        ),
        ({"model": "mock", "messages": [USER], "temperature": 3}, 400, "temperature", "invalid_value"),
        ({"model": "mock", "messages": [USER], "temperature": "hot"}, 400, "temperature", "invalid_type"),
        ({"model": "mock", "messages": [USER], "stream": "yes"}, 400, "stream", "invalid_type"),
        ({"model": "mock", "messages": [USER], "n": 0}, 400, "n", "invalid_value"),
        ({"model": "mock", "messages": [USER], "max_tokens": -1}, 400, "max_tokens", "invalid_value"),
        ({"model": "mock", "messages": [USER], "cache": {"tll": 3}}, 400, "cache.tll", "unknown_parameter"),
        ({"model": "mock", "messages": [USER], "cache": {"ttl": 0}}, 400, "cache.ttl", "invalid_value"),
        ({"model": "mock", "messages": [USER], "cache": 5}, 400, "cache", "invalid_type"),
        ({"model": "mock", "messages": [USER], "max_tokens": 2**62}, 400, "max_tokens", "invalid_value"),
        (
            b'{"model": "mock", "messages": [{"role": "user", "content": "x"}], "a": ' + b"[" * 700 + b"]" * 700 + b"}",
            400,
            None,
            "invalid_json",
        ),
        ({"model": "nope", "messages": [USER]}, 404, "model", "model_not_found"),
        ({"model": "all-minilm-l6-v2", "messages": [USER]}, 400, "model", None),
        (
            {"model": "limited", "messages": [USER], "tools": [{"type": "function"}]},
            400,
            "tools",
            "unsupported_feature",
        ),
        (
            {"model": "narrow", "messages": [{"role": "user", "content": "word " * 500}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
    ],
)
def test_clients_fault(gateway: Gateway, body: Any, status: int, param: str | None, code: str) -> None:
    """A request that is wrong is refused with the field that is wrong, and never with a 500."""
    reply = post(gateway, body) if isinstance(body, bytes) else post(gateway, json=body)
    assert reply.status_code == status, reply.text
    error = assert_openai_shape(reply)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "authorization", [None, "Bearer", "Bearer sk-wrong", f"Basic {API_KEY}", API_KEY, "Bearer \xe9"]
)
def test_wrong_key(gateway: Gateway, authorization: str | None) -> None:
    """Without a known key nothing is read and nothing is told."""
    headers = {"authorization": authorization.encode("latin-1")} if authorization else {}
    for path in ("/chat/completions", "/embeddings"):
        reply = httpx.post(f"{gateway.base_url}{path}", content=b"{not json", headers=headers)
        assert reply.status_code == 401
        assert assert_openai_shape(reply)["code"] == "invalid_api_key"
    assert httpx.get(f"{gateway.base_url}/models", headers=headers).status_code == 401


def test_body_over_the_limit(gateway: Gateway) -> None:
    """A body over the limit is refused, announced or not."""
    big = b'{"model": "mock", "messages": [{"role": "user", "content": "' + b"x" * 1_100_000 + b'"}]}'
    for body in (big, (big[i : i + 65_536] for i in range(0, len(big), 65_536))):
        reply = post(gateway, body)  # type: ignore[arg-type]
        assert reply.status_code == 413
        assert assert_openai_shape(reply)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/nope", 404),
        ("POST", "/healthz", 405),
        ("GET", "/v1", 404),
        ("GET", "/v1/modelsX", 404),
        ("GET", "/v1x", 404),
        ("POST", "/v1/openai/v1/chat/completions", 404),
    ],
)
def test_unknown_routes(gateway: Gateway, method: str, path: str, status: int) -> None:
    """A route that is not there answers in the same shape as everything else."""
    reply = httpx.request(method, gateway.root + path)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/admin/api/teams", "GET, HEAD, POST"),
        ("POST", "/admin/api/teams/1", "DELETE, GET, HEAD, PATCH"),
        ("GET", "/admin/api/keys/1", "DELETE, PATCH"),
        ("DELETE", "/admin/login", "GET, HEAD, POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("POST", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("GET", "/v1/responses/resp_1/cancel", "POST"),
        ("DELETE", "/v1/conversations/conv_1/items", "GET, HEAD, POST"),
        ("POST", "/v1/conversations/conv_1/items/msg_1", "DELETE, GET, HEAD"),
        ("POST", "/v1/batches/batch_1", "GET, HEAD"),
        ("DELETE", "/v1/files/file-1/content", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_all_the_right_ones(gateway: Gateway, method: str, path: str, allowed: str) -> None:
    """RFC 9110, section 15.5.6: also where several routes share a path."""
    reply = httpx.request(method, gateway.root + path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert reply.json()["error"]["code"] == "method_not_allowed"


def test_a_base_url_without_v1_is_served(gateway: Gateway) -> None:
    """The commonest mistake of all costs nothing."""
    chat = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}
    reply = httpx.post(f"{gateway.root}/chat/completions", json=chat, headers={"authorization": f"Bearer {API_KEY}"})
    assert (reply.status_code, reply.json()["object"]) == (200, "chat.completion")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("POST", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("DELETE", "/v1/responses/resp_1/input_items", "GET, HEAD"),
        ("DELETE", "/v1/conversations/conv_1/items", "GET, HEAD, POST"),
        ("DELETE", "/v1/files/file-1/content", "GET, HEAD"),
        ("POST", "/v1/batches/batch_1", "GET, HEAD"),
        ("GET", "/v1/batches/batch_1/cancel", "POST"),
        ("PATCH", "/v1/models/mock", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_below_an_id_is_told_the_paths_own(
    gateway: Gateway, method: str, path: str, allowed: str
) -> None:
    """Whether or not there is such an object; no key is asked for."""
    reply = httpx.request(method, gateway.root + path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


def test_a_model_is_not_deleted(gateway: Gateway) -> None:
    """As OpenAI tells a key that does not own it; an unknown one is not found."""
    client = openai.OpenAI(base_url=gateway.base_url, api_key=API_KEY)
    with pytest.raises(openai.PermissionDeniedError, match="insufficient permissions"):
        client.models.delete("mock")
    with pytest.raises(openai.NotFoundError):
        client.models.delete("nothing")
    assert client.models.retrieve("mock").id == "mock"


def test_a_misspelt_name_is_told(gateway: Gateway) -> None:
    """On the answer, a stream and a hit, and of each API: a name that only looks like a known one goes on, with a warning."""
    told = gateway.chat("hello", temprature=0).headers["x-sameway-warning"]
    assert told == "temprature is no field that Sameway knows; did you mean temperature?"
    nested = {"type": "json_schema", "json_schema": {"name": "n", "shema": {"titel": 1}}}
    reply = gateway.chat("hello", cahce=1, maxTokens=9, response_format=nested, stream=True)
    meant = [one.rpartition(" ")[2] for one in reply.headers.get_list("x-sameway-warning")]
    assert meant == ["cache?", "max_tokens?", "schema?"]
    for _ in range(2):
        sent = {"cache-control": "nocache", "x-sameway-cahce": "off", "x-sameway-tags": "a=b"}
        reply = gateway.chat("hello", headers=sent)
        directive, header = reply.headers.get_list("x-sameway-warning")
        assert directive == "nocache is no directive of Cache-Control; did you mean no-cache?"
        assert header.startswith("x-sameway-cahce is no header that Sameway reads: it reads ")
    assert reply.headers["x-sameway-cache"] == "exact"
    headers = {"authorization": f"Bearer {API_KEY}"}
    for path, body in (
        ("responses", {"input": "a", "max_output_token": 9}),
        ("embeddings", {"input": "a", "dimension": 9}),
    ):
        reply = httpx.post(f"{gateway.base_url}/{path}", json={"model": "mock", **body}, headers=headers)
        assert "_tokens?" in reply.headers["x-sameway-warning"] or "dimensions?" in reply.headers["x-sameway-warning"]


def test_a_misspelt_required_field_is_told(gateway: Gateway) -> None:
    """The 400 names what was sent in its place: a near name, at any depth, or the main field of another API."""

    def told(path: str, **body: Any) -> str:
        key = {"authorization": f"Bearer {API_KEY}"}
        reply = httpx.post(f"{gateway.base_url}/{path}", json={"model": "mock", **body}, headers=key)
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"]["message"]).removeprefix("Missing required field: ")

    chat = "chat/completions"
    message = {"role": "user", "content": "a"}
    assert told(chat, mesages=[message]) == "messages; instead there is mesages"
    assert told(chat, messages=[{"rol": "user", "content": "a"}]) == "messages[0].role; instead there is rol"
    wrong = told(chat, messages=[message, {"role": "user", "contnt": "a"}])
    assert wrong == "messages[1].content; instead there is contnt"
    assert told(chat, input="a") == "messages; instead there is input, of /v1/responses"
    assert told("responses", messages=[message]) == "input; instead there is messages, of /v1/chat/completions"
    assert told("completions", promt="a") == "prompt; instead there is promt"
    assert told("messages", messages=[message]) == "max_tokens"
    assert told(chat, top_k=1) == "messages"
    assert told("responses", input=None) == "input"


def test_another_apis_field_in_a_chat_is_told(gateway: Gateway) -> None:
    """Most servers ignore it; where Sameway translates the API that has it, nothing is told."""
    told = gateway.chat("hello", system="Be brief.", max_output_tokens=9).headers.get_list("x-sameway-warning")
    assert told == [
        "max_output_tokens is no field of a chat: send `max_completion_tokens`",
        "system is no field of a chat: send a message of the role `system`",
    ]
    key = {"authorization": f"Bearer {API_KEY}"}
    message = {"model": "mock", "system": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    response = {"model": "mock", "instructions": "a", "max_output_tokens": 9, "input": "a"}
    for path, body in (("messages", {**message, "stop_sequences": ["z"]}), ("responses", response)):
        reply = httpx.post(f"{gateway.base_url}/{path}", json=body, headers=key)
        assert (reply.status_code, reply.headers.get("x-sameway-warning")) == (200, None)


def test_what_a_server_may_know_is_no_typo(gateway: Gateway) -> None:
    """Fields of servers and names of the client's own are told nothing; many unknown ones are bounded."""
    own = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"temprature": {}}}}}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    mine = {"metadata": {"modle": "x"}, "tools": [own], "tool_choice": choice}
    reply = gateway.chat("hello", guided_regex="a", top_a=1, customer="c", reasoning_format="raw", **mine)
    assert (reply.status_code, reply.headers.get("x-sameway-warning")) == (200, None)
    many = {f"temperatur{number}": 1 for number in range(50)}
    assert 1 <= len(gateway.chat("hello", **many).headers.get_list("x-sameway-warning")) <= 4


@pytest.mark.parametrize(
    ("name", "meant"),
    [("modle", "model"), ("sotp", "stop"), ("txet", "text"), ("temprature", "temperature"), ("customer", "")],
)
def test_a_turned_pair_is_nearer_than_a_missing_letter(name: str, meant: str) -> None:
    """`modle` is `model`, not `mode`; what is more than a letter away is its own name."""
    said = [value.decode().rpartition(" ")[2] for _, value in warnings({name: 1}, {}, CHAT)]
    assert said == [f"{meant}?"] * bool(meant)


def test_no_cache_of_names_keeps_a_long_one() -> None:
    """What a client names its fields fills no memory: names that are too long to be known are not kept."""
    tracemalloc.start()
    for number in range(20):
        long = {f"temperature{number}" + "e" * 100_000: 1}
        assert (warnings(long, {"cache-control": ", ".join(long)}, CHAT), list(texts_in(long))) == ([], list(long))
    assert tracemalloc.get_traced_memory()[0] < 500_000
    tracemalloc.stop()


def test_what_could_stand_there_is_told(gateway: Gateway) -> None:
    """A refused name is told which there are."""
    told = gateway.chat("hello", cache={"tll": 5}).json()["error"]["message"]
    assert told.startswith("Unknown field: cache.tll; there is ttl, no-cache, ")


def test_which_models_there_are_is_said(gateway: Gateway) -> None:
    """At the start, and in the 404 for another one: the packaged model is not there where `models` are configured. A key that
    is limited to some models reads the names of those alone, and a long name is cut."""
    assert "\n  models     busy, busy-too, cut, " in gateway.stdout
    reply = gateway.chat("hello", model="smollm2-135m-instruct")
    assert (reply.status_code, assert_openai_shape(reply)["code"]) == (404, "model_not_found")
    assert "does not exist; there is `busy`, `busy-too`, `cut`, " in reply.json()["error"]["message"]
    near = gateway.chat("hello", model="Busy-To").json()["error"]["message"]
    assert near.endswith("(GET /v1/models); did you mean busy-too?")
    team = gateway.admin("POST", "/teams", json={"name": "narrow"})
    limited = {"name": "limited", "models": ["slow", "no-more"]}
    key = gateway.admin("POST", f"/teams/{team['id']}/keys", json=limited)["plaintext"]
    wait_for(lambda: gateway.chat("hello", model="x", key=key).status_code == 404)
    long = gateway.chat("hello", model="x" * 100_000, key=key).json()["error"]["message"]
    assert "there is `slow` (GET" in long
    assert "busy" not in long
    assert len(long) < 300


def test_an_unknown_compression_is_refused_and_a_byte_order_mark_is_not(gateway: Gateway) -> None:
    """415 with what would be taken (RFC 9110, section 12.5.3); a mark that some platforms write before JSON is ignored."""
    url, headers = f"{gateway.base_url}/chat/completions", {"authorization": f"Bearer {API_KEY}"}
    reply = httpx.post(url, content=b"\x1b", headers={**headers, "content-encoding": "br"})
    assert (reply.status_code, reply.headers["accept-encoding"]) == (415, "gzip")
    assert_openai_shape(reply)
    marked = b'\xef\xbb\xbf{"model": "mock", "messages": [{"role": "user", "content": "marked"}]}'
    assert httpx.post(url, content=marked, headers=headers).status_code == 200


def test_balancers_may_ask_with_head(gateway: Gateway) -> None:
    """The same as GET, without the body."""
    reply = httpx.head(f"{gateway.root}/healthz")
    assert (reply.status_code, reply.content) == (200, b"")
    assert httpx.head(f"{gateway.base_url}/models", headers={"authorization": f"Bearer {API_KEY}"}).status_code == 200


@pytest.mark.parametrize(
    ("model", "is_stream", "status", "code"),
    [
        ("busy", False, 429, "upstream_overloaded"),
        ("busy-too", True, 429, "upstream_overloaded"),
        ("rejecting", False, 400, None),
        ("rejecting", True, 400, None),
    ],
)
def test_upstreams_fault(
    gateway: Gateway, upstream: Upstream, model: str, status: int, code: str | None, is_stream: bool
) -> None:
    """A deployment's failure before the first chunk is an HTTP status, streamed or not, never a broken stream."""
    reply = gateway.chat("hello", model=model, stream=is_stream)
    assert reply.status_code == status, reply.text
    error = assert_openai_shape(reply)
    if code:
        assert error["code"] == code
        assert int(reply.headers["retry-after"]) >= 7
    else:  # who reads logs and metrics is told whose fault it was
        assert record_of(gateway, reply)["error"] == "upstream_rejected"


def test_only_an_assistant_may_say_nothing(gateway: Gateway) -> None:
    """Calls, a refusal, sound, or what only its server knows: an assistant's turn without content is passed on as it came."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"tool_calls": [call]},
        {"content": None, "tool_calls": [call]},
        {"content": None, "refusal": "no"},
        {"audio": {"id": "a"}},
        {"content": None},
        {"reasoning_content": "hm"},
    ]
    for turn in turns:
        body = {"model": "mock", "messages": [USER, {"role": "assistant", **turn}, USER]}
        assert post(gateway, json=body).status_code == 200, turn


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"\\ud800", "a surrogate without its pair stands for no character (byte 59)"),
        (b"\\uD83Dx", "a surrogate without its pair stands for no character (byte 59)"),
        (b"\\udc00", "invalid utf-16 surrogate pair"),
        (b"\\ud83d\\u0041", "surrogate"),
    ],
)
def test_half_a_character_is_named(gateway: Gateway, text: bytes, told: str) -> None:
    """A lone surrogate is JSON's grammar and no text: it is told so, and where, not that the body ended."""
    reply = post(gateway, b'{"model": "mock", "messages": [{"role": "user", "content":"%b"}]}' % text)
    assert (reply.status_code, assert_openai_shape(reply)["code"]) == (400, "invalid_json")
    assert told in reply.json()["error"]["message"]


def test_what_cannot_be_read_is_the_upstreams_fault(gateway: Gateway) -> None:
    """Bytes that are no text are an error; a number beyond all floats, in a field that nobody reads, is none."""
    reply = gateway.chat("tell me", model="no-text")
    assert (reply.status_code, assert_openai_shape(reply)["code"]) == (502, "upstream_broken")
    assert gateway.chat("tell me", model="out-of-range").status_code == 200
    assert gateway.chat("tell me", model="out-of-range", stream=True).text.endswith("data: [DONE]\n\n")


def test_a_cut_stream_is_not_shown_as_finished(gateway: Gateway) -> None:
    """After the first chunk a failure is an in-band error event, and there is no [DONE]."""
    reply = gateway.chat("cut me", model="cut", stream=True)
    assert reply.status_code == 200
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert "[DONE]" not in events
    assert '"error"' in events[-1]
    assert gateway.chat("cut me", model="cut").status_code == 502


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nope", "input": "x"}, 404, "model_not_found"),
        ({"model": "all-minilm-l6-v2"}, 400, "missing_required_parameter"),
        ({"model": "all-minilm-l6-v2", "input": []}, 400, "invalid_value"),
        ({"model": "all-minilm-l6-v2", "input": ""}, 400, "invalid_value"),
        ({"model": "all-minilm-l6-v2", "input": [[1, 2]]}, 400, "unsupported_feature"),
        ({"model": "all-minilm-l6-v2", "input": "word " * 2000}, 400, "context_length_exceeded"),
        ({"model": "all-minilm-l6-v2", "input": ["x", "a" * 300_000]}, 400, "context_length_exceeded"),
        ({"model": "all-minilm-l6-v2", "input": "x", "dimensions": 7}, 400, None),
    ],
)
def test_embeddings_fault(gateway: Gateway, body: Any, status: int, code: str | None) -> None:
    """The embedder refuses what it can't do; it never cuts a text."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    reply = httpx.post(f"{gateway.base_url}/embeddings", json=body, headers=headers, timeout=30)
    assert reply.status_code == status
    assert assert_openai_shape(reply)["code"] == code


def test_strange_parts_are_no_servers_fault(gateway: Gateway) -> None:
    """A content part whose type is no string passes through, and breaks nothing."""
    body = {"model": "mock", "messages": [{"role": "user", "content": [{"type": []}]}]}
    assert post(gateway, json=body).status_code == 200


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_ignored(gateway: Gateway, offer: str) -> None:
    """A client that offers another protocol, as Java's does, is answered over the one it speaks."""
    headers = {"authorization": f"Bearer {API_KEY}", "connection": "Upgrade, HTTP2-Settings", "upgrade": offer}
    body = {"model": "mock", "messages": [{"role": "user", "content": f"over {offer}"}]}
    assert httpx.post(f"{gateway.base_url}/chat/completions", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("line", ["GET /v1/models", "POST /v1/chat/completions", "POST /v1/embeddings"])
def test_a_request_without_any_header_is_told_what_it_lacks(gateway: Gateway, line: str) -> None:
    """Not even a host, as HTTP/1.0 allows: it lacks a key, and breaks nothing."""
    root = httpx.URL(gateway.root)
    with socket.create_connection((root.host, root.port or 80), timeout=10) as connection:
        connection.sendall(f"{line} HTTP/1.0\r\n\r\n".encode())
        reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert reply.startswith(b"HTTP/1.0 401 ")


def test_the_description_needs_no_internet(gateway: Gateway) -> None:
    """The page that shows the API loads nothing from anywhere else, and everything that it loads is there."""
    page = httpx.get(f"{gateway.root}/docs")
    assert page.status_code == 200
    loaded = re.findall(r"""(?:src|href|url)[=:] ?["']([^"']+)""", page.text)
    assert "/openapi.json" in loaded
    assert len(loaded) >= 4  # it, the script, the style and the icon
    for path in loaded:
        assert httpx.get(gateway.root + path).status_code == 200, path


def test_heads_and_admin_bodies_are_bounded(gateway: Gateway) -> None:
    """Nobody without a key makes the gateway keep much: not in a request's head, not in a body of the admin plane."""
    assert httpx.get(f"{gateway.root}/healthz", headers={"x-big": "x" * 200_000}).status_code == 431
    reply = httpx.post(f"{gateway.root}/admin/api/teams", content=b"x" * 3_000_000)
    assert reply.status_code in (401, 413)
    assert httpx.get(f"{gateway.root}/healthz").status_code == 200


@pytest.mark.parametrize(("is_there", "words"), [(False, "ConnectionRefusedError"), (True, "its tables are of schema")])
async def test_a_start_without_its_database_says_so_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], redis_server: RedisServer, is_there: bool, words: str
) -> None:
    """The setting and what is wrong with the database, once, and no trace of the code."""
    with contextlib.closing(sqlite3.connect(tmp_path / "later.db")) as later:
        later.execute("CREATE TABLE alembic_version AS SELECT '9999' AS version_num")
        later.commit()
    settings = Settings(
        data_dir=tmp_path,
        redis_url=redis_server.url,
        database_url=f"sqlite:///{tmp_path}/later.db" if is_there else "postgresql://u:secret@127.0.0.1:1/x",
        engines={},
        models={},
    )
    app = create_app(settings)
    with pytest.raises(Exception, match=f"^database_url: it can't be used: {words}"):
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")
    told = capsys.readouterr().err
    assert "start_failed" in told
    assert "Traceback" not in told
    assert "secret" not in told
