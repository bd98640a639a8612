"""Compares the ledger with a provider's export, by UTC day and model; explains each difference.

No SQL and no files. Invariants: the reasons of a difference add up to it, with the remainder named
`unexplained`; nothing here writes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Any

from gateway.accounts.ledger import DaySpend
from gateway.deployments.build import describe
from gateway.deployments.fleet import EMBEDDER
from gateway.reconcile.export import COUNTS, Billed, Export, normal_model
from gateway.settings import Settings, deployment_name, is_pattern
from policies import Price, Usage

_CENT = 10_000


@dataclass(frozen=True, slots=True)
class Reason:
    """A part of a difference in µUSD, positive if the provider bills more."""

    name: str
    microusd: int
    explanation: str


@dataclass(slots=True)
class Difference:
    """One UTC day and model. `rows` are the ledger's sums for them."""

    day: date
    model: str
    provider: Billed = field(default_factory=Billed)
    rows: list[DaySpend] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)

    def total(self, name: str) -> int:
        """The sum of a field over the rows, or over their usage."""
        return sum(getattr(row, name) if hasattr(row, name) else getattr(row.usage, name) or 0 for row in self.rows)

    @property
    def ledger(self) -> Billed:
        sums: dict[str, Any] = {name: self.total(name) for name in COUNTS}
        return Billed(**sums)

    @property
    def microusd(self) -> int:
        return self.provider.cost_microusd - self.ledger.cost_microusd


@dataclass(frozen=True, slots=True)
class Report:
    """All differences by day and model, and the models that could not be compared."""

    differences: list[Difference]
    uncompared: dict[str, int]  # models and deployments of the ledger that the file has on no day, µUSD
    is_priced_by_us: bool
    notes: list[str]


def models_of(settings: Settings, spends: Sequence[DaySpend]) -> tuple[dict[tuple[str, str], str], dict[str, Price]]:
    """The model of each alias and deployment in the ledger, and the known prices by model.

    Local engines are left out; a deployment that is no longer configured counts as its own model.
    """
    configured = {
        deployment_name(alias, deployment): (alias, deployment)
        for alias, m in settings.models.items()
        for deployment in m.deployments
    }
    models: dict[tuple[str, str], str] = {}
    prices: dict[str, Price] = {}
    for spend in spends:
        key = (spend.alias, spend.deployment)
        if key in models or (spend.kind == "embeddings" and spend.deployment == EMBEDDER):
            continue
        alias, deployment = configured.get(spend.deployment, ("", None))
        if deployment is None:
            models[key] = normal_model(spend.deployment)
        elif deployment.backend != "local" and deployment.model is not None:
            name = deployment.model
            if is_pattern(alias):
                name = name.replace("*", spend.alias.removeprefix(alias[:-1]))
            models[key] = normal_model(name)
            facts = describe(deployment.model_copy(update={"model": name}))
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
    """Compare `export` with the ledger's `spends` on the export's days."""
    models_in_export = {model for _, model in export.billed}
    differences = {key: Difference(*key, billed) for key, billed in export.billed.items()}
    uncompared: dict[str, int] = {}
    for spend in spends:
        model = models.get((spend.alias, spend.deployment))
        if model is None:
            continue
        if model not in models_in_export:
            uncompared[model] = uncompared.get(model, 0) + spend.cost_microusd
            continue
        differences.setdefault((spend.day, model), Difference(spend.day, model)).rows.append(spend)
    if not export.has_cost:
        for difference in differences.values():
            difference.provider.cost_microusd = _priced(difference.provider, prices.get(difference.model))
    for difference in differences.values():
        difference.reasons = _reasons(difference, export, prices.get(difference.model), tolerance_microusd)
    _shifted(differences, tolerance_microusd)
    return Report(
        [differences[key] for key in sorted(differences)],
        uncompared,
        not export.has_cost,
        [*export.notes, *([] if export.has_cost else ["the file has no costs: its tokens are priced by our prices"])],
    )


def _priced(billed: Billed, price: Price | None) -> int:
    if price is None:
        return 0
    return price.cost(Usage(**{name: getattr(billed, name) for name in COUNTS if name.endswith("_tokens")}))


def _reasons(difference: Difference, export: Export, price: Price | None, tolerance: int) -> list[Reason]:
    """The reasons of a difference; their amounts add up to it."""
    unexplained, reasons = difference.microusd, list[Reason]()

    def explain(name: str, microusd: int, explanation: str) -> None:
        nonlocal unexplained
        if microusd:
            reasons.append(Reason(name, microusd, explanation))
            unexplained -= microusd

    provider, ledger = difference.provider, difference.ledger
    if not ledger.requests:
        explain("not_through_sameway", unexplained, "the ledger has no generation of this model on this day")
        return reasons
    if not (provider.requests or provider.prompt_tokens or provider.completion_tokens or provider.cost_microusd):
        explain("not_in_export", unexplained, "the export has no row of this model for this day")
        return reasons
    if provider.batch_microusd:
        explain("batch", provider.batch_microusd, "the provider's own batches, which do not go through Sameway")
    if export.has_tokens and price is not None and not provider.batch_microusd:
        read, written = provider.cached_tokens, ledger.cache_write_tokens + ledger.cache_write_1h_tokens
        if read != ledger.cached_tokens and read + written <= ledger.prompt_tokens:
            text = f"{read:,} tokens read from the provider's prompt cache, {ledger.cached_tokens:,} in the ledger"
            as_read = replace(ledger, cached_tokens=read)
            explain("cached_tokens", _priced(as_read, price) - _priced(ledger, price), text)
        by_tokens = _priced(provider, price) - _priced(ledger, price) - sum(r.microusd for r in reasons)
        explain(*_of_tokens(difference, export, by_tokens))
    elif difference.total("estimated") and abs(unexplained) > tolerance:
        estimated_microusd = difference.total("estimated_microusd")
        explain(
            "estimated_usages", min(max(unexplained, -estimated_microusd), estimated_microusd), _estimated(difference)
        )
    if unexplained and abs(unexplained) <= max(ledger.requests, tolerance):
        explain("rounding", unexplained, "the ledger rounds each request up to a µUSD, an export to a cent")
    elif unexplained:
        answers_microusd = difference.total("provider_cost_microusd")
        answers_note = f"; the provider's own answers said {answers_microusd / 1e6:.6f} USD" if answers_microusd else ""
        is_price = export.has_tokens and price is not None
        text = "the same tokens at another price: a discount, a tier, or a price to correct in the configuration"
        text = text if is_price else "no reason was found"
        explain("price" if is_price else "unexplained", unexplained, text + answers_note)
    return reasons


def _of_tokens(difference: Difference, export: Export, microusd: int) -> tuple[str, int, str]:
    provider, ledger = difference.provider, difference.ledger
    shown = [f"{billed.prompt_tokens:,} + {billed.completion_tokens:,}" for billed in (provider, ledger)]
    tokens = f"{shown[0]} tokens, {shown[1]} in the ledger"
    if export.has_requests and provider.requests > ledger.requests:
        return "not_through_sameway", microusd, f"{provider.requests:,} requests, {ledger.requests:,} here; {tokens}"
    if difference.total("estimated"):
        return "estimated_usages", microusd, f"{_estimated(difference)}; {tokens}"
    name = "not_through_sameway" if microusd > 0 else "fewer_tokens"
    return name, microusd, tokens


def _estimated(difference: Difference) -> str:
    count, microusd = difference.total("estimated"), difference.total("estimated_microusd")
    return f"{count:,} generations of the ledger are estimates, for {microusd / 1e6:.6f} USD"


def _shifted(differences: Mapping[tuple[date, str], Difference], tolerance: int) -> None:
    """Explain two adjacent days whose differences cancel: the export's days have another time zone."""
    for (day, model), difference in sorted(differences.items()):
        after = differences.get((day + timedelta(days=1), model))
        if after is None or abs(difference.microusd) <= tolerance:
            continue
        if abs(difference.microusd + after.microusd) <= max(tolerance, abs(difference.microusd) // 10):
            for neighbour in (difference, after):
                if not any(reason.name == "time_zone" for reason in neighbour.reasons):
                    neighbour.reasons = [Reason("time_zone", neighbour.microusd, _SHIFTED)]


_SHIFTED = "the days beside each other cancel out: the export's days may be of another time zone than UTC"


def corrections(difference: Difference) -> list[tuple[DaySpend, int]]:
    """The part of the difference for each of the ledger's sums, in whole µUSD, in proportion to
    cost.
    """
    rows = difference.rows
    weights = [max(row.cost_microusd, 0) for row in rows]
    if not any(weights):
        weights = [max(row.requests, 1) for row in rows]
    weights_left, microusd_left, parts = sum(weights), difference.microusd, list[tuple[DaySpend, int]]()
    for row, weight in zip(rows, weights, strict=True):
        part = microusd_left * weight // weights_left if weights_left else 0
        weights_left -= weight
        microusd_left -= part
        parts.append((row, part))
    return [(row, part) for row, part in parts if part]


_UNSAFE = re.compile(r"[^\w.:@/-]")


def id_part(text: str) -> str:
    """`text` with `_` for characters that an id may not have, cut to 80 characters."""
    return _UNSAFE.sub("_", text)[:80]
