"""Records as the pipeline writes them, with only what a test cares about spelled out."""

from typing import Any

from gateway.deployments.progress import Attempt
from gateway.journey.record import Record, of_flat

AT_S = 1_763_726_400.0  # 2025-11-21 12:00:00 UTC


def miss(**changes: Any) -> Record:
    """A generation by the deployment `local` that took 300 ms and cost 120 µUSD."""
    fields: dict[str, Any] = {
        "request_id": "req_1",
        "at_s": AT_S,
        "team_id": 1,
        "team": "search",
        "alias": "small",
        "deployment": "local",
        "attempts": (Attempt("local", "ok", 290.0),),
        "prompt_tokens": 40,
        "completion_tokens": 11,
        "cost_microusd": 120,
        "ttft_ms": 100.0,
        "duration_ms": 300.0,
        "store": "stored",
    }
    return of_flat({**fields, **changes})


def hit(**changes: Any) -> Record:
    """An exact hit that saved 120 µUSD and 298 ms."""
    fields: dict[str, Any] = {
        "request_id": "req_2",
        "at_s": AT_S,
        "team_id": 1,
        "team": "search",
        "alias": "small",
        "cache": "exact",
        "prompt_tokens": 40,
        "completion_tokens": 11,
        "saved_microusd": 120,
        "saved_ms": 298.0,
        "ttft_ms": 1.0,
        "duration_ms": 2.0,
    }
    return of_flat({**fields, **changes})
