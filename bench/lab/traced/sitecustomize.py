"""Counts the bytecode instructions of a gateway worker's own code, where the bench puts this folder on PYTHONPATH.

At each SIGUSR1 the worker writes what its requests executed since the last one to the next numbered file of the folder that
BENCH_BYTECODES names: a JSON object of counts by `file:function`. Its loops are not counted: their tasks have names. Its
clock is slowed by as much as counting slows its work, so that what it keeps for milliseconds is still there.
"""

import asyncio
import collections
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

_COUNTED = tuple(str(Path.cwd() / package) + os.sep for package in ("gateway", "cache", "policies"))
_SLOWER = 20.0
_counts: collections.Counter = collections.Counter()
_numbers = itertools.count()


def _is_loop():
    task = asyncio.current_task()
    return task is not None and not task.get_name().startswith("Task-")


def _entered(frame, event, argument):
    if not frame.f_code.co_filename.startswith(_COUNTED) or _is_loop():
        return None
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return _executed


def _executed(frame, event, argument):
    if event == "opcode":
        _counts[frame.f_code] += 1
    return _executed


def _cut(number, frame):
    sys.settrace(None)
    cwd = str(Path.cwd()) + os.sep
    names = {f"{code.co_filename.removeprefix(cwd)}:{code.co_qualname}": count for code, count in _counts.items()}
    _counts.clear()
    path = Path(os.environ["BENCH_BYTECODES"]) / f"{next(_numbers)}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(names))
    part.rename(path)
    sys.settrace(_entered)


if {"gateway", "worker"} <= set(sys.orig_argv) and "BENCH_BYTECODES" in os.environ:
    signal.signal(signal.SIGUSR1, _cut)
    clock, began = time.monotonic, time.monotonic()
    time.monotonic = lambda: began + (clock() - began) / _SLOWER
