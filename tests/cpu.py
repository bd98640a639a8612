"""The CPU seconds of `./run test quick`: said at its end, beside what it promises, with the files that take the most of it.

CPU, for others' work on the machine makes any wall time long. It fails nothing: a slow processor is no fault of the code.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

CPU_S_MAX = 60.0
FILE_CPU_S_MAX = 3.0  # what takes longer is for tests/marks.py


def cpu_s() -> float:
    """The CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuReport:
    """A plugin of pytest that sums up by file."""

    def __init__(self) -> None:
        self._by_file: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        before = cpu_s()
        try:
            return (yield)
        finally:
            if nextitem is not None:  # the last one's time has the end of all servers
                self._by_file[item.nodeid.partition("::")[0]] += cpu_s() - before

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = cpu_s()
        is_over = total > CPU_S_MAX
        said = f"took {total:.0f} s of CPU, of {CPU_S_MAX:.0f} that `./run test quick` may take"
        terminalreporter.write_line(said, red=is_over, green=not is_over)
        for file, took in self._by_file.most_common(10):
            if is_over and took > FILE_CPU_S_MAX:
                terminalreporter.write_line(
                    f"{took:6.1f} s in {file}: name it in tests/marks.py, or make it cheap", red=True
                )
