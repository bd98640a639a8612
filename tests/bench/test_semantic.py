"""The bench of the semantic cache and the script that learns the prior, on a small set with a stand-in for the encoder."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from bench import prior, semantic
from bench.labelled import load
from cache.decision.model import Prior
from tests.cache.fakes import FakeEmbedder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty requests: twenty answers, each asked for in two orders of the same words; four of them inside dialogues."""
    monkeypatch.chdir(tmp_path)
    for module in (semantic, prior):
        monkeypatch.setattr(module, "open_embedder", lambda precision="float32": FakeEmbedder())
    rows = [
        {"text": f"{a} {b}", "label": number, "history": [f"about {number}"] if number < 2 else []}
        for number in range(20)
        for a, b in ((f"alpha{number}", "beta"), ("beta", f"alpha{number}"))
    ]
    made = tmp_path / "small"
    made.mkdir()
    (made / "stream.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return made


def test_a_history_is_part_of_the_dialogue(folder: Path) -> None:
    """Equal last messages of other dialogues have another context; every request has an id of its own."""
    (one,) = load(folder)
    requests = one.requests
    assert len({request.exact for request in requests}) == len(requests) == 40
    assert len({(request.query.compat, request.query.context) for request in requests}) == 3


def test_each_part_is_a_set_of_its_own(folder: Path) -> None:
    """Lines with a part make one set a part; a system prompt comes before the history, and another one is another context."""
    rows = [
        {"part": "first", "system": "Be brief.", "history": ["hello", "hi"], "text": "why", "label": 1},
        {"part": "second", "system": None, "history": [], "text": "why", "label": 1},
        {"part": "first", "system": "Be long.", "history": ["hello", "hi"], "text": "why", "label": 1},
    ]
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / "stream.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    first, second = load(folder)
    assert (first.name, second.name) == ("small/first", "small/second")
    assert [message["role"] for message in first.requests[0].messages] == ["system", "user", "assistant", "user"]
    assert [message["role"] for message in second.requests[0].messages] == ["user"]
    queries = [request.query for request in (*first.requests, *second.requests)]
    assert len({(query.compat, query.context) for query in queries}) == 3
    assert len({request.exact for request in (*first.requests, *second.requests)}) == 3


def test_every_policy_is_counted(folder: Path, tmp_path: Path) -> None:
    """The rows say what was asked; without noise nothing here can be wrong, and a fixed cosine finds what there is."""
    out = tmp_path / "rows.json"
    assert semantic.main([str(folder), "--seeds", "2", "--judge-noise", "0", "0.1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert {row["policy"] for row in rows} == {
        "verified", "cold", "guards", "cosine 0.8", "cosine 0.9", "cosine 0.95", "vcache",
    }  # fmt: skip
    assert all((row["requests"], row["possible"], row["wrong"]) == (40, 20, 0) for row in rows)
    assert {row["hits"] for row in rows if row["policy"].startswith("cosine")} == {20}
    assert {row["judge_noise"] for row in rows if row["policy"] == "verified"} == {0.0, 0.1}


def test_a_cold_namespace_is_held_to_what_was_learned_of_other_sets(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A set of which all cold hits are wrong fails by the share of a set that has none, and not that set by its own."""
    (tmp_path / "noise").mkdir()
    rows = [{"text": f"gamma{number // 2} delta", "label": number} for number in range(400)]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "noise" / "stream.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    out = tmp_path / "rows.json"
    assert semantic.main(["--cold", str(tmp_path), "--json", str(out)]) == 1
    rows = json.loads(out.read_text())
    assert {(row["set"], row["error_max"]) for row in rows} == {
        ("noise", 0.01), ("noise", 0.005), ("small", 0.01), ("small", 0.005),
    }  # fmt: skip
    assert {row["set"] for row in rows if row["failed"]} == {"noise"}
    assert {row["policy"] for row in rows if row["set"] == "small"} == {"cold 1.000"}
    assert "noise                without a share: 200 hits, 100.0% of them wrong" in capsys.readouterr().out


def test_answers_are_drawn_and_judged_as_the_product_does(folder: Path, tmp_path: Path) -> None:
    """Prompts in dialogues and those without answers are left out; a varied answer is hardly ever equal, the label always."""
    answers = tmp_path / "answers.jsonl"
    texts = {str(number): [f"It is {number}, say {one}." for one in ("some", "others")] for number in range(10)}
    answers.write_text("\n".join(json.dumps({"label": label, "answers": own}) for label, own in texts.items()))
    out = tmp_path / "rows.json"
    for flags in ([], ["--vary"], ["--label-answers"], ["--judge-model", "0.1"]):
        made = [str(folder), "--answers", str(answers), "--policies", "verified", "--json", str(out), *flags]
        assert semantic.main(made) == 0
        (row,) = json.loads(out.read_text())
        assert (row["requests"], row["possible"], row["wrong"], row["failed"]) == (16, 8, 0, 0)
        assert [half[0] for half in row["halves"]] == [8, 8]
    for flags in (["--vary"], ["--answers", str(answers), "--judge-noise", "0.1"]):
        with pytest.raises(SystemExit):
            semantic.main([str(folder), *flags])


def test_annotated_pairs_are_judged(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four pairs the judges find an equal one, call two others different, wrongly one; annotations that differ leave one out."""
    rows = [
        {"id": "s02", "b1": "It is Paris.", "a1_b1": "same", "a1_b1_second": "same"},
        {"id": "d04", "b1": "12", "a1_b1": "different", "a1_b1_second": "different"},
        {"id": "h06", "b1": "13", "a1_b1": "same", "a1_b1_second": "same"},
        {"id": "h08", "b1": "14", "a1_b1": "same", "a1_b1_second": "different"},
    ]
    common = {"a": "what", "b": "which", "a2": "it is paris", "a1_a2": "same", "a1_a2_second": "same"}
    answers = tmp_path / "pairs.jsonl"
    first = {"s02": "it is paris!", "d04": "7", "h06": "8", "h08": "9"}
    answers.write_text("\n".join(json.dumps({**common, "a1": first[str(row["id"])], **row}) for row in rows))
    assert semantic.main(["--judge", str(answers)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a1,", "b1,", "even", "3", "2", "3", "0", "1"] in lines
    assert ["a1,", "b1,", "odd", "0", "0", "0", "0", "0"] in lines
    for arguments in ([], [str(folder), "--judge", str(answers)]):
        with pytest.raises(SystemExit):
            semantic.main(arguments)


def test_a_prior_is_learned_and_written_as_a_module(folder: Path, tmp_path: Path) -> None:
    """What it writes is python that holds a prior."""
    out = tmp_path / "made.py"
    other = shutil.copytree(folder, tmp_path / "other")
    assert prior.main([str(folder), str(other), "--write", str(out), "--terms", "a set of our own"]) == 0
    scope: dict[str, object] = {}
    exec(compile(out.read_text(), "made", "exec"), scope)
    assert isinstance(scope["PRIOR"], Prior)
    assert "a set of our own" in str(scope["__doc__"])
