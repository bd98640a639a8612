"""Every kernel launched once in the shapes that matter, on CPU tensors, as the engine would on a GPU."""

from __future__ import annotations

import torch

from local_engine.gpu_sampler import sample
from local_engine.kernels.gpu import rows
from local_engine.kernels.gpu.attention import Shape, attend
from local_engine.kernels.gpu.experts import GroupedExperts
from local_engine.kernels.gpu.plan import RowSpan, plan
from local_engine.kernels.shared_prefixes import Prefix
from local_engine.messages import SamplingParams
from local_engine.sequence import Place
from local_engine.weights.quantised import QuantisedProduct, quantise
from tests.engine.gpu.sequences import sequence


def make_shape(
    heads: int, kv_heads: int, head_dim: int, softcap: float | None = None, windows: tuple[int, ...] = (0,)
) -> Shape:
    """Blocks of 16 tokens."""
    return Shape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=windows,
        scale=head_dim**-0.5,
        softcap=softcap,
        block_tokens=16,
    )


def launch_all() -> None:
    for head_dim, heads, kv_heads, window, softcap in ((128, 32, 8, 0, None), (80, 9, 3, 64, 50.0)):
        _attention(make_shape(heads, kv_heads, head_dim, softcap, (window,)))
        _rows(head_dim, heads, kv_heads)
    _draw()
    _experts()
    rows.to_fp8(torch.zeros(3, 4096).bfloat16())
    for bits in (4, 8):
        QuantisedProduct(quantise(torch.ones(64, 4096), bits), torch.device("cpu"))(torch.ones(16, 4096).bfloat16())


def _attention(shape: Shape) -> None:
    """Steps of several sizes: a draft and decodes over a prefix beside a prompt, and decodes alone."""
    pool = torch.zeros(2 * shape.kv_heads, 40, 16, shape.head_dim, dtype=torch.bfloat16)
    for short, long in (([1, 9], [200]), ([1, 1, 1], [99]), ([1], []), ([1] * 16, []), ([1] * 17, [])):
        firsts = [sum([*short, *long][:index]) for index in range(len(short) + len(long))]
        spans = [RowSpan(first, rows, 40, list(range(16))) for first, rows in zip(firsts, short + long, strict=True)]
        rows = spans[-1].first + spans[-1].rows
        prefixes = [Prefix((0, 1), 2)] if long else []
        step = plan(shape, spans[: len(short)], spans[len(short) :], prefixes)
        tiles = step.on(shape, torch.from_numpy(step.numbers))
        queries = torch.zeros(rows, shape.heads, shape.head_dim, dtype=torch.bfloat16)
        attend(shape, 0, queries, pool, torch.zeros(rows, dtype=torch.int64), tiles)


def _draw() -> None:
    wish = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1)
    for count in (1, 3, 16):
        sample(torch.zeros(1, 5000, dtype=torch.bfloat16), [0] * count, [Place(sequence(wish))] * count)


def _experts() -> None:
    """Few rows and many."""
    grouped = GroupedExperts(torch.zeros(8, 256, 512).bfloat16(), torch.zeros(8, 512, 128).bfloat16(), "silu", None)
    for count in (1, 3, 512):
        x, chosen = torch.zeros(count, 512).bfloat16(), torch.zeros(count, 2, dtype=torch.int64)
        grouped(x, chosen, torch.zeros(count, 2).bfloat16())


def _rows(head_dim: int, heads: int, kv_heads: int) -> None:
    x = torch.zeros(3, 4096, dtype=torch.bfloat16)
    rows.add_norm(x, x.clone(), torch.ones(4096), 1e-6)
    rows.add_norm(x, None, torch.ones(4096), 1e-6)
    for activation in ("silu", "gelu_tanh"):
        rows.gate(torch.zeros(3, 8192, dtype=torch.bfloat16), activation)
    table = torch.zeros(64, 1, head_dim, dtype=torch.bfloat16)
    numbers = torch.zeros(3, dtype=torch.int64)
    qkv = torch.zeros(3, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
    pool = torch.zeros(2 * kv_heads, 4, 16, head_dim, dtype=torch.bfloat16)
    for norm in (None, torch.ones(heads + kv_heads, head_dim)):
        rows.rotate_write(qkv, pool, norm, 1e-6, table, table, numbers, numbers)
