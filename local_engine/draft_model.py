"""DraftModel: a smaller model with the same tokenizer that drafts the large model's next tokens
(arXiv:2211.17192).

Its KV lies in a separate pool under the large model's block ids, so sharing, eviction and
preemption are decided once. It falls behind while no drafts are wanted, and catches up when they
are. Knows sequences and logits, no queue. Invariants: it changes no token and no block table, only
its own pool and `Sequence.draft_computed`; drafts are drawn with the noise of their places, so they
are accepted as often as the two models' distributions allow (see `sampler`). Stale KV in its blocks
is harmless: drafts are then worse, and answers the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Many

import torch

from local_engine.checkpoints.checkpoint import Checkpoint
from local_engine.checkpoints.open import open_checkpoint
from local_engine.config import EngineConfig, ModelError
from local_engine.runner import ModelRunner, Progress
from local_engine.sampler import draw
from local_engine.sequence import Place, Sequence, TokenChunk
from local_engine.speculation.timing import Moment, StepTiming
from local_engine.text.tokenizer import Tokenizer


def check_tokenizers(draft: Tokenizer, main: Tokenizer, draft_name: str, main_name: str) -> None:
    """Raise ModelError with the first token that differs: drafts in another vocabulary are useless."""
    for id in range(min(draft.size, main.size)):
        if draft.spell(id) != main.spell(id) or draft.is_special(id) != main.is_special(id):
            raise ModelError(
                f"the draft model {draft_name} has another tokenizer than {main_name}: "
                f"token {id} is {draft.spell(id)!r} there and {main.spell(id)!r} here"
            )


def open_draft(config: EngineConfig, main: Checkpoint, progress: Progress) -> ModelRunner | None:
    """The runner of the configured draft model for `main`, without its pool, which comes with
    `main`'s; None if no draft model is configured. Raises ModelError."""
    if config.draft_model is None:
        return None
    checkpoint = open_checkpoint(config.draft_model)
    check_tokenizers(checkpoint.tokenizer, main.tokenizer, checkpoint.config.name, main.config.name)
    config = dataclasses.replace(config, is_batch_invariant=False)
    return ModelRunner(
        config, checkpoint, lambda fraction, stage: progress(0.0, "reading the draft model"), is_draft=True
    )


class DraftModel:
    """Drafts on a separate runner, whose pool has as many blocks as the large model's. It reports
    the time of its steps to `timing`; `step_tokens_max` bounds the tokens that it catches up in one
    step."""

    def __init__(self, runner: ModelRunner, vocabulary: int, step_tokens_max: int, timing: StepTiming) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._step_tokens_max = step_tokens_max
        self._timing = timing
        # blocks with the KV of all of their tokens here, and their keys then
        self._whole: dict[int, bytes] = {}

    def clear(self) -> None:
        """Clear the pool: any KV may be wrong."""
        self._whole.clear()
        self._runner.kv.clear()

    def fill(self, chunks: list[TokenChunk]) -> list[TokenChunk]:
        """The chunks with their drafts. A sequence that the draft model has not caught up with gets
        an empty draft."""
        if not any(chunk.wanted for chunk in chunks):
            return chunks
        guesses = self._guess([chunk for chunk in chunks if chunk.wanted])
        return [
            chunk.with_draft(tuple(guesses.get(chunk.sequence.id, ()))) if chunk.wanted else chunk for chunk in chunks
        ]

    def _guess(self, wanting: Many[TokenChunk]) -> dict[int, list[int]]:
        """Draft token after token, all sequences at once; each until it has enough tokens or would
        end."""
        guesses: dict[int, list[int]] = {}
        wanted_by_id = {chunk.sequence.id: chunk.wanted for chunk in wanting}
        chunks = self._catch_up([chunk.sequence for chunk in wanting])
        ahead = 0
        while chunks:
            ready = [chunk.sequence for chunk in chunks if chunk.logit_rows]
            start = Moment.now()
            logits = self._runner.run(chunks)
            ids = draw(self._fit(logits), [Place(sequence, ahead) for sequence in ready]) if ready else []
            busy_s = Moment.now().busy_s(start, is_device_here=not self._runner.is_asynchronous)
            self._timing.draft_steps.observe(sum(chunk.count for chunk in chunks), busy_s)
            for chunk in chunks:
                self._note(chunk)
            chunks = []
            ahead += 1
            for sequence, id in zip(ready, ids, strict=True):
                if id is not None:
                    guesses.setdefault(sequence.id, []).append(id)
                    if ahead < wanted_by_id[sequence.id] and id not in sequence.stop_token_ids:
                        chunks.append(TokenChunk(sequence, len(sequence.tokens) + ahead - 1, 1, 1, (id,)))
        return guesses

    def _catch_up(self, sequences: Many[Sequence]) -> list[TokenChunk]:
        """The sequences' tokens that it has not computed yet, as many as one step takes; logits for
        sequences that are then caught up."""
        chunks = []
        budget = self._step_tokens_max
        for sequence in sequences:
            self._reuse(sequence)
            count = min(sequence.pending_draft, budget)
            if count > 0:
                chunks.append(
                    TokenChunk(sequence, sequence.draft_computed, count, int(count == sequence.pending_draft))
                )
                budget -= count
        return chunks

    def _reuse(self, sequence: Sequence) -> None:
        """Skip the KV that another sequence left in the sequence's blocks."""
        size = self._runner.kv.block_tokens
        while sequence.draft_computed % size == 0:
            index = sequence.draft_computed // size
            if index >= sequence.registered or self._whole.get(sequence.blocks[index]) != sequence.keys[index]:
                return
            sequence.draft_computed += size

    def _note(self, chunk: TokenChunk) -> None:
        """Record the blocks that a chunk has written."""
        sequence, size = chunk.sequence, self._runner.kv.block_tokens
        sequence.draft_computed = chunk.end
        for index in range(chunk.start // size, -(-chunk.end // size)):
            if index < min(chunk.end // size, sequence.registered):
                self._whole[sequence.blocks[index]] = sequence.keys[index]
            else:
                self._whole.pop(sequence.blocks[index], None)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Fit logits to the large model's vocabulary: checkpoints pad theirs to different sizes."""
        missing = self._vocabulary - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocabulary]
