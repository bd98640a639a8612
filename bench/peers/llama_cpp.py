"""llama.cpp, as the PyPI package `llama-cpp-python` brings its source: compiled for this processor, in an environment of
its own. It reads the very file that the engine reads, and takes as many threads."""

from __future__ import annotations

from pathlib import Path

from bench.engines.systems import Remote
from bench.lab.native import WORK
from bench.lab.systems import clean_environment, environment_of

_VERSION = "0.3.36"
_COMPILE_TIMEOUT_S = 3600.0  # five minutes on two idle cores


def llama_cpp(model: Path, weights: str, threads: int) -> Remote:
    """Started, its model loaded. Raises BenchError."""
    folder = environment_of(
        "llama.cpp",
        [f"llama-cpp-python=={_VERSION}"],
        timeout_s=_COMPILE_TIMEOUT_S,
        environ={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
    )
    script = Path(__file__).with_name("llama_cpp_loop.py")
    environ = clean_environment()
    environ.pop("OMP_WAIT_POLICY", None)  # its threads meet after each operation: they had better spin
    command = [str(folder / "bin" / "python"), "-P", str(script), str(model), str(threads)]
    return Remote("llama.cpp", weights, command, environ, WORK / f"llama.cpp-{weights}.log")
