"""The dashboard's charts as inline SVG: which numbers of the stats they draw, with their labels.

The charts come first, then their three drawings: stacked bars, lines on a logarithmic axis, and
single bars of parts. A plot stretches to its box (`preserveAspectRatio="none"`), so it is sharp at
390 px and at 1280 px. Labels are HTML around it, spaced as its ticks, and colours are classes of
the style sheet, so one chart serves both colour schemes. Invariant: all text is escaped, and no
element needs a style attribute.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup

from gateway.admin import format as fmt
from gateway.admin.models import SavingsOut, StatsOut, TallyOut
from gateway.telemetry.buckets import HITS, KINDS
from gateway.telemetry.summary import Percentiles, StatsWindow

_HEIGHT = 100.0
_STEP = 10.0  # a bar's share of the width, its gap included
_BAR = 7.6
_DAYS_MAX = 400
LABELS = {
    "exact": "exact hit",
    "semantic": "semantic hit",
    "coalesced": "shared generation",
    "miss": "miss",
    "bypass": "not asked of the cache",
    "refused": "refused",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One colour of a stack of bars, or one line of a plot.

    `kind` is its class. `values` has one number a step, or None where it is unknown.
    """

    kind: str
    label: str
    values: tuple[float | None, ...]
    highs: tuple[float | None, ...] = ()  # lines: the upper edge of a band above the line


@dataclass(frozen=True, slots=True)
class Axis:
    """The labels of the y axis."""

    format: Callable[[float], str]
    least_max: float = 1.0  # the lowest end of the axis


def kinds_chart(stats: StatsOut) -> Markup:
    """Requests by kind over time: hits below, misses above them, errors on top."""
    series = [
        Series(kind, LABELS[kind], tuple(float(point.tally.by_kind.get(kind, 0)) for point in stats.series))
        for kind in KINDS
    ]
    notes = [
        _note(stats, index, f"{fmt.count(point.tally.requests)} requests, {_hits(point.tally)}", _kinds_of(point.tally))
        for index, point in enumerate(stats.series)
    ]
    label = f"Requests by what answered them, {fmt.span(stats.window.value)}: {fmt.count(stats.total.requests)}, {_hits(stats.total)}"
    return stacked_bars(series, _names(stats), Axis(fmt.count, 4.0), label, notes)


def money_chart(stats: StatsOut) -> Markup:
    """Spend over time with the savings on top: a whole bar is the cost without a cache."""
    sums = [(point.tally.cost_microusd, point.tally.saved_microusd) for point in stats.series]
    notes = [_note(stats, index, _money_note(*sums[index])) for index in range(len(sums))]
    label = f"Money: {_money_note(stats.total.cost_microusd, stats.total.saved_microusd)}"
    return _money_bars(sums, _names(stats), label, notes)


def _money_note(spent: int, saved: int) -> str:
    return f"spent {fmt.usd(spent)}, saved {fmt.usd(saved)}"


def _money_bars(sums: Sequence[tuple[int, int]], steps: Sequence[str], label: str, notes: Sequence[str]) -> Markup:
    """Bars of the money spent, with savings above 0 on top."""
    series = [
        Series(name, name, tuple(float(max(0, amount)) for amount in amounts))
        for name, amounts in zip(("spent", "saved"), zip(*sums, strict=True), strict=True)
    ]
    return stacked_bars(series, steps, Axis(lambda value: fmt.usd(round(value)), 100.0), label, notes)


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a waterfall: `kind` is its class, `drawing` its bar from the level before to the level after."""

    kind: str
    label: str
    requests: int
    amount: str
    drawing: Markup


def waterfall(savings: SavingsOut) -> list[Bar]:
    """The rows from the baseline over each step to the money spent, in the savings' own order."""
    levels = [savings.baseline_microusd]
    for step in savings.steps:
        levels.append(levels[-1] - step.amount_microusd)
    height = max(1, *levels) - min(0, *levels)
    low = min(0, *levels)

    def drawn(kind: str, start: int, end: int) -> Markup:
        x, width = (min(start, end) - low) / height * 1000, max(abs(end - start) / height * 1000, 1.5)
        box = '<svg class="parts" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
        return Markup(box).format(_rect(kind, min(x, 998.5), 0, width, 10))

    baseline, spent = savings.baseline_microusd, savings.spent_microusd
    places = fmt.decimals([baseline, spent, *(step.amount_microusd for step in savings.steps)])
    whole = fmt.usd(baseline, places)
    bars = [Bar("baseline", "Without Sameway", savings.requests, whole, drawn("baseline", 0, baseline))]
    for step, before, after in zip(savings.steps, levels[:-1], levels[1:], strict=True):
        kind = "saved" if step.amount_microusd >= 0 else "cost"
        amount = f"{'' if kind == 'saved' else '+'}{fmt.usd(-step.amount_microusd, places)}"
        bars.append(Bar(kind, step.label, step.requests, amount, drawn(kind, before, after)))
    return [*bars, Bar("spent", "Spent", savings.requests, fmt.usd(spent, places), drawn("spent", 0, spent))]


def savings_chart(savings: SavingsOut) -> Markup:
    """Spend by day with the savings on top; a day that cost more than its baseline has no savings."""
    sums = {of_day.day: (of_day.spent_microusd, of_day.saved_microusd) for of_day in savings.days}
    starts = range(savings.from_s, savings.until_s, 86_400)
    days = [datetime.fromtimestamp(at, UTC).date().isoformat() for at in starts[-_DAYS_MAX:]]
    if len(starts) > _DAYS_MAX:  # of a longer time those with requests
        days = [*sums][-_DAYS_MAX:] or days[:1]
    notes = [f"{day}\n{_money_note(*sums[day]) if day in sums else 'nothing'}" for day in days]
    label = f"By day: {_money_note(savings.spent_microusd, savings.saved_microusd)}"
    return _money_bars([sums.get(day, (0, 0)) for day in days], days, label, notes)


def ttft_chart(stats: StatsOut) -> Markup:
    """Time to first token of hits and misses: the median as a line, the 95th
    percentile as a band.
    """
    hits = [point.ttft_hit for point in stats.series]
    misses = [point.ttft_miss for point in stats.series]
    series = [
        Series(name, name, tuple(one.p50_ms for one in measured), tuple(one.p95_ms for one in measured))
        for name, measured in (("misses", misses), ("hits", hits))
    ]
    notes = [
        _note(stats, index, f"hits {_latency(hit)}", f"misses {_latency(miss)}")
        for index, (hit, miss) in enumerate(zip(hits, misses, strict=True))
    ]
    label = f"Time to first token: hits {_latency(stats.ttft['hit'])}, misses {_latency(stats.ttft['miss'])}"
    return log_lines(series, _names(stats), Axis(fmt.ms), label, notes)


ANSWERS = (*HITS, "miss")
"""The kinds of requests that the hit rate counts."""


def kinds_bar(tally: TallyOut, kinds: Sequence[str] = KINDS) -> Markup:
    """One bar of the requests of these kinds."""
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
    return ", ".join(f"{LABELS[kind]} {fmt.count(tally.by_kind[kind])}" for kind in KINDS if tally.by_kind.get(kind))


def _latency(measured: Percentiles) -> str:
    return f"p50 {fmt.ms(measured.p50_ms)}, p95 {fmt.ms(measured.p95_ms)}" if measured.count else "none"


def _note(stats: StatsOut, index: int, *lines: str) -> str:
    point = stats.series[index]
    start, end = (datetime.fromtimestamp(at, UTC) for at in (point.start_s, point.start_s + point.length_s))
    span = f"{start:%Y-%m-%d}" if point.length_s >= 86_400 else f"{start:%a %d %b %H:%M}–{end:%H:%M} UTC"
    return "\n".join([span, *(line for line in lines if line)])


def _names(stats: StatsOut) -> list[str]:
    """The labels of the x axis: clock times within a day, else dates; the last step is now."""
    pattern = "%H:%M UTC" if stats.window in (StatsWindow.HOUR, StatsWindow.DAY) else "%d %b"
    return [*(datetime.fromtimestamp(point.start_s, UTC).strftime(pattern) for point in stats.series[:-1]), "now"]


# -- drawings


def stacked_bars(
    series: Sequence[Series], steps: Sequence[str], axis: Axis, label: str, notes: Sequence[str]
) -> Markup:
    """Bars of parts over time.

    `steps` names the moments, `notes` has each bar's tooltip, `label` is the chart in words.
    """
    totals = [sum(stack.values[i] or 0.0 for stack in series) for i in range(len(steps))]
    top = nice_ceiling(max([axis.least_max, *totals]))
    columns = []
    for index, note in enumerate(notes):
        y, parts = _HEIGHT, []
        for stack in series:
            height = (stack.values[index] or 0.0) / top * _HEIGHT
            if height > 0:
                y -= height
                parts.append(_rect(stack.kind, index * _STEP + (_STEP - _BAR) / 2, y, _BAR, height))
        columns.append(_column(index, Markup("").join(parts), note))
    ticks = [axis.format(top * share) for share in (1.0, 0.5, 0.0)]
    return _plot(_grid(len(steps), (0.0, 50.0)) + Markup("").join(columns), notes, ticks, steps, label)


def log_lines(series: Sequence[Series], steps: Sequence[str], axis: Axis, label: str, notes: Sequence[str]) -> Markup:
    """Lines over time on a logarithmic axis of whole decades, with gaps for unknown values.

    Values are above 0.
    """
    known = [value for line in series for value in (*line.values, *line.highs) if value]
    low = math.floor(math.log10(min(known))) if known else 0
    high = max(low + 1, math.ceil(math.log10(max(known)))) if known else 3
    span = high - low

    def y(value: float) -> float:
        return _HEIGHT * (high - math.log10(value)) / span

    drawn = [_grid(len(steps), [_HEIGHT * index / span for index in range(span)])]
    for line in series:
        for start, end in _runs(line.values):
            points = [(index * _STEP + _STEP / 2, y(line.values[index] or 1.0)) for index in range(start, end)]
            if line.highs:
                highs = [most or value or 1.0 for most, value in zip(line.highs, line.values, strict=True)][start:end]
                upper = [(x, y(most)) for (x, _), most in zip(points, highs, strict=True)]
                band = _path([*points, *reversed(upper)])
                drawn.append(Markup('<path class="band {}" d="{}Z"/>').format(line.kind, band))
            shape = "line" if len(points) > 1 else "dot"
            drawn.append(Markup('<path class="{} {}" d="{}"/>').format(shape, line.kind, _path(points)))
    drawn += [_column(index, Markup(""), note) for index, note in enumerate(notes)]
    ticks = [axis.format(10.0**power) for power in range(high, low - 1, -1)]
    return _plot(Markup("").join(drawn), notes, ticks, steps, label)


def parts_bar(parts: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """One bar of parts side by side: each has a kind, an amount and a tooltip."""
    whole = sum(amount for _, amount, _ in parts) or 1
    x, drawn = 0.0, []
    for kind, amount, note in parts:
        width = amount / whole * 1000
        if width > 0:
            drawn.append(Markup("<g><title>{}</title>{}</g>").format(note, _rect(kind, x, 0, width, 10)))
        x += width
    box = '<svg class="parts" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    return Markup(box).format(label, Markup("").join(drawn))


def nice_ceiling(value: float) -> float:
    """The next round number at or above `value`, which is above 0.

    One of 1, 1.2, 1.6, 2, 3, 4, 6, 8 times a power of ten, so that its half is round too.
    """
    power = 10.0 ** math.floor(math.log10(value))
    for factor in (1.0, 1.2, 1.6, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0):
        if value <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power


def _plot(inner: Markup, notes: Sequence[str], ticks: Sequence[str], names: Sequence[str], label: str) -> Markup:
    """A drawing with its axes; below it its tooltips as a list, for the keyboard and for readers of screens."""
    y_labels = Markup("").join(Markup("<span>{}</span>").format(tick) for tick in ticks)
    shown = names if len(names) < 3 else (names[0], names[len(names) // 2], names[-1])
    x_labels = Markup("").join(Markup("<span>{}</span>").format(name) for name in shown)
    numbers = Markup("").join(Markup("<li>{}</li>").format(note.replace("\n", ": ", 1)) for note in notes)
    id = label.partition(":")[0].partition(",")[0].lower().replace(" ", "-")
    return Markup(
        '<div class="plot"><div class="y-axis" aria-hidden="true">{}</div>'
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
        '<div class="x-axis" aria-hidden="true">{}</div></div>'
        '<details class="numbers" id="numbers-{}"><summary>In numbers</summary><ul tabindex="0">{}</ul></details>'
    ).format(y_labels, _number(len(notes) * _STEP), _number(_HEIGHT), label, inner, x_labels, id, numbers)


def _grid(steps: int, heights: Sequence[float]) -> Markup:
    lines = (Markup('<path class="grid" d="M0 {}H{}"/>').format(_number(y), _number(steps * _STEP)) for y in heights)
    return Markup("").join(lines)


def _column(index: int, inner: Markup, note: str) -> Markup:
    """The drawing of a step over a target of full height, which makes its tooltip easy to hit."""
    return Markup(
        '<g class="column"><title>{}</title><rect class="target" x="{}" y="0" width="{}" height="{}"/>{}</g>'
    ).format(note, _number(index * _STEP), _number(_STEP), _number(_HEIGHT), inner)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    place = map(_number, (x, y, width, height))
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(kind, *place)


def _runs(values: Sequence[float | None]) -> list[tuple[int, int]]:
    """Half-open ranges of neighbouring known values."""
    runs: list[tuple[int, int]] = []
    for index, value in enumerate(values):
        if not value:
            continue
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A path through the points; one point becomes a dot (a line of length 0 with a round cap)."""
    whole = points if len(points) > 1 else [points[0], points[0]]
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in whole)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
