"""A small OpenAI-compatible server, a process of its own, that answers deterministically and misbehaves on command.

    python tests/e2e/upstream.py --port 0        prints `listening on PORT`

What an answer says is a function of the request alone. How it is told is a plan, `key=value;key=value` with the fields of
`Plan`: from the header `x-plan`, else from the model's name (`mock?status=503;retry_after=2`), else from the control
endpoint, else plain. Knows nothing of Sameway: its chunks and its wholes are made by two pieces of code of its own.

Control: `GET /control/seen` (a `Seen`), `POST /control/plan` {"plan", "times"}, `POST /control/labels` {text: answer} (last messages
that are answered so, whatever came before), `POST /control/reset`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import email
import email.policy
import gzip
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

_CREATED = 1_700_000_000
_HTML = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


@dataclass(frozen=True)
class Plan:
    """How an answer is told. Places are `headers` (nothing was sent), `first` (before the first chunk), `middle`,
    `between` (before the last choice's finish), `end` (after all finishes, before usage and [DONE])."""

    times: int = 0  # for the first so many requests of this model's name; plain from then on. 0: always
    status: int = 200
    body: str = "openai"  # openai | html | text | empty | detail | vllm | quota | auth | missing | context | filter
    retry_after: str = ""
    retry_after_ms: str = ""
    hang: str = ""  # a place: say nothing more, keep the connection
    cut: str = ""  # a place: close the connection
    reset: bool = False  # cut by RST instead of FIN
    error: str = ""  # a place: an error object inside the stream
    error_code: str = "server_error"
    malformed: str = ""  # a place: half of a JSON object
    note: str = ""  # in each object, where nobody reads it: bytes | range
    delay_ms: float = 0.0  # before the headers
    pace_ms: float = 0.0  # before each chunk
    linger_ms: float = 0.0  # between [DONE] and the end of the body
    finish: str = ""  # another finish reason: length, content_filter, error
    chunks: int = 0  # so many pieces of text, instead of the answer's words
    huge: int = 0  # the first piece of text is this long, in characters
    split: int = 0  # write this many bytes at a time
    is_crlf: bool = False
    has_comments: bool = False
    is_gzip: bool = False
    is_pretty: bool = False  # a whole is JSON on several lines
    is_until_close: bool = False  # no chunked encoding: the body ends where the connection does
    has_done: bool = True
    has_usage: bool = True
    has_finish: bool = True
    has_reasoning: bool = False
    is_whole: bool = False  # a whole although a stream was asked for
    is_stream: bool = False  # a stream although a whole was asked for

    @staticmethod
    def parse(text: str) -> Plan:
        kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(Plan)}
        values: dict[str, Any] = {}
        for part in filter(None, text.split(";")):
            name, _, value = part.partition("=")
            values[name] = (value != "0") if kinds[name] is bool else kinds[name](value)
        return Plan(**values)


_PLAIN = Plan()
_NOTES = {"bytes": b'"\xff"', "range": b"1e999"}


@dataclass
class Seen:
    """What the server has seen since it started or was reset."""

    requests: list[dict[str, Any]] = field(default_factory=list)  # the last 1,000: {headers, body}
    generations: int = 0  # answers begun
    finished: int = 0  # answers sent to their end
    dropped: int = 0  # connections the client closed before the answer's end
    connections_open: int = 0
    connections_total: int = 0


_LABELS: dict[str, str] = {}


# -- what is said ----------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """One choice: its text in pieces, or its tool calls."""

    pieces: list[str]
    reasoning: list[str]
    calls: list[dict[str, Any]]
    finish: str


def answer(request: dict[str, Any], plan: Plan, choice: int) -> Answer:
    """Deterministic: an echo of the last message under a digest of the whole conversation, or a call of each tool."""
    last, begun = request["messages"][-1], ""
    if last.get("prefix"):  # the beginning of the answer to the messages before it
        begun, request = last["content"], {**request, "messages": request["messages"][:-1]}
        last = request["messages"][-1]
    text = last.get("content")
    text = text if isinstance(text, str) else json.dumps(text)
    digest = hashlib.sha256(msgspec.json.encode(request["messages"])).hexdigest()[:8]
    tools = request.get("tools") or []
    calls = []
    if tools and last["role"] != "tool" and request.get("tool_choice") != "none":
        for number, tool in enumerate(tools):
            function = {"name": tool["function"]["name"], "arguments": json.dumps({"text": text, "choice": choice})}
            calls.append({"id": f"call_{digest}_{choice}_{number}", "type": "function", "function": function})
    words = _LABELS.get(text, f"Echo {digest} {choice}: {text}").split(" ")
    pieces = [word + " " for word in words[:-1]] + words[-1:]
    if plan.chunks:
        pieces = [f"word{number} " for number in range(plan.chunks)]
    if plan.huge:
        pieces[0] = "x" * plan.huge
    while begun and pieces:
        begun, pieces = begun.removeprefix(pieces[0].rstrip()).lstrip(), pieces[1:]
    limit = request.get("max_completion_tokens") or request.get("max_tokens")
    is_cut = limit is not None and limit < len(pieces) and not calls
    finish = plan.finish or ("tool_calls" if calls else "length" if is_cut else "stop")
    reasoning = ["Let me ", "think."] if plan.has_reasoning else []
    return Answer([] if calls else pieces[: limit if is_cut else None], reasoning, calls, finish)


def usage(request: dict[str, Any], answers: list[Answer]) -> dict[str, Any]:
    """Words count as tokens."""
    prompt = sum(len(json.dumps(message).split()) for message in request["messages"])
    completion = sum(len(a.pieces) + len(a.reasoning) + 5 * len(a.calls) for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }


def token_logprob(piece: str) -> dict[str, Any]:
    entry = {"token": piece, "logprob": -0.25, "bytes": list(piece.encode())}
    return {**entry, "top_logprobs": [entry]}


def head(request: dict[str, Any], kind: str) -> dict[str, Any]:
    digest = hashlib.sha256(msgspec.json.encode(request)).hexdigest()[:12]
    return {
        "id": f"chatcmpl-{digest}",
        "object": kind,
        "created": _CREATED,
        "model": request["model"].partition("?")[0],
        "system_fingerprint": "fp_upstream",
    }


def noted(told: bytes, plan: Plan) -> bytes:
    return told[:-1] + b',"note":' + _NOTES[plan.note] + b"}" if plan.note else told


def whole(request: dict[str, Any], plan: Plan) -> bytes:
    """The answer as a `chat.completion`."""
    answers = [answer(request, plan, choice) for choice in range(request.get("n") or 1)]
    choices = []
    for index, told in enumerate(answers):
        message: dict[str, Any] = {"role": "assistant", "content": "".join(told.pieces) or None, "refusal": None}
        if told.reasoning:
            message["reasoning_content"] = "".join(told.reasoning)
        if told.calls:
            message["tool_calls"] = told.calls
        logprobs = {"content": [token_logprob(p) for p in told.pieces], "refusal": None}
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": logprobs if request.get("logprobs") else None,
                "finish_reason": told.finish if plan.has_finish else None,
            }
        )
    body = {**head(request, "chat.completion"), "choices": choices}
    return noted(msgspec.json.encode({**body, "usage": usage(request, answers)} if plan.has_usage else body), plan)


def events(request: dict[str, Any], plan: Plan) -> tuple[list[bytes], int]:
    """The answer as `chat.completion.chunk`s, and how many of them come before everything has finished."""
    answers = [answer(request, plan, choice) for choice in range(request.get("n") or 1)]
    wants_usage = plan.has_usage and (request.get("stream_options") or {}).get("include_usage")
    start = head(request, "chat.completion.chunk")
    found: list[bytes] = []

    def say(choices: list[dict[str, Any]], **fields: Any) -> None:
        more = {"usage": None, **fields} if wants_usage else fields
        found.append(noted(msgspec.json.encode({**start, "choices": choices, **more}), plan))

    def delta(index: int, content: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> None:
        say([{"index": index, "delta": content, "logprobs": logprobs, "finish_reason": finish}])

    for index in range(len(answers)):
        delta(index, {"role": "assistant", "content": None if answers[index].calls else "", "refusal": None})
    for step in range(max(len(a.pieces) + len(a.reasoning) for a in answers)):
        for index, told in enumerate(answers):
            texts = [("reasoning_content", p) for p in told.reasoning] + [("content", p) for p in told.pieces]
            if step < len(texts):
                key, piece = texts[step]
                has_logprobs = request.get("logprobs") and key == "content"
                delta(
                    index,
                    {key: piece},
                    None,
                    {"content": [token_logprob(piece)], "refusal": None} if has_logprobs else None,
                )
    for index, told in enumerate(answers):
        for number, call in enumerate(told.calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            opening = {
                "index": number,
                "id": call["id"],
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            delta(index, {"tool_calls": [opening]})
            for part in (arguments[:4], arguments[4:]):
                delta(index, {"tool_calls": [{"index": number, "function": {"arguments": part}}]})
    for index, told in enumerate(answers):
        if plan.has_finish:
            delta(index, {}, told.finish)
    finished = len(found)
    if wants_usage:
        say([], usage=usage(request, answers))
    return found, finished


# -- a completion ------------------------------------------------------------------------------------------------------


def text_choices(request: dict[str, Any], plan: Plan) -> list[dict[str, Any]]:
    """For each prompt and choice: `tokens` (words, the prompt's too where it is echoed), how many of them are `given`, `finish`."""
    prompt = request["prompt"]
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    found = []
    for number in range(len(prompts) * (request.get("n") or 1)):
        asked = prompts[number // (request.get("n") or 1)]
        shown = asked if isinstance(asked, str) else " ".join(map(str, asked))
        said = f" goes on {number} after {shown}".split(" ")[1:]
        is_cut = request.get("max_tokens", 16) < len(said)
        tokens = [" " + word for word in said[: request.get("max_tokens", 16)]]
        given = [shown] if request.get("echo") else []
        finish = plan.finish or ("length" if is_cut else "stop")
        found.append({"tokens": given + tokens, "given": len(given), "finish": finish if plan.has_finish else None})
    return found


def text_logprobs(tokens: list[str], start: int) -> dict[str, Any]:
    offsets = [start + len("".join(tokens[:place])) for place in range(len(tokens))]
    logprobs = [-0.5 - len(token) for token in tokens]
    top = [{token: value} for token, value in zip(tokens, logprobs, strict=True)]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def text_usage(request: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, int]:
    completion = sum(len(choice["tokens"]) - choice["given"] for choice in choices)
    prompt = len(json.dumps(request["prompt"]).split())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def text_whole(request: dict[str, Any], plan: Plan) -> bytes:
    """The answer as a `text_completion`."""
    choices, wants = text_choices(request, plan), request.get("logprobs") is not None
    told = [
        {
            "index": index,
            "text": "".join(choice["tokens"]),
            "logprobs": text_logprobs(choice["tokens"], 0) if wants else None,
            "finish_reason": choice["finish"],
        }
        for index, choice in enumerate(choices)
    ]
    body = {**head(request, "text_completion"), "choices": told}
    return msgspec.json.encode({**body, "usage": text_usage(request, choices)} if plan.has_usage else body)


def text_events(request: dict[str, Any], plan: Plan) -> tuple[list[bytes], int]:
    """The answer as a stream's `text_completion`s, choices interleaved, and how many come before everything has finished."""
    choices, wants = text_choices(request, plan), request.get("logprobs") is not None
    wants_usage = plan.has_usage and (request.get("stream_options") or {}).get("include_usage")
    start = head(request, "text_completion")
    found: list[bytes] = []
    for place in range(max(len(choice["tokens"]) for choice in choices) + 1):
        for index, choice in enumerate(choices):
            if place <= len(choice["tokens"]):
                tokens, before = choice["tokens"][place : place + 1], len("".join(choice["tokens"][:place]))
                piece = {
                    "index": index,
                    "text": "".join(tokens),
                    "logprobs": text_logprobs(tokens, before) if wants and tokens else None,
                    "finish_reason": None if tokens else choice["finish"],
                }
                found.append(msgspec.json.encode({**start, "choices": [piece]}))
    finished = len(found)
    if wants_usage:
        found.append(msgspec.json.encode({**start, "choices": [], "usage": text_usage(request, choices)}))
    return found, finished


def embeddings(request: dict[str, Any]) -> dict[str, Any]:
    """A vector of `dimensions` numbers, 4 by default, for each input; a word or a token id is a token."""
    given = request["input"]
    inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(one, request.get("dimensions") or 4)}
        for index, one in enumerate(inputs)
    ]
    tokens = sum(len(one.split()) if isinstance(one, str) else len(one) for one in inputs)
    counted = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request["model"], "usage": counted}


def _vector(given: Any, size: int) -> list[float]:
    digest = hashlib.sha512(json.dumps(given).encode()).digest()
    return [byte / 256 for byte in digest[:size]]


def rerank(request: dict[str, Any]) -> dict[str, Any]:
    """The documents by the words that they share with the query, as Cohere's API says it."""
    words = set(request["query"].split())
    scores = [len(words & set(json.dumps(one).strip('"').split())) for one in request["documents"]]
    best = sorted(range(len(scores)), key=lambda one: -scores[one])[: request.get("top_n")]
    found = [{"index": one, "relevance_score": scores[one] / max(1, len(words))} for one in best]
    return {"id": "rerank-1", "results": found, "meta": {"billed_units": {"search_units": 1, "input_tokens": 7}}}


def moderations(request: dict[str, Any]) -> dict[str, Any]:
    inputs = request["input"] if isinstance(request["input"], list) else [request["input"]]
    found = [{"flagged": "violence" in json.dumps(one), "categories": {}, "category_scores": {}} for one in inputs]
    return {"id": "modr-1", "model": request["model"], "results": found}


_ENDPOINTS = {"/v1/embeddings": embeddings, "/v1/rerank": rerank, "/v1/moderations": moderations}


def speech(request: dict[str, Any], files: dict[str, bytes]) -> tuple[str, list[bytes]]:
    """A tenth of a kilobyte of sound for each letter."""
    return "audio/mpeg", [letter.encode() * 100 for letter in request["input"]]


def images(request: dict[str, Any], files: dict[str, bytes]) -> tuple[str, list[bytes]]:
    """As gpt-image-1 says it, with tokens; other models tell none. Never the same twice."""
    data = [{"b64_json": base64.b64encode(os.urandom(12)).decode()} for _ in range(int(request.get("n") or 1))]
    text, read = len(request.get("prompt", "").split()), 100 * len(files)
    counted = {
        "input_tokens": text + read,
        "output_tokens": 1000 * len(data),
        "total_tokens": text + read + 1000 * len(data),
    }
    counted["input_tokens_details"] = {"text_tokens": text, "image_tokens": read}  # type: ignore[assignment]
    usage = {"usage": counted} if "gpt-image" in request["model"] else {}
    if request.get("stream"):
        last = {"type": "image_generation.completed", **data[0], **usage}
        events = [{"type": "image_generation.partial_image", "partial_image_index": 0}, last]
        return "text/event-stream", [b"data: %b\n\n" % msgspec.json.encode(event) for event in events]
    return "application/json", [msgspec.json.encode({"created": 1, "data": data, **usage})]


def transcription(request: dict[str, Any], files: dict[str, bytes]) -> tuple[str, list[bytes]]:
    """The file's length is what was said; a thousand bytes are a second."""
    text, size = f"{len(files['file'])} bytes", len(files["file"])
    match request.get("response_format"):
        case "text" | "srt" | "vtt" as form:
            return "text/plain; charset=utf-8", [f"{form}: {text}\n".encode()]
        case "verbose_json":
            return "application/json", [msgspec.json.encode({"text": text, "duration": size / 1000, "segments": []})]
    counted = {"type": "duration", "seconds": -(-size // 1000)}
    if request.get("stream") == "true":
        events = [
            {"type": "transcript.text.delta", "delta": text},
            {"type": "transcript.text.done", "text": text, "usage": counted},
        ]
        return "text/event-stream", [b"data: %b\n\n" % msgspec.json.encode(event) for event in events]
    return "application/json", [msgspec.json.encode({"text": text, "usage": counted})]


_MEDIA = {
    "/v1/audio/speech": speech,
    "/v1/audio/transcriptions": transcription,
    "/v1/audio/translations": transcription,
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"), images),
}


def body_of(headers: dict[str, str], raw: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The fields of a body, JSON or a form, and the files of a form."""
    kind = headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        return json.loads(raw), {}
    message = email.message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + raw, policy=email.policy.HTTP)
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for part in message.iter_parts():  # type: ignore[attr-defined]
        name, content = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
        if part.get_filename() is not None:
            files[name] = content
            fields["filename"] = part.get_filename()
        elif name in fields:
            fields[name] = [fields[name], content.decode()]
        else:
            fields[name] = content.decode()
    return fields, files


def refusal(plan: Plan) -> tuple[bytes, str]:
    """An error's body and its content type."""

    def openai(message: str, type: str, code: str | None, param: str | None = None) -> dict[str, Any]:
        return {"error": {"message": message, "type": type, "param": param, "code": code}}

    secret = "Incorrect API key provided: sk-upst****cret. Find yours at https://platform.example"
    shapes: dict[str, Any] = {
        "openai": openai(
            "upstream says no", "server_error" if plan.status >= 500 else "invalid_request_error", None, "messages"
        ),
        "detail": {"detail": "Not this way"},
        "vllm": {
            "object": "error",
            "message": "vllm says no",
            "type": "BadRequestError",
            "param": None,
            "code": plan.status,
        },
        "quota": openai("You exceeded your current quota", "insufficient_quota", "insufficient_quota"),
        "auth": openai(secret, "invalid_request_error", "invalid_api_key"),
        "missing": openai("The model `x` does not exist", "invalid_request_error", "model_not_found"),
        "context": openai(
            "This model's maximum context length is 8 tokens",
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
        ),
        "filter": openai(
            "Your request was rejected by the safety system", "invalid_request_error", "content_policy_violation"
        ),
    }
    if plan.body in shapes:
        return json.dumps(shapes[plan.body]).encode(), "application/json"
    return {
        "html": (_HTML, "text/html"),
        "text": (b"Internal Server Error", "text/plain"),
        "empty": (b"", "text/plain"),
    }[plan.body]


# -- how it is told --------------------------------------------------------------------------------------------------


class Server:
    """What all connections share."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.raw: deque[tuple[dict[str, str], bytes]] = deque(maxlen=1000)
        self.plan = _PLAIN
        self.times: int | None = None
        self.asked: Counter[str] = Counter()  # how often, by the model's name

    def plan_for(self, headers: dict[str, str], model: str) -> Plan:
        text = headers.get("x-plan") or model.partition("?")[2]
        if text:
            plan = Plan.parse(text)
            self.asked[model] += 1
            return dataclasses.replace(_PLAIN, chunks=plan.chunks) if 0 < plan.times < self.asked[model] else plan
        if self.times is None:
            return self.plan
        self.times -= 1
        return self.plan if self.times >= 0 else _PLAIN

    def control(self, path: str, body: bytes) -> bytes:
        if path == "/control/plan":
            asked = json.loads(body)
            self.plan, self.times = Plan.parse(asked["plan"]), asked.get("times")
        elif path == "/control/labels":
            _LABELS.update(json.loads(body))
        elif path == "/control/reset":
            _LABELS.clear()
            open_now = self.seen.connections_open
            self.seen = Seen(connections_open=open_now)
            self.raw.clear()
            self.plan, self.times = _PLAIN, None
            self.asked.clear()
        requests = [{"headers": headers, "body": body_of(headers, raw)[0]} for headers, raw in self.raw]
        return json.dumps({**dataclasses.asdict(self.seen), "requests": requests}).encode()


class Connection(asyncio.Protocol):
    """One connection: requests one after the other, each answered by a task that the client's leaving cancels."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None
        self.is_counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_counted:
            self.server.seen.connections_open -= 1
        if self.task is not None and not self.task.done():
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        start = self.buffer.find(b"\r\n\r\n")
        if start < 0 or (self.task is not None and not self.task.done()):
            return
        request_line, *lines = self.buffer[:start].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        end = start + 4 + int(headers.get("content-length", 0))
        if len(self.buffer) < end:
            return
        body, self.buffer = self.buffer[start + 4 : end], self.buffer[end:]
        path = request_line.split(" ")[1]
        if path.startswith("/control/"):
            self.respond(200, self.server.control(path, body), "application/json")
        elif path not in ("/v1/chat/completions", "/v1/completions", *_ENDPOINTS, *_MEDIA):
            self.respond(404, b'{"detail":"Not Found"}', "application/json")
        else:
            if not self.is_counted:
                self.is_counted = True
                self.server.seen.connections_open += 1
                self.server.seen.connections_total += 1
            self.task = asyncio.get_running_loop().create_task(self.chat({":path": path, **headers}, body))

    def respond(self, status: int, body: bytes, kind: str, headers: str = "") -> None:
        top = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self.transport.write(top.encode() + body)

    async def chat(self, headers: dict[str, str], raw: bytes) -> None:
        seen = self.server.seen
        self.server.raw.append((headers, raw))
        request, files = body_of(headers, raw)
        plan = self.server.plan_for(headers, request["model"])
        if headers[":path"] in _ENDPOINTS:
            request = {**request, "plain": _ENDPOINTS[headers[":path"]](request)}
        if headers[":path"] in _MEDIA:
            request = {**request, "media": _MEDIA[headers[":path"]](request, files)}
        if plan.status == 200:
            seen.generations += 1
        try:
            if await self.tell(request, plan):
                seen.finished += 1
        except asyncio.CancelledError:
            seen.dropped += 1

    async def tell(self, request: dict[str, Any], plan: Plan) -> bool:
        """Answer by plan; True where the answer was told to its end."""
        if plan.delay_ms:
            await asyncio.sleep(plan.delay_ms / 1000)
        if await self.stumble(plan, "headers"):
            return False
        if plan.status != 200:
            body, kind = refusal(plan)
            more = f"Retry-After: {plan.retry_after}\r\n" if plan.retry_after else ""
            more += f"Retry-After-Ms: {plan.retry_after_ms}\r\n" if plan.retry_after_ms else ""
            more += "Location: /elsewhere\r\n" if 300 <= plan.status < 400 else ""
            self.respond(plan.status, body, kind, more)
            return False
        if "media" in request:
            return await self.tell_media(plan, *request["media"])
        if (request.get("stream") and not plan.is_whole) or plan.is_stream:
            return await self.tell_stream(request, plan)
        return await self.tell_whole(request, plan)

    async def stumble(self, plan: Plan, place: str) -> bool:
        """Hang or cut here, if the plan says so."""
        if plan.hang == place:
            await asyncio.Event().wait()
        if plan.cut != place:
            return False
        if plan.reset:
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            await asyncio.sleep(0.02)  # let what was written leave
            self.transport.abort()
        else:
            self.transport.close()
        return True

    async def tell_media(self, plan: Plan, kind: str, pieces: list[bytes]) -> bool:
        """An answer in pieces of its type, which may be cut in its middle."""
        self.transport.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for number, piece in enumerate(pieces):
            if number == len(pieces) // 2 and await self.stumble(plan, "middle"):
                return False
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(plan.pace_ms / 1000)
        self.transport.write(b"0\r\n\r\n")
        return True

    async def tell_whole(self, request: dict[str, Any], plan: Plan) -> bool:
        body = text_whole(request, plan) if "prompt" in request else b"" if "plain" in request else whole(request, plan)
        if "plain" in request:
            usage = {} if plan.has_usage else {"usage": None, "meta": None}
            body = msgspec.json.encode({**request["plain"], **usage})
        kind = "application/json"
        if plan.body in ("html", "text", "empty"):
            body, kind = refusal(plan)
        if plan.error:
            body = json.dumps(in_band(plan)).encode()
        if plan.malformed:
            body = body[: len(body) // 2]
        if plan.is_pretty:
            body = msgspec.json.format(body, indent=2)
        if plan.is_gzip:
            self.respond(200, gzip.compress(body), kind, "Content-Encoding: gzip\r\n")
        elif plan.cut or plan.hang:
            top = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(top.encode() + body[: len(body) // 2])
            await self.stumble(plan, "middle")
            return False
        else:
            self.respond(200, body, kind)
        return True

    async def tell_stream(self, request: dict[str, Any], plan: Plan) -> bool:
        payloads, finished = text_events(request, plan) if "prompt" in request else events(request, plan)
        coding = "Content-Encoding: gzip\r\n" if plan.is_gzip else ""
        framing = "Connection: close\r\n" if plan.is_until_close else "Transfer-Encoding: chunked\r\n"
        top = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n{coding}{framing}\r\n".encode()
        body = Body(self.transport, plan, is_plain=plan == dataclasses.replace(_PLAIN, chunks=plan.chunks))
        if body.is_plain:
            done = [b"data: [DONE]\n\n"]
            parts = [body.encoded(b"data: %b\n\n" % payload) for payload in payloads] + [body.encoded(d) for d in done]
            self.transport.write(b"".join((top, *parts, b"0\r\n\r\n")))
            return True
        self.transport.write(top)
        places = {0: "first", finished // 2: "middle", finished - 1: "between", finished: "end"}
        for number, payload in enumerate([*payloads, b""]):
            place = places.get(number, "")
            if place and await self.stumble(plan, place):
                return False
            if place and plan.malformed == place:
                payload = payload[: len(payload) // 2]
            if place and plan.error == place:
                await body.event(json.dumps(in_band(plan)).encode())
                break
            if plan.pace_ms:
                await asyncio.sleep(plan.pace_ms / 1000)
            if payload:
                await body.event(payload)
        if plan.has_done:
            await body.event(b"[DONE]")
        if plan.linger_ms:
            await asyncio.sleep(plan.linger_ms / 1000)
        body.end()
        return True


def in_band(plan: Plan) -> dict[str, Any]:
    code: int | str = int(plan.error_code) if plan.error_code.isdecimal() else plan.error_code
    return {
        "error": {"message": "upstream failed inside the stream", "type": plan.error_code, "param": None, "code": code}
    }


class Body:
    """A response body on its way: chunked, compressed, cut in pieces, as the plan wants it."""

    def __init__(self, transport: asyncio.Transport, plan: Plan, is_plain: bool) -> None:
        self.transport = transport
        self.plan = plan
        self.is_plain = is_plain
        self.zip = zlib.compressobj(wbits=31)

    def encoded(self, data: bytes) -> bytes:
        return data if self.plan.is_until_close else b"%x\r\n%b\r\n" % (len(data), data)

    async def event(self, payload: bytes) -> None:
        end = b"\r\n" if self.plan.is_crlf else b"\n"
        data = b"data: " + payload + end + end
        if self.plan.has_comments:
            data = b": keep-alive" + end + end + b"event: message" + end + data
        if self.plan.is_gzip:
            data = self.zip.compress(data) + self.zip.flush(zlib.Z_SYNC_FLUSH)
        step = self.plan.split or len(data)
        for start in range(0, len(data), step):
            self.transport.write(self.encoded(data[start : start + step]))
            await asyncio.sleep(0.0005 if self.plan.split and start % 7 == 0 else 0)

    def end(self) -> None:
        if self.plan.is_gzip:
            self.transport.write(self.encoded(self.zip.flush()))
        if self.plan.is_until_close:
            self.transport.close()
        else:
            self.transport.write(b"0\r\n\r\n")


async def serve(port: int) -> None:
    server = Server()
    listener = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), "127.0.0.1", port, backlog=1024
    )
    print(f"listening on {listener.sockets[0].getsockname()[1]}", flush=True)
    await listener.serve_forever()


# -- for tests -------------------------------------------------------------------------------------------------------


class Upstream:
    """The server as a child process that dies with its parent. `url` ends in /v1 and survives `stop` and `start`."""

    def __init__(self) -> None:
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--port", str(self._port), "--until-stdin-ends"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline().rpartition(" ")[2])

    def stop(self) -> None:
        """SIGKILL, and wait: connections are refused from here on."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, sign: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(sign)

    def seen(self) -> Seen:
        return Seen(**self._control("seen"))

    def plan(self, text: str, times: int | None = None) -> None:
        """Tell the next answers like this: `times` of them, or all."""
        self._control("plan", {"plan": text, "times": times})

    def labels(self, answers: dict[str, str]) -> None:
        """Answer these last messages so."""
        self._control("labels", answers)

    def reset(self) -> None:
        self._control("reset", {})

    def _control(self, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._port}/control/{name}"
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, data=data), timeout=10) as reply:
            found: dict[str, Any] = json.loads(reply.read())
            return found


@contextlib.contextmanager
def run_upstream() -> Iterator[Upstream]:
    """A started upstream, gone afterwards."""
    upstream = Upstream()
    upstream.start()
    try:
        yield upstream
    finally:
        upstream.stop()


def _end_with_stdin() -> None:
    """Whoever started this process holds the other end of its stdin, and its end is ours: no crash leaves servers."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--until-stdin-ends", action="store_true")
    options = parser.parse_args()
    if options.until_stdin_ends:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(options.port))


if __name__ == "__main__":
    main()
