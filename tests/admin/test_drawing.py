"""Numbers as people read them, and charts as numbers draw them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin import format as fmt
from gateway.admin.charts import Axis, Series, log_lines, nice_ceiling, parts_bar, stacked_bars


@pytest.mark.parametrize(
    ("microusd", "text"),
    [
        (0, "$0"),
        (1, "$0.000001"),
        (120, "$0.00012"),
        (12_345, "$0.0123"),
        (500_000, "$0.50"),
        (12_300_000, "$12.30"),
        (1_234_567_890, "$1,235"),
        (None, "–"),
    ],
)
def test_money_has_as_many_decimals_as_say_something(microusd: int | None, text: str) -> None:
    """Cents for dollars, three digits for fractions of a cent."""
    assert fmt.usd(microusd) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0.42, "0.42 ms"),
        (12.4, "12 ms"),
        (1_300, "1.3 s"),
        (61_000, "1 min 1 s"),
        (250_000, "4 min 10 s"),
        (11_520_000, "3 h 12 min"),
        (None, "–"),
    ],
)
def test_durations_have_their_units(ms: float | None, text: str) -> None:
    """From microseconds to days, in at most two units."""
    assert fmt.ms(ms) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0%"), (0.0004, "<0.1%"), (0.0123, "1.2%"), (0.634, "63%"), (0.997, ">99%"), (1, "100%"), (None, "–")]
)  # fmt: skip
def test_only_all_is_100_percent_and_only_nothing_is_0(share: float | None, text: str) -> None:
    """Rounding never claims what is not so."""
    assert fmt.percent(share) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (512, "512 B"), (3_481, "3.4 KiB"), (268_435_456, "256 MiB")]
)
def test_sizes_have_their_units(size_bytes: int, text: str) -> None:
    """Binary units, one decimal where it says something."""
    assert fmt.size(size_bytes) == text


def test_times_are_relative_with_the_moment_in_the_title() -> None:
    """Past, future, now and never."""
    assert ">3 min ago<" in str(fmt.ago(1_000_000_000, 1_000_000_200))
    assert 'title="2001-09-09 01:46:40 UTC"' in str(fmt.ago(1_000_000_000, 1_000_000_200))
    assert ">in 2 d<" in str(fmt.ago(1_000_000_000 + 2 * 86_400, 1_000_000_000))
    assert ">now<" in str(fmt.ago(1_000_000_000, 1_000_000_000.4))
    assert fmt.ago(None, 0) == "never"


@given(st.integers(min_value=0, max_value=10**15))
def test_dollars_in_a_form_are_exact(microusd: int) -> None:
    """The form's text is the amount, digit for digit."""
    whole, fraction = fmt.dollars(microusd).split(".")
    assert int(whole) * 1_000_000 + int(fraction.ljust(6, "0")) == microusd


def svg_of(markup: str) -> ElementTree.Element:
    """The SVG of a chart, as an XML parser reads it."""
    found = re.search(r"<svg.*</svg>", markup, re.S)
    assert found is not None
    return ElementTree.fromstring(found.group())


def rects(svg: ElementTree.Element, kind: str) -> list[dict[str, float]]:
    return [
        {name: float(rect.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
        for rect in svg.iter("rect")
        if rect.attrib["class"] == kind
    ]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=60))
def test_stacked_bars_are_as_high_as_their_numbers(values: list[tuple[int, int]]) -> None:
    """Parts stand on each other without gap or overlap, in proportion, inside the plot."""
    series = [Series(kind, kind, tuple(float(v[i]) for v in values)) for i, kind in enumerate(("exact", "miss"))]
    names = ["x"] * len(values)
    svg = svg_of(stacked_bars(series, names, Axis(fmt.count), "chart", names))
    top = nice_ceiling(max(1.0, *(float(sum(v)) for v in values)))
    for column, (low, high) in zip(svg.iter("g"), values, strict=True):
        drawn = {rect.attrib["class"]: rect.attrib for rect in column.iter("rect")}
        for kind, value in (("exact", low), ("miss", high)):
            height = float(drawn[kind]["height"]) if kind in drawn else 0.0
            assert height == pytest.approx(value / top * 100, abs=0.011)
        if low and high and "miss" in drawn and "exact" in drawn:
            bottom = float(drawn["miss"]["y"]) + float(drawn["miss"]["height"])
            assert bottom == pytest.approx(float(drawn["exact"]["y"]), abs=0.021)
        assert all(float(one["y"]) >= -0.01 for one in drawn.values())


@given(st.floats(min_value=1e-6, max_value=1e15))
def test_an_axis_ends_close_above_its_highest_value(value: float) -> None:
    """Never below it, and never with half of the plot empty."""
    assert value <= nice_ceiling(value) * (1 + 1e-9)
    assert nice_ceiling(value) <= value * 2.0


def test_lines_have_gaps_where_nothing_was_measured() -> None:
    """Unknown values are no zeros: the line stops and starts again, and a lone value is a dot."""
    series = [Series("hits", "hits", (1.0, 10.0, None, 100.0), (2.0, 20.0, None, None))]
    svg = svg_of(log_lines(series, list("abcd"), Axis(fmt.ms), "chart", list("abcd")))
    drawn = {path.attrib["class"]: path.attrib["d"] for path in svg.iter("path")}
    assert drawn["line hits"] == "M5 100L15 50"
    assert drawn["dot hits"] == "M35 0L35 0"


def test_charts_escape_their_words() -> None:
    """Labels and tooltips are text, whatever they hold."""
    hostile = "<script>&\"'"
    drawn = stacked_bars([Series("exact", hostile, (1.0,))], [hostile], Axis(lambda _: hostile), hostile, [hostile])
    assert "<script>" not in drawn
    assert "<script>" not in parts_bar([("exact", 1.0, hostile)], hostile)
    assert svg_of(drawn).attrib["aria-label"] == hostile


def test_a_bar_of_parts_is_filled_in_proportion() -> None:
    """Side by side, and nothing where there is nothing."""
    svg = svg_of(parts_bar([("exact", 1.0, "a"), ("miss", 3.0, "b")], "bar"))
    assert (rects(svg, "exact")[0]["width"], rects(svg, "miss")[0]["x"]) == (250.0, 250.0)
    assert list(svg_of(parts_bar([], "bar"))) == []


def test_the_amounts_of_a_column_share_their_decimals() -> None:
    """The finest amount says how many; from $100 on cents do, and less than half a cent is shown as less, not as nothing."""
    fine = [12_000, 27, 0, -897]
    assert [fmt.usd(one, fmt.decimals(fine)) for one in fine] == ["$0.012000", "$0.000027", "$0.000000", "-$0.000897"]
    large = [{"cost": 1_234_500_000}, {"cost": 27}, {"cost": -27}, {"cost": 12_300_000}]
    places = fmt.decimals(large, "cost")
    assert [fmt.usd(one["cost"], places) for one in large] == ["$1,234.50", "<$0.01", "-<$0.01", "$12.30"]
    assert [fmt.sign(amount) for amount in (1, -1, 0, None)] == ["good", "bad", "", ""]
