"""Greedy output equals transformers on the same weights, token for token, however the engine gets there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from local_engine.engine import Engine
from tests.engine.checkpoints import FAMILIES, naive_greedy, random_prompt, reference
from tests.engine.conftest import greedy, run

Make = Callable[..., Engine]
Folder = Callable[[str], Path]
ODD = ["llama", "qwen3", "smollm3-window", "phi3", "phi3-longrope", "granite4", "olmo3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_generate(make_engine: Make, checkpoint: Folder, family: str) -> None:
    """A batch of prompts of each family gives what `generate` gives for each prompt alone."""
    engine = make_engine(family)
    prompts = [random_prompt(seed, length) for seed, length in enumerate((1, 5, 16, 33, 60))]
    ids = [engine.submit(prompt, greedy(24)) for prompt in prompts]
    found = run(engine)
    model = reference(checkpoint(family))
    for id, prompt in zip(ids, prompts, strict=True):
        tensor = torch.tensor([prompt])
        expected = model.generate(tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=24, do_sample=False)
        assert found[id] == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ODD)
@pytest.mark.parametrize("step_tokens_max", [1, 3, 7, 64])
def test_chunked_prefill_changes_nothing(
    make_engine: Make, checkpoint: Folder, family: str, step_tokens_max: int
) -> None:
    """Prompts cut into chunks of any size, mixed with decodes, give the naive answer."""
    engine = make_engine(family, step_tokens_max=step_tokens_max)
    prompts = [random_prompt(seed, 9 + 6 * seed) for seed in range(4)]
    ids = [engine.submit(prompt, greedy()) for prompt in prompts]
    found = run(engine)
    assert [found[id] for id in ids] == [list(naive_greedy(checkpoint(family), tuple(p), 12)) for p in prompts]


@pytest.mark.parametrize("family", ODD)
def test_prefix_reuse_changes_nothing(make_engine: Make, checkpoint: Folder, family: str) -> None:
    """Prompts that share beginnings reuse blocks, and answer as if they did not."""
    engine = make_engine(family)
    common = random_prompt(1, 30)
    prompts = [common + random_prompt(seed, seed) for seed in range(2, 9)] + [common, common]
    first = engine.submit(prompts[0], greedy())
    found = run(engine)
    rest = [engine.submit(prompt, greedy()) for prompt in prompts[1:]]
    usages = {}
    while engine.has_work:
        for step in engine.step():
            found.setdefault(step.id, []).extend(step.output.token_ids)
            if step.usage is not None:
                usages[step.id] = step.usage
        engine.check_integrity()
    expected = [list(naive_greedy(checkpoint(family), tuple(p), 12)) for p in prompts]
    assert [found[id] for id in [first, *rest]] == expected
    assert all(usages[id].cached_tokens >= 28 for id in rest)


@pytest.mark.parametrize("family", ODD)
def test_preemption_changes_nothing(make_engine: Make, checkpoint: Folder, family: str) -> None:
    """A pool too small for all makes sequences lose their blocks and start over, with the same answers."""
    engine = make_engine(family, kv_blocks=16, context_tokens_max=64)
    prompts = [random_prompt(seed, 10) for seed in range(4)]
    ids = [engine.submit(prompt, greedy(40)) for prompt in prompts]
    found = run(engine)
    assert engine.load().preemptions_total > 0
    assert [found[id] for id in ids] == [list(naive_greedy(checkpoint(family), tuple(p), 40)) for p in prompts]


def test_equal_prompts_of_one_step_share_blocks(make_engine: Make) -> None:
    """n answers to one prompt, submitted together, hold its full blocks once."""
    engine = make_engine()
    prompt = random_prompt(3, 40)
    ids = [engine.submit(prompt, greedy(2)) for _ in range(8)]
    engine.step()
    assert engine.load().running == 8
    assert engine.load().kv_blocks_used == 9 + 8  # 9 full blocks once, and the last four tokens for each
    found = run(engine)
    assert len({tuple(found[id]) for id in ids}) == 1


def test_salts_isolate(make_engine: Make) -> None:
    """A prompt under another salt reuses nothing, and is not told apart by anything but time it would not have saved."""
    engine = make_engine()
    prompt = random_prompt(4, 40)
    engine.submit(prompt, greedy(1), salt=b"one")
    run(engine)
    found = []
    for salt in (b"two", b"", b"one"):
        engine.submit(prompt, greedy(1), salt=salt)
        (step,) = [step for step in engine.step() if step.usage is not None]
        assert step.usage is not None
        found.append(step.usage.cached_tokens)
    assert found == [0, 0, 36]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_transformers(make_engine: Make, checkpoint: Folder, family: str) -> None:
    """Step by step the likeliest tokens' log probabilities are those of transformers; in bfloat16 they are no further
    from float32 than those of transformers in bfloat16."""
    prompt = random_prompt(5, 50)
    errors = {}
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(family, dtype=dtype)
        engine.submit(prompt, greedy(10, logprobs=5))
        said = []
        while engine.has_work:
            for step in engine.step():
                said += step.output.logprobs
        assert len(said) == 10
        tokens = torch.tensor([prompt + [token.token_id for token in said]])
        exact, theirs = (_logprobs(checkpoint(family), tokens, d) for d in (torch.float32, torch.bfloat16))
        places = [(len(prompt) - 1 + i, top.token_id) for i, token in enumerate(said) for top in token.top]
        ours = torch.tensor([top.logprob for token in said for top in token.top])
        wanted = torch.tensor([float(exact[place]) for place in places])
        errors[dtype] = float((ours - wanted).abs().mean())
    errors["transformers"] = float((torch.tensor([float(theirs[place]) for place in places]) - wanted).abs().mean())
    assert errors["float32"] < 1e-4
    assert errors["bfloat16"] < 1.5 * errors["transformers"] + 0.03


def _logprobs(folder: Path, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return reference(folder, dtype)(tokens).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]
