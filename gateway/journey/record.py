"""The canonical facts of one finished request. The log line, the metrics, the stats and the recent routes are made of this
value and of nothing else, so they can't disagree."""

import random
import time

import msgspec

from gateway.wire.types import Usage

_random = random.Random()  # seeded by the operating system; an id is unique, not secret


class Rejection(msgspec.Struct, frozen=True):
    """Why a deployment was not used."""

    name: str
    reason: str


class Attempt(msgspec.Struct, frozen=True):
    """One deployment that was tried, and how it ended: `ok`, `cancelled`, or the error in words."""

    name: str
    outcome: str
    duration_ms: float
    is_refusal: bool = False  # the request was at fault

    @property
    def verdict(self) -> str:
        """What it says of the deployment: ok, error, or nothing: `refused` as the client's fault, `cancelled` as nobody waited."""
        if self.outcome in ("ok", "cancelled"):
            return self.outcome
        return "refused" if self.is_refusal else "error"


class Record(msgspec.Struct, omit_defaults=True):
    """One request, as the admin sees it. Written once, at the end, on every exit."""

    request_id: str
    at_s: float  # unix time of arrival
    route: str = "chat"  # chat | text_completion | embeddings | ...
    team_id: int = 0
    team: str = ""
    key_id: int = 0
    key: str = ""  # the key's name
    alias: str = ""  # a configured name, or empty: it becomes a metric's label
    is_stream: bool = False
    status: int = 200
    error: str = ""  # the error's code where there is one
    cache: str = "miss"  # exact | semantic | coalesced | miss | bypass
    similarity: float | None = None  # of the semantic hit, or of the nearest entry that was not served
    miss_reason: str = ""  # why the semantic cache did not answer
    nearest: str = ""  # the nearest entry's text; kept only where prompts may be logged
    store: str = ""  # `stored`, or why not
    entry: str = ""  # id of the cached answer that was served, or stored
    deployment: str = ""
    policy: str = ""
    why: str = ""  # the winner's explanation, in words
    rejected: tuple[Rejection, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_microusd: int = 0
    saved_microusd: int = 0  # what the same answer had cost when it was generated
    saved_ms: float = 0.0  # how long it had taken, less what the hit took
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    draft: str = ""  # id of the near answer that a local engine was given as a draft
    drafted_tokens: dict[str, int] | None = (
        None  # guesses that were verified, by source: text, reference (that answer), model
    )
    accepted_tokens: dict[str, int] | None = None  # those that were right: as many steps less
    survived: tuple[str, ...] = ()  # parts that failed and were done without: redis, cache_worker
    is_disconnected: bool = False  # the client left before its last byte

    def count(self, usage: Usage) -> None:
        """What the generation took."""
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        self.cached_tokens = usage.cached_tokens
        self.drafted_tokens, self.accepted_tokens = usage.drafted_tokens, usage.accepted_tokens


def new_id(at_s: float) -> str:
    """The id of a request that came at `at_s`, unix time, and says so, as a version 7 UUID does (RFC 9562, section 5.7)."""
    return f"req_{int(at_s * 1000):012x}{_random.getrandbits(80):020x}"


def arrived_at(request_id: str) -> float | None:
    """When the request of this id came, in unix time; None where it is no id of ours."""
    digits = request_id.removeprefix("req_")
    try:
        return int(digits[:12], 16) / 1000.0 if len(digits) == 32 else None
    except ValueError:
        return None


def new_record(route: str) -> Record:
    at_s = time.time()
    return Record(request_id=new_id(at_s), at_s=at_s, route=route)
