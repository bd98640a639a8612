"""The scheduler without a model: whatever comes, everybody is served, the better first, and memory never runs out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from local_engine.block_pool import BlockPool
from local_engine.messages import EngineLoad, SamplingParams
from local_engine.scheduler import Scheduler
from local_engine.sequence import Sequence, SequenceStatus
from local_engine.text.tokenizer import TextStream
from tests.engine.test_text import TOKENIZER

BLOCK = 4
CONTEXT = 64


@dataclass(frozen=True)
class Arrival:
    """A request that comes before the `at`-th step."""

    prompt: int
    answer: int
    at: int
    priority: int
    salt: bytes
    kind: int  # requests of one kind share their beginning


arrivals = st.builds(
    Arrival,
    prompt=st.integers(1, CONTEXT - 24),
    answer=st.integers(1, 24),
    at=st.integers(0, 20),
    priority=st.sampled_from([0, 0, 1, 2]),
    salt=st.sampled_from([b"a", b"b"]),
    kind=st.integers(0, 2),
)


class Simulation:
    """Sequences under a scheduler; each step computes what was scheduled and draws the next number."""

    def __init__(self, blocks: int, step_tokens_max: int, sequences_max: int) -> None:
        pool = BlockPool(blocks, BLOCK)
        self.scheduler = Scheduler(pool, step_tokens_max=step_tokens_max, sequences_max=sequences_max)
        self.live: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []
        self.first_token_at: dict[int, int] = {}
        self.count = self.steps = 0

    def add(self, one: Arrival) -> Sequence:
        self.count += 1
        sequence = Sequence(
            id=self.count,
            tokens=[one.kind * 100 + at for at in range(one.prompt)],
            prompt_tokens=one.prompt,
            params=SamplingParams(),
            answer_tokens_max=one.answer,
            stop_token_ids=frozenset(),
            cache_salt=one.salt,
            priority=one.priority,
            seed=0,
            text=TextStream(TOKENIZER),
        )
        self.live[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        """One step, with what must hold in each."""
        scheduler, was_running = self.scheduler, list(self.scheduler.running)
        chunks = scheduler.schedule()
        scheduler.check_integrity(self.live.keys())
        served = {chunk.sequence.id for chunk in chunks}
        assert chunks, "nobody gets on"
        for lost in (s for s in was_running if s.status is SequenceStatus.WAITING):
            assert all(s.priority <= lost.priority for s in scheduler.running), "a lesser one kept its place"
        if scheduler.waiting:
            best = scheduler.waiting[0].priority
            assert not any(s.priority > best and s.id in served for s in scheduler.running), "a lesser one went first"
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.count
            if chunk.logit_rows:
                self.first_token_at.setdefault(sequence.id, self.steps)
                sequence.tokens.append(1000 + sequence.id)
                if sequence.answer_tokens >= sequence.answer_tokens_max:
                    scheduler.finish(self.live.pop(sequence.id))
                    self.ended.append(sequence)
        self.steps += 1
        scheduler.check_integrity(self.live.keys())


@settings(max_examples=150)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=20),
    blocks=st.integers(CONTEXT // BLOCK, 60),
    step_tokens_max=st.sampled_from([1, 3, 16, 100]),
    sequences_max=st.integers(1, 8),
)
@example(  # where a preemption for one decode must not put a newcomer behind a lesser one
    requests=[
        *[Arrival(1, 1, 0, 0, b"a", 0)] * 5,
        Arrival(1, 1, 12, 0, b"a", 0),
        Arrival(1, 5, 8, 0, b"a", 0),
        Arrival(30, 9, 0, 1, b"a", 1),
        Arrival(28, 7, 0, 1, b"b", 0),
        Arrival(39, 11, 0, 0, b"a", 0),
    ],
    blocks=33,
    step_tokens_max=16,
    sequences_max=6,
)
def test_everybody_is_served_and_the_better_first(
    requests: list[Arrival], blocks: int, step_tokens_max: int, sequences_max: int
) -> None:
    """However many long prompts a small pool meets, each step gets somebody on, nobody loses a place that a lesser one keeps,
    no lesser one is served while a better one waits, and in the end all are answered and no block is held."""
    simulation = Simulation(blocks, step_tokens_max, sequences_max)
    coming = sorted(requests, key=lambda one: one.at)
    while coming or simulation.live:
        while coming and (coming[0].at <= simulation.steps or not simulation.live):
            simulation.add(coming.pop(0))
        simulation.step()
        assert simulation.steps < 20_000, "no end"
    assert len(simulation.ended) == len(requests)
    assert simulation.scheduler.pool.available == blocks


@settings(max_examples=40)
@given(
    decodes=st.integers(1, 8), long=st.integers(30, 200), step_tokens_max=st.integers(8, 32), count=st.integers(1, 3)
)
def test_a_long_prompt_delays_no_token_by_more_than_a_step(
    decodes: int, long: int, step_tokens_max: int, count: int
) -> None:
    """While long prompts are read in chunks each running answer gets its token in each step, and no step has more tokens than
    it may have."""
    simulation = Simulation(400, step_tokens_max, decodes + count)
    answers = [simulation.add(Arrival(1, 60, 0, 0, b"a", index)) for index in range(decodes)]
    simulation.step()
    prompts = [simulation.add(Arrival(long, 1, 0, 0, b"b", 10 + index)) for index in range(count)]
    while any(one.id in simulation.live for one in prompts):
        before = {one.id: len(one.tokens) for one in answers if one.id in simulation.live}
        computed = sum(one.computed for one in (*answers, *prompts))
        simulation.step()
        assert all(len(one.tokens) == before[one.id] + 1 for one in answers if one.id in before)
        assert sum(one.computed for one in (*answers, *prompts)) <= computed + step_tokens_max


@settings(max_examples=40)
@given(
    prompt=st.integers(1, 30), answer=st.integers(1, 20), blocks=st.integers(16, 40), sequences_max=st.integers(1, 6)
)
def test_two_salts_share_alike(prompt: int, answer: int, blocks: int, sequences_max: int) -> None:
    """Where one salt has sent thirty requests before another sends its thirty, both are answered at the same rate from then
    on, however often some lose their blocks."""
    simulation = Simulation(blocks, 32, sequences_max)
    for salt in (b"a", b"b"):
        for _ in range(30):
            simulation.add(Arrival(prompt, answer, 0, 0, salt, salt[0]))
    while simulation.live:
        simulation.step()
        done = Counter(sequence.cache_salt for sequence in simulation.ended)
        if max(done.values(), default=0) < 30:
            assert abs(done[b"a"] - done[b"b"]) <= sequences_max + 1


@settings(max_examples=60)
@given(
    queues=st.lists(st.tuples(st.integers(0, 8), st.integers(4, 40)), min_size=2, max_size=5),
    prompt=st.integers(1, 40),
    sequences_max=st.integers(1, 3),
)
def test_predictions_are_in_the_order_of_what_happens(
    queues: list[tuple[int, int]], prompt: int, sequences_max: int
) -> None:
    """Of two states of the queue, that for which a first token is predicted clearly later does give it later, counted in
    steps."""
    found: list[tuple[float, int]] = []
    for waiting, length in queues:
        simulation = Simulation(200, 8, sequences_max)
        scheduler = simulation.scheduler
        for kind in range(waiting):  # nothing in common: what is reused is not foreseen
            simulation.add(Arrival(length, 10, 0, 0, b"a", kind + 2))
        if waiting:
            simulation.step()
        while scheduler.waiting and len(scheduler.running) < sequences_max:  # until what waits, waits for a place
            simulation.step()
        load = EngineLoad(
            is_ready=True,
            running=len(scheduler.running),
            running_max=sequences_max,
            waiting=len(scheduler.waiting),
            waiting_prefill_tokens=scheduler.prefill_tokens,
            prefill_tokens_per_s=800.0,  # a step of 8 tokens takes 10 ms, as does a decode
            decode_ms_per_token=10.0,
            answer_tokens_expected=10.0,
        )
        predicted, at = load.predicted_ttft_ms(prompt), simulation.steps
        own = simulation.add(Arrival(prompt, 1, 0, 0, b"a", 1))
        while own.id not in simulation.first_token_at:
            simulation.step()
        assert predicted is not None
        found.append((predicted, simulation.first_token_at[own.id] - at))
    for predicted, steps in found:
        for other_predicted, other_steps in found:
            if predicted > 3 * other_predicted + 60:
                assert steps >= other_steps
