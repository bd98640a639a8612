"""ModelRunner: scheduled chunks in, logits out.

Owns the weights and the pools of KV, and chooses once the executor of the steps (executors/). Knows
no queues, sampling or text. Invariant: it reads a sequence (tokens, blocks) and never changes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import torch

from local_engine import machine
from local_engine.attention import attention_kernels, block_size_bytes
from local_engine.checkpoints.checkpoint import Checkpoint
from local_engine.config import EngineConfig, ModelConfig, ModelError
from local_engine.executors.native import NativeExecutor
from local_engine.executors.torch import TorchExecutor
from local_engine.kernels.cpu import native_for, why_no_kernels
from local_engine.kernels.supports import PARTS, has_triton, supports
from local_engine.models.decoder import Decoder
from local_engine.sequence import TokenChunk
from local_engine.step_in_flight import StepInFlight
from local_engine.weights import scaled
from local_engine.weights.linear import LinearOptions

if TYPE_CHECKING:
    from local_engine.executors.gpu import GpuExecutor

_log = logging.getLogger(__name__)
Progress = Callable[[float, str], None]


class ModelRunner:
    """A loaded model with room for `kv.blocks` blocks of KV. `context_tokens` is the part of the
    model's context that fits.

    A draft model (`is_draft`) gets its pool with its main model's (`draft`): blocks of the same
    ids, from the same memory.
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
            torch.cuda.set_device(self.device)  # for this thread's kernels and events
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
                    LinearOptions(
                        dtype=self.dtype,
                        device=self.device,
                        fp8="made" if config.weights == "fp8" else "kept",
                        is_batch_invariant=config.is_batch_invariant is not False,
                    ),
                    bits=_bits(config, self),
                )
            # torch has no type of its own for an allocation that fails
            except (RuntimeError, MemoryError) as error:
                said = str(error).partition("\n")[0]
                raise ModelError(f"{checkpoint.path}: no memory for the weights that are described: {said}") from None
            self._read(checkpoint, progress)
            held = ", ".join(f"{count} in {form}" for form, count in sorted(self.decoder.forms().items()))
            _log.info("%s: %s; matrices held: %s", model.name, checkpoint.form, held)
            if self.device.type == "cpu" and (reason := why_no_kernels()) is not None:
                _log.warning("no native kernels, torch does their work several times as slowly: %s", reason)
            machine.return_unused_memory()
        self.context_tokens = context_tokens
        if is_draft:
            return
        self._open_executor(config, self._blocks(config, draft))
        if draft is not None:
            draft._open_executor(config, self.kv.blocks)
        self.is_batch_invariant = (
            config.is_batch_invariant is not False
            and isinstance(self.executor, NativeExecutor)
            and self.decoder.is_batch_invariant
        )
        if config.is_batch_invariant and not self.is_batch_invariant:
            raise ModelError("is_batch_invariant needs the native kernels and bfloat16 or quantised weights")

    @property
    def is_asynchronous(self) -> bool:
        """Whether `run` returns before its device has finished."""
        return self.device.type == "cuda"

    def _read(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Read every weight into its place. Raises ModelError with the file and the tensor."""
        names = checkpoint.names()
        try:
            self.decoder.expect(names)
        except ModelError as error:
            raise ModelError(f"{checkpoint.path}: {error}") from None
        for number, piece in enumerate(checkpoint.weights(), 1):
            try:
                self.decoder.load(piece.name, piece.tensor)
            except ModelError as error:
                raise ModelError(f"{piece.file}: {error}") from None
            progress(0.05 + 0.85 * number / len(names), "reading weights")

    def run(self, chunks: Many[TokenChunk], before: StepInFlight | None = None) -> torch.Tensor:
        """Compute the chunks; returns the logits [sum of their logit_rows, vocabulary], in the
        order of the chunks, valid until the next call. Unknown tokens are taken on the device from
        the draws of the step `before`."""
        return self.executor.run(chunks, before)

    def _open_executor(self, config: EngineConfig, blocks: int) -> None:
        """Finish the weights, allocate the pools of KV, and choose the executor of the steps."""
        self.context_tokens = min(self.context_tokens, blocks * config.block_tokens)
        with torch.inference_mode():
            self.decoder.finish(self.context_tokens)
            self.executor = self._chosen(config, blocks)
        self.kv = self.executor.kv

    def _chosen(self, config: EngineConfig, blocks: int) -> TorchExecutor | NativeExecutor | GpuExecutor:
        """Triton's executor if it supports the device, else the native one, else torch's."""
        size = config.block_tokens
        if supports(self.device, "attention"):
            from local_engine.executors.gpu import GpuExecutor

            rows_max = config.sequences_max or default_sequences(self.device)
            return GpuExecutor(
                self.decoder, blocks=blocks, block_tokens=size, rows_max=rows_max, context_tokens=self.context_tokens
            )
        native = attention_kernels(self.decoder.config, self.dtype, self.device)
        if native is not None:
            return NativeExecutor(native, self.decoder, blocks=blocks, block_tokens=size)
        return TorchExecutor(self.decoder, blocks=blocks, block_tokens=size)

    def _blocks(self, config: EngineConfig, draft: ModelRunner | None) -> int:
        """The number of blocks that fit in memory, including the draft model's. Raises ModelError."""
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
        """The largest size of one step's intermediate tensors in bytes: the widest activations,
        logits, and a layer's gathered KV."""
        model = self.decoder.config
        rows = config.step_tokens_max or default_step_tokens(self.device)
        wide = 4 * model.intermediate_size + 6 * model.hidden_size + 4 * model.attention.qkv_rows[0]
        logits = (config.sequences_max or default_sequences(self.device)) * model.vocabulary_size * 12
        return rows * wide * 4 + logits + (1 << 29)


def _verify_kernels(model: ModelConfig, block_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Verify the GPU kernels. Raises ModelError if a kernel broke the device."""
    if not has_triton():
        _log.error("Triton is not installed: torch does the kernels' work on %s, several times slower", device)
    elif any(supports(device, part) for part in PARTS):
        from local_engine.executors.gpu import verify

        verify(model, block_tokens, dtype, device)


def _bits(config: EngineConfig, runner: ModelRunner) -> int | None:
    """The bits to which matrices are quantised while they are read, or None. Raises ModelError if
    no kernel supports that."""
    if config.weights == "fp8" and not scaled.multiplies_fp8(runner.device):
        raise ModelError(f"weights=fp8 needs a GPU with 8-bit floats (Ada, Hopper or later), not {runner.device}")
    if config.weights in ("auto", "fp8"):
        return None
    if native_for(runner.device, runner.dtype) is None and not supports(runner.device, "product"):
        raise ModelError(
            f"weights={config.weights} needs the native kernels (python -m local_engine.kernels.cpu) and float32 or bfloat16 "
            f"on a CPU, or a GPU with Triton; this engine runs {str(runner.dtype).removeprefix('torch.')} on {runner.device}"
        )
    return {"int8": 8, "int4": 4}[config.weights]


def default_step_tokens(device: torch.device) -> int:
    """The default tokens of one step: enough to keep the device busy, few enough that running
    answers arrive evenly."""
    return 256 if device.type == "cpu" else 4096


def default_sequences(device: torch.device) -> int:
    """The default number of sequences that run at once."""
    return 32 if device.type == "cpu" else 256
