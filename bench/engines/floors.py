"""Floors: the time that a load takes at least on this machine, whoever runs it.

A step must read the weights and the KV of what it attends to, and multiply: it takes at least max(bytes / bandwidth,
operations / rate) (the roofline model, Williams et al., CACM 2009). Both ceilings are measured in the same run with the
same threads. A load is taken at its best: all prompts prefilled in one step, what they share once and not at all when
it is warm, then every answer decoded in one batch, what they share read once a step. Of experts as many are read as a
step's rows would choose by chance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.engines.loads import DECODE, PREFILL, Scenario
from local_engine.config import ModelConfig

_READ_BYTES = 1 << 28  # far more than any cache
_SIDE = 1024  # of a square product: what it reads is nothing beside what it multiplies


@dataclass(slots=True)
class Ceilings:
    """The best that was measured so far: bytes/s read, and operations/s of products of floats and of 8-bit codes (a
    multiplication and an addition are two)."""

    bytes_per_s: float = 0.0
    float_flops_per_s: float = 0.0
    code_flops_per_s: float = 0.0

    def measure_gpu(self, device: torch.device | str) -> None:
        """A copy's and a sum's bytes, and the operations of a product of bfloat16; events on the device take the time."""
        source = torch.ones(1 << 27, dtype=torch.int64, device=device)  # 1 GiB
        target = torch.empty_like(source)
        copy_s, sum_s = _event_s(lambda: target.copy_(source), device), _event_s(source.sum, device)
        self.bytes_per_s = max(self.bytes_per_s, 2 * source.nbytes / copy_s, source.nbytes / sum_s)
        square = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        rate = 2 * 8192**3 / _event_s(lambda: square @ square, device)
        self.float_flops_per_s = max(self.float_flops_per_s, rate)
        self.code_flops_per_s = max(self.code_flops_per_s, self.float_flops_per_s)

    def measure(self) -> None:
        """Read and multiply for a fifth of a second with torch's threads. Time is CPU time per thread, and the best of
        several counts: what others take of a busy machine shows little in it."""
        memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
        self.bytes_per_s = max(self.bytes_per_s, _READ_BYTES / _best_s(memory.sum, 4))
        flops = 2 * _SIDE**3
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(_SIDE, _SIDE, dtype=dtype)
            self.float_flops_per_s = max(self.float_flops_per_s, flops / _best_s(lambda x=x: x @ x, 4))  # type: ignore[misc]
        codes = torch.ones(_SIDE, _SIDE, dtype=torch.int8)
        code_s = _best_s(lambda: torch._int_mm(codes, codes), 4)
        self.code_flops_per_s = max(self.code_flops_per_s, self.float_flops_per_s, flops / code_s)

    def render(self) -> str:
        return (
            f"ceilings: {self.bytes_per_s / 1e9:.1f} GB/s read; {self.float_flops_per_s / 1e9:,.0f} GFLOP/s of floats, "
            f"{self.code_flops_per_s / 1e9:,.0f} of 8-bit codes"
        )


def _best_s(work: Callable[[], object], times: int) -> float:
    work()
    best = math.inf
    for _ in range(times):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best / torch.get_num_threads()


def _event_s(work: Callable[[], object], device: torch.device | str) -> float:
    """Seconds of the best of several runs on a GPU."""
    best = math.inf
    with torch.cuda.device(device):
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
    return best


@dataclass(frozen=True, slots=True)
class Floor:
    """What a model's steps need. `bits`: of a weight as it is kept, scales included."""

    config: ModelConfig
    bits: float
    ceilings: Ceilings
    kv_value_bytes: int = 2

    def value(self, scenario: Scenario) -> float | None:
        """The scenario's headline figure if nothing but reading and multiplying took time; None for open loads, which
        take as long as their arrivals."""
        if scenario.is_open:
            return None
        batch, shared = scenario.batch, scenario.shared
        known = shared if scenario.is_warm else 0
        prompt = shared + scenario.own
        own_pairs = sum(range(shared + 1, prompt + 1))
        shared_pairs = 0 if known else sum(range(1, shared + 1))
        prefill_s = self.step_s(
            rows=shared - known + batch * scenario.own,
            logit_rows=batch,
            kv_tokens=known,
            pairs=shared_pairs + batch * own_pairs,
        )
        steps = [
            self.step_s(
                rows=batch,
                logit_rows=batch,
                kv_tokens=shared + batch * (scenario.own + step),
                pairs=batch * (prompt + step),
            )
            for step in range(1, scenario.answer)
        ]
        if scenario.figure == PREFILL:
            return batch * prompt / prefill_s
        if scenario.figure == DECODE:
            return batch * len(steps) / sum(steps)
        return batch * scenario.answer / (prefill_s + sum(steps))

    def step_s(self, *, rows: int, logit_rows: int, kv_tokens: int, pairs: int) -> float:
        """A step that computes `rows` tokens, logits for some, reads `kv_tokens` of KV and compares `pairs` of queries and
        keys."""
        model = self.config
        experts = model.experts
        chosen = 0.0 if experts is None else experts.count * (1 - (1 - experts.per_token / experts.count) ** rows)
        read = (self._layer_weights(chosen) + self._head_weights) * self.bits / 8 + kv_tokens * self._kv_bytes
        used = self._layer_weights(0 if experts is None else experts.per_token)
        multiplied = 2 * (used * rows + self._head_weights * logit_rows)
        attended = 4 * pairs * model.layers * model.attention.heads * model.attention.head_dim
        ceilings = self.ceilings
        rate = ceilings.code_flops_per_s if self.bits < 16 else ceilings.float_flops_per_s
        return max(read / ceilings.bytes_per_s, multiplied / rate + attended / ceilings.float_flops_per_s)

    def _layer_weights(self, chosen: float) -> float:
        """Of all layers, with so many experts of each mixture."""
        model, experts = self.config, self.config.experts
        heads = 2 * model.attention.heads + 2 * model.attention.kv_heads  # queries and output, keys and values
        sparse = 0 if experts is None else sum(experts.is_sparse)
        weights = (
            model.layers * heads * model.attention.head_dim + (model.layers - sparse) * 3 * model.intermediate_size
        )
        if experts is not None:
            weights += sparse * (experts.count + chosen * 3 * experts.intermediate_size)
        return float(model.hidden_size * weights)

    @property
    def _head_weights(self) -> int:
        return self.config.hidden_size * self.config.vocabulary_size

    @property
    def _kv_bytes(self) -> int:
        model = self.config
        return 2 * model.layers * model.attention.kv_heads * model.attention.head_dim * self.kv_value_bytes
