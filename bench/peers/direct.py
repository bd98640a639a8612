"""The upstream asked without anything before it: the floor of every figure."""

from __future__ import annotations

from pathlib import Path

from bench.lab.native import Stub
from bench.lab.systems import Running, Setup, Target


class Direct:
    """No system at all."""

    name = "direct"

    def install(self) -> None:
        """Nothing to install."""

    def lacks(self, setup: Setup) -> str | None:
        return None if setup is Setup.MISS else "the upstream keeps no answers"

    def configuration(self, setup: Setup) -> str:
        return "the"

    def start(self, setup: Setup, stub: Stub, folder: Path) -> Running:
        paced = Target("stub", "/pace/10/v1/chat/completions")
        return Running(stub.port, roots=(), stop=lambda: None, version="", instant=Target("stub"), paced=paced)
