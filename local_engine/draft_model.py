"""DraftModel: a smaller model with the same tokenizer that guesses the large one's next tokens
(arXiv:2211.17192).

Its KV lies in a pool of its own under the large one's block ids, so sharing, eviction and
preemption are decided once. It falls behind where no guesses are wanted for a while, and catches up
when they are. Knows sequences and logits, no queue. Invariants: it changes no token and no block
table, only what lies in its own pool and `Sequence.foreseen`; guesses are drawn with the noise of
the places they are for, so they are right as often as the two models' distributions allow (see
`sampler`). A block's KV here may be stale without harm: then guesses are worse, and answers the
same.
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
    """Raises ModelError with the first token that differs: guesses in another vocabulary are
    useless."""
    for id in range(min(draft.size, main.size)):
        if draft.spell(id) != main.spell(id) or draft.is_special(id) != main.is_special(id):
            raise ModelError(
                f"the draft model {draft_name} has another tokenizer than {main_name}: "
                f"token {id} is {draft.spell(id)!r} there and {main.spell(id)!r} here"
            )


def open_draft(config: EngineConfig, main: Checkpoint, progress: Progress) -> ModelRunner | None:
    """The weights of the model that is to draft for `main`, if one is; its pool comes with that of
    `main`. Raises ModelError."""
    if config.draft_model is None:
        return None
    checkpoint = open_checkpoint(config.draft_model)
    check_tokenizers(checkpoint.tokenizer, main.tokenizer, checkpoint.config.name, main.config.name)
    config = dataclasses.replace(config, is_batch_invariant=False)
    return ModelRunner(
        config, checkpoint, lambda fraction, stage: progress(0.0, "reading the draft model"), is_draft=True
    )


class DraftModel:
    """Guesses on a runner of its own, whose pool has as many blocks as the large model's. It
    reports the time of its steps to `timing`; `step_tokens_max` bounds the tokens that one step
    catches up."""

    def __init__(self, runner: ModelRunner, vocabulary: int, step_tokens_max: int, timing: StepTiming) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._step_tokens_max = step_tokens_max
        self._timing = timing
        # blocks with the KV of all of their tokens here, and their keys then
        self._whole: dict[int, bytes] = {}

    def clear(self) -> None:
        """Forget everything: any KV may be wrong."""
        self._whole.clear()
        self._runner.kv.clear()

    def fill(self, chunks: list[TokenChunk]) -> list[TokenChunk]:
        """The chunks with their guesses. A sequence that the draft model has yet to catch up with
        gets an empty draft."""
        if not any(chunk.wanted for chunk in chunks):
            return chunks
        guesses = self._guess([chunk for chunk in chunks if chunk.wanted])
        return [
            chunk.with_draft(tuple(guesses.get(chunk.sequence.id, ()))) if chunk.wanted else chunk for chunk in chunks
        ]

    def _guess(self, wanting: Many[TokenChunk]) -> dict[int, list[int]]:
        """Token after token, all sequences at once; each until it has enough guesses or would
        end."""
        guesses: dict[int, list[int]] = {}
        wanted = {chunk.sequence.id: chunk.wanted for chunk in wanting}
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
                    if ahead < wanted[sequence.id] and id not in sequence.stop_token_ids:
                        chunks.append(TokenChunk(sequence, len(sequence.tokens) + ahead - 1, 1, 1, (id,)))
        return guesses

    def _catch_up(self, sequences: Many[Sequence]) -> list[TokenChunk]:
        """The sequences' tokens that it has not seen yet, as many as one step takes; logits for
        those that are then even."""
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
        """Skip the KV that another sequence left in its blocks."""
        size = self._runner.kv.block_tokens
        while sequence.draft_computed % size == 0:
            index = sequence.draft_computed // size
            if index >= sequence.registered or self._whole.get(sequence.blocks[index]) != sequence.keys[index]:
                return
            sequence.draft_computed += size

    def _note(self, chunk: TokenChunk) -> None:
        """Note the blocks that a chunk has written."""
        sequence, size = chunk.sequence, self._runner.kv.block_tokens
        sequence.draft_computed = chunk.end
        for index in range(chunk.start // size, -(-chunk.end // size)):
            if index < min(chunk.end // size, sequence.registered):
                self._whole[sequence.blocks[index]] = sequence.keys[index]
            else:
                self._whole.pop(sequence.blocks[index], None)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits for the large model's vocabulary: checkpoints pad theirs to different sizes."""
        missing = self._vocabulary - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocabulary]
