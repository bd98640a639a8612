"""The verifier in the admin plane: by alias who is asked, how often and at which cost, what its word
saves, and what would be served where it only observes.

No HTML. It reads the counts of a window, and examples from the latest requests that Redis keeps.
Invariant: an example has texts only where prompts may be logged.
"""

from gateway.admin import models
from gateway.admin.guard import Acting
from gateway.admin.parts import WorkerParts
from gateway.deployments.verifiers import Assigned, assigned
from gateway.journey.record import Record
from gateway.telemetry.summary import Percentiles, RequestTally, StatsWindow, Summary, percentiles

_EXAMPLES = 6
_DAY_S = 86_400
_COVERED_S_MIN = 3_600  # a shorter time says little of a day
_NONE = RequestTally()


async def cache_verifier(parts: WorkerParts, operator: Acting) -> models.VerifierOut:
    """The verifier of each model over the last 24 h: questions, their cost, what its word saved, and what would be served
    by meaning where it only observes, with the latest examples."""
    summary = await parts.stats.query(StatsWindow.DAY)
    chosen = {verifier.alias: verifier for verifier in assigned(parts.settings)}
    aliases = dict.fromkeys([*parts.settings.models, *sorted(summary.by_model)])
    rows = [_row(parts, alias, chosen.get(alias), summary) for alias in aliases]
    page = await parts.stats.routes(_is_example, limit=_EXAMPLES)
    is_shown = bool(page.records) and parts.settings.log_prompts and await parts.shows_texts(operator, "verifier")
    return models.VerifierOut(
        models=[row for row in rows if row.questions or row.would_hits or _is_verified(parts, row)],
        examples=[await _example(parts, record, is_shown=is_shown) for record in page.records],
    )


def _is_verified(parts: WorkerParts, row: models.VerifierModelOut) -> bool:
    """Whether a verifier was asked, or a model of the configuration has one; a refused request may have named any other."""
    return row.asked_requests > 0 or (row.model in parts.settings.models and row.verify != "off")


def _row(parts: WorkerParts, alias: str, chosen: Assigned | None, summary: Summary) -> models.VerifierModelOut:
    tally = summary.by_model.get(alias, _NONE)
    samples = [sample for (_, model), sample in summary.samples.items() if model == alias]
    lookups = tally.by_kind.get("semantic", 0) + tally.by_kind.get("miss", 0)
    waits: Percentiles = summary.verified.get(alias, percentiles({}))
    return models.VerifierModelOut.of(
        tally,
        model=alias,
        verify=parts.settings.verification(alias).mode.value,
        deployment=chosen.deployment if chosen is not None else "",
        question_microusd=chosen.microusd if chosen is not None else None,
        lookups=lookups,
        yes=tally.confirmed_requests,
        asked_share=tally.asked_requests / lookups if lookups else None,
        questions=sum(sample.questions for sample in samples),
        cost_microusd=sum(sample.judging_microusd for sample in samples),
        hits=tally.verified_hits,
        saved_microusd=tally.verified_saved_microusd,
        wait_p50_ms=waits.p50_ms,
        wait_p95_ms=waits.p95_ms,
        would_share=tally.would_hits / lookups if lookups else None,
        would_save_microusd_a_day=round(tally.would_saved_microusd * _DAY_S / _covered_s(parts, summary)),
    )


def _covered_s(parts: WorkerParts, summary: Summary) -> float:
    """The time from the first request of the window until now."""
    begun = next((point.start_s for point in summary.series if point.tally.requests), summary.start_s)
    return min(float(_DAY_S), max(float(_COVERED_S_MIN), parts.clock() - begun))


def _is_example(record: Record) -> bool:
    return record.verifier.would_serve != "" and record.request.team_id != 0


async def _example(parts: WorkerParts, record: Record, *, is_shown: bool) -> models.VerifierExampleOut:
    facts, made_for = record.verifier, ""
    if is_shown:
        partition = parts.partition_of(record.request.team_id)
        about = await parts.exact.lookup_about(partition, bytes.fromhex(facts.would_serve))
        made_for = (about.text if about is not None else None) or ""
    return models.VerifierExampleOut.of(
        record.request,
        record.cache,
        facts,
        request_id=record.request.id,
        model=record.request.alias,
        verdict=facts.verdict or "certain",
        question=record.cache.question if is_shown else "",
        made_for=made_for,
    )
