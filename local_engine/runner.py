"""ModelRunner: scheduled chunks in, logits out.

Owns the weights and the KV pools; turns a schedule into the tensors of one step. Knows nothing of queues, sampling or
text. Invariant: it reads a sequence (tokens, blocks) and never changes it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
import torch

from local_engine import machine
from local_engine.attention import DecodeGroup, PagedKV, PagedRows, PrefillSpan, StepInput, block_size_bytes
from local_engine.checkpoints.checkpoint import Checkpoint
from local_engine.config import EngineConfig, ModelConfig, ModelError
from local_engine.executors.native import native_step
from local_engine.kernels import supports
from local_engine.kernels.cpu import lack, native_for
from local_engine.models.decoder import Decoder
from local_engine.sequence import Chunk
from local_engine.step_in_flight import Flight
from local_engine.weights import scaled

if TYPE_CHECKING:
    from local_engine.executors.gpu import GpuSteps, TritonKV

_SPAN_TOKENS = 256  # what of a shared prefix the native kernel looks at in one piece
_log = logging.getLogger(__name__)
Progress = Callable[[float, str], None]


class ModelRunner:
    """A loaded model with room for `kv.blocks` blocks of KV. `context_tokens` is what fits of the model's context.

    A model that drafts (`is_draft`) gets its pool with the one it drafts for (`draft`): blocks of the same ids, from the same
    memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress,
        *,
        draft: ModelRunner | None = None,
        is_draft: bool = False,
    ) -> None:
        self.device = machine.choose_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # where this thread's kernels and events go
        if self.device.type == "cpu":
            torch.set_num_threads(machine.choose_threads(config.threads))
        self.dtype = machine.choose_dtype(config.dtype, self.device)
        model = checkpoint.config
        context_tokens = min(model.context_tokens, config.context_tokens_max or model.context_tokens)
        if self.device.type == "cuda":
            progress(0.0, "checking kernels")
            _verify_kernels(model, config.block_tokens, self.dtype, self.device)
        with torch.inference_mode():
            try:
                self.decoder = Decoder(
                    model,
                    dtype=self.dtype,
                    device=self.device,
                    bits=_bits(config, self),
                    wants_fp8=config.weights == "fp8",
                    wants_batch_invariance=config.is_batch_invariant is not False,
                )
            except (RuntimeError, MemoryError) as error:  # torch says no more of what can't be allocated
                said = str(error).partition("\n")[0]
                raise ModelError(f"{checkpoint.place}: no memory for the weights that are described: {said}") from None
            self._read(checkpoint, progress)
            held = ", ".join(f"{count} in {form}" for form, count in sorted(self.decoder.forms().items()))
            _log.info("%s: %s; matrices held: %s", model.name, checkpoint.form, held)
            if self.device.type == "cpu" and (lacking := lack()) is not None:
                _log.warning("no native kernels, torch does their work several times as slowly: %s", lacking)
            machine.return_unused_memory()
        self.context_tokens = context_tokens
        self._group = model.heads // model.kv_heads
        if is_draft:
            return
        self._take_kv(config, self._blocks(config, draft))
        if draft is not None:
            draft._take_kv(config, self.kv.blocks)
        self.is_batch_invariant = (
            config.is_batch_invariant is not False and self.kv.native is not None and self.decoder.is_batch_invariant
        )
        if config.is_batch_invariant and not self.is_batch_invariant:
            raise ModelError("is_batch_invariant needs the native kernels and bfloat16 or quantised weights")

    @property
    def is_asynchronous(self) -> bool:
        """Whether `run` returns before its device has done the work."""
        return self.device.type == "cuda"

    def _read(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Every weight into its place. Raises ModelError with the file and the tensor."""
        try:
            self.decoder.expect(checkpoint.names())
        except ModelError as error:
            raise ModelError(f"{checkpoint.place}: {error}") from None
        for piece in checkpoint.weights():
            try:
                self.decoder.take(piece.name, piece.tensor)
            except ModelError as error:
                raise ModelError(f"{piece.file}: {error}") from None
            progress(0.05 + 0.85 * piece.share, "reading weights")

    @torch.inference_mode()
    def run(self, chunks: Many[Chunk], before: Flight | None = None) -> torch.Tensor:
        """Compute the chunks; returns the logits [sum of their logit_rows, vocabulary], in the order of the chunks.
        Tokens that nobody knows yet are taken from what the flight `before` draws, on the device."""
        if self._gpu is not None:
            return self._gpu.run(chunks, before)
        order = sorted(range(len(chunks)), key=lambda i: self._place(chunks[i]))
        ordered = [chunks[i] for i in order]
        starts = dict(zip(order, itertools.accumulate((c.count for c in ordered), initial=0), strict=False))
        rows = [
            starts[i] + chunk.count - back for i, chunk in enumerate(chunks) for back in range(chunk.logit_rows, 0, -1)
        ]
        step = self._prepare(ordered, rows)
        if before is not None:
            self._fill_in(step.token_ids, ordered, before)
        return self.decoder(step, self.kv) if self._native_step is None else self._native_step(step)

    def _fill_in(self, token_ids: torch.Tensor, chunks: Many[Chunk], before: Flight) -> None:
        """Put what `before` draws where the chunks' tokens are unknown: each is a decode of that one token."""
        places = before.places()
        starts = itertools.accumulate((chunk.count for chunk in chunks), initial=0)
        found = [
            (row, places[chunk.sequence.id])
            for row, chunk in zip(starts, chunks, strict=False)
            if chunk.sequence.in_flight
        ]
        if found:
            rows, own = self._to_device(np.array(found, np.int64).T.copy())
            token_ids[rows] = before.drawn.ids[own]

    def _gpu_steps(self, config: EngineConfig) -> GpuSteps | None:
        """What runs the steps where the GPU's kernels do."""
        if isinstance(self.kv, PagedKV):
            return None
        from local_engine.executors.gpu import GpuSteps

        rows_max = config.sequences_max or default_sequences(self.device)
        steps = GpuSteps(self.decoder, self.kv, rows_max=rows_max, context_tokens=self.context_tokens)
        if self.device.type == "cuda":
            steps.warm_up()
        return steps

    def _place(self, chunk: Chunk) -> tuple[bool, list[int]]:
        """What a step's chunks are sorted by. Natively sequences with a common prefix become neighbours; else single rows
        come first, of the longest sequences before others."""
        blocks = chunk.sequence.blocks
        if self.kv.native is not None:
            return False, blocks[:: max(1, _SPAN_TOKENS // self.kv.block_tokens)]
        return chunk.count > 1, [-len(blocks)]

    def _take_kv(self, config: EngineConfig, blocks: int) -> None:
        kind: type[PagedKV | TritonKV] = PagedKV
        if supports.is_served(self.device, "attention"):
            from local_engine.executors.gpu import TritonKV as kind  # noqa: N813
        size, model = config.block_tokens, self.decoder.config
        with torch.inference_mode():
            self.kv = kind(model, blocks=blocks, block_tokens=size, dtype=self.dtype, device=self.device)
            self.context_tokens = min(self.context_tokens, blocks * size)
            self.decoder.finish(self.context_tokens)
        self._gpu = self._gpu_steps(config)
        self._native_step = native_step(self.decoder, self.kv) if isinstance(self.kv, PagedKV) else None

    def _blocks(self, config: EngineConfig, draft: ModelRunner | None) -> int:
        """How many blocks there is memory for, those of the draft model at their side. Raises ModelError."""
        block_bytes = sum(
            block_size_bytes(one.decoder.config, config.block_tokens, one.dtype, one.device)
            for one in (self, draft)
            if one is not None
        )
        if config.kv_blocks is not None:
            blocks = config.kv_blocks
        elif config.kv_size_mb is not None:
            blocks = config.kv_size_mb * (1 << 20) // block_bytes
        else:
            blocks = machine.kv_size_bytes(self.device, reserve_bytes=self._activation_bytes(config)) // block_bytes
        if blocks < 2:
            raise ModelError(
                f"no room for KV: {blocks} blocks of {block_bytes} bytes; raise the KV size or free memory"
            )
        return blocks

    def _activation_bytes(self, config: EngineConfig) -> int:
        """What one step's intermediate tensors take at most: the widest of them, logits, and a layer's gathered KV."""
        model = self.decoder.config
        rows = config.step_tokens_max or default_step_tokens(self.device)
        wide = 4 * model.intermediate_size + 6 * model.hidden_size + 4 * model.heads * model.head_dim
        logits = (config.sequences_max or default_sequences(self.device)) * model.vocabulary_size * 12
        return rows * wide * 4 + logits + (1 << 29)

    def _prepare(self, chunks: Many[Chunk], logit_rows: list[int]) -> StepInput:
        size = self.kv.block_tokens
        rows = sum(chunk.count for chunk in chunks)
        token_ids, positions, slots = (np.empty(rows, np.int64) for _ in range(3))
        is_native = self.kv.native is not None
        prefills = []
        at = 0
        for chunk in chunks:
            stop = at + chunk.count
            blocks = np.array(chunk.sequence.blocks, np.int64)
            where = np.arange(chunk.start, chunk.end)
            token_ids[at:stop] = chunk.tokens
            positions[at:stop] = where
            slots[at:stop] = blocks[where // size] * size + where % size
            if chunk.count > 1 and not is_native:
                prefills.append(self._span(chunk, at, blocks))
            at = stop
        return StepInput(
            token_ids=self._to_device(token_ids),
            positions=self._to_device(positions),
            slots=self._to_device(slots),
            logit_rows=self._to_device(np.array(logit_rows, np.int64)),
            decodes=() if is_native else self._groups([chunk for chunk in chunks if chunk.count == 1]),
            prefills=tuple(prefills),
            paged=self._paged(chunks) if is_native else None,
        )

    def _paged(self, chunks: Many[Chunk]) -> PagedRows:
        starts = itertools.accumulate((len(chunk.sequence.blocks) for chunk in chunks), initial=0)
        per_row = [start for chunk, start in zip(chunks, starts, strict=False) for _ in range(chunk.count)]
        blocks = [block for chunk in chunks for block in chunk.sequence.blocks]
        return PagedRows(
            stop=len(per_row),
            blocks=torch.tensor(blocks, dtype=torch.int64),
            starts=torch.tensor(per_row, dtype=torch.int64),
            work=sum(chunk.count * chunk.end for chunk in chunks),
        )

    def _span(self, chunk: Chunk, at: int, blocks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> PrefillSpan:
        needed = -(-chunk.end // self.kv.block_tokens)
        own = torch.arange(chunk.start, chunk.end, device=self.device).unsqueeze(1)
        masks = self._masks(own, chunk.end)
        return PrefillSpan(
            start=at,
            stop=at + chunk.count,
            tokens=chunk.end,
            blocks=self._to_device(blocks[:needed]),
            masks=tuple(mask.repeat(self._group, 1) for mask in masks),
        )

    def _masks(self, own: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """What to add to the scores of queries at positions `own` [rows, 1] over `tokens` keys, for each window."""
        seen = torch.arange(tokens, device=self.device)
        is_future = seen > own
        masks = []
        for window in self.kv.windows:
            hidden = is_future | (seen <= own - window) if window else is_future
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            masks.append(mask.masked_fill_(hidden, -torch.inf))
        return masks

    def _groups(self, chunks: Many[Chunk]) -> tuple[DecodeGroup, ...]:
        """Sequences, longest first, in groups whose padding at most doubles the work."""
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

    def _to_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


def _verify_kernels(model: ModelConfig, block_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError where a kernel broke the device."""
    if not supports.has_triton():
        _log.error("Triton is not installed: torch does the kernels' work on %s, several times slower", device)
    elif any(supports.is_served(device, part) for part in supports.PARTS):
        from local_engine.executors.gpu import verify

        verify(model, block_tokens, dtype, device)


def _bits(config: EngineConfig, runner: ModelRunner) -> int | None:
    """What matrices are quantised to while they are read. Raises ModelError where no kernel serves that."""
    if config.weights == "fp8" and not scaled.is_served(runner.device):
        raise ModelError(f"weights=fp8 needs a GPU with 8-bit floats (Ada, Hopper or later), not {runner.device}")
    if config.weights in ("auto", "fp8"):
        return None
    if native_for(runner.device, runner.dtype) is None and not supports.is_served(runner.device, "product"):
        raise ModelError(
            f"weights={config.weights} needs the native kernels (python -m local_engine.kernels.cpu) and float32 or bfloat16 "
            f"on a CPU, or a GPU with Triton; this engine runs {str(runner.dtype).removeprefix('torch.')} on {runner.device}"
        )
    return {"int8": 8, "int4": 4}[config.weights]


def default_step_tokens(device: torch.device) -> int:
    """Tokens of one step: enough to keep the device busy, few enough that running answers do not stutter."""
    return 256 if device.type == "cpu" else 4096


def default_sequences(device: torch.device) -> int:
    """Sequences that run at once."""
    return 32 if device.type == "cpu" else 256
