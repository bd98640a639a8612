"""The dashboard's charts: which numbers of the stats are drawn, in which colours and words.

Knows the stats' shape; how bars and lines are drawn is charts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from gateway.admin import format as fmt
from gateway.admin.charts import Axis, Series, log_lines, parts_bar, stacked_bars
from gateway.admin.models import PercentilesOut, StatsOut, TallyOut
from gateway.telemetry.summary import HITS, KINDS, Window

LABELS = {
    "exact": "exact hit",
    "semantic": "semantic hit",
    "coalesced": "shared generation",
    "miss": "miss",
    "bypass": "not asked of the cache",
    "refused": "refused",
    "failed": "failed",
}


def kinds_chart(stats: StatsOut) -> Markup:
    """What answered, over time: hits below, misses above them, errors on top."""
    series = [
        Series(kind, LABELS[kind], tuple(float(point.tally.by_kind.get(kind, 0)) for point in stats.series))
        for kind in KINDS
    ]
    notes = [
        _note(stats, index, f"{fmt.count(point.tally.requests)} requests, {_hits(point.tally)}", _kinds_of(point.tally))
        for index, point in enumerate(stats.series)
    ]
    label = (
        f"Requests by what answered them, {stats.window.value}: {fmt.count(stats.total.requests)}, {_hits(stats.total)}"
    )
    return stacked_bars(series, _names(stats), Axis(fmt.count, 4.0), label, notes)


def money_chart(stats: StatsOut) -> Markup:
    """What was spent, and on top what the cache saved: the whole bar is what it would have cost."""
    spent = tuple(float(point.tally.cost_microusd) for point in stats.series)
    saved = tuple(float(point.tally.saved_microusd) for point in stats.series)
    series = [Series("spent", "spent", spent), Series("saved", "saved", saved)]
    notes = [
        _note(stats, index, f"spent {fmt.usd(point.tally.cost_microusd)}, saved {fmt.usd(point.tally.saved_microusd)}")
        for index, point in enumerate(stats.series)
    ]
    label = f"Money: spent {fmt.usd(stats.total.cost_microusd)}, saved {fmt.usd(stats.total.saved_microusd)}"
    return stacked_bars(series, _names(stats), Axis(lambda value: fmt.usd(round(value)), 100.0), label, notes)


def ttft_chart(stats: StatsOut) -> Markup:
    """Time to first token of hits and of misses: the median as a line, up to the 95th percentile as a band."""
    hits = [point.ttft_hit for point in stats.series]
    misses = [point.ttft_miss for point in stats.series]
    series = [
        Series("misses", "misses", tuple(one.p50_ms for one in misses), tuple(one.p95_ms for one in misses)),
        Series("hits", "hits", tuple(one.p50_ms for one in hits), tuple(one.p95_ms for one in hits)),
    ]
    notes = [
        _note(stats, index, f"hits {_latency(hit)}", f"misses {_latency(miss)}")
        for index, (hit, miss) in enumerate(zip(hits, misses, strict=True))
    ]
    label = f"Time to first token: hits {_latency(stats.ttft['hit'])}, misses {_latency(stats.ttft['miss'])}"
    return log_lines(series, _names(stats), Axis(fmt.ms), label, notes)


def kinds_bar(tally: TallyOut) -> Markup:
    """One bar of all requests by what answered."""
    return _bar(tally, KINDS)


def answers_bar(tally: TallyOut) -> Markup:
    """One bar of what the hit rate is made of: hits and misses."""
    return _bar(tally, (*HITS, "miss"))


def _bar(tally: TallyOut, kinds: Sequence[str]) -> Markup:
    counts = {kind: tally.by_kind.get(kind, 0) for kind in kinds}
    total = sum(counts.values()) or 1
    parts = [
        (kind, float(amount), f"{LABELS[kind]}: {fmt.count(amount)} ({fmt.percent(amount / total)})")
        for kind, amount in counts.items()
        if amount
    ]
    return parts_bar(parts, f"What answered: {_hits(tally)}")


def _hits(tally: TallyOut) -> str:
    return f"{fmt.percent(tally.hit_rate)} hits" if tally.hit_rate is not None else "no lookups"


def _kinds_of(tally: TallyOut) -> str:
    found = (f"{LABELS[kind]} {fmt.count(count)}" for kind in KINDS if (count := tally.by_kind.get(kind, 0)))
    return ", ".join(found)


def _latency(one: PercentilesOut) -> str:
    return f"p50 {fmt.ms(one.p50_ms)}, p95 {fmt.ms(one.p95_ms)}" if one.count else "none"


def _note(stats: StatsOut, index: int, *lines: str) -> str:
    point = stats.series[index]
    start, end = (datetime.fromtimestamp(at, UTC) for at in (point.start_s, point.start_s + point.length_s))
    span = f"{start:%Y-%m-%d}" if point.length_s >= 86_400 else f"{start:%a %d %b %H:%M}–{end:%H:%M} UTC"
    return "\n".join([span, *(line for line in lines if line)])


def _names(stats: StatsOut) -> list[str]:
    return list(_moments(stats))


def _moments(stats: StatsOut) -> Iterator[str]:
    """The axis' labels: clock times within a day, dates beyond; the last step is now."""
    pattern = "%H:%M" if stats.window in (Window.HOUR, Window.DAY) else "%d %b"
    for point in stats.series[:-1]:
        yield datetime.fromtimestamp(point.start_s, UTC).strftime(pattern)
    yield "now"
