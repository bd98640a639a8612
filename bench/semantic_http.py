"""Labelled requests through a real gateway, to an upstream that answers by label: hits and wrong ones as a client can count them.

The gateway is the one of `./run bench gateway`: its embedded Redis, the cache worker, checks, its judges without a model. A hit is
what the headers say came from the cache; it is wrong where its text is not what the upstream would have said. With a played verifier
the upstream also answers a gateway's questions about stored answers, by their labels. It takes a fiftieth of the time that a model
would. Knows no rule. Invariant: requests go one after the other, so a stream has one order; verdicts follow behind the answers, as
they do for anybody.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.lab.processes import BenchError
from bench.lab.systems import Setup
from bench.labelled import Request
from bench.meaning.stream import Outcome
from bench.meaning.verifier import ANSWER_S, LATE_S, QUESTION_S, Pace, PlayedVerifier
from bench.peers.sameway import Sameway

_HITS = ("exact", "semantic")
_TIMEOUT_S = 60.0
_QUESTIONS_PATH = "/verifier/v1"
_TIME = 1 / 50
_CHARS_PER_TOKEN = 4


class Answers(ThreadingHTTPServer):
    """An OpenAI-compatible server on a port of its own; it says what `texts` has for a dialogue, and 404 where it has nothing."""

    daemon_threads = True

    def __init__(self, verifier: PlayedVerifier | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.port = self.server_port
        self.texts: dict[str, str] = {}
        self.verifier = verifier
        self.questions = 0  # about the current request
        self._current: tuple[str, str] | None = None
        self._labels: dict[str, str] = {}  # of prompts
        self._owners: dict[tuple[str, str], str] = {}  # of a prompt with its answer

    def expect(self, request: Request, answer: str) -> None:
        """The next request, and what it is answered if it comes: a question may be about both from now on."""
        self.texts[_dialogue(request.messages)] = answer
        self.questions, self._current = 0, (request.query.text, request.label)
        self._labels[request.query.text] = request.label
        self._owners[request.query.text, answer] = request.label

    def rule(self, question: Mapping[str, Any]) -> str:
        """What the played verifier replies to a question of a gateway, in one of its four forms."""
        assert self.verifier is not None
        if "requests" in question:  # no label moves; the last one is the gateway's own, that does
            return str(len(question["requests"]))
        if "candidates" in question:
            label = self._asks(question["request"])
            labels = [self._owner(one["request"], one["answer"]) for one in question["candidates"]]
            chosen = self.verifier.choose(label, labels)
            return "0" if chosen is None else str(chosen + 1)
        if "old_request" in question:
            label = self._asks(question["new_request"])
            is_right = self.verifier.confirm(label, self._owner(question["old_request"], question["answer"]))
            return "SAME" if is_right else "DIFFERENT"
        one, other = (self._owner(question["prompt"], question[field]) for field in ("answer_a", "answer_b"))
        return "SAME" if self.verifier.choose(one, [other]) == 0 else "DIFFERENT"

    def _asks(self, text: str) -> str:
        """The label of a request with this text; a question about the current one is counted."""
        if self._current is not None and text == self._current[0]:
            self.questions += 1
            return self._current[1]
        return self._labels.get(text, "")

    def _owner(self, prompt: str, answer: str) -> str:
        """The label of a stored answer, of which a question shows the beginning."""
        known = self._owners.get((prompt, answer))
        if known is not None:
            return known
        return next((label for (_, text), label in self._owners.items() if text.startswith(answer)), "")


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Answers

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = self._verified(body) if self.path.startswith(_QUESTIONS_PATH) else self._answered(body)
        text = json.dumps(said).encode()
        self.send_response(404 if "error" in said else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _answered(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.server.verifier is not None:  # else no one weighs a question against an answer
            time.sleep(ANSWER_S * _TIME)
        text = self.server.texts.get(_dialogue(body["messages"]))
        return _error("no label for these messages") if text is None else _completion(body, text)

    def _verified(self, body: Mapping[str, Any]) -> dict[str, Any]:
        verifier = self.server.verifier
        if verifier is None or verifier.pace is Pace.ABSENT:
            return _error("there is no verifier")
        time.sleep(2 * LATE_S if verifier.pace is Pace.SLOW else QUESTION_S * _TIME)
        return _completion(body, self.server.rule(json.loads(body["messages"][-1]["content"])))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the gateway logs."""


def stream_over_http(
    requests: Sequence[Request],
    answers: Sequence[str] | None = None,
    verifier: PlayedVerifier | None = None,
    **cache: object,
) -> Iterator[Outcome]:
    """What a new gateway with these settings of its cache makes of each request. A hit's `served` has the label of its answer.

    `answers` has the upstream's text for each request; without it a text names the label. Raises BenchError where the gateway does
    not start, or refuses or garbles a request.
    """
    labels = {label: number for number, label in enumerate(sorted({request.label for request in requests}), 1)}
    texts = answers or [f"This is case {labels[request.label]}." for request in requests]
    owners: dict[str, dict[str, Request]] = {}
    for text, request in zip(texts, requests, strict=True):
        owners.setdefault(text, {})[request.label] = request
    with _answers(verifier) as upstream, tempfile.TemporaryDirectory(prefix="sameway-bench-") as folder:
        path = _QUESTIONS_PATH if verifier is not None else None
        running = Sameway(verifier=path, **cache).start(Setup.SEMANTIC, upstream, Path(folder))
        try:
            connection = HTTPConnection("127.0.0.1", running.port, timeout=_TIMEOUT_S)
            for request, fresh in zip(requests, texts, strict=True):
                upstream.expect(request, fresh)
                body = {"model": running.instant.model, "messages": request.messages}
                reply, text = _ask(connection, running.instant.path, running.instant.headers, body)
                source, is_verified = reply.headers["x-sameway-cache"], "x-sameway-verified" in reply.headers
                if source not in _HITS and text != fresh:
                    raise BenchError(f"sameway: {source}, but {text!r} instead of {fresh!r}")
                yield Outcome(
                    request,
                    _owner_of(text, request, owners) if source in _HITS else None,
                    is_exact=source == "exact",
                    is_verified=is_verified,
                    questions=upstream.questions,
                    waited_s=upstream.questions * QUESTION_S,
                )
            connection.close()
        finally:
            running.stop()


def _owner_of(text: str, request: Request, owners: Mapping[str, Mapping[str, Request]]) -> Request:
    """A request that this text answers; one of the same label where it answers several."""
    same = owners[text]
    return same.get(request.label) or next(iter(same.values()))


@contextlib.contextmanager
def _answers(verifier: PlayedVerifier | None) -> Iterator[Answers]:
    with Answers(verifier) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _ask(connection: HTTPConnection, path: str, headers: Mapping[str, str], body: object) -> tuple[HTTPResponse, str]:
    """The reply and its text."""
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        reply = connection.getresponse()
        said = reply.read()
    except (OSError, HTTPException) as error:
        raise BenchError(f"sameway: {error!r}") from None
    if reply.status != 200:
        raise BenchError(f"sameway: {reply.status} {said[:300]!r}")
    return reply, json.loads(said)["choices"][0]["message"]["content"]


def _dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([[message["role"], message["content"]] for message in messages])


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def _completion(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    tokens = sum(len(message["content"]) for message in body["messages"]) // _CHARS_PER_TOKEN + 1
    completion_tokens = len(text) // _CHARS_PER_TOKEN + 1
    return {
        "id": "chatcmpl-labelled",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "stub",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": tokens + completion_tokens,
        },
    }
