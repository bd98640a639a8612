"""Attention in tiles equals attention by the book, whatever is split, shared, windowed or capped."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.kernels.gpu.attention import Shape, attend
from local_engine.kernels.gpu.plan import SHORT_ROWS_MAX, RowSpan, plan
from local_engine.kernels.shared_prefixes import shared_prefixes


@dataclass(frozen=True)
class Case:
    """A step: spans of (rows, tokens before them, how many blocks they share with the first span)."""

    spans: list[tuple[int, int, int]]
    group: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    window: int
    softcap: float | None
    seed: int


cases = st.builds(
    Case,
    spans=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 5, 16, 17, 40]), st.integers(0, 70), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    group=st.sampled_from([1, 3, 4]),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([16, 64, 80]),
    block_tokens=st.sampled_from([4, 5, 16]),
    window=st.sampled_from([0, 0, 1, 7, 33]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 3),
)


def spans_of(case: Case) -> list[RowSpan]:
    """Short spans first, as the runner orders them; each in blocks of its own but for what it shares with the first."""
    rows_sorted = sorted(case.spans, key=lambda span: span[0] > SHORT_ROWS_MAX)
    spans: list[RowSpan] = []
    first, fresh = 0, 0
    for rows, before, shared in rows_sorted:
        needed = -(-(before + rows) // case.block_tokens)
        common = spans[0].blocks[: min(shared, before // case.block_tokens)] if spans else []
        blocks = common + list(range(fresh, fresh + needed - len(common)))
        fresh += needed - len(common)
        spans.append(RowSpan(first, rows, before, blocks))
        first += rows
    return spans


def by_the_book(case: Case, spans: list[RowSpan], queries: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Every row alone, in float64."""
    out = torch.empty(queries.shape, dtype=torch.float64)
    for span in spans:
        slots = [b * case.block_tokens + i for b in span.blocks for i in range(case.block_tokens)]
        kv = pool.view(2 * case.kv_heads, -1, case.head_dim)[:, slots].double()
        for row in range(span.rows):
            position = span.position + row
            low = max(0, position - case.window + 1) if case.window else 0
            for head in range(queries.shape[1]):
                keys = kv[head // case.group, low : position + 1]
                values = kv[case.kv_heads + head // case.group, low : position + 1]
                scores = keys @ queries[span.first + row, head].double() * 0.3
                if case.softcap is not None:
                    scores = case.softcap * (scores / case.softcap).tanh()
                out[span.first + row, head] = scores.softmax(-1) @ values
    return out


@settings(max_examples=12)
@given(case=cases, is_cascaded=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_tiles_give_what_the_book_gives(case: Case, is_cascaded: bool, dtype: torch.dtype) -> None:
    """Prompts, decodes and drafts of ragged lengths, over page borders, with windows, caps and shared prefixes."""
    shape = Shape(
        heads=case.group * case.kv_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_tokens=case.block_tokens,
        scale=0.3,
        softcap=case.softcap,
        windows=(case.window,),
    )
    spans = spans_of(case)
    torch.manual_seed(case.seed)
    rows = sum(span.rows for span in spans)
    blocks = 1 + max(max(span.blocks) for span in spans)
    pool = torch.randn(2 * case.kv_heads, blocks, case.block_tokens, case.head_dim).to(dtype)
    qkv = torch.randn(rows, shape.heads + 2 * case.kv_heads, case.head_dim).to(dtype)
    queries = qkv[:, : shape.heads]
    positions = torch.tensor([span.position + row for span in spans for row in range(span.rows)])

    short = [span for span in spans if span.rows <= SHORT_ROWS_MAX]
    prefixes = shared_prefixes([span.blocks for span in short], 1) if is_cascaded else []
    order = [index for prefix in prefixes for index in prefix.members]
    if order == sorted(order) and all(p.members == tuple(range(p.members[0], p.members[-1] + 1)) for p in prefixes):
        step = plan(shape, short, spans[len(short) :], prefixes, separate_tiles=5, shared_tiles=4)
    else:
        step = plan(shape, short, spans[len(short) :])
    found = attend(shape, 0, queries, pool, positions, step.on(shape, torch.from_numpy(step.numbers)))
    wanted = by_the_book(case, spans, queries, pool).view(rows, -1)
    error = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted, atol=error, rtol=error)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_wide_heads_and_long_rows_are_cut_right(head_dim: int) -> None:
    """A prompt longer than a tile, and many rows over one prefix, with the widest heads that are served."""
    case = Case([(1, 64, 3)] * 3 + [(150, 3, 0)], 4, 1, head_dim, 16, 0, None, 0)
    shape = Shape(heads=4, kv_heads=1, head_dim=head_dim, windows=(0,), scale=0.3, block_tokens=16)
    spans = spans_of(case)
    assert spans[1].blocks[:3] == spans[0].blocks[:3]
    torch.manual_seed(1)
    pool = torch.randn(2, 1 + max(max(span.blocks) for span in spans), 16, head_dim)
    queries = torch.randn(153, 4, head_dim)
    positions = torch.tensor([span.position + row for span in spans for row in range(span.rows)])
    prefixes = shared_prefixes([span.blocks for span in spans[:3]], 1)
    assert prefixes
    step = plan(shape, spans[:3], spans[3:], prefixes)
    assert (step.separate, step.shared) == (3, 1)
    assert step.whole == -(-150 // shape.tile_rows) > 1
    found = attend(shape, 0, queries, pool, positions, step.on(shape, torch.from_numpy(step.numbers)))
    torch.testing.assert_close(
        found.double(), by_the_book(case, spans, queries, pool).view(153, -1), atol=1e-4, rtol=1e-4
    )
