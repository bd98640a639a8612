"""Native kernels: the C++ of this folder, compiled for this machine at set-up, and each function's
arguments.

`python -m local_engine.kernels.cpu` compiles (a few seconds, g++ or clang++, only the compiler's
own headers). Without a compiler, AVX-512 VNNI or the compiled file, `kernels()` is None and torch,
which is also the oracle, does the same work. The file's name has a digest of source, compiler flags
and processor, so that a file for any other is never loaded. Knows pointers and sizes, no models.
Read `kernels.h` first, then `step.cpp`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PANEL = 16  # output rows that are computed together
GROUP = 32  # inputs that share a scale and a minimum; 16 share one where codes have 6 bits
TILE = 16  # tokens of a block that attention looks at together
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
NEEDED_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "step": [*[_POINTER] * 8, _INT, _INT], "product": [_INT, *[_POINTER] * 3, _INT],
    "take_rows": [_INT, *[_POINTER] * 3, _INT], "pack": [_INT, *[_POINTER] * 4, _INT, _INT],
    "pack_pairs": [_POINTER, _POINTER, _INT, _INT], "add_norm": [_INT, *[_POINTER] * 4, _INT, _INT, _FLOAT],
    "gate": [_INT, _POINTER, _POINTER, *[_INT] * 3], "ban": [*[_POINTER] * 4, *[_INT] * 3],
    "rotate_write": [_INT, _POINTER, _POINTER, _FLOAT, *[_POINTER] * 5, *[_INT] * 5, _LONG],
    "attend": [_INT, *[_POINTER] * 5, _LONG, _FLOAT, _FLOAT, _POINTER, _INT, _LONG, *[_INT] * 4, _LONG],
}  # fmt: skip


class Matrix(ctypes.Structure):
    """A matrix in the products' struct (kernels.h). `dequantised_from`: the number of rows from
    which codes are first converted to bfloat16."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("bits", _INT),
        ("columns", _INT),
        ("outputs", _INT),
        ("dequantised_from", _INT),
    )


class Kernels(ctypes.CDLL):
    """The compiled functions. Every tensor is contiguous; `kind` is a type's number, see `kind_of`."""

    def __getattr__(self, name: str) -> Any:
        """The function `name`, without the prefix that all have in the library."""
        # decision: kernels-in-cpp
        function = self[f"sw_{name}"]
        function.argtypes, function.restype = _ARGUMENTS[name], None
        setattr(self, name, function)
        return function


def kind_of(dtype: torch.dtype) -> int | None:
    """The kernels' number for a type; None for unsupported types."""
    return {"torch.float32": 0, "torch.bfloat16": 1}.get(str(dtype))


@cache
def kernels() -> Kernels | None:
    """The functions compiled for this machine, or None; None with SAMEWAY_NATIVE=0."""
    path = _library()
    if os.environ.get("SAMEWAY_NATIVE") == "0" or not path.is_file():
        return None
    return Kernels(str(path))


def native_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The native kernels, or None if they do not support this device and type."""
    return kernels() if device.type == "cpu" and kind_of(dtype) is not None else None


def why_no_kernels() -> str | None:
    """The reason why `kernels()` is None, with its remedy; None if the kernels are loaded."""
    if kernels() is not None:
        return None
    if os.environ.get("SAMEWAY_NATIVE") == "0":
        return "SAMEWAY_NATIVE is 0"
    if (unable := _unable()) is not None:
        return unable
    others = any(_library().parent.glob("kernels-*.so"))
    why = "they were compiled from other sources or for another processor" if others else "they are not compiled"
    return f"{why}: `./run setup` or `{sys.executable} -m {__name__}` does it in seconds"


def _unable() -> str | None:
    """The reason why the kernels cannot be compiled here, or None."""
    if missing := sorted(NEEDED_FLAGS - cpu_flags()):
        return f"the processor lacks {', '.join(missing)}"
    return None if find_compiler() else "there is no C++ compiler: install g++ or clang++, then `./run setup`"


def find_compiler() -> str | None:
    return next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)


def compile_kernels() -> str:
    """Compile for this machine unless that was done before; returns the result as a line of text.

    An engine does so at its start: it takes four seconds, once in an environment.
    """
    path, compiler = _library(), find_compiler()
    if path.is_file():
        return f"native kernels: {path}"
    if (unable := _unable()) is not None or compiler is None:
        return f"no native kernels: {unable}; the engine runs on torch alone"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"no native kernels: {path.parent}: {error.strerror}; the engine runs on torch alone"
    unfinished = path.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [compiler, *_FLAGS, "-w", "-o", str(unfinished), *map(str, _SOURCES)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return f"no native kernels: {compiler} failed: {done.stderr.strip()[-400:]}"
    unfinished.rename(path)
    return f"native kernels: {path}"


def _library() -> Path:
    """The path of the compiled file, inside the environment that uses it."""
    digest = blake2b(b"".join(path.read_bytes() for path in (*_SOURCES, *_HEADERS)), digest_size=8)
    digest.update(" ".join((*_FLAGS, *sorted(cpu_flags()))).encode())
    return Path(sys.prefix) / "lib" / "sameway" / f"kernels-{digest.hexdigest()}.so"


@cache
def cpu_flags() -> frozenset[str]:
    """The processor's features, in the Linux kernel's terms; empty if /proc/cpuinfo lists none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return frozenset(
        next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), ())
    )
