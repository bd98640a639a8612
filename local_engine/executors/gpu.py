"""GpuExecutor: a step by Triton's kernels, and steps of decodes as replayed graphs.

A step's data goes to the device in two copies from pinned memory, and nothing is read back, so that
the host finishes a step long before the device. Rows are ordered so that sequences with a common
prefix are neighbours. Steps of single tokens run as CUDA graphs, one for each of a few batch sizes;
smaller batches are padded with rows that neither store nor attend. On a CPU, where Triton
interprets the kernels, the same buffers are filled and a replay is a call. All graphs are captured
before the first answer, and each graph's first replay is compared with the unrecorded computation:
if that fails or differs, steps run unrecorded.

Knows no queues and no sampling. Invariants: it reads a sequence (tokens, blocks) and never changes
it; keys that no tile covers are never read.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from local_engine.attention import KV, Angles, StepInput
from local_engine.config import ModelConfig
from local_engine.executors.rows import (
    POSITIONS,
    SLOTS,
    SOURCES,
    TOKENS,
    Longs,
    fill_rows,
    known_tokens,
    logit_rows,
    step_input,
)
from local_engine.kernels.copies import on_device, pinned
from local_engine.kernels.gpu.attention import TILE_FIELDS, Shape, attend
from local_engine.kernels.gpu.plan import SHORT_ROWS_MAX, Plan, RowSpan, plan
from local_engine.kernels.gpu.rows import rotate_write
from local_engine.kernels.gpu.self_test import failures
from local_engine.kernels.shared_prefixes import Prefix, shared_prefixes
from local_engine.kernels.supports import leave_alone
from local_engine.models.decoder import Decoder
from local_engine.sequence import TokenChunk
from local_engine.step_in_flight import StepInFlight

_GRAPH_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
SAVED_TOKENS_MIN = 512  # reads that a shared prefix must save before it is worth tiles of its own
_PREFIXES_MAX = 8  # in a captured graph
_GRAPH_ERROR_MAX = 0.02  # of the largest logit: a library may choose another kernel while recording
_LOGITS = 4  # beside the rows that every step has
_log = logging.getLogger(__name__)


def shape_of(model: ModelConfig, block_tokens: int) -> Shape:
    """The shape of this model's attention over blocks of `block_tokens` tokens."""
    return Shape(**dataclasses.asdict(model.attention), block_tokens=block_tokens)


def verify(model: ModelConfig, block_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compare each kernel with torch in the model's shapes, before a model is loaded. If a kernel
    fails or is wrong, torch does its part's work on that device until the process ends. Takes
    seconds, mostly to compile kernels that are needed anyway."""
    for one in failures(shape_of(model, block_tokens), model.hidden_size, dtype, device):
        _log.error("SLOW: torch does the work of %s on %s: %s is wrong: %s", one.part, device, one.kernel, one.why)
        leave_alone(device, one.part)


class TritonKV(KV):
    """Pools in the layout of `TorchKV`, without gathering or masks: kernels read pages in place."""

    @functools.cached_property
    def shape(self) -> Shape:
        return shape_of(self.model, self.block_tokens)

    def attend(
        self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None, angles: Angles, step: StepInput
    ) -> torch.Tensor:
        """Attend in two passes over the rows."""
        assert step.tiles is not None, "the step was not prepared for tiles"
        pool = self.pools[layer]
        rotate_write(qkv, pool, qk_norm, self.model.rms_epsilon, *angles, step.positions, step.slots)
        return attend(self.shape, layer, qkv[:, : self.shape.heads], pool, step.positions, step.tiles)


@dataclass(frozen=True, slots=True)
class _Order:
    """A step's chunks in the order of their rows, short chunks first. `prefixes` have indices of
    the short chunks."""

    chunks: list[TokenChunk]
    short: int
    prefixes: list[Prefix]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A decode of a fixed number of rows on the static buffers. `compute` launches it kernel by
    kernel, `replay` as a recorded graph."""

    compute: Callable[[], None]
    replay: Callable[[], object]


class GpuExecutor:
    """Runs a loaded model's steps; `kv` is its pools. `rows_max` bounds the graphs' batch; 0: no
    graphs."""

    def __init__(self, decoder: Decoder, *, blocks: int, block_tokens: int, rows_max: int, context_tokens: int) -> None:
        kv = self.kv = TritonKV(
            decoder.config, blocks=blocks, block_tokens=block_tokens, dtype=decoder.dtype, device=decoder.device
        )
        self._decoder, self._device = decoder, decoder.device
        sizes = [size for size in _GRAPH_ROWS if size < rows_max]
        self._sizes = [*sizes, min(rows_max, _GRAPH_ROWS[-1])] if rows_max and decoder.has_one_way else []
        self.graphs: dict[tuple[int, bool], _Graph] = {}
        self._aside: Any = None  # the stream on which graphs are captured
        self._memory: Any = None  # one pool for all graphs: only one runs at a time
        largest = self._sizes[-1] if self._sizes else 0
        graph_blocks = largest * min(kv.blocks, -(-context_tokens // kv.block_tokens))
        tiles = largest + self._shared_tiles(largest)
        with torch.inference_mode():
            self._longs = torch.zeros(5 * largest, dtype=torch.int64, device=self._device)
            self._numbers = torch.zeros(TILE_FIELDS * tiles + graph_blocks, dtype=torch.int32, device=self._device)
            self._latest = torch.zeros(max(1, largest), dtype=torch.int64, device=self._device)
            self._logits = torch.zeros(
                largest, decoder.config.vocabulary_size, dtype=decoder.dtype, device=self._device
            )
        self._ordered_blocks: list[list[int]] = []
        self._prefixes: list[Prefix] = []
        if self._device.type == "cuda":
            self.warm_up()

    @torch.inference_mode()
    def run(self, chunks: Many[TokenChunk], before: StepInFlight | None) -> torch.Tensor:
        """The logits [sum of logit_rows, vocabulary], in the order of the chunks; valid until the
        next call. Unknown tokens are taken on the device from the draws of the step `before`."""
        order = self._order(chunks)
        is_decode = all(chunk.count == chunk.logit_rows == 1 for chunk in chunks)
        rows = next((size for size in self._sizes if size >= len(chunks)), 0)
        if is_decode and rows and (before is None or len(before.drawn.ids) <= len(self._latest)):
            return self._replay(chunks, order, rows, before)
        made = plan(self.kv.shape, *_spans(order), order.prefixes)
        tiles = made.on(self.kv.shape, on_device(made.numbers, self._device))
        return self._decoder(step_input(chunks, order.chunks, before, self.kv, tiles=tiles), self.kv)

    def _replay(self, chunks: Many[TokenChunk], order: _Order, rows: int, before: StepInFlight | None) -> torch.Tensor:
        has_shared = bool(order.prefixes)
        padded = self._padded(_spans(order)[0], order.prefixes, rows, has_shared)
        longs = np.zeros((5, rows), np.int64)
        fill_rows(longs, order.chunks, self.kv.block_tokens, before)
        longs[_LOGITS, : len(chunks)] = logit_rows(chunks, order.chunks)
        self._put(longs, padded)
        if before is not None:
            drawn = before.drawn.ids
            self._latest[: len(drawn)].copy_(drawn, non_blocking=True)
        self._graph(rows, has_shared).replay()
        return self._logits[: len(chunks)]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all graphs, largest first, because the others fit in its memory, so that no
        answer waits for a capture. Overwrites the KV of the first blocks."""
        started_s = time.perf_counter()
        try:
            for rows in reversed(self._sizes):
                for has_shared in (False, True) if rows > 1 else (False,):
                    self._check(rows, has_shared)
        except RuntimeError as error:
            _log.error("SLOW: decodes run without CUDA graphs on %s: %s", self._device, error)
            self._sizes = []
            self.graphs.clear()
        _log.info("%d graphs captured in %.1f s", len(self.graphs), time.perf_counter() - started_s)

    def _check(self, rows: int, has_shared: bool) -> None:
        """Compare a replay with the unrecorded computation, for one token in each of some blocks.
        Raises RuntimeError if they differ."""
        count = min(rows, self.kv.blocks)
        spans = [RowSpan(row, 1, 0, [row]) for row in range(count)]
        longs = np.zeros((5, rows), np.int64)
        longs[TOKENS] = np.arange(rows) % self._decoder.config.vocabulary_size
        longs[SLOTS] = longs[SOURCES] = -1
        longs[SLOTS, :count] = np.arange(count) * self.kv.block_tokens
        longs[_LOGITS] = np.arange(rows)
        self._put(longs, self._padded(spans, [], rows, has_shared))
        graph = self._graph(rows, has_shared)
        graph.compute()
        unrecorded = self._logits[:rows].to(torch.float32, copy=True)
        self._logits.zero_()
        graph.replay()
        error = (self._logits[:rows].float() - unrecorded).abs().max().item()
        if not error <= _GRAPH_ERROR_MAX * unrecorded.abs().max().item():
            raise RuntimeError(f"the graph of {rows} rows gives logits that are wrong by up to {error}")

    def _padded(self, short: list[RowSpan], prefixes: Many[Prefix], rows: int, has_shared: bool) -> Plan:
        """The tiles of a decode, padded to the graph of `rows` rows."""
        shared_tiles = self._shared_tiles(rows) if has_shared else 0
        shape = self.kv.shape
        return plan(shape, short, [], prefixes, separate_tiles=rows, shared_tiles=shared_tiles, split_rows=rows)

    def _put(self, longs: Longs, tiles: Plan) -> None:
        """Copy a step's data into the buffers that graphs read."""
        self._longs[: longs.size].copy_(pinned(longs.reshape(-1), self._device), non_blocking=True)
        self._numbers[: len(tiles.numbers)].copy_(pinned(tiles.numbers, self._device), non_blocking=True)

    def _graph(self, rows: int, has_shared: bool) -> _Graph:
        """The decode of `rows` rows as a graph, captured at its first use; the content of the
        buffers does not matter."""
        found = self.graphs.get((rows, has_shared))
        if found is not None:
            return found
        skeleton = self._padded([], [], rows, has_shared)

        def compute() -> None:
            longs = self._longs[: 5 * rows].view(5, rows)
            step = StepInput(
                token_ids=known_tokens(longs, self._latest),
                positions=longs[POSITIONS],
                slots=longs[SLOTS],
                logit_rows=longs[_LOGITS],
                tiles=skeleton.on(self.kv.shape, self._numbers),
            )
            self._logits[:rows].copy_(self._decoder(step, self.kv))

        made = self.graphs[rows, has_shared] = _Graph(compute, self.recorded(compute))
        return made

    def recorded(self, compute: Callable[[], None]) -> Callable[[], object]:
        """A function that replays `compute`."""
        if self._device.type != "cuda":
            return compute
        if self._memory is None:
            self._aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._memory = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            # compiles kernels and lets libraries choose theirs, which must not happen while
            # recording
            compute()
        current.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile, which the default mode forbids them
        with torch.cuda.graph(graph, self._memory, self._aside, capture_error_mode="thread_local"):
            compute()
        return graph.replay

    def _order(self, chunks: Many[TokenChunk]) -> _Order:
        """Order sequences so that those with a common prefix are neighbours. Prefixes are searched
        only if other sequences run than in the last step: a running sequence's first blocks do not
        change, and a newly admitted sequence has another list."""
        short = [chunk for chunk in chunks if chunk.count <= SHORT_ROWS_MAX]
        blocks = [chunk.sequence.blocks for chunk in short]
        if len(blocks) != len(self._ordered_blocks) or any(
            one is not other for one, other in zip(blocks, self._ordered_blocks, strict=True)
        ):
            found = shared_prefixes(blocks, SAVED_TOKENS_MIN // self.kv.block_tokens)
            found.sort(key=lambda prefix: -prefix.blocks * (len(prefix.members) - 1))
            self._ordered_blocks, self._prefixes = blocks, found[:_PREFIXES_MAX]
        members = [index for prefix in self._prefixes for index in prefix.members]
        without_prefix = sorted(set(range(len(short))) - set(members))
        at = iter(range(len(members)))
        prefixes = [Prefix(tuple(next(at) for _ in prefix.members), prefix.blocks) for prefix in self._prefixes]
        long = [chunk for chunk in chunks if chunk.count > SHORT_ROWS_MAX]
        return _Order([*(short[index] for index in [*members, *without_prefix]), *long], len(short), prefixes)

    def _shared_tiles(self, rows: int) -> int:
        return -(-rows // self.kv.shape.tile_rows) + min(_PREFIXES_MAX, rows // 2)


def _spans(order: _Order) -> tuple[list[RowSpan], list[RowSpan]]:
    spans, first_row = [], 0
    for chunk in order.chunks:
        spans.append(RowSpan(first_row, chunk.count, chunk.start, chunk.sequence.blocks))
        first_row += chunk.count
    return spans[: order.short], spans[order.short :]
