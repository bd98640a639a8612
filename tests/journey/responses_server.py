"""A server that speaks OpenAI's Responses API and answers by a script, in a thread of the test.

Shapes: OpenAI API reference, "The response object" and "Responses: streaming events".
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REASONING = {"type": "reasoning", "id": "rs_up1", "summary": [], "encrypted_content": "gAAAAB+/=="}
SEARCH = {
    "type": "web_search_call",
    "id": "ws_up2",
    "status": "completed",
    "action": {"type": "search", "query": "north", "sources": [{"type": "url", "url": "https://example.com"}]},
}
PAGE = {"type": "web_search_call", "id": "ws_up3", "status": "completed", "action": {"type": "open_page"}}
_CITED = {"type": "url_citation", "start_index": 0, "end_index": 5, "url": "https://example.com", "title": "x"}
TEXT = {
    "type": "message",
    "id": "msg_up4",
    "status": "completed",
    "role": "assistant",
    "phase": "final_answer",
    "content": [{"type": "output_text", "text": "North.\u2028", "annotations": [_CITED], "logprobs": []}],
}
CALL = {
    "type": "function_call",
    "id": "fc_up5",
    "status": "completed",
    "call_id": "call_up5",
    "name": "lookup",
    "namespace": "mcp__docs__",
    "arguments": "{}",
}
USAGE = {
    "input_tokens": 1000,
    "input_tokens_details": {"cached_tokens": 200},
    "output_tokens": 50,
    "output_tokens_details": {"reasoning_tokens": 20},
    "total_tokens": 1050,
}


def response(*output: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    head = {"id": "resp_up", "object": "response", "created_at": 1, "status": status, "model": "gpt-up", "error": None}
    return {**head, "incomplete_details": None, "output": list(output), "store": False, "usage": USAGE, **more}


def events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a response, without their numbers."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index}
        yield {"type": "response.output_item.added", **place, "item": {**item, "status": "in_progress"}}
        if item["type"] == "web_search_call":
            yield {"type": "response.web_search_call.completed", **place, "item_id": item["id"]}
        for part in item.get("content") or ():
            where = {**place, "item_id": item["id"], "content_index": 0}
            for piece in (part["text"][:3], part["text"][3:]):
                yield {"type": "response.output_text.delta", **where, "delta": piece, "obfuscation": "x"}
            yield {"type": "response.output_text.done", **where, "text": part["text"]}
        yield {"type": "response.output_item.done", **place, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


class Server(ThreadingHTTPServer):
    """Answers with `answer`, or the error `refusal`; `seen` has paths and bodies, `sent` the bytes of each answer.

    A stream breaks off after `events_max` events.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = response(TEXT)
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.events_max: int | None = None
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, body))
        if self.server.refusal is not None:
            status, error = self.server.refusal
            self._whole(json.dumps({"error": error}).encode(), status)
        elif not body.get("stream"):
            self._whole(json.dumps(self.server.answer, indent=1).encode())
        else:
            self._stream()

    def _whole(self, data: bytes, status: int = 200) -> None:
        self.server.sent.append(data)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("connection", "close")
        self.end_headers()
        told = [{**one, "sequence_number": number} for number, one in enumerate(events(self.server.answer))]
        lines = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in told]
        self.server.sent.append(b"".join(lines[: self.server.events_max]))
        for line in lines[: self.server.events_max]:
            self.wfile.write(line)
        self.close_connection = True


@contextmanager
def run_responses_server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
