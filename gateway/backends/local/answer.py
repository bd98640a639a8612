"""Turns the engine's outputs into chunks: `chat.completion.chunk`s or `text_completion`s.

Uses the engine's messages; no sockets and no torch. Shapes: OpenAI API reference, "The chat
completion chunk object" and "The completion object"; `prompt_logprobs` as in vLLM. Invariant: each
choice of a chat begins with its role, each choice ends with its finish, and the usage chunk is
last.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

import local_engine
from gateway.backends.base import BackendRequest
from gateway.wire.types import Chunk, prompts_of
from local_engine import ModelInfo, Output, TokenLogprob
from local_engine.messages import CallPart, together
from policies import Usage

_LOGPROB_MIN = -9999.0  # OpenAI's value for minus infinity, which JSON lacks

_encode = msgspec.json.encode


class Writer(ABC):
    """Writes chunks around a head that is encoded once. An output's `index` counts over all choices
    of the answer.
    """

    object: str
    id_prefix: str

    def __init__(self, request: BackendRequest, model: str, created: int, info: ModelInfo | None) -> None:
        head = {
            "id": f"{self.id_prefix}-{request.request_id}",
            "object": self.object,
            "created": created,
            "model": model,
            "system_fingerprint": _fingerprint(info),
        }
        self.head = _encode(head)[:-1]

    @abstractmethod
    def chunks(self, output: Output, index: int) -> list[Chunk]:
        """Return the chunks of one piece of one choice."""

    def usage(self, of_prompts: Sequence[local_engine.EngineUsage]) -> Chunk:
        """Return the last chunk, with the usage of all prompts and their answers."""
        total = together(of_prompts)
        usage = Usage(
            total.prompt_tokens,
            total.completion_tokens,
            total.cached_tokens,
            reasoning_tokens=total.reasoning_tokens,
            drafted_tokens=total.drafted_tokens or None,
            accepted_tokens=total.accepted_tokens or None,
        )
        counts: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if usage.reasoning_tokens:
            counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        return Chunk(self.head + b',"choices":[],"usage":' + _encode(counts) + b"}", usage=usage, is_usage_only=True)


class ChatWriter(Writer):
    object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, request: BackendRequest, model: str, created: int, info: ModelInfo | None) -> None:
        super().__init__(request, model, created, info)
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._key = request.request_id

    def chunks(self, output: Output, index: int) -> list[Chunk]:
        """Return the role before a choice's first piece, then the parts of the piece, then the
        finish.
        """
        deltas: list[bytes] = []
        if output.reasoning:
            deltas.append(b'{"reasoning_content":' + _encode(output.reasoning) + b"}")
        if output.text or (output.logprobs and not output.calls and not deltas):
            deltas.append(b'{"content":' + _encode(output.text) + b"}")
        deltas += [b'{"tool_calls":[' + _encode(self._call(part, index)) + b"]}" for part in output.calls]
        written = []
        if index not in self._begun and (deltas or output.finish_reason or output.prompt_logprobs):
            prompt_logprobs = _prompt_logprobs(output) if not self._begun else b""  # all choices have one prompt
            self._begun.add(index)
            content = b"null" if output.calls and not output.text else b'""'
            written.append(
                self._chunk(index, b'{"role":"assistant","content":%b,"refusal":null}' % content, more=prompt_logprobs)
            )
        for number, delta in enumerate(deltas):
            logprobs = _of_chat(output.logprobs) if output.logprobs and number == 0 else b"null"
            has_content = bool(output.text or output.reasoning or output.calls)
            has_words = delta.startswith(b'{"content"') and bool(output.text.strip())
            written.append(self._chunk(index, delta, logprobs, has_content=has_content, has_words=has_words))
        if output.calls:
            self._called.add(index)
        reason: str | None = output.finish_reason
        if reason is not None:
            reason = "tool_calls" if reason == "stop" and index in self._called else reason
            written.append(self._chunk(index, b"{}", finish_reason=reason))
        return written

    def _call(self, part: CallPart, index: int) -> dict[str, Any]:
        """Write a part of a tool call in OpenAI's shape. The part with the name has an id."""
        function: dict[str, Any] = {"arguments": part.arguments}
        if not part.name:
            return {"index": part.index, "function": function}
        key = f"{self._key}/{index}/{part.index}".encode()
        id = "call_" + hashlib.blake2b(key, digest_size=12).hexdigest()
        return {"index": part.index, "id": id, "type": "function", "function": {"name": part.name, **function}}

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        *,
        has_content: bool = False,
        has_words: bool = False,
        finish_reason: str | None = None,
        more: bytes = b"",
    ) -> Chunk:
        finish = b'"%b"' % finish_reason.encode() if finish_reason else b"null"
        data = b'%b%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]}' % (
            self.head,
            more,
            index,
            delta,
            logprobs,
            finish,
        )
        reasons = (finish_reason,) if finish_reason else ()
        return Chunk(data, has_content=has_content, has_words=has_words, finish_reasons=reasons)


class TextWriter(Writer):
    """Writes text completions.

    With `max_tokens` 0 the engine still generates one token, which this class leaves out.
    """

    object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, request: BackendRequest, model: str, created: int, info: ModelInfo | None) -> None:
        super().__init__(request, model, created, info)
        body = request.body
        self._prompts = prompts_of(body) if body.get("echo") else []
        self._per_prompt: int = body.get("n") or 1
        self._top: int | None = body.get("logprobs")
        self._wants_prompt_logprobs = body.get("prompt_logprobs") is not None
        self._is_silent = body["max_tokens"] == 0
        self._sent: dict[int, int] = {}  # characters of each choice

    def chunks(self, output: Output, index: int) -> list[Chunk]:
        """Return one chunk: the echoed prompt before a choice's first piece, the text, and the
        finish.
        """
        text, finish_reason = output.text, output.finish_reason
        tokens = (*output.logprobs, *([output.stop_token] if output.stop_token is not None else []))
        if self._is_silent:
            text, tokens, finish_reason = "", (), finish_reason and "length"
        choice: dict[str, Any] = {"index": index}
        prompt_tokens: tuple[TokenLogprob, ...] = ()
        if index not in self._sent:
            self._sent[index] = 0
            if self._prompts:
                prompt = self._prompts[index // self._per_prompt]
                text = (prompt if isinstance(prompt, str) else _spelled(output.prompt_logprobs)) + text
                prompt_tokens = output.prompt_logprobs
            if self._wants_prompt_logprobs:
                choice["prompt_logprobs"] = _of_prompt(output.prompt_logprobs)
        logprobs = None
        if self._top is not None and (prompt_tokens or tokens):
            logprobs = _of_text((*prompt_tokens, *tokens), bool(prompt_tokens), text, self._sent[index], self._top)
        self._sent[index] += len(text)
        choice |= {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        data = b'%b,"choices":[%b]}' % (self.head, _encode(choice))
        reasons = (finish_reason,) if finish_reason else ()
        return [Chunk(data, has_content=bool(text), has_words=bool(text.strip()), finish_reasons=reasons)]

    def usage(self, of_prompts: Sequence[local_engine.EngineUsage]) -> Chunk:
        if self._is_silent:
            of_prompts = [msgspec.structs.replace(usage, completion_tokens=0) for usage in of_prompts]
        return super().usage(of_prompts)


# -- log probabilities


def _of_chat(tokens: Iterable[TokenLogprob]) -> bytes:
    entries = [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return _encode({"content": entries, "refusal": None})


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token), "bytes": list(token.raw)}


def _of_text(tokens: Iterable[TokenLogprob], is_first_given: bool, text: str, start: int, top: int) -> dict[str, Any]:
    """Write a completion's `logprobs`: four lists with an item for each token.

    A prompt's first token has no value: no token precedes it. `text_offset` counts characters from
    the beginning of the choice; `start` characters precede `text`. A token that the text does not
    contain, such as a stop token, has the offset of the next token.
    """
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    data, byte_position, offset = text.encode(), 0, start
    for number, token in enumerate(tokens):
        is_given = is_first_given and number == 0
        likeliest = {_name(candidate): _finite(candidate) for candidate in (*token.top[:top], token)}
        lists["tokens"].append(_name(token))
        lists["token_logprobs"].append(None if is_given else _finite(token))
        lists["top_logprobs"].append(None if is_given else likeliest)
        begin, end = _range(token.raw, data, byte_position, has_rest=start > 0)
        offset += _characters(data[byte_position:begin])
        lists["text_offset"].append(offset)
        offset += _characters(data[begin:end])
        byte_position = end
    return lists


def _range(raw: bytes, data: bytes, position: int, *, has_rest: bool) -> tuple[int, int]:
    """Return the range of a token in the text, searched from `position`.

    The text may lack the space that begins its first token. With `has_rest` the text can begin with
    the rest of a token of the previous piece.
    """
    for spelled in (raw, raw.removeprefix(b" ")):
        if data.startswith(spelled, position):
            return position, position + len(spelled)
    begin = data.find(raw, position) if has_rest else -1
    return (begin, begin + len(raw)) if begin >= 0 else (position, position)


def _characters(data: bytes) -> int:
    return sum(byte & 0xC0 != 0x80 for byte in data)  # the first byte of each character


def _of_prompt(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Write vLLM's `prompt_logprobs`: for each prompt token but the first, the likeliest tokens and
    the token itself, by id.
    """
    fields_by_token: list[dict[str, Any] | None] = []
    for number, token in enumerate(tokens):
        fields = {str(token.token_id): _ranked(token, None)}
        fields |= {str(top.token_id): _ranked(top, rank) for rank, top in enumerate(token.top, 1)}
        fields_by_token.append(fields if number else None)
    return fields_by_token


def _ranked(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(token), "rank": rank, "decoded_token": token.text}


def _prompt_logprobs(output: Output) -> bytes:
    return b',"prompt_logprobs":' + _encode(_of_prompt(output.prompt_logprobs)) if output.prompt_logprobs else b""


def _name(token: TokenLogprob) -> str:
    """Return a token's text, or OpenAI's spelling for bytes that are part of a character."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _LOGPROB_MIN)


def _spelled(tokens: Iterable[TokenLogprob]) -> str:
    return b"".join(token.raw for token in tokens).decode(errors="replace")


def _fingerprint(info: ModelInfo | None) -> str:
    """Return OpenAI's `system_fingerprint`, which changes with the model and its numerics."""
    facts = (info.name, info.architecture, info.parameters, info.dtype, info.device) if info else ()
    return "fp_" + hashlib.blake2b(repr(facts).encode(), digest_size=5).hexdigest()
