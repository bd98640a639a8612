"""Chooses the tokens that the next step computes, under a token budget and a finite pool of blocks.

Knows no model. Within a priority, decodes go first, one token each with its draft; then prefills
continue, in chunks; then waiting sequences are admitted in order while the pool has room for their
whole prompt and for the expected growth of running answers. If a sequence needs a block and none is
available, the last sequence in order that comes after it and is not yet part of this step loses its
blocks and waits again: it is recomputed, mostly from blocks that are still cached. A sequence also
loses its blocks if a sequence of a better priority waits for its place.

The order: priority; then fair turns between cache salts, by start-time fair queueing (Goyal et al.,
SIGCOMM 1996): a sequence's turn begins at the end of its salt's last turn or at the queue's present
time, whichever is later, and lasts as long as its tokens. So a salt with many sequences waits for
itself, and a returning salt gets no credit for its absence.

Invariants: a sequence is waiting or running, never both; the blocks of a chunk exist before the
chunk is scheduled; a full block is registered when the chunk that fills it is scheduled, because
within a step every layer writes all of its KV before it reads any (so sequences of one step share,
too); a drafted token's block is never registered, and the block of a token in flight only once that
token is known.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection
from dataclasses import replace

from local_engine.block_pool import BlockPool
from local_engine.messages import Overloaded
from local_engine.sequence import Sequence, SequenceStatus, TokenChunk
from local_engine.speculation.speculator import Draft, DraftRequest, Speculator


class Scheduler:
    """The queue, the running set and the policy that moves sequences between them."""

    def __init__(
        self, pool: BlockPool, *, step_tokens_max: int, sequences_max: int, speculator: Speculator | None = None
    ) -> None:
        """`speculator` decides the drafts of decodes; None: no drafts."""
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.step_tokens_max = step_tokens_max
        self.sequences_max = sequences_max
        self._speculator = speculator
        self._now = 0.0  # where the fair order stands: the turn of the last one admitted
        self._turn_ends: dict[tuple[int, bytes], float] = {}
        self.answer_tokens_expected = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def prefill_tokens(self) -> int:
        """The uncomputed prompt tokens of waiting and running sequences; prefix hits are not
        deducted."""
        return sum(s.pending for s in self.waiting) + sum(s.pending for s in self.running if s.pending > 1)

    def check_queue(self, priority: int, cache_salt: bytes, queue_max: int) -> None:
        """Raise Overloaded if no further sequence of that salt and priority may wait.

        The limit is four times the remaining places of `queue_max`, so that a busy salt leaves room
        for others (dynamic thresholds; Choudhury and Hahne, IEEE/ACM Transactions on Networking 6,
        1998).
        """
        own = sum(s.priority == priority and s.cache_salt == cache_salt for s in self.waiting)
        if own >= 4 * (queue_max - len(self.waiting)):
            raise Overloaded(f"{len(self.waiting)} requests wait already, {own} of them of the same partition")

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence in order. A preempted sequence keeps its turn."""
        if sequence.turn < 0.0:
            flow = (sequence.priority, sequence.cache_salt)
            sequence.turn = max(self._now, self._turn_ends.get(flow, 0.0))
            # decision: fair-by-tokens
            self._turn_ends[flow] = sequence.turn + len(sequence.tokens) + sequence.answer_tokens_max
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=lambda s: s.order)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or the running set, and free its blocks."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
            known = self.answer_tokens_expected or sequence.answer_tokens
            self.answer_tokens_expected = known + 0.1 * (sequence.answer_tokens - known)
        sequence.status = SequenceStatus.FINISHED
        if not self.has_work:
            self._now, self._turn_ends = 0.0, {}

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue, at its old place, and free its blocks."""
        self.running.remove(sequence)
        self._release(sequence)
        self.preemptions += 1
        self.add(sequence)

    def schedule(self) -> list[TokenChunk]:
        """The chunks of the next step, in order of priority and decodes first; empty if all are
        idle."""
        chunks: list[TokenChunk] = []
        budget, has_preempted = self.step_tokens_max, False
        # a sequence that loses its place in this step is none
        candidates = set(map(id, self.waiting))
        # an answer may end by the token under way
        able = (s for s in self.running if s.answer_tokens + s.in_flight < s.answer_tokens_max)
        ready = sorted(able, key=lambda s: (s.priority, s.pending > 1, s.order))
        drafts = self._drafts([s for s in ready if s.pending == 1])
        without_room: list[Sequence] = []  # they found no block, and still hold theirs
        while budget > 0:
            newcomer = self._newcomer(candidates, ready, has_preempted)
            if newcomer is not None and not self._admit(newcomer):
                if self._make_way((newcomer.priority, math.inf), ready, without_room):
                    continue
                break
            if newcomer is None and not ready:
                break
            sequence = newcomer or ready.pop(0)
            count, preemptions = min(sequence.pending, budget), self.preemptions
            if self._find_room(sequence, count, ready, without_room):
                draft = self._make_room(sequence, drafts.get(sequence.id), budget - len(ready) - 1)
                chunks.append(self._chunk(sequence, count, draft))
                budget -= chunks[-1].count + chunks[-1].wanted
            else:
                without_room.append(sequence)
            has_preempted = has_preempted or self.preemptions > preemptions
        return chunks

    def check_integrity(self, live: Collection[int]) -> None:
        """Check the invariants of the pool, the queue and the sequences with the ids `live`. Raises
        AssertionError."""
        size = self.pool.block_tokens
        self.pool.check_integrity([sequence.blocks for sequence in self.running])
        queued = self.waiting + self.running
        assert len(queued) == len(set(map(id, queued))), "a sequence is queued twice"
        assert {sequence.id for sequence in queued} == set(live), "a sequence is lost"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"sequence {sequence.id} waits as {sequence.status}"
            assert not sequence.blocks, f"sequence {sequence.id} waits and holds blocks"
            assert sequence.computed == sequence.draft_computed == 0, (
                f"sequence {sequence.id} waits with computed tokens"
            )
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, f"sequence {sequence.id} runs as {sequence.status}"
            assert len(sequence.blocks) * size >= sequence.computed, f"sequence {sequence.id} lacks blocks"
            assert sequence.draft_computed <= sequence.computed, f"sequence {sequence.id} was drafted past its tokens"
            assert sequence.pending >= 1, f"sequence {sequence.id} has nothing to compute"

    def _newcomer(self, candidates: set[int], ready: list[Sequence], has_preempted: bool) -> Sequence | None:
        """The first waiting sequence, if it may be admitted now. With a better priority than all
        `ready` sequences it goes before them. Otherwise it waits until they are scheduled, and for
        a step without a preemption, so that it does not get blocks that were just taken away."""
        head = self.waiting[0] if self.waiting else None
        if head is None or id(head) not in candidates:
            return None
        is_next = head.priority < ready[0].priority if ready else not has_preempted
        return head if is_next else None

    def _place_for(self, sequence: Sequence) -> list[int] | None:
        """The blocks that the sequence could reuse, or None unless the pool has room for all of its
        tokens and for the growth of the running sequences."""
        pool = self.pool
        size = pool.block_tokens
        if len(self.running) >= self.sequences_max:
            return None
        # one token at least is computed, for its logits
        reusable = (len(sequence.tokens) - 1) // size
        if sequence.wants_prompt_logprobs:
            reusable = 0  # every token is computed
        pool.extend_keys(sequence.keys, sequence.tokens, sequence.cache_salt, reusable)
        reused = pool.match(sequence.keys[:reusable])
        wanted = -(-len(sequence.tokens) // size) - len(reused)
        if self.running and wanted + pool.unused(reused) + self._growth() > pool.available:
            return None
        return reused

    def _admit(self, sequence: Sequence) -> bool:
        """Move the first waiting sequence to the running set; returns False if the pool or the set
        is full."""
        reused = self._place_for(sequence)
        if reused is None:
            return False
        self.pool.hold(reused)
        self.waiting.remove(sequence)
        self._now = max(self._now, sequence.turn)
        sequence.status = SequenceStatus.RUNNING
        sequence.blocks = reused
        sequence.registered = len(reused)
        sequence.computed = len(reused) * self.pool.block_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self.running.append(sequence)
        return True

    def _growth(self) -> int:
        """The blocks that running sequences are expected to need: for the rest of their prompts,
        and for answers of the recent length, or a block for each answer that is already longer."""
        size = self.pool.block_tokens
        blocks = 0
        for sequence in self.running:
            left = max(size, self.answer_tokens_expected - sequence.answer_tokens)
            tokens = len(sequence.tokens) + min(left, sequence.answer_tokens_max - sequence.answer_tokens)
            blocks += max(1, -(-int(tokens) // size) - len(sequence.blocks))
        return blocks

    def _drafts(self, decoding: list[Sequence]) -> dict[int, Draft]:
        """The drafts to verify with a step's decodes, within their answers' limits."""
        if self._speculator is None:
            return {}
        requests = [
            DraftRequest(
                id=s.id,
                speculation=s.speculation,
                tokens=s.tokens,
                room=s.answer_tokens_max - s.answer_tokens - s.in_flight - 1,
                in_flight=s.in_flight,
                draft_computed=s.draft_computed,
            )
            for s in decoding
            if s.speculation is not None
        ]
        return self._speculator.plan(len(decoding), requests) if requests else {}

    def _make_room(self, sequence: Sequence, draft: Draft | None, budget: int) -> Draft | None:
        """The beginning of the draft that fits the budget and free blocks: drafts must not evict a
        block."""
        if draft is None:
            return None
        size, known_tokens = self.pool.block_tokens, len(sequence.tokens) + sequence.in_flight
        spare_blocks = max(0, self.pool.free - len(self.running))
        if sequence.grammar is not None:
            draft = replace(draft, tokens=sequence.grammar.part(draft.tokens))
        draft = draft.part(min(budget, (len(sequence.blocks) + spare_blocks) * size - known_tokens))
        if draft is not None:
            wanted = -(-(known_tokens + len(draft.tokens) + draft.wanted) // size) - len(sequence.blocks)
            sequence.blocks.extend(self.pool.allocate() for _ in range(wanted))
        return draft

    def _find_room(self, sequence: Sequence, count: int, *queues: list[Sequence]) -> bool:
        """Allocate blocks for `count` more tokens; returns False without room. If blocks are short,
        sequences of `queues` that come later in order are preempted."""
        blocks_needed = -(-(sequence.computed + count) // self.pool.block_tokens) - len(sequence.blocks)
        while blocks_needed > self.pool.available:
            if not self._make_way(sequence.order, *queues):
                return False
        sequence.blocks.extend(self.pool.allocate() for _ in range(blocks_needed))
        return True

    def _make_way(self, order: tuple[float, ...], *queues: list[Sequence]) -> bool:
        """Preempt the last of `queues`, if it comes after `order`; returns whether it did."""
        victim = max((s for queue in queues for s in queue if s.order > order), key=lambda s: s.order, default=None)
        if victim is None:
            return False
        for queue in queues:
            if victim in queue:
                queue.remove(victim)
        self.preempt(victim)
        return True

    def _chunk(self, sequence: Sequence, count: int, draft: Draft | None = None) -> TokenChunk:
        pool, start = self.pool, sequence.computed
        written_blocks, full_blocks = (
            start // pool.block_tokens,
            min(start + count, len(sequence.tokens)) // pool.block_tokens,
        )
        if sequence.registered < full_blocks:
            pool.extend_keys(sequence.keys, sequence.tokens, sequence.cache_salt, full_blocks)
        while sequence.registered < full_blocks:
            blocks, index = sequence.blocks, sequence.registered
            block = blocks[index]
            if not pool.register(blocks, index, sequence.keys, is_written=index < written_blocks):
                break
            if blocks[index] != block:  # another's, where the draft model may lack KV
                sequence.draft_computed = min(sequence.draft_computed, index * pool.block_tokens)
            sequence.registered += 1
        logit_rows = 1 if count == sequence.pending else 0
        if sequence.wants_prompt_logprobs:
            logit_rows = count
        if draft is None:
            return TokenChunk(sequence, start, count, logit_rows)
        more = len(draft.tokens)
        return TokenChunk(
            sequence, start, count + more, logit_rows + more, draft=draft.tokens, kind=draft.kind, wanted=draft.wanted
        )

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = sequence.registered = sequence.draft_computed = 0
