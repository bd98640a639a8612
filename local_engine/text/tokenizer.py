"""Text to token ids and back: the only part of the engine that reads text.

Built on `tokenizers` (from a tokenizer.json, or from a GGUF file's vocabulary and merges); `chat`
renders conversations. Invariants: the joined pieces of a `TextStream` equal all tokens decoded at
once, cut before the first stop string; no piece has part of a character, nor any text of a stop
string.
"""

from __future__ import annotations

import codecs
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from local_engine.config import ModelError
from local_engine.messages import FinishReason, GenerateRequest, Grammar, InvalidRequest, Output, TokenLogprob
from local_engine.text.calls import DEFAULT, MARKS, THINKING, AnswerReader, Format, begun, calls_grammar
from local_engine.text.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


_SPACE = "▁"
_OPENED_LATELY = 8  # tokens of a prompt's end, where a template opens or closes the thinking block


@dataclass(frozen=True, slots=True)
class Thinking:
    """An answer's thinking block: the tokens that open and close it, and whether it `is_open` at
    the beginning or `may_open` there."""

    block: tuple[int, int]
    is_open: bool
    may_open: bool


class Tokenizer:
    """Encodes prompts and chats; spells tokens as bytes. `strips_first_space`: SentencePiece puts a
    word's leading space in its token, and decoding mostly drops it at the very start."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
        bos_token_id_added: int | None = None,
    ) -> None:
        """`bos_token_id_added`: the token that this class, and not the backend, puts before a
        prompt."""
        self._backend = backend
        self._bos_token_id_added = bos_token_id_added
        self.eos_token_id: int | None = backend.token_to_id(eos_token)
        self._spelling: dict[int, bytes] = {}
        # the decoder's own description: that of the whole tokenizer spells out the vocabulary,
        # which takes a while
        steps = _steps(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None)
        kinds = {str(step.get("type")) for step in steps}
        if kinds and not kinds & {"ByteLevel", "Metaspace", "ByteFallback", "Replace"}:
            raise ModelError(
                f"tokenizer decoder {sorted(kinds)} is not supported; supported: that of byte-level BPE, of SentencePiece, "
                "or none, which puts spaces between tokens"
            )
        self._is_byte_level = "ByteLevel" in kinds
        self._has_spaces_between = not kinds
        self.strips_first_space = not kinds or any(_strips_first_space(step) for step in steps)
        added_tokens = backend.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added_tokens.items() if token.special)
        self._added: dict[int, str] = {id: token.content for id, token in added_tokens.items()}
        # what frames calls, where it is a control token
        self.marks = {text: id for id, text in self._added.items() if text in MARKS and id in self._special}
        blocks = ([backend.token_to_id(mark) for mark in marks] for marks in THINKING)
        self._block: tuple[int, int] | None = next(
            ((opens, closes) for opens, closes in blocks if opens and closes), None
        )
        self._chat: ChatTemplate | None = None
        if chat_template is not None:
            control = tuple(token.content for token in added_tokens.values() if token.special)
            self._chat = ChatTemplate(chat_template, bos_token, eos_token, control)

    def start_chat(self) -> None:
        """Start the process that renders conversations, if the model has a template, so that the
        first conversation does not wait for it."""
        if self._chat is not None:
            self._chat.start()

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def format(self) -> Format:
        """The format in which the model writes tool calls."""
        return DEFAULT if self._chat is None else self._chat.format

    def thinking(self, prompt: Sequence[int], *, is_continued: bool = False) -> Thinking | None:
        """The thinking block of an answer to `prompt`; None if the model has no such block.
        `is_continued`: the prompt ends with the beginning of the answer."""
        if self._block is None:
            return None
        for token in reversed(prompt[-_OPENED_LATELY:]):
            if token in self._block:
                return Thinking(self._block, is_open=token == self._block[0], may_open=False)
            if token in self._special:  # no text before it is the template's
                break
        return Thinking(self._block, is_open=False, may_open=not is_continued)

    def grammar_of(self, request: GenerateRequest) -> Grammar | None:
        """The grammar that the answer to a request must match, from the request's own grammar and
        its tools'."""
        if not request.tools:
            return request.grammar
        choice, calls_max = request.tool_choice, request.calls_max
        return calls_grammar(self.format, request.tools, choice, calls_max, request.grammar)

    def reader(
        self, request: GenerateRequest, thinking: Thinking | None, *, is_held: bool
    ) -> tuple[AnswerReader | None, frozenset[int]]:
        """The reader of an answer to `request`, and the control tokens that it reads; None if the
        answer is only text. `is_held`: a grammar keeps calls in their frame."""
        if request.messages is None or (thinking is None and not request.tools):
            return None, frozenset()
        block = None if thinking is None else thinking.block
        reader = AnswerReader(
            None if block is None else (self.token(block[0]), self.token(block[1])),
            thinks=thinking is not None and thinking.is_open,
            format=self.format if request.tools else None,
            names={tool["function"]["name"] for tool in request.tools or ()},
            is_held=is_held and request.grammar is None,
            is_forced=is_held and bool(request.tool_choice),
            is_alone=request.grammar is not None,
            calls_max=request.calls_max,
        )
        return reader, frozenset((*(block or ()), *(self.marks.values() if request.tools else ())))

    @property
    def size(self) -> int:
        """The number of token ids, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """The token ids of a prompt; with the model's tokens around it, unless a template
        `is_rendered` them."""
        # unlike `encode` it lets other threads run meanwhile
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=not is_rendered)[0].ids
        bos = self._bos_token_id_added
        if bos is not None and not is_rendered and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        opens_answer: bool = True,
        is_rendered: bool = True,
        prefix: str = "",
    ) -> list[int]:
        """The token ids of a conversation, by default with the opening of the assistant's turn; its
        texts never become a control token. `prefix`: the beginning of the answer. `is_rendered`: as
        in `encode`. Raises InvalidRequest."""
        if self._chat is None:
            raise InvalidRequest(
                "the model has no chat template; send `prompt` instead of `messages`", param="messages"
            )
        first, *rest = self._chat.render(messages, tools, opens_answer=opens_answer, prefix=prefix)
        ids = self.encode(first, is_rendered=is_rendered)
        for part in rest:
            ids += self.encode_middle(part)
        return ids

    def encode_middle(self, text: str) -> list[int]:
        """The token ids of text inside another text: without the space that SentencePiece puts
        before a beginning."""
        if not self.strips_first_space:
            return self.encode(text, is_rendered=True)
        before = self.encode("\n", is_rendered=True)
        ids = self.encode("\n" + text, is_rendered=True)
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text, is_rendered=True)

    def spell(self, id: int) -> bytes:
        """The bytes of a token, control tokens included; empty for an id without a token."""
        if id not in self._spelling:
            self._spelling[id] = self._spell(id)
        return self._spelling[id]

    def token_logprob(self, id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        """A token's log probability with its text."""
        raw = self.spell(id)
        return TokenLogprob(id, raw.decode(errors="replace"), raw, logprob, top)

    def is_special(self, id: int) -> bool:
        """Whether the token is a control token, which answers' text leaves out."""
        return id in self._special

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._decoded(id for id in ids if id not in self._special)

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of `ids` with special tokens. Raises InvalidRequest for an id without a token."""
        for id in ids:
            self.token(id)
        return self._decoded(ids)

    def _decoded(self, ids: Iterable[int]) -> str:
        return self.first(b"".join(map(self.spell, ids))).decode("utf-8", errors="replace")

    def first(self, data: bytes) -> bytes:
        """The beginning of a text after decoding."""
        return data.removeprefix(b" ") if self.strips_first_space else data

    def token(self, id: int) -> str:
        """The vocabulary's spelling of a token. Raises InvalidRequest for an id without a spelling."""
        token: str | None = self._backend.id_to_token(id) if 0 <= id < 1 << 32 else None
        if token is None:
            raise InvalidRequest(f"there is no token {id}", param="tokens")
        return token

    def _spell(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        token: str | None = self._backend.id_to_token(id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = byte_of_character()
            return bytes(table[character] for character in token if character in table)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return (" " + token if self._has_spaces_between else token.replace(_SPACE, " ")).encode()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder, in order."""
    if not isinstance(decoder, dict):
        return []
    parts = decoder.get("decoders")
    return [decoder] if parts is None else [step for part in parts for step in _steps(part)]


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return str(step.get("prepend_scheme")) != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and int(step.get("start") or 0) > 0


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes (byte-level BPE), inverted: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def joined(output: Output, more: Output) -> Output:
    """Two consecutive pieces of an answer as one; it ends as `more` does."""
    return msgspec.structs.replace(
        more,
        text=output.text + more.text,
        reasoning=output.reasoning + more.reasoning,
        calls=output.calls + more.calls,
        token_ids=output.token_ids + more.token_ids,
        logprobs=output.logprobs + more.logprobs,
    )


@dataclass(slots=True)
class HeldToken:
    """A token that is held back. `start`: where its text begins, in characters of the whole answer."""

    id: int
    logprob: TokenLogprob | None
    start: int


@dataclass(slots=True)
class TextStream:
    """One answer's text as its tokens arrive. Incomplete characters and possible beginnings of stop
    strings are held back. `is_at_start`: the answer has no text yet. `shown`: control tokens that
    are text here."""

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    is_at_start: bool = True
    shown: frozenset[int] = frozenset()
    _held: deque[HeldToken] = field(default_factory=deque)
    _text: str = ""
    _emitted: int = 0
    _utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def push(self, id: int, logprob: TokenLogprob | None, *, can_stop: bool = True) -> Output:
        """Add a token; returns the text that became final. If a stop string gives the piece a
        `finish_reason`, push no more."""
        self._held.append(HeldToken(id, logprob, self._emitted + len(self._text)))
        if id in self.shown or not self.tokenizer.is_special(id):
            data = self.tokenizer.spell(id)
            if self.is_at_start and data:
                self.is_at_start = False
                data = self.tokenizer.first(data)
            self._text += self._utf8.decode(data)
        if self.stop and can_stop:
            found = [at for at in (self._text.find(stop) for stop in self.stop) if at >= 0]
            if found:
                return self._emit(min(found), "stop")
        kept = max((begun(self._text, stop) for stop in self.stop if can_stop), default=0)
        return self._emit(len(self._text) - kept)

    def finish(self, reason: FinishReason) -> Output:
        """End without a stop string: all held text is final, except the bytes of an incomplete
        character."""
        return self._emit(len(self._text), reason, is_last=True)

    def _emit(self, length: int, reason: FinishReason | None = None, *, is_last: bool = False) -> Output:
        text, self._text = self._text[:length], self._text[length:]
        self._emitted += length
        final: list[HeldToken] = []
        has_half, _ = self._utf8.getstate()
        has_rest = not is_last and (self._text or has_half or reason is not None)
        while self._held and (self._held[0].start < self._emitted or not has_rest):
            final.append(self._held.popleft())
        return Output(
            text=text,
            token_ids=tuple(held.id for held in final),
            logprobs=tuple(held.logprob for held in final if held.logprob is not None),
            finish_reason=reason,
        )
