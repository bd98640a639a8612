"""A server that answers each request of any kind with the same few words, whatever the request holds."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_USAGE = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
_PLAIN: dict[str, dict[str, Any]] = {
    "rerank": {"results": [{"index": 0, "relevance_score": 0.5}], "meta": {}},
    "moderations": {"id": "m", "model": "m", "results": [{"flagged": False, "categories": {}}]},
    **{key: {"created": 1, "data": [{"b64_json": "aGk="}]} for key in ("generations", "edits", "variations")},
    **{key: {"text": "spoken"} for key in ("transcriptions", "translations")},
}


async def _answer(request: Request) -> Response:
    kind, raw = request.url.path.rpartition("/")[2], await request.body()
    if kind in _PLAIN:
        return JSONResponse(_PLAIN[kind])
    if kind == "speech":
        return Response(b"RIFF", media_type="audio/wav")
    body = json.loads(raw)
    if kind == "embeddings":
        count = len(body["input"]) if isinstance(body["input"], list) and not isinstance(body["input"][0], int) else 1
        data = [{"object": "embedding", "index": number, "embedding": [0.1] * 4} for number in range(count)]
        return JSONResponse({"object": "list", "model": "m", "data": data, "usage": _USAGE})
    prompts = body.get("prompt")
    is_many = isinstance(prompts, list) and not isinstance(prompts[0], int)
    count = (body.get("n") or 1) * (len(prompts) if is_many else 1)
    is_chat, is_stream = "chat" in request.url.path, bool(body.get("stream"))
    part = {"role": "assistant", "content": "Paris"}
    said = {"delta" if is_stream else "message": part} if is_chat else {"text": "Paris"}
    choices = [{"index": number, **said, "finish_reason": "stop"} for number in range(count)]
    name = ("chat.completion.chunk" if is_stream else "chat.completion") if is_chat else "text_completion"
    head = {"id": "c", "object": name, "created": 1, "model": "m"}
    if not is_stream:
        return JSONResponse({**head, "choices": choices, "usage": _USAGE})
    pieces = [*({"choices": [choice]} for choice in choices), {"choices": [], "usage": _USAGE}]
    events = [f"data: {json.dumps(head | piece)}\n\n" for piece in pieces]
    return StreamingResponse(iter([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")


@contextlib.contextmanager
def run_answering() -> Iterator[str]:
    """Its base URL; stopped at the end."""
    app = Starlette(routes=[Route("/{path:path}", _answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()
