"""`./run bench engine`: the local engine beside others on the very same weights, and beside what the machine allows.

    ./run bench engine [--model FILE | --shape 0.6b] [--format bf16,q8_0,q4_0] [--only decode-8,shared-cold] [--quick]
                       [--peers transformers,transformers-cb,llama.cpp,vllm] [--threads N] [--repeats 3] [--json FILE]
    ./run bench engine --quality          perplexity and agreement of every way to run the model
    ./run bench engine --soak MINUTES     random traffic, the engine's process killed at random: is anything lost or leaked?

Systems take turns within each repeat, so that a busy machine slows all; figures are medians. Prompts are random tokens,
new in every repeat: nothing is reused but what a scenario says is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engines import loads
from bench.engines.files import FORMATS, SHAPES, float_folder, in_format, shape_file
from bench.engines.loads import Row, Run, Scenario, System, summarise
from bench.lab.native import WORK
from bench.lab.processes import BenchError
from local_engine.config import EngineConfig, ModelError
from local_engine.messages import ModelInfo
from local_engine.process import prepare_environment

PEERS = ("transformers", "transformers-cb", "llama.cpp", "vllm")
_MODELS = WORK / "models"
_KV_SIZE_SHARED_MB = 16_384  # on a GPU with others beside, where one engine alone takes all
_OPEN_SHARE = 0.6  # of what the first system answers when all comes at once: the rate of an open load
_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_1": 5.0, "q4_0": 4.5, "int8": 9.0, "int4": 6.3}
_TITLES = (
    "scenario",
    "system",
    "weights",
    "figure",
    "value",
    "floor",
    "share, by CPU",
    "ahead",
    "CPU ms/token",
    "ahead",
)
_PERCENTILES = ("TTFT p50, p95, p99 ms", "TPOT p50, p95, p99 ms")
TITLES = "| " + " | ".join((*_TITLES, *_PERCENTILES)) + " |\n" + "| --- " * 12 + "|"
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line decided."""

    files: dict[str, str | None]  # format -> model, as the engine takes it
    weights: str
    dtype: str
    device: str
    threads: int
    peers: tuple[str, ...]


def start_systems(given: Given) -> tuple[list[System], list[str], ModelInfo]:
    """Every system that can be had, those that can't with the reason, and what the engine says of the model. Raises
    ModelError where the engine itself can't load it."""
    from bench.engines.systems import Sameway
    from local_engine import machine

    engines: list[Sameway] = []
    has_company = bool(given.peers) or len(given.files) > 1
    is_on_gpu = machine.choose_device(given.device).type == "cuda"
    for format, model in given.files.items():
        weights = format if given.weights == "auto" else given.weights
        config = EngineConfig(
            model=model,
            dtype=given.dtype,
            weights=given.weights,
            device=given.device,
            threads=given.threads,
            draft_tokens_max=0,
            sequences_max=64,
            kv_size_mb=_KV_SIZE_SHARED_MB if has_company and is_on_gpu else None,
        )
        engines.append(Sameway(config, weights))
    info = engines[0].engine.info
    systems: list[System] = [*engines]
    absent: list[str] = []
    for name, start in _peers(given, info):
        try:
            systems.append(start())
        except (BenchError, ModelError, ImportError, OSError) as error:
            absent.append(f"{name}: {error}")
    return systems, absent, info


def _peers(given: Given, info: ModelInfo) -> list[tuple[str, Callable[[], System]]]:
    """What starts each peer that was asked for."""
    from bench.engines.systems import Transformers, TransformersContinuous, load_transformers
    from bench.peers.llama_cpp import llama_cpp
    from bench.peers.vllm import vllm
    from local_engine.checkpoints.open import default_model

    first = next(iter(given.files.values()))
    starts: list[tuple[str, Callable[[], System]]] = []
    made: list[Any] = []
    dtype = _DTYPES[info.dtype]

    def shared_model() -> Any:
        if not made:
            made.append(load_transformers(first, info.dtype, info.device))
        return made[0]

    def folder() -> Path:
        path = Path(first) if first is not None else default_model()
        return path if path.is_dir() else float_folder(path, _MODELS)

    if "transformers" in given.peers:
        starts.append(("transformers", lambda: Transformers(shared_model(), dtype)))
    if "transformers-cb" in given.peers:
        starts.append(("transformers-cb", lambda: TransformersContinuous(shared_model(), dtype)))
    if "llama.cpp" in given.peers:
        for format, model in given.files.items():
            path = Path(model) if model is not None else default_model()
            starts.append((f"llama.cpp {format}", lambda p=path, f=format: llama_cpp(p, f, given.threads)))  # type: ignore[misc]
    if "vllm" in given.peers:
        starts.append(("vllm", lambda: vllm(folder(), given.threads)))
    return starts


def measure(
    systems: Sequence[System],
    scenario: Scenario,
    vocabulary: int,
    *,
    repeats: int,
    seconds_max: float,
    rate_per_s: float | None,
    between: Callable[[], None] = lambda: None,
) -> tuple[dict[int, list[Run]], list[str]]:
    """Every system in turn, `repeats` times or until `seconds_max` are over, after a short run that is not counted. A
    system that fails is left out from then on, with the reason."""
    runs: dict[int, list[Run]] = {index: [] for index, system in enumerate(systems) if system.lacks(scenario) is None}
    failures = [f"{s.name} {s.weights}: {why}" for s in systems if (why := s.lacks(scenario)) is not None]
    end = time.perf_counter() + seconds_max
    for repeat in range(repeats + 1):
        if repeat > 1 and time.perf_counter() > end:
            break
        if repeat:
            between()
        for index in list(runs):
            system = systems[index]
            try:
                if repeat == 0:
                    warm_up = Scenario("warm-up", loads.DECODE, min(scenario.batch, 4), 64, 4)
                    system.run(warm_up.requests(vocabulary, 0))
                    continue
                for before in scenario.before(vocabulary, repeat):
                    system.run([before])
                runs[index].append(system.run(scenario.requests(vocabulary, repeat, rate_per_s)))
            except (BenchError, RuntimeError) as error:
                failures.append(f"{system.name} {system.weights}: {error}")
                del runs[index]
    return runs, failures


def find_rate(system: System, scenario: Scenario, vocabulary: int) -> float:
    """Requests a second of an open load: a share of what the system answers when all comes at once."""
    run = system.run(scenario.requests(vocabulary, -1))
    return _OPEN_SHARE * scenario.batch / run.total_s


def render(rows: Sequence[Row]) -> list[str]:
    """A line for each row of a scenario: the figure, the floor's and the share of it that was reached, CPU time per token,
    percentiles, and how far the engine with weights of the same kind is ahead, in speed and in CPU time (above 1: ahead)."""
    ours = {row.weights: row for row in reversed(rows) if row.system == "sameway"}
    first = rows[0] if rows and rows[0].system == "sameway" else None
    lines = []
    for row in rows:
        beside = None if row.system == "sameway" else ours.get(row.weights, first)
        cells = [row.scenario, row.system, row.weights, row.figure, f"{row.value:,.1f}", *_floor_cells(row)]
        cells += ["" if beside is None else f"{beside.value / row.value:.2f}x", *_cpu_cells(row, beside)]
        cells += [f"{row.ttft_p50_ms:,.0f}, {row.ttft_p95_ms:,.0f}, {row.ttft_p99_ms:,.0f}"]
        tpot = (row.tpot_p50_ms, row.tpot_p95_ms, row.tpot_p99_ms)
        cells += [", ".join(f"{value:.1f}" for value in tpot if value is not None)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _floor_cells(row: Row) -> list[str]:
    """The floor, and which share of its speed was reached: by time, and by CPU time where others kept the machine busy."""
    if row.floor_value is None:
        return ["", ""]
    by_cpu = 1000 * row.threads / row.floor_value / row.cpu_ms_per_token if row.cpu_ms_per_token else None
    return [f"{row.floor_value:,.0f}", f"{row.floor_share:.0%}" + ("" if by_cpu is None else f", {by_cpu:.0%}")]


def _cpu_cells(row: Row, beside: Row | None) -> list[str]:
    if row.cpu_ms_per_token is None:
        return ["", ""]
    has_both = beside is not None and beside.cpu_ms_per_token
    ahead = f"{row.cpu_ms_per_token / beside.cpu_ms_per_token:.2f}x" if beside is not None and has_both else ""
    return [f"{row.cpu_ms_per_token:.2f}", ahead]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench engine", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="a GGUF file, a checkpoint folder or a hub name; default: the embedded model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a random model of that shape, made in .bench/")
    parser.add_argument(
        "--format", help=f"of {', '.join(FORMATS)}: the model's file written anew in each; default: as it is"
    )
    parser.add_argument("--weights", default="auto", help="auto, int8, int4: quantised by the engine as it loads them")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16; transformers' too")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peers", default="transformers", help=f"of {', '.join(PEERS)}; none: the engine alone")
    parser.add_argument("--only", help=f"of {', '.join(s.name for s in loads.SCENARIOS)}")
    parser.add_argument("--quick", action="store_true", help=f"one repeat of {', '.join(loads.QUICK)}")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds-max", type=float, default=60.0, help="per scenario; one repeat there always is")
    parser.add_argument(
        "--rate", type=float, help="requests a second of the open load; default: 0.6 of what the engine can"
    )
    parser.add_argument("--quality", action="store_true", help="perplexity and agreement instead of speed")
    parser.add_argument("--windows", type=int, default=8, help="--quality: how many windows of 256 tokens")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="random traffic with faults instead of speed")
    parser.add_argument("--seed", type=int, default=0, help="of the soak's traffic")
    parser.add_argument("--json", type=Path, help="write the rows to this file, one JSON object a line")
    return parser


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    prepare_environment()
    try:
        return _main(options)
    except (ModelError, ValueError, BenchError) as error:
        print(f"bench engine: {error}", file=sys.stderr)
        return 2


def _main(options: argparse.Namespace) -> int:
    from local_engine import machine
    from local_engine.checkpoints.open import default_model

    model = str(shape_file(_MODELS, options.shape)) if options.shape else options.model
    if options.soak:
        from bench.engines.soak import soak

        return soak(model or str(shape_file(_MODELS, "tiny")), options.soak * 60.0, options.threads or 1, options.seed)
    if options.quality:
        from bench.engines.quality import compare

        print(compare(model, _MODELS, options.threads, options.windows, 256))
        return 0
    names = _chosen(options.format, FORMATS, "format")
    source = Path(model) if model is not None else default_model()
    files = {name: str(in_format(source, name, _MODELS)) for name in names} or {"file": model}
    given = Given(
        files=files,
        weights=options.weights,
        dtype=options.dtype,
        device=options.device,
        threads=machine.choose_threads(options.threads),
        peers=_chosen("" if options.peers == "none" else options.peers, PEERS, "peer"),
    )
    only = _chosen(options.only, tuple(scenario.name for scenario in loads.SCENARIOS), "scenario")
    wanted = only or (loads.QUICK if options.quick else tuple(scenario.name for scenario in loads.SCENARIOS))
    _measure_all(given, [s for s in loads.SCENARIOS if s.name in wanted], options)
    return 0


def _chosen(text: str | None, known: Sequence[str], what: str) -> tuple[str, ...]:
    names = tuple(name for name in (text or "").split(",") if name)
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")
    return names


def _measure_all(given: Given, scenarios: Sequence[Scenario], options: argparse.Namespace) -> None:
    """Prints, and writes, each scenario's rows as soon as it is measured: a long bench may be stopped."""
    from bench.engines.floors import Ceilings, Floor
    from local_engine.checkpoints.open import open_checkpoint

    systems, absent, info = start_systems(given)
    what = f"{info.name}: {info.architecture}, {info.parameters:,} weights"
    print(f"{what}, {info.dtype} on {info.device}, {given.threads} threads")
    for line in absent:
        print(f"absent: {line}")
    ceilings = Ceilings()
    model = next(iter(given.files.values()))
    config = open_checkpoint(model).config
    value_bytes = int(_BITS[_DTYPES[info.dtype]]) // 8
    print(TITLES, flush=True)
    with contextlib.ExitStack() as stack:
        file = None if options.json is None else stack.enter_context(options.json.open("w"))
        for scenario in scenarios:
            rate = options.rate
            if scenario.is_open and rate is None:
                rate = find_rate(systems[0], scenario, info.vocabulary_size)
                print(f"{scenario.name}: {rate:.2f} requests/s", file=sys.stderr, flush=True)
            runs, failures = measure(
                systems,
                scenario,
                info.vocabulary_size,
                repeats=1 if options.quick else options.repeats,
                seconds_max=options.seconds_max,
                rate_per_s=rate,
                between=ceilings.measure if info.device == "cpu" else lambda: ceilings.measure_gpu(info.device),
            )
            rows = []
            for index, own in runs.items():
                bits = _BITS.get(systems[index].weights) or _file_bits(model, info)
                floor = Floor(config, bits, ceilings, value_bytes).value(scenario) if ceilings.bytes_per_s else None
                requests = scenario.requests(info.vocabulary_size, 1, rate)
                rows.append(
                    summarise(systems[index], scenario, requests, own, threads=given.threads, floor_value=floor)
                )
            print("\n".join([*render(rows), *(f"{scenario.name}: without {line}" for line in failures)]), flush=True)
            for row in rows if file is not None else ():
                print(json.dumps(asdict(row)), file=file, flush=True)
    print(ceilings.render())
    for system in systems:
        system.close()


def _file_bits(model: str | None, info: ModelInfo) -> float:
    """Bits of a weight as the file has it, on average; of a folder, as the engine computes."""
    from local_engine.checkpoints.open import default_model

    path = Path(model) if model is not None else default_model()
    return 8 * path.stat().st_size / info.parameters if path.is_file() else _BITS[_DTYPES[info.dtype]]
