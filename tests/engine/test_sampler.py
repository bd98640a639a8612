"""Sampling: the filters let in what they should, seeds repeat, penalties bite, log probabilities are the model's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from local_engine.engine import Engine
from local_engine.kernels.noise import noise
from local_engine.messages import InvalidRequest, SamplingParams
from local_engine.sampler import sample as sample_places
from local_engine.sequence import Place, Sampled, Sequence
from local_engine.text.tokenizer import TextStream
from tests.engine.checkpoints import random_prompt
from tests.engine.conftest import greedy, run
from tests.engine.test_text import TOKENIZER


def sequence(
    prompt: list[int] | None = None, *, answer: tuple[int, ...] = (), seed: int = 0, **params: Any
) -> Sequence:
    """A sequence as the sampler sees it."""
    prompt = prompt or [1, 2]
    return Sequence(
        id=1,
        tokens=[*prompt, *answer],
        prompt_tokens=len(prompt),
        params=SamplingParams(**params),
        answer_tokens_max=100,
        stop_token_ids=frozenset({2}),
        cache_salt=b"",
        priority=0,
        seed=seed,
        text=TextStream(TOKENIZER),
        counts=Counter(answer),
    )


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """The next token of each."""
    return sample_places(logits, [Place(one) for one in sequences])


def draws(logits: torch.Tensor, count: int, **params: Any) -> Counter[int | None]:
    """How often each token comes, over `count` seeds."""
    rows = [sequence(seed=seed, **params) for seed in range(count)]
    return Counter(sampled.token_id for sampled in sample(logits.expand(count, -1), rows))


LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))


def test_the_distribution_is_the_model_s() -> None:
    """Without filters every token comes as often as its probability says."""
    found = draws(LOGITS, 4000, temperature=1.0)
    for token, probability in enumerate((0.4, 0.3, 0.15, 0.1, 0.05)):
        assert found[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_the_unlikely_come_as_often_as_they_should() -> None:
    """Tokens far down a long tail are drawn by their probability as well, each of them and not a few for all."""
    logits = torch.zeros(3000)
    logits[7] = torch.tensor(3000.0).log()  # half of the mass; the other half is spread over all others
    found = draws(logits, 4000, temperature=1.0)
    assert found[7] / 4000 == pytest.approx(0.5, abs=0.03)
    assert len(found) > 1300  # of 2000 draws from 2999, each as likely, 1460 are expected to differ
    assert sum(found[token] for token in range(1500)) - found[7] == pytest.approx(1000, abs=120)


def test_noise_is_splitmix64() -> None:
    """The noise of token 0, 1, 2 after a key is the published generator's stream, as exponential times."""
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of the state 0
    found = noise(torch.tensor([[0]]), torch.arange(3))[0]
    uniform = torch.tensor([((word >> 11) + 0.5) / 2**53 for word in wanted], dtype=torch.float64)
    assert torch.allclose(found, -uniform.log())


def test_two_models_draw_alike() -> None:
    """With the same seeds two distributions draw the same token nearly as often as they can, which is what a draft needs."""
    torch.manual_seed(3)
    theirs = torch.randn(50)
    ours = theirs + 0.4 * torch.randn(50)
    rows = [sequence(seed=seed, temperature=1.0) for seed in range(3000)]
    pairs = [[one.token_id for one in sample(logits.expand(3000, -1), rows)] for logits in (ours, theirs)]
    alike = sum(a == b for a, b in zip(*pairs, strict=True)) / 3000
    apart = 0.5 * float((ours.softmax(-1) - theirs.softmax(-1)).abs().sum())
    assert alike > (1 - apart) / (1 + apart) - 0.03
    assert alike < 1 - apart + 0.03


def test_temperature_sharpens_and_flattens() -> None:
    """Probabilities are raised to 1 / temperature."""
    cold, hot = draws(LOGITS, 3000, temperature=0.5), draws(LOGITS, 3000, temperature=2.0)
    squares = LOGITS.exp() ** 2 / (LOGITS.exp() ** 2).sum()
    assert cold[0] / 3000 == pytest.approx(float(squares[0]), abs=0.03)
    assert hot[4] > 1.5 * 0.05 * 3000


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"top_k": 4, "min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
    ],
)
def test_filters_let_in_exactly_their_set(params: dict[str, Any], allowed: set[int]) -> None:
    """top-k, top-p and min-p allow what their definitions say, all of it and nothing else."""
    assert draws(LOGITS, 1500, temperature=1.0, **params).keys() == allowed


def test_a_flat_distribution_is_filtered_exactly_too() -> None:
    """Where thousands of tokens share the mass, top-p still admits the right number of them."""
    logits = torch.zeros(10_000)
    logits[:6000] = 3.0
    mass = 6000 * torch.tensor(3.0).exp() / (6000 * torch.tensor(3.0).exp() + 4000)
    found = draws(logits, 300, temperature=1.0, top_p=float(mass) * 0.999)
    assert all(token is not None and token < 6000 for token in found)
    assert len(found) > 250


def test_top_p_is_a_share_of_what_a_wide_top_k_lets_in() -> None:
    """Of a thousand nearly equal tokens top-p lets in the first nine tenths, though they are too many to look at at once."""
    found = draws(-1e-4 * torch.arange(5000.0), 500, temperature=1.0, top_k=1000, top_p=0.9)
    assert 800 < max(token for token in found if token is not None) < 900


def test_seeds_repeat_and_do_not_depend_on_the_batch(make_engine: Callable[..., Engine]) -> None:
    """The same seed gives the same answer alone and among others; another seed gives another."""
    engine = make_engine()
    prompt = random_prompt(1, 20)
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=20, ignore_eos=True)
    alone = engine.submit(prompt, params)
    first = run(engine)[alone]
    others = [engine.submit(random_prompt(s, 10 + s), SamplingParams(max_tokens=9)) for s in range(5)]
    again = engine.submit(prompt, params)
    different = engine.submit(prompt, SamplingParams(temperature=1.5, seed=12, max_tokens=20, ignore_eos=True))
    found = run(engine)
    assert len(others) == 5
    assert found[again] == first
    assert found[different] != first


def test_penalties_push_away_what_was_said() -> None:
    """Repetition counts prompt and answer, presence and frequency the answer alone."""
    logits = torch.tensor([[0.0, 2.0, -1.0, 1.9, 1.8]])
    for params, answer, expected in (
        ({}, (), 1),
        ({"repetition_penalty": 1.5}, (), 3),
        ({"repetition_penalty": 1.5}, (3,), 4),
        ({"presence_penalty": 1.0}, (), 1),
        ({"presence_penalty": 1.0}, (1, 1), 3),
        ({"frequency_penalty": 0.06}, (1,), 1),
        ({"frequency_penalty": 0.06}, (1, 1), 3),
        ({"logit_bias": {4: 0.5}}, (), 4),
        ({"logit_bias": {1: -100.0}}, (), 3),
    ):
        (found,) = sample(logits, [sequence([1, 2], answer=answer, temperature=0.0, **params)])
        assert found.token_id == expected, (params, answer)


def test_min_tokens_bans_the_stop_tokens() -> None:
    """Until min_tokens are there, a stop token cannot be drawn."""
    logits = torch.tensor([[0.0, 1.0, 5.0]])
    assert sample(logits, [sequence(temperature=0.0, min_tokens=1)])[0].token_id == 1
    assert sample(logits, [sequence(temperature=0.0, min_tokens=1, answer=(1,))])[0].token_id == 2


def test_logprobs_are_of_the_model_s_own_distribution() -> None:
    """Temperature, penalties and filters change what is drawn and not what is reported."""
    logits = LOGITS.unsqueeze(0)
    (found,) = sample(logits, [sequence(temperature=0.3, top_k=1, presence_penalty=2.0, logprobs=3)])
    assert found.logprob == pytest.approx(float(LOGITS[0]), abs=1e-5)
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert [logprob for _, logprob in found.top] == pytest.approx(LOGITS[:3].tolist(), abs=1e-5)


def test_equal_logits_are_told_in_order() -> None:
    """The token that greedy decoding takes comes first among the likeliest, and equal ones by their ids."""
    logits = torch.zeros(2, 400)
    logits[1, 300:] = 1.0
    found = sample(logits, [sequence(temperature=0.0, logprobs=count) for count in (4, 20)])
    assert [[token for token, _ in one.top] for one in found] == [[0, 1, 2, 3], list(range(300, 320))]
    assert [one.token_id for one in found] == [0, 300]


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45])
def test_the_coldest_is_greedy(temperature: float) -> None:
    """However near to nothing a temperature is, what is likeliest is drawn."""
    assert draws(LOGITS, 20, temperature=temperature).keys() == {0}


def test_logits_that_are_not_finite_end_one_sequence(make_engine: Callable[..., Engine]) -> None:
    """NaN gives no token; beside it, others are sampled as ever."""
    rows = torch.stack((torch.full((5,), torch.nan), LOGITS))
    found = sample(rows, [sequence(temperature=1.0), sequence(temperature=0.0)])
    assert [sampled.token_id for sampled in found] == [None, 0]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ("",)}, "stop"),
        ({"logit_bias": {99_999: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(
    make_engine: Callable[..., Engine], params: dict[str, Any], param: str
) -> None:
    """The error names the parameter, and the engine takes the next request."""
    engine = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.submit([5, 6], SamplingParams(**params))
    assert caught.value.param == param
    engine.submit([5, 6], greedy(1))
    run(engine)
