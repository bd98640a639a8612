"""The parts of a worker that the admin plane reads and changes.

Must not import the application, whose `WorkerParts` extends this class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request

from cache import Partition, Purge
from gateway.accounts import partition_of
from gateway.accounts.audit import TEXTS_SHOWN, AuditRow

if TYPE_CHECKING:
    from cache import ExactCache, SemanticClient
    from cache.verdicts import VerdictStore
    from gateway.accounts.accounts import Accounts
    from gateway.accounts.audit import Audit
    from gateway.accounts.ledger import Ledger
    from gateway.accounts.stored_responses import ResponseStore
    from gateway.admin.guard import Guard, Principal
    from gateway.admin.models import DeploymentOut
    from gateway.batches.batches import Batches
    from gateway.deployments.fleet import Fleet
    from gateway.deployments.shared_health import SharedHealth
    from gateway.journey.budget import Money
    from gateway.learning.reports import Reports
    from gateway.reload import Configuration
    from gateway.settings import Settings
    from gateway.telemetry.hosts import Hosts
    from gateway.telemetry.measured_error import Certificates, MeasuredErrors
    from gateway.telemetry.parts import GatewayPart
    from gateway.telemetry.stats import Stats
    from policies import Budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """The parts that the pages and the API need.

    `settings` has its `admin_key` and `secret` filled in.
    """

    settings: Settings
    configuration: Configuration
    guard: Guard
    accounts: Accounts
    ledger: Ledger
    audit: Audit
    batches: Batches
    stored_responses: ResponseStore
    budgets: Budgets
    money: Money
    stats: Stats
    exact: ExactCache
    semantic: SemanticClient
    verdicts: VerdictStore
    reports: Reports
    truth: MeasuredErrors
    fleet: Fleet
    shared_health: SharedHealth
    certificates: Certificates
    hosts: Hosts
    deployments: Callable[[], Sequence[DeploymentOut]]
    healths: Callable[[], Sequence[GatewayPart]]  # deployments may be among them
    version: str
    clock: Callable[[], float] = time.time
    started_at_s: float = field(default_factory=time.time)

    def audit_row(
        self, action: str, entry: str, operator: Principal, team_id: int = 0, request_id: str = ""
    ) -> AuditRow:
        """A row of the audit log, as of now."""
        return AuditRow(
            at_ms=int(self.clock() * 1000),
            action=action,
            team_id=team_id,
            request_id=request_id,
            entry=entry,
            actor=operator.actor,
            client=operator.client,
            way=operator.way,
        )

    async def shows_texts(self, operator: Principal, what: str) -> bool:
        """Whether the operator may read texts of requests; if so, the audit log has it, once in ten minutes
        for each list `what`.
        """
        if operator.is_admin:  # first: what cannot be audited is not shown
            await self.audit.add_seldom(self.audit_row(TEXTS_SHOWN, what, operator))
        return operator.is_admin

    async def entries_of(self, conditions: Mapping[str, Any]) -> Purge:
        """Which entries meet the conditions of a body; those that are None say nothing. Raises DoesNotExist."""
        given = {name: value for name, value in conditions.items() if value is not None}
        if (team_id := given.pop("team_id", None)) is not None:
            given["partition"] = self.partition_of((await self.accounts.team(team_id)).id)
        labels = tuple((name, given.pop(name)) for name in ("model", "deployment") if name in given)
        return Purge(labels=labels, **given)

    def partition_of(self, team_id: int) -> Partition:
        """The cache partition of a team, as the pipeline computes it."""
        return partition_of(self.settings.secret, team_id)


def parts_of(request: Request) -> AdminParts:
    """The parts of the worker that answers a request."""
    parts: AdminParts = request.app.state.parts
    return parts


WorkerParts = Annotated[AdminParts, Depends(parts_of)]
"""The parameter of an operation that FastAPI fills; pages and forms give it themselves."""
