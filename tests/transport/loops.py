"""The processes' event loop for tests, with a clock that can be moved on and a resolver of the test's own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from typing import Any

import pytest

from cache.event_loop import Loop


class Policy(asyncio.DefaultEventLoopPolicy):
    """Gives each test the loop that the processes run on."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return Moved()


class Moved(Loop):
    """A loop whose clock is `ahead_s` seconds ahead."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def current() -> Moved:
    """The running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Moved)
    return loop


class Resolver:
    """Answers for this process: names in `known` at once, names in `gone` that there is none; about others it is silent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, list[str]] = {}
        self.gone: set[str] = set()
        self.lookups: Counter[str] = Counter()
        self.answers = threading.Event()  # what was silent fails
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._find)

    def _find(self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> list[Any]:
        if flags & socket.AI_NUMERICHOST or host is None or host[0].isdigit():
            return self._real(host, port, family, type, proto, flags)
        self.lookups[host] += 1
        if host not in self.known and host not in self.gone:
            self.answers.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if host in self.gone:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [one for at in self.known[host] for one in self._real(at, port, family, type, proto, 0)]
