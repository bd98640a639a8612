"""Speculation: drafts are found, verified, worth their price, and never change an answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from local_engine.engine import Engine
from local_engine.messages import SamplingParams
from local_engine.pace import Pace
from local_engine.scheduler import Chunk
from local_engine.speculative import Draft, Lookup, Source, Speculation
from tests.engine.checkpoints import naive_greedy, random_prompt
from tests.engine.conftest import at_fixed_prices, greedy, run

Make = Callable[..., Engine]


def test_a_lookup_proposes_what_followed_last_time() -> None:
    """The longest known ending wins, the latest occurrence counts, and what never stood before proposes nothing."""

    def propose(lookup: Lookup, tokens: list[int], count: int) -> tuple[int, ...]:
        found = lookup.find(tokens)
        return () if found is None else lookup.follow(tokens, found, count)

    lookup = Lookup()
    assert propose(lookup, [1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3], 2) == (9, 9)
    assert propose(lookup, [1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3, 8, 8, 2, 3], 1) == (8,)
    assert propose(lookup, [1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3, 8, 8, 2, 3, 5], 4) == ()
    assert propose(Lookup([4, 5, 6, 7]), [4, 5], 8) == (6, 7, 4, 5, 6, 7, 4, 5)


TEXT = [1, 2, 3, 4] * 8


def length(speculation: Speculation, room: int, cost: Callable[[int], float]) -> int:
    """Of the next draft from the text itself."""
    draft = speculation.draft(TEXT, room, cost)
    assert draft is None or draft.source is Source.TEXT
    return 0 if draft is None else len(draft.tokens)


def test_drafts_shrink_with_failure_and_pause() -> None:
    """A draft is as long as pays at the rate at which drafts hold; drafts that fail again and again are left out."""
    speculation = Speculation(Lookup(), tokens_max=8)

    def cost(more: int) -> float:
        return 1.0 + 0.15 * more

    first = length(speculation, 100, cost)
    speculation.observe(Source.TEXT, 8, 8)
    lengths = [length(speculation, 100, cost)]
    assert lengths[0] > first
    assert length(speculation, 2, cost) == 2
    for _ in range(6):
        speculation.observe(Source.TEXT, 4, 0)
        lengths.append(length(speculation, 100, cost))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]
    for _ in range(20):
        speculation.observe(Source.TEXT, 4, 0)
    assert length(speculation, 100, cost) == 0


def test_drafts_that_cost_more_than_they_save_are_not_made() -> None:
    """Where a longer step takes longer than the tokens it gains are worth, decoding goes on plainly, and tries again; so it
    does while nobody knows what a plain step takes."""
    speculation = Speculation(Lookup(), tokens_max=4)
    assert not any(length(speculation, 100, lambda more: 9.0) for _ in range(200))
    assert any(length(speculation, 100, lambda more: 1.1) for _ in range(2000))
    assert not any(length(Speculation(Lookup(), tokens_max=4), 100, lambda more: math.inf) for _ in range(9))


def test_the_better_source_drafts() -> None:
    """Of the text and the draft model the one that gains more is used; one's failures are not held against the other."""
    speculation = Speculation(Lookup(), tokens_max=4)

    def draft(model_cost: float) -> Draft | None:
        return speculation.draft(TEXT, 100, lambda more: 1.2, 100, lambda more: model_cost)

    first, dear = draft(1.1), draft(2.0)
    assert first == Draft(Source.MODEL, wanted=4)
    assert dear is not None
    assert dear.source is Source.TEXT
    for _ in range(40):
        speculation.observe(Source.TEXT, 4, 0)
    later = draft(2.0)
    assert later is not None
    assert later.source is Source.MODEL


def test_the_price_of_a_draft_is_measured() -> None:
    """Unmeasured lengths cost nothing, so that they get measured; then the price is the ratio of the times, the draft model's
    own included, until the measurement is old."""
    pace = Pace()
    assert pace.cost(1, 3) == math.inf
    pace.steps.observe(1, 0.010, 0)
    assert pace.cost(1, 3) == 1.0
    pace.steps.observe(4, 0.025, 0)
    assert pace.cost(1, 3) == 2.5
    assert pace.model_cost(1, 3) == 2.5
    pace.observe_draft(1, 0.002)
    assert pace.model_cost(1, 3) == pytest.approx(3.1)
    assert pace.cost(1, 2) == pytest.approx(2.0)  # between what was measured
    assert pace.cost(1, 7) == pytest.approx(4.5)  # and beyond
    assert pace.model_cost(4, 1) > pace.cost(4, 1)
    sequence = Chunk(None, 0, 1, 1)  # type: ignore[arg-type]
    for _ in range(1100):
        pace.observe([sequence, sequence], 0.010)
    assert pace.cost(1, 3) == math.inf


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("draft_tokens_max", [1, 8])
def test_greedy_answers_do_not_change(
    make_engine: Make, checkpoint: Callable[[str], Path], family: str, draft_tokens_max: int
) -> None:
    """With drafts accepted, a batch gives the naive answers in fewer steps than tokens."""
    engine = at_fixed_prices(make_engine(family, draft_tokens_max=draft_tokens_max))
    prompts = [random_prompt(seed, 6) * 4 for seed in range(3)]
    references = [list(naive_greedy(checkpoint(family), tuple(prompt), 40)) for prompt in prompts]
    ids = [
        engine.submit(prompt, greedy(40), reference=answer) for prompt, answer in zip(prompts, references, strict=True)
    ]
    found = run(engine)
    assert [found[id] for id in ids] == references
    assert sum(engine.load().accepted_tokens_total.values()) > 10


def test_seeded_answers_do_not_change(make_engine: Make) -> None:
    """The same seed gives the same answer with drafts and without, alone and beside others."""
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True)
    prompt = random_prompt(1, 5) * 5
    answers: list[list[int]] = []
    for draft_tokens_max, others in ((0, 0), (8, 0), (8, 4), (3, 1)):
        engine = at_fixed_prices(make_engine(draft_tokens_max=draft_tokens_max))
        for seed in range(others):
            engine.submit(random_prompt(seed, 20), greedy(20))
        reference = answers[0] if answers else ()
        id = engine.submit(prompt, params, reference=list(reference))
        answers.append(run(engine)[id])
    assert answers == [answers[0]] * 4
    assert engine.load().accepted_tokens_total["reference"] > 0


def test_a_stop_inside_a_draft_ends_there(make_engine: Make, checkpoint: Callable[[str], Path]) -> None:
    """An accepted draft that runs past a stop token or the limit is cut where the plain answer ends."""
    prompt = random_prompt(2, 10)
    answer = list(naive_greedy(checkpoint("llama"), tuple(prompt), 30))
    stop = answer[9]
    for params, end in ((greedy(30, stop_token_ids=(stop,)), answer.index(stop)), (greedy(7), 7)):
        engine = at_fixed_prices(make_engine(draft_tokens_max=8))
        id = engine.submit(prompt, params, reference=answer)
        assert run(engine)[id] == answer[:end]
        assert engine.load().kv_blocks_used == 0
