"""`./run bench engine --quality`: what quantised weights and the native kernels cost in quality.

The text is this project's own documentation, in windows of which nothing before is seen. Every way of running the model
tells the log probability of each token and its own likeliest; the reference is float32 on torch alone. Perplexity is
exp(-mean); agreement is the share of places where the likeliest token is the reference's.

A file that is quantised already would lose next to nothing by being quantised again on the same grid. What int8, int4 and
the formats of GGUF lose is therefore measured on its weights in bfloat16 with their inner units in another order
(`bench.engines.reorder`): the same function, but no longer on any grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from bench.engines.files import in_format
from bench.engines.reorder import reordered
from local_engine.checkpoints.open import default_model
from local_engine.config import EngineConfig, ModelError
from local_engine.messages import SamplingParams

_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Way:
    """How the model is run. `format`: of the file, None for the model as it is; `is_native`: the kernels may be used."""

    name: str
    dtype: str
    weights: str = "auto"
    is_native: bool = True
    format: str | None = None


_AS_IT_IS = (
    Way("float32, torch", "float32", is_native=False),
    Way("bfloat16, torch", "bfloat16", is_native=False),
    Way("bfloat16, native", "bfloat16"),
)
_AT_LOAD = (
    Way("int8 at load", "bfloat16", "int8"),
    Way("int4 at load", "bfloat16", "int4"),
    Way("fp8 at load", "bfloat16", "fp8"),
)
_IN_FORMATS = (
    Way("GGUF Q8_0", "bfloat16", format="q8_0"),
    Way("GGUF Q4_1", "bfloat16", format="q4_1"),
    Way("GGUF Q4_0", "bfloat16", format="q4_0"),
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
    from local_engine.engine import Engine
    from local_engine.kernels import cpu

    with patch.object(cpu, "kernels", cpu.kernels if is_native else lambda: None):
        engine = Engine(config)
        tokens = engine.tokenizer.encode("\n\n".join(p.read_text() for p in sorted((_ROOT / "docs").glob("*.md"))))
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        logprobs: list[float] = []
        likeliest: list[int] = []
        for start in range(0, min(len(tokens), windows * window_tokens) - window_tokens + 1, window_tokens):
            engine.submit(tokens[start : start + window_tokens], params)
            while engine.has_work:
                for step in engine.step():
                    predicted = step.output.prompt_logprobs[1:]
                    logprobs += [token.logprob for token in predicted]
                    likeliest += [token.top[0].token_id for token in predicted]
    return Told(tuple(logprobs), tuple(likeliest))


def compare(model: str | None, folder: Path, threads: int | None, windows: int, window_tokens: int) -> str:
    """Two tables for a GGUF file, as it is and reordered in bfloat16 (see above); one for any other checkpoint."""
    path = Path(model) if model is not None else default_model()
    if not path.is_file():
        return _table(str(path), (*_AS_IT_IS, *_AT_LOAD), folder, threads, windows, window_tokens)
    float_file = reordered(path, folder)
    tables = (
        ("as the file has it", _table(str(path), _AS_IT_IS, folder, threads, windows, window_tokens)),
        (
            "in bfloat16, reordered, and quantised from there",
            _table(str(float_file), (*_AS_IT_IS, *_AT_LOAD, *_IN_FORMATS), folder, threads, windows, window_tokens),
        ),
    )
    return "\n\n".join(f"{path.name}, {title}\n{table}" for title, table in tables)


def _table(
    model: str, ways: tuple[Way, ...], folder: Path, threads: int | None, windows: int, window_tokens: int
) -> str:
    """One line per way, beside the first one; ways this machine does not have are named with the reason."""
    reference: Told | None = None
    lines = [f"{'':20}{'perplexity':>12}{'change':>9}{'agreement':>11}"]
    for way in ways:
        try:
            file = model if way.format is None else str(in_format(Path(model), way.format, folder))
            config = EngineConfig(model=file, dtype=way.dtype, weights=way.weights, threads=threads, kv_size_mb=64)
            told = read(config, windows, window_tokens, is_native=way.is_native)
        except ModelError as error:
            lines.append(f"{way.name:20}{error}")
            continue
        reference = reference or told
        change = told.perplexity / reference.perplexity - 1
        lines.append(f"{way.name:20}{told.perplexity:12.3f}{change:9.2%}{told.agreement(reference):11.1%}")
    return "\n".join(lines)
