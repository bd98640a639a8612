"""The kernels' self-test: compares each with torch, on the engine's device and in its shapes.

An engine on CUDA runs it before it loads a model, and disables the parts that fail; the bench runs
it in many shapes. Knows tensors and tolerances. Invariant: torch computes in float32 from the same
rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from local_engine.config import ModelError
from local_engine.kernels import fused
from local_engine.kernels.copies import on_device
from local_engine.kernels.cpu import GROUP
from local_engine.kernels.gpu import draw, rows
from local_engine.kernels.gpu.attention import Shape, attend
from local_engine.kernels.gpu.experts import GroupedExperts
from local_engine.kernels.gpu.plan import SHORT_ROWS_MAX, RowSpan, plan
from local_engine.kernels.gpu.product import BITS, halves, product
from local_engine.kernels.noise import noise
from local_engine.kernels.shared_prefixes import Prefix
from local_engine.kernels.supports import FP8_CAPABILITY, Part

_TOLERANCE = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_VOCABULARY = 5003


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel that fails or is wrong, its part, and the reason."""

    part: Part
    kernel: str
    why: str


def failures(shape: Shape, hidden_size: int, dtype: torch.dtype, device: torch.device) -> list[Failure]:
    """The kernels that raise, or differ from torch by more than the type's rounding. Raises
    ModelError if a kernel has broken the device for all later work."""
    # decision: kernels-in-triton
    checks: dict[tuple[Part, str], Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]] = {
        ("rows", "add_norm"): lambda: _add_norm(hidden_size, dtype, device),
        ("rows", "gate"): lambda: _gate(hidden_size, dtype, device),
        ("attention", "rotate_write"): lambda: _rotate_write(shape, dtype, device),
        ("attention", "attend"): lambda: _attend(shape, dtype, device),
        ("draw", "draw"): lambda: _draw(dtype, device),
        ("product", "product"): lambda: _product(dtype, device),
        ("experts", "product_each"): lambda: _experts(dtype, device),
    }
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        checks["fp8", "to_fp8"] = lambda: _to_fp8(hidden_size, dtype, device)
    failed = []
    for (part, kernel), check in checks.items():
        try:
            with _same_numbers(device):
                for ours, theirs in check():
                    tolerance = _TOLERANCE[dtype] if ours.is_floating_point() else 0.0
                    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)
        except Exception as error:
            failed.append(Failure(part, kernel, f"{type(error).__name__}: {error}"))
            _require_alive(device, kernel, error)
    return failed


def _require_alive(device: torch.device, kernel: str, error: Exception) -> None:
    """Raise ModelError if a kernel broke the device: a bad address ends all of a process' work
    there, so the next process must run without the kernels."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        raise ModelError(f"the kernel {kernel} broke {device} ({error}); start with SAMEWAY_TRITON=0") from error


@contextmanager
def _same_numbers(device: torch.device) -> Iterator[None]:
    """Seed the random numbers; the generators' states are restored."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
        torch.manual_seed(0)
        yield


def _add_norm(width: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, more = torch.randn(2, 3, width, device=device).to(dtype)
    weight = torch.rand(width, device=device)
    for added in (more, None):
        ours_x, wanted_x = x.clone(), x.clone()
        wanted = fused.add_norm(None, wanted_x, added, weight, 1e-6)
        yield rows.add_norm(ours_x, added, weight, 1e-6), wanted
        yield ours_x, wanted_x


def _gate(width: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    gate_up = torch.randn(3, 2 * width, device=device).to(dtype)
    for activation in ("silu", "gelu_tanh"):
        yield rows.gate(gate_up, activation), fused.gate(None, gate_up.float(), activation)


def _rotate_write(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    angles = torch.rand(64, 1, size // 2, device=device) * 6.3
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    positions, slots = torch.tensor([[0, 9, 63], [5, -1, 2]], device=device)
    for norm in (None, torch.rand(heads + kv_heads, size, device=device)):
        qkv = torch.randn(3, heads + 2 * kv_heads, size, device=device).to(dtype)
        qk, values = qkv[:, : heads + kv_heads].float(), qkv[:, heads + kv_heads :].clone()
        qk = qk if norm is None else fused.rms_norm(qk, None, 1e-6, norm)
        qk = qk * cos[positions].float() + qk.roll(size // 2, -1) * sin[positions].float()
        blocks = -(-6 // shape.block_tokens)
        pool = torch.zeros(2 * kv_heads, blocks, shape.block_tokens, size, dtype=dtype, device=device)
        rows.rotate_write(qkv, pool, norm, 1e-6, cos, sin, positions, slots)
        stored = pool.view(2 * kv_heads, -1, size)
        yield qkv[:, :heads], qk[:, :heads]
        for row, slot in ((0, 5), (2, 2)):
            yield stored[:, slot], torch.cat((qk[row, heads:], values[row].float()))
        yield stored.count_nonzero(), stored[:, [2, 5]].count_nonzero()


def _attend(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two sequences over a shared prefix, one with a draft, and a prompt after a cached part: in
    every kind of layer of the model."""
    size, prompt_rows = shape.block_tokens, 3 * SHORT_ROWS_MAX
    # blocks of what a sequence with a draft has beyond the prefix
    drafted = range(4, 6 + -(-3 // size))
    prompt_blocks = range(drafted.stop, drafted.stop + 2 + -(-prompt_rows // size))
    spans = [
        RowSpan(0, 1, 3 * size, [0, 1, 2, 3]),
        RowSpan(1, 3, 2 * size + 1, [0, 1, *drafted]),
        RowSpan(4, prompt_rows, size, list(prompt_blocks)),
    ]
    positions = torch.tensor([span.position + row for span in spans for row in range(span.rows)], device=device)
    pool = torch.randn(2 * shape.kv_heads, prompt_blocks.stop, size, shape.head_dim, device=device).to(dtype)
    qkv = torch.randn(4 + prompt_rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, device=device).to(dtype)
    queries = qkv[:, : shape.heads]
    step = plan(shape, spans[:2], spans[2:], [Prefix((0, 1), 2)])
    tiles = step.on(shape, on_device(step.numbers, device))
    for layer in {shape.windows.index(window) for window in shape.windows}:
        attended = attend(shape, layer, queries, pool, positions, tiles)
        yield attended, torch.cat([_by_products(shape, layer, queries, pool, positions, span) for span in spans])


def _by_products(
    shape: Shape, layer: int, queries: torch.Tensor, pool: torch.Tensor, positions: torch.Tensor, span: RowSpan
) -> torch.Tensor:
    """One span's attention from whole score matrices, [rows, heads * head_dim]."""
    kv = pool[:, span.blocks].flatten(1, 2)[:, : span.end].float().repeat_interleave(shape.group, 0)
    span_queries = queries[span.first : span.first + span.rows].float().transpose(0, 1)
    scores = span_queries @ kv[: shape.heads].transpose(1, 2) * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    behind = positions[span.first : span.first + span.rows, None] - torch.arange(span.end, device=pool.device)
    window = shape.windows[layer] or span.end
    weights = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf).softmax(-1)
    return (weights @ kv[shape.heads :]).transpose(0, 1).flatten(1)


def _draw(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A greedy row and a random row among the 40 likeliest, of logits without ties."""
    order = torch.randperm(_VOCABULARY, device=device)
    logits = torch.full((2, _VOCABULARY), -30.0, device=device).to(dtype)
    logits[:, order[:40]] = torch.linspace(-1, 3, 40, device=device).to(dtype)
    keys = torch.tensor([[11], [-12345678901234567]], device=device)
    settings = torch.tensor([[0.0, 0.5], [1.0, 1.0], [0.0, 0.0]], device=device)
    drawn = draw.draw(
        logits, torch.arange(2, device=device), keys.view(-1), torch.tensor([0, 40], device=device), settings
    )
    weights = (logits[1].float() / 0.5).softmax(-1).double()
    weights[order[40:]] = 0.0
    raced = (noise(keys[1:], torch.arange(_VOCABULARY, device=device)[None]) / weights).argmin()
    yield drawn, torch.stack((logits[0].argmax(), raced))


def _product(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and sums of a model's size, for one row and for more rows than a tile."""
    for bits in BITS:
        codes = torch.randint(0, 1 << bits, (100, 256), dtype=torch.uint8, device=device)
        scales = ((0.5 + torch.rand(100, 256 // GROUP, device=device)) * 2.0 ** (-2 - bits)).half()
        minimums = (scales.float() * -(1 << bits - 1)).half()
        weight = codes.view(*scales.shape, -1) * scales.float().unsqueeze(-1) + minimums.float().unsqueeze(-1)
        weight = weight.view(codes.shape).to(dtype).float()
        for count in (1, 70):
            x = torch.randn(count, 256, device=device).to(dtype)
            yield product(x, halves(codes) if bits == 4 else codes, scales, minimums, None, bits), x.float() @ weight.T


def _experts(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Few rows and many. One expert gets most of them and another gets none. Each row's own
    matrices are the oracle."""
    gate_up, down = (torch.randn(5, *size, device=device).to(dtype) / 8 for size in ((96, 64), (64, 48)))
    grouped = GroupedExperts(gate_up, down, "silu", None)
    for count in (2, 200):
        x = torch.randn(count, 64, device=device).to(dtype)
        chosen = torch.stack((torch.arange(count, device=device) % 3, torch.full((count,), 4, device=device)), 1)
        shares = torch.rand(count, 2, device=device).to(dtype)
        yield grouped(x, chosen, shares), expert_by_expert(x, gate_up, down, chosen, shares)


def expert_by_expert(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """The experts' result if each pair is computed separately."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in range(len(gate_up)):
        inner = fused.gate(None, (x.float() @ gate_up[expert].float().T).to(x.dtype).float(), "silu").to(x.dtype)
        share = (shares.float() * (chosen == expert)).sum(1, keepdim=True)
        out += inner.float() @ down[expert].float().T * share
    return out


def _to_fp8(width: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Check that values are within half of the last of three mantissa bits; a row of zeros stays
    zero."""
    x = (torch.randn(3, width, device=device) * torch.tensor([[1.0], [0.0], [1000.0]], device=device)).to(dtype)
    codes, scales = rows.to_fp8(x)
    restored, wanted = codes.float() * scales, x.float()
    excess = (restored - wanted).abs() - wanted.abs() / 16 - scales / 512
    yield excess.clamp_min(0.0), torch.zeros_like(excess)
