"""What the admin plane needs of the gateway, as one value; and what it is told of parts it can't see into.

Knows no HTTP. Whoever builds the application fills this in; nothing here starts or closes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from cache import Partition, partition

if TYPE_CHECKING:
    from cache import ExactCache, SemanticClient, VerdictStore
    from gateway.accounts import Accounts, Ledger
    from gateway.learning.reports import Reports
    from gateway.settings import Settings
    from gateway.telemetry.measured_error import Truth
    from gateway.telemetry.stats import Stats
    from local_engine import EngineLoad
    from policies import Budgets


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


@dataclass(frozen=True, slots=True)
class AdminServices:
    """Everything the pages and the API read and change. `settings` has its `admin_key` and `secret` filled in."""

    settings: Settings
    accounts: Accounts
    ledger: Ledger
    budgets: Budgets
    stats: Stats
    exact: ExactCache
    semantic: SemanticClient
    verdicts: VerdictStore
    reports: Reports
    truth: Truth
    deployments: Callable[[], Sequence[DeploymentView]]
    parts: Callable[[], Sequence[Part]]  # deployments may be among them
    clock: Callable[[], float]  # unix seconds
    version: str
    started_at_s: float

    def partition_of(self, team_id: int) -> Partition:
        """The cache partition of a team, as the pipeline computes it."""
        return partition((self.settings.secret or "").encode(), f"team:{team_id}")
