"""`./run bench engine --quality`: what quantised weights and the native kernels cost in quality.

The text is this project's own documentation, in windows of which nothing before is seen. Every way of running the model
tells the log probability of each token and its own likeliest; the reference is float32 on torch alone. Perplexity is
exp(-mean); agreement is the share of places where the likeliest token is the reference's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from local_engine.config import EngineConfig, ModelError
from local_engine.messages import SamplingParams

_ROOT = Path(__file__).parent.parent
_WAYS = (  # name, dtype, weights, whether the native kernels may be used
    ("float32, torch", "float32", "auto", False),
    ("bfloat16, torch", "bfloat16", "auto", False),
    ("bfloat16, native", "bfloat16", "auto", True),
    ("int8", "bfloat16", "int8", True),
    ("int4", "bfloat16", "int4", True),
)


@dataclass(frozen=True, slots=True)
class Told:
    """Of each place of the text: the log probability of the token that stands there, and the likeliest token's id."""

    logprobs: tuple[float, ...]
    likeliest: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Told) -> float:
        same = sum(a == b for a, b in zip(self.likeliest, other.likeliest, strict=True))
        return same / len(self.likeliest)


def read(config: EngineConfig, windows: int, window_tokens: int, *, is_native: bool) -> Told:
    """Run the text through an engine of that configuration."""
    from local_engine import linear
    from local_engine.engine import Engine

    with patch.object(linear, "kernels", linear.kernels if is_native else lambda: None):
        engine = Engine(config)
        tokens = engine.tokenizer.encode("\n\n".join(p.read_text() for p in sorted((_ROOT / "docs").glob("*.md"))))
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        logprobs: list[float] = []
        likeliest: list[int] = []
        for start in range(0, min(len(tokens), windows * window_tokens) - window_tokens + 1, window_tokens):
            engine.submit(tokens[start : start + window_tokens], params)
            while engine.has_work:
                for step in engine.step():
                    logprobs += [token.logprob for token in step.output.prompt_logprobs]
                    likeliest += [token.top[0].token_id for token in step.output.prompt_logprobs]
    return Told(tuple(logprobs), tuple(likeliest))


def compare(model: str | None, threads: int | None, windows: int, window_tokens: int) -> str:
    """The table, one line per way; ways this machine does not have are named with the reason."""
    reference: Told | None = None
    lines = [f"{'':20}{'perplexity':>12}{'change':>9}{'agreement':>11}"]
    for name, dtype, weights, is_native in _WAYS:
        config = EngineConfig(model=model, dtype=dtype, weights=weights, threads=threads, kv_size_mb=64)
        try:
            told = read(config, windows, window_tokens, is_native=is_native)
        except ModelError as error:
            lines.append(f"{name:20}{error}")
            continue
        reference = reference or told
        change = told.perplexity / reference.perplexity - 1
        lines.append(f"{name:20}{told.perplexity:12.3f}{change:9.2%}{told.agreement(reference):11.1%}")
    return "\n".join(lines)
