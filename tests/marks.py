"""Which tests `./run test quick` leaves out: those of a folder or file here carry its marker.

Knows no test. Invariant: every path exists.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent

MARKERS: dict[str, tuple[str, ...]] = {
    "e2e": ("e2e", "deploy"),
    "bench": ("bench", "engine/test_bench.py"),
    "gpu": ("engine/gpu",),
    "browser": ("admin/test_browser.py",),
    "slow": (  # processes, models, compilers, or many examples
        "accounts/test_database.py",
        "accounts/test_money_crash.py",
        "accounts/test_money_model.py",
        "accounts/test_unsettled.py",
        "backends/test_managed.py",
        "cache/test_cluster.py",
        "cache/test_embedder.py",
        "cache/test_index.py",
        "cache/test_rule.py",
        "cache/test_worker.py",
        "engine/test_attention.py",
        "engine/test_default_model.py",
        "engine/test_draft_model.py",
        "engine/test_engine.py",
        "engine/test_equality.py",
        "engine/test_checkpoints.py",
        "engine/test_native.py",
        "engine/test_prequantised.py",
        "engine/test_property.py",
        "engine/test_sampler.py",
        "engine/test_scaled.py",
        "engine/test_speculation.py",
        "engine/test_text.py",
        "engine/test_worker.py",
        "processes",
    ),
}


def marker_of(path: Path) -> str:
    """The marker of a folder or file; empty where `quick` runs it."""
    for marker, places in MARKERS.items():
        if any(path == FOLDER / place or FOLDER / place in path.parents for place in places):
            return marker
    return ""
