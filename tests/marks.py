"""Which tests `./run test quick` leaves out: those of a folder or file here carry its marker.

Knows no test. Invariant: every path exists.
"""

from __future__ import annotations

import functools
from pathlib import Path

FOLDER = Path(__file__).parent

MARKERS: dict[str, tuple[str, ...]] = {
    "e2e": ("e2e", "deploy"),
    "bench": ("bench", "engine/test_bench.py"),
    "gpu": ("engine/gpu",),
    "browser": ("admin/test_browser.py",),
    "slow": (  # processes, models, compilers, waits, many examples: files of over three seconds of CPU
        "accounts/test_accounts.py",
        "accounts/test_backup.py",
        "accounts/test_database.py",
        "accounts/test_holdings.py",
        "accounts/test_ledger.py",
        "accounts/test_ledger_files.py",
        "accounts/test_ledger_writer.py",
        "accounts/test_money_crash.py",
        "accounts/test_money_model.py",
        "accounts/test_months.py",
        "accounts/test_rollups.py",
        "accounts/test_unsettled.py",
        "admin/test_access.py",
        "admin/test_agents.py",
        "admin/test_api.py",
        "admin/test_doors.py",
        "admin/test_operations.py",
        "admin/test_pages.py",
        "admin/test_verifier.py",
        "alerts/test_watch.py",
        "backends/test_invoices.py",
        "backends/test_keys.py",
        "backends/test_local.py",
        "backends/test_managed.py",
        "backends/test_openai.py",
        "backends/test_slow_bodies.py",
        "cache/test_bound.py",
        "cache/test_cluster.py",
        "cache/test_embedder.py",
        "cache/test_engines.py",
        "cache/test_exact.py",
        "cache/test_follower.py",
        "cache/test_index.py",
        "cache/test_pieces.py",
        "cache/test_poison.py",
        "cache/test_prose.py",
        "cache/test_rule.py",
        "cache/test_semantic.py",
        "cache/test_worker.py",
        "dialects/test_answers.py",
        "engine/test_attention.py",
        "engine/test_calls.py",
        "engine/test_checkpoints.py",
        "engine/test_default_model.py",
        "engine/test_draft_model.py",
        "engine/test_engine.py",
        "engine/test_equality.py",
        "engine/test_grammar.py",
        "engine/test_native.py",
        "engine/test_prequantised.py",
        "engine/test_property.py",
        "engine/test_sampler.py",
        "engine/test_scaled.py",
        "engine/test_scheduler.py",
        "engine/test_speculation.py",
        "engine/test_text.py",
        "engine/test_worker.py",
        "journey/test_background.py",
        "journey/test_dialects.py",
        "journey/test_elsewhere.py",
        "journey/test_exits.py",
        "journey/test_failover.py",
        "journey/test_fallbacks.py",
        "journey/test_health.py",
        "journey/test_hedging.py",
        "journey/test_money.py",
        "journey/test_passed_responses.py",
        "journey/test_second_turn.py",
        "journey/test_silence.py",
        "journey/test_stored_responses.py",
        "journey/test_surfaces.py",
        "journey/test_verifier.py",
        "policies/test_routing.py",
        "processes",
        "telemetry/test_measured_error.py",
        "telemetry/test_metrics.py",
        "test_docs.py",
        "test_golden.py",
        "test_settings.py",
        "transport/test_contents.py",
        "transport/test_http_server.py",
        "transport/test_redis_link.py",
        "wire/test_chunks.py",
    ),
}


_MARKER_OF = {FOLDER / place: marker for marker, places in MARKERS.items() for place in places}


@functools.cache
def marker_of(path: Path) -> str:
    """The marker of a folder or file; empty where `quick` runs it."""
    return next((_MARKER_OF[place] for place in (path, *path.parents) if place in _MARKER_OF), "")
