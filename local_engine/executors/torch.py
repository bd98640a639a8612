"""TorchExecutor: a step by torch's own kernels, on any device: the simple path, and the oracle of
the other executors.

Decodes are computed in groups of sequences of similar length, prompts' chunks one by one. Knows no
queues and no sampling. Invariant: it reads a sequence (tokens, blocks) and never changes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many

import numpy as np
import torch

from local_engine.attention import RowGroup, TorchKV
from local_engine.executors.rows import step_input
from local_engine.kernels.copies import on_device
from local_engine.models.decoder import Decoder
from local_engine.sequence import TokenChunk
from local_engine.step_in_flight import StepInFlight


class TorchExecutor:
    """Runs a loaded model's steps; `kv` is its pools."""

    def __init__(self, decoder: Decoder, *, blocks: int, block_tokens: int) -> None:
        model = decoder.config
        self.kv = TorchKV(model, blocks=blocks, block_tokens=block_tokens, dtype=decoder.dtype, device=decoder.device)
        self._decoder, self._device = decoder, decoder.device
        self._queries_per_head = model.attention.heads // model.attention.kv_heads

    @torch.inference_mode()
    def run(self, chunks: Many[TokenChunk], before: StepInFlight | None) -> torch.Tensor:
        """The logits [sum of their logit_rows, vocabulary], in the order of the chunks."""
        # single rows first, those of the longest sequences before others
        ordered = sorted(chunks, key=lambda chunk: (chunk.count > 1, -len(chunk.sequence.blocks)))
        return self._decoder(step_input(chunks, ordered, before, self.kv, groups=self._groups(ordered)), self.kv)

    def _groups(self, chunks: Many[TokenChunk]) -> tuple[RowGroup, ...]:
        """Group decodes so that padding at most doubles the work of each; other chunks stay alone."""
        runs: list[list[TokenChunk]] = []
        for chunk in chunks:
            first = runs[-1][0] if runs else None
            is_alike = first is not None and 2 * len(chunk.sequence.blocks) >= len(first.sequence.blocks)
            if first is not None and is_alike and first.count == chunk.count == 1:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        starts = itertools.accumulate((sum(chunk.count for chunk in run) for run in runs), initial=0)
        return tuple(self._group(run, start) for run, start in zip(runs, starts, strict=False))

    def _group(self, chunks: list[TokenChunk], start: int) -> RowGroup:
        size, rows = self.kv.block_tokens, chunks[0].count
        width = max(-(-chunk.end // size) for chunk in chunks)
        blocks = np.zeros((len(chunks), width), np.int64)
        for table, chunk in zip(blocks, chunks, strict=True):
            held = chunk.sequence.blocks[:width]
            table[: len(held)] = held
        positions = np.array([range(chunk.start, chunk.end) for chunk in chunks], np.int64)
        masks = self._masks(on_device(positions, self._device), width * size)
        queries = self._queries_per_head if rows > 1 else 1
        repeated = tuple(mask.repeat(1, queries, 1) for mask in masks)
        return RowGroup(start, rows, on_device(blocks, self._device), repeated)

    def _masks(self, positions: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """Additive masks [sequences, rows, tokens] for the scores of queries at `positions`
        [sequences, rows], one per window."""
        query, key = positions.unsqueeze(-1), torch.arange(tokens, device=self._device)
        is_future = key > query
        masks = []
        for window in self.kv.windows:
            hidden = is_future | (key <= query - window) if window else is_future
            mask = torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=self._device)
            masks.append(mask.masked_fill_(hidden, -torch.inf))
        return masks
