"""`./run bench cuda`: everything that only a GPU can show, by one command within nine minutes.

    ./run bench cuda [--json FILE]                     all phases on the first CUDA device
    ./run bench cuda --only kernels,engine             some of them

Each phase is a process of its own: one that crashes, hangs or breaks the device is named, and the others go on. Rows are
printed, and written, as they come. A share is the floor's time over the time it took; floors and ceilings are those of
this machine, measured in the same run (`bench.engines.floors`). Exits 1 where a kernel is wrong or a phase failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from unittest.mock import patch

from bench.engines import loads
from bench.engines.loads import DECODE, PREFILL, TOTAL, Scenario, System

if TYPE_CHECKING:
    import torch

    from bench.engines.floors import Ceilings

_DECODE_1 = Scenario("decode-1", DECODE, 1, 1024, 192)
_DECODE_64 = Scenario("decode-64", DECODE, 64, 1024, 128)
_PREFILL = Scenario("prefill-4096", PREFILL, 1, 4096, 1)
_MIXED = Scenario("mixed", TOTAL, 128, 1024, 128, is_open=True)  # without a rate all come at once
SCENARIOS = {
    "engine": (
        _DECODE_1,
        _DECODE_64,
        _PREFILL,
        Scenario("prefill-8x4096", PREFILL, 8, 4096, 1),
        Scenario("apart-1000", TOTAL, 32, 1030, 64),
        Scenario("shared-1000", TOTAL, 32, 30, 64, shared=1000, is_warm=True),
        Scenario("apart-4000", TOTAL, 32, 4030, 64),
        Scenario("shared-4000", TOTAL, 32, 30, 64, shared=4000, is_warm=True),
        _MIXED,
    ),
    "transformers": (_DECODE_1, _DECODE_64, _MIXED),
    "fp8": (_DECODE_1, _DECODE_64, _PREFILL),
    "experts": (_DECODE_1, _DECODE_64, _PREFILL),
}
_FLOOR_TARGETS = {"decode-1": 0.75, "decode-64": 0.60, "prefill-4096": 0.55, "prefill-8x4096": 0.55}
_RATIOS = (  # row, beside which, at least how many times as fast
    ("engine decode-64", "transformers decode-64", 2.0),
    ("engine mixed", "transformers mixed", 2.0),
    ("engine shared-1000", "engine apart-1000", 5.0),
    ("engine shared-4000", "engine apart-4000", 5.0),
    ("fp8 decode-1", "engine decode-1", 1.0),
    ("fp8 decode-64", "engine decode-64", 1.0),
)
# in order of what matters, each with the seconds it may take; of all together there are `--seconds`
PHASES = {"machine": 60, "kernels": 180, "engine": 180, "transformers": 150, "fp8": 90, "experts": 120, "timings": 90}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result; None where it does not apply. `share` of the floor, 0..1; `note` says what went wrong, or
    what the value is of."""

    phase: str
    name: str
    figure: str
    value: float | None = None
    floor: float | None = None
    share: float | None = None
    target: float | None = None
    note: str = ""

    def __str__(self) -> str:
        reached = self.share if self.share is not None else self.value
        verdict = "" if self.target is None or reached is None else "reached" if reached >= self.target else "MISSED"
        cells = (
            f"{self.phase:13}{self.name:42}",
            f"{self.value:>12,.1f}" if self.value is not None else f"{'':12}",
            f" {self.figure:18}",
            f"{self.floor:>12,.0f}" if self.floor is not None else f"{'':12}",
            f"{self.share:>6.0%}" if self.share is not None else f"{'':6}",
            f"  {self.target:g} {verdict}" if self.target is not None else "",
            f"  {self.note}" if self.note else "",
        )
        return "".join(cells).rstrip()


@dataclass(frozen=True, slots=True)
class Given:
    """What a phase works on. `shape`: of the model; tiny ones run everywhere."""

    device: str
    shape: str

    @property
    def is_tiny(self) -> bool:
        return self.shape == "tiny"


Emit = Callable[[Row], None]

# -- phases, each in a process of its own ------------------------------------------------------------------------------


def machine(given: Given, emit: Emit) -> None:
    """Its name, and what it can do at best."""
    import torch

    device = _device(given)
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "CPU"
    memory = torch.cuda.mem_get_info(device) if is_gpu else (0, 0)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {_triton_version()}"
    emit(Row("machine", name, "GB free", memory[0] / 1e9, memory[1] / 1e9, note=versions))
    ceilings = _ceilings(device)
    emit(Row("machine", "memory", "GB/s", ceilings.bytes_per_s / 1e9))
    emit(Row("machine", "bfloat16 products", "TFLOP/s", ceilings.float_flops_per_s / 1e12))


def kernels(given: Given, emit: Emit) -> None:
    """Every kernel beside torch, in several shapes and types; those that matter most come first."""
    import torch

    from bench.engines.kernels import SHAPES, check

    device = _device(given)
    cases = [(name, torch.bfloat16) for name in SHAPES] + [("8b", torch.float16), ("8b", torch.float32)]
    cases = [("135m", torch.float32)] if given.is_tiny else cases
    for name, dtype in cases:
        what = f"{name} {str(dtype).removeprefix('torch.')}"
        start = time.perf_counter()
        for one in (wrong := check(name, dtype, device)):
            emit(Row("kernels", f"{what} {one.kernel}", "as torch", 0.0, target=1.0, note=" ".join(one.why.split())))
        if not wrong:
            emit(Row("kernels", what, "as torch", 1.0, target=1.0, note=f"{time.perf_counter() - start:.1f} s"))


def timings(given: Given, emit: Emit) -> None:
    """Kernels by themselves, beside the machine's ceilings. What fits the cache is evicted between calls, as in a model it
    would be."""
    from bench.engines import kernels as cases
    from bench.engines.floors import _best_s

    device = _device(given)
    ceilings = _ceilings(device)
    groups = (cases.attention_cases, cases.row_cases, cases.product_cases)
    for group in groups:
        for case in group(device):
            try:
                if device.type == "cuda":
                    from triton.testing import do_bench

                    time_s = do_bench(case.run) / 1e3
                else:
                    time_s = _best_s(case.run, 1)
            except Exception as error:
                emit(Row("timings", case.name, "us", note=f"{type(error).__name__}: {error}"))
                continue
            floor_s = max(case.moved_bytes / ceilings.bytes_per_s, case.flops / ceilings.float_flops_per_s)
            emit(Row("timings", case.name, "us", 1e6 * time_s, 1e6 * floor_s, floor_s / time_s))
            if given.is_tiny:
                break


def engine(given: Given, emit: Emit, phase: str = "engine", shape: str = "", weights: str = "auto") -> None:
    """The engine on random weights of that shape, as it serves them."""
    from bench.engines.floors import Floor
    from bench.engines.made import MadeCheckpoint
    from bench.engines.systems import Sameway
    from local_engine.config import EngineConfig

    device, shape = _device(given), shape or given.shape
    checkpoint = MadeCheckpoint(shape, device)
    dtype = "float32" if given.is_tiny else "bfloat16"
    config = EngineConfig(
        device=given.device,
        dtype=dtype,
        weights=weights,
        draft_tokens_max=0,
        sequences_max=4 if given.is_tiny else 128,
        context_tokens_max=None if given.is_tiny else 8192,
        kv_blocks=64 if given.is_tiny else None,
    )
    start = time.perf_counter()
    with patch("local_engine.engine.open_checkpoint", lambda model: checkpoint):
        system = Sameway(config, weights)
    info = system.engine.info
    emit(Row(phase, shape, "s to load", time.perf_counter() - start, note=f"{info.weights_size_bytes / 1e9:.1f} GB"))
    bits = 8 * info.weights_size_bytes / info.parameters if weights != "auto" else 32.0 if given.is_tiny else 16.0
    _run(phase, system, info.vocabulary_size, given, emit, Floor(checkpoint.config, bits, _ceilings(device)))


def fp8(given: Given, emit: Emit) -> None:
    """The same with weights and inputs in 8-bit floats."""
    engine(given, emit, "fp8", weights="fp8")


def experts(given: Given, emit: Emit) -> None:
    """A mixture of experts."""
    engine(given, emit, "experts", "tiny-moe" if given.is_tiny else "30b-a3b")


def transformers(given: Given, emit: Emit) -> None:
    """transformers' continuous batching on a model of the same shape."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bench.engines.made import SHAPES
    from bench.engines.systems import TransformersContinuous

    config = AutoConfig.for_model(**SHAPES[given.shape])
    with torch.device(_device(given)):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    system = TransformersContinuous(model, "bf16")
    _run("transformers", system, config.vocab_size, given, emit, None)
    system.close()


def _run(phase: str, system: System, vocabulary: int, given: Given, emit: Emit, floor: Any) -> None:
    """Every scenario of the phase; one that fails is named."""
    from bench.engine import measure

    for whole in SCENARIOS[phase]:
        scenario = _small(whole) if given.is_tiny else whole
        repeats = 1 if given.is_tiny else 3
        runs, failures = measure([system], scenario, vocabulary, repeats=repeats, seconds_max=15.0, rate_per_s=None)
        for why in failures:
            emit(Row(phase, scenario.name, scenario.figure, note=why))
        if runs.get(0):
            best = None if floor is None else floor.value(scenario)
            requests = scenario.requests(vocabulary, 1)
            row = loads.summarise(system, scenario, requests, runs[0], threads=1, floor_value=best)
            target = _FLOOR_TARGETS.get(scenario.name) if phase == "engine" else None
            tpot = "" if row.tpot_p50_ms is None else f", {row.tpot_p50_ms:.2f} ms a token"
            note = f"first token {row.ttft_p50_ms:,.0f} ms{tpot}"
            emit(Row(phase, scenario.name, scenario.figure, row.value, best, row.floor_share, target, note))


def _small(scenario: Scenario) -> Scenario:
    """The same load for a model and a machine that are small."""
    shared = 16 if scenario.shared else 0
    return replace(scenario, batch=min(2, scenario.batch), own=40 if scenario.is_open else 8, answer=3, shared=shared)


def _device(given: Given) -> torch.device:
    from local_engine.machine import choose_device

    return choose_device(given.device)


def _ceilings(device: torch.device) -> Ceilings:
    from bench.engines.floors import Ceilings

    ceilings = Ceilings()
    if device.type == "cuda":
        ceilings.measure_gpu(device)
    else:
        ceilings.measure()
    return ceilings


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)


# -- all of them -------------------------------------------------------------------------------------------------------


def run_phase(name: str, given: Given, limit_s: float, emit: Emit) -> str | None:
    """The phase in a process of its own, each row as it comes; says how it failed, if it did."""
    command = [sys.executable, "-W", "ignore", "-m", "bench", "cuda", "--phase", name]
    command += ["--device", given.device, "--shape", given.shape]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    assert process.stdout is not None
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            with contextlib.suppress(ValueError, TypeError):
                emit(Row(**json.loads(line)))
                continue
            print(line, end="")
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
        if process.poll() is None:
            process.kill() if sys.exc_info()[0] else process.wait()
    if process.returncode == 0:
        return None
    return f"took more than {limit_s:.0f} s" if is_late else f"ended with {process.returncode}; see above"


def run_all(names: Sequence[str], given: Given, seconds: float, file: IO[str] | None) -> int:
    """Every phase within the seconds there are; 1 where a kernel is wrong or a phase failed."""
    rows: list[Row] = []
    end = time.monotonic() + seconds

    def emit(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        if file is not None:
            print(json.dumps(asdict(row)), file=file, flush=True)

    failed = []
    for name in names:
        left_s = end - time.monotonic()
        why = run_phase(name, given, min(PHASES[name], left_s), emit) if left_s > 5 else "no time was left"
        if why is not None:
            failed.append(name)
            emit(Row(name, "the phase", "failed", note=why))
    for row in compared(rows):
        emit(row)
    is_wrong = any(row.phase == "kernels" and row.value == 0.0 for row in rows)
    print(f"{seconds - (end - time.monotonic()):.0f} s; failed phases: {', '.join(failed) or 'none'}")
    return int(bool(failed) or is_wrong)


def compared(rows: Iterable[Row]) -> list[Row]:
    values = {f"{row.phase} {row.name}": row.value for row in rows}
    return [
        Row("compared", f"{one} / {other}", "times as fast", mine / theirs, target=target)
        for one, other, target in _RATIOS
        if (mine := values.get(one)) and (theirs := values.get(other))
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench cuda", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu with TRITON_INTERPRET=1 and --shape tiny")
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b", help="of the model")
    parser.add_argument("--only", help=f"of {','.join(PHASES)}")
    parser.add_argument("--seconds", type=float, default=530.0, help="for all phases together")
    parser.add_argument("--json", type=Path, help="write the rows to this file, one JSON object a line, as they come")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    given = Given(options.device, options.shape)
    names = [name for name in (options.only or ",".join(PHASES)).split(",") if name]
    if unknown := [name for name in names if name not in PHASES]:
        print(f"bench cuda: no phase {unknown[0]!r}; there are {', '.join(PHASES)}", file=sys.stderr)
        return 2
    os.environ["SAMEWAY_TRITON"] = "1"
    if options.phase:
        globals()[options.phase](given, lambda row: print(json.dumps(asdict(row)), flush=True))
        return 0
    import torch

    is_on_cpu = options.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (is_on_cpu or torch.cuda.is_available()) or _triton_version() == "absent":
        print("bench cuda: needs Triton, and a CUDA device or TRITON_INTERPRET=1 with --device cpu", file=sys.stderr)
        return 2
    with contextlib.nullcontext(None) if options.json is None else options.json.open("w") as file:
        return run_all(names, given, options.seconds, file)
