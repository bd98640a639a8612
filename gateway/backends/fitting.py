"""Says a request in a server's dialect, and reads what the answer repeats of it back.

The length gets the server's name; names of tools and ids of calls beyond its limits are replaced,
in the tools, in the history and in what chooses one, and the answer's names are replaced back; a
field that the server refuses is left out where it changes no answer, and refused by its name where
it does. Shapes: OpenAI API reference, "Create chat completion". Knows no HTTP and no deployments.
Invariant: no field of the client's that changes an answer is left out.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, repeat, takewhile
from operator import contains
from typing import Any

import msgspec

from gateway.backends.dialect import LENGTHS, MAX_COMPLETION_TOKENS, MAX_TOKENS, Dialect
from gateway.backends.refusals import unfit
from gateway.wire.types import CHAT, RESPONSE, Chunk, Kind

_DELIVERY = """
    cache stream stream_options seed store user metadata prompt_cache_key prompt_cache_retention safety_identifier
    service_tier
"""
DELIVERY = frozenset(_DELIVERY.split())
"""Fields that say how an answer is sent, billed or attributed, or that OpenAI calls best effort."""

# fmt: off
IDLE: Mapping[str, Any] = {
    "audio": {}, "frequency_penalty": 0, "functions": [], "logit_bias": {}, "logprobs": False, "modalities": ["text"], "n": 1,
    "parallel_tool_calls": True, "presence_penalty": 0, "response_format": {"type": "text"}, "stop": [], "temperature": 1,
    "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1, "verbosity": "medium",
}
# fmt: on
"""Values that change no answer, by their field."""

_JSON_TOOL = "json_answer"  # its arguments are the answer, where a server has no other JSON mode
_JSON_MODE = {"type": "json_object"}
_HASH_CHARS = 9
_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # a server may take no digits
_LENGTHS, _CALLS = frozenset(LENGTHS), repeat("tool_calls")
_NO_NAMES: dict[str, str] = {}


def with_length(body: dict[str, Any], dialect: Dialect, kind: Kind, tokens: int | None = None) -> dict[str, Any]:
    """`body` with one length, under the server's name: `tokens`, else the client's, else none."""
    if tokens is None:
        if kind is not CHAT or _LENGTHS.intersection(body) <= {dialect.length}:
            return body
        tokens = body.get(MAX_COMPLETION_TOKENS) or body.get(MAX_TOKENS)
    if tokens is None:
        return body
    name = dialect.length if kind is CHAT else "max_output_tokens" if kind is RESPONSE else MAX_TOKENS
    if body.get(name) == tokens and (kind is RESPONSE or (MAX_TOKENS in body) is not (MAX_COMPLETION_TOKENS in body)):
        return body
    return {one: value for one, value in body.items() if one not in LENGTHS} | {name: tokens}


def check(body: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises BackendUnfit with a field of these `names` that changes the answer."""
    for name in sorted(names):
        if body.get(name) not in (None, "", [], {}, IDLE.get(name)):
            raise unfit(f"`{name}` is not supported by this model's API", name)


def said(body: dict[str, Any], dialect: Dialect, kind: Kind = CHAT) -> dict[str, Any]:
    """A request without the fields and roles that the server refuses.

    Raises BackendUnfit with a field that changes the answer.
    """
    if dialect.unknown:
        check(body, dialect.unknown - DELIVERY)
        body = {name: value for name, value in body.items() if name not in dialect.unknown}
    if kind is not CHAT:
        return body
    if dialect.unknown_in_messages:
        left = dialect.unknown_in_messages  # by earlier answers of other servers
        messages = [{name: one[name] for name in one if name not in left} for one in body["messages"]]
        body = body | {"messages": messages}
    if not dialect.has_developer_role and any(one["role"] == "developer" for one in body["messages"]):
        body = body | {"messages": _by_system(body["messages"])}
    return body


def _by_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages where a developer speaks as the system; those that begin the chat are one, as templates take it.

    Sources: github.com/ggml-org/llama.cpp/pull/20215 and 20079, github.com/vllm-project/vllm/pull/43590.
    """
    said = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
    texts = [one["content"] for one in takewhile(lambda one: one["role"] == "system", said)]
    if len(texts) < 2:
        return said
    parts = ([{"type": "text", "text": text}] if isinstance(text, str) else text or [] for text in texts)
    are_plain = all(isinstance(text, str) for text in texts)
    content = "\n\n".join(texts) if are_plain else list(chain.from_iterable(parts))
    return [said[0] | {"content": content}, *said[len(texts) :]]


def fitted(body: dict[str, Any], dialect: Dialect) -> tuple[dict[str, Any], dict[str, str]]:
    """A chat with names and ids that the server takes, and the client's names by those."""
    if not (dialect.tool_name or dialect.call_id):
        return body, _NO_NAMES
    if not body.get("tools"):
        if not dialect.has_json_mode and dialect.can_force_tools and body.get("response_format") == _JSON_MODE:
            return _by_tool(fitted(body | {"response_format": None}, dialect)[0]), {_JSON_TOOL: ""}
        if True not in map(contains, body["messages"], _CALLS):
            return body, _NO_NAMES
    names = {}
    if dialect.tool_name:
        names = _short_names(_names(body), dialect.tool_name)
    changed = dict(body)
    if names:
        changed["tools"] = _named(body.get("tools"), names) or None
        changed["tool_choice"] = _named(body.get("tool_choice"), names)
        changed["messages"] = [_renamed(message, names) for message in body["messages"]]
        changed = {name: value for name, value in changed.items() if value is not None or name in body}
    if dialect.call_id:
        changed["messages"] = _with_ids(changed["messages"], dialect)
    return changed, {short: name for name, short in names.items()}


def _by_tool(body: dict[str, Any]) -> dict[str, Any]:
    function = {"name": _JSON_TOOL, "description": "Takes the answer, a JSON object.", "parameters": {"type": "object"}}
    choice = {"type": "function", "function": {"name": _JSON_TOOL}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "parallel_tool_calls": False}
    return {name: value for name, value in body.items() if name != "response_format"} | tools


def restored(chunk: Chunk, names: Mapping[str, str]) -> Chunk:
    """A chunk of the answer, with the client's names of its tools, or a JSON tool's call as a text; not as it came."""
    datas = [_restored(data, names) for data in chunk.each()]
    reasons = chunk.finish_reasons
    if _JSON_TOOL in names:
        reasons = tuple("stop" if reason == "tool_calls" else reason for reason in reasons)
    return msgspec.structs.replace(chunk, data=b"\n".join(datas), finish_reasons=reasons, native=b"")


def _restored(data: bytes, names: Mapping[str, str]) -> bytes:
    if b'"name"' not in data and _JSON_TOOL not in names:
        return data
    answer = msgspec.json.decode(data)
    for choice in answer.get("choices") or ():
        where = "delta" if choice.get("delta") else "message"
        piece = _renamed(choice.get(where) or {}, names)
        if _JSON_TOOL in names:
            if calls := piece.pop("tool_calls", None):
                piece["content"] = "".join(str((call.get("function") or {}).get("arguments") or "") for call in calls)
            if choice.get("finish_reason") == "tool_calls":
                choice["finish_reason"] = "stop"
        if piece:
            choice[where] = piece
    return msgspec.json.encode(answer)


def _calls(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else ()


def _names(body: Mapping[str, Any]) -> list[str]:
    """The names of a chat's tools, and of those that its history called."""
    named = [*(body.get("tools") or ()), *(call for message in body["messages"] for call in _calls(message))]
    parts = [part for one in named if isinstance(one, dict) for part in (one.get("function"), one.get("custom"))]
    return [name for part in parts if isinstance(part, dict) and isinstance(name := part.get("name"), str)]


def _short_names(names: Sequence[str], pattern: str) -> dict[str, str]:
    """A name that fits for each of `names` that does not; no two are alike."""
    fits = _fits(pattern)
    return {name: _short(name, pattern) for name in {*names} if name and not fits(name)}


@functools.cache
def _fits(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern).fullmatch


def _short(name: str, pattern: str) -> str:
    """The longest beginning of `name` that fits together with its digest."""
    digest = blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()[:_HASH_CHARS].translate(_LETTERS)
    clean = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
    for head in (f"{clean[:length]}_" for length in range(len(clean), 0, -1)):
        if _fits(pattern)(head + digest):
            return head + digest
    return f"t_{digest}" if _fits(pattern)(f"t_{digest}") else digest


def _named(part: Any, names: Mapping[str, str]) -> Any:
    """A tool, a call or a choice of tools, or a list of them, with other names."""
    if isinstance(part, list):
        return [_named(one, names) for one in part]
    if not isinstance(part, dict):
        return part
    part = {name: _named(value, names) if name in _NESTED else value for name, value in part.items()}
    return part | {"name": names[part["name"]]} if part.get("name") in names else part


_NESTED = ("function", "custom", "allowed_tools", "tools")


def _renamed(message: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    calls = _calls(message)
    return message | {"tool_calls": [_named(call, names) for call in calls]} if calls else message


def _with_ids(messages: list[dict[str, Any]], dialect: Dialect) -> list[dict[str, Any]]:
    """`messages` with ids of calls that fit; a result has the id of the first call that waits for it."""
    fits = _fits(dialect.call_id)
    ids = [call.get("id") for message in messages if message.get("tool_calls") for call in _calls(message)]
    is_unique = not dialect.are_call_ids_unique or len({*map(str, ids)}) == len(ids)
    if is_unique and all(isinstance(one, str) and fits(one) for one in ids):
        return messages  # as nearly every history
    changed, taken = [], set[str]()
    waiting, latest = dict[str, list[str]](), dict[str, str]()  # by the ids that were sent
    for message in messages:
        if calls := _calls(message):
            renamed = []
            for call in calls:
                given = call.get("id")
                key = given if isinstance(given, str) else ""
                latest[key] = _fitting_id(key, dialect, taken)
                waiting.setdefault(key, []).append(latest[key])
                renamed.append({**call, "id": latest[key]})
            if any(new["id"] != old.get("id") for new, old in zip(renamed, calls, strict=True)):
                message = {**message, "tool_calls": renamed}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            key = given if isinstance(given, str) else ""
            new = waiting[key].pop(0) if waiting.get(key) else latest.get(key, given)
            message = message if new == given else {**message, "tool_call_id": new}
        changed.append(message)
    return changed


def _fitting_id(given: str, dialect: Dialect, taken: set[str]) -> str:
    """`given` if the server takes it, else an id made of it; where ids must differ, one that is new."""
    number, fitting = 0, given
    fits, may_repeat = _fits(dialect.call_id), bool(given) and not dialect.are_call_ids_unique
    while not fits(fitting) or (fitting in taken and not may_repeat):
        # nine letters and digits, which every server takes
        fitting = blake2b(f"{given}#{number}".encode("utf-8", "replace"), digest_size=8).hexdigest()[:_HASH_CHARS]
        number += 1
    taken.add(fitting)
    return fitting
