"""Names collected from a gateway that runs: one script of requests, and all that is left of it
outside.

Values that differ from run to run are replaced by a word in capitals. Invariant: what is collected
depends on the script alone, not on what the machine had time for; what may or may not be there in
time is waited for, or left out.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from tests.e2e.gateway import ADMIN_KEY, API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import run_upstream
from tests.services import run_redis

# of a body that took a millisecond to arrive, and of a refused request that the cache worker was fast enough for
_SOMETIMES = {"request info received_ms", "request error received_ms", "request error similarity"}
_ASKED, _PARAPHRASE = "What is the capital of France?", "Tell me the capital of France."
_NEAR = "What is the capital of Germany?"
_IS_OUR_OWN = re.compile(r"x-|age$|cache-|server-timing|retry-after|www-auth|content-type|accept-encoding|set-cookie")


class Seen:
    """Lines by subject."""

    def __init__(self) -> None:
        self.lines: dict[str, set[str]] = {"replies": set(), "keys": set(), "log": set(), "admin": set()}

    def add(self, subject: str, line: str) -> None:
        self.lines[subject].add(line)


@cache
def seen() -> dict[str, set[str]]:
    """Runs the script once."""
    found = Seen()
    with run_redis() as redis, run_upstream() as upstream, tempfile.TemporaryDirectory() as folder:

        def at(name: str, model: str = "mock", **more: Any) -> dict[str, Any]:
            return {"deployments": [deployment(upstream.url, name, model, **more)]}

        models = {
            "mock": at("plain", "mock?delay_ms=300"),  # so that a hit saves time
            "failing": at("failing", "mock?status=500"),
            "busy": at("busy", "mock?status=429;retry_after=7"),
            "denying": at("denying", "mock?status=401;body=auth"),
            "cut": at("cut", "mock?cut=middle"),
            "limited": at("limited", capabilities=[]),
        }
        config = {"redis_url": redis.url, "body_bytes_max": 100_000, "workers": 1, "models": models}
        with run_gateway(Path(folder), config) as gateway:
            gateway.wait_ready()
            upstream.labels({_ASKED: "Paris.", _PARAPHRASE: "Paris.", _NEAR: "Paris."})  # judged to be the same
            _talk(gateway, found)
            with Redis.from_url(redis.url) as client:
                wait_for(lambda: bool(client.keys("*:groups")) and bool(client.exists("sameway:near")), 20)
                wait_for(lambda: len(gateway.admin("GET", "/cache/certificate")["certificates"]) == 2, 30)
                time.sleep(2.5)  # what a worker counts it hands over once a second
                _administer(gateway, found)
                _look_into(client, found)
        for line in gateway.log.read_text().splitlines():
            if line.startswith("{"):
                record = json.loads(line)
                event = record["event"] if re.fullmatch(r"[a-z_]+", record["event"]) else "text"  # of a child
                found.lines["log"] |= {f"{event} {record['level']} {name}" for name in record}
    found.lines["log"] -= _SOMETIMES
    return found.lines


def _talk(gateway: Gateway, found: Seen) -> None:
    def said(name: str, reply: httpx.Response) -> httpx.Response:
        known = {n: _plain(v) for n, v in reply.headers.items() if _IS_OUR_OWN.match(n)}
        found.add("replies", f"{name}: {reply.status_code}")
        for header, value in known.items():
            found.add("replies", f"{name}: {header}: {value}")
        if reply.headers["content-type"].startswith("text/event-stream"):
            for event in reply.text.split("\n\n"):
                for line in event.splitlines():
                    field, _, data = line.partition(": ")
                    if data.startswith("{"):
                        found.lines["replies"] |= {f"{name}: {field} {path}" for path in _paths(json.loads(data))}
                    else:
                        found.add("replies", f"{name}: {line}")
        elif reply.status_code >= 400:
            found.add("replies", f"{name}: {_plain(reply.text)}")
        else:
            found.lines["replies"] |= {f"{name}: {path}" for path in _paths(reply.json())}
        return reply

    def post(path: str, key: str = API_KEY, **arguments: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **arguments.pop("headers", {})}
        return httpx.post(f"{gateway.root}{path}", headers=headers, timeout=60, **arguments)

    chat = gateway.chat
    for path in ("/healthz", "/readyz", "/metrics"):
        said(path, httpx.get(gateway.root + path, timeout=10))
    said("/readyz, with a key", gateway.observe("/readyz"))
    said("chat, miss", chat(_ASKED))
    wait_for(
        lambda: gateway.admin("GET", "/cache")["semantic"]["detail"].startswith("1 "), 30
    )  # else a miss is `empty`
    said("chat, exact", chat(_ASKED))
    said("chat, exact stream", chat(_ASKED, stream=True, stream_options={"include_usage": True}))
    said("chat, miss stream", chat("stream", stream=True, stream_options={"include_usage": True}))
    said("chat, bypass", chat(_ASKED, cache={"no-store": True, "no-cache": True}))
    hit = said("chat, semantic", chat(_PARAPHRASE))
    said("chat, near", chat(_NEAR))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    said("chat, tools", chat("use a tool", tools=tools, logprobs=True, n=2))
    said("completions, miss", post("/v1/completions", json={"model": "mock", "prompt": "Once"}))
    said(
        "completions, stream",
        post("/v1/completions", json={"model": "mock", "prompt": "List the prime numbers below ten", "stream": True}),
    )
    said("responses, miss", post("/v1/responses", json={"model": "mock", "input": "hello"}))
    said(
        "responses, stream",
        post("/v1/responses", json={"model": "mock", "input": "Which colours has a rainbow?", "stream": True}),
    )
    said("embeddings", post("/v1/embeddings", json={"model": "all-minilm-l6-v2", "input": "hello"}))
    said("feedback", post("/v1/feedback", json={"id": hit.headers["x-request-id"], "verdict": "wrong"}))
    for path in ("/v1/models", "/v1/models/mock"):
        said(path, httpx.get(gateway.root + path, headers={"authorization": f"Bearer {API_KEY}"}, timeout=10))

    said("not cached", chat("never asked", headers={"cache-control": "only-if-cached"}))
    said("no key", httpx.post(f"{gateway.base_url}/chat/completions", json={}, timeout=10))
    said("wrong key", chat("x", key="sk-sw-wrong"))
    said("unknown model", chat("x", "nothing"))
    said("no json", post("/v1/chat/completions", content=b"{"))
    said("no messages", post("/v1/chat/completions", json={"model": "mock"}))
    said("too large", post("/v1/chat/completions", content=b" " * 100_001))
    said("compressed", post("/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"}))
    said("unknown path", post("/v1/nothing", json={}))
    said("wrong method", httpx.get(f"{gateway.root}/v1/completions", timeout=10))
    said("unsupported", chat("x", "limited", tools=tools))
    said("upstream fails", chat("x", "failing"))
    said("upstream is busy", chat("x", "busy"))
    said("upstream refuses the key", chat("x", "denying"))
    for _ in range(2):
        chat("x", "denying")
    said("upstream rests", chat("x", "denying"))
    said("upstream breaks off", chat("x", "cut", stream=True))
    said("feedback on nothing", post("/v1/feedback", json={"id": "req_0", "verdict": "wrong"}))
    team = gateway.admin("POST", "/teams", json={"name": "poor", "requests_per_min": 2})
    gateway.admin("POST", f"/teams/{team['id']}/budgets", json={"window": "day", "limit_microusd": 0})
    key = gateway.admin("POST", f"/teams/{team['id']}/keys", json={"name": "k", "models": ["mock"]})["plaintext"]
    said("forbidden model", chat("x", "busy", key=key))
    said("no budget", chat("x", key=key))
    chat("x", key=key)
    said("rate limit", chat("x", key=key))


def _administer(gateway: Gateway, found: Seen) -> None:
    whole = httpx.get(f"{gateway.root}/openapi.json", timeout=10).json()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    for path, methods in whole["paths"].items():
        found.lines["admin"] |= {f"{method.upper()} {path}" for method in methods}
        if not path.startswith("/admin") or "get" not in methods:
            continue
        reply = httpx.get(gateway.root + re.sub(r"\{\w+\}", "1", path), headers=headers, timeout=10)
        if reply.headers["content-type"] == "application/json":
            found.lines["admin"] |= {f"GET {path} {line}" for line in _paths(reply.json())}
        else:
            kind = reply.headers["content-type"]
            first = reply.text.splitlines()[0] if kind.startswith("text/") else reply.text[:4]  # of a binary file
            found.add("admin", f"GET {path} {kind} {first}")
    pages = ("", "/login", "/deployments", "/requests", "/ledger", "/teams", "/teams/1", "/cache", "/static/admin.css")
    with httpx.Client(base_url=gateway.root, timeout=10) as browser:
        browser.post("/admin/login", data={"key": ADMIN_KEY}, headers={"sec-fetch-site": "same-origin"})
        for page in pages:
            reply = browser.get(f"/admin{page}")
            title = re.search(r"<title>(.*?)</title>", reply.text)
            found.add("admin", f"page /admin{page} {reply.status_code} {title[1] if title else ''}".rstrip())
    for line in gateway.observe("/metrics").text.splitlines():
        family = re.match(r"# TYPE (\S+) (\S+)", line)
        if family:
            found.add("admin", f"metric {family[1]} {family[2]}")


def _look_into(redis: Redis, found: Seen) -> None:
    for raw in redis.scan_iter(count=1000):
        kind, name = redis.type(raw).decode(), _key(raw.decode())
        found.add("keys", f"{name} {kind}{'' if redis.ttl(raw) == -1 else ' expires'}")
        if kind == "hash":
            found.lines["keys"] |= {f"{name} field {_field(one)}" for one in redis.hkeys(raw)}
        elif kind == "stream":
            for _, fields in redis.xrange(raw):
                found.lines["keys"] |= {f"{name} field {one.decode()}" for one in fields}


def _key(name: str) -> str:
    name = re.sub(r"\{[0-9a-f]{16,}\}", "{PARTITION}", name)
    name = re.sub(r"(req_|resp_|chatcmpl-|cmpl-)[0-9a-zA-Z]+", "ID", name)
    name = re.sub(r"[0-9a-f]{16,}", "HEX", name)
    return re.sub(r"(?<=:)[a-z]*\d[\dTW-]*", "N", name)


def _field(raw: bytes) -> str:
    text = raw.decode("latin-1")
    if not text.isascii() or not text.isprintable():
        return "BYTES"
    count, bar, rest = text.partition("|")
    if bar:
        _, kind, surface, _ = rest.split("|", 3)
        return f"{re.sub(r'[0-9]+', 'N', count)}|TEAM|{kind}|{surface}|MODEL"
    return "ID" if re.search(r"\d", text) else text


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Each property of a JSON value with its type, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, f"{path}[]")
    else:
        kinds = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
        # saved twice a minute: null in a quick run; not known in the first half hour of a day
        is_either = path.endswith((".last_used_at_s", ".per_day"))
        yield f"{path} {'number or null' if is_either else kinds[type(value)]}"


def _plain(text: str) -> str:
    text = re.sub(r"(req|resp|msg)_[0-9a-zA-Z]+", "ID", text)
    return re.sub(r"\d+(\.\d+)?", "N", text)


def _subject(name: str) -> Callable[[], set[str]]:
    return lambda: seen()[name]


COLLECTORS = {f"live_{name}": _subject(name) for name in ("replies", "keys", "log", "admin")}
