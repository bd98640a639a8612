"""Finds agents that repeat themselves: the same calls of tools with the same results, or the same request.

It keeps no texts: a request's turns are its history, and of requests it counts digests. Invariants:
requests without a session are never counted; a dialogue that a user's turn ends is no loop of tools.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cache import Fingerprint
from gateway.accounts import Identity, scope_of
from gateway.journey.needs import session_of
from gateway.journey.turn import Turn
from gateway.settings import LoopSettings
from gateway.wire.errors import LoopRefused, shown
from policies.leased_limits import LocalRateLimits
from policies.rate_limits import RateLimit

TOOLS, REQUESTS = LOOPS = "repeated_tool_calls", "repeated_requests"


class LoopDetector:
    """Looks for loops. One instance per worker, which counts its own requests."""

    def __init__(self) -> None:
        self._limits = LocalRateLimits()

    def seen(self, settings: LoopSettings, turn: Turn, identity: Identity, fingerprint: Fingerprint) -> str:
        """The loop that a request is part of, or empty. Raises LoopRefused where `settings` refuse it."""
        most, per_min, loop = settings.tool_calls_max, settings.requests_per_min_max, ""
        messages = turn.body.get("messages")
        if most and isinstance(messages, list) and (names := repeated_calls(messages, most + 1)):
            loop, times = TOOLS, most + 1
            what = f"it called {names} with the same arguments and got the same results {times} times in a row"
        elif per_min and turn.booked is None and (session := session_of(turn.body, turn.labels)):
            limit = RateLimit(f"{session} {fingerprint.id}", "requests", per_min, 1)
            if not self._limits.take(scope_of(identity.team.id), [limit]).is_allowed:
                loop, what = REQUESTS, f"it has sent this same request more than {per_min} times within a minute"
        if loop and settings.action == "refuse":
            raise LoopRefused(
                f"This run is in a loop: {what}. Stop here, and tell your user what you tried.", code=loop
            )
        return loop


def repeated_calls(messages: Sequence[Any], times: int) -> str:
    """The names of the tools that the last `times` rounds called, if their calls and their results were
    the same in each and nothing came after them; else empty. Turns between two rounds may be anyone's.
    """
    end, first = len(messages), None
    for _ in range(times):
        while first is not None and end and _role(messages[end - 1]) in _BETWEEN:  # as agents remind their models
            end -= 1
        contents = []
        while end and _role(messages[end - 1]) == "tool":
            end -= 1
            contents.append(messages[end].get("content"))
        end -= 1
        calls = messages[end].get("tool_calls") if end >= 0 and _role(messages[end]) == "assistant" else None
        if not isinstance(calls, list) or len(calls) != len(contents) or not calls:
            return ""
        said = [call.get("function") or call.get("custom") for call in calls if isinstance(call, dict)]
        this = said, [_VARYING.sub("", content) if isinstance(content, str) else content for content in contents]
        if first is not None and this != first:
            return ""
        first = this
    names = [f"`{shown(str(call.get('name')))}`" for call in (first or ([], []))[0] if isinstance(call, Mapping)]
    return " and ".join(dict.fromkeys(names))


_VARYING = re.compile("^(Chunk ID|Wall time): .*\n", re.M)  # what Codex CLI 0.171.0 writes over each result
_BETWEEN = ("user", "system", "developer")


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, dict) else None
