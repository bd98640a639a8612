"""The ledger beside a provider's export, by UTC day and model: each difference with its reasons.

No SQL and no files. Invariants: the reasons of a difference add up to it, what none of them
explains is named `unexplained`; nothing here writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta

from gateway.accounts.ledger import DaySpend
from gateway.deployments.build import describe
from gateway.deployments.fleet import EMBEDDER
from gateway.reconcile.export import Billed, Export, normal_model
from gateway.settings import Settings, deployment_name, is_pattern
from policies import Price, Usage

_CENT = 10_000


@dataclass(frozen=True, slots=True)
class Reason:
    """A part of a difference, µUSD: positive where the provider bills more."""

    name: str
    microusd: int
    words: str


@dataclass(slots=True)
class Difference:
    """One UTC day and model. `rows` are the ledger's sums that it is compared with."""

    day: date
    model: str
    provider: Billed
    ledger: Billed
    estimated: int = 0
    estimated_microusd: int = 0
    provider_says_microusd: int = 0
    rows: list[DaySpend] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)

    @property
    def microusd(self) -> int:
        return self.provider.microusd - self.ledger.microusd


@dataclass(frozen=True, slots=True)
class Report:
    """All differences, by day and model, and what could not be compared."""

    differences: list[Difference]
    uncompared: dict[str, int]  # models and deployments of the ledger that the file has on no day, µUSD
    is_priced_by_us: bool
    notes: list[str]


def models_of(settings: Settings, spends: Sequence[DaySpend]) -> tuple[dict[tuple[str, str], str], dict[str, Price]]:
    """The model of each alias and deployment in the ledger, and the price of each model where it is
    known.

    Local engines have none; a deployment that is no longer configured has its own name.
    """
    known = {deployment_name(alias, one): (alias, one) for alias, m in settings.models.items() for one in m.deployments}
    models: dict[tuple[str, str], str] = {}
    prices: dict[str, Price] = {}
    for spend in spends:
        key = (spend.alias, spend.deployment)
        if key in models or (spend.kind == "embeddings" and spend.deployment == EMBEDDER):
            continue
        alias, one = known.get(spend.deployment, ("", None))
        if one is None:
            models[key] = normal_model(spend.deployment)
        elif one.backend != "local" and one.model is not None:
            name = one.model
            if is_pattern(alias):
                name = name.replace("*", spend.alias.removeprefix(alias[:-1]))
            models[key] = normal_model(name)
            facts = describe(one.model_copy(update={"model": name}))
            if facts.is_price_known:
                prices.setdefault(models[key], facts.price)
    return models, prices


def compare(
    export: Export,
    spends: Sequence[DaySpend],
    models: Mapping[tuple[str, str], str],
    prices: Mapping[str, Price],
    *,
    tolerance_microusd: int = _CENT,
) -> Report:
    """The differences of `export` to the ledger's `spends`, the latter of the export's days."""
    named = {model for _, model in export.billed}
    found = {key: Difference(*key, billed, Billed()) for key, billed in export.billed.items()}
    uncompared: dict[str, int] = {}
    for spend in spends:
        model = models.get((spend.alias, spend.deployment))
        if model is None:
            continue
        if model not in named:
            uncompared[model] = uncompared.get(model, 0) + spend.cost_microusd
            continue
        one = found.setdefault((spend.day, model), Difference(spend.day, model, Billed(), Billed()))
        one.rows.append(spend)
        one.estimated += spend.estimated
        one.estimated_microusd += spend.estimated_microusd
        one.provider_says_microusd += spend.usage.provider_cost_microusd or 0
        one.ledger.add(
            Billed(
                requests=spend.requests,
                prompt=spend.usage.prompt_tokens,
                cached=spend.usage.cached_tokens,
                written=spend.usage.cache_write_tokens,
                written_1h=spend.usage.cache_write_1h_tokens,
                completion=spend.usage.completion_tokens,
                microusd=spend.cost_microusd,
            )
        )
    if not export.has_cost:
        for one in found.values():
            one.provider.microusd = _priced(one.provider, prices.get(one.model))
    for one in found.values():
        one.reasons = _reasons(one, export, prices.get(one.model), tolerance_microusd)
    _shifted(found, tolerance_microusd)
    return Report(
        [found[key] for key in sorted(found)],
        uncompared,
        not export.has_cost,
        [*export.notes, *([] if export.has_cost else ["the file has no costs: its tokens are priced by our prices"])],
    )


def _priced(billed: Billed, price: Price | None) -> int:
    if price is None:
        return 0
    usage = Usage(
        billed.prompt,
        billed.completion,
        billed.cached,
        cache_write_tokens=billed.written,
        cache_write_1h_tokens=billed.written_1h,
    )
    return price.cost(usage)


def _reasons(one: Difference, export: Export, price: Price | None, tolerance: int) -> list[Reason]:
    """What explains the difference of a day and model, in parts that add up to it."""
    rest, reasons = one.microusd, list[Reason]()

    def explain(name: str, microusd: int, words: str) -> None:
        nonlocal rest
        if microusd:
            reasons.append(Reason(name, microusd, words))
            rest -= microusd

    theirs, ours = one.provider, one.ledger
    if not ours.requests:
        explain("not_through_sameway", rest, "the ledger has no generation of this model on this day")
        return reasons
    if not (theirs.requests or theirs.prompt or theirs.completion or theirs.microusd):
        explain("not_in_export", rest, "the export has no row of this model for this day")
        return reasons
    if theirs.batch_microusd:
        explain("batch", theirs.batch_microusd, "the provider's own batches, which do not go through Sameway")
    if export.has_tokens and price is not None and not theirs.batch_microusd:
        cached = Billed(
            prompt=ours.prompt, completion=ours.completion, cached=theirs.cached, written=ours.written,
            written_1h=ours.written_1h,
        )  # fmt: skip
        if theirs.cached != ours.cached and theirs.cached + ours.written + ours.written_1h <= ours.prompt:
            words = f"{theirs.cached:,} tokens read from the provider's prompt cache, {ours.cached:,} in the ledger"
            explain("cached_tokens", _priced(cached, price) - _priced(ours, price), words)
        more = _priced(theirs, price) - _priced(ours, price) - sum(r.microusd for r in reasons)
        explain(*_of_tokens(one, export, more))
    elif one.estimated and abs(rest) > tolerance:
        explain("estimated_usages", min(max(rest, -one.estimated_microusd), one.estimated_microusd), _estimated(one))
    if rest and abs(rest) <= max(one.ledger.requests, tolerance):
        explain("rounding", rest, "the ledger rounds each request up to a µUSD, an export to a cent")
    elif rest:
        says = f"; the provider's own answers said {one.provider_says_microusd / 1e6:.6f} USD"
        words = "the same tokens at another price: a discount, a tier, or a price to correct in the configuration"
        is_price = export.has_tokens and price is not None
        words = words if is_price else "no reason was found"
        explain("price" if is_price else "unexplained", rest, words + (says if one.provider_says_microusd else ""))
    return reasons


def _of_tokens(one: Difference, export: Export, microusd: int) -> tuple[str, int, str]:
    theirs, ours = one.provider, one.ledger
    tokens = f"{theirs.prompt:,} + {theirs.completion:,} tokens, {ours.prompt:,} + {ours.completion:,} in the ledger"
    if export.has_requests and theirs.requests > ours.requests:
        return "not_through_sameway", microusd, f"{theirs.requests:,} requests, {ours.requests:,} here; {tokens}"
    if one.estimated:
        return "estimated_usages", microusd, f"{_estimated(one)}; {tokens}"
    name = "not_through_sameway" if microusd > 0 else "fewer_tokens"
    return name, microusd, tokens


def _estimated(one: Difference) -> str:
    return f"{one.estimated:,} generations of the ledger are estimates, for {one.estimated_microusd / 1e6:.6f} USD"


def _shifted(found: Mapping[tuple[date, str], Difference], tolerance: int) -> None:
    """Name two neighbouring days whose differences cancel each other: days of another time zone."""
    for (day, model), one in sorted(found.items()):
        after = found.get((day + timedelta(days=1), model))
        if after is None or abs(one.microusd) <= tolerance:
            continue
        if abs(one.microusd + after.microusd) <= max(tolerance, abs(one.microusd) // 10):
            for each in (one, after):
                if not any(reason.name == "time_zone" for reason in each.reasons):
                    each.reasons = [Reason("time_zone", each.microusd, _SHIFT_WORDS)]


_SHIFT_WORDS = "the days beside each other cancel out: the export's days may be of another time zone than UTC"


def corrections(one: Difference) -> list[tuple[DaySpend, int]]:
    """The difference in whole µUSD for each of the ledger's sums, in proportion to their costs."""
    rows = one.rows
    weights = [max(row.cost_microusd, 0) for row in rows]
    if not any(weights):
        weights = [max(row.requests, 1) for row in rows]
    whole, rest, parts = sum(weights), one.microusd, list[tuple[DaySpend, int]]()
    for row, weight in zip(rows, weights, strict=True):
        part = rest * weight // whole if whole else 0
        whole -= weight
        rest -= part
        parts.append((row, part))
    return [(row, part) for row, part in parts if part]


_UNSAFE = re.compile(r"[^\w.:@/-]")


def id_part(text: str) -> str:
    """A text for a row's id."""
    return _UNSAFE.sub("_", text)[:80]
