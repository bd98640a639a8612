"""The cache in the admin plane: sizes, a trial of a prompt, wrong answers, certificates, purges and
feedback.

The docstrings of operations are descriptions in the OpenAPI document. No HTML. Invariant: a trial
of a prompt changes nothing.
"""

import asyncio
from typing import Any

import msgspec

from cache import CacheWorkerUnavailable, Entry, Hit, MissReason, Partition, Query, fingerprint
from cache.query import Neighbourhood, Undecided
from cache.verdicts import Scope, Suspension
from cache.worker import WorkerState
from gateway.accounts import Team
from gateway.accounts.audit import ANSWER_CLEARED, ANSWER_SHOWN, CACHE_PURGED, CERTIFICATE_STARTED, VERDICT_GIVEN
from gateway.admin import models
from gateway.admin.guard import Acting
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import Id, Label, Limit
from gateway.journey.guards import apart_of
from gateway.journey.record import Record
from gateway.journey.storing import answer_text, chunks_of
from gateway.telemetry.measured_error import Certificate
from gateway.telemetry.parts import GatewayPart, PartHealth
from gateway.wire.errors import BadRequest, NotFound
from gateway.wire.fold import fold

_NEIGHBOURS = 8
_WRONG_MAX = 200


async def cache(parts: WorkerParts) -> models.CacheOut:
    """How much is cached, by team, and the semantic index."""
    sizes, worker = await parts.exact.stats(), parts.semantic.status
    owners, size_bytes_max = await _owners(parts), parts.exact.limits.size_bytes_max
    partitions = [
        models.PartitionOut.of(sums, size_bytes_max=size_bytes_max, **owners.get(sums.partition, _DELETED))
        for sums in sizes.partitions
    ]
    healths = dict.fromkeys((WorkerState.LOADING, WorkerState.REBUILDING), PartHealth.STARTING)
    detail = f"{worker.size}, {worker.embedder}" if worker.is_ready else worker.detail or worker.state
    return models.CacheOut.of(
        sizes,
        partitions=sorted(partitions, key=lambda sums: -sums.size_bytes),
        semantic=GatewayPart(
            name="semantic index",
            health=PartHealth.OK if worker.is_ready else healths.get(worker.state, PartHealth.DOWN),
            detail=detail,
        ),
    )


_DELETED: dict[str, Any] = {"team_id": None, "team": None}


async def _owners(parts: WorkerParts) -> dict[Partition, dict[str, Any]]:
    """The team of each partition, as responses name it."""
    teams = await parts.accounts.list_teams()
    return {parts.partition_of(team.id): {"team_id": team.id, "team": team.name} for team in teams}


async def purge(parts: WorkerParts, body: models.PurgeIn, operator: Acting) -> models.PurgeOut:
    """Removes entries by id, text, team, model, namespace, deployment, age and tag; with `dry_run` (the default) only counts them."""
    conditions = body.model_dump(exclude={"dry_run", "all"}, exclude_none=True)
    if body.all == bool(conditions):
        message = "Give at least one of id, text, team_id, namespace, model, deployment, older_than_s and tag, or `all`, not both"
        raise BadRequest(message, param="all", code="invalid_value")
    chosen = await parts.entries_of(conditions)
    if not body.dry_run:
        entry = ", ".join(f"{name} {value}" for name, value in conditions.items() if name != "text") or "a text"
        row = parts.audit_row(CACHE_PURGED, "everything" if body.all else entry, operator, body.team_id or 0)
        await parts.audit.add(row)
    result = await parts.exact.purge(chosen, is_dry_run=body.dry_run)
    is_shown = bool(result.samples) and await parts.shows_texts(operator, "purged answers")
    owners = await _owners(parts)
    samples = [
        models.SampleOut.of(sample, created_at_s=sample.about.created_at, **owners.get(sample.partition, _DELETED))
        for sample in result.samples
    ]
    samples = [one if is_shown else one.model_copy(update={"text": None}) for one in samples]
    return models.PurgeOut.of(result, dry_run=body.dry_run, samples=samples)


async def try_prompt(parts: WorkerParts, body: models.TryIn, operator: Acting) -> models.TryOut:
    """What the cache would do with a prompt, and its nearest neighbours. Nothing is served, stored, counted or learned."""
    team = await parts.accounts.team(body.team_id)
    await parts.shows_texts(operator, f"what is near a prompt, of the team {team.name}")
    chat = {"model": body.model, "messages": [{"role": "user", "content": body.prompt}]}
    alias = parts.fleet.aliases.get(parts.fleet.configured(body.model))
    apart = apart_of(parts.settings, alias, team) if alias is not None else None
    request = fingerprint(chat, parts.partition_of(body.team_id), apart=apart)
    entry = (await parts.exact.lookup(request)).entry
    bound = parts.truth.bounds.bound(team, body.model, None)
    outcome: dict[str, Any] = {"decision": "miss", "reason": "not_eligible"}
    if request.text is not None:
        query = Query(request.partition, request.compat, request.text, bound.error_max, bound.untightened)
        try:
            outcome = _judged(await parts.semantic.near(query, _NEIGHBOURS))
        except CacheWorkerUnavailable as error:
            outcome["reason"] = f"{MissReason.UNAVAILABLE}: {error}"
    if entry is not None:
        outcome |= {"decision": "exact", "reason": "this very request was answered before", "similarity": 1.0}
    return models.TryOut.of(bound, **{**_UNKNOWN, **outcome})


_UNKNOWN: dict[str, Any] = {"similarity": None, "neighbours": [], "p": None, "p_min": None, "verdicts": 0}


def _judged(neighbourhood: Neighbourhood) -> dict[str, Any]:
    """The semantic cache's decision on a prompt, with the neighbours and figures that led to it."""
    numbers: dict[bytes, int] = {}
    neighbours = [
        models.NeighbourOut.of(
            neighbour,
            id=neighbour.exact.hex(),
            reason=neighbour.reason or "",
            group=numbers.setdefault(neighbour.group or neighbour.exact, len(numbers) + 1),
        )
        for neighbour in neighbourhood.neighbours
    ]
    decision = neighbourhood.decision
    if isinstance(decision, Undecided):
        decision = decision.miss
    return {
        "decision": "semantic" if isinstance(decision, Hit) else "miss",
        "reason": "a cached prompt means the same" if isinstance(decision, Hit) else decision.reason.value,
        "similarity": neighbours[0].similarity if neighbours else None,
        "neighbours": neighbours,
        "p": decision.trial.p if decision.trial is not None else None,
        "p_min": neighbourhood.p_min,
        "verdicts": neighbourhood.verdicts,
    }


# -- wrong answers


async def wrong(parts: WorkerParts, operator: Acting) -> models.WrongsOut:
    """Answers that were found wrong and are out of service by meaning, the latest first."""
    owners = [(team, parts.partition_of(team.id)) for team in await parts.accounts.list_teams()]
    suspended = await asyncio.gather(*(parts.verdicts.suspended(partition) for _, partition in owners))
    answers = [
        (team, partition, name, suspension)
        for (team, partition), names in zip(owners, suspended, strict=True)
        for name, suspension in names.items()
    ]
    answers.sort(key=lambda answer: -answer[3].at)
    shown = [await _wrong(parts, *answer) for answer in answers[:_WRONG_MAX]]
    if not (any(one.text for one in shown) and await parts.shows_texts(operator, "wrong answers")):
        shown = [one.model_copy(update={"text": None}) for one in shown]
    return {"wrong": shown}


async def _wrong(
    parts: WorkerParts, team: Team, partition: Partition, name: bytes, suspension: Suspension
) -> models.WrongOut:
    about = await parts.exact.lookup_about(partition, suspension.exact)
    return models.WrongOut.of(
        suspension,
        team_id=team.id,
        team=team.name,
        name=name.hex(),
        is_group=name[:1] == Scope.GROUP.value.encode(),
        entry=suspension.exact.hex(),
        text=about.text if about is not None else None,
        model=suspension.alias,
        at_s=suspension.at,
    )


async def clear(parts: WorkerParts, body: models.ClearIn, operator: Acting) -> models.ClearOut:
    """Puts an answer, or a group of equal ones, back into service."""
    partition = parts.partition_of(body.team_id)
    await parts.audit.add(parts.audit_row(ANSWER_CLEARED, body.name, operator, body.team_id))
    return {"was_out": await parts.verdicts.clear(partition, bytes.fromhex(body.name))}


async def answer(parts: WorkerParts, body: models.AnswerIn, operator: Acting) -> models.AnswerOut:
    """Question and answer of a response, as far as the cache keeps them. Each look is written to the audit log."""
    record = await _record(parts, body.id)
    entry = await _entry_of(parts, record)
    if entry is None:
        raise NotFound("The cache no longer has this answer", param="id", code="response_not_found")
    # first: what cannot be audited is not shown
    request = record.request
    await parts.audit.add(parts.audit_row(ANSWER_SHOWN, record.cache.entry, operator, request.team_id, request.id))
    is_semantic = record.cache.source == "semantic"
    question = record.cache.question or None if is_semantic else entry.text
    reason = "" if question is not None else _WHY_NOT_ASKED if is_semantic else _WHY_NOT_KEPT
    return models.AnswerOut.of(
        record.request,
        record.cache,
        record.answer,
        request_id=request.id,
        model=request.alias,
        cache=record.cache.source,
        created_at_s=entry.created_at,
        question=question,
        made_for=entry.text if is_semantic else None,
        answer=_answer_text(entry),
        why_no_verdict=reason,
    )


async def _record(parts: WorkerParts, request_id: str) -> Record:
    """A request of a team among the latest. Raises NotFound."""
    record = await parts.reports.find(request_id)
    if record is None or not record.request.team_id:
        raise NotFound("There is no such response among the latest", param="id", code="response_not_found")
    return record


_WHY_NOT_ASKED = "the question of a semantic hit is kept only where the setting log_prompts was on"
_WHY_NOT_KEPT = "the cache keeps no text of a question that can only match exactly"
_LATE_S = 5.0  # clocks of hosts differ


async def _entry_of(parts: WorkerParts, record: Record) -> Entry | None:
    """The entry that answered the request; None where it expired or was replaced."""
    if not record.cache.entry:
        return None
    partition, exact = parts.partition_of(record.request.team_id), bytes.fromhex(record.cache.entry)
    about = await parts.exact.lookup_about(partition, exact)
    if about is None or about.created_at > record.request.at_s + record.times.duration_ms / 1000 + _LATE_S:
        return None
    (entry,) = await parts.exact.lookup_many(partition, about.compat, [exact])
    return entry


def _answer_text(entry: Entry) -> str:
    """The text of an entry's answer; its JSON where the answer has other parts."""
    try:
        body = fold(chunks_of(entry))
    except msgspec.DecodeError:  # recorded as received
        body = b"\n".join(chunk.data for chunk in entry.chunks)
    return answer_text(body) or body.decode("utf-8", "replace")


async def audit(parts: WorkerParts, cursor: Id | None = None, limit: Limit = 100) -> models.AuditOut:
    """Who changed what and read which texts, with the values before and after, newest first."""
    rows = await parts.audit.rows(limit + 1, cursor)
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    named = [{**msgspec.structs.asdict(row), "team": teams.get(row.team_id)} for row in rows[:limit]]
    return {"rows": named, "cursor": named[-1]["id"] if len(rows) > limit else None}


# -- certificates


async def certificate(parts: WorkerParts, team_id: Id | None = None, model: Label = "") -> models.CertificatesOut:
    """By team and model: at most which share of the requests since when was answered wrongly by meaning, and what that rests on."""
    teams = {team.id: team for team in await parts.accounts.list_teams()}
    chosen = [
        _certificate(parts, teams[id], alias, certified)
        for (id, alias), certified in (await parts.certificates.read()).items()
        if id in teams and team_id in (None, id) and model in ("", alias)
    ]
    return {"certificates": sorted(chosen, key=lambda certificate: -certificate.requests)}


def _certificate(parts: WorkerParts, team: Team, alias: str, certified: Certificate) -> models.CertificateOut:
    start, counts, verified = certified.start, certified.counts, certified.counts.of_verifier
    return models.CertificateOut.of(
        counts,
        start,
        start.basis,
        parts.truth.measure(counts),
        team_id=team.id,
        team=team.name,
        model=alias,
        verified_checks=verified.checks,
        verified_wrong=verified.wrong,
        verified_high=parts.truth.measure(verified).high,
        judge_error_max=parts.truth.judge_error,
        judged_by=start.basis.judges,
        strictness=parts.truth.bounds.strictness.get((team.id, alias), 1.0),
    )


async def certify(parts: WorkerParts, body: models.CertificateIn, operator: Acting) -> models.CertificateOut:
    """Starts a new certificate, which counts from now on. It is written to the audit log."""
    team = await parts.accounts.team(body.team_id)
    if body.model not in parts.settings.models and (team.id, body.model) not in await parts.certificates.read():
        raise NotFound(f"There is no model {body.model!r}", param="model", code="model_not_found")
    await parts.audit.add(parts.audit_row(CERTIFICATE_STARTED, body.model, operator, team.id))
    await parts.certificates.restart(team, body.model, "an admin asked for it")
    started: models.CertificateOut = (await certificate(parts, team.id, body.model))["certificates"][0]
    return started


async def feedback(parts: WorkerParts, body: models.FeedbackIn, operator: Acting) -> models.FeedbackOut:
    """Says of any team's response what `POST /v1/feedback` says of one's own."""
    team_id = (await _record(parts, body.id)).request.team_id
    await parts.audit.add(parts.audit_row(VERDICT_GIVEN, body.verdict, operator, team_id, body.id))
    return await parts.reports.report(parts.partition_of(team_id), team_id, body.id, body.verdict == "right", "admin")
