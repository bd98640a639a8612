"""Which tokens the next step computes, under a token budget and a finite pool of blocks.

Knows no model. Decodes go first, one token each and what was drafted after it; then prefills continue, in chunks; then
waiting sequences are admitted in order while the pool has room for their whole prompt and for what the answers that run
are expected to grow. When a sequence needs a block and there is none, the last in order of those that have no part in
this step yet loses its blocks and waits again: it will be recomputed, mostly from blocks that are still cached.

The order: priority; then fair turns between salts, by start-time fair queueing (Goyal et al., SIGCOMM 1996): a sequence's
turn begins where its salt's last one ended or where the queue stands now, whichever is later, and lasts as long as its
tokens. So a salt that sends much waits for itself, and one that comes back gets no credit for having been away.

Invariants: a sequence is waiting or running, never both; the blocks of a chunk exist before the chunk is scheduled; a
full block is registered when the chunk that fills it is scheduled, because within a step every layer writes all of its
KV before it reads any (so sequences of one step share, too); what is drafted is never registered, and a token that is
under way not before it is known.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from local_engine.block_pool import BlockPool
from local_engine.messages import DeadlineExceeded, EngineError, Overloaded
from local_engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + count` (half open) of a sequence, to be computed in this step; the last of them are
    `draft`, guesses at what follows its tokens. `logit_rows`: how many of the last ones need logits."""

    sequence: Sequence
    start: int
    count: int
    logit_rows: int
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end - len(self.draft) == len(self.sequence.tokens) + self.sequence.in_flight

    @property
    def tokens(self) -> list[int]:
        """Its token ids; 0 for the one that a step under way will give."""
        known = self.sequence.tokens[self.start : self.end - len(self.draft)]
        return [*known, *[0] * (self.count - len(self.draft) - len(known)), *self.draft]


class Scheduler:
    """The queue, the running set and the rule between them."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        step_tokens_max: int,
        sequences_max: int,
        draft_cost: Callable[[int, int], float] = lambda rows, more: 1.0,
    ) -> None:
        """`draft_cost`: the time of a step of so many rows with so many more, in times of one without them."""
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._step_tokens_max = step_tokens_max
        self._sequences_max = sequences_max
        self._draft_cost = draft_cost
        self._now = 0.0  # where the fair order stands: the turn of the last one admitted
        self._turn_ends: dict[tuple[int, bytes], float] = {}
        self._answer_tokens_expected = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that wait to be computed, over waiting and running sequences; prefix hits not foreseen."""
        return sum(s.pending for s in self.waiting) + sum(s.pending for s in self.running if s.pending > 1)

    def add(self, sequence: Sequence) -> None:
        """Queue it in order. One that comes back keeps its turn."""
        if sequence.turn < 0.0:
            flow = (sequence.priority, sequence.salt)
            sequence.turn = max(self._now, self._turn_ends.get(flow, 0.0))
            self._turn_ends[flow] = sequence.turn + len(sequence.tokens) + sequence.answer_tokens_max
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=lambda s: s.order)

    def finish(self, sequence: Sequence) -> None:
        """Take it out, wherever it is, and give its blocks back."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
            self._answer_tokens_expected += 0.1 * (sequence.answer_tokens - self._answer_tokens_expected)
        sequence.status = Status.FINISHED
        if not self.has_work:
            self._now, self._turn_ends = 0.0, {}

    def overdue(self, now: float, wait_max_s: float | None) -> list[tuple[Sequence, EngineError]]:
        """Those whose deadline is over, and those that never ran and waited for longer than anybody should."""
        late: list[tuple[Sequence, EngineError]] = []
        for sequence in self.waiting + self.running:
            if sequence.deadline is not None and sequence.deadline <= now:
                late.append((sequence, DeadlineExceeded("the deadline passed")))
            elif wait_max_s is not None and sequence.cached_tokens is None and now - sequence.submitted_s > wait_max_s:
                late.append((sequence, Overloaded(f"no place was free within {wait_max_s:g} s")))
        return late

    def preempt(self, sequence: Sequence) -> None:
        """Back into the queue, at its old place, without its blocks."""
        self.running.remove(sequence)
        self._release(sequence)
        self.preemptions += 1
        self.add(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, decodes first; empty when there is nothing to do."""
        chunks: list[Chunk] = []
        budget = self._step_tokens_max
        preemptions = self.preemptions
        ready = sorted((s for s in self.running if s.has_room), key=lambda s: (s.pending > 1, s.order))
        while ready and budget > 0:
            sequence = ready.pop(0)
            count = min(sequence.pending, budget)
            if self._find_room(sequence, count, ready):
                draft = self._draft(sequence, budget - len(ready) - 1)
                chunks.append(self._chunk(sequence, count, draft))
                budget -= count + len(draft)
        while budget > 0 and self.waiting and len(self.running) < self._sequences_max:
            if self.preemptions > preemptions or not self._admit(self.waiting[0]):
                break
            sequence = self.running[-1]
            count = min(sequence.pending, budget)
            if not self._find_room(sequence, count, []):
                break
            chunks.append(self._chunk(sequence, count))
            budget -= count
        return chunks

    def _admit(self, sequence: Sequence) -> bool:
        """Move it to the running set if the pool has room for all of its tokens, and for what runs to grow."""
        pool = self.pool
        size = pool.block_tokens
        reusable = (len(sequence.tokens) - 1) // size  # one token at least is computed: somebody must give logits
        if sequence.wants_prompt_logprobs:
            reusable = 0  # and here every token must
        pool.extend_keys(sequence.keys, sequence.tokens, sequence.salt, reusable)
        reused = pool.match(sequence.keys[:reusable], sequence.tokens, sequence.salt)
        wanted = -(-len(sequence.tokens) // size) - len(reused)
        if self.running and wanted + pool.unused(reused) + self._growth() > pool.available:
            return False
        pool.hold(reused)
        self.waiting.pop(0)
        self._now = max(self._now, sequence.turn)
        sequence.status = Status.RUNNING
        sequence.blocks = reused
        sequence.registered = len(reused)
        sequence.computed = len(reused) * size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self.running.append(sequence)
        return True

    def _growth(self) -> int:
        """Blocks that running sequences are expected to need yet: their prompts' rest, and answers as long as answers
        have been of late, or a block each where they are longer already."""
        size = self.pool.block_tokens
        blocks = 0
        for sequence in self.running:
            left = max(size, self._answer_tokens_expected - sequence.answer_tokens)
            tokens = len(sequence.tokens) + min(left, sequence.answer_tokens_max - sequence.answer_tokens)
            blocks += max(1, -(-int(tokens) // size) - len(sequence.blocks))
        return blocks

    def _draft(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """Guesses to verify with a decode: as many as the budget, free blocks and the answer's limit leave room for."""
        if sequence.speculation is None or sequence.pending != 1:
            return ()
        size = self.pool.block_tokens
        unknown = sequence.in_flight
        room = min(budget, sequence.answer_tokens_max - sequence.answer_tokens - unknown - 1)
        spare = max(0, self.pool.free - len(self.running))  # a guess must cost nobody a block
        room = min(room, (len(sequence.blocks) + spare) * size - len(sequence.tokens) - unknown)
        rows = len(self.running)
        draft = sequence.speculation.draft(sequence.tokens, room + unknown, lambda more: self._draft_cost(rows, more))
        draft = draft[unknown:]  # the token under way was guessed as well
        if draft:
            wanted = -(-(len(sequence.tokens) + unknown + len(draft)) // size) - len(sequence.blocks)
            sequence.blocks.extend(self.pool.allocate() for _ in range(wanted))
        return draft

    def _find_room(self, sequence: Sequence, count: int, victims: list[Sequence]) -> bool:
        """Allocate the blocks for `count` more tokens, at the cost of `victims` (last in order first) if need be."""
        wanted = -(-(sequence.computed + count) // self.pool.block_tokens) - len(sequence.blocks)
        while wanted > self.pool.available:
            if not victims:
                return False
            victim = max(victims, key=lambda s: s.order)
            victims.remove(victim)
            self.preempt(victim)
        sequence.blocks.extend(self.pool.allocate() for _ in range(wanted))
        return True

    def _chunk(self, sequence: Sequence, count: int, draft: tuple[int, ...] = ()) -> Chunk:
        pool, start = self.pool, sequence.computed
        written, full = start // pool.block_tokens, min(start + count, len(sequence.tokens)) // pool.block_tokens
        if sequence.registered < full:
            pool.extend_keys(sequence.keys, sequence.tokens, sequence.salt, full)
        while sequence.registered < full and pool.register(
            sequence.blocks,
            sequence.registered,
            sequence.keys,
            sequence.tokens,
            sequence.salt,
            is_written=sequence.registered < written,
        ):
            sequence.registered += 1
        logit_rows = 1 + len(draft) if count == sequence.pending else 0
        if sequence.wants_prompt_logprobs:
            logit_rows = count
        return Chunk(sequence, start, count + len(draft), logit_rows, draft)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = sequence.registered = 0
