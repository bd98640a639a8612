"""The GPU's kernels one by one: compared with torch in several shapes, and what there is to time of each.

A case's floor is max(bytes / bandwidth, flops / rate) of what it cannot do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from local_engine.kernels.gpu.attention import Shape
    from local_engine.kernels.gpu.self_test import Failure

SHAPES = ("8b", "135m", "gemma")
HIDDEN_SIZE, VOCABULARY_SIZE = 4096, 151_936


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time, and what it cannot do with less."""

    name: str
    run: Callable[[], object]
    moved_bytes: float
    flops: float = 0.0


def shape_named(name: str) -> Shape:
    """The attention of Qwen3-8B, of SmolLM2-135M, and of a Gemma 2 with its window and cap."""
    from local_engine.kernels.gpu.attention import Shape

    heads, kv_heads, head_dim = {"8b": (32, 8, 128), "135m": (9, 3, 64)}.get(name, (8, 4, 256))
    is_gemma = head_dim == 256
    return Shape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(0, 24) if is_gemma else (0,),
        scale=head_dim**-0.5,
        softcap=50.0 if is_gemma else None,
        block_tokens=16,
    )


def check(name: str, dtype: torch.dtype, device: torch.device) -> list[Failure]:
    """What is wrong in that shape and type. Raises ModelError where a kernel broke the device."""
    from local_engine.kernels.gpu.self_test import failures

    return failures(shape_named(name), 576 if name == "135m" else HIDDEN_SIZE, dtype, device)


def row_cases(device: torch.device) -> Iterator[Case]:
    """Norm and gate at decode's and prefill's sizes, and drawing greedily and with every filter."""
    import torch

    from local_engine.kernels.gpu import draw, rows

    for count in (1, 64, 4096):
        x, more = torch.randn(2, count, HIDDEN_SIZE, device=device).bfloat16()
        weight = torch.ones(HIDDEN_SIZE, device=device)
        run = lambda x=x, more=more, weight=weight: rows.add_norm(x, more, weight, 1e-6)  # noqa: E731
        yield Case(f"add_norm, {count} rows", run, 4 * x.nbytes)
        both = torch.randn(count, 6 * HIDDEN_SIZE, device=device).bfloat16()
        yield Case(f"gate, {count} rows", lambda both=both: rows.gate(both, "silu"), 1.5 * both.nbytes)  # type: ignore[misc]
    logits = torch.randn(64, VOCABULARY_SIZE, device=device).bfloat16()
    numbers = torch.arange(64, device=device)
    for name, top_k, settings in (("greedy", 0, (0.0, 1.0, 0.0)), ("filtered", 50, (0.8, 0.9, 0.01))):
        of_each = torch.tensor([[value] * 64 for value in settings], device=device)
        top_ks = torch.full((64,), top_k, device=device)
        run = lambda k=top_ks, s=of_each: draw.draw(logits, numbers, numbers, k, s)  # noqa: E731
        yield Case(f"draw {name}, 64 rows", run, logits.nbytes)


def product_cases(device: torch.device) -> Iterator[Case]:
    """Quantised matrices of an 8B model's MLP at decode's sizes, beside torch's bfloat16 product."""
    import torch

    from local_engine.kernels.gpu.product import BITS
    from local_engine.weights.quantised import QuantisedProduct, quantise

    weight = torch.randn(3 * HIDDEN_SIZE, HIDDEN_SIZE, device=device)
    plain = weight.bfloat16()
    products = {bits: QuantisedProduct(quantise(weight, bits), device) for bits in BITS}
    for count in (1, 16, 64):
        x = torch.randn(count, HIDDEN_SIZE, device=device).bfloat16()
        flops = 2.0 * count * weight.numel()
        yield Case(f"torch, bfloat16, {count} rows", lambda x=x: x @ plain.T, plain.nbytes, flops)  # type: ignore[misc]
        for bits, product in products.items():
            run = lambda x=x, product=product: product(x)  # noqa: E731
            yield Case(f"product, {bits} bits, {count} rows", run, product.size_bytes, flops)


def attention_cases(device: torch.device) -> Iterator[Case]:
    """Decodes of several batches and lengths, 64 sequences over one prefix, and prompts."""
    import torch

    from local_engine.kernels.copies import on_device
    from local_engine.kernels.gpu.attention import attend
    from local_engine.kernels.gpu.plan import RowSpan, plan
    from local_engine.kernels.shared_prefixes import Prefix

    shape, size = shape_named("8b"), 16
    token_bytes = 2 * shape.kv_heads * shape.head_dim * 2

    def case(name: str, spans: list[RowSpan], prefixes: list[Prefix], read_tokens: int, flops: float) -> Case:
        is_short = spans[0].rows == 1
        made = plan(shape, spans if is_short else [], [] if is_short else spans, prefixes)
        tiles = made.on(shape, on_device(made.numbers, device))
        rows = sum(span.rows for span in spans)
        blocks = 1 + max(max(span.blocks) for span in spans)
        pool = torch.randn(2 * shape.kv_heads, blocks, size, shape.head_dim, device=device, dtype=torch.bfloat16)
        queries = torch.randn(rows, shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        positions = torch.cat([torch.arange(span.position, span.end, device=device) for span in spans])
        moved = read_tokens * token_bytes + 2 * queries.nbytes
        return Case(name, lambda: attend(shape, 0, queries, pool, positions, tiles), moved, flops)

    flops_each = 4.0 * shape.heads * shape.head_dim
    for batch, tokens in ((1, 1024), (1, 8192), (8, 8192), (64, 1024), (64, 8192)):
        order = torch.randperm(batch * tokens // size).view(batch, -1).tolist()
        spans = [RowSpan(row, 1, tokens - 1, blocks) for row, blocks in enumerate(order)]
        yield case(f"decode {batch} x {tokens}", spans, [], batch * tokens, flops_each * batch * tokens)
    own, common = 4, list(range(64))
    spans = [RowSpan(row, 1, 1087, common + list(range(64 + row * own, 68 + row * own))) for row in range(64)]
    for name, prefixes in (("apart", []), ("at once", [Prefix(tuple(range(64)), 64)])):
        flops = flops_each * 64 * 1088
        yield case(f"decode 64 x (1024 shared {name} + 64)", spans, prefixes, 1024 + 64 * 64, flops)
    for tokens in (2048, 8192):
        blocks = torch.randperm(tokens // size).tolist()
        flops = flops_each * tokens * (tokens + 1) / 2
        yield case(f"prefill {tokens}", [RowSpan(0, tokens, 0, blocks)], [], tokens, flops)
