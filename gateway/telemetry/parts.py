"""The parts of a worker as an operator sees them: Redis, the database, the cache worker, each deployment."""

from dataclasses import dataclass
from enum import StrEnum

from local_engine import EngineLoad


class Health(StrEnum):
    OK = "ok"
    STARTING = "starting"  # loading a model, rebuilding an index: on its way, nothing to do
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the gateway: Redis, the database, the cache worker, an engine, the ledger's writer."""

    name: str
    health: Health
    detail: str = ""  # a few words: progress, sizes, or what is wrong


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One deployment as the worker that answers sees it now. Predictions are for a prompt of `PROMPT_TOKENS_SHOWN` tokens."""

    name: str
    alias: str
    backend: str  # local | openai | litellm
    model: str
    policy: str  # of its alias
    is_available: bool
    reason: str  # why it is not
    running: int
    waiting: int
    ttft_ms: float | None
    tpot_ms: float | None
    input_microusd_per_mtok: int
    output_microusd_per_mtok: int
    capabilities: tuple[str, ...]
    context_tokens_max: int | None
    output_tokens_max: int | None
    engine: EngineLoad | None = None  # of a local engine that is ready


PROMPT_TOKENS_SHOWN = 500
