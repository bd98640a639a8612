"""A Sequence: one answer being generated, from its submission to its last token.

Knows no scheduler and no model. Invariant: once the steps in flight have ended, `blocks` hold the
KV of exactly `tokens[:computed]`; a running sequence has at least one uncomputed token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b

import msgspec

from local_engine.grammar import GrammarState
from local_engine.messages import EngineUsage, Output, SamplingParams, TokenLogprob
from local_engine.speculation.speculator import DraftKind, Speculation
from local_engine.text.calls import AnswerReader
from local_engine.text.tokenizer import TextStream, Tokenizer, joined


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class TokenCounts:
    """Counts of tokens, of one answer or since the start; `drafted` and `accepted` tokens by
    source."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    reasoning_tokens: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one generation; owned by the engine, changed by its scheduler and its
    postprocessing.

    `tokens` is prompt and answer. `keys` are the chain keys of its full blocks, computed on demand.
    The first `registered` of its blocks can be found by other sequences. `computed` counts tokens
    with KV in `blocks`. `in_flight` (0 or 1) counts the token that a step in flight will give: it
    comes after `tokens` and is not known yet, although the next step may compute it.
    `cached_tokens` counts the prompt tokens reused at first admission. `counts` counts answer
    tokens, only if a penalty needs it. `turn` is its place in the fair order of its priority, see
    the scheduler. `speculation` is None if drafts are not allowed; `draft_computed` counts tokens
    with the draft model's KV in `blocks`. `prompt_logprobs` are the known log probabilities of the
    prompt's tokens, if requested: at least the first token's, which nothing predicts. `grammar` is
    the answer's state in its grammar; `reader` finds calls and thinking in its text.
    """

    id: int
    tokens: list[int]
    prompt_tokens: int
    params: SamplingParams
    answer_tokens_max: int
    stop_token_ids: frozenset[int]
    cache_salt: bytes
    priority: int
    seed: int
    text: TextStream
    turn: float = -1.0
    speculation: Speculation | None = None
    draft_computed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    registered: int = 0
    computed: int = 0
    in_flight: int = 0
    cached_tokens: int | None = None
    counted: TokenCounts = field(default_factory=TokenCounts)
    counts: Counter[int] = field(default_factory=Counter)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    grammar: GrammarState | None = None
    reader: AnswerReader | None = None

    @property
    def answer_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def pending_draft(self) -> int:
        """The number of tokens that the draft model has not computed yet."""
        return len(self.tokens) - self.draft_computed

    @property
    def order(self) -> tuple[int, float, int]:
        """Admission order: smaller goes first."""
        return (self.priority, self.turn, self.id)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt remain to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens

    def add(self, token_id: int, logprob: TokenLogprob | None) -> Output:
        """Add the answer's next token; returns the text that it made final, with the finish reason
        if the answer ends. Raises InvalidRequest if its grammar cannot continue."""
        self.tokens.append(token_id)
        if self.grammar is not None:
            self.grammar.take(token_id)
        if self.has_penalties:
            self.counts[token_id] += 1
        reader = self.reader
        if reader is None:
            return self._output_of(token_id, logprob)
        self.counted.reasoning_tokens += reader.thinks
        output = self._output_of(token_id, logprob, is_framed=reader.is_framed)
        parts = reader.read(output.text, is_last=output.finish_reason is not None)
        return msgspec.structs.replace(
            output,
            text=parts.text,
            reasoning=parts.reasoning,
            calls=tuple(parts.calls),
            finish_reason=output.finish_reason or ("stop" if reader.is_over else None),
        )

    def forced(self) -> tuple[int, ...]:
        """The next tokens while the grammar allows only one. Empty if log probabilities are
        requested, which need a row of logits each."""
        return () if self.grammar is None or self.params.logprobs is not None else self.grammar.forced()

    def _output_of(self, token_id: int, logprob: TokenLogprob | None, *, is_framed: bool = False) -> Output:
        if token_id in self.stop_token_ids:
            return msgspec.structs.replace(self.text.finish("stop"), stop_token=logprob)
        can_stop = self.answer_tokens >= self.params.min_tokens and not is_framed
        output = self.text.push(token_id, logprob, can_stop=can_stop)
        if output.finish_reason is not None:
            return output
        if self.grammar is not None and self.grammar.is_over:
            return joined(output, self.text.finish("stop"))
        if self.answer_tokens >= self.answer_tokens_max:
            return joined(output, self.text.finish("length"))
        return output

    def noise_key(self, position: int) -> int:
        """The key of the noise that draws the answer's token at `position`, a signed 64-bit number:
        a function of seed and position alone, so that batches, preemptions and failed drafts do not
        change it."""
        key = self.seed.to_bytes(32, "little", signed=True) + position.to_bytes(8, "little")
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True)

    @property
    def usage(self) -> EngineUsage:
        """The sequence's counts of tokens."""
        return EngineUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.answer_tokens,
            cached_tokens=self.cached_tokens or 0,
            reasoning_tokens=self.counted.reasoning_tokens,
            drafted_tokens=dict(self.counted.drafted),
            accepted_tokens=dict(self.counted.accepted),
        )

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens `start .. start + count` (half open) of a sequence, to compute in this step. The last
    of them are `draft`, drafted by `kind`. `wanted`: how many tokens the draft model may still add.
    `logit_rows`: how many of the last tokens need logits."""

    sequence: Sequence
    start: int
    count: int
    logit_rows: int
    draft: tuple[int, ...] = ()
    kind: DraftKind | None = None
    wanted: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end - len(self.draft) == len(self.sequence.tokens) + self.sequence.in_flight

    @property
    def tokens(self) -> list[int]:
        """The chunk's token ids; 0 stands for the token that a step in flight will give."""
        known = self.sequence.tokens[self.start : self.end - len(self.draft)]
        return [*known, *[0] * (self.count - len(self.draft) - len(known)), *self.draft]

    def with_draft(self, draft: tuple[int, ...]) -> TokenChunk:
        """A copy with the draft model's tokens, up to the first that the grammar forbids."""
        draft = self.sequence.grammar.part(draft) if self.sequence.grammar is not None else draft
        count, logit_rows = self.count + len(draft), self.logit_rows + len(draft)
        return replace(self, count=count, logit_rows=logit_rows, draft=draft, wanted=0)


@dataclass(frozen=True, slots=True)
class Place:
    """A row of logits to draw from: for the sequence's next token, or for the token `ahead` places
    later if its draft is right."""

    sequence: Sequence
    ahead: int = 0

    @property
    def position(self) -> int:
        """The token's position in the answer."""
        return self.sequence.answer_tokens + self.sequence.in_flight + self.ahead

    @property
    def changes_logits(self) -> bool:
        params = self.sequence.params
        return (
            self.sequence.has_penalties
            or bool(params.logit_bias)
            or (self.position < params.min_tokens and self.sequence.grammar is None)
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sequence's next token. If log probabilities were requested, `logprob` is the token's
    under the model's own distribution, and `top` has the likeliest tokens with theirs. `token_id`
    is None if the logits were not finite."""

    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def token_logprob(self, tokenizer: Tokenizer) -> TokenLogprob | None:
        """The log probabilities with their tokens' text; None if none were requested."""
        if self.token_id is None or self.logprob is None:
            return None
        top = tuple(tokenizer.token_logprob(*pair) for pair in self.top)
        return tokenizer.token_logprob(self.token_id, self.logprob, top)
