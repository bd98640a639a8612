"""Speculation: drafts are found, verified, worth their price, and never change an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from local_engine.engine import Engine
from local_engine.messages import SamplingParams
from local_engine.pace import Pace
from local_engine.speculative import Lookup, Speculation
from tests.engine.checkpoints import naive_greedy, random_prompt
from tests.engine.conftest import greedy, run

Make = Callable[..., Engine]


def test_a_lookup_proposes_what_followed_last_time() -> None:
    """The longest known ending wins, the latest occurrence counts, and what never stood before proposes nothing."""
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3], 2) == (9, 9)
    assert lookup.propose([1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3, 8, 8, 2, 3], 1) == (8,)
    assert lookup.propose([1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3, 8, 8, 2, 3, 5], 4) == ()
    assert Lookup([4, 5, 6, 7]).propose([4, 5], 8) == (6, 7, 4, 5, 6, 7, 4, 5)


def test_drafts_shrink_with_failure_and_pause() -> None:
    """A draft is as long as pays at the rate at which drafts hold; drafts that fail again and again are left out."""
    speculation = Speculation(Lookup(), tokens_max=8)
    text = [1, 2, 3, 4] * 8

    def cost(more: int) -> float:
        return 1.0 + 0.15 * more

    lengths = [len(speculation.draft(text, 100, cost))]
    speculation.observe(8, 8)
    assert len(speculation.draft(text, 100, cost)) == 8
    assert len(speculation.draft(text, 3, cost)) == 2
    for _ in range(6):
        speculation.observe(4, 0)
        lengths.append(len(speculation.draft(text, 100, cost)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]
    for _ in range(20):
        speculation.observe(4, 0)
    assert speculation.draft(text, 100, cost) == ()


def test_drafts_that_cost_more_than_they_save_are_not_made() -> None:
    """Where a longer step takes longer than the tokens it gains are worth, decoding goes on plainly, and tries again."""
    speculation = Speculation(Lookup(), tokens_max=4)
    text = [1, 2, 3, 4] * 8
    assert not any(speculation.draft(text, 100, lambda more: 9.0) for _ in range(200))
    assert any(speculation.draft(text, 100, lambda more: 1.1) for _ in range(2000))


def test_the_price_of_a_draft_is_measured() -> None:
    """Unmeasured sizes cost nothing, so that they get measured; then the price is the ratio of the times."""
    pace = Pace()
    assert pace.cost(1, 3) == 1.0
    pace._step_ms.update({1: 10.0, 4: 25.0})
    assert pace.cost(1, 3) == 2.5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("draft_tokens_max", [1, 8])
def test_greedy_answers_do_not_change(
    make_engine: Make, checkpoint: Callable[[str], Path], family: str, draft_tokens_max: int
) -> None:
    """With drafts accepted, a batch gives the naive answers in fewer steps than tokens."""
    engine = make_engine(family, draft_tokens_max=draft_tokens_max)
    prompts = [random_prompt(seed, 6) * 4 for seed in range(3)]
    references = [list(naive_greedy(checkpoint(family), tuple(prompt), 40)) for prompt in prompts]
    ids = [
        engine.submit(prompt, greedy(40), reference=prompt[-2:] + answer)
        for prompt, answer in zip(prompts, references, strict=True)
    ]
    found = run(engine)
    assert [found[id] for id in ids] == references
    assert engine.load().accepted_tokens_total > 10


def test_seeded_answers_do_not_change(make_engine: Make) -> None:
    """The same seed gives the same answer with drafts and without, alone and beside others."""
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True)
    prompt = random_prompt(1, 5) * 5
    answers = []
    for draft_tokens_max, others in ((0, 0), (8, 0), (8, 4), (3, 1)):
        engine = make_engine(draft_tokens_max=draft_tokens_max)
        for seed in range(others):
            engine.submit(random_prompt(seed, 20), greedy(20))
        reference = answers[0] if answers else ()
        id = engine.submit(prompt, params, reference=prompt[-2:] + list(reference))
        answers.append(run(engine)[id])
    assert answers == [answers[0]] * 4
    assert engine.load().accepted_tokens_total > 0


def test_a_stop_inside_a_draft_ends_there(make_engine: Make, checkpoint: Callable[[str], Path]) -> None:
    """An accepted draft that runs past a stop token or the limit is cut where the plain answer ends."""
    prompt = random_prompt(2, 10)
    answer = list(naive_greedy(checkpoint("llama"), tuple(prompt), 30))
    stop = answer[9]
    for params, end in ((greedy(30, stop_token_ids=(stop,)), answer.index(stop)), (greedy(7), 7)):
        engine = make_engine(draft_tokens_max=8)
        id = engine.submit(prompt, params, reference=prompt[-2:] + answer)
        assert run(engine)[id] == answer[:end]
        assert engine.load().kv_blocks_used == 0
