"""Reads an answer in whatever spelling a server writes it, and hands it on in OpenAI's.

The only reader of deltas: chats, messages, responses, the fold and the cache get its pieces. A
piece in OpenAI's spelling passes as it came, byte for byte. Shapes: OpenAI API reference, "The chat
completion chunk object"; other servers' are data in `tests/dialects/`, with sources. Knows no HTTP
and no backend. Invariants: each call has one index, one id and one name, which its first piece
tells; a field that cannot be read costs that field, and never the answer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter, getitem
from typing import Any, ClassVar

import msgspec

from gateway.wire.chunks import NO_USAGE, UNREADABLE, EntryOfCall, ParsedAnswer, decoded, is_text, mended, parse
from gateway.wire.types import Chunk

Read = tuple[bytes, ParsedAnswer]
"""A piece of an answer, and its partial parse."""

OPENAIS_ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
# OpenAI's word for the ends of other APIs, by their names in lower case; an end that is not here keeps
# its name. Sources, November 2026: Anthropic "Stop reasons", Gemini and Vertex `FinishReason`, Cohere
# `finish_reason`, Bedrock `stopReason`, TGI `FinishReason`, Mistral `model_length`, Zhipu `sensitive`.
_ENDS = {
    **dict.fromkeys(("stop", "end_turn", "stop_sequence", "pause_turn", "eos", "eos_token", "complete"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "model_length", "error_limit"), "length"),
    **dict.fromkeys(("model_context_window_exceeded",), "length"),
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use"), "tool_calls"),
    **dict.fromkeys(("content_filter", "content_filtered", "refusal", "sensitive", "safety"), "content_filter"),
    **dict.fromkeys(("recitation", "blocklist", "spii", "prohibited_content", "image_safety"), "content_filter"),
    **dict.fromkeys(("guardrail_intervened", "error_toxic"), "content_filter"),
}

# where servers put a model's reasoning; who uses two of them says the same in both
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text", "thinking", "reasoning_details")
_TEXT_FIELDS = ("text", "thinking", "content", "summary")
_ACTS = frozenset({"tool_calls", "function_call", "audio", "images", "content_blocks"})  # what a text may lack


def end_of(reason: str) -> str:
    """OpenAI's word for a finish reason; an unknown one stays as it is."""
    return _ENDS.get(reason.lower(), reason)


def said(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts of a delta or message as they were written, each a "thought", a "text" or a "refusal"."""
    thoughts = (text for name in THOUGHTS if (text := _text_of(message.get(name))))
    if not message.keys().isdisjoint(THOUGHTS) and (thought := next(thoughts, "")):
        yield "thought", thought
    content = message.get("content")
    for part in content if isinstance(content, list) else (content,):
        is_thought = isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")
        if text := _text_of(part):
            yield "thought" if is_thought else "text", text
    if text := _text_of(message.get("refusal")):
        yield "refusal", text


def _text_of(value: Any) -> str:
    """The text of a text, of a part that has one, or of a list of these."""
    if isinstance(value, list):
        return "".join(map(_text_of, value))
    if isinstance(value, dict):
        return next((text for name in _TEXT_FIELDS if (text := _text_of(value.get(name)))), "")
    return value if isinstance(value, str) else ""


_has_words = attrgetter("has_words")


def has_words(chunks: Iterable[Chunk]) -> bool:
    """Whether an answer is known to say something, as nearly every one is."""
    return True in map(_has_words, chunks)


def lack_of(chunks: Sequence[Chunk]) -> str:
    """Why an answer says nothing: it is "empty", "blank" or only "thoughts"; "" if it says something,
    or cannot be read.

    Reads backwards, for the last words are near the end.
    """
    lack = "empty"
    try:
        for chunk in reversed(chunks):
            for data in reversed(chunk.each()) if chunk.has_content else ():
                for message in _messages(data):
                    texts = list(said(message))
                    if any(map(message.get, _ACTS)) or any(text.strip() for kind, text in texts if kind != "thought"):
                        return ""
                    if any(kind == "thought" for kind, _ in texts):
                        lack = "thoughts"
                    elif texts and lack == "empty":
                        lack = "blank"
    except UNREADABLE:
        return ""
    return lack


def _messages(data: bytes) -> Iterator[dict[str, Any]]:
    """The messages or deltas of a chat, and the items of a response, as messages."""
    answer = msgspec.json.decode(data)
    answer = answer.get("response") or answer  # of an event
    for choice in answer.get("choices") or ():
        yield {"content": choice["text"]} if is_text(choice) else choice.get("delta") or choice.get("message") or {}
    for item in answer.get("output") or ():
        kind = item.get("type")
        yield {"thinking": "…"} if kind == "reasoning" else item if kind == "message" else {"tool_calls": [item]}


class _Piece:
    """A piece of an answer, before it is handed on."""

    __slots__ = ("json", "mended", "payload")

    def __init__(self, payload: bytes, answer: ParsedAnswer) -> None:
        self.payload, self.mended = payload, answer.mended
        self.json: dict[str, Any] = msgspec.json.decode(payload)
        _respell(self.json, answer)

    @property
    def choices(self) -> list[dict[str, Any]]:
        return self.json.get("choices") or []

    @property
    def is_end(self) -> bool:
        return any(choice.get("finish_reason") for choice in self.choices)

    @property
    def says_nothing(self) -> bool:
        deltas = [choice.get("delta") or {} for choice in self.choices]
        return not (self.is_end or self.json.get("usage") or any(any(delta.values()) for delta in deltas))

    def read(self) -> Read:
        is_as_it_came = self.json == msgspec.json.decode(self.payload)
        payload = self.payload if is_as_it_came else msgspec.json.encode(self.json)
        answer = parse(payload)
        answer.mended = self.mended
        return payload, answer


class _OpenCall:
    """A call of a tool, as far as it has come."""

    __slots__ = ("head", "id", "index", "is_echo", "is_made", "name", "parts", "sent")

    def __init__(self, index: int, sent: int | None, id: str, name: str, is_made: bool) -> None:
        self.index, self.sent = index, sent  # ours, and the server's
        self.id, self.is_made, self.name = id, is_made, name
        self.parts: list[str] = []  # of its arguments
        self.head: dict[str, Any] = {}  # its beginning, until that leaves
        self.is_echo = False  # it may be the last call's name again: it is no call until it has arguments

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are a JSON object, so that nothing of it can follow."""
        try:
            is_over = bool(self.parts) and self.parts[-1].rstrip().endswith("}")
            return is_over and isinstance(msgspec.json.decode("".join(self.parts)), dict)
        except UNREADABLE:
            return False

    def extend_head(self, id: str, name: str) -> None:
        """Complete the beginning, which has not left yet. A name may come in pieces, or longer each time."""
        if id and self.is_made:
            self.id, self.is_made = id, False
        if name and name != self.name:
            self.name = name if name.startswith(self.name) else self.name + name
        self.head["id"] = self.id
        if self.name:
            _body_of(self.head)["name"] = self.name


class PieceReader(msgspec.Struct):
    """Reads the pieces of one answer, in order.

    `key` begins the ids of calls that come without one; `tools` are those of the request, as it was
    sent, whose names tell where a call without arguments ends.
    """

    HELD_MAX: ClassVar = 1000  # pieces that wait for the name of a call
    MENDED_MAX: ClassVar = 100  # fields of one piece
    CALLS_MAX: ClassVar = 1000  # of one choice

    key: str = ""
    tools: Any = None
    _ids_made: int = 0
    _calls: dict[int, list[_OpenCall]] = {}  # by choice
    held: list[_Piece] = []  # back
    _heads: list[_OpenCall] = []  # those whose beginnings are held
    _has_deltas: bool = False

    def read(self, payload: bytes) -> list[Read]:
        """The pieces that `payload` completes. Raises msgspec.DecodeError unless it is an answer's JSON."""
        payload, answer = self.parsed(payload)
        return [(payload, answer)] if self.is_usual(answer) else self.pieces(payload, answer)

    def pieces(self, payload: bytes, answer: ParsedAnswer) -> list[Read]:
        """The pieces that one completes which is not usual, as `parsed` has read it.

        A call's beginning waits for its name, and for the next piece, which may have more of the name.
        Raises msgspec.DecodeError for more calls than a model makes.
        """
        piece, begun = _Piece(payload, answer), list[_OpenCall]()
        self._has_deltas |= any(choice.delta is not None for choice in answer.choices or ())
        for choice in piece.choices:
            if message := choice.pop("message", None):  # all of it at the end, or the pieces of another spelling
                untold = {} if self._calls.get(choice.get("index") or 0) else {"tool_calls": message.get("tool_calls")}
                choice["delta"] = (choice.get("delta") or untold) if self._has_deltas else message
            delta = choice.get("delta") or {}
            if entries := delta.get("tool_calls"):
                calls = self._calls.setdefault(choice.get("index") or 0, [])
                delta["tool_calls"] = [entry for entry in entries if self._add(calls, entry, begun)]
                if not delta["tool_calls"]:
                    del delta["tool_calls"]
                    if piece.says_nothing:
                        return []
        is_late = piece.is_end or len(self.held) > self.HELD_MAX
        if not is_late and not all(call.name for call in (*self._heads, *begun)):
            self.held.append(piece)
            self._heads += begun
            return []
        ready = self.rest()
        if begun and not is_late:
            self.held, self._heads = [piece], begun
            return ready
        for call in begun:
            call.head = {}
        return [*ready, piece.read()]

    def rest(self) -> list[Read]:
        """The pieces that were held back; at the end of an answer, all that is left of it."""
        if not self.held:
            return []
        echoes = [call.head for call in self._heads if call.is_echo and not call.parts]
        for call in self._heads:
            call.head = {}
        held, self.held, self._heads = self.held, [], []
        for delta in [choice.get("delta") or {} for piece in held for choice in piece.choices] if echoes else ():
            entries = delta.get("tool_calls") or ()
            delta["tool_calls"] = [entry for entry in entries if all(entry is not echo for echo in echoes)]
        return [piece.read() for piece in held]

    def whole(self, body: bytes) -> Read:
        """A whole answer. Raises msgspec.DecodeError unless it is the JSON of one."""
        body, answer = self.parsed(body)
        if self.is_usual(answer, is_whole=True):
            return body, answer
        piece = _Piece(body, answer)
        for choice in piece.choices:
            known = {""}
            for entry in (choice.get("message") or {}).get("tool_calls") or ():
                entry["id"] = self._new_id() if (entry.get("id") or "") in known else entry["id"]
                known.add(entry["id"])
        return piece.read()

    def parsed(self, payload: bytes) -> Read:
        """Valid JSON, and its partial parse. Raises msgspec.DecodeError."""
        try:
            return mended(payload)
        except msgspec.ValidationError as failure:
            return self.remade(payload, failure)

    def remade(self, payload: bytes, failure: msgspec.ValidationError) -> Read:
        """The same of a piece whose first unreadable field `failure` names."""
        piece = decoded(payload)
        for number in range(1, self.MENDED_MAX if isinstance(piece, dict) else 0):
            try:
                _mend(piece, failure)
                answer = parse(payload := msgspec.json.encode(piece))
            except msgspec.ValidationError as error:
                failure = error
            except (LookupError, TypeError, ValueError, OverflowError):
                break
            else:
                answer.mended = number
                return payload, answer
        raise failure

    def is_usual(self, answer: ParsedAnswer, is_whole: bool = False) -> bool:
        """Whether a piece is handed on as it is: it has OpenAI's spelling and begins no call, as nearly every one, and
        no piece is held back.
        """
        if self.held:
            return False
        choices = answer.choices
        further = answer.x_groq or answer.meta
        if choices is None or (further is not None and answer.usage == NO_USAGE):
            return answer.usage == NO_USAGE and further is None
        for choice in choices:
            if (part := choice.delta) is not None:
                self._has_deltas = True
            if choice.message is not None:
                if not is_whole:
                    return False
                part = choice.message
            if choice.usage != NO_USAGE or (choice.finish_reason and choice.finish_reason not in OPENAIS_ENDS):
                return False
            if part is None:
                continue
            if part.usage is not None:
                return False
            if not (entries := part.tool_calls):
                continue
            if len(choices) != 1 or len(entries) != 1 or not self._goes_on(choice.index, entries[0]):
                return False
        return True

    def _goes_on(self, choice: int, entry: EntryOfCall) -> bool:
        """Whether an entry of `tool_calls` only adds to the arguments of the call with its index."""
        function, calls = entry.function, reversed(self._calls.get(choice, ()))
        call = next((call for call in calls if call.sent == entry.index), None)
        if call is None or call.index != entry.index or entry.id or function is None or function.name:
            return False
        call.parts += [function.arguments] if function.arguments else []
        return True

    def _new_id(self) -> str:
        self._ids_made += 1
        return f"call_{self.key}_{self._ids_made - 1}"

    def _has_tools(self, names: set[str]) -> bool:
        tools = self.tools if isinstance(self.tools, list) else ()
        return names <= {_body_of(dict(tool)).get("name") for tool in tools if isinstance(tool, dict)}

    def _add(self, calls: list[_OpenCall], entry: dict[str, Any], begun: list[_OpenCall]) -> bool:
        """Read one entry of `tool_calls`; False if nothing of it is left for its own piece."""
        body, field = _body_of(entry), "input" if isinstance(entry.get("custom"), dict) else "arguments"
        index, id, name, text = entry.get("index"), entry.get("id") or "", body.get("name") or "", body.get(field) or ""
        call = _continued(calls, index, id, name, text)
        if call is not None and not (id or call.parts) and name != call.name and self._has_tools({name, call.name}):
            call = None
        if call is None:
            if len(calls) == self.CALLS_MAX:
                raise msgspec.DecodeError(f"more than {self.CALLS_MAX} calls of tools")
            used = {one.index for one in calls}
            ours = max(used, default=-1) + 1 if index is None or index in used else index
            is_made = not id or any(one.id == id for one in calls)  # some servers take a tool's name for an id
            call = _OpenCall(ours, index, self._new_id() if is_made else id, name, is_made)
            call.is_echo = bool(calls) and not (id or text) and calls[-1].name == name
            calls.append(call)
            entry["id"] = call.id
            if not (name and text):
                call.head = entry
                begun.append(call)
        else:
            written = "".join(call.parts) if id or name else ""
            if written and text.startswith(written):  # the whole call again, or all of it that was written
                text = body[field] = text[len(written) :]
            if call.head:
                call.extend_head(id, name)
                if not call.name:  # its arguments wait with it
                    head = _body_of(call.head)
                    head[field] = (head.get(field) or "") + text
                    call.parts.append(text)
                    return False
            if id or name:
                entry.pop("id", None)
                body.pop("name", None)
            if not text and entry.keys() <= {"index", "type", "function", "custom"}:
                return False
        entry["index"] = call.index
        call.parts += [text] if text else []
        return True


def _body_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The function or custom tool of an entry of `tool_calls`."""
    kind = "custom" if isinstance(entry.get("custom"), dict) else "function"
    entry[kind] = entry.get(kind) or {}
    body: dict[str, Any] = entry[kind]
    return body


def _continued(calls: list[_OpenCall], index: int | None, id: str, name: str, text: str) -> _OpenCall | None:
    """The call that an entry of `tool_calls` goes on with; None if it begins another one.

    Servers give all calls one index, or none; give a call's rest another index than its beginning; or
    give each piece an id of its own. So an id or a name tells a new call where the last one is whole.
    """
    if not calls:
        return None
    last = calls[-1]
    if index is None:
        if (known := next((call for call in reversed(calls) if id and call.id == id), None)) is not None:
            return known
        call = last
    else:
        at_index = [call for call in reversed(calls) if call.sent == index]
        same = next((call for call in at_index if id and call.id == id), at_index[0] if at_index else None)
        if same is None:
            is_rest = not (id or name) and (not text or (bool(last.parts) and not last.is_whole))
            return last if is_rest else None
        call = same
    if id and not call.is_made:
        return call if id == call.id or not (name or call.is_whole) else None
    is_other = name and call.name and call.is_whole
    return None if is_other and not (name == call.name and text == "".join(call.parts)) else call


# -- other spellings -------------------------------------------------------------------------------


def _respell(piece: dict[str, Any], answer: ParsedAnswer) -> None:
    """Give a piece OpenAI's words for its ends, and its usage OpenAI's place."""
    for choice in piece.get("choices") or ():
        if (end := choice.get("finish_reason")) and end_of(end) != end:
            choice.setdefault("native_finish_reason", end)  # OpenRouter's name of it
            choice["finish_reason"] = end_of(end)
    if answer.usage == NO_USAGE:
        choices = piece.get("choices") or ()
        # Kimi's, Groq's, and those of proxies
        places = [*choices, *(choice.get("delta") or choice.get("message") for choice in choices), *piece.values()]
        used = next((one["usage"] for one in places if isinstance(one, dict) and one.get("usage")), None)
        piece |= {"usage": used} if used is not None else {}
    elif answer.choices is None:
        piece["choices"] = []  # strict clients need it


def field_of(value: Any, failure: msgspec.ValidationError) -> tuple[Any, Any, str]:
    """What holds the field of `value` that `failure` names, its name or index there, and what is expected.

    Raises LookupError, TypeError or ValueError where there is none.
    """
    expected, path = _FAILED_FIELD.findall(str(failure))[-1]
    *steps, last = steps_of(path)
    return reduce(getitem, steps, value), last, expected


def steps_of(path: str) -> list[Any]:
    """The names and indices of a path as msgspec writes it: `.messages[0].role`."""
    return [int(at) if at else name for name, at in _STEP.findall(path)]


def _mend(piece: dict[str, Any], failure: msgspec.ValidationError) -> None:
    """Read the field that `failure` names as what is expected there, or leave it out."""
    inside, last, expected = field_of(piece, failure)
    value = inside[last]
    if isinstance(value, dict) and value and "array" in expected:
        inside[last] = [value]
    elif isinstance(value, int | float | dict | list) and not isinstance(value, bool) and "str" in expected:
        inside[last] = msgspec.json.encode(value).decode()
    elif isinstance(last, int) or "object" in expected:
        inside[last] = {}
    elif "int" in expected and str(value).removesuffix(".0").isdecimal():
        inside[last] = int(str(value).removesuffix(".0"))
    else:
        del inside[last]


_FAILED_FIELD = re.compile(r"Expected `([^`]*)`.* at `\$([^`]+)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
