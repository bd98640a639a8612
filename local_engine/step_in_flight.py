"""StepInFlight: one step from its launch until its drawn tokens have arrived.

An asynchronous device gets the next step before the host has seen the tokens of this one. Knows
chunks, logits and places; no queues and no answers. Invariant: draws depend on the sequences as
they were at the launch, alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

from local_engine.grammar import GrammarState, Masks
from local_engine.kernels.supports import supports
from local_engine.messages import TokenLogprob
from local_engine.sampler import Drawn, HostDrawn, candidates, sample
from local_engine.sequence import Place, Sampled, TokenChunk
from local_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from local_engine.speculation.timing import Moment


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """One launched step. `chunks` and the draws after each: `counts` places of `drawn`, which may
    still be in flight. `began`: when the scheduling of the step began."""

    chunks: Many[TokenChunk]
    counts: Many[int]
    drawn: Drawn
    began: Moment

    @property
    def decides_next(self) -> bool:
        """Whether this step must land before the next can be scheduled: an accepted draft decides
        where the next token stands, penalties count every token, and a grammar reads it."""
        drawn = [chunk.sequence for chunk, count in self._counted() if count]
        return any(one.has_penalties or one.grammar is not None for one in drawn) or any(c.draft for c in self.chunks)

    def places(self) -> dict[int, int]:
        """The index in `drawn` of each sequence's next token, by the sequence's id."""
        starts = itertools.accumulate(self.counts, initial=0)
        return {
            chunk.sequence.id: start for (chunk, count), start in zip(self._counted(), starts, strict=False) if count
        }

    def land(self) -> list[list[Sampled]]:
        """Wait for the tokens drawn after each chunk."""
        drawn = iter(self.drawn.read())
        return [[next(drawn) for _ in range(count)] for count in self.counts]

    def _counted(self) -> zip[tuple[TokenChunk, int]]:
        return zip(self.chunks, self.counts, strict=True)


def held(chunks: Many[TokenChunk]) -> list[tuple[GrammarState, tuple[int, ...]]]:
    """The grammar and the draft of each chunk with a grammar, in the order of `draw`."""
    return [
        (chunk.sequence.grammar, chunk.draft)
        for chunk in chunks
        if chunk.sequence.grammar is not None and chunk.is_last
    ]


def draw(
    chunks: Many[TokenChunk], logits: torch.Tensor, tokenizer: Tokenizer, began: Moment, masks: Masks | None = None
) -> StepInFlight:
    """Draw for each chunk at its places: after its last token and after each token of its draft.
    Requested log probabilities of prompts are kept."""
    places: list[Place] = []
    rows: list[int] = []
    counts: list[int] = []
    first_row = 0
    for chunk in chunks:
        stop = first_row + chunk.logit_rows
        if chunk.sequence.wants_prompt_logprobs:
            chunk.sequence.prompt_logprobs += _prompt_logprobs(chunk, logits[first_row:stop], tokenizer)
        ahead_of_last = range(len(chunk.draft) + 1 if chunk.is_last else 0)
        places += [Place(chunk.sequence, ahead) for ahead in ahead_of_last]
        rows += range(stop - len(ahead_of_last), stop)
        counts.append(len(ahead_of_last))
        first_row = stop
    return StepInFlight(chunks, counts, _drawn(logits, rows, places, masks), began)


def _drawn(logits: torch.Tensor, rows: list[int], places: list[Place], masks: Masks | None) -> Drawn:
    if places and supports(logits.device, "draw"):
        from local_engine.gpu_sampler import sample as sample_there

        return sample_there(logits, rows, places, masks)
    sampled = sample(logits if len(rows) == len(logits) else logits[rows], places, masks) if places else []
    return HostDrawn(sampled, logits.device)


def _prompt_logprobs(chunk: TokenChunk, logits: torch.Tensor, tokenizer: Tokenizer) -> list[TokenLogprob]:
    sequence = chunk.sequence
    # the row at position p predicts token p + 1; known are those up to first
    first = len(sequence.prompt_logprobs) - 1
    stop = min(chunk.end, sequence.prompt_tokens - 1)
    if not stop > first >= chunk.start:
        return []
    ids = sequence.tokens[first + 1 : stop + 1]
    wanted = sequence.params.prompt_logprobs or 0
    found = candidates(logits[first - chunk.start : stop - chunk.start], ids, [wanted] * len(ids))
    return [spelled for one in found if (spelled := one.token_logprob(tokenizer)) is not None]
