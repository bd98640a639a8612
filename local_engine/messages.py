"""The engine's messages: requests in, outputs out, and a class for each error.

Knows no HTTP, no teams and no torch, so that a gateway worker can use an engine without loading
one. All of them are frozen values. The same structs pass over the worker's socket, by `ipc`, and
through `AsyncEngine` and `Engine`.

Errors:

    EngineError
    ├── EngineUnavailable    no process behind the socket, or it ended or hangs (`is_death`)
    ├── EngineLoading        the process is up, the weights are not
    ├── InvalidRequest       the caller's fault; `param` names the field
    │   └── PromptTooLong    prompt + 1 > context
    ├── Overloaded           the queue is full: try elsewhere or later
    └── EngineFailed         this generation failed inside the engine (a bug or out of memory); the engine goes on
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from ipc import CallFrame, ReplyFrame, Wire

_log = logging.getLogger("local_engine.worker")

FinishReason = Literal["stop", "length", "abort"]

TOP_LOGPROBS_MAX = 20
ANY_TOOL = "*"  # a choice of no certain tool


class EngineError(Exception):
    """The base of all errors that the engine raises to its callers."""


class EngineUnavailable(EngineError):
    """The engine's process is not there. `is_death`: whether the process ended, or sent nothing for
    too long, during this generation."""

    def __init__(self, message: str, *, is_death: bool = False) -> None:
        super().__init__(message)
        self.is_death = is_death


class EngineLoading(EngineError):
    """The process is up and still loading its model."""


class InvalidRequest(EngineError):
    """The request is wrong. `param` is the offending field, or None."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for one token of answer. `prompt_tokens` and `context_tokens` are
    counts."""

    def __init__(self, message: str, *, prompt_tokens: int = 0, context_tokens: int = 0) -> None:
        super().__init__(message, param="messages")
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class Overloaded(EngineError):
    """The queue is full."""


class EngineFailed(EngineError):
    """This generation failed inside the engine; other generations and the engine go on."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters that choose tokens and end a generation. The defaults are the OpenAI API's.

    `temperature` 0 is greedy. `top_k` 0 and `min_p` 0 are off. `repetition_penalty` (1 is off;
    prompt included; CTRL, arXiv:1909.05858), `presence_penalty` and `frequency_penalty` (output
    only, as OpenAI defines them). `logprobs` None is off; k gives the chosen token's log
    probability and the k likeliest (0..20), under the model's own distribution, before penalties,
    temperature and filters. `prompt_logprobs` does the same for the prompt's tokens; such a prompt
    is computed whole, cached or not. `seed`: equal seeds draw equally in any batch, except that a
    batch of another shape may round the logits differently in their last bits (never if
    `ModelInfo.is_batch_invariant`). `max_tokens` None means as many as the engine's default and the
    context allow.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def validate(self) -> None:
        """Raise InvalidRequest with the first field that is out of range."""
        for name, is_good, wanted in (
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            *(
                (name, getattr(self, name) is None or 0 <= getattr(self, name) <= TOP_LOGPROBS_MAX, "from 0 to 20")
                for name in ("logprobs", "prompt_logprobs")
            ),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "a 64-bit integer"),
            ("stop", len(self.stop) <= 64 and all(self.stop), "at most 64 strings, none of them empty"),
        ):
            if not is_good:
                raise InvalidRequest(f"{name} must be {wanted}, not {getattr(self, name)!r}", param=name)


class Grammar(msgspec.Struct, frozen=True):
    """The grammar of an answer: `text` is a JSON schema, a regular expression, a JSON list of the
    only answers, or a context-free grammar (Lark's notation, or GBNF). The engine makes the grammar
    of tool calls (see `text.calls`)."""

    kind: Literal["json", "regex", "choice", "grammar", "calls"]
    text: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """One request for `n` answers. Of `best_of` candidates (at least n) it returns the n with the
    likeliest tokens on average; if best_of exceeds n, nothing is sent until all are done. Exactly
    one of `messages`, `prompt` and `prompt_token_ids` is given.

    `messages` and `tools` go through the model's chat template (OpenAI's shapes; a content may be a
    list of text parts). `salt` isolates reuse of KV blocks: only requests with equal salts share
    blocks. `priority`: smaller is sooner. `reference`: a text with which the answer may share
    passages; shared passages are faster, and no answer changes. `prefix`: the beginning of the
    answer, which the generation continues. `grammar`: the grammar of the answer, after a thinking
    block if the model begins with one. `tool_choice`: the name of the tool that must be called, "*"
    for any, empty for an optional call; at most `calls_max` calls, 0 is unbounded.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    best_of: int | None = None
    salt: bytes = b""
    priority: int = 0
    reference: str | None = None
    prefix: str = ""
    grammar: Grammar | None = None
    tool_choice: str = ""
    calls_max: int = 0


class CallPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tool call: the name of the call with this `index` in the answer, or a piece of
    its arguments, which are a JSON object."""

    index: int
    name: str = ""
    arguments: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its log probability. `text` has U+FFFD if the token is part of a character;
    `raw` is exact."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="output"):
    """A piece of one choice: final text and its tokens.

    `finish_reason` is on the choice's last piece; `usage`, of all choices, on the very last piece.
    In an answer to `messages`, thinking and tool calls are not part of the text. With log
    probabilities: `stop_token` is the token that ended the choice, which its text lacks;
    `prompt_logprobs`, on the first piece, are the prompt's tokens; the first, which nothing
    predicts, has 0.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stop_token: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    usage: EngineUsage | None = None


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of tokens over all choices. `cached_tokens`: prompt tokens with reused KV, counted
    once. `drafted_tokens`, `accepted_tokens`: drafted and accepted tokens by source (text,
    reference, model). `reasoning_tokens`: the tokens of thinking blocks."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: dict[str, int] = {}
    accepted_tokens: dict[str, int] = {}


def together(usages: Iterable[EngineUsage]) -> EngineUsage:
    """The sum of each count over at least one usage."""
    total: dict[str, Any] = {}
    for name, count in itertools.chain.from_iterable(msgspec.structs.asdict(usage).items() for usage in usages):
        if isinstance(count, int):
            total[name] = total.get(name, 0) + count
        else:
            before = total.get(name, {})
            total[name] = {**before, **{source: before.get(source, 0) + more for source, more in count.items()}}
    return EngineUsage(**total)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model. `context_tokens` is prompt and answer together; sizes are in bytes.
    `may_think`: answers can begin with a thinking block. `is_batch_invariant`: logits, to their
    last bit, do not depend on the rest of the batch or on the cached part of a prompt."""

    name: str
    architecture: str
    context_tokens: int
    vocabulary_size: int
    parameters: int
    dtype: str
    device: str
    weights_size_bytes: int
    kv_size_bytes: int
    has_chat_template: bool
    may_think: bool = False
    is_batch_invariant: bool = False


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state as last pushed by its worker, for a router's decisions.

    Fields that end in `_total` count since the engine's start: computed and reused (`cached_`)
    prompt tokens, answer tokens, preemptions, and drafted and accepted tokens by source (text,
    reference, model; see `speculation`).
    """

    is_ready: bool = False
    is_connected: bool = False
    is_draining: bool = False
    progress: float = 0.0
    stage: str = "not connected"
    running: int = 0
    running_max: int = 0
    waiting: int = 0
    queue_max: int = 0
    waiting_prefill_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_ms_per_token: float = 0.0
    answer_tokens_expected: float = 0.0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    answer_tokens_total: int = 0
    preemptions_total: int = 0
    drafted_tokens_total: dict[str, int] = {}
    accepted_tokens_total: dict[str, int] = {}

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks that running sequences hold, 0..1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0

    def predicted_ttft_ms(self, prompt_tokens: int) -> float | None:
        """The milliseconds until a prompt of `prompt_tokens` would get its first token; None before
        a measurement.

        It is the time to read the prompts before it and itself and, unless a place is free, until
        as many sequences have ended as wait before it.
        """
        if not self.is_ready or self.prefill_tokens_per_s <= 0:
            return None
        ahead = self.waiting_prefill_tokens + prompt_tokens
        reading_ms = 1000.0 * ahead / self.prefill_tokens_per_s + self.decode_ms_per_token
        if not self.waiting and self.running < self.running_max:
            return reading_ms
        # places come free one after the other, over an answer's time
        turns = (self.waiting + 1) / max(1, self.running)
        return reading_ms + turns * self.answer_tokens_expected * self.decode_ms_per_token


class EngineEnded(msgspec.Struct, frozen=True):
    """The reason for the end of an engine's process, kept in a file beside its socket
    (`ended_path`).

    The process writes it if it cannot load or gives up; the supervisor, if the process was killed.
    The next process removes it. `is_final`: a restart would not help.
    """

    why: str
    is_final: bool = False


def ended_path(socket_path: str | Path) -> Path:
    """The path of the JSON file with the `EngineEnded` of the engine at that socket."""
    return Path(f"{socket_path}.ended")


def write_ended(socket_path: str | Path, ended: EngineEnded) -> None:
    """Write the reason of an end, which replaces an earlier one. A failed write is logged."""
    try:
        ended_path(socket_path).write_bytes(msgspec.json.encode(ended))
    except OSError as error:
        _log.warning("why this engine ended is told here alone: %s: %s", ended.why, error)


def read_ended(socket_path: str | Path) -> EngineEnded | None:
    """Read the reason of the last end; None if the file is missing or incomplete."""
    try:
        return msgspec.json.decode(ended_path(socket_path).read_bytes(), type=EngineEnded)
    except (OSError, msgspec.MsgspecError):  # never ended, or not yet written to its end
        return None


# -- over the socket ------------------------------------------------------------------------------


class TokenizeCall(msgspec.Struct, frozen=True, tag="tokenize", omit_defaults=True):
    """Asks for the tokens of a prompt, or of a conversation in the model's template. `has_special`:
    with the tokens that the model puts around a text. `opens_answer`: with the opening of the
    assistant's turn. `wants_texts`: with the vocabulary's spelling of each token."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    has_special: bool = True
    opens_answer: bool = True
    wants_texts: bool = False


class TokenIds(msgspec.Struct, frozen=True, tag="token_ids", omit_defaults=True):
    """The answer to `TokenizeCall`."""

    token_ids: list[int]
    texts: list[str] | None = None


class DetokenizeCall(msgspec.Struct, frozen=True, tag="detokenize"):
    """Asks for the text of `token_ids`, special ones included."""

    token_ids: list[int]


class TokensText(msgspec.Struct, frozen=True, tag="tokens_text"):
    """The answer to `DetokenizeCall`."""

    text: str


class EngineState(msgspec.Struct, frozen=True, tag="state"):
    """The worker's state, which it sends whenever the load changes (a few times a second)."""

    load: EngineLoad
    info: ModelInfo | None = None


EngineRequest = GenerateRequest | TokenizeCall | DetokenizeCall
EngineReply = Output | TokenIds | TokensText | EngineState

WIRE: Wire[EngineRequest, EngineReply] = Wire(
    calls=msgspec.msgpack.Decoder(CallFrame[EngineRequest]),
    replies=msgspec.msgpack.Decoder(ReplyFrame[EngineReply]),
    errors=(EngineFailed, PromptTooLong, InvalidRequest, Overloaded, EngineLoading, EngineUnavailable),
    unsendable=InvalidRequest,
    bytes_max=64 << 20,
)
