"""A machine's device, number type, threads and memory for an engine.

Knows no model beyond its sizes in bytes.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from local_engine.config import ModelError
from local_engine.kernels.cpu import cpu_flags

_KV_SIZE_MAX_BYTES_CPU = 1 << 30
_CUDA_SHARE = 0.9
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, and of ARM


def choose_device(name: str) -> torch.device:
    """The named device; `auto`: CUDA if available, else the CPU. Raises ModelError for a missing
    device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device {name!r} is unknown; supported: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported; supported: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The named type. `auto`: bfloat16 on CUDA (float16 before Ampere) and on a CPU that multiplies
    it, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    return torch.float32 if _BFLOAT16_FLAGS.isdisjoint(cpu_flags()) else torch.bfloat16


def choose_threads(threads: int | None) -> int:
    """The given number of threads, or the number of cores that this process may use."""
    return threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def kv_size_bytes(device: torch.device, *, reserve_bytes: int = 0) -> int:
    """The bytes for KV after the weights are loaded: on CUDA most of the free memory beyond
    `reserve_bytes` (activations), on a CPU a quarter of the available memory and at most 1 GiB,
    because other processes need some, too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return max(0, int(free_bytes * _CUDA_SHARE) - reserve_bytes)
    return min(_KV_SIZE_MAX_BYTES_CPU, available_bytes() // 4)


def available_bytes() -> int:
    """The available memory in bytes: the machine's, or the container's if less."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free_bytes = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free_bytes = int(line.split()[1]) * 1024
    limit_path, used_path = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit_path.is_file() and used_path.is_file():
        text = limit_path.read_text().strip()
        if text.isdigit():
            free_bytes = min(free_bytes, max(0, int(text) - int(used_path.read_text())))
    return free_bytes


def return_unused_memory() -> None:
    """Return the memory that loading freed to the system, if the C library can (glibc keeps it
    otherwise)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
