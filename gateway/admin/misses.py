"""Why prompts did not hit, by alias: the shares of the latest misses by cause, with an example
each, and what those cost whose last words had been asked before: the most that mending it saves.

No HTTP and no HTML. It counts the latest requests that Redis keeps, not all. Invariants: every
reason of a miss has one cause (`CAUSE_OF`); an example has a text only where prompts may be logged.
"""

from collections import Counter
from collections.abc import Mapping

from gateway.admin import models
from gateway.admin.guard import Acting
from gateway.admin.parts import WorkerParts
from gateway.journey.record import Record

_LATEST = 2_000

CAUSES: Mapping[str, str] = {
    "documents": "The system prompt, the history or a document differs. Name a verifier, which is shown the difference; "
    "or list the patterns of dates, ids and names in `cache.volatile`.",
    "context": "Nothing was cached with the same model, parameters, tools and roles of the turns: keep them equal.",
    "cuts": "Answers to such requests are cut before their own limit, and not stored: raise the deployment's context or `max_tokens`.",
    "new": "No cached prompt is near: nothing is lost but to new questions.",
    "vetoes": "Near prompts differ in numbers, names or signs: these are other questions.",
    "doubt": "Near prompts in other words, and the rule cannot tell whether their answers are right. A verifier can: name one in "
    "`cache.verifier`. Comparisons and reported answers teach the rule slowly.",
    "loading": "The encoder was not ready yet: it loads in seconds after a start.",
    "observed": "Would have been served: `verify` is `observe`, which serves nothing by meaning. Leave it out to serve them.",
    "off": "Turned off, by the settings, the team or the request.",
    "ineligible": "Only chats that end with one text of the user, within the encoder's window, are found by meaning.",
    "outage": "The cache worker, the vector engine or Redis did not answer in time: see the status page.",
    "gone": "The cached answer had expired, was evicted or too old: raise `cache.ttl_s` or `cache.size_bytes_max`.",
    "other": "",
}
"""What to do about each cause."""

_REASONS = {
    "documents": "documents",
    "context": "empty",
    "cuts": "cut",
    "new": "far",
    "vetoes": "numbers marks",
    "doubt": "words unsure strict tightened suspended",
    "loading": "loading",
    "observed": "observed",
    "off": "off off_for_team no-cache",
    "ineligible": "not_eligible too_long",
    "outage": "timeout unavailable index",
    "gone": "gone absent expired too_old unreadable",
}
CAUSE_OF = {reason: cause for cause, reasons in _REASONS.items() for reason in reasons.split()}
"""The cause of each reason of a miss; a new reason needs a word in the table above."""


async def cache_misses(parts: WorkerParts, operator: Acting) -> models.MissesOut:
    """Why the latest prompts did not hit: the share of each cause of each model's misses, what those cost that were asked
    again, an example, what to do. What would save most comes first."""
    page = await parts.stats.routes(_is_miss, limit=_LATEST)
    counts: Counter[tuple[str, str]] = Counter()
    totals: Counter[str] = Counter()
    examples: dict[tuple[str, str], Record] = {}
    repeats: Counter[tuple[str, str]] = Counter()
    repeated: Counter[tuple[str, str]] = Counter()  # µUSD
    known: set[tuple[int, str, str]] = set()
    for record in reversed(page.records):
        pair = record.request.alias, CAUSE_OF.get(record.cache.miss_reason, "other")
        totals[record.request.alias] += 1
        counts[pair] += 1
        if record.cache.nearest or pair not in examples or not examples[pair].cache.nearest:
            examples[pair] = record
        prompt = record.request.team_id, record.request.alias, record.cache.prompt_id
        if prompt in known:
            repeats[pair] += 1
            repeated[pair] += record.money.cost_microusd
        elif record.cache.prompt_id:
            known.add(prompt)
    is_shown = any(one.cache.nearest for one in examples.values()) and await parts.shows_texts(operator, "misses")
    rows = [
        models.MissCauseOut(
            model=alias,
            cause=cause,
            count=count,
            share=count / totals[alias],
            repeats=repeats[alias, cause],
            repeats_microusd=repeated[alias, cause],
            advice=CAUSES[cause],
            example=_example(examples[alias, cause], is_shown=is_shown),
        )
        for (alias, cause), count in counts.items()
    ]
    rows.sort(key=lambda row: (-row.repeats_microusd, -totals[row.model], row.model, -row.count, row.cause))
    return models.MissesOut(misses=len(page.records), causes=rows)


def _is_miss(record: Record) -> bool:
    is_miss = record.cache.source == "miss" and record.cache.miss_reason != ""
    return is_miss and bool(record.request.alias) and record.ended.status < 400


def _example(record: Record, *, is_shown: bool) -> models.MissExampleOut:
    request, cache = record.request, record.cache
    nearest = cache.nearest if is_shown else ""
    return models.MissExampleOut.of(request, cache, request_id=request.id, reason=cache.miss_reason, nearest=nearest)
