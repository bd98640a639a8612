"""Gives an answer its values again, whole or chunk by chunk.

Knows the shapes by their streamed fields alone: `choices[].delta`, a completion's `text`, and the `delta` of events
of the Responses and the Messages API. Invariant: the texts of a restored stream, joined, are the restored text,
wherever the chunks cut it. Log probabilities keep the tokens that the model wrote.
"""

import re
from collections.abc import Sequence
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
_KEPT = frozenset({"logprobs", "id", "type", "role", "signature", "encrypted_content", "obfuscation", "name"})


_MAY_BEGIN = re.compile(rb"[<&\\]")  # a placeholder, however a server spells it


class _Stream:
    """One stream of payloads. A payload that ends in the beginning of a placeholder waits for the next
    one of its scope: a choice, or the whole answer.
    """

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._held: dict[Any, tuple[dict[str, Any], dict[Any, _Tail]]] = {}

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
        choices = payload.get("choices")
        is_end = not choices or bool(choices[0].get("finish_reason"))
        scope = choices[0].get("index") or 0 if choices else None
        streamed = _restore(payload, self._vault)
        if choices == [] or payload.get("type") in ("ping", "keepalive") or not (streamed or is_end):
            return [payload]
        tails = dict[Any, _Tail]()
        before, waiting = self._held.pop(scope, ({}, {}))
        for holder, name, channel in streamed:
            head, tail = split((waiting.pop(channel)[2] if channel in waiting else "") + holder[name])
            is_json = _is_json(name, self._vault) or "arguments" in str(channel[0])
            holder[name] = self._vault.restored(head, is_json=is_json)
            if tail:
                tails[channel] = holder, name, tail
        ready = [_settled(before, waiting)] if before else []
        if tails and not (choices and is_end):
            self._held[scope] = payload, tails
            return ready
        return [*ready, _settled(payload, tails)]


_Tail = tuple[Any, Any, str]
"""Where a text is, and the beginning of a placeholder that it ended in."""


def _settled(payload: dict[str, Any], tails: dict[Any, _Tail]) -> dict[str, Any]:
    """A payload with the ends of its texts, which began no placeholder."""
    for holder, name, tail in tails.values():
        holder[name] += tail
    return payload


def _is_json(name: Any, vault: Vault) -> bool:
    return name in _JSON or (vault.is_json and name in ("content", "text"))


def _restore(answer: Any, vault: Vault, *, is_whole: bool = False) -> list[tuple[Any, Any, Any]]:
    """Restore the texts that come whole, in place. Returns where the others are, with which the next payload
    goes on, each with its channel.
    """
    streamed: list[tuple[Any, Any, Any]] = []
    head = () if is_whole else tuple([answer.get(name) for name in ("type", "item_id", "index", "content_index")])
    values = [(answer, head, False, False)]
    while values:
        value, channel, is_delta, is_content = values.pop()
        if isinstance(value, dict):  # the input of a call may have values as names
            for name in [name for name in value if vault.restored(name) != name]:
                value[vault.restored(name)] = value.pop(name)
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            if name in _KEPT and not is_content:
                continue
            is_part = (
                is_delta or name == "delta" or (name == "text" and channel[len(head) : len(head) + 1] == ("choices",))
            )
            if not isinstance(item, str):
                place = item.get("index", name) if isinstance(item, dict) else name
                is_inside = is_content or name in ("input", "arguments")
                values += [(item, (*channel, place), is_part, is_inside)] if isinstance(item, dict | list) else []
            elif is_part and not is_whole:
                streamed.append((value, name, (*channel, name)))
            else:
                value[name] = vault.restored(item, is_json=not is_content and _is_json(name, vault))
    return streamed


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
            elif not self.is_holding and not _MAY_BEGIN.search(chunk.data + chunk.native):
                self._native_mark = TOLD if chunk.native else self._native_mark
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
        if not _MAY_BEGIN.search(data):
            return data
        try:
            answer = decoded(data)
        except UNREADABLE:
            return data
        if not isinstance(answer, dict | list):
            return data
        _restore(answer, self._vault, is_whole=True)
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
