"""Circuit breakers of a deployment: whether a caller may call it, decided by the outcomes of calls.

`Health` has a circuit breaker for each operation and model, which all callers share, and one for
each caller whose calls failed there. Three consecutive failed requests of one caller open that
caller's breaker for the shape that they have in common; failed requests of three callers, without a
success between them, open the shared breaker. So one caller's requests never block another caller,
and a dead deployment is left after three requests. A denial (a key, credit or model that is
refused) is a failure with a longer rest.

Knows no HTTP and no deployments; each process has its own. Invariants: a request counts once,
however often it is tried; a breaker that is open for a caller grants it at most one call in
`probe_s`, and the next at most `open_s_max` later, plus jitter, even if that call hangs; a caller
who has failed never prolongs the rest of all callers.

Closed, open, half-open as in Nygard, "Release It!" (2007), chapter 5; exponential backoff with
jitter as in Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from policies.durations import duration_s

_NODES_MAX = 256
CALLERS_MAX = 16
_ANY = "*"
_FULL = "it is full and asked to be left alone"
_IS_FULL = "~"  # ends the unit of a failure that means no more than that
_is_open = attrgetter("is_open")


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """The limits at which a breaker opens, and the seconds for which it stays open.

    It opens after `failures_max` failures in a row, and stays open for `open_s`, doubled after each
    failed probe up to `open_s_max` and spread by +-`jitter`; after a probe this counts from the
    probe's beginning. A probe has `probe_s` to report. A deployment's own retry-after replaces
    `open_s`, up to `retry_after_s_max`, and up to `alone_s_max` for a call without another
    deployment. A denial opens it for `denied_s`, doubled likewise up to `denied_s_max`.
    """

    failures_max: int = 3
    open_s: float = 0.5
    open_s_max: float = 8.0
    retry_after_s_max: float = 3600.0
    alone_s_max: float = 10.0
    denied_s: float = 5.0
    denied_s_max: float = 60.0
    jitter: float = 0.2
    probe_s: float = 8.0


class Asker(msgspec.Struct, frozen=True):
    """The caller and kind of a call: `scope` is an operation and a model, as `chat:gpt-5`.

    `shape` names the request's further needs. The texts have no spaces or bars.
    """

    scope: str
    caller: str = "-"
    shape: str = ""
    request: str = "-"


class News(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one breaker since its last exchange with other processes.

    `row` are the failures since the last success, if there was one (`has_succeeded`), or all; in a
    shared state, `has_succeeded` means that there ever was a success. `rests`: it has opened or
    closed since it knew the state with the number `version`; the next fields are then its new
    state. Durations are in seconds from now, 0 if it is closed. `covers` is the shape that rests.
    `is_taken`: the shared state is now the one that this process sent.
    """

    version: int = 0
    has_succeeded: bool = False
    row: dict[str, int] = {}
    rests: bool = False
    openings: int = 0
    rest_s: float = 0.0
    alone_s: float = 0.0
    cause: str = ""
    denial: str = ""
    covers: str = _ANY
    is_taken: bool = False


class Breaker:
    """One circuit breaker. `allows` changes nothing; `begin` begins a call, which is reported
    exactly once.

    `unit` counts once in a row: a request, or in the shared breaker (`of_all`) a caller. `clock`
    gives seconds that never decrease, `random` floats in [0, 1).
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
        limits: BreakerLimits | None = None,
        *,
        of_all: bool = False,
    ) -> None:
        self._clock = clock
        self._random = random
        self._limits = limits or BreakerLimits()
        self._of_all = of_all
        self._row: list[str] = []  # `unit|shape`, each once
        self._openings = 0
        self._open_until: float | None = None
        self._alone_until = 0.0  # at most `_open_until`
        self._covers = _ANY
        self._probe_until: float | None = None
        self._prober = ""
        self._cause = ""
        self.denial = ""  # the cause of the denial that opened it, until a probe is accepted
        self.was_good = False  # it has succeeded once
        # since the last exchange with other processes
        self.version = 0  # the number of the state that it took from others last
        self._has_succeeded = False
        self._row_since: list[str] = []
        self._has_changed = False

    @property
    def is_open(self) -> bool:
        """Whether the next call is a probe."""
        return self._open_until is not None

    @property
    def is_failing(self) -> bool:
        """Whether the last outcome was a failure, or the breaker is still open; a full deployment does
        not fail.
        """
        if self.is_open:
            return not self.is_full
        return not all(f"{_IS_FULL}|" in entry for entry in self._row)

    @property
    def is_full(self) -> bool:
        """Whether it is open because the deployment has no room."""
        return self.is_open and self._cause == _FULL and not self.denial

    @property
    def is_to_be_sent(self) -> bool:
        """Whether other processes may lack its state."""
        return self.has_news or self._has_succeeded or self.is_open

    @property
    def has_news(self) -> bool:
        """Whether it has failed, opened or closed since its last exchange with other processes."""
        return self._has_changed or bool(self._row_since)

    @property
    def rest_s(self) -> float:
        """The seconds until a call may begin, or probe it; 0 if one may now."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    @property
    def is_probed(self) -> bool:
        """Whether a running probe holds back all other calls."""
        return self._probe_until is not None and not self.allows()

    @property
    def reason(self) -> str:
        """The reason why it is open, as text for people; empty while it is closed."""
        now = self._clock()
        if self._open_until is None:
            return ""
        cause = self.denial or self._cause
        if self.allows():
            return f"{cause}, the next request tries it"
        if now < self._open_until:
            text = f"{cause}, next try in {_rounded(self._open_until - now)}"
            if now < self._alone_until < self._open_until:
                text += f", or in {_rounded(self._alone_until - now)} if no other deployment can answer"
            return text
        return f"{cause}, one call is probing it"

    def is_probe(self, unit: str) -> bool:
        """Whether the call of `unit` is the probe."""
        return self._probe_until is not None and self._prober == unit

    def rests_for(self, shape: str) -> bool:
        """Whether it is open for calls of `shape`, which makes them probes."""
        return self._open_until is not None and self._covers in (_ANY, shape)

    def allows(self, unit: str = "", shape: str = _ANY, *, is_alone: bool = False) -> bool:
        """Whether a call may begin now. `is_alone`: no other deployment can take the call."""
        if self._open_until is None or not (shape == _ANY or self.rests_for(shape)):
            return True
        now = self._clock()
        if now < (self._alone_until if is_alone else self._open_until):
            return False
        return self._has_failed(unit) or self._probe_until is None or now >= self._probe_until

    def begin(self, unit: str, shape: str = "") -> None:
        """Begin an allowed call; in a half-open breaker it is the one probe."""
        if self.rests_for(shape) and not self._has_failed(unit):
            self._probe_until = self._clock() + self._limits.probe_s
            self._prober = unit

    def record_success(self, unit: str, shape: str = "") -> None:
        """Report a success.

        It closes an open breaker, also if the call began before the opening; only a call that began
        after a denial ends that denial.
        """
        self._has_succeeded = self.was_good = True
        if not (self.is_open or self._row):
            return
        is_proof = not self.denial or self._proves(unit)
        self._row, self._row_since = [], []
        if not is_proof or (self.is_open and not self.rests_for(shape)):
            return
        self._close()

    def record_failure(
        self,
        unit: str,
        shape: str = "",
        retry_after_s: float | None = None,
        denial: str = "",
        *,
        is_probe: bool = False,
    ) -> None:
        """Report a failure of the deployment.

        `retry_after_s` is the delay that the deployment requested. A `denial`, the cause as text
        for people, means that it refused the call. `is_probe`: the call was a probe of another
        breaker.
        """
        is_probe = is_probe or self.is_probe(unit)
        is_full = retry_after_s is not None and retry_after_s > 0 and not denial
        limits, entry = self._limits, f"{unit}{_IS_FULL if is_full else ''}|{shape}"
        if entry not in self._row:
            self._row = [*self._row, entry][-self._row_max :]
            self._row_since.append(entry)
        in_a_row = len(self._row)
        is_enough = in_a_row >= limits.failures_max
        if retry_after_s is not None and retry_after_s > 0 and (is_enough or not self._of_all):
            self.rest(retry_after_s, _FULL)
        elif is_probe:
            self._back_off("its last probe failed", denial)
        elif self._open_until is not None:
            if is_enough and self._covers not in (_ANY, self._common_shape):
                self._covers, self._has_changed = _ANY, True
        elif is_enough:
            what = "requests of {} callers failed in a row" if self._of_all else "it failed {} times in a row"
            self._back_off(what.format(in_a_row), denial)

    def rest(self, rest_s: float, why: str) -> None:
        """Open for `rest_s` seconds, shorter if no other deployment can answer; `why` is text for
        people.
        """
        limits, now = self._limits, self._clock()
        until = now + min(rest_s, limits.retry_after_s_max)
        self._rest(until, why, min(until, now + limits.alone_s_max))

    def record_cancelled(self, unit: str) -> None:
        """Report a call without an outcome (the client left): the next call may probe."""
        if self.is_probe(unit):
            self._probe_until = None

    def reset(self) -> None:
        """Forget every failure, rest and denial."""
        self._row, self._row_since = [], []
        self._close()
        self._has_succeeded = self._has_changed = True

    def news(self) -> News:
        """Take the changes since the last call. The caller then calls `adopt` or `put_back`."""
        now = self._clock()
        news = News(
            version=self.version,
            has_succeeded=self._has_succeeded,
            row=dict.fromkeys(self._row_since, 1),
            rests=self._has_changed,
            openings=self._openings,
            rest_s=0.0 if self._open_until is None else max(0.001, self._open_until - now),
            alone_s=0.0 if self._open_until is None else max(0.0, self._alone_until - now),
            cause=self._cause,
            denial=self.denial,
            covers=self._covers,
        )
        self._has_succeeded = self._has_changed = False
        self._row_since = []
        return news

    def put_back(self, news: News) -> None:
        """Keep `news`, which did not reach another process, for the next exchange."""
        if not self._has_succeeded:
            self._row_since = [*news.row, *self._row_since]
        self._has_succeeded = self._has_succeeded or news.has_succeeded
        self._has_changed = self._has_changed or news.rests

    def adopt(self, state: News) -> None:
        """Adopt the state that all processes share.

        Local changes since then stay, and are the next news.
        """
        self.was_good = self.was_good or state.has_succeeded
        if not self._has_succeeded:
            self._row = list(dict.fromkeys((*state.row, *self._row_since)))[-self._row_max :]
        version_before, self.version = self.version, state.version
        if state.version < version_before:  # it was lost there
            self._has_changed = self._has_changed or self._open_until is not None
        if state.version <= version_before or state.is_taken or self._has_changed:
            return
        self._openings, self._cause, self.denial = state.openings, state.cause, state.denial
        self._covers = state.covers
        self._probe_until = None
        now = self._clock()
        self._open_until = now + state.rest_s if state.rest_s > 0 else None
        self._alone_until = now + min(state.alone_s, state.rest_s)

    @property
    def _row_max(self) -> int:
        return CALLERS_MAX if self._of_all else self._limits.failures_max

    @property
    def _common_shape(self) -> str:
        """The shape that all failures in the row share, else the wildcard."""
        shapes = {entry.partition("|")[2] for entry in self._row}
        return shapes.pop() if len(shapes) == 1 else _ANY

    def _has_failed(self, unit: str) -> bool:
        """Whether the caller `unit` has failed, so that only its own breaker judges its next call."""
        return self._of_all and f"{unit}|" in self._row

    def _proves(self, unit: str) -> bool:
        """Whether the call of `unit` began after the opening."""
        is_over = self._open_until is not None and self._clock() >= self._open_until
        return self.is_probe(unit) or (is_over and self._has_failed(unit))

    def _close(self) -> None:
        self._has_changed = self._has_changed or self.is_open
        self._open_until = self._probe_until = None
        self._covers, self.denial, self._openings = _ANY, "", 0

    def _back_off(self, cause: str, denial: str) -> None:
        limits = self._limits
        first_s, longest_s = (limits.denied_s, limits.denied_s_max) if denial else (limits.open_s, limits.open_s_max)
        rest_s = min(first_s * 2.0 ** min(self._openings, 30), longest_s)
        self._openings += 1
        rest_s *= 1.0 + limits.jitter * (2.0 * self._random() - 1.0)
        # a probe that hung has rested the deployment already
        since = self._clock() if self._probe_until is None else self._probe_until - limits.probe_s
        self._rest(since + rest_s, cause, since + rest_s)
        self.denial = denial

    def _rest(self, until: float, cause: str, alone_until: float) -> None:
        if self._open_until is not None:
            until, alone_until = max(until, self._open_until), max(alone_until, self._alone_until)
            self._covers = self._covers if self._covers == self._common_shape else _ANY
        else:
            self._covers = self._common_shape
        self._open_until, self._alone_until = until, alone_until
        self._probe_until = None
        self._cause = cause
        self._has_changed = True


class Health:
    """The breakers of one deployment: a shared breaker for each operation and model, and one for
    each caller who failed there. `beside` is the same deployment's for other calls: it learns of
    successes alone, as calls that it accepted.

    Its methods correspond to a `Breaker`'s, with the call's asker as the argument.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
        limits: BreakerLimits | None = None,
        *,
        beside: Health | None = None,
    ) -> None:
        self.clock = clock
        self._random = random
        self._limits = limits
        self._beside = beside
        self.breakers: dict[str, Breaker] = {}  # by scope, or by scope and caller

    def breaker(self, path: str) -> Breaker:
        """The breaker at `path`, a scope or `scope caller`; the first call creates it."""
        breaker = self.breakers.get(path)
        if breaker is None:
            if len(self.breakers) >= _NODES_MAX:
                idle = (name for name, breaker in self.breakers.items() if not breaker.is_failing)
                del self.breakers[next(idle, next(iter(self.breakers)))]
            breaker = Breaker(self.clock, self._random, self._limits, of_all=" " not in path)
            self.breakers[path] = breaker
        return breaker

    @property
    def is_resting(self) -> bool:
        """Whether any of its breakers is open."""
        return any(map(_is_open, self.breakers.values()))

    def allows(self, asker: Asker, *, is_alone: bool = False) -> bool:
        """Whether a call may begin now; `is_alone`: no other deployment can take it."""
        return all(breaker.allows(unit, shape, is_alone=is_alone) for breaker, unit, shape in self._of(asker))

    def begin(self, asker: Asker) -> bool:
        """Take the right to make one call; returns False if another call took it."""
        if not self.is_resting:
            return True
        if not self.allows(asker, is_alone=True):
            return False
        for breaker, unit, shape in self._of(asker):
            breaker.begin(unit, shape)
        return True

    def is_open(self, asker: Asker) -> bool:
        """Whether this caller's next call is a probe."""
        return self.is_resting and any(breaker.rests_for(shape) for breaker, _, shape in self._of(asker))

    def probed(self, asker: Asker) -> Iterator[str]:
        """A name for each breaker that this call probes, in its present state."""
        for path in (asker.scope, f"{asker.scope} {asker.caller}"):
            breaker = self.breakers.get(path)
            if breaker is not None and breaker.is_probe(asker.request if " " in path else asker.caller):
                yield f"{path}:{breaker.version}"

    def resting(self, asker: Asker) -> tuple[str, str]:
        """The reason why a call may not begin, and whether that is `denied` or `full`; else empty."""
        resting = [breaker for breaker, unit, shape in self._of(asker) if not breaker.allows(unit, shape)]
        if not resting:
            return "", ""
        first = resting[0]
        return first.reason, "full" if first.is_full else "denied" if first.denial and not first.is_probed else ""

    def rest_s(self, asker: Asker) -> float:
        """The seconds until a call may begin, or probe whether it is back."""
        return max([breaker.rest_s for breaker, _, _ in self._of(asker)], default=0.0)

    def succeeded(self, asker: Asker) -> None:
        """Report a success. If it closes the shared breaker, it resets each caller's breaker."""
        of_all = self.breaker(asker.scope)
        was_open = of_all.is_open
        for breaker, unit, shape in self._of(asker):
            breaker.record_success(unit, shape)
        if was_open and not of_all.is_open:
            for path, breaker in self.breakers.items():
                if path.startswith(f"{asker.scope} "):
                    breaker.reset()
        if self._beside is not None:
            self._beside.accepted(asker)

    def accepted(self, asker: Asker) -> None:
        """Report that the deployment answers a still running call: it denies none now, and has room."""
        if self.is_well is None or any(breaker.denial or breaker.is_full for breaker, _, _ in self._of(asker)):
            self.succeeded(asker)

    def failed(self, asker: Asker, retry_after_s: float | None = None, denial: str = "") -> None:
        """Report a failure, as `Breaker.record_failure`."""
        of_all = self.breaker(asker.scope)
        of_caller = self.breaker(f"{asker.scope} {asker.caller}")
        is_probe = of_all.is_open and not of_caller.is_open
        of_caller.record_failure(asker.request, asker.shape, retry_after_s, denial, is_probe=is_probe)
        of_all.record_failure(asker.caller, "", retry_after_s, denial)

    def rest(self, asker: Asker, rest_s: float, why: str) -> None:
        """Open the shared breaker of the asker's scope."""
        self.breaker(asker.scope).rest(rest_s, why)

    def cancelled(self, asker: Asker) -> None:
        """Report a call without an outcome."""
        for breaker, unit, _ in self._of(asker):
            breaker.record_cancelled(unit)

    def reset(self) -> None:
        """Forget every failure, rest and denial."""
        for breaker in self.breakers.values():
            breaker.reset()

    @property
    def is_well(self) -> bool | None:
        """Whether the latest outcome was good; None before the first call.

        An operation is well if one of its models is. The deployment is unwell if an operation fails
        that once succeeded, or if all its operations fail.
        """
        by_operation: dict[str, list[Breaker]] = {}
        for path, breaker in self.breakers.items():
            if " " not in path and (breaker.was_good or breaker.is_failing):
                by_operation.setdefault(path.partition(":")[0], []).append(breaker)
        if not by_operation:
            return None
        failing = [breakers for breakers in by_operation.values() if all(breaker.is_failing for breaker in breakers)]
        return len(failing) < len(by_operation) and not any(
            breaker.was_good for breakers in failing for breaker in breakers
        )

    @property
    def trouble(self) -> tuple[str, str]:
        """Why calls avoid it, as text for people, and its denial's cause; empty if it is available."""
        left = [(one.reason, one.denial) for one in self.breakers.values() if one.is_open and not self.is_well]
        return max(left, key=lambda one: bool(one[1]), default=("", ""))

    def _of(self, asker: Asker) -> list[tuple[Breaker, str, str]]:
        """The breakers of a call, each with the call's unit and shape there."""
        of_all, own = self.breakers.get(asker.scope), self.breakers.get(f"{asker.scope} {asker.caller}")
        breakers = [] if of_all is None else [(of_all, asker.caller, "")]
        return breakers if own is None else [*breakers, (own, asker.request, asker.shape)]


def _rounded(seconds: float) -> str:
    return duration_s(max(1, math.ceil(seconds)))
