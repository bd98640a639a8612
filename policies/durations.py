"""Durations as texts for people: the one form that pages, messages and commands share.

Pure functions, no clock. Invariant: a text with fewer units is the start of the text with more, so
two places that show one duration never contradict each other.
"""

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def duration_s(seconds: float, units: int = 2) -> str:
    """A duration in its largest units, `units` at most: 0.42 ms, 12 ms, 1.3 s, 4 min 10 s, 2 d 4 h."""
    if seconds < 0.9995:
        return _below_a_second(max(0.0, seconds * 1_000))
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    rest, parts = round(seconds), list[str]()
    for unit_s, unit in _UNITS:
        amount, rest = divmod(rest, unit_s)
        if parts and not amount:
            break
        if amount:
            parts.append(f"{amount} {unit}")
    return " ".join(parts[:units])


def duration_ms(milliseconds: float) -> str:
    """Like `duration_s`, for milliseconds."""
    return duration_s(milliseconds / 1_000)


def _below_a_second(milliseconds: float) -> str:
    if milliseconds >= 9.95:
        return f"{milliseconds:.0f} ms"
    text = f"{milliseconds:.1f}" if milliseconds >= 0.995 else f"{milliseconds:.2f}"
    return (text.rstrip("0").rstrip(".") or "0") + " ms"
