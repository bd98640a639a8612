"""`./run bench engine`: the local engine beside transformers' `generate`, on the same weights in the same number type.

    ./run bench engine [--model M | --shape 0.6b] [--weights int8] [--threads N] [--repeats 3] [--quick] [--json FILE]
    ./run bench engine --quality                     perplexity and agreement of every way to run the model

Both run in this process, one after the other within each repeat, so that a busy machine slows both; figures are medians.
Prompts are random tokens, new in every repeat: nothing is reused but what a scenario says is shared. Transformers gets all
prompts of a batch at equal length and generates them as one static batch, which is its best case.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bench.engine_quality import compare
from bench.engine_shapes import SHAPES, make_checkpoint
from local_engine.config import EngineConfig, ModelError
from local_engine.families import FAMILIES
from local_engine.messages import SamplingParams
from local_engine.options import prepare_environment


@dataclass(frozen=True, slots=True)
class Scenario:
    """`batch` prompts of `shared` common and `own` tokens of their own, each answered with `answer` tokens."""

    name: str
    figure: str
    batch: int
    own: int
    answer: int
    shared: int = 0


PREFILL, DECODE, TOTAL = "prefill tokens/s", "decode tokens/s", "output tokens/s"
SCENARIOS = (
    Scenario("prefill 512", PREFILL, 1, 512, 1),
    Scenario("prefill 4096", PREFILL, 1, 4096, 1),
    Scenario("decode, batch 1", DECODE, 1, 128, 48),
    Scenario("decode, batch 8", DECODE, 8, 128, 32),
    Scenario("decode, batch 32", DECODE, 32, 64, 28),
    Scenario("decode, batch 64", DECODE, 64, 32, 16),
    Scenario("shared prefix, 16 x (384 + 24)", TOTAL, 16, 24, 24, shared=384),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one scenario: seconds from submission until every sequence has its first token, and until all is done.

    `tail_tokens` came in the `tail_s` in which all sequences were decoding: after the last first token and before the
    first end. `cpu_s`: this process' CPU time over the run, which a busy machine changes little.
    """

    first_s: float
    total_s: float
    tail_s: float
    tail_tokens: int
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of one system in one scenario; a figure that the scenario does not measure is None."""

    system: str
    scenario: str
    ttft_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    tpot_ms: float | None
    output_tokens_per_s: float
    cpu_s: float
    dtype: str
    threads: int
    repeats: int

    def figure(self, name: str) -> float:
        """The value of the scenario's headline."""
        values = {PREFILL: self.prefill_tokens_per_s, DECODE: self.decode_tokens_per_s, TOTAL: self.output_tokens_per_s}
        return values[name] or 0.0


class System(Protocol):
    """What answers prompts greedily."""

    name: str

    def run(self, prompts: Sequence[list[int]], answer: int) -> Run:
        """Answer all prompts, given at once, with `answer` tokens each."""


class Sameway:
    """The engine, inline: what the worker's thread does, without the socket."""

    name = "sameway"

    def __init__(self, config: EngineConfig) -> None:
        from local_engine.engine import Engine

        self.engine = Engine(config)

    def run(self, prompts: Sequence[list[int]], answer: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        start = time.perf_counter()
        waiting = {self.engine.submit(prompt, params) for prompt in prompts}
        first_s = tail_s = 0.0
        tail_tokens, has_ended = 0, False
        while self.engine.has_work:
            outputs = self.engine.step()
            now_s = time.perf_counter() - start
            if waiting:
                waiting -= {output.id for output in outputs}
                first_s = now_s
            elif not has_ended:
                tail_tokens += sum(len(output.output.token_ids) for output in outputs)
                tail_s = now_s - first_s
            has_ended = has_ended or any(output.usage is not None for output in outputs)
        return Run(first_s, time.perf_counter() - start, tail_s, tail_tokens)


class Transformers:
    """`generate` on a static batch. Built from the engine's own checkpoint, so that both have the same weights."""

    name = "transformers"

    def __init__(self, model: str | None, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from local_engine.loader import open_checkpoint
        from local_engine.quantised import Quantised

        checkpoint = open_checkpoint(model)
        is_folder = model is not None and Path(model).is_dir()
        config = (
            AutoConfig.from_pretrained(model) if is_folder else AutoConfig.for_model(**_hf_config(checkpoint.config))
        )
        self._device = torch.device(device)
        self._model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        weights = {
            piece.name: piece.tensor.dequantised() if isinstance(piece.tensor, Quantised) else piece.tensor
            for piece in checkpoint.weights()
        }
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        if unexpected or [name for name in missing if name != "lm_head.weight"]:
            raise ModelError(f"transformers cannot take these weights: missing {missing}, unexpected {unexpected}")
        self._model.tie_weights()
        self._model.to(self._device)
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def run(self, prompts: Sequence[list[int]], answer: int) -> Run:
        import torch

        times: list[float] = []

        def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        tensor = torch.tensor(prompts, device=self._device)
        start = time.perf_counter()
        self._model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=answer,
            do_sample=False,
            stopping_criteria=[note],
        )
        tail_s = times[-1] - times[0]
        return Run(times[0] - start, time.perf_counter() - start, tail_s, len(prompts) * (answer - 1))


def _hf_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint that may have none (a GGUF file)."""
    types = {family.hf: family.gguf for family in FAMILIES}  # of the plain ones, GGUF's name is the model type
    return {
        "model_type": types[config.architecture],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocabulary_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "attention_bias": config.has_qkv_bias,
        "tie_word_embeddings": config.has_tied_embeddings,
    }


def make_prompts(scenario: Scenario, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids; another seed shares nothing."""
    draw = random.Random(seed)
    common = [draw.randrange(vocabulary) for _ in range(scenario.shared)]
    return [common + [draw.randrange(vocabulary) for _ in range(scenario.own)] for _ in range(scenario.batch)]


def summarise(system: str, scenario: Scenario, runs: Sequence[Run], dtype: str, threads: int) -> Row:
    """Medians over the repeats."""
    tokens = scenario.batch * (scenario.shared + scenario.own)
    first_s = statistics.median(run.first_s for run in runs)
    total_s = statistics.median(run.total_s for run in runs)
    paces = [run.tail_tokens / run.tail_s for run in runs if run.tail_tokens]
    decode = statistics.median(paces) if paces else None
    return Row(
        system=system,
        scenario=scenario.name,
        ttft_ms=1000 * first_s,
        prefill_tokens_per_s=tokens / first_s,
        decode_tokens_per_s=decode,
        tpot_ms=None if decode is None else 1000 * scenario.batch / decode,
        output_tokens_per_s=scenario.batch * scenario.answer / total_s,
        cpu_s=statistics.median(run.cpu_s for run in runs),
        dtype=dtype,
        threads=threads,
        repeats=len(runs),
    )


def measure(
    systems: Sequence[System], scenario: Scenario, vocabulary: int, repeats: int, seconds_max: float
) -> dict[str, list[Run]]:
    """Every system in turn, `repeats` times or until `seconds_max` are over, after a short run that is not counted."""
    runs: dict[str, list[Run]] = {system.name: [] for system in systems}
    end = time.perf_counter() + seconds_max
    for repeat in range(repeats + 1):
        if repeat > 1 and time.perf_counter() > end:
            break
        for system in systems:
            prompts = make_prompts(scenario, vocabulary, seed=repeat)
            start = time.process_time()
            run = system.run(prompts, scenario.answer if repeat else min(2, scenario.answer))
            run = replace(run, cpu_s=time.process_time() - start)
            if repeat:
                runs[system.name].append(run)
    return runs


def render(scenarios: Sequence[Scenario], rows: Sequence[Row]) -> str:
    """One line per scenario: each system's headline figure, and of the first to the second the ratio of the figures and
    that of the CPU time, both above 1 where the first is ahead."""
    names = list(dict.fromkeys(row.system for row in rows))
    titles = "".join(f"{name:>14}" for name in names)
    lines = [f"{'':32}{'':18}{titles}{'ratio':>9}{'CPU time':>10}"]
    for scenario in scenarios:
        own = [row for row in rows if row.scenario == scenario.name]
        figures = [row.figure(scenario.figure) for row in own]
        has_ratio = len(own) > 1 and figures[1] and own[0].cpu_s
        ratio = f"{figures[0] / figures[1]:8.2f}x{own[1].cpu_s / own[0].cpu_s:9.2f}x" if has_ratio else ""
        values = "".join(f"{value:14,.1f}" for value in figures)
        lines.append(f"{scenario.name:32}{scenario.figure:18}{values}{ratio}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench engine", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="a GGUF file, a checkpoint folder or a hub name; default: the embedded model")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16; the same for both")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", default="auto", help="auto, int8, int4: the engine's; transformers keeps its own")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a random model of that shape, made in .bench/")
    parser.add_argument("--quality", action="store_true", help="perplexity and agreement instead of speed")
    parser.add_argument("--windows", type=int, default=8, help="--quality: how many windows of 256 tokens")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds-max", type=float, default=25.0, help="per scenario; one repeat there always is")
    parser.add_argument("--quick", action="store_true", help="one repeat, no batch above 16, no prompt above 512")
    parser.add_argument("--alone", action="store_true", help="do not load transformers")
    parser.add_argument("--json", type=Path, help="write the rows to this file, one JSON object a line")
    options = parser.parse_args(argv)
    prepare_environment()
    import torch

    if options.shape:
        options.model = str(make_checkpoint(Path(".bench") / f"shape-{options.shape}", options.shape))
    if options.quality:
        print(compare(options.model, options.threads, options.windows, 256))
        return 0
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        weights=options.weights,
        device=options.device,
        threads=options.threads,
        draft_tokens_max=0,  # random tokens foretell nothing
        sequences_max=64,
    )
    scenarios = [
        scenario for scenario in SCENARIOS if not (options.quick and (scenario.batch >= 32 or scenario.own > 512))
    ]
    try:
        ours = Sameway(config)
        info = ours.engine.info
        systems: list[System] = [ours]
        if not options.alone:
            systems.append(Transformers(options.model, info.dtype, info.device))
    except (ModelError, ValueError) as error:
        print(f"bench engine: {error}", file=sys.stderr)
        return 2
    threads = torch.get_num_threads()
    print(
        f"{info.name}: {info.architecture}, {info.parameters:,} weights, {info.dtype}, {info.device}, {threads} threads"
    )
    rows: list[Row] = []
    for scenario in scenarios:
        print(f"  {scenario.name} ...", file=sys.stderr, flush=True)
        found = measure(
            systems, scenario, info.vocabulary_size, 1 if options.quick else options.repeats, options.seconds_max
        )
        rows += [summarise(name, scenario, runs, info.dtype, threads) for name, runs in found.items()]
    print(render(scenarios, rows))
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return 0
