"""Reads recorded answers: the chunks of an entry, and the text of an answer.

Invariant: a replay has the recorded chunks, one for one.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from cache import Entry, Fingerprint, Recorded
from gateway.backends.anthropic.answer import MessageReader
from gateway.settings import CacheSettings, ModelSettings
from gateway.wire.chunks import read
from gateway.wire.fold import fold
from gateway.wire.types import TOLD, Chunk

MAKER = "made_in"
"""The label of an entry with the trace and the span of the request that made its answer."""


def deployment_of(entry: Entry | None) -> str:
    """The deployment that generated the recorded answer; empty without an entry."""
    return str(entry.labels.get("deployment", "")) if entry is not None else ""


def kept(entry: Entry | None, *, is_stale: bool = False) -> str:
    """What sets a recorded answer apart: `curated`, or `stale` where a newer one is made; else empty."""
    return "curated" if entry is not None and entry.is_curated else "stale" if is_stale else ""


def lifetime(asked_s: int | None, model: ModelSettings, cache: CacheSettings) -> tuple[int, int]:
    """The seconds that an answer is fresh, and those that it may be served afterwards."""
    if asked_s is not None:
        return min(asked_s, cache.ttl_s_max), 0
    stale_s = cache.stale_s if model.stale_s is None else model.stale_s
    return min(model.ttl_s or cache.ttl_s, cache.ttl_s_max), stale_s


def recorded(chunks: Sequence[Chunk]) -> tuple[tuple[Recorded, ...], dict[str, str | int]]:
    """The pieces of an entry that records `chunks`, and the labels by which `chunks_of` reads them.

    An answer of Anthropic's API is recorded as it came, with the `created` of its chat completion.
    """
    if chunks[0].native:
        first = next(chunk.data for chunk in chunks if chunk.data)
        natives = [chunk.native for chunk in chunks if chunk.native not in (b"", TOLD)]
        created: int = msgspec.json.decode(first)["created"]
        return (Recorded(b"\n".join(natives), count=len(natives)),), {"native_at": created}
    labels: dict[str, str | int] = {"has_usage_chunk": int(chunks[-1].is_usage_only)}
    if media := chunks[0].media:
        labels["media"] = media
    return tuple([Recorded(chunk.data, chunk.is_whole, chunk.count) for chunk in chunks]), labels


def rerecorded(entry: Entry, chunks: Sequence[Chunk]) -> Entry:
    """`entry` with another answer, to be sent in its place; it is stored nowhere."""
    pieces, labels = recorded(chunks)
    kept = {name: label for name, label in entry.labels.items() if name != "native_at"}
    return replace(entry, chunks=pieces, labels={**kept, **labels})


def chunks_of(entry: Entry) -> list[Chunk]:
    """The recorded chunks, as the wire's values."""
    if "native_at" in entry.labels:
        return _translated(entry.chunks[0].data.split(b"\n"), int(entry.labels["native_at"]))
    chunks = [Chunk(data=r.data, is_whole=r.is_whole, count=r.count) for r in entry.chunks]
    if entry.labels.get("has_usage_chunk") and chunks:
        chunks[-1] = Chunk(data=chunks[-1].data, is_usage_only=True)
    if (media := entry.labels.get("media")) and chunks:
        chunks[0] = replace(chunks[0], media=str(media))
    return chunks


def _translated(natives: Sequence[bytes], created: int) -> list[Chunk]:
    """The chunks of an answer of Anthropic's API, each with what it came from."""
    reader, chunks = MessageReader(created), list[Chunk]()
    for native in natives:
        payloads = reader.whole(native) if len(natives) == 1 else reader.chunks([native])
        translated = [read(payload) for payload in payloads if payload != _DONE] or [Chunk(b"")]
        chunks += [replace(translated[0], native=native), *translated[1:]]
    return chunks


def answer_text(whole: bytes) -> str | None:
    """The part of a `chat.completion` that a judge compares: text, or tool calls as JSON, no ids.

    None if there are several choices, a refusal or anything but text: these are not compared.
    """
    try:
        choices = msgspec.json.decode(whole)["choices"]
        (message,) = (choice["message"] for choice in choices)
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError):
        return None
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    if not isinstance(content, str) or message.get("refusal") or message.get("audio"):
        return None
    if not calls:
        return content or None
    try:
        functions = [{"name": call["function"]["name"], "arguments": _arguments(call["function"])} for call in calls]
    except (KeyError, TypeError):  # calls of another kind, such as custom tools
        return None
    return json.dumps([content, *functions] if content else functions)


def shows(entry: Entry, fingerprint: Fingerprint, differing: Sequence[tuple[str, str]]) -> bool:
    """Whether an answer made in another context acts, cannot be read as a text, or has a word of that
    context which the request has not. `differing` has the pieces of the contexts that differ, each as
    (of the request, of the entry).
    """
    try:
        whole = fold(chunks_of(entry))
    except msgspec.DecodeError:  # recorded as received, with an error in a part that was not parsed
        return True
    text = answer_text(whole)
    if text is None or any(choice["message"].get("tool_calls") for choice in msgspec.json.decode(whole)["choices"]):
        return True
    others = frozenset(_WORD.findall(" ".join(other for _, other in differing).casefold()))
    shown = others.intersection(_WORD.findall(text.casefold()))
    return not shown.issubset(_WORD.findall(f"{fingerprint.context}\n{fingerprint.text}".casefold()))


_WORD = re.compile(r"\w+")


class _WithId(msgspec.Struct):
    id: str | None = None
    message: "_WithId | None" = None  # in the first event of Anthropic's API


_WITH_ID = msgspec.json.Decoder(_WithId)
_DONE = b"[DONE]"


def answer_id(entry: Entry) -> str | None:
    """The `id` in the body of the entry's answer, the same in every replay; None if it has none."""
    try:
        first = _WITH_ID.decode(entry.chunks[0].data.partition(b"\n")[0])
        return (first.message or first).id
    except (IndexError, msgspec.DecodeError):
        return None


def _arguments(function: dict[str, Any]) -> Any:
    """A call's arguments as values; as text if they are not JSON."""
    try:
        return json.loads(function["arguments"])
    except ValueError:
        return function["arguments"]
