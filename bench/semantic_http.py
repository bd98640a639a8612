"""Labelled requests through a real gateway, to an upstream that answers by label: hits and wrong ones as a client can count them.

The gateway is the one of `./run bench gateway`: its embedded Redis, the cache worker, audits, its judges without a model. A hit is
what the headers say came from the cache; it is wrong where its text is not what the upstream would have said. Knows no rule.
Invariant: requests go one after the other, so a stream has one order; verdicts follow behind the answers, as they do for anybody.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.lab.processes import BenchError
from bench.lab.systems import Setup
from bench.labelled import Request
from bench.meaning.stream import Outcome
from bench.peers.sameway import Sameway

_HITS = ("exact", "semantic")
_TIMEOUT_S = 60.0


class Answers(ThreadingHTTPServer):
    """An OpenAI-compatible server on a port of its own; it says what `texts` has for a dialogue, and 404 where it has nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.port = self.server_port
        self.texts: dict[str, str] = {}


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Answers

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = self.server.texts.get(_dialogue(asked["messages"]))
        said = {"error": {"message": "no label for these messages"}} if text is None else _completion(text)
        body = json.dumps(said).encode()
        self.send_response(404 if text is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the gateway logs."""


def stream_over_http(
    requests: Sequence[Request], answers: Sequence[str] | None = None, **cache: object
) -> Iterator[Outcome]:
    """What a new gateway with these settings of its cache makes of each request. A hit's `served` has the label of its answer.

    `answers` has the upstream's text for each request; without it a text names the label. Raises BenchError where the gateway does
    not start, or refuses or garbles a request.
    """
    labels = {label: number for number, label in enumerate(sorted({request.label for request in requests}), 1)}
    texts = answers or [f"This is case {labels[request.label]}." for request in requests]
    owners = dict(zip(texts, requests, strict=True))
    with _answers() as upstream, tempfile.TemporaryDirectory(prefix="sameway-bench-") as folder:
        running = Sameway(**cache).start(Setup.SEMANTIC, upstream, Path(folder))
        try:
            connection = HTTPConnection("127.0.0.1", running.port, timeout=_TIMEOUT_S)
            for request, fresh in zip(requests, texts, strict=True):
                upstream.texts[_dialogue(request.messages)] = fresh
                body = {"model": running.instant.model, "messages": request.messages}
                kind, text = _ask(connection, running.instant.path, running.instant.headers, body)
                if kind not in _HITS and text != fresh:
                    raise BenchError(f"sameway: {kind}, but {text!r} instead of {fresh!r}")
                yield Outcome(request, owners[text] if kind in _HITS else None, is_exact=kind == "exact")
            connection.close()
        finally:
            running.stop()


@contextlib.contextmanager
def _answers() -> Iterator[Answers]:
    with Answers() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _ask(connection: HTTPConnection, path: str, headers: Mapping[str, str], body: object) -> tuple[str, str]:
    """Where the answer came from, and its text."""
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        reply = connection.getresponse()
        said = reply.read()
    except (OSError, HTTPException) as error:
        raise BenchError(f"sameway: {error!r}") from None
    if reply.status != 200:
        raise BenchError(f"sameway: {reply.status} {said[:300]!r}")
    return reply.headers["x-sameway-cache"], json.loads(said)["choices"][0]["message"]["content"]


def _dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([[message["role"], message["content"]] for message in messages])


def _completion(text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-labelled",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "stub",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14},
    }
