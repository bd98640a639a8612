"""The joint of an answer that broke off: the text that was said, and its continuation.

Knows no deployments, no routes and no money. Shapes: OpenAI API reference, "The chat
completion chunk object" and "The completion object".
Invariants: the texts join at the last character that was said, none repeated and none lost; a stop
sequence that lies across the joint ends the answer; what is more than text is never continued.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.backends.base import BackendBroken
from gateway.journey.outcomes import Seam
from gateway.journey.turn import Turn
from gateway.wire.chunks import is_text, parse, to_chunk, unfold
from gateway.wire.types import CHAT, Chunk, prompts_of
from gateway.wire.usage import usage_of
from policies import Usage

_RESTATED_MIN = 12  # characters at which an equal beginning is no coincidence
_BYTES_PER_TOKEN_MAX = 12  # a chunk with more has several tokens
_BYTES_PER_TOKEN = 5
_READ_AT_ONCE = 500  # chunks, in a millisecond
_PLAIN_DELTA = frozenset({"role", "content"})
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
# an event of Anthropic's API with a part of a block that a chat completion lacks
_UNTOLD = re.compile(rb'content_block_(?:start(?!.*"type":\s*"text")|delta)')
_UNCONTINUED = ("tools", "functions", "audio", "echo", "suffix", "best_of", "structured_outputs", "grammar")


class Said(msgspec.Struct, frozen=True):
    """The text that clients have, its tokens, and the fields that all chunks of the answer share."""

    text: str
    tokens: int
    head: dict[str, Any]


async def said_in(turn: Turn, chunks: Sequence[Chunk]) -> Said | None:
    """What `chunks` say, if another deployment may go on with it.

    None for several choices, tool calls, JSON formats, log probabilities, reasoning in progress and
    anything else but text. Lets others run in between: an answer may have 64 MiB.
    """
    if not _is_continued(turn):
        return None
    parts: list[str] = []
    head: dict[str, Any] = {}
    tokens = 0
    for chunk in chunks:
        if not chunk.data and _UNTOLD.search(chunk.native):
            return None
        for payload in chunk.each():
            piece = msgspec.json.decode(payload)
            head = head or {key: piece[key] for key in ("id", "created", "object") if key in piece}
            for choice in piece.get("choices") or ():
                text = _text_of(choice)
                if text is None or choice.get("finish_reason"):
                    return None
                parts.append(text)
                tokens += bool(text)
            if len(parts) % _READ_AT_ONCE == 0:
                await asyncio.sleep(0)
    text = "".join(parts)
    if not text or text.rfind("<think>") > text.rfind("</think>"):
        return None
    size_bytes = len(text.encode(errors="replace"))
    if size_bytes > tokens * _BYTES_PER_TOKEN_MAX:
        tokens = size_bytes // _BYTES_PER_TOKEN
    return Said(text, tokens, head)


def _is_continued(turn: Turn) -> bool:
    body = turn.body
    if turn.kind.is_plain or turn.demand.choices != 1 or any(body.get(name) for name in _UNCONTINUED):
        return False
    if any(body.get(name) not in (None, False) for name in _LOGPROBS) or any(
        name.startswith("guided_") for name in body
    ):
        return False
    if turn.kind is not CHAT:
        prompts = prompts_of(body)
        return len(prompts) == 1 and isinstance(prompts[0], str)
    kind = body.get("response_format") or {}
    return not isinstance(kind, dict) or kind.get("type", "text") == "text"


def _text_of(choice: Mapping[str, Any]) -> str | None:
    """The text of a choice of a chunk; None if it has anything else."""
    if choice.get("logprobs") or choice.get("index"):
        return None
    delta = {"content": choice["text"]} if is_text(choice) else choice.get("delta") or {}
    if any(value for key, value in delta.items() if key not in _PLAIN_DELTA):
        return None
    content = delta.get("content")
    return "" if content is None else content if isinstance(content, str) else None


def rest_of(body: Mapping[str, Any], said: Said) -> dict[str, Any]:
    """`body` with the lengths that are left after `said`; below 1 where nothing is left."""
    left = {
        name: body[name] - said.tokens
        for name in ("max_tokens", "max_completion_tokens", "min_tokens")
        if isinstance(body.get(name), int)
    }
    if "min_tokens" in left:
        left["min_tokens"] = max(0, left["min_tokens"])
    return {**body, **left}


def is_used_up(body: Mapping[str, Any], said: Said) -> bool:
    """Whether the answer has the length that was asked for."""
    lengths = [body.get("max_tokens"), body.get("max_completion_tokens")]
    return any(isinstance(length, int) and length <= said.tokens for length in lengths)


class Joint:
    """Makes the chunks of a continuation those of the one answer.

    `is_exact`: the deployment certainly continues; another one may begin anew, which is noticed.
    `usage` is that of the whole answer, once it is known.
    """

    def __init__(self, said: Said, seam: Seam, body: Mapping[str, Any], *, is_exact: bool) -> None:
        stop = body.get("stop")
        self._said = said
        self._seam = seam
        self._stops = [stop] if isinstance(stop, str) else [text for text in stop or () if text]
        self._is_exact = is_exact
        self._held = ""
        self._is_joined = False
        self._is_told = False
        self._is_restated = False
        self._model: Any = None
        self.usage: Usage | None = None

    def take(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], bool]:
        """The chunks for the clients, and whether a stop sequence ended the answer.

        Raises BackendBroken if the deployment does not continue the text.
        """
        joined: list[Chunk] = []
        for chunk in unfold(chunks[0].data) if chunks and chunks[0].is_whole else chunks:
            for payload in chunk.each():
                piece = msgspec.json.decode(payload)
                self._model = piece.get("model", self._model)
                for choice in piece.get("choices") or ():
                    is_over = self._take(choice, joined)
                    if is_over:
                        return joined, True
                if isinstance(piece.get("usage"), dict):
                    joined.append(self._usage(piece["usage"]))
        return joined, False

    def _take(self, choice: Mapping[str, Any], joined: list[Chunk]) -> bool:
        text, reason = _text_of(choice), choice.get("finish_reason")
        if text is None:
            raise BackendBroken("The deployment went on with something else than text")
        if not self._is_joined:
            self._held += text
            new = self._joined(is_last=bool(reason))
            if new is None:
                return False
            text, is_stopped = new
            if is_stopped:
                joined.append(self._chunk("", "stop"))
                return True
        if text:
            joined.append(self._chunk(text, None))
        if reason:
            joined.append(self._chunk("", reason))
        return False

    def _joined(self, *, is_last: bool) -> tuple[str, bool] | None:
        """The new text after the joint, and whether a stop sequence lies across it; None: too early
        to tell.
        """
        said, text = self._said.text, self._held
        if not self._is_exact:
            shared = _shared(said, text)
            if shared == len(said) >= _RESTATED_MIN:
                text, self._is_restated = text[shared:], True
            elif shared == len(text) and not is_last:
                return None
            elif shared >= _RESTATED_MIN:
                raise BackendBroken("The deployment began its answer anew instead of going on with it")
            else:
                space = said[len(said.rstrip()) :]  # deployments get the text without it
                if len(text) < len(space) and not is_last:
                    return None
                text = text.removeprefix(space)
        longest = max(map(len, self._stops), default=1) - 1
        if len(text) < longest and not is_last:
            return None
        self._is_joined = True
        before = said[len(said) - longest :] if longest else ""
        both = before + text
        crossing = [at for at in (both.find(stop) for stop in self._stops) if 0 <= at < len(before)]
        return (text, False) if not crossing else ("", True)

    def _chunk(self, text: str, reason: str | None) -> Chunk:
        head = {**self._said.head, **({"model": self._model} if self._model is not None else {})}
        if head.get("object") == "text_completion":
            choice: dict[str, Any] = {"index": 0, "text": text}
        else:
            choice = {"index": 0, "delta": {"content": text} if text else {}}
        told = {} if self._is_told else {"sameway": {"rescued": msgspec.to_builtins(self._seam)}}
        self._is_told = True
        return _read({**head, "choices": [{**choice, "finish_reason": reason}], **told})

    def _usage(self, counted: dict[str, Any]) -> Chunk:
        """The usage of the whole answer: the text before the joint was no part of the prompt."""
        before = 0 if self._is_restated else self._said.tokens
        usage = usage_of(msgspec.json.encode(counted)) or Usage(0, 0)
        prompt, answer = max(0, usage.prompt_tokens - before), usage.completion_tokens + before
        whole = {**counted, "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        chunk = _read({**self._said.head, "model": self._model, "choices": [], "usage": whole})
        self.usage = chunk.usage
        return chunk


def _shared(said: str, text: str) -> int:
    """The length of the beginning that two texts share."""
    pairs = enumerate(zip(said, text, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(said), len(text)))


def ended_by_length(said: Said, seam: Seam) -> Chunk:
    """The finish of an answer that has its length already."""
    is_text_kind = said.head.get("object") == "text_completion"
    choice: dict[str, Any] = {
        "index": 0,
        **({"text": ""} if is_text_kind else {"delta": {}}),
        "finish_reason": "length",
    }
    return _read({**said.head, "choices": [choice], "sameway": {"rescued": msgspec.to_builtins(seam)}})


def _read(piece: dict[str, Any]) -> Chunk:
    data = msgspec.json.encode(piece)
    return to_chunk(data, parse(data))
