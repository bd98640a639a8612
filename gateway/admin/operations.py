"""What an operator does by hand: drain, disable, enable, reset and try a deployment; cancel a
batch.

Each act writes a row of the audit log. The latest row of a deployment that changed its use decides
on that use, on every worker and host, also after a restart. The docstrings of operations are
descriptions in the OpenAPI document. Invariant: an act that cannot be audited does not happen.
"""

import contextlib
import uuid
from typing import Any

from redis.exceptions import RedisError

from cache.fingerprint import DIGEST_BYTES
from gateway import accounts
from gateway.accounts import LedgerRow, booked
from gateway.accounts.audit import BATCH_CANCELLED, DISABLED, DRAINED, ENABLED, RESET, TRIED
from gateway.admin import models, views
from gateway.admin.guard import Acting
from gateway.admin.parts import WorkerParts
from gateway.backends.base import BackendRequest
from gateway.backends.fitting import with_length
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.progress import Progress
from gateway.journey.attempt import UpstreamCall
from gateway.journey.bill import CONTEXT_UNKNOWN
from gateway.journey.savings import CHECKS, beside
from gateway.journey.storing import answer_text
from gateway.wire.fold import fold
from gateway.wire.types import CHAT, Chunk
from policies import Demand, Hold, Usage

_ACTIONS = {"drain": DRAINED, "disable": DISABLED, "enable": ENABLED, "reset": RESET}
_QUESTION = "Say: ok"
_ANSWER_TOKENS = 16
_PROMPT_TOKENS = 10
_TRY_WITHIN_S = 30.0
_KIND = "try"  # of its ledger row


async def act(parts: WorkerParts, act: models.Act, body: models.ActIn, operator: Acting) -> models.DeploymentOut:
    """Drains, disables, enables or resets a deployment, or all replicas of one, on every host; each act
    is in the audit log. The answer shows the deployment, or the first of the replicas.
    """
    deployments = _find(parts, body.name)
    row = parts.audit_row(_ACTIONS[act], body.name, operator)
    if act == "reset":
        await parts.audit.add(row)
        with contextlib.suppress(RedisError):  # the next exchange takes it along
            await parts.shared_health.reset([deployment for _, deployment in deployments])
    else:
        await parts.accounts.set_use(row)
    return views.deployment_of(*deployments[0])


async def try_deployment(parts: WorkerParts, body: models.TryDeploymentIn, operator: Acting) -> models.TriedOut:
    """Sends one short question to a deployment, whatever its state. An answer ends its rests."""
    alias, deployment = _find(parts, body.name)[0]
    if deployment.is_any_model:
        if not body.model:
            raise accounts.Invalid("model", "expected a model's name: this deployment takes every name")
        alias = alias.for_name(alias.name[:-1] + body.model)
        deployment = alias.deployments[deployment.name]
    await parts.audit.add(parts.audit_row(TRIED, body.name, operator))
    progress, chunks = Progress(deployment.name), list[Chunk]()
    demand, question = Demand(_PROMPT_TOKENS, 0, 0), _question(alias, deployment)
    hold = parts.budgets.unreserved(question.request_id, 0)
    asker = deployment.asker(demand, question.request_id)
    call = UpstreamCall(deployment, question, progress, demand, asker, is_probe=deployment.health.is_open(asker))
    deployment.slots.taken += 1
    try:
        failure = await call.run(chunks.extend)
        if failure is None:
            deployment.health.reset()
    finally:  # an operator who leaves has spent it, too
        is_charged = progress.has_begun or progress.is_abandoned
        usage = progress.usage or Usage(_PROMPT_TOKENS if is_charged else 0, progress.content_chunks)
        context = deployment.context_tokens_max or CONTEXT_UNKNOWN
        usage = usage.within(context, max(context, progress.content_chunks))
        cost = deployment.price.cost(usage)
        if is_charged:
            await parts.money.settle(hold, _bill(hold, alias, deployment, usage, cost, is_counted=bool(progress.usage)))
    return models.TriedOut.of(
        progress,
        usage,
        name=body.name,
        is_ok=failure is None,
        problem="" if failure is None else failure.detail,
        answer=(answer_text(fold(chunks)) or "") if failure is None else "",
        duration_ms=progress.elapsed_ms(),
        cost_microusd=cost,
    )


async def cancel_batch(parts: WorkerParts, batch_id: str, operator: Acting) -> models.BatchOut:
    """Cancels a batch of any team; the lines that ran keep their answers. It is written to the audit log."""
    batch = await parts.batches.get(None, batch_id)
    row = parts.audit_row(BATCH_CANCELLED, batch.id, operator, batch.team_id)
    await parts.batches.cancel(batch.team_id, batch.id, row)
    rows: list[models.BatchOut] = await views.batch_rows(parts, [await parts.batches.get(batch.team_id, batch.id)])
    return rows[0]


def _find(parts: WorkerParts, name: str) -> list[tuple[Alias, Deployment]]:
    """The deployment of this name, or the replicas of that of this name. Raises DoesNotExist."""
    every = [(alias, one) for alias in parts.fleet.aliases.values() for one in alias.deployments.values()]
    if found := [(alias, one) for alias, one in every if name in (one.name, one.group)]:
        return found
    raise accounts.DoesNotExist(f"there is no deployment {name!r}")


def _bill(
    hold: Hold, alias: Alias, deployment: Deployment, usage: Usage, cost_microusd: int, *, is_counted: bool
) -> LedgerRow:
    row = LedgerRow(
        id=hold.id,
        at_ms=hold.at_ms,
        request_id=hold.id,
        team_id=hold.team_id,
        key_id=0,
        alias=alias.name,
        deployment=deployment.name,
        usage=booked(usage),
        cost_microusd=cost_microusd,
        kind=_KIND,
        usage_estimated=not is_counted,
    )
    return beside(row, CHECKS, is_known=deployment.is_price_known)


def _question(alias: Alias, deployment: Deployment) -> BackendRequest:
    body: dict[str, Any] = {"model": alias.name, "messages": [{"role": "user", "content": _QUESTION}]}
    return BackendRequest(
        body=with_length(body, deployment.spoken(), CHAT, _ANSWER_TOKENS),
        dialect=deployment.spoken(),
        is_stream=True,
        salt=bytes(DIGEST_BYTES),
        request_id=f"try-{uuid.uuid4().hex}",
        ttft_timeout_s=_TRY_WITHIN_S,
        idle_timeout_s=_TRY_WITHIN_S,
        kind=CHAT,
        model=deployment.model if alias.is_pattern else "",
    )
