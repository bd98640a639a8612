"""A process that compiles every kernel for real GPUs, without one: prints what each needs as JSON.

Started with Triton's interpreter off. The launchers run as ever, on CPU tensors; what they would launch is compiled with
those arguments down to machine code by Triton's own assembler.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.engine.gpu.launches import launch_all

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages")


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def main() -> None:
    launches: list[tuple[JITFunction[Any], dict[str, Any], dict[str, int]]] = []

    def note(self: JITFunction[Any], *values: Any, grid: Any, warmup: bool, **more: Any) -> None:
        options = {name: more.pop(name) for name in _OPTIONS if name in more}
        launches.append((self, dict(zip(self.arg_names, values, strict=False)) | more, options))

    JITFunction.run = note
    launch_all()
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    found = []
    for kernel, arguments, options in launches:
        fixed = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
        signature = {p.name: "constexpr" if p.is_constexpr else _type(arguments[p.name]) for p in kernel.params}
        made = triton.compile(ASTSource(kernel, signature, fixed), target=target, options=options)
        size_bytes = len(made.asm["cubin"])
        found.append({"kernel": kernel.__name__, "shared_bytes": made.metadata.shared, "size_bytes": size_bytes})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
