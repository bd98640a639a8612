"""A server that speaks Anthropic's Messages API and answers by a script, in a thread of the test.

Shapes: Anthropic API reference, "Messages" and "Streaming Messages".
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {
    "input_tokens": 11,
    "cache_creation_input_tokens": 300,
    "cache_read_input_tokens": 200,
    "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
    "output_tokens": 40,
}
CITED = {"type": "char_location", "cited_text": "x", "document_index": 0, "start_char_index": 0, "end_char_index": 1}
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "The user asks for both.", "signature": "c2lnbmF0dXJl+/=="},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {"type": "text", "text": "First "},
    {"type": "text", "text": "cited", "citations": [CITED]},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "weather"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"text": "Bergen, 5 °C"}},
    {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
]


def message(blocks: list[dict[str, Any]], stop_reason: str = "tool_use") -> dict[str, Any]:
    head = {"id": "msg_up", "type": "message", "role": "assistant", "model": "claude-test"}
    return {**head, "content": blocks, "stop_reason": stop_reason, "stop_sequence": None, "usage": USAGE}


def events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a message, with its texts in several pieces."""
    yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}
    yield {"type": "ping"}
    for index, block in enumerate(whole["content"]):
        grown: list[dict[str, Any]] = []
        opening = dict(block)
        if block["type"] in ("tool_use", "server_tool_use"):
            text = json.dumps(block["input"])
            opening["input"] = {}
            grown = [{"type": "input_json_delta", "partial_json": text[i : i + 5]} for i in range(0, len(text), 5)]
        elif block["type"] in ("text", "thinking"):
            kind = block["type"]
            opening = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            grown = [{"type": f"{kind}_delta", kind: block[kind][i : i + 4]} for i in range(0, len(block[kind]), 4)]
            grown += [{"type": "citations_delta", "citation": one} for one in block.get("citations", ())]
            grown += [{"type": "signature_delta", "signature": block["signature"]}] if kind == "thinking" else []
        yield {"type": "content_block_start", "index": index, "content_block": opening}
        for delta in grown:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


class Server(ThreadingHTTPServer):
    """`answers` with a message, or with an error's status and body; `seen` has headers and bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = message([{"type": "text", "text": "Hello."}], "end_turn")
        self.judge: Callable[[dict[str, Any]], str] | None = None  # the words of its refusal of a body, or nothing
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.events_max: int | None = None  # a stream breaks off after these
        self.recorded: bytes | None = None  # a stream's bytes, instead of the events of `answer`
        self.counted = {"input_tokens": 4711}
        self.seen: list[tuple[dict[str, str], str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((headers, self.path, raw))
        if self.server.judge is not None and (words := self.server.judge(json.loads(raw))):
            error = {"type": "invalid_request_error", "message": words}
            self._send(400, "application/json", json.dumps({"type": "error", "error": error}).encode())
        elif self.server.refusal is not None:
            status, body = self.server.refusal
            self._send(status, "application/json", json.dumps(body).encode())
        elif self.path.endswith("/count_tokens"):
            self._send(200, "application/json", json.dumps(self.server.counted).encode())
        elif json.loads(raw).get("stream"):
            told = list(events(self.server.answer))[: self.server.events_max]
            data = b"".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in told)
            self._send(200, "text/event-stream", self.server.recorded or data)
        else:
            self._send(200, "application/json", json.dumps(self.server.answer).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


@contextmanager
def run_anthropic_server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
