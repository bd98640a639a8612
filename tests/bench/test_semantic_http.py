"""The bench of the semantic cache over HTTP: a real gateway in front of an upstream that answers by label."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench import semantic
from bench.labelled import load
from bench.meaning.verifier import PlayedVerifier
from bench.semantic_http import Answers, stream_over_http

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
    """The second wording of each question is answered from the cache, and rightly."""
    (found,) = load(made(tmp_path / "paraphrases", _PARAPHRASES))
    outcomes = list(stream_over_http(found.requests))
    assert [one.served is not None for one in outcomes] == [False] * 3 + [True] * 3
    assert not any(one.is_wrong for one in outcomes)


def test_a_played_verifier_answers_a_gateway(tmp_path: Path) -> None:
    """What no rule is sure of is served on its word, which is right here; its questions are counted with the request."""
    rows: list[Row] = [
        {"text": wording.format(thing), "label": thing}
        for wording in ("How do I order a new {}?", "my {} is gone, what must I do to get another")
        for thing in ("fishing licence", "library card")
    ]
    (found,) = load(made(tmp_path / "wishes", rows))
    outcomes = list(stream_over_http(found.requests, None, PlayedVerifier(0.0, 0)))
    assert [one.served is not None for one in outcomes] == [False, False, True, True]
    assert [one.is_verified for one in outcomes] == [False, False, True, True]
    assert all(one.questions > 0 for one in outcomes[2:])
    assert not any(one.is_wrong for one in outcomes)


def test_the_upstream_rules_by_the_labels_in_each_form_of_a_question(tmp_path: Path) -> None:
    """A choice of several answers, a confirmation of one and a comparison of two, of which it sees the beginning."""
    first, second, other = load(made(tmp_path / "paraphrases", [*_PARAPHRASES[:4:3], _PARAPHRASES[1]]))[0].requests
    with Answers(PlayedVerifier(0.0, 0)) as upstream:
        upstream.expect(first, "It is Paris.")
        upstream.expect(other, "It is Tokyo.")
        upstream.expect(second, "It is Paris, of course.")
        stored = [
            {"request": other.query.text, "answer": "It is Tokyo."},
            {"request": first.query.text, "answer": "It is P"},
        ]
        assert upstream.rule({"request": second.query.text, "candidates": stored}) == "2"
        assert upstream.rule({"request": second.query.text, "candidates": stored[:1]}) == "0"
        assert upstream.questions == 2
        confirmed = {"old_request": first.query.text, "answer": "It is Paris.", "new_request": second.query.text}
        assert upstream.rule(confirmed) == "SAME"
        compared = {"prompt": first.query.text, "answer_a": "It is Paris.", "answer_b": "It is Tokyo."}
        assert upstream.rule(compared) == "DIFFERENT"


def test_what_a_gateway_decides_itself_can_not_be_asked_for(tmp_path: Path) -> None:
    """A policy or a noise of the judge beside --http is refused, not ignored."""
    folder = str(made(tmp_path / "singular", _SINGULAR))
    for flags in (["--policies", "cold"], ["--judge-noise", "0.1"]):
        with pytest.raises(SystemExit) as stop:
            semantic.main([folder, "--http", *flags])
        assert stop.value.code == 2
