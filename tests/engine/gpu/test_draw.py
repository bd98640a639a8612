"""Tokens drawn by the kernel are those that the CPU's sampler draws, whatever filters, penalties and seeds are mixed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine import gpu_sampler, sampler
from local_engine.messages import SamplingParams
from tests.engine.gpu.sequences import sequence

VOCABULARY = 50
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 49, 60]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    logit_bias=st.sampled_from([{}, {7: 5.0, 9: -100.0}]),
    min_tokens=st.sampled_from([0, 9]),
    logprobs=st.sampled_from([None, 0, 3]),
    max_tokens=st.just(20),
    seed=st.integers(0, 1000),
)


@settings(max_examples=16)
@given(wishes=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 1000), is_ahead=st.booleans())
def test_the_kernel_draws_what_the_sampler_draws(wishes: list[SamplingParams], seed: int, is_ahead: bool) -> None:
    """Ids and log probabilities, of rows picked from among others, also at a draft's second place."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(2 * len(wishes), VOCABULARY)
    rows = list(range(0, 2 * len(wishes), 2))
    places = [sampler.Place(sequence(wish), int(is_ahead)) for wish in wishes]
    wanted = sampler.sample(logits[rows], places)
    drawn = gpu_sampler.sample(logits.clone(), rows, places)
    assert drawn.ids.tolist() == [one.token_id for one in wanted]
    for one, other in zip(drawn.read(), wanted, strict=True):
        assert one.token_id == other.token_id
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-5))


def test_ties_and_half_precision() -> None:
    """Of equally likely tokens the first is the greedy one, a filter lets all of them in or none, and bfloat16 is read."""
    logits = torch.zeros(1, 9, dtype=torch.bfloat16)
    logits[0, [2, 4, 6]] = 3.0
    greedy = gpu_sampler.sample(logits, [0], [sampler.Place(sequence(SamplingParams(temperature=0.0)))])
    assert greedy.ids.tolist() == [2]
    wishes = [SamplingParams(temperature=1.0, top_k=1, seed=seed) for seed in range(20)]
    drawn = gpu_sampler.sample(logits, [0] * 20, [sampler.Place(sequence(wish)) for wish in wishes])
    assert set(drawn.ids.tolist()) == {2, 4, 6}


def test_what_is_not_finite_is_told() -> None:
    """A row with NaN, with infinity or with nothing possible gives None, and others their tokens."""
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 3], logits[3, 3] = torch.nan, torch.inf, 1.0
    logits[2] = -torch.inf
    places = [sampler.Place(sequence(SamplingParams(temperature=t, logprobs=1))) for t in (0.0, 1.0, 1.0, 0.0)]
    assert [one.token_id for one in gpu_sampler.sample(logits, [0, 1, 2, 3], places).read()] == [None, None, None, 3]
