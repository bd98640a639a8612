"""A circuit breaker: stops calls to a failing deployment and probes it with one call at a time.

A denial (the deployment refuses every call until a person mends something) opens it at once.

Knows no HTTP and no deployments; each process has its own. Invariants: while the breaker is open,
`begin` allows at most one call in `probe_s`, and the next one at the latest `open_s_max` after it,
with the jitter, also where that call hangs; only a probe that is accepted ends a denial.

Closed, open, half-open as in Nygard, "Release It!" (2007), chapter 5; exponential backoff with
jitter as in Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from policies.durations import duration_s


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long.

    It opens after `failures_max` failures in a row, or if a share of `failure_rate_max` failed of
    at least `calls_min` recent calls (a call's weight halves every `half_life_s`). It stays open
    for `open_s`, doubled after each failed probe up to `open_s_max` and spread by +-`jitter`; after
    a probe this counts from the probe's beginning. A probe has `probe_s` to report. A deployment's
    own retry-after replaces `open_s`, up to `retry_after_s_max`, and up to `alone_s_max` for a call
    that has nowhere else to go. A denial opens it for `denied_s`, doubled likewise up to
    `denied_s_max`.
    """

    failures_max: int = 5
    failure_rate_max: float = 0.5
    calls_min: float = 10.0
    half_life_s: float = 30.0
    open_s: float = 2.0
    open_s_max: float = 8.0
    retry_after_s_max: float = 3600.0
    alone_s_max: float = 10.0
    denied_s: float = 5.0
    denied_s_max: float = 60.0
    jitter: float = 0.2
    probe_s: float = 8.0


class News(msgspec.Struct, frozen=True, array_like=True):
    """What has happened to one breaker since its last exchange with others.

    `failures` are those in a row since the last success, if there was one (`has_succeeded`), or
    all. `rests` says that it has opened or closed since it knew the state with the number
    `version`; then the next fields are its new state. Durations are in seconds from now, 0 where it
    is closed. `calls`, of which `failed` failed, are those of the exchange, or of all processes
    lately.
    """

    version: int = 0
    has_succeeded: bool = False
    failures: int = 0
    rests: bool = False
    openings: int = 0
    rest_s: float = 0.0
    alone_s: float = 0.0
    cause: str = ""
    denial: str = ""
    calls: float = 0.0
    failed: float = 0.0


class Breaker:
    """Ask with `allows`, which changes nothing; act with `begin`; report each begun call exactly
    once.

    `clock` gives seconds that never decrease, `random` floats in [0, 1).
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
        limits: BreakerLimits | None = None,
    ) -> None:
        self._clock = clock
        self._random = random
        self._limits = limits or BreakerLimits()
        self._in_a_row = 0
        self._openings = 0
        self._open_until: float | None = None
        self._alone_until = 0.0  # at most `_open_until`
        self._probe_until: float | None = None
        self._calls = 0.0
        self._failures = 0.0
        self._weighed_at = clock()
        self._cause = ""
        self.denial = ""  # the cause of the denial that opened it, until a probe is accepted
        # since the last exchange with other processes
        self._version = 0
        self._has_succeeded = False
        self._failures_since = 0
        self._calls_since = self._failed_since = 0.0
        self._has_changed = False

    @property
    def is_closed(self) -> bool:
        """Whether it allows all calls."""
        return self._open_until is None

    @property
    def is_probed(self) -> bool:
        """Whether it is open for all calls but one that is running."""
        return self._probe_until is not None and not self.allows()

    @property
    def is_open(self) -> bool:
        """Whether its next call is a probe."""
        return self._open_until is not None

    @property
    def version(self) -> int:
        """The number of the state that it took from others last."""
        return self._version

    @property
    def has_news(self) -> bool:
        """Whether it has failed, opened or closed since its last exchange with others."""
        return self._has_changed or self._failures_since > 0

    @property
    def reason(self) -> str:
        """Why it is open, as text for people; empty while it allows calls, except after a denial."""
        now = self._clock()
        if self.allows():
            return f"{self.denial}, the next request tries it" if self.denial else ""
        if self._open_until is not None and now < self._open_until:
            words = f"{self._cause}, next try in {_rounded(self._open_until - now)}"
            if now < self._alone_until < self._open_until:
                words += f", or in {_rounded(self._alone_until - now)} if no other deployment can answer"
            return words
        return f"{self._cause}, one call is probing it"

    def allows(self, *, is_alone: bool = False) -> bool:
        """Whether a call may begin now.

        `is_alone`: no other deployment can take the call.
        """
        now = self._clock()
        if self._open_until is None:
            return True
        open_until = self._alone_until if is_alone else self._open_until
        return now >= open_until and (self._probe_until is None or now >= self._probe_until)

    def begin(self) -> bool:
        """Take the right to make one call, after `allows`; returns False if another call took it.

        A half-open breaker grants one probe.
        """
        if not self.allows(is_alone=True):
            return False
        if self._open_until is not None:
            self._probe_until = self._clock() + self._limits.probe_s
        return True

    def begin_anyway(self) -> None:
        """Begin one call, which is a probe if it is open."""
        if self._open_until is not None:
            self._probe_until = self._clock() + self._limits.probe_s

    def record_success(self) -> None:
        """Report a success.

        It closes an open breaker, even if the call began before the opening, but not before a
        denial.
        """
        self._weigh(0.0)
        self._in_a_row = self._failures_since = 0
        self._has_succeeded = True
        if self.denial and self._probe_until is None:
            return
        if self._open_until is not None:
            self._forget_calls()
            self._has_changed = True
        self._openings = 0
        self._open_until = self._probe_until = None
        self.denial = ""

    def record_accepted(self) -> None:
        """Report that a call which is still running was accepted: it ends a denial."""
        if self.denial and self._probe_until is not None:
            self._open_until = self._probe_until = None
            self.denial = ""
            self._has_changed = True

    def record_failure(self, retry_after_s: float | None = None, why: str = "it asked to be left alone") -> None:
        """Report a failure of the deployment.

        `retry_after_s` is the delay that the deployment asked for, or that it needs: `why`.
        """
        self._weigh(1.0)
        self._in_a_row += 1
        self._failures_since += 1
        was_probe = self._probe_until is not None
        limits = self._limits
        if retry_after_s is not None and retry_after_s > 0:
            until = self._clock() + min(retry_after_s, limits.retry_after_s_max)
            self._rest(until, why, min(until, self._clock() + limits.alone_s_max))
        elif was_probe:
            self._back_off("its last probe failed")
        elif self._open_until is not None:
            return  # this call began before the opening: no new evidence
        elif self._in_a_row >= limits.failures_max:
            self._back_off(f"it failed {self._in_a_row} times in a row")
        elif self._calls >= limits.calls_min and self._failures >= limits.failure_rate_max * self._calls:
            self._back_off(f"{self._failures / self._calls:.0%} of its recent calls failed")

    def record_denial(self, cause: str) -> None:
        """Report that the deployment refuses every call; `cause` is text for people."""
        if self.denial and self._probe_until is None:
            return  # this call began before the denial: no new evidence
        self._back_off(cause, is_denied=True)

    def record_cancelled(self) -> None:
        """Report a call without an outcome (the client left): the next call may probe."""
        self._probe_until = None

    def reset(self) -> None:
        """Forget every failure, rest and denial."""
        self._in_a_row = self._openings = self._failures_since = 0
        self._forget_calls()
        self._open_until = self._probe_until = None
        self.denial = ""
        self._has_succeeded = self._has_changed = True

    def news(self) -> News:
        """What has happened since the last call; `adopt` or `put_back` follows."""
        now = self._clock()
        news = News(
            version=self._version,
            has_succeeded=self._has_succeeded,
            failures=self._failures_since,
            rests=self._has_changed,
            openings=self._openings,
            rest_s=0.0 if self._open_until is None else max(0.001, self._open_until - now),
            alone_s=0.0 if self._open_until is None else max(0.0, self._alone_until - now),
            cause=self._cause,
            denial=self.denial,
            calls=self._calls_since,
            failed=self._failed_since,
        )
        self._calls_since = self._failed_since = 0.0
        self._has_succeeded = self._has_changed = False
        self._failures_since = 0
        return news

    def put_back(self, news: News) -> None:
        """Keep `news`, which reached no other process, for the next exchange."""
        self._failures_since += 0 if self._has_succeeded else news.failures
        self._has_succeeded = self._has_succeeded or news.has_succeeded
        self._has_changed = self._has_changed or news.rests
        self._calls_since += news.calls
        self._failed_since += news.failed

    def adopt(self, state: News, *, is_own: bool) -> None:
        """Take the state that all processes share; `is_own` if it is the one just sent.

        What happened here since then stays, and is the next news.
        """
        self._in_a_row = state.failures + self._failures_since if not self._has_succeeded else self._in_a_row
        if not self._has_changed:
            self._calls, self._failures = state.calls + self._calls_since, state.failed + self._failed_since
            self._weighed_at = self._clock()
        known, self._version = self._version, state.version
        if state.version < known:  # it was lost there
            self._has_changed = self._has_changed or self._open_until is not None
        if state.version <= known or is_own or self._has_changed:
            return
        self._openings, self._cause, self.denial = state.openings, state.cause, state.denial
        self._probe_until = None
        if state.rest_s > 0:
            now = self._clock()
            self._open_until, self._alone_until = now + state.rest_s, now + min(state.alone_s, state.rest_s)
        elif self._open_until is not None:
            self._open_until = None

    def _back_off(self, cause: str, *, is_denied: bool = False) -> None:
        limits = self._limits
        first_s, longest_s = limits.open_s, limits.open_s_max
        if is_denied:
            first_s, longest_s = limits.denied_s, limits.denied_s_max
        rest_s = min(first_s * 2.0 ** min(self._openings, 30), longest_s)
        self._openings += 1
        rest_s *= 1.0 + limits.jitter * (2.0 * self._random() - 1.0)
        # a probe that hung has rested the deployment already
        since = self._clock() if self._probe_until is None else self._probe_until - limits.probe_s
        self._rest(since + rest_s, cause, since + rest_s)
        self.denial = cause if is_denied else ""

    def _rest(self, until: float, cause: str, alone_until: float) -> None:
        if self._open_until is not None:
            until, alone_until = max(until, self._open_until), max(alone_until, self._alone_until)
        self._open_until, self._alone_until = until, alone_until
        self._probe_until = None
        self._cause = cause
        self._has_changed = True

    def _weigh(self, failure: float) -> None:
        now = self._clock()
        keep = 0.5 ** ((now - self._weighed_at) / self._limits.half_life_s)
        self._weighed_at = now
        self._calls = self._calls * keep + 1.0
        self._failures = self._failures * keep + failure
        self._calls_since += 1.0
        self._failed_since += failure

    def _forget_calls(self) -> None:
        self._calls = self._failures = self._calls_since = self._failed_since = 0.0


def _rounded(seconds: float) -> str:
    return duration_s(max(1, math.ceil(seconds)))
