"""TorchExecutor: a step by torch's own kernels, on any device: the plain path, and the oracle of
the others.

Decodes are computed in groups of sequences of similar length, prompts' chunks one by one. Knows no
queues and no sampling. Invariant: it reads a sequence (tokens, blocks) and never changes it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from local_engine.attention import DecodeGroup, PrefillSpan, TorchKV
from local_engine.executors.rows import Longs, step_input
from local_engine.models.decoder import Decoder
from local_engine.sequence import Chunk
from local_engine.step_in_flight import StepInFlight


class TorchExecutor:
    """Runs a loaded model's steps; `kv` is its pools."""

    def __init__(self, decoder: Decoder, *, blocks: int, block_tokens: int) -> None:
        model = decoder.config
        self.kv = TorchKV(model, blocks=blocks, block_tokens=block_tokens, dtype=decoder.dtype, device=decoder.device)
        self._decoder, self._device = decoder, decoder.device
        self._group = model.heads // model.kv_heads

    @torch.inference_mode()
    def run(self, chunks: Many[Chunk], before: StepInFlight | None) -> torch.Tensor:
        """The logits [sum of their logit_rows, vocabulary], in the order of the chunks."""
        # single rows first, those of the longest sequences before others
        ordered = sorted(chunks, key=lambda chunk: (chunk.count > 1, -len(chunk.sequence.blocks)))
        single = [chunk for chunk in ordered if chunk.count == 1]
        decodes, prefills = self._groups(single), self._spans(ordered[len(single) :], len(single))
        return self._decoder(step_input(chunks, ordered, before, self.kv, decodes=decodes, prefills=prefills), self.kv)

    def _spans(self, chunks: Many[Chunk], at: int) -> tuple[PrefillSpan, ...]:
        """Chunks of several tokens; their rows begin at `at`."""
        spans = []
        for chunk in chunks:
            own = torch.arange(chunk.start, chunk.end, device=self._device).unsqueeze(1)
            blocks = np.array(chunk.sequence.blocks[: -(-chunk.end // self.kv.block_tokens)], np.int64)
            spans.append(
                PrefillSpan(
                    start=at,
                    stop=at + chunk.count,
                    tokens=chunk.end,
                    blocks=self._to_device(blocks),
                    masks=tuple(mask.repeat(self._group, 1) for mask in self._masks(own, chunk.end)),
                )
            )
            at += chunk.count
        return tuple(spans)

    def _groups(self, chunks: Many[Chunk]) -> tuple[DecodeGroup, ...]:
        """Sequences, longest first, in groups: padding at most doubles the work of each."""
        groups: list[DecodeGroup] = []
        first = 0
        for index in range(len(chunks) + 1):
            is_end = index == len(chunks)
            if is_end or 2 * len(chunks[index].sequence.blocks) < len(chunks[first].sequence.blocks):
                if index > first:
                    groups.append(self._decode_group(chunks[first:index], first))
                first = index
        return tuple(groups)

    def _decode_group(self, chunks: Many[Chunk], at: int) -> DecodeGroup:
        size = self.kv.block_tokens
        width = max(-(-chunk.end // size) for chunk in chunks)
        blocks = np.zeros((len(chunks), width), np.int64)
        own_positions = np.empty((len(chunks), 1), np.int64)
        for row, chunk in enumerate(chunks):
            own = chunk.sequence.blocks[:width]
            blocks[row, : len(own)] = own
            own_positions[row] = chunk.start
        return DecodeGroup(
            start=at,
            stop=at + len(chunks),
            blocks=self._to_device(blocks.reshape(-1)),
            masks=tuple(mask.unsqueeze(1) for mask in self._masks(self._to_device(own_positions), width * size)),
        )

    def _masks(self, own: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """Additive masks for the scores of queries at positions `own` [rows, 1] over `tokens` keys,
        one per window."""
        seen = torch.arange(tokens, device=self._device)
        is_future = seen > own
        masks = []
        for window in self.kv.windows:
            hidden = is_future | (seen <= own - window) if window else is_future
            mask = torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=self._device)
            masks.append(mask.masked_fill_(hidden, -torch.inf))
        return masks

    def _to_device(self, array: Longs) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
