"""Native attention over pages: what plain softmax over the same tokens gives, wherever they lie and whoever shares them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.attention import NativeKV, PagedRows, StepInput
from local_engine.config import AttentionConfig, ModelConfig, RopeConfig
from local_engine.kernels import cpu
from local_engine.models.rope import rotary

CPU = torch.device("cpu")
EPSILON = 1e-6
pytestmark = pytest.mark.usefixtures("kernels")


def make_model(heads: int, kv_heads: int, size: int, window: int, softcap: float | None) -> ModelConfig:
    """One layer's worth of a config."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        name="attention",
        hidden_size=heads * size,
        layers=1,
        attention=AttentionConfig(
            heads=heads, kv_heads=kv_heads, head_dim=size, windows=(window,), scale=size**-0.5, softcap=softcap
        ),
        intermediate_size=64,
        vocabulary_size=64,
        context_tokens=2048,
        rms_epsilon=EPSILON,
        ropes=(RopeConfig(),),
        has_qk_norm=False,
        has_qkv_bias=False,
    )


@dataclass(frozen=True, slots=True)
class Looking:
    """A sequence's q, k, v before rotation [tokens, heads + 2 kv_heads, head_dim], its blocks, and where its rows begin."""

    qkv: torch.Tensor
    blocks: list[int]
    start: int

    @property
    def tokens(self) -> int:
        return len(self.qkv)


class Layer:
    """A pool and the kernels' way to it, one step at a time."""

    def __init__(self, model: ModelConfig, blocks: int, block_tokens: int, dtype: torch.dtype) -> None:
        self.model = model
        native = cpu.kernels()
        assert native is not None
        self.kv = NativeKV(native, model, blocks=blocks, block_tokens=block_tokens, dtype=dtype)
        self.rotary = rotary(model.ropes[0], model.attention.head_dim, 2048, dtype=dtype, device=CPU)

    def step(self, parts: list[tuple[Looking, int, int]]) -> torch.Tensor:
        """Rows start .. stop of each sequence, in one step: [rows, heads * head_dim]."""
        size = self.kv.block_tokens
        positions = [p for _, start, stop in parts for p in range(start, stop)]
        slots = [of.blocks[p // size] * size + p % size for of, start, stop in parts for p in range(start, stop)]
        firsts = itertools.accumulate((len(of.blocks) for of, _, _ in parts), initial=0)
        starts = [first for first, (_, a, b) in zip(firsts, parts, strict=False) for _ in range(a, b)]
        step = StepInput(
            token_ids=torch.tensor([]),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            logit_rows=torch.tensor([]),
            paged=PagedRows(
                stop=len(positions),
                blocks=torch.tensor([block for of, _, _ in parts for block in of.blocks]),
                starts=torch.tensor(starts),
                work=sum(positions),
            ),
        )
        qkv = torch.cat([of.qkv[start:stop] for of, start, stop in parts]).contiguous()
        return self.kv.attend(0, qkv, None, self.rotary, step)


def expected(model: ModelConfig, of: Looking) -> torch.Tensor:
    """The oracle: rotate, score, cap, mask, softmax and sum in float32, [tokens from `start` on, heads * head_dim]."""
    cos, sin = rotary(model.ropes[0], model.attention.head_dim, 2048, dtype=of.qkv.dtype, device=CPU)
    qkv, group = of.qkv.float(), model.attention.heads // model.attention.kv_heads
    qk, v = qkv[:, : -model.attention.kv_heads], qkv[:, -model.attention.kv_heads :]
    cos, sin = cos[: of.tokens].float(), sin[: of.tokens].float()
    qk = (qk * cos + qk.roll(model.attention.head_dim // 2, -1) * sin).to(of.qkv.dtype).float()
    q, k = qk[:, : model.attention.heads], qk[:, model.attention.heads :].repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * model.attention.scale
    if model.attention.softcap is not None:
        scores = model.attention.softcap * torch.tanh(scores / model.attention.softcap)
    own, seen = torch.arange(of.tokens).unsqueeze(1), torch.arange(of.tokens)
    window = model.attention.windows[0]
    hidden = (seen > own) | (seen <= own - window) if window else seen > own
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    found = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
    return found.reshape(of.tokens, -1)[of.start :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 620), st.integers(1, 40)), min_size=1, max_size=4),
    block_tokens=st.sampled_from([4, 5, 16, 32, 40]),
    heads=st.sampled_from([(1, 1), (6, 2), (9, 3), (8, 1)]),
    size=st.sampled_from([8, 64, 80, 256]),
    window=st.sampled_from([0, 0, 7, 300]),
    softcap=st.sampled_from([None, 3.0]),
    chunk=st.sampled_from([1, 50, 700]),
    seed=st.integers(0, 99),
)
def test_attention_is_that_of_its_tokens(
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    block_tokens: int,
    heads: tuple[int, int],
    size: int,
    window: int,
    softcap: float | None,
    chunk: int,
    seed: int,
) -> None:
    """Any lengths, chunks, page sizes, groups, windows and caps: softmax over the tokens a row may see, no others."""
    draw = torch.Generator().manual_seed(seed)
    model = make_model(*heads, size, window, softcap)
    free = torch.randperm(1024, generator=draw).tolist()
    sequences = []
    for tokens, last in lengths:
        qkv = 2 * torch.randn(tokens, heads[0] + 2 * heads[1], size, generator=draw)
        blocks = [free.pop() for _ in range(-(-tokens // block_tokens))]
        sequences.append(Looking(qkv.to(dtype), blocks, max(0, tokens - last)))
    layer = Layer(model, 1024, block_tokens, dtype)
    for of in sequences:
        for start in range(0, of.start, chunk if chunk > 1 else 97):
            layer.step([(of, start, min(of.start, start + (chunk if chunk > 1 else 97)))])
    if chunk == 1:  # one row of each at a time
        steps = max(of.tokens - of.start for of in sequences)
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        for at in range(steps):
            going = [i for i, of in enumerate(sequences) if of.start + at < of.tokens]
            out = layer.step([(sequences[i], sequences[i].start + at, sequences[i].start + at + 1) for i in going])
            for i, row in zip(going, out, strict=True):
                rows[i].append(row)
        found = torch.cat([torch.stack(own) for own in rows])
    else:
        found = layer.step([(of, of.start, of.tokens) for of in sequences])
    tolerance = 1e-4 if dtype == torch.float32 else 0.03  # large scores: their rounding is in an exponent
    wanted = torch.cat([expected(model, of) for of in sequences])
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_broken_key_is_not_looked_past(dtype: torch.dtype, softcap: float | None) -> None:
    """A NaN in a key makes every row that sees it NaN, and none before it."""
    model = make_model(6, 2, 64, 0, softcap)
    for at in (0, 3, 17, 39):
        qkv = torch.randn(40, 10, 64).to(dtype)
        qkv[at, 6:8, 5] = torch.nan
        found = Layer(model, 8, 16, dtype).step([(Looking(qkv, [0, 1, 2], 0), 0, 40)])
        assert found[:at].isfinite().all()
        assert found[at:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=15)
@given(
    common=st.integers(0, 600),
    own=st.lists(st.integers(1, 60), min_size=2, max_size=9),
    block_tokens=st.sampled_from([5, 16, 32]),
    seed=st.integers(0, 99),
)
def test_a_row_s_result_is_the_same_alone(
    dtype: torch.dtype, common: int, own: list[int], block_tokens: int, seed: int
) -> None:
    """To the last bit: beside others that share its first blocks, beside strangers, alone, and within its whole prompt."""
    draw = torch.Generator().manual_seed(seed)
    model = make_model(9, 3, 64, 0, None)
    free = torch.randperm(1024, generator=draw).tolist()
    shared = common // block_tokens
    prefix = torch.randn(shared * block_tokens, 15, 64, generator=draw).to(dtype)
    shared_blocks = [free.pop() for _ in range(shared)]
    layer = Layer(model, 1024, block_tokens, dtype)
    sequences = []
    for count in own:
        qkv = torch.cat((prefix, torch.randn(count, 15, 64, generator=draw).to(dtype)))
        blocks = shared_blocks + [free.pop() for _ in range(-(-count // block_tokens))]
        sequences.append(Looking(qkv, blocks, len(qkv) - 1))
    whole = [layer.step([(of, 0, of.tokens)])[-1] for of in sequences]
    alone = [layer.step([(of, of.start, of.tokens)])[0] for of in sequences]
    together = layer.step([(of, of.start, of.tokens) for of in sequences])
    assert torch.equal(torch.stack(alone), together)
    assert torch.equal(torch.stack(whole), together)
