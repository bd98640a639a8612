"""Speculation: drafts are found, verified, worth their price, and never change an answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.engine import Engine
from local_engine.messages import SamplingParams
from local_engine.speculation.speculator import (
    MATCH_MAX,
    DraftRequest,
    DraftSource,
    PromptLookup,
    Speculation,
    Speculator,
)
from local_engine.speculation.timing import StepTiming
from tests.engine.checkpoints import naive_greedy, random_prompt
from tests.engine.conftest import FixedLine, at_fixed_prices, greedy, run

Make = Callable[..., Engine]


def test_a_lookup_proposes_what_followed_last_time() -> None:
    """Of earlier places the one wins before which most is alike, of equal ones the latest; what never stood before proposes
    nothing."""

    def propose(lookup: PromptLookup, tokens: list[int], count: int) -> tuple[int, tuple[int, ...]]:
        found = lookup.find(tokens)
        return (0, ()) if found is None else (found[1], lookup.follow(found[0], count))

    lookup = PromptLookup()
    assert propose(lookup, [1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3], 2) == (3, (9, 9))
    assert propose(lookup, [1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3, 8, 8, 2, 3], 1) == (2, (8,))
    assert propose(lookup, [1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3, 8, 8, 2, 3, 5], 4) == (0, ())
    assert propose(PromptLookup([4, 5, 6, 7]), [4, 5], 8) == (2, (6, 7, 4, 5, 6, 7, 4, 5))
    assert propose(PromptLookup(), [1, 2] * 30, 3) == (MATCH_MAX, (1, 2, 1))


def pace(base_ms: float = 8.0, row_ms: float = 2.0, model_step_ms: float | None = None) -> StepTiming:
    """One of a machine whose steps take so long with one row, and so much more with each other."""
    measured = StepTiming(steps=FixedLine(row_ms=row_ms, count=1, mean_rows=1.0, mean_ms=base_ms))
    if model_step_ms is not None:
        measured.draft_steps = FixedLine(count=1, mean_ms=model_step_ms)
    return measured


@dataclass
class Text:
    """A sequence that repeats itself, so that something can always be looked up; guesses hold with a chance of `rate`."""

    id: int
    rate: float
    model_rate: float = 0.0
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3, 4] * 8)
    speculation: Speculation = field(default_factory=lambda: Speculation(PromptLookup()))

    @property
    def ask(self) -> DraftRequest:
        return DraftRequest(self.id, self.speculation, self.tokens, 1000, draft_computed=len(self.tokens) - 1)


@dataclass
class World:
    """Steps of texts that decode together, and the time they took beside that of plain ones for as many tokens."""

    speculator: Speculator
    texts: list[Text]
    seed: int = 0
    tokens: int = 0
    ms: float = 0.0
    drafted: Counter[DraftSource] = field(default_factory=Counter)
    longest: int = 0

    def run(self, steps: int) -> None:
        draw, speculator = random.Random(self.seed), self.speculator
        rows = len(self.texts)
        for _ in range(steps):
            drafts = speculator.plan(rows, [text.ask for text in self.texts])
            deepest, asked = 0, 0
            for text in self.texts:
                draft = drafts.get(text.id)
                self.tokens += 1
                if draft is None:
                    continue
                size = max(len(draft.tokens), draft.wanted)
                rate = text.model_rate if draft.wanted else text.rate
                right = next((at for at in range(size) if draw.random() >= rate), size)
                speculator.observe(text.speculation, draft.kind, size, right)
                self.tokens += right
                self.drafted[draft.kind.source] += size
                self.longest = max(self.longest, size)
                asked += size
                deepest = max(deepest, draft.wanted)
            step_ms, model_ms = speculator.timing.steps.at(rows + asked), speculator.timing.draft_steps.at(rows)
            assert step_ms is not None
            self.ms += step_ms + deepest * (model_ms or 0.0)

    @property
    def price(self) -> float:
        """The time of a token in times of what it takes without drafts."""
        plain_ms = self.speculator.timing.steps.at(len(self.texts))
        assert plain_ms is not None
        return self.ms / self.tokens * len(self.texts) / plain_ms


@settings(max_examples=25)
@given(
    rows=st.sampled_from([1, 4, 8]),
    rates=st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7]), min_size=16, max_size=16),
    model_rate=st.sampled_from([0.0, 0.2, 0.5]),
    base_ms=st.floats(2.5, 20.0),
    model_step_ms=st.sampled_from([None, 0.3, 3.0]),
    seed=st.integers(0, 99),
)
def test_drafts_cost_a_hundredth_at_most_where_they_lose(
    rows: int, rates: list[float], model_rate: float, base_ms: float, model_step_ms: float | None, seed: int
) -> None:
    """However likely guesses are to hold, in whichever of the sequences, and whatever steps take: over a thousand steps
    no token takes more than a hundredth longer than without drafts, beside what chance does."""
    speculator = Speculator(pace(base_ms, 2.0, model_step_ms), 8, 4096 if model_step_ms is not None else 0)
    world = World(speculator, [Text(id, rates[id], model_rate) for id in range(rows)], seed)
    world.run(1000)
    assert world.price < 1.01


def test_drafts_win_where_they_hold() -> None:
    """Where nearly every guess holds drafts get long and tokens cheap, among few sequences cheaper than among many."""
    prices = []
    for rows in (1, 8):
        world = World(Speculator(pace(8.0, 2.0), 8), [Text(id, 0.95) for id in range(rows)])
        world.run(300)
        assert world.longest == 8
        prices.append(world.price)
    assert prices[0] < 0.6
    assert prices[0] < prices[1] < 0.9


def test_a_large_batch_drafts_less_deeply() -> None:
    """The dearer rows are beside the step they join, the fewer guesses join it."""
    drafted = []
    for row_ms in (0.1, 1.0, 2.0, 6.0):
        world = World(Speculator(pace(8.0, row_ms), 8), [Text(id, 0.8) for id in range(4)])
        world.run(300)
        drafted.append(sum(world.drafted.values()))
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 5 * drafted[-1]


def test_the_better_source_drafts() -> None:
    """Of the text and the draft model each sequence uses that whose guesses hold oftener there."""
    speculator = Speculator(pace(20.0, 0.5, 0.5), 8, 4096)
    texts = [Text(0, 0.95, 0.3), Text(1, 0.05, 0.95)]
    World(speculator, texts).run(200)
    last = [World(speculator, [text]) for text in texts]
    for world in last:
        world.run(60)
    assert last[0].drafted[DraftSource.TEXT] > 4 * last[0].drafted[DraftSource.MODEL]
    assert last[1].drafted[DraftSource.MODEL] > 4 * last[1].drafted[DraftSource.TEXT]


def test_what_one_sequence_taught_the_next_one_knows() -> None:
    """A source that lost in one sequence is not tried anew in each; one that won begins with long drafts."""
    for rate, low, high in ((0.0, 0, 2), (0.95, 6, 8)):
        speculator = Speculator(pace(), 8)
        World(speculator, [Text(0, rate)]).run(60)
        (fresh,) = (Text(1, rate),)
        draft = speculator.plan(1, [fresh.ask]).get(1)
        assert low <= (len(draft.tokens) if draft is not None else 0) <= high


def test_a_source_that_lost_is_tried_again() -> None:
    """When guesses begin to hold after thousands of steps in which none did, drafts come back."""
    speculator = Speculator(pace(), 8)
    World(speculator, [Text(0, 0.0)]).run(2000)
    world = World(speculator, [Text(1, 0.95)])
    world.run(3000)
    assert world.price < 0.8


def test_a_prompt_is_worth_the_draft_model_s_reading_only_while_it_pays() -> None:
    """Where the draft model has a long prompt to read first, it is asked when there is credit for that, and not before."""
    speculator = Speculator(pace(8.0, 1.0, 0.2), 8, 4096)
    speculator.timing.draft_steps.row_ms = 0.1
    behind = DraftRequest(0, Speculation(PromptLookup()), list(range(2000)), 1000, draft_computed=0)
    assert speculator.plan(1, [behind]) == {}
    World(speculator, [Text(1, 0.0, 0.95)]).run(200)
    assert speculator.plan(1, [behind])[0].wanted > 0


def test_the_price_of_a_row_is_measured() -> None:
    """Prompts say what a row takes at first; then steps of different sizes do, whatever else kept the machine busy in some of
    them; and a step's time follows that of late."""
    measured = StepTiming()
    assert measured.steps.at(1) is None
    measured.observe([64], 0.064, 0.064, is_decode=False)
    measured.observe([1], 0.008, 0.008, is_decode=True)
    assert measured.steps.row_ms == pytest.approx(1.0)
    assert measured.steps.at(3) == pytest.approx(10.0)
    draw = random.Random(1)
    for _ in range(400):
        rows = draw.choice((1, 1, 2, 4, 9))
        wait_s = 0.03 if draw.random() < 0.1 else 0.0
        step_s = 0.006 + 0.002 * rows + wait_s
        measured.observe([1] * rows, step_s, step_s, is_decode=True)
    for rows in (1, 4, 9):
        assert measured.steps.at(rows) == pytest.approx(6.0 + 2.0 * rows, rel=0.15)
    for _ in range(400):
        measured.observe([1], 0.02, 0.02, is_decode=True)
    assert measured.steps.at(1) == pytest.approx(20.0, rel=0.05)


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
