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
    """An equal text is a hit, wrong where its label is another one, and another dialogue's is none; the fields are the usual."""
    folder, out = made(tmp_path / "singular", _SINGULAR), tmp_path / "rows.json"
    assert semantic.main([str(folder), "--http", "--error-max", "0.02", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row == {
        "set": "singular", "policy": "http", "error_max": 0.02, "seed": 0, "judge_noise": 0.0,
        "requests": 5, "hits": 2, "wrong": 1, "possible": 1, "decision_ms_p50": None,
        "halves": [[3, 1, 1], [2, 1, 0]], "failed": 0, "questions": 0,
    }  # fmt: skip


def test_hits_by_meaning_are_counted(tmp_path: Path) -> None:
    """Without checks, which are by chance, the second wording of each question is answered from the cache, and rightly."""
    (found,) = load(made(tmp_path / "paraphrases", _PARAPHRASES))
    assert list(stream_over_http(found.requests, check_share=0)) == [(False, False)] * 3 + [(True, False)] * 3


def test_what_a_gateway_decides_itself_can_not_be_asked_for(tmp_path: Path) -> None:
    """A policy or a noise of the judge beside --http is refused, not ignored."""
    folder = str(made(tmp_path / "singular", _SINGULAR))
    for flags in (["--policies", "cold"], ["--judge-noise", "0.1"]):
        with pytest.raises(SystemExit) as stop:
            semantic.main([folder, "--http", *flags])
        assert stop.value.code == 2
