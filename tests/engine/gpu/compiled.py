"""A process that compiles every kernel for real GPUs, without one: prints what each needs as JSON.

Started with Triton's interpreter off. The launchers run as ever, on CPU tensors, up to the launch itself: Triton tells the
arguments' types, alignments and constants apart as it does on a GPU, and compiles down to machine code by its own assembler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.engine.gpu.launches import launch_all


class NoDevice:
    """What Triton asks its driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)


def spilled_bytes(cubin: bytes) -> int:
    """What a thread keeps on its stack for want of registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1])


def main() -> None:
    made: dict[str, dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *values: Any, grid: Any, warmup: bool, **more: Any) -> None:
        kernel = run(self, *values, grid=grid, warmup=True, **more)
        made[kernel.hash] = {
            "kernel": self.__name__,
            "shared_bytes": kernel.metadata.shared,
            "spilled_bytes": spilled_bytes(kernel.asm["cubin"]),
        }

    JITFunction.run = compile_only
    driver.set_active(NoDevice())
    launch_all()
    print(json.dumps(list(made.values())))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1"
    main()
