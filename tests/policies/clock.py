"""A clock that stands still until a test moves it."""

from __future__ import annotations


class Clock:
    """`now_s` in seconds; called, it gives them."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def ms(self) -> int:
        return int(self.now_s * 1000)
