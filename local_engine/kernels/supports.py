"""Decides on which devices Triton's kernels run.

Torch does the same work slowly, and is their oracle. The kernels run on CUDA if Triton is
installed. SAMEWAY_TRITON=0 turns them off; SAMEWAY_TRITON=1 turns them on for CPUs as well, for the
tests: with TRITON_INTERPRET=1 Triton runs the same kernels there in numpy, slowly. Imports neither
triton nor torch. Knows devices and parts, but no kernel.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

Part = Literal["attention", "rows", "draw", "product", "experts", "fp8"]
PARTS: tuple[Part, ...] = get_args(Part)

FP8_CAPABILITY = (8, 9)  # of a GPU that has 8-bit floats: Ada, Hopper and later
# devices on which a kernel of that part failed or was wrong
left_alone: set[tuple[str, Part]] = set()


def supports(device: torch.device, part: Part) -> bool:
    """Whether the kernels of this part run on this device."""
    wish = os.environ.get("SAMEWAY_TRITON", "")
    is_wanted = wish != "0" and (device.type == "cuda" or wish == "1") and (str(device), part) not in left_alone
    return is_wanted and has_triton()


def leave_alone(device: torch.device, part: Part) -> None:
    """Let torch do this part's work on that device from now on."""
    left_alone.add((str(device), part))


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python; then tl.dot reads bfloat16 as integers and needs
    float32."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of programs that run in parallel. Without a GPU it is 2, so that work is split
    there, too."""
    if device.type != "cuda":
        return 2
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
