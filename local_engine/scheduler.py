"""Which tokens the next step computes, under a token budget and a finite pool of blocks.

Knows no model. Decodes go first, one token each; then prefills continue, in chunks; then waiting sequences are
admitted in order (priority, then arrival) while the pool has room for their whole prompt. When a sequence needs a
block and there is none, the last in order of those that have no part in this step yet loses its blocks and waits
again: it will be recomputed, mostly from blocks that are still cached.

Invariants: a sequence is waiting or running, never both; the blocks of a chunk exist before the chunk is scheduled; a
full block is registered when the chunk that fills it is scheduled, because within a step every layer writes all of its
KV before it reads any (so sequences of one step share, too).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from local_engine.block_pool import BlockPool
from local_engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + count` (half open) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end == len(self.sequence.tokens)


class Scheduler:
    """The queue, the running set and the rule between them."""

    def __init__(self, pool: BlockPool, *, step_tokens_max: int, sequences_max: int) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._step_tokens_max = step_tokens_max
        self._sequences_max = sequences_max

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that wait to be computed, over waiting and running sequences; prefix hits not foreseen."""
        return sum(s.pending for s in self.waiting) + sum(s.pending for s in self.running if s.pending > 1)

    def add(self, sequence: Sequence) -> None:
        """Queue it in order."""
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=lambda s: s.order)

    def finish(self, sequence: Sequence) -> None:
        """Take it out, wherever it is, and give its blocks back."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.status = Status.FINISHED

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
        ready = sorted(self.running, key=lambda s: (s.pending > 1, s.order))
        while ready and budget > 0:
            sequence = ready.pop(0)
            count = min(sequence.pending, budget)
            if self._find_room(sequence, count, ready):
                chunks.append(self._chunk(sequence, count))
                budget -= count
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
        """Move it to the running set if the pool has room for all of its tokens, with a block to grow for each other."""
        pool = self.pool
        size = pool.block_tokens
        reusable = (len(sequence.tokens) - 1) // size  # one token at least is computed: somebody must give logits
        pool.extend_keys(sequence.keys, sequence.tokens, sequence.salt, reusable)
        reused = pool.match(sequence.keys[:reusable], sequence.tokens, sequence.salt)
        wanted = -(-len(sequence.tokens) // size) - len(reused)
        if self.running and wanted + pool.unused(reused) + len(self.running) > pool.available:
            return False
        pool.hold(reused)
        self.waiting.pop(0)
        sequence.status = Status.RUNNING
        sequence.blocks = reused
        sequence.registered = len(reused)
        sequence.computed = len(reused) * size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self.running.append(sequence)
        return True

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

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        pool, start = self.pool, sequence.computed
        written, full = start // pool.block_tokens, (start + count) // pool.block_tokens
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
        return Chunk(sequence, start, count)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = sequence.registered = 0
