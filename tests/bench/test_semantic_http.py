"""The bench of the semantic cache over HTTP: a real gateway in front of an upstream that answers by label."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench import semantic
from bench.labelled import load
from bench.semantic_http import stream_over_http

Row = dict[str, object]

_RIVER = "Which river flows through Vienna?"
_SINGULAR: list[Row] = [
    {"text": _RIVER, "label": "danube"},
    {"text": _RIVER, "label": "danube"},
    {"text": _RIVER, "label": "thames", "history": ["I mean the town in Ontario.", "All right."]},
    {"text": "Who wrote it?", "label": "one author"},
    {"text": "Who wrote it?", "label": "another"},
]
_PARAPHRASES: list[Row] = [
    {"text": wording.format(country), "label": country}
    for wording in ("What is the capital of {}?", "Tell me the capital of {}.")
    for country in ("France", "Japan", "Peru")
]


def made(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir()
    (folder / "stream.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return folder


def test_a_row_has_what_came_through_the_gateway(tmp_path: Path) -> None:
    """Equal texts are exact hits, counted apart, and another dialogue's is none; the fields are the usual."""
    folder, out = made(tmp_path / "singular", _SINGULAR), tmp_path / "rows.json"
    assert semantic.main([str(folder), "--http", "--error-max", "0.02", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["set"], row["policy"], row["error_max"], row["verifier"]) == ("singular", "http", 0.02, "")
    assert (row["requests"], row["exact"], row["hits"], row["wrong"]) == (3, 2, 0, 0)
    assert (row["possible"], row["decision_ms_p50"], row["failed"]) == (0, None, 0)


def test_hits_by_meaning_are_counted(tmp_path: Path) -> None:
    """Without audits, which are by chance, the second wording of each question is answered from the cache, and rightly."""
    (found,) = load(made(tmp_path / "paraphrases", _PARAPHRASES))
    outcomes = list(stream_over_http(found.requests, is_audited=False))
    assert [one.served is not None for one in outcomes] == [False] * 3 + [True] * 3
    assert not any(one.is_wrong for one in outcomes)


def test_what_a_gateway_decides_itself_can_not_be_asked_for(tmp_path: Path) -> None:
    """A policy or a noise of the judge beside --http is refused, not ignored."""
    folder = str(made(tmp_path / "singular", _SINGULAR))
    for flags in (["--policies", "cold"], ["--judge-noise", "0.1"]):
        with pytest.raises(SystemExit) as stop:
            semantic.main([folder, "--http", *flags])
        assert stop.value.code == 2
