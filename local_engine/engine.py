"""Engine: the synchronous core. Submit token ids, step until done; no process, no threads, no
sockets.

The package's docstring has an example. Knows no HTTP, teams, money or caches of answers.
Invariants: with any batching, reuse, chunking or preemption, greedy output equals the naive
single-sequence forward pass; an ended sequence holds no block.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import msgspec

from local_engine import messages
from local_engine.block_pool import BlockPool
from local_engine.checkpoints.open import open_checkpoint
from local_engine.config import EngineConfig
from local_engine.draft_model import DraftModel, open_draft
from local_engine.grammar import Compiled, Grammars, GrammarState, Masker
from local_engine.runner import ModelRunner, default_sequences, default_step_tokens
from local_engine.scheduler import Scheduler
from local_engine.sequence import Sampled, Sequence, SequenceStatus, TokenChunk, TokenCounts
from local_engine.speculation.speculator import MATCH_MAX, DraftSource, PromptLookup, Speculation, Speculator
from local_engine.speculation.timing import Moment, StepTiming
from local_engine.step_in_flight import StepInFlight, draw, held
from local_engine.text.tokenizer import TextStream, joined

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One sequence's result of a step: a piece of output, and at its end `usage`, or the `error`
    that ended it."""

    id: int
    output: messages.Output
    usage: messages.EngineUsage | None = None
    error: messages.EngineError | None = None


class Engine:
    """One model, many sequences. Not thread-safe: one thread submits, steps and aborts."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[float, str], None] = lambda fraction, stage: None,
        entropy: random.Random | None = None,
        is_overlapped: bool | None = None,
    ) -> None:
        """Load the model, in seconds. Raises ModelError. Calls `progress` with a fraction 0..1 and
        a stage's name. `is_overlapped`: schedule a step while the last one is computed; default:
        only on a GPU."""
        self.config = config
        self._entropy = entropy or random.SystemRandom()
        progress(0.0, "opening the model")
        checkpoint = open_checkpoint(config.model)
        self.tokenizer = checkpoint.tokenizer
        self._eos = frozenset(checkpoint.config.eos_token_ids)
        draft = open_draft(config, checkpoint, progress)
        self.runner = ModelRunner(config, checkpoint, progress, draft=draft)
        self._pool = BlockPool(self.runner.kv.blocks, config.block_tokens)
        # a draft model needs the last token, so there the next step waits for it
        self._is_overlapped = draft is None and (
            self.runner.is_asynchronous if is_overlapped is None else is_overlapped
        )
        self._in_flight: list[StepInFlight] = []  # launched and not yet landed, the oldest first
        self._landed, self._timing = Moment.now(), StepTiming()
        step_tokens_max = config.step_tokens_max or default_step_tokens(self.runner.device)
        vocabulary = checkpoint.config.vocabulary_size
        self.draft_model = DraftModel(draft, vocabulary, step_tokens_max, self._timing) if draft is not None else None
        draft_context_tokens = draft.context_tokens if draft is not None else 0
        self.speculator = Speculator(self._timing, config.draft_tokens_max, draft_context_tokens)
        self._scheduler = Scheduler(
            self._pool,
            step_tokens_max=step_tokens_max,
            sequences_max=config.sequences_max or default_sequences(self.runner.device),
            speculator=self.speculator,
        )
        self._sequences: dict[int, Sequence] = {}
        self._submitted = 0
        self._totals = TokenCounts()
        model = checkpoint.config
        self.info = messages.ModelInfo(
            name=model.name,
            architecture=model.architecture,
            context_tokens=self.runner.context_tokens,
            vocabulary_size=model.vocabulary_size,
            parameters=self.runner.decoder.parameters,
            dtype=str(self.runner.dtype).removeprefix("torch."),
            device=str(self.runner.device),
            weights_size_bytes=self.runner.decoder.size_bytes,
            kv_size_bytes=self.runner.kv.size_bytes,
            has_chat_template=self.tokenizer.has_chat_template,
            may_think=self.tokenizer.thinking(()) is not None,
            is_batch_invariant=self.runner.is_batch_invariant,
        )
        self.grammars = Grammars(self.tokenizer, model.vocabulary_size, self._eos)
        self._masker = Masker(model.vocabulary_size, self._eos)
        progress(0.95, "warming up")
        self._warm_up()
        progress(1.0, "ready")

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, even if it only lands a step of ended sequences: left
        in flight until the next request, the idle time would count as that step's."""
        return self._scheduler.has_work or bool(self._in_flight)

    @property
    def step_s_expected(self) -> float:
        """The seconds of a step of `step_tokens_max` tokens at the latest speed; 0 before a
        measurement."""
        pace = self._timing.prefill_tokens_per_s
        return self._scheduler.step_tokens_max / pace if pace else 0.0

    def prompt_tokens(self, request: messages.GenerateRequest) -> list[int]:
        """The token ids of a request's prompt. Raises InvalidRequest."""
        given = [f for f in ("messages", "prompt", "prompt_token_ids") if getattr(request, f) is not None]
        if len(given) != 1:
            raise messages.InvalidRequest(f"give one of messages, prompt, prompt_token_ids, not {given or 'none'}")
        if request.messages is not None:
            return self.tokenizer.encode_chat(request.messages, request.tools, prefix=request.prefix)
        if request.prompt is not None:
            return self.tokenizer.encode(request.prompt + request.prefix)
        assert request.prompt_token_ids is not None
        return request.prompt_token_ids

    def submit(
        self,
        tokens: Many[int],
        params: messages.SamplingParams,
        *,
        salt: bytes = b"",
        priority: int = 0,
        reference: Many[int] = (),
        is_continued: bool = False,
        grammar: Compiled | None = None,
        reads: messages.GenerateRequest | None = None,
    ) -> int:
        """Queue a prompt; returns its id for `step` and `abort`.

        `reference`: tokens with which the answer may share passages. `is_continued`: the prompt
        ends with the beginning of the answer. `grammar`: one of `grammars`, which alone decides
        where the answer ends, unless it holds calls in a text. `reads`: the request with the tools
        and the thinking for which the answer's text is parsed. Raises InvalidRequest,
        PromptTooLong, Overloaded.
        """
        self._check(tokens, params)
        self._scheduler.check_queue(priority, salt, self.config.queue_max)
        room = self.info.context_tokens - len(tokens)
        answer_tokens_max = min(params.max_tokens or self.config.answer_tokens_default, room)
        prompt_logprobs = [] if params.prompt_logprobs is None else [self.tokenizer.token_logprob(tokens[0], 0.0)]
        may_be_text = grammar is None or (reads is not None and reads.grammar is None and not reads.tool_choice)
        stop, stop_token_ids = (params.stop, params.stop_token_ids) if may_be_text else ((), ())
        thinking = self.tokenizer.thinking(tokens, is_continued=is_continued)
        reader, shown_tokens = None, frozenset[int]()
        if reads is not None:
            reader, shown_tokens = self.tokenizer.reader(reads, thinking, is_held=grammar is not None)
        self._submitted += 1
        sequence = Sequence(
            id=self._submitted,
            tokens=list(tokens),
            prompt_tokens=len(tokens),
            params=params,
            answer_tokens_max=answer_tokens_max,
            stop_token_ids=(frozenset() if params.ignore_eos and grammar is None else self._eos).union(stop_token_ids),
            cache_salt=salt,
            priority=priority,
            seed=self._entropy.getrandbits(63) if params.seed is None else params.seed,
            # a grammar reads the first token's space
            text=TextStream(self.tokenizer, stop, not is_continued and grammar is None, shown_tokens),
            reader=reader,
            prompt_logprobs=prompt_logprobs,
            grammar=GrammarState(grammar, thinking) if grammar is not None else None,
        )
        if self.config.draft_tokens_max and not sequence.has_penalties:
            # at its beginning the answer is looked for where the reference begins
            text = [*tokens[-MATCH_MAX:], *reference] if reference else []
            sequence.speculation = Speculation(PromptLookup(text))
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)
        return sequence.id

    def abort(self, id: int) -> None:
        """End a sequence without further output, and free its blocks; unknown and ended ids are
        ignored."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._scheduler.finish(sequence)

    def step(self) -> list[StepOutput]:
        """Schedule and launch a step, and process the tokens of a step: this one, or on an
        asynchronous device the one before. A failure of the model fails only the sequences of its
        step."""
        began = Moment.now()
        outputs = self._land() if any(step.decides_next for step in self._in_flight) else []
        chunks = self._scheduler.schedule()
        error = self._launch(chunks, began) if chunks else None
        while len(self._in_flight) > int(self._is_overlapped and bool(chunks) and error is None):
            outputs += self._land()
        if error is not None:
            outputs += self._fail_step([chunk.sequence for chunk in chunks], error)
        return outputs

    def load(self) -> messages.EngineLoad:
        """The queue, memory and speed after the last step."""
        return messages.EngineLoad(
            is_ready=True,
            is_connected=True,
            progress=1.0,
            stage="ready",
            running=len(self._scheduler.running),
            running_max=self._scheduler.sequences_max,
            waiting=len(self._scheduler.waiting),
            queue_max=self.config.queue_max,
            waiting_prefill_tokens=self._scheduler.prefill_tokens,
            kv_blocks_used=self._pool.total - self._pool.available,
            kv_blocks_cached=self._pool.cached,
            kv_blocks_total=self._pool.total,
            prefill_tokens_per_s=self._timing.prefill_tokens_per_s,
            decode_ms_per_token=self._timing.decode_ms_per_token,
            answer_tokens_expected=self._scheduler.answer_tokens_expected,
            prompt_tokens_total=self._totals.prompt_tokens,
            cached_tokens_total=self._totals.cached_tokens,
            answer_tokens_total=self._totals.answer_tokens,
            preemptions_total=self._scheduler.preemptions,
            drafted_tokens_total=dict(self._totals.drafted),
            accepted_tokens_total=dict(self._totals.accepted),
        )

    def check_integrity(self) -> None:
        """Check the invariants of the pool, the queue and the sequences. Raises AssertionError."""
        self._scheduler.check_integrity(self._sequences.keys())

    def _check(self, tokens: Many[int], params: messages.SamplingParams) -> None:
        params.validate()
        if not tokens:
            raise messages.InvalidRequest("the prompt is empty", param="messages")
        vocabulary = self.info.vocabulary_size
        named = {"prompt_token_ids": tokens, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for param, ids in named.items():
            if not all(0 <= token < vocabulary for token in ids):
                raise messages.InvalidRequest(f"token ids must be from 0 to {vocabulary - 1}", param=param)
        context = self.info.context_tokens
        if len(tokens) + 1 > context:
            raise messages.PromptTooLong(
                f"the prompt has {len(tokens)} tokens; the context of {context} must hold it and at least 1 more",
                prompt_tokens=len(tokens),
                context_tokens=context,
            )

    def _launch(self, chunks: list[TokenChunk], began: Moment) -> str | None:
        """Launch the computation of the chunks and the draws after them; returns the reason if that
        failed."""
        try:
            if self.draft_model is not None:
                chunks = self.draft_model.fill(chunks)
                began = Moment.now()  # those were steps of its own
            masks = self._masker.begin(held(chunks))
            logits = self.runner.run(chunks, self._in_flight[-1] if self._in_flight else None)
            step = draw(chunks, logits, self.tokenizer, began, masks)
        except Exception as error:
            _log.exception("a step failed; its sequences end, the engine goes on")
            return f"the step failed: {error}"
        self._in_flight.append(step)
        for chunk, count in zip(chunks, step.counts, strict=True):
            chunk.sequence.computed += chunk.count - len(chunk.draft)
            chunk.sequence.in_flight += count > 0
        return None

    def _land(self) -> list[StepOutput]:
        """Wait for the oldest step in flight and process its tokens."""
        step = self._in_flight.pop(0)
        try:
            sampled = step.land()
        except Exception as error:
            _log.exception("a step failed on its way; its sequences end, the engine goes on")
            return self._fail_step([chunk.sequence for chunk in step.chunks], f"the step failed: {error}")
        since, self._landed = max(step.began, self._landed), Moment.now()
        busy_s = self._landed.busy_s(since, is_device_here=not self.runner.is_asynchronous)
        is_decode = all(chunk.start >= chunk.sequence.prompt_tokens for chunk in step.chunks)
        counts = [chunk.count for chunk in step.chunks]
        self._timing.observe(counts, self._landed.wall_s - since.wall_s, busy_s, is_decode=is_decode)
        return self._postprocess(step.chunks, sampled)

    def _postprocess(self, chunks: Many[TokenChunk], sampled: Many[list[Sampled]]) -> list[StepOutput]:
        ending = [
            (chunk, drawn)
            for chunk, drawn in zip(chunks, sampled, strict=True)
            if drawn and chunk.sequence.status is not SequenceStatus.FINISHED
        ]
        for chunk, _ in ending:
            chunk.sequence.in_flight -= 1
        broken = [chunk.sequence for chunk, drawn in ending if any(token.token_id is None for token in drawn)]
        outputs = [self._advance(chunk, drawn) for chunk, drawn in ending if chunk.sequence not in broken]
        if broken:
            outputs += self._fail_step(broken, "the model's output is not finite")
        return outputs

    def _advance(self, chunk: TokenChunk, drawn: Many[Sampled]) -> StepOutput:
        """Add the drawn tokens up to the draft's first error, and decide whether the answer ends;
        returns the final text."""
        sequence = chunk.sequence
        if sequence.answer_tokens == 0:
            self._totals.prompt_tokens += sequence.prompt_tokens
            self._totals.cached_tokens += sequence.cached_tokens or 0
        prompt_logprobs = tuple(sequence.prompt_logprobs) if sequence.answer_tokens == 0 else ()
        accepted = forced = 0
        try:
            output = self._add(sequence, drawn[0])
            while (
                output.finish_reason is None
                and accepted < len(chunk.draft)
                and sequence.tokens[-1] == chunk.draft[accepted]
            ):
                accepted += 1
                output = joined(output, self._add(sequence, drawn[accepted]))
            for token in sequence.forced() if output.finish_reason is None else ():
                output = joined(output, self._add(sequence, Sampled(token)))
                forced += 1
                if output.finish_reason is not None:
                    break
        except messages.InvalidRequest as error:
            return self._fail(sequence, error)
        sequence.computed += accepted
        sequence.draft_computed = min(sequence.draft_computed, sequence.computed)
        if chunk.draft:
            assert chunk.kind is not None
            assert sequence.speculation is not None
            self._count(sequence, chunk.kind.source, len(chunk.draft), accepted)
            self.speculator.observe(sequence.speculation, chunk.kind, len(chunk.draft), accepted)
        if forced:
            self._count(sequence, DraftSource.GRAMMAR, forced, forced)
        if prompt_logprobs:
            output = msgspec.structs.replace(output, prompt_logprobs=prompt_logprobs)
        if output.finish_reason is None:
            return StepOutput(sequence.id, output)
        self.abort(sequence.id)
        return StepOutput(sequence.id, output, usage=sequence.usage)

    def _count(self, sequence: Sequence, source: DraftSource, drafted: int, accepted: int) -> None:
        for counts in (sequence.counted, self._totals):
            counts.drafted[source] += drafted
            counts.accepted[source] += accepted

    def _add(self, sequence: Sequence, sampled: Sampled) -> messages.Output:
        assert sampled.token_id is not None
        self._totals.answer_tokens += 1
        return sequence.add(sampled.token_id, sampled.token_logprob(self.tokenizer))

    def _fail(self, sequence: Sequence, error: messages.EngineError) -> StepOutput:
        self.abort(sequence.id)
        return StepOutput(sequence.id, messages.Output(finish_reason="abort"), usage=sequence.usage, error=error)

    def _fail_step(self, sequences: Many[Sequence], why: str) -> list[StepOutput]:
        """After a failed step any KV may be wrong: end `sequences`, recompute all others, clear the
        pool."""
        self._in_flight.clear()
        failed = [
            self._fail(s, messages.EngineFailed(why)) for s in sequences if s.status is not SequenceStatus.FINISHED
        ]
        for sequence in self._sequences.values():
            sequence.in_flight = 0
        for sequence in list(self._scheduler.running):
            self._scheduler.preempt(sequence)
        self._pool.forget_all()
        self.runner.kv.clear()
        if self.draft_model is not None:
            self.draft_model.clear()
        return failed

    def _warm_up(self) -> None:
        """Run a prompt and a few decodes: the first pass of each kind is slow, and predictions need
        a measurement."""
        length = min(64, self.info.context_tokens - 8, self.info.vocabulary_size)
        if length < 1 or self._pool.total * self._pool.block_tokens < length + 8:
            return
        params = messages.SamplingParams(
            temperature=0.0, max_tokens=3 if self.draft_model is None else 6, ignore_eos=True
        )
        for _ in range(2):
            self._timing.forget()
            self.speculator.forget()
            self.submit(range(length), params, salt=b"warm-up")
            while self.has_work:
                self.step()
            self._pool.forget_all()
        self._totals = TokenCounts()
        self.speculator.forget()
