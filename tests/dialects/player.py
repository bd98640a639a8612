"""Plays what servers send, one file of `providers/` for each, and reads what clients of three surfaces get.

An answer has its `events` as a server sends them, or a `body` with its `type` and `coding`, and what it `says`: its text, thoughts and
calls, its end in OpenAI's word (`native`: in Anthropic's, where OpenAI has none), its tokens (of the prompt, of these cached, of the
completion), and whether it is kept. The second turn needs no data: it has what the answer says, and the fields of reasoning that a chat's
message had. `api`: whose it is, if not OpenAI's. An error has a `status`, a `body` or `events`, and words that it `tells`; `next`:
another deployment answers; `is_fault`: the request was at fault.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.transport.servers import Served, Wire, serve
from tests.world import Reply

PROVIDERS = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).with_name("providers").glob("*.json"))
}
SURFACES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "good day"}], "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "good evening"}),
}
BACK = ("reasoning_content", "reasoning", "reasoning_text", "thinking", "reasoning_details", "thinking_blocks")
"""Fields of an assistant's message by which servers want their reasoning back."""
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_INCOMPLETE = {"length": "max_output_tokens"}


def cases(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """All answers or errors, each with its name."""
    return [(f"{name}: {case['name']}", case) for name, one in PROVIDERS.items() for case in one[kind]]


def table() -> Iterator[str]:
    """The rows of docs/providers.md."""
    yield "| file | answers | errors | sources |"
    yield "| --- | --- | --- | --- |"
    for name, provider in PROVIDERS.items():
        answers, errors = ("; ".join(one["name"] for one in provider[kind]) or "–" for kind in ("answers", "errors"))
        yield f"| `{name}` | {answers} | {errors} | {provider['source']} |"


@asynccontextmanager
async def playing(case: dict[str, Any]) -> AsyncIterator[Served]:
    """A server that always sends this."""
    body = case.get("body")
    if body is None:
        events = [one if isinstance(one, str) else json.dumps(one) for one in case["events"]]
        body = "".join(f"data: {one}\n\n" for one in [*events, *([] if "api" in case else ["[DONE]"])])
    elif not isinstance(body, str):
        body = json.dumps(body)
    coding = case.get("coding", "identity")
    coded = zlib.compress(body.encode()) if coding == "deflate" else body.encode()
    kind = case.get("type", "application/json" if "body" in case else "text/event-stream")
    head = f"HTTP/1.1 {case.get('status', 200)} OK\r\nContent-Length: {len(coded)}\r\nContent-Encoding: {coding}\r\n"
    sent = (head + (f"Content-Type: {kind}\r\n" if kind else "") + "\r\n").encode() + coded

    async def script(wire: Wire) -> None:
        await wire.send(sent)

    async with serve(script) as served:
        yield served


def told(surface: str, reply: Reply) -> dict[str, Any]:
    """What a client reads of a reply: text, thought, calls, end, and the ids of the calls."""
    read = {"chat": _chat, "messages": _message, "responses": _response}[surface]
    facts = read(reply)
    ids = [call.pop() for call in facts["calls"]]
    assert len(set(ids)) == len(ids), "two calls have one id"
    assert all(ids), "a call has no id"
    return facts


def expected(surface: str, says: dict[str, Any]) -> dict[str, Any]:
    """What it should read."""
    end = says["end"]
    calls = inputs_of(says["calls"]) if surface == "messages" else [[name, text] for name, text in says["calls"]]
    if surface == "messages":
        end = says.get("native") or ("tool_use" if calls and end == "stop" else _STOPS.get(end, end))
    elif surface == "responses":
        is_good = end in ("stop", "tool_calls")
        end = ["completed", None] if is_good else ["incomplete", _INCOMPLETE.get(end, end)]
    thought = "" if surface == "chat" else says["thought"]
    return {"text": says["text"], "thought": thought, "calls": calls, "end": end}


def next_turn(surface: str, reply: Reply) -> dict[str, Any] | None:
    """The body of the turn after a whole reply, which is sent back as it is; None where there is nothing to send."""
    fields = SURFACES[surface][1]
    name = "input" if surface == "responses" else "messages"
    asked: Any = fields[name]
    asked = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    if surface == "messages":
        content = reply.json["content"]
        results = [_result(one["id"]) for one in content if one["type"] == "tool_use"]
        said = [{"role": "assistant", "content": content}] if content else []
        after = [{"role": "user", "content": results or "Go on."}]
    elif surface == "chat":
        message = reply.json["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        said = [message] if message.get("content") or calls else []
        after = [{"role": "tool", "tool_call_id": one["id"], "content": "Done."} for one in calls]
    else:
        said = reply.json["output"]
        said = said if any(one["type"] != "reasoning" for one in said) else []  # what follows a thought carries it
        calls = [one["call_id"] for one in said if one["type"] == "function_call"]
        after = [{"type": "function_call_output", "call_id": one, "output": "Done."} for one in calls]
    after = after or [{"role": "user", "content": "Go on."}]
    return fields | {name: [*asked, *said, *after]} if said else None


def _result(id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": "Done."}


def sent_back(body: dict[str, Any]) -> list[Any]:
    """What a server gets of its answer in the next turn: the text, the calls, and further fields of the message."""
    said = [one for one in body["messages"] if one["role"] == "assistant"]
    text, calls, further = "", list[Any](), dict[str, Any]()
    for message in said:
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        text += "".join(one["text"] for one in blocks if one["type"] == "text")
        calls += [[one["name"], one["input"]] for one in blocks if one["type"] == "tool_use"]
        named = [one["function"] for one in message.get("tool_calls") or ()]
        calls += inputs_of([one["name"], one["arguments"]] for one in named)
        further |= {name: message[name] for name in BACK if name in message}
    return [text, calls, further]


def inputs_of(calls: Iterable[Any]) -> list[Any]:
    """Calls with the objects that their arguments are."""
    return [[name, *_inputs(text)] for name, text in calls]


def _inputs(text: str) -> Iterator[Any]:
    try:
        yield json.loads(text)
    except ValueError:
        yield {"INVALID_JSON": text}


def _events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, which are numbered, named, or neither."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def _joined(content: Any) -> str:
    """The text of a chat's content, which may be parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _chat(reply: Reply) -> dict[str, Any]:
    """As openai-python's `accumulate_delta`: calls by their index, and texts, ids and names joined."""
    if not reply.is_stream:
        (choice,) = reply.json["choices"]
        calls = choice["message"].get("tool_calls") or []
        named = [[call["function"]["name"], call["function"]["arguments"], call["id"]] for call in calls]
        return _facts(_joined(choice["message"]["content"]), "", named, choice["finish_reason"])
    text, end, begun = "", None, dict[int, list[str]]()
    for event in _events(reply):
        for choice in event["choices"]:
            delta = choice["delta"]
            text += _joined(delta.get("content"))
            for call in delta.get("tool_calls") or ():
                parts = begun.setdefault(call["index"], ["", "", ""])
                function = call.get("function") or {}
                for at, part in enumerate((function.get("name"), function.get("arguments"), call.get("id"))):
                    parts[at] += part or ""
            end = choice.get("finish_reason") or end
    return _facts(text, "", [begun[index] for index in sorted(begun)], end)


def _message(reply: Reply) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    if reply.is_stream:
        end = None
        for event in _events(reply):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                for kind, field in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    if kind in delta:
                        blocks[event["index"]][field] += delta[kind]
            elif event["type"] == "message_delta":
                end = event["delta"]["stop_reason"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = next(_inputs(block["json"]))
    else:
        blocks, end = reply.json["content"], reply.json["stop_reason"]
    calls = [[block["name"], block["input"], block["id"]] for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return _facts(text, "".join(block.get("thinking", "") for block in blocks), calls, end)


def _response(reply: Reply) -> dict[str, Any]:
    whole = _events(reply)[-1]["response"] if reply.is_stream else reply.json
    items = whole["output"]
    calls = [[one["name"], one["arguments"], one["call_id"]] for one in items if one["type"] == "function_call"]
    text = "".join(part["text"] for one in items if one["type"] == "message" for part in one["content"])
    thought = "".join(part["text"] for one in items if one["type"] == "reasoning" for part in one["summary"])
    return _facts(text, thought, calls, [whole["status"], (whole["incomplete_details"] or {}).get("reason")])


def _facts(text: str, thought: str, calls: list[Any], end: Any) -> dict[str, Any]:
    return {"text": text, "thought": thought, "calls": calls, "end": end}
