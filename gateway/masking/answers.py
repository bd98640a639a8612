"""Gives an answer its values again, whole or chunk by chunk.

Knows the shapes by their streamed fields alone: `choices[].delta`, a completion's `text`, and the `delta` of events
of the Responses and the Messages API. Invariant: the texts of a restored stream, joined, are the restored text,
wherever the chunks cut it. Log probabilities keep the tokens that the model wrote.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from cache.entry import Entry, Recorded
from gateway.masking.vault import Vault, split
from gateway.wire.chunks import UNREADABLE, decoded, read
from gateway.wire.sse import Splitter
from gateway.wire.types import TOLD, Chunk

_EVENTS = "text/event-stream"
_JSON = frozenset({"arguments", "partial_json"})  # fields that hold JSON
_KEPT = frozenset({"logprobs", "id", "type", "role", "signature", "encrypted_content", "obfuscation"})
_NO_SCOPE = object()


class _Stream:
    """One stream of payloads. A payload that ends in the beginning of a placeholder waits for the next
    one of its scope: a choice, or the whole answer.
    """

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._held: dict[Any, tuple[dict[str, Any], dict[Any, tuple[Any, Any, str]]]] = {}

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that can leave, once `data` has come; what is no JSON object leaves as it is."""
        try:
            payload = decoded(data)
        except UNREADABLE:
            return [data]
        if not isinstance(payload, dict):
            return [data]
        choices = payload.get("choices") or ()
        if len(choices) < 2:
            parts = [payload]
        else:
            bare = {name: value for name, value in payload.items() if name != "usage"}
            parts = [bare | {"choices": [choice]} for choice in choices[:-1]] + [payload | {"choices": choices[-1:]}]
        return [msgspec.json.encode(one) for part in parts for one in self._fed(part)]

    def rest(self) -> list[bytes]:
        """What still waits, at the end."""
        waiting, self._held = list(self._held.values()), {}
        return [msgspec.json.encode(_settled(payload, tails)) for payload, tails in waiting]

    def _fed(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        streamed = list(_streamed(payload))
        choices = payload.get("choices")
        is_end = not choices or bool(choices[0].get("finish_reason"))
        scope = choices[0].get("index") or 0 if choices else _NO_SCOPE if "choices" in payload else None
        held = {(id(holder), name) for holder, name, *_ in streamed}
        for holder, name in _texts(payload):
            if (id(holder), name) not in held:
                holder[name] = self._vault.restored(holder[name], is_json=_is_json(name, self._vault))
        if scope is _NO_SCOPE or payload.get("type") in ("ping", "keepalive") or not (streamed or is_end):
            return [payload]
        ready, tails = [], dict[Any, tuple[Any, Any, str]]()
        before, waiting = self._held.pop(scope, ({}, {}))
        for holder, name, channel, is_json in streamed:
            raw = (waiting.pop(channel)[2] if channel in waiting else "") + holder[name]
            head, tail = split(raw)
            holder[name] = self._vault.restored(head, is_json=is_json or self._vault.is_json)
            if tail:
                tails[channel] = holder, name, tail
        if before:
            ready.append(_settled(before, waiting))
        if tails and choices and is_end:
            _settled(payload, tails)
        elif tails:
            self._held[scope] = payload, tails
            return ready
        return [*ready, payload]


def _is_json(name: Any, vault: Vault) -> bool:
    return name in _JSON or (vault.is_json and name in ("content", "text"))


def _settled(payload: dict[str, Any], tails: dict[Any, tuple[Any, Any, str]]) -> dict[str, Any]:
    """A payload with the ends of its texts, which began no placeholder."""
    for holder, name, tail in tails.values():
        holder[name] += tail
    return payload


def _streamed(payload: dict[str, Any]) -> Iterator[tuple[Any, Any, Any, bool]]:
    """The texts of a payload that the next one goes on with: where each is, its channel, and whether it is JSON."""
    for choice in payload.get("choices") or ():
        if isinstance(choice.get("text"), str) and "message" not in choice:
            yield choice, "text", "text", False
        yield from _within(choice.get("delta"), ())
    delta = payload.get("delta")
    if isinstance(delta, str):
        channel = tuple(payload.get(name) for name in ("type", "item_id", "output_index", "content_index"))
        yield payload, "delta", channel, "arguments" in str(channel[0])
    else:
        yield from _within(delta, (payload.get("index"),))


def _within(value: Any, channel: tuple[Any, ...]) -> Iterator[tuple[Any, Any, Any, bool]]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, item in items:
        if name in _KEPT or name == "name":
            continue
        if isinstance(item, str):
            yield value, name, (*channel, name), name in _JSON
        else:
            place = item.get("index", name) if isinstance(item, dict) else name
            yield from _within(item, (*channel, place))


def _texts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where each text is that comes whole."""
    for name, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if name in _KEPT or name == "delta":
            continue
        if isinstance(item, str):
            yield value, name
        elif isinstance(item, dict | list):
            yield from _texts(item)


class Restorer:
    """Restores one answer for one reader."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._data, self._native = _Stream(vault), _Stream(vault)
        self._splitter = Splitter()
        self._media, self._native_mark = "", b""

    @property
    def is_holding(self) -> bool:
        """Whether a part of the answer waits for what follows."""
        return self._data.is_holding or self._native.is_holding

    def feed(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that can leave, once `chunks` have come."""
        ready: list[Chunk] = []
        for chunk in chunks:
            self._media = self._media or chunk.media
            if chunk.is_whole:
                ready.append(replace(chunk, data=self._whole(chunk.data)))
            elif self._media == _EVENTS or self._media.startswith(f"{_EVENTS};"):
                events = [event for given in self._splitter.feed(chunk.data) for event in self._data.feed(given)]
                ready += [replace(chunk, data=b"".join(map(_framed, events)))] if events else []
            elif self._media:
                ready.append(chunk)
            else:
                if chunk.native not in (b"", TOLD):
                    ready += [Chunk(b"", native=event) for event in self._fed_native(chunk.native)]
                self._native_mark = TOLD if chunk.native else self._native_mark
                for data in chunk.each():
                    ready += [replace(read(given), native=self._native_mark) for given in self._data.feed(data)]
        return ready

    def rest(self) -> list[Chunk]:
        """What still waits, at the end of the answer."""
        natives = [Chunk(b"", native=event) for event in self._native.rest()]
        datas = self._data.rest()
        if self._media:
            return [Chunk(b"".join(map(_framed, datas)), media=self._media)] if datas else []
        return natives + [replace(read(data), native=self._native_mark) for data in datas]

    def all(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """A complete answer, restored."""
        return [*self.feed(chunks), *self.rest()]

    def _fed_native(self, native: bytes) -> list[bytes]:
        event = decoded(native)
        return [self._whole(native)] if event.get("type") == "message" else self._native.feed(native)

    def _whole(self, data: bytes) -> bytes:
        """A whole answer; one that is no JSON stays."""
        try:
            answer = decoded(data)
        except UNREADABLE:
            return data
        if not isinstance(answer, dict | list):
            return data
        for holder, name in _texts(answer):
            holder[name] = self._vault.restored(holder[name], is_json=_is_json(name, self._vault))
        return msgspec.json.encode(answer)


def restored_entry(entry: Entry, chunks: Sequence[Chunk], vault: Vault) -> Entry:
    """A recorded answer of `chunks` for the one reader whose values `vault` has; no cache holds it."""
    ready, labels = Restorer(vault).all(chunks), entry.labels
    if "native_at" in labels:
        natives = [chunk.native for chunk in ready if chunk.native not in (b"", TOLD)]
        return replace(entry, chunks=(Recorded(b"\n".join(natives), count=len(natives)),))
    return replace(entry, chunks=tuple([Recorded(one.data, one.is_whole, one.count) for one in ready]))


def _framed(payload: bytes) -> bytes:
    try:
        kind = decoded(payload).get("type")
    except (*UNREADABLE, AttributeError):
        kind = None
    return (b"event: %b\n" % str(kind).encode() if kind else b"") + b"data: %b\n\n" % payload
