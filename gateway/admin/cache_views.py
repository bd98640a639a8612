"""The cache in the admin plane: sizes, a trial of a prompt, wrong answers, certificates, purges and
feedback.

No HTTP and no HTML. Invariant: a trial of a prompt changes nothing.
"""

from __future__ import annotations

import asyncio

import msgspec
from redis.exceptions import RedisError

from cache import CacheWorkerUnavailable, Entry, Hit, MissReason, Partition, Purge, Query, fingerprint
from cache.query import Neighbourhood
from cache.verdicts import Scope, Suspension
from cache.worker import WorkerState
from gateway.accounts import Team
from gateway.accounts.audit import ANSWER_SHOWN, CERTIFICATE_STARTED
from gateway.admin import models
from gateway.admin.parts import AdminParts
from gateway.journey.record import Record
from gateway.journey.storing import answer_text, chunks_of
from gateway.telemetry.certificates import Certificate
from gateway.telemetry.parts import GatewayPart, PartHealth
from gateway.wire.errors import BadRequest, NotFound
from gateway.wire.fold import fold

_NEIGHBOURS = 8
_WRONG_MAX = 200


async def cache(parts: AdminParts) -> models.CacheOut:
    """The sizes of the cache, by team. Raises CacheUnavailable."""
    sizes, worker = await parts.exact.stats(), await parts.semantic.status()
    found = await parts.accounts.list_teams()
    owners = {parts.partition_of(team.id): team for team in found}
    partitions = [
        models.PartitionOut(
            team_id=owner.id if owner else None,
            team=owner.name if owner else None,
            entries=one.entries,
            size_bytes=one.size_bytes,
            size_bytes_max=parts.exact.limits.size_bytes_max,
        )
        for one in sizes.partitions
        for owner in (owners.get(one.partition),)
    ]
    healths = {
        WorkerState.READY: PartHealth.OK,
        WorkerState.LOADING: PartHealth.STARTING,
        WorkerState.REBUILDING: PartHealth.STARTING,
    }
    detail = f"{worker.size}, {worker.embedder}" if worker.is_ready else worker.detail or worker.state
    return models.CacheOut(
        entries=sizes.entries,
        size_bytes=sizes.size_bytes,
        partitions=sorted(partitions, key=lambda one: -one.size_bytes),
        l1_entries=sizes.l1_entries,
        l1_bytes=sizes.l1_bytes,
        semantic=GatewayPart(name="semantic index", health=healths.get(worker.state, PartHealth.DOWN), detail=detail),
    )


async def purge(parts: AdminParts, what: models.PurgeIn) -> models.PurgeOut:
    """Remove entries, or count them with `dry_run`.

    Raises BadRequest without a condition, CacheUnavailable, accounts.DoesNotExist (the team).
    """
    conditions = what.model_dump(exclude={"dry_run", "all"}, exclude_none=True)
    if what.all == bool(conditions):
        words = (
            "Give at least one of id, text, team_id, namespace, model, deployment and older_than_s, or `all`, not both"
        )
        raise BadRequest(words, param="all", code="invalid_value")
    if what.team_id is not None:
        await parts.accounts.team(what.team_id)
    selector = Purge(
        partition=parts.partition_of(what.team_id) if what.team_id is not None else None,
        id=what.id,
        text=what.text,
        namespace=what.namespace,
        labels=tuple((name, conditions[name]) for name in ("model", "deployment") if name in conditions),
        older_than_s=what.older_than_s,
    )
    result = await parts.exact.purge(selector, is_dry_run=what.dry_run)
    owners = {parts.partition_of(team.id): team for team in await parts.accounts.list_teams()}
    samples = [
        models.SampleOut(
            id=sample.id,
            team_id=owner.id if owner else None,
            team=owner.name if owner else None,
            text=sample.text,
            created_at_s=sample.created_at,
            size_bytes=sample.size_bytes,
        )
        for sample in result.samples
        for owner in (owners.get(sample.partition),)
    ]
    return models.PurgeOut(dry_run=what.dry_run, count=result.count, size_bytes=result.size_bytes, samples=samples)


async def try_prompt(parts: AdminParts, what: models.TryIn) -> models.TryOut:
    """The cache's decision on a request of one user message, and its nearest neighbours.

    Serves, stores, counts and learns nothing. Raises accounts.DoesNotExist (the team).
    """
    team = await parts.accounts.team(what.team_id)
    body = {"model": what.model, "messages": [{"role": "user", "content": what.prompt}]}
    asked = fingerprint(body, parts.partition_of(what.team_id))
    entry = (await parts.exact.lookup(asked)).entry
    bound = parts.truth.bounds.bound(team, what.model, None)
    out = models.TryOut(
        decision="miss", reason="not_eligible", similarity=None, neighbours=[], p=None, p_min=None, verdicts=0,
        error_max=bound.error_max,
    )  # fmt: skip
    if asked.text is not None:
        query = Query(asked.partition, asked.compat, asked.text, bound.error_max, bound.untightened)
        try:
            found = await parts.semantic.near(query, _NEIGHBOURS)
        except CacheWorkerUnavailable as error:
            out.reason = f"{MissReason.UNAVAILABLE}: {error}"
        else:
            _show(out, found)
    if entry is not None:
        out.decision, out.reason, out.similarity = "exact", "this very request was answered before", 1.0
    return out


def _show(out: models.TryOut, found: Neighbourhood) -> None:
    numbers: dict[bytes, int] = {}
    for one in found.neighbours:
        number = numbers.setdefault(one.group or one.exact, len(numbers) + 1)
        out.neighbours.append(
            models.NeighbourOut(
                text=one.text, similarity=one.similarity, id=one.exact.hex(), reason=one.reason or "", group=number,
                keys=one.keys, right=one.right, wrong=one.wrong,
            )
        )  # fmt: skip
    out.similarity = found.neighbours[0].similarity if found.neighbours else None
    trial = found.decision.trial
    out.p, out.p_min, out.verdicts = trial.p if trial is not None else None, found.p_min, found.verdicts
    if isinstance(found.decision, Hit):
        out.decision, out.reason = "semantic", "a cached prompt means the same"
    else:
        out.reason = found.decision.reason.value


# -- wrong answers


async def wrong(parts: AdminParts) -> models.WrongsOut:
    """Answers that are suspended from semantic hits, the latest first. Raises RedisError."""
    owners = [(team, parts.partition_of(team.id)) for team in await parts.accounts.list_teams()]
    suspended = await asyncio.gather(*(parts.verdicts.suspended(partition) for _, partition in owners))
    found = [
        (team, partition, name, why)
        for (team, partition), names in zip(owners, suspended, strict=True)
        for name, why in names.items()
    ]
    found.sort(key=lambda one: -one[3].at)
    return models.WrongsOut(wrong=[await _wrong(parts, *one) for one in found[:_WRONG_MAX]])


async def _wrong(parts: AdminParts, team: Team, partition: Partition, name: bytes, why: Suspension) -> models.WrongOut:
    about = await parts.exact.lookup_about(partition, why.exact)
    return models.WrongOut(
        team_id=team.id,
        team=team.name,
        name=name.hex(),
        is_group=name[:1] == Scope.GROUP.value.encode(),
        entry=why.exact.hex(),
        text=about.text if about is not None else None,
        source=why.source,
        judge=why.judge,
        why=why.why,
        model=why.alias,
        request_id=why.request_id,
        at_s=why.at,
    )


async def clear(parts: AdminParts, what: models.ClearIn) -> models.ClearOut:
    """End the suspension of an answer. Raises RedisError."""
    partition = parts.partition_of(what.team_id)
    return models.ClearOut(was_out=await parts.verdicts.clear(partition, bytes.fromhex(what.name)))


async def answer(parts: AdminParts, what: models.AnswerIn, client: str, way: str) -> models.AnswerOut:
    """The texts of a response, for a verdict on it. Writes to the audit log first.

    `client` is the admin's address, `way` is `dashboard` or `api`. Raises NotFound, RedisError, and
    sqlalchemy's errors: what cannot be audited is not shown.
    """
    record = await parts.reports.find(what.id)
    if record is None or not record.request.team_id:
        raise NotFound("There is no such response among the latest", param="id", code="response_not_found")
    entry = await _entry_of(parts, record)
    if entry is None:
        raise NotFound("The cache no longer has this answer", param="id", code="response_not_found")
    request, cache = record.request, record.cache
    await parts.audit.add(parts.audit_row(ANSWER_SHOWN, cache.entry, client, way, request.team_id, request.id))
    is_semantic = cache.source == "semantic"
    question = cache.question or None if is_semantic else entry.text
    why = "" if question is not None else _WHY_NOT_ASKED if is_semantic else _WHY_NOT_KEPT
    return models.AnswerOut(
        request_id=request.id,
        at_s=request.at_s,
        team_id=request.team_id,
        team=request.team,
        model=request.alias,
        cache=cache.source,
        similarity=cache.similarity,
        entry=cache.entry,
        deployment=record.answer.deployment,
        created_at_s=entry.created_at,
        question=question,
        made_for=entry.text if is_semantic else None,
        answer=_told(entry),
        why_no_verdict=why,
    )


_WHY_NOT_ASKED = "the question of a semantic hit is kept only where the setting log_prompts was on"
_WHY_NOT_KEPT = "the cache keeps no text of a question that can only match exactly"
_LATE_S = 5.0  # clocks of hosts differ


async def _entry_of(parts: AdminParts, record: Record) -> Entry | None:
    """The answer that the request got; None where it is gone, or another one has taken its place."""
    if not record.cache.entry:
        return None
    partition, exact = parts.partition_of(record.request.team_id), bytes.fromhex(record.cache.entry)
    about = await parts.exact.lookup_about(partition, exact)
    if about is None or about.created_at > record.request.at_s + record.times.duration_ms / 1000 + _LATE_S:
        return None
    (entry,) = await parts.exact.lookup_many(partition, about.compat, [exact])
    return entry


def _told(entry: Entry) -> str:
    """The text of an answer; its JSON where it is more than a text."""
    try:
        whole = fold(chunks_of(entry))
    except msgspec.DecodeError:  # recorded as received
        whole = b"\n".join(chunk.data for chunk in entry.chunks)
    return answer_text(whole) or whole.decode("utf-8", "replace")


async def audit(parts: AdminParts, limit: int, before: int | None = None) -> models.AuditOut:
    """What admins asked to see, the latest first; `before` is the previous page's cursor."""
    rows = await parts.audit.rows(limit + 1, before)
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    found = [{**msgspec.structs.asdict(row), "team": teams.get(row.team_id)} for row in rows[:limit]]
    return models.AuditOut.model_validate({"rows": found, "cursor": found[-1]["id"] if len(rows) > limit else None})


# -- certificates


async def certificates(parts: AdminParts, team_id: int | None = None, model: str = "") -> models.CertificatesOut:
    """The certificates, of one team or one model if given, by descending requests. Raises RedisError."""
    teams = {team.id: team for team in await parts.accounts.list_teams()}
    found = [
        _certificate(parts, teams[pair[0]], pair[1], one)
        for pair, one in (await parts.certificates.read()).items()
        if pair[0] in teams and team_id in (None, pair[0]) and model in ("", pair[1])
    ]
    return models.CertificatesOut(certificates=sorted(found, key=lambda one: -one.requests))


async def certificates_of(parts: AdminParts, team_id: int) -> list[models.CertificateOut]:
    """A team's certificates; none while Redis is away."""
    try:
        return (await certificates(parts, team_id)).certificates
    except RedisError:
        return []


def _certificate(parts: AdminParts, team: Team, alias: str, one: Certificate) -> models.CertificateOut:
    start, counts = one.start, one.counts
    measured = parts.truth.measure(counts)
    drift = next((live.drift for live in parts.truth.live if (live.team_id, live.alias) == (team.id, alias)), None)
    return models.CertificateOut(
        team_id=team.id,
        team=team.name,
        model=alias,
        since_s=start.since_s,
        why=start.why,
        error_max=start.basis.error_max,
        estimate=measured.estimate,
        low=measured.low,
        high=measured.high,
        requests=counts.requests,
        hits=counts.hits,
        audits=counts.audits,
        shadow_checks=counts.shadow_checks,
        comparisons=counts.checks,
        judges=counts.judges,
        wrong=counts.wrong,
        unsettled=counts.unsettled,
        reported_wrong=counts.reported_wrong,
        reported_right=counts.reported_right,
        judge_error_max=measured.judge_error,
        embedder=start.basis.embedder,
        rule=start.basis.rule,
        judged_by=start.basis.judges,
        drift_since_s=drift.since_s if drift is not None else None,
        strictness=drift.strictness if drift is not None else 1.0,
    )


async def certify(parts: AdminParts, what: models.CertificateIn, client: str, way: str) -> models.CertificateOut:
    """Start a new certificate. Writes to the audit log first.

    Raises accounts.DoesNotExist (the team), NotFound (the model), RedisError, and sqlalchemy's errors.
    """
    team = await parts.accounts.team(what.team_id)
    if what.model not in parts.settings.models and (team.id, what.model) not in await parts.certificates.read():
        raise NotFound(f"There is no model {what.model!r}", param="model", code="model_not_found")
    await parts.audit.add(parts.audit_row(CERTIFICATE_STARTED, what.model, client, way, team.id))
    await parts.certificates.restart(team, what.model, "an admin asked for it")
    return (await certificates(parts, team.id, what.model)).certificates[0]


async def feedback(parts: AdminParts, what: models.FeedbackIn) -> models.FeedbackOut:
    """Report a response of any team as right or wrong, like `POST /v1/feedback`.

    Raises NotFound, AlreadyWrong, RedisError, CacheUnavailable.
    """
    record = await parts.reports.find(what.id)
    if record is None or not record.request.team_id:
        raise NotFound("There is no such response among the latest", param="id", code="response_not_found")
    partition = parts.partition_of(record.request.team_id)
    outcome = await parts.reports.report(partition, record.request.team_id, what.id, what.verdict == "right", "admin")
    return models.FeedbackOut(id=outcome.id, verdict=outcome.verdict, effect=outcome.effect)
