"""A second model that drafts: the answers stay the large one's, its KV follows the blocks, and what it costs is weighed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from local_engine.config import EngineConfig, ModelError
from local_engine.engine import Engine
from local_engine.messages import SamplingParams
from tests.engine.checkpoints import naive_greedy, random_prompt, reference
from tests.engine.conftest import SMALL, at_fixed_prices, greedy, run

Make = Callable[..., Engine]
Folder = Callable[[str], Path]


def drafting(make_engine: Make, checkpoint: Folder, family: str = "llama", draft: str = "~", **more: Any) -> Engine:
    """An engine whose drafts a near model makes, and none but that one; free of charge, so that it always does."""
    engine = make_engine(family, draft_model=str(checkpoint(family + draft)), **{"draft_tokens_max": 4, **more})
    return at_fixed_prices(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_answers_are_the_large_model_s(make_engine: Make, checkpoint: Folder, family: str) -> None:
    """A batch with shared beginnings, drafted for by a near model, gives the naive answers in fewer steps than tokens."""
    engine = drafting(make_engine, checkpoint, family)
    common = random_prompt(1, 24)
    prompts = [common + random_prompt(seed, seed) for seed in range(2, 7)]
    ids = [engine.submit(prompt, greedy(30)) for prompt in prompts]
    found, steps = run(engine), 0
    expected = [list(naive_greedy(checkpoint(family), tuple(prompt), 30)) for prompt in prompts]
    assert [found[id] for id in ids] == expected
    engine.submit(prompts[0], greedy(30))
    while engine.has_work:
        engine.step()
        steps += 1
    load = engine.load()
    assert steps < 30
    assert load.accepted_tokens_total["model"] > 0.3 * load.drafted_tokens_total["model"] > 0


def test_a_model_that_drafts_for_itself_is_always_right(make_engine: Make, checkpoint: Folder) -> None:
    """With the model itself as its draft every guess holds, drawn ones too: so its KV is in its place, after reuse,
    preemption and accepted drafts."""
    engine = drafting(make_engine, checkpoint, draft="", kv_blocks=24, context_tokens_max=80)
    common = random_prompt(1, 20)
    for seed in range(5):
        prompt = common + random_prompt(seed, 1 + seed)
        engine.submit(prompt, SamplingParams(temperature=0.8 * (seed % 2), seed=seed, max_tokens=40, ignore_eos=True))
    run(engine)
    load = engine.load()
    assert load.preemptions_total > 0
    assert load.accepted_tokens_total["model"] == load.drafted_tokens_total["model"] > 50


def test_drawn_answers_do_not_change(make_engine: Make, checkpoint: Folder) -> None:
    """The same seeds give the same answers with the draft model and without."""
    answers = []
    for engine in (make_engine(draft_tokens_max=0), drafting(make_engine, checkpoint)):
        ids = [
            engine.submit(random_prompt(seed, 9), SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=25))
            for seed in range(6)
        ]
        found = run(engine)
        answers.append([found[id] for id in ids])
    assert answers[0] == answers[1]
    assert engine.load().accepted_tokens_total["model"] > 0


def test_the_distribution_is_the_large_model_s(make_engine: Make, checkpoint: Folder) -> None:
    """Of 1,500 answers that were drafted, the third tokens are distributed as the large model says: Pearson's statistic over
    the likely ones stays within what chance allows once in ten thousand times."""
    engine = drafting(make_engine, checkpoint, sequences_max=64, step_tokens_max=512, kv_blocks=1024)
    prompt, count = random_prompt(3, 12), 1500
    params = {"temperature": 1.0, "top_k": 6, "ignore_eos": True, "max_tokens": 4}
    ids = [engine.submit(prompt, SamplingParams(seed=seed, **params)) for seed in range(200)]  # type: ignore[arg-type]
    found: dict[int, list[int]] = {}
    for start in range(200, count + 200, 200):
        found |= run(engine, check=False)
        if start < count:
            ids += [
                engine.submit(prompt, SamplingParams(seed=seed, **params))  # type: ignore[arg-type]
                for seed in range(start, min(count, start + 200))
            ]
    said = Counter(tuple(found[id][:3]) for id in ids)
    expected = _triples(checkpoint("llama"), prompt)
    likely = {triple: p * count for triple, p in expected.items() if p * count >= 5}
    rest = count - sum(likely.values())
    others = count - sum(said[triple] for triple in likely)
    statistic = sum((said[triple] - n) ** 2 / n for triple, n in likely.items()) + (others - rest) ** 2 / rest
    freedom = len(likely)
    assert freedom > 15
    assert statistic < freedom + 3.72 * (2 * freedom) ** 0.5 + 10
    assert set(said) <= set(expected)
    load = engine.load()
    assert 0 < load.accepted_tokens_total["model"] < load.drafted_tokens_total["model"]


def _triples(folder: Path, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Every answer of three tokens that top-k 6 allows, with its probability."""
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    with torch.inference_mode():
        for _ in range(3):
            known = list(shares)
            logits = reference(folder)(torch.tensor([prompt + list(one) for one in known])).logits[:, -1]
            values, tokens = logits.topk(6, -1)
            parts = values.softmax(-1)
            shares = {
                (*one, int(token)): shares[one] * float(part)
                for one, own, row in zip(known, tokens, parts, strict=True)
                for token, part in zip(own, row, strict=True)
            }
    return shares


def test_a_draft_model_that_is_slow_is_left_alone(make_engine: Make, checkpoint: Folder) -> None:
    """Where drafting takes more time than it saves decoding goes on plainly."""
    engine = at_fixed_prices(drafting(make_engine, checkpoint), model_step_ms=90.0)
    engine.submit(random_prompt(1, 9), greedy(60))
    before = engine.load().drafted_tokens_total.get("model", 0)
    run(engine)
    assert engine.load().drafted_tokens_total.get("model", 0) == before


def test_a_failing_step_forgets_the_drafts_too(make_engine: Make, checkpoint: Folder) -> None:
    """When the draft model raises, the step's sequences end and what comes later is answered right."""
    engine = drafting(make_engine, checkpoint)
    prompt = random_prompt(1, 20)
    engine.submit(prompt, greedy(20))
    engine.step()
    assert engine.draft_model is not None
    healthy = engine.draft_model.fill

    def broken(chunks: Any) -> Any:
        raise RuntimeError("out of memory")

    engine.draft_model.fill = broken  # type: ignore[method-assign]
    (step,) = engine.step()
    assert step.error is not None
    engine.draft_model.fill = healthy  # type: ignore[method-assign]
    id = engine.submit(prompt, greedy(20))
    assert run(engine)[id] == list(naive_greedy(checkpoint("llama"), tuple(prompt), 20))


def test_a_draft_model_shares_the_memory(make_engine: Make, checkpoint: Folder) -> None:
    """The room for KV is divided between the two."""
    alone = make_engine(kv_blocks=None, kv_size_mb=1)
    both = make_engine(kv_blocks=None, kv_size_mb=1, draft_model=str(checkpoint("llama~")))
    assert both.load().kv_blocks_total == alone.load().kv_blocks_total // 2


def test_another_tokenizer_is_refused_by_name(checkpoint: Folder, tmp_path: Path) -> None:
    """A draft model whose token ids mean something else is no draft model, and the error names both and a token."""
    import json
    import shutil

    other = shutil.copytree(checkpoint("llama~"), tmp_path / "foreign")
    state = json.loads((other / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(
        ModelError, match=r"foreign has another tokenizer than llama: token \d+ is b'.' there and b'.' here"
    ):
        Engine(EngineConfig(model=str(checkpoint("llama")), draft_model=str(other), **SMALL))
