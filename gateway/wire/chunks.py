"""Parses answers in part: whole ones (`chat.completion`) and streamed ones
(`chat.completion.chunk`).

A text completion has `text_completion` for both. `read` extracts the few facts that the gateway
needs. `unfold` turns a whole answer into chunks, `fold` (fold.py) chunks into a whole answer, so
that one cached entry serves both kinds of client. Shapes: OpenAI API reference, "The chat
completion object", "The chat completion chunk object" and "The completion object"; unknown fields
are kept. Knows no HTTP, no cache and no backend. Invariant: `fold(unfold(whole))` is JSON-equal to
`whole`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import getitem
from typing import Any

import msgspec

from gateway.wire.types import Chunk
from gateway.wire.usage import usage_of

# -- reading, once and lightly ---------------------------------------------------------------------


NO_USAGE = msgspec.Raw(b"null")


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool


class EntryOfCall(msgspec.Struct, gc=False):
    """An entry of `tool_calls`."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None
    custom: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | list[Any] | None = None
    usage: Any = None  # of proxies
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_text: Any = None
    reasoning_details: Any = None
    thinking: Any = None
    tool_calls: list[EntryOfCall] | None = None
    function_call: Any = None
    audio: Any = None
    images: Any = None
    content_blocks: Any = None

    def has_content(self) -> bool:
        """Whether it has visible content besides `content`."""
        return any(msgspec.structs.astuple(self)[2:])


class _ReadChoice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    text: Any = None  # of a completion, which has neither
    finish_reason: str | None = None
    usage: msgspec.Raw = NO_USAGE  # Kimi's place


class ParsedAnswer(msgspec.Struct, gc=False):
    """A chunk or a whole answer, parsed in part. `error` is an error inside a 200.

    `usage` stays raw, so that a malformed usage does not cost the answer.
    """

    choices: list[_ReadChoice] | None = None
    usage: msgspec.Raw = NO_USAGE
    error: Any = None
    object: Any = None
    x_groq: Any = None
    meta: Any = None
    mended: int = msgspec.field(default=0, name="sameway.mended")  # fields; no answer has this name


_decode_answer = msgspec.json.Decoder(ParsedAnswer).decode
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that reading invalid JSON raises."""


def parse(data: bytes) -> ParsedAnswer:
    """Parse `data` in part. Raises msgspec.DecodeError unless it is an answer's JSON."""
    try:
        return _decode_answer(
            data.decode()
        )  # as text, because msgspec does not check the UTF-8 of a field that it skips
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


# a JSON text, also one that is cut; a number that JSON (Python's servers write these) or a float does
# not have; another number. Each begins after the one before it: what is no JSON takes no quadratic time.
_NO_NUMBER = re.compile(
    rb'"(?:[^"\\]|\\.)*+"?|(-?(?:(?:NaN|Infinity|nan|inf)\b|\d[\d.]{308,}+|\d[\d.]*+[eE]\+?\d{3,}+))|\d[\d.]*+'
)


# a pair of surrogates, or an escape of another character; else a surrogate without its pair
_SURROGATE = re.compile(
    rb"(\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\[^u])|\\u[dD][89a-fA-F][\da-fA-F]{2}"
)


def with_pairs(data: bytes) -> bytes:
    """`data`, JSON, with U+FFFD for each escaped lone surrogate, which UTF-8 cannot encode."""
    return _SURROGATE.sub(lambda found: found[1] or b"\\ufffd", data)


def decoded(data: bytes, kind: Any = Any) -> Any:
    """Decode a server's JSON, `mended` if need be. Raises msgspec.DecodeError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE:
        try:
            return msgspec.json.decode(_mended(data), type=kind)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from None


def mended(data: bytes) -> tuple[bytes, ParsedAnswer]:
    """`data` as valid JSON, and its partial parse.

    Lone surrogates become U+FFFD; numbers outside JSON (NaN) or beyond a float (1e400) become null.
    Raises msgspec.DecodeError.
    """
    try:
        answer = _decode_answer(data.decode())
        msgspec.json.decode(data)  # a partial parse skips numbers beyond a float
    except UNREADABLE:
        data = _mended(data)
        answer = parse(data)
    return data, answer


def _mended(data: bytes) -> bytes:
    return with_pairs(_NO_NUMBER.sub(lambda found: b"null" if found[1] else found[0], data))


def to_chunk(data: bytes, answer: ParsedAnswer, is_whole: bool = False) -> Chunk:
    """The chunk of `data`, with the facts from its partial parse."""
    choices = answer.choices or ()
    has_usage, has_content, has_words = answer.usage != NO_USAGE, False, False
    reasons: tuple[str, ...] = ()
    for choice in choices:
        part = choice.delta or choice.message
        # most have text, and need no call
        content = choice.text if part is None else part.content
        if content or (part is not None and part.has_content()):
            has_content = True
            has_words = has_words or (bool(content) and content.__class__ is str and not content.isspace())
        if choice.finish_reason:
            reasons = (*reasons, choice.finish_reason)
    return Chunk(
        data=data,
        is_whole=is_whole,
        has_content=has_content,
        has_words=has_words,
        finish_reasons=reasons,
        usage=usage_of(answer.usage) if has_usage else None,
        is_usage_only=not choices and has_usage,
        mended=answer.mended,
    )


def read(data: bytes, is_whole: bool = False) -> Chunk:
    """A chunk from recorded JSON. Raises msgspec.DecodeError."""
    return to_chunk(data, parse(data), is_whole)


# these report a failure, not a finish: of OpenRouter, of vLLM and SGLang, of Zhipu, of DeepSeek
_FAILED_REASONS = frozenset({"error", "abort", "network_error", "insufficient_system_resource"})


class FinishTracker(msgspec.Struct):
    """Tracks from its chunks which choices of an answer have finished."""

    _choices: int = 1
    _prompts: int = 1
    failed_reason: str | None = None
    _seen: set[int] = set()
    _finished: set[int] = set()

    def add(self, answer: ParsedAnswer) -> str | None:
        """Note one more; returns the `failed_reason`."""
        for choice in answer.choices or ():
            if choice.index not in self._seen:
                self._seen.add(choice.index)
            if choice.finish_reason:
                self._finished.add(choice.index)
                if choice.finish_reason in _FAILED_REASONS:
                    self.failed_reason = choice.finish_reason
        return self.failed_reason

    def more_of(self, answer: ParsedAnswer) -> str:
        """The text that `answer` adds to one known choice, as nearly every chunk does; empty if it does more."""
        choices = answer.choices
        if not choices or len(choices) != 1 or choices[0].finish_reason or choices[0].index not in self._seen:
            return ""
        choice = choices[0]
        if (delta := choice.delta) is None:
            text, has_more = choice.text, choice.message is not None
        else:
            text, has_more = delta.content, delta.tool_calls is not None or delta.usage is not None
        if has_more or answer.usage != NO_USAGE or choice.usage != NO_USAGE or answer.x_groq or answer.meta:
            return ""
        return text if isinstance(text, str) and answer.error is None and not answer.mended else ""

    @property
    def has_any(self) -> bool:
        """Whether a choice has finished."""
        return bool(self._finished)

    @property
    def is_complete(self) -> bool:
        """Whether the requested number of choices, and every choice that began, finished."""
        return len(self._finished) >= self._choices and len(self._finished) == len(self._seen)

    @property
    def is_finished(self) -> bool:
        """Whether every choice that began finished, at least one for each prompt.

        That suffices if the server also ends the stream: some servers ignore `n`.
        """
        return len(self._finished) >= self._prompts and len(self._finished) == len(self._seen)


def is_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice belongs to a text completion; some servers send `text` in chats, too."""
    return "text" in choice and choice.get("delta") is None and choice.get("message") is None


# -- continued text --------------------------------------------------------------------------------

_decode_texts = msgspec.json.Decoder(list[str]).decode


_OTHER = {"content": "?"}


class DeltaTemplate:
    """The bytes before and after the text in chunks that differ only in that text, as most servers
    send them.

    A chunk with these bytes around another text needs no parse; many are compared at once.
    """

    PER_ANSWER_MAX = 4  # templates tried in one answer: a server may pad every chunk differently

    __slots__ = ("_after", "_before", "_inside")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._inside = slice(len(before), -len(after))

    @staticmethod
    def of(data: bytes, text: str) -> "DeltaTemplate | None":
        """The template of the chunk `data`, which adds only `text` to one choice; None if it has none."""
        spelled, key = text.encode(), b"content"
        if data.find(b'"content":"%b"' % spelled) < 0:
            key = b"text"
        before, middle, after = data.partition(b'"%b":"%b"' % (key, spelled))
        if not middle or data.find(b"\n") >= 0:  # spelled with escapes, or with spaces
            return None
        before, after = before + b'"%b":"' % key, b'"' + after
        try:
            choices: list[Any] = msgspec.json.decode(before + b"?" + after).get("choices") or []
        except UNREADABLE:  # the light parse skips fields, valid or not
            return None
        if len(choices) != 1 or choices[0].get("logprobs") is not None:
            return None
        is_alike = choices[0]["text"] == "?" if is_text(choices[0]) else choices[0].get("delta") == _OTHER
        return DeltaTemplate(before, after) if is_alike else None

    def texts(self, payloads: Sequence[bytes]) -> list[str]:
        """The texts of the leading payloads that match; every text is non-empty.

        Uses maps: a stream has thousands of chunks.
        """
        goes_on = list(map(bytes.startswith, payloads, repeat(self._before)))
        count = goes_on.index(False) if False in goes_on else len(goes_on)
        ends = list(map(bytes.endswith, payloads[:count], repeat(self._after)))
        count = ends.index(False) if False in ends else count
        parts: Any = map(getitem, payloads[:count], repeat(self._inside))
        try:  # all at once: anything but the inside of a string changes the list's length
            texts = _decode_texts(b'["%b"]' % b'"\n,"'.join(parts)) if count else []
        except UNREADABLE:
            return []
        return texts if len(texts) == count and "" not in texts else []


# -- whole -> chunks -------------------------------------------------------------------------------

TEXT = "text_completion"
_HEAD = ("id", "created", "model", "system_fingerprint", "service_tier")
# in the order in which a model writes them
_TEXTS = ("reasoning_content", "reasoning", "content", "refusal")
# about five words each: cuts after a word, or anywhere in text without spaces
_PIECES = re.compile(r".{24}\S{0,40}\s{0,8}|.+", re.DOTALL)


def unfold(whole: bytes) -> list[Chunk]:
    """The chunks that a stream of the answer `whole` would have, each field in its usual place.

    A chat's text is cut at word borders, or by token if log probabilities list the tokens; a
    completion's text is not cut. Unknown fields of the answer and of its choices are in the
    finish's chunk, a message's in its first delta. Usage is the last chunk. Raises
    msgspec.DecodeError.
    """
    try:
        return _unfold(msgspec.json.decode(whole))
    except UNREADABLE as error:
        raise msgspec.DecodeError(str(error)) from None


def payloads(chunks: Iterable[Chunk]) -> Iterator[bytes]:
    """The JSON of each chunk of an answer; whole answers are unfolded. Raises msgspec.DecodeError."""
    for chunk in chunks:
        for piece in unfold(chunk.data) if chunk.is_whole else (chunk,):
            yield from piece.each()


def _unfold(answer: dict[str, Any]) -> list[Chunk]:
    kind = TEXT if answer.get("object") == TEXT else "chat.completion.chunk"
    head = {key: answer[key] for key in _HEAD if key in answer} | {"object": kind}
    usage = answer.get("usage")
    extra = {key: value for key, value in answer.items() if key not in (*_HEAD, "object", "choices")}
    if usage is not None:
        del extra["usage"]
    choices = answer.get("choices") or []
    pieces = [[piece] for i, choice in enumerate(choices) for piece in _pieces(choice, i)] or [[]]
    chunks = [read(msgspec.json.encode({**head, "choices": piece})) for piece in pieces[:-1]]
    chunks.append(read(msgspec.json.encode({**head, "choices": pieces[-1], **extra})))
    if usage is not None:
        chunks.append(read(msgspec.json.encode({**head, "choices": [], "usage": usage})))
    return chunks


def _pieces(choice: dict[str, Any], position: int) -> Iterator[dict[str, Any]]:
    """One choice of a whole answer, as choices of chunks."""
    index = choice.get("index", position)
    if is_text(choice):
        yield {"index": index, **choice}
        return
    message: dict[str, Any] = choice.get("message") or {}
    logprobs: Any = choice.get("logprobs")
    calls = message.get("tool_calls")
    opening = {key: "" if key in _TEXTS and isinstance(value, str) else value for key, value in message.items()}
    if calls:
        del opening["tool_calls"]

    def piece(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": None, **fields}

    yield piece(opening)
    tokens = _tokens(message.get("content"), logprobs)
    for key in _TEXTS:
        text = message.get(key)
        if key == "content" and tokens:
            for position_in_text, token in enumerate(tokens):
                others: dict[str, Any] = logprobs if position_in_text == 0 else {}
                yield piece({"content": token["token"]}, logprobs={**others, "content": [token]})
        elif isinstance(text, str):
            for part in _PIECES.findall(text):
                yield piece({key: part})
    for number, call in enumerate(calls or ()):
        yield piece({"tool_calls": [{**call, "index": number}]})
    other_fields = {key: value for key, value in choice.items() if key not in ("index", "message", "logprobs")}
    if "logprobs" in choice and not tokens:
        other_fields["logprobs"] = logprobs
    yield piece({}, **other_fields)


def _tokens(content: Any, logprobs: Any) -> list[dict[str, Any]]:
    """The log probabilities by token if the tokens spell the content; otherwise an empty list."""
    tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not (isinstance(tokens, list) and isinstance(content, str) and content):
        return []
    spelled = "".join(t["token"] for t in tokens if isinstance(t, dict) and isinstance(t.get("token"), str))
    return tokens if spelled == content and all(isinstance(t, dict) for t in tokens) else []
