"""The native kernels: each equals its torch form, and no row knows of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.attention import StepInput
from local_engine.config import EngineConfig, ModelError
from local_engine.engine import Engine
from local_engine.executors.native import NativeExecutor, NativeStep
from local_engine.executors.torch import TorchExecutor
from local_engine.kernels import cpu
from local_engine.kernels.fused import add_norm, gate
from local_engine.weights.linear import Linear, LinearOptions, has_pairs
from local_engine.weights.quantised import Quantised, from_gguf, quantise
from tests.engine.checkpoints import random_prompt, reference
from tests.engine.conftest import SMALL, greedy, run

Make = Callable[..., Engine]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As many as there were: an engine sets them for all of torch."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def linear(
    weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None, bits: int | None = None, **options: Any
) -> Linear:
    rows, own = (weight.shape[0],), None if bits is None else (bits,)
    made = Linear(
        rows,
        weight.shape[1],
        LinearOptions(dtype=dtype, device=CPU, **options),
        has_bias=bias is not None,
        bits=own,
    )
    if made.bias is not None and bias is not None:
        made.bias.copy_(bias)
    made.load(0, weight)
    made.prepare()
    assert made.is_native
    return made


def rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    """Inputs as the integer product sees them: 15-bit codes with a scale for each 32."""
    groups = x.float().view(x.shape[0], -1, cpu.GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / (127 * 128)
    codes = (groups * torch.where(scales == 0, 0.0, 1 / scales)).round()
    return (codes * scales).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25)
@given(
    rows=st.integers(1, 19),
    columns=st.sampled_from([32, 96, 256]),
    outputs=st.integers(1, 70),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 99),
)
def test_a_quantised_product_is_that_of_its_values(
    kernels: cpu.Kernels, dtype: torch.dtype, rows: int, columns: int, outputs: int, bits: int, seed: int
) -> None:
    """Codes times codes is the product of the values they stand for, for any shape, bias included."""
    draw = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(outputs, columns, generator=draw), torch.randn(outputs, generator=draw)
    x = torch.randn(rows, columns, generator=draw).to(dtype)
    found = linear(weight, dtype, bias, bits=bits)(x)
    expected = rounded_inputs(x) @ quantise(weight, bits).dequantised().T + bias.to(dtype).float()
    tolerance = 1e-3 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance * columns**0.5)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_no_number_stays_none(kernels: cpu.Kernels, bits: int) -> None:
    """A NaN or an infinity among the inputs, wherever it stands, makes the row's product NaN, and no other row's."""
    product = linear(torch.randn(20, 64), torch.float32, bits=bits)
    for column in range(64):
        x = torch.randn(3, 64)
        x[1, column] = (torch.nan, torch.inf)[column % 2]
        found = product(x)
        assert found[1].isnan().all()
        assert found[0].isfinite().all()
        assert found[2].isfinite().all()


def test_a_bfloat16_product_is_torch_s(kernels: cpu.Kernels) -> None:
    """Pairs of bfloat16 give the exact products, added in float."""
    weight, x = torch.randn(45, 100).bfloat16(), torch.randn(11, 100).bfloat16()
    found = Linear((45,), 100, LinearOptions(dtype=torch.bfloat16, device=CPU))
    found.load(0, weight)
    found.prepare()
    torch.testing.assert_close(found(x).float(), x.float() @ weight.float().T, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_know_the_others(kernels: cpu.Kernels, bits: int) -> None:
    """To the last bit, a row's product is the same alone and in any batch."""
    product = linear(torch.randn(90, 128), torch.bfloat16, bits=bits, is_batch_invariant=True)
    x = torch.randn(23, 128).bfloat16()
    whole = product(x)
    for size in (1, 3, 8, 9):
        parts = [product(x[start : start + size]) for start in range(0, 23, size)]
        assert torch.equal(torch.cat(parts), whole)


def test_eight_bits_lose_what_they_say() -> None:
    """Every value is within half a step of its group."""
    values = torch.randn(7, 96)
    found = quantise(values, 8)
    steps = found.scales.float().repeat_interleave(cpu.GROUP, 1)
    assert bool(((found.dequantised() - values).abs() <= 0.51 * steps + 2e-3).all())
    assert torch.equal(quantise(torch.zeros(2, 64), 8).dequantised(), torch.zeros(2, 64))


@settings(max_examples=30)
@given(seed=st.integers(0, 999), size=st.sampled_from([1e-3, 1.0, 300.0]), tail=st.sampled_from([1.0, 8.0]))
def test_four_bits_fit_better_than_rounding_between_the_ends(seed: int, size: float, tail: float) -> None:
    """No group's square error is above that of codes between its least and greatest value, and in all it is a twentieth less."""
    values = size * torch.randn(9, 96, generator=torch.Generator().manual_seed(seed))
    values[:, ::7] *= tail
    groups = values.view(9, 3, cpu.GROUP)
    least, steps = groups.amin(-1, keepdim=True), (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    found = quantise(values, 4)
    assert int(found.codes.max()) <= 15

    def errors(given: torch.Tensor) -> torch.Tensor:
        return (given.view_as(groups) - groups).square().sum(-1)

    plain, fitted = errors(((groups - least) / steps).round() * steps + least), errors(found.dequantised())
    assert bool((fitted <= 1.01 * plain + 1e-8).all())
    assert float(fitted.sum()) < 0.95 * float(plain.sum())  # at most 0.916 over all that can be drawn
    for value in (0.0, 0.5):
        assert torch.equal(quantise(torch.full((2, 64), value), 4).dequantised(), torch.full((2, 64), value))


def random_blocks(kind: str, rows: int, seed: int = 3) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
    """Rows of two blocks each with any codes, and scales in a sane range; and how many values a row has."""
    block, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, 2 * size_bytes), dtype=np.uint8)
    for start in (0, size_bytes):  # the half-precision scale, and the minimum where there is one
        at = start + (208 if kind == "Q6_K" else 0)
        raw[:, at : at + 2] = np.frombuffer(np.float16(0.0125).tobytes(), np.uint8)
        if kind.endswith("_1") or kind in ("Q4_K", "Q5_K"):
            raw[:, start + 2 : start + 4] = np.frombuffer(np.float16(0.03).tobytes(), np.uint8)
    return raw, 2 * block


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_blocks_keep_their_values(kind: str) -> None:
    """Codes, scales and minima read from a file stand for what the gguf package dequantises."""
    raw, columns = random_blocks(kind, 6)
    found = from_gguf(raw, kind, (6, columns))
    assert found is not None
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType[kind])
    np.testing.assert_allclose(found.dequantised().numpy(), expected, rtol=2e-3, atol=2e-3)
    assert int(found.codes.max()) < 2**found.bits
    assert from_gguf(raw, "Q3_K", (6, columns)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("rows", [1, 11, 40])
def test_a_product_with_a_file_s_blocks(kernels: cpu.Kernels, dtype: torch.dtype, kind: str, rows: int) -> None:
    """What a file's blocks stand for is what is multiplied, in few rows and in many."""
    raw, columns = random_blocks(kind, 37, seed=rows)
    matrix = from_gguf(raw, kind, (37, columns))
    assert matrix is not None
    product = Linear((37,), columns, LinearOptions(dtype=dtype, device=CPU))
    product.load(0, matrix)
    product.prepare()
    assert product.forms() == [f"{matrix.bits} bits"]
    x = torch.randn(rows, columns).to(dtype)
    values = torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind]))
    expected = x.float() @ values.T
    tolerance = 1e-3 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(
        product(x).float(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_single_rows_are_what_the_file_says(kernels: cpu.Kernels, dtype: torch.dtype, kind: str) -> None:
    """A tied embedding is read from the head's codes: exactly what they stand for, in any order."""
    raw, columns = random_blocks(kind, 37)
    matrix = from_gguf(raw, kind, (37, columns))
    assert matrix is not None
    head = Linear((37,), columns, LinearOptions(dtype=dtype, device=CPU, is_head=True))
    head.load(0, matrix)
    assert head.has_rows
    ids = torch.tensor([36, 0, 17, 17, 5])
    assert torch.equal(head.take_rows(ids), matrix.dequantised()[ids].to(dtype))


def test_single_rows_of_a_bfloat16_matrix(kernels: cpu.Kernels) -> None:
    """They are the checkpoint's, whatever multiplies it."""
    weight, ids = torch.randn(45, 100).bfloat16(), torch.tensor([44, 3, 16])
    head = Linear((45,), 100, LinearOptions(dtype=torch.bfloat16, device=CPU, is_head=True))
    head.load(0, weight)
    assert head.has_rows == has_pairs()
    if head.has_rows:
        assert torch.equal(head.take_rows(ids), weight[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100])
def test_what_stands_between_equals_torch(kernels: cpu.Kernels, dtype: torch.dtype, width: int) -> None:
    """Norms with what is added, and gates, for widths that fill vectors and that don't."""
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    x, more, weight = torch.randn(5, width).to(dtype), torch.randn(5, width).to(dtype), torch.randn(width)
    plain, fast = x.clone(), x.clone()
    expected, found = (add_norm(k, t, more, weight, 1e-5) for k, t in ((None, plain), (kernels, fast)))
    torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    both = (8 * torch.randn(5, 2 * width)).to(dtype)
    for activation in ("silu", "gelu_tanh"):
        expected, found = gate(None, both.clone(), activation), gate(kernels, both, activation)
        torch.testing.assert_close(found, expected, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("family", [
        "llama-bias", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "smollm3-window", "phi3-longrope", "granite4",
    ])  # fmt: skip
def test_a_step_in_one_call_is_the_decoder_s(
    kernels: cpu.Kernels, make_engine: Make, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A team that goes through all layers at once gives what the decoder gives call by call, prompts and decodes together:
    the same bits, but for norms after attention and MLP, which are torch's there."""
    if not has_pairs():
        pytest.skip("bfloat16 products are torch's on this processor")
    engine = make_engine(family, dtype="bfloat16", threads=2)
    runner = engine.runner
    executor, has_other_norms = runner.executor, runner.decoder.config.norms == "around"
    assert isinstance(executor, NativeExecutor)
    at_once = executor.step
    assert isinstance(at_once, NativeStep)
    rows: list[int] = []

    def both(step: StepInput) -> torch.Tensor:
        expected, found = runner.decoder(step, runner.kv), at_once(step)
        tolerance = 0.1 if has_other_norms else 0.0
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        rows.append(len(step.positions))
        return found

    monkeypatch.setattr(executor, "step", both)
    for seed in range(3):
        engine.submit(random_prompt(seed, 5 + 60 * seed), greedy(6))
    run(engine)
    assert max(rows) > 100 > 3 >= min(rows)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_how_many_threads_there_are_changes_nothing(kernels: cpu.Kernels, make_engine: Make, weights: str) -> None:
    """One thread or a team of three: the very same log probabilities."""
    said = []
    for threads in (1, 3):
        engine = make_engine("qwen3-wide", weights=weights, is_batch_invariant=True, threads=threads)
        executor = engine.runner.executor
        assert isinstance(executor, NativeExecutor)
        assert isinstance(executor.step, NativeStep)
        for seed in range(4):
            engine.submit(random_prompt(seed, 100), greedy(4, logprobs=2))
        own: list[Any] = []
        while engine.has_work:
            own += [(step.id, step.output.logprobs) for step in engine.step()]
        said.append(own)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "mistral-window", "smollm3", "phi3-longrope", "granite4", "olmo3"]
)
def test_the_plain_path_gives_the_same_answers(
    kernels: cpu.Kernels, make_engine: Make, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Without the kernels, as on machines that have none, an engine says the same."""
    prompts = [random_prompt(seed, 4 + 9 * seed) for seed in range(4)]
    answers = []
    for _ in range(2):
        engine = make_engine(family)
        ids = [engine.submit(prompt, greedy(16)) for prompt in prompts]
        found = run(engine)
        answers.append([found[id] for id in ids])
        monkeypatch.setattr("local_engine.kernels.cpu.kernels", lambda: None)
    assert isinstance(engine.runner.executor, TorchExecutor)
    assert answers[0] == answers[1]


def test_weights_can_be_quantised_at_load(
    kernels: cpu.Kernels, make_engine: Make, checkpoint: Callable[[str], Path]
) -> None:
    """Any checkpoint can be run in 8 or 4 bits; it takes less memory, and the fewer bits, the more is lost. (A random
    model magnifies what a trained one forgives: the bench states the loss of a real one.)"""
    prompt = random_prompt(2, 40)
    with torch.inference_mode():
        rows = reference(checkpoint("llama-wide"))(torch.tensor([prompt])).logits[0].log_softmax(-1)
    size_bytes, errors = [make_engine("llama-wide").info.weights_size_bytes], [0.0]
    for weights in ("int8", "int4"):
        engine = make_engine("llama-wide", weights=weights)
        engine.submit(prompt, greedy(1, prompt_logprobs=0))
        (step,) = engine.step()
        said = zip(step.output.prompt_logprobs[1:], rows, strict=False)
        errors.append(sum(abs(token.logprob - float(row[token.token_id])) for token, row in said) / (len(prompt) - 1))
        size_bytes.append(engine.info.weights_size_bytes)
    assert size_bytes[0] > 1.5 * size_bytes[1] > 1.5 * size_bytes[2]
    assert errors[0] < errors[1] < 0.3
    assert errors[1] < errors[2] < 3.0


def test_quantising_where_nothing_serves_it_is_refused(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without the kernels says so instead of running something else."""
    monkeypatch.setattr("local_engine.kernels.cpu.kernels", lambda: None)
    for options in ({"weights": "int8"}, {"is_batch_invariant": True}):
        with pytest.raises(ModelError, match="native kernels"):
            make_engine("llama-wide", **options)


def test_an_engine_without_kernels_says_what_to_do(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Not compiled, or compiled from other sources: the log names the way to have them, and the engine runs."""
    uncached = cpu.kernels.__wrapped__
    monkeypatch.setattr(cpu, "kernels", uncached)
    monkeypatch.setattr(cpu, "NEEDED_FLAGS", frozenset[str]())
    monkeypatch.setattr(cpu, "find_compiler", lambda: "g++")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    folder = tmp_path / "lib" / "sameway"
    for why in ("not compiled", "other sources"):
        make_engine("llama")
        assert [why in record.message and "./run setup" in record.message for record in caplog.records] == [True]
        caplog.clear()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels-0123.so").touch()


def test_batch_invariance_is_to_the_last_bit(kernels: cpu.Kernels, make_engine: Make) -> None:
    """Alone or beside others, whole, in chunks or with its prefix cached, drafted or not, without being asked to: the very
    same log probabilities."""
    prompt = random_prompt(1, 37)
    params = greedy(12, logprobs=3)
    said = []
    for others, step_tokens_max, draft_tokens_max in ((0, 256, 0), (5, 256, 8), (3, 11, 2)):
        engine = make_engine(
            "llama-wide",
            weights="int8",
            step_tokens_max=step_tokens_max,
            draft_tokens_max=draft_tokens_max,
        )
        assert engine.info.is_batch_invariant
        for seed in range(others):
            engine.submit(random_prompt(seed + 2, 9 * seed + 1), greedy(12))
        for _ in ("cold", "warm"):
            id = engine.submit(prompt, params)
            own = []
            while engine.has_work:
                own += [token for step in engine.step() if step.id == id for token in step.output.logprobs]
            said.append(own)
    assert len(said[0]) == 12
    assert all(own == said[0] for own in said)


def test_a_quantised_file_stays_quantised(
    kernels: cpu.Kernels, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Q8_0 file runs in its own codes; dequantised on the plain path it gives the same likeliest tokens."""
    from tests.engine.gguf_files import write_gguf

    path = write_gguf(checkpoint("llama-wide"), tmp_path / "model.gguf", "llama", quantised="Q8_0")
    config = EngineConfig(model=str(path), **SMALL)
    prompt, found = random_prompt(3, 30), []
    for _ in range(2):
        engine = Engine(config)
        engine.submit(prompt, greedy(1, logprobs=5))
        (step,) = engine.step()
        found.append((engine.info.weights_size_bytes, {t.token_id: t.logprob for t in step.output.logprobs[0].top}))
        monkeypatch.setattr("local_engine.kernels.cpu.kernels", lambda: None)
    (small, quantised), (large, plain) = found
    assert small < 0.6 * large
    for id in quantised.keys() & plain.keys():
        assert quantised[id] == pytest.approx(plain[id], abs=0.02)
    assert len(quantised.keys() & plain.keys()) == 5


def test_wider_codes_are_narrowed_and_narrow_ones_kept(kernels: cpu.Kernels) -> None:
    """A file of 8 bits can be run in 4; one of 4 stays as it is when 8 are asked for."""
    values, x = torch.randn(20, 64), torch.randn(3, 64)
    for own, asked, then in ((8, 4, 4), (4, 8, 4), (8, 8, 8)):
        product = Linear((20,), 64, LinearOptions(dtype=torch.float32, device=CPU), bits=(asked,))
        product.load(0, quantise(values, own))
        product.prepare()
        assert product.size_bytes == 2 * 2 * cpu.PANEL * (cpu.GROUP * then // 8 + 4)
        assert product(x).shape == (3, 20)


def test_a_row_of_quantised_can_be_picked() -> None:
    """Rows in another order are the same rows."""
    made = quantise(torch.randn(6, 64), 8)
    order = torch.tensor([3, 0, 5])
    assert isinstance(made.rows(order), Quantised)
    assert torch.equal(made.rows(order).dequantised(), made.dequantised()[order])
