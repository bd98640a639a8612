"""The engine's promises beside equality: limits, order, failures, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from local_engine.config import EngineConfig
from local_engine.engine import Engine
from local_engine.messages import EngineFailed, Overloaded, PromptTooLong, SamplingParams
from tests.engine.checkpoints import naive_greedy, random_prompt, reference
from tests.engine.conftest import greedy, run

Make = Callable[..., Engine]


def test_the_context_bounds_prompt_and_answer(make_engine: Make) -> None:
    """A prompt of context - 1 gets one token; one more is refused with both numbers."""
    engine = make_engine(context_tokens_max=32)
    id = engine.submit(random_prompt(1, 31), greedy(100))
    assert len(run(engine)[id]) == 1
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(random_prompt(1, 32), greedy(1))
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (32, 32)


def test_a_small_pool_bounds_the_context(make_engine: Make) -> None:
    """What one sequence can ever hold is what the engine offers: a request that fits is always finished."""
    engine = make_engine(kv_blocks=8)
    assert engine.info.context_tokens == 32
    id = engine.submit(random_prompt(1, 20), greedy(100))
    assert len(run(engine)[id]) == 12


def test_an_answer_has_a_default_length(make_engine: Make) -> None:
    """Without max_tokens an answer ends at the engine's default."""
    engine = make_engine(answer_tokens_default=9)
    id = engine.submit([5, 6], SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(run(engine)[id]) == 9


def test_a_stop_token_ends_without_being_said(make_engine: Make) -> None:
    """A stop token counts as generated, gives reason stop, and is in neither tokens nor text."""
    engine = make_engine()
    prompt = random_prompt(2, 10)
    first = run_one(engine, prompt, greedy(10))
    stop = first[6]
    engine.submit(prompt, greedy(10, stop_token_ids=(stop,)))
    tokens: list[int] = []
    reason, usage = None, None
    while engine.has_work:
        for step in engine.step():
            tokens += step.output.token_ids
            reason, usage = step.output.finish_reason, step.usage
    assert tokens == first[: first.index(stop)]
    assert reason == "stop"
    assert usage is not None
    assert usage.completion_tokens == len(tokens) + 1


def run_one(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    id = engine.submit(prompt, params)
    return run(engine)[id]


def test_smaller_priority_goes_first_and_equals_in_order(make_engine: Make) -> None:
    """One at a time: by priority, then by arrival."""
    engine = make_engine(sequences_max=1)
    ids = [engine.submit(random_prompt(i, 5), greedy(3), priority=priority) for i, priority in enumerate((1, 1, 0, 0))]
    ended = []
    while engine.has_work:
        ended += [step.id for step in engine.step() if step.usage is not None]
    assert ended == [ids[2], ids[3], ids[0], ids[1]]


def test_salts_take_turns(make_engine: Make) -> None:
    """One salt's long queue does not stand before another's first request, and a greedy one gains nothing by it."""
    engine = make_engine(sequences_max=1)
    many = [engine.submit(random_prompt(i, 8), greedy(3), salt=b"many") for i in range(6)]
    few = [engine.submit(random_prompt(i, 8), greedy(3), salt=b"few") for i in range(2)]
    ended = []
    while engine.has_work:
        ended += [step.id for step in engine.step() if step.usage is not None]
    assert [ended.index(id) for id in few] == [1, 3]
    assert [id for id in ended if id in many] == many


def test_prompt_logprobs_are_the_model_s(make_engine: Make, checkpoint: Callable[[str], Any]) -> None:
    """Each prompt token but the first has its log probability, in whatever chunks it was read, cached or not; the first has 0."""
    prompt = random_prompt(4, 40)
    with torch.inference_mode():
        rows = reference(checkpoint("llama"))(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine = make_engine(step_tokens_max=7)
    for _ in range(2):
        engine.submit(prompt, greedy(3, prompt_logprobs=2))
        engine.submit(random_prompt(9, 11), greedy(8))
        said = []
        while engine.has_work:
            said += [token for step in engine.step() for token in step.output.prompt_logprobs]
            engine.check_integrity()
        assert [token.token_id for token in said] == prompt
        assert (said[0].logprob, said[0].top) == (0.0, ())
        for token, row in zip(said[1:], rows, strict=False):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
            assert token.top[0].token_id == int(row.argmax())


def test_a_full_queue_refuses_and_recovers(make_engine: Make) -> None:
    """queue_max waiting requests are the most; when they moved on, there is room again."""
    engine = make_engine(queue_max=2)
    for seed in range(2):
        engine.submit(random_prompt(seed, 5), greedy(2))
    with pytest.raises(Overloaded):
        engine.submit([5], greedy(1))
    engine.step()
    engine.submit([5], greedy(1))
    run(engine)


def test_a_hog_leaves_room_in_the_queue(make_engine: Make) -> None:
    """Who sends until he is refused takes four fifths of the places to wait in; others still find one, are answered in turn, and
    urgent work finds one behind its own partition's work that can wait."""
    engine = make_engine(queue_max=50, sequences_max=1)
    for _ in range(40):
        engine.submit([5, 6], greedy(2), salt=b"hog", priority=1)
    with pytest.raises(Overloaded, match="of the same partition"):
        engine.submit([5, 6], greedy(2), salt=b"hog", priority=1)
    light = [engine.submit([7, 8], greedy(2), salt=b"light", priority=1) for _ in range(3)]
    urgent = engine.submit([5, 9], greedy(2), salt=b"hog")
    ended: list[int] = []
    while engine.has_work:
        ended += [step.id for step in engine.step() if step.usage is not None]
    assert ended[0] == urgent
    assert max(ended.index(id) for id in light) <= 7


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_failing_step_fails_its_sequences_only(
    make_engine: Make, checkpoint: Callable[[str], Any], is_overlapped: bool
) -> None:
    """An exception in the model ends that step's sequences; waiting ones, and later ones, are answered correctly."""
    engine = make_engine(sequences_max=1, is_overlapped=is_overlapped)
    healthy = engine.runner.run

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    prompt = random_prompt(1, 20)
    run_one(engine, prompt, greedy(2))
    engine.runner.run = broken  # type: ignore[method-assign]
    failing, waiting = engine.submit(prompt, greedy(5)), engine.submit(prompt, greedy(5))
    (step,) = engine.step()
    engine.check_integrity()
    assert step.id == failing
    assert isinstance(step.error, EngineFailed)
    assert "out of memory" in str(step.error)
    engine.runner.run = healthy  # type: ignore[method-assign]
    assert engine.load().kv_blocks_cached == 0
    assert run(engine)[waiting] == list(naive_greedy(checkpoint("llama"), tuple(prompt), 5))


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_output_that_is_not_finite_spoils_nothing_else(
    make_engine: Make, checkpoint: Callable[[str], Any], is_overlapped: bool
) -> None:
    """NaN from the model fails the sequence it is in; what it left in the KV pool reaches nobody, not even the step that
    was launched before anybody saw it."""
    engine = make_engine(is_overlapped=is_overlapped)
    healthy = engine.runner.run

    def poisoned(*step: Any) -> Any:
        logits = healthy(*step)
        with torch.inference_mode():
            for pool in engine.runner.kv.pools:
                pool.fill_(torch.nan)
            logits[0] = torch.nan
        return logits

    prompts = [random_prompt(seed, 12) for seed in range(3)]
    engine.runner.run = poisoned  # type: ignore[method-assign]
    ids = [engine.submit(prompt, greedy(6)) for prompt in prompts]
    steps = engine.step()
    engine.check_integrity()
    engine.runner.run = healthy  # type: ignore[method-assign]
    if is_overlapped:
        assert steps == []
        steps = engine.step()
    failed = [step.id for step in steps if step.error is not None]
    found = {step.id: list(step.output.token_ids) for step in steps if step.error is None}
    for id, tokens in run(engine).items():
        found[id] += tokens
    assert len(failed) == 1
    for id, prompt in zip(ids, prompts, strict=True):
        if id not in failed:
            assert found[id] == list(naive_greedy(checkpoint("llama"), tuple(prompt), 6))


def test_an_overlapped_engine_draws_the_same(make_engine: Make) -> None:
    """Seeds, penalties, limits, stop strings and aborts mean the same where a step is scheduled before the last is seen."""
    wishes = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, seed=6, max_tokens=12, frequency_penalty=0.7, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, max_tokens=15, min_tokens=6, stop=["a"]),
        SamplingParams(temperature=0.9, top_p=0.8, seed=7, max_tokens=1),
    ]
    answers = []
    for is_overlapped in (False, True):
        engine = make_engine(is_overlapped=is_overlapped)
        leaving = engine.submit(random_prompt(9, 12), greedy(30))
        ids = [engine.submit(random_prompt(seed, 12), wish) for seed, wish in enumerate(wishes)]
        found: dict[int, list[int]] = {id: [] for id in ids}
        for step in range(40):
            for output in engine.step():
                if output.id != leaving:
                    found[output.id] += output.output.token_ids
            if step == 3:
                engine.abort(leaving)
            engine.check_integrity()
        assert not engine.has_work
        assert engine.load().kv_blocks_used == 0
        answers.append([found[id] for id in ids])
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]][::3] == [9, 1]


def test_idle_time_is_no_step_s(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer ends while the next step is under way already, that step is landed before the engine is idle: the hour
    until the next request slows no prediction down."""
    engine = make_engine(is_overlapped=True)
    now_s = 0.0
    monkeypatch.setattr("local_engine.speculation.timing.time.perf_counter", lambda: now_s)
    plain = engine.submit(random_prompt(1, 10), greedy(6))
    tokens = run(engine)[plain]
    for _ in range(3):
        engine.submit(
            random_prompt(1, 10), SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(tokens[-1],))
        )
        while engine.has_work:
            engine.step()
            now_s += 0.01
        now_s += 3600.0
    engine.check_integrity()
    assert 0.0 < engine.load().decode_ms_per_token < 1000.0


def test_the_load_tells_queue_memory_and_pace(make_engine: Make) -> None:
    """A router learns what waits, what is held, and when a prompt would see its first token."""
    engine = make_engine(sequences_max=1)
    before = engine.load().predicted_ttft_ms(100)
    assert before is not None
    for seed in range(3):
        engine.submit(random_prompt(seed, 50), greedy(5))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_prefill_tokens) == (1, 2, 100)
    assert load.kv_usage == pytest.approx(load.kv_blocks_used / 128)
    after = load.predicted_ttft_ms(100)
    assert after is not None
    assert after > before
    run(engine)
    assert engine.load().kv_blocks_used == 0


@pytest.mark.parametrize("options", [{"threads": 0}, {"kv_blocks": -1}, {"dtype": "int3"}])
def test_settings_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    """A wrong setting is a ValueError that names it."""
    with pytest.raises(ValueError, match=next(iter(options))):
        EngineConfig(**options)
