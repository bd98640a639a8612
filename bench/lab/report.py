"""Rows as a table for people and as JSON lines for programs, with the ratios that are the point of a bench.

Knows no systems: `sameway` is the one that the others are compared with, `direct` the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.lab.measure import Row

_FLOORS = {"miss": 10.0, "miss-stream": 20.0, "hit-memory": 40.0, "hit-redis": 40.0}  # times LiteLLM's requests/s
_COLUMNS = (
    "system",
    "req/s",
    "p50",
    "p99",
    "p99.9",
    "TTFT p50",
    "gap p99",
    "added p50",
    "CPU ms/req",
    "RSS MB",
    "errors",
    "sameway",
)


def write_json(rows: Sequence[msgspec.Struct], path: Path) -> None:
    """One JSON object a line."""
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def render(rows: Sequence[Row], absent: Sequence[str]) -> str:
    """The tables, one per scenario and number of connections, then the shares, the floors and what is absent."""
    blocks: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        blocks.setdefault((row.scenario, row.connections), []).append(row)
    parts = [_table(block) for block in blocks.values()]
    parts += [_floors(blocks), *(f"absent: {line}" for line in absent)]
    return "\n".join(part for part in parts if part)


def _table(block: Sequence[Row]) -> str:
    first = block[0]
    pace = "" if first.rate_per_s is None else ", open loop"
    lines = [f"\n{first.scenario}, {first.connections} connection{'s' * (first.connections > 1)}{pace} (times in ms)"]
    own = next((row for row in block if row.system == "sameway"), None)
    cells = [_COLUMNS] + [_cells(row, own) for row in block]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    for line in cells:
        padded = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *padded]).rstrip())
    lines += [_aside(row) for row in block]
    return "\n".join(lines)


def _cells(row: Row, own: Row | None) -> tuple[str, ...]:
    return (
        row.system,
        f"{row.requests_per_s:,.0f}" if row.requests_per_s >= 100 else f"{row.requests_per_s:.1f}",
        *(
            _ms(value)
            for value in (row.p50_ms, row.p99_ms, row.p999_ms, row.ttft_p50_ms, row.gap_p99_ms, row.overhead_p50_ms)
        ),
        "" if row.cpu_ms_per_request is None else f"{row.cpu_ms_per_request:.3f}",
        "" if row.rss_mb is None else f"{row.rss_mb:.0f}",
        str(row.errors),
        _advantage(row, own),
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _advantage(row: Row, own: Row | None) -> str:
    """How many times Sameway's requests/s and CPU per request are better than this row's."""
    if own is None or row is own or not row.requests_per_s:
        return ""
    text = f"{own.requests_per_s / row.requests_per_s:.2g}x req/s"
    if row.cpu_ms_per_request and own.cpu_ms_per_request:
        text += f" {row.cpu_ms_per_request / own.cpu_ms_per_request:.2g}x CPU"
    return text


def _aside(row: Row) -> str:
    """Who was busy, and what a reader should know before trusting the line above."""
    said = [f"cores: load tool {row.client_cores:.2f}, upstream {row.upstream_cores:.2f}, others {row.other_cores:.2f}"]
    if row.cpu_ms_by_role:
        split = ", ".join(f"{role} {ms:.3f}" for role, ms in row.cpu_ms_by_role.items() if ms >= 0.0005)
        said += [f"system {row.system_cores:.2f} (CPU ms/req: {split})"]
        said += ["RSS " + ", ".join(f"{role} {mb:.0f}" for role, mb in row.rss_mb_by_role.items())]
    if row.upstream_share is not None and row.upstream_share < 0.995:
        said.append(f"{100 * (1 - row.upstream_share):.1f}% answered without the upstream")
    if row.cache:
        said.append(" ".join(f"{kind}={count}" for kind, count in row.cache.items()))
    if row.rate_per_s is not None:
        said.append(f"asked for {row.rate_per_s:,.0f}/s")
    if row.errors:
        said.append(f"errors {row.errors_by_kind}: {row.first_failure[:160]}")
    return f"  {row.system}: " + "; ".join(said)


def _floors(blocks: dict[tuple[str, int], list[Row]]) -> str:
    """Sameway over LiteLLM at 32 connections, beside the least that it should be.

    By requests/s as measured; and, for a machine that others use too, by what a core of the one worker can answer.
    """
    lines = []
    for scenario, floor in _FLOORS.items():
        by_system = {row.system: row for row in blocks.get((scenario, 32), [])}
        own, peer = by_system.get("sameway"), by_system.get("litellm")
        if own is None or peer is None or not peer.requests_per_s:
            continue
        times = own.requests_per_s / peer.requests_per_s
        own_ms, peer_ms = (row.cpu_ms_by_role.get("gateway", 0.0) for row in (own, peer))
        by_core = f" ({peer_ms / own_ms:.1f} times by the worker's CPU)" if own_ms else ""
        verdict = "reached" if times >= floor else "NOT reached"
        lines.append(f"{scenario}: {times:.1f} times LiteLLM's requests/s{by_core}; at least {floor:.0f}: {verdict}")
    return "\n".join(["\nOne worker, 32 connections:", *lines]) if lines else ""
