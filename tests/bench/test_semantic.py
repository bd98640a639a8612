"""The bench of the semantic cache and the script that learns the prior, on a small set with a stand-in for the encoder."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import prior, semantic
from bench.labelled import load
from bench.meaning import measure
from bench.meaning.gate import Gate
from bench.meaning.rows import is_refuted
from bench.meaning.vectors import Recall
from bench.meaning.verifier import PlayedVerifier
from cache import Query, Trial
from cache.decision.features import Neighbour
from cache.decision.model import Prior
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState
from cache.query import Asked
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


def rows_of(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """The rows of a run."""
    out = folder.parent / "rows.json"
    assert semantic.main([str(folder), *flags, "--json", str(out)]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def test_every_policy_is_counted(folder: Path) -> None:
    """The rows say what was asked; without noise nothing here can be wrong, and a fixed cosine finds what there is."""
    policies = ["verified", "cold", "cosine 0.8", "cosine 0.9", "cosine 0.95", "vcache"]
    rows = rows_of(folder, "--seeds", "2", "--judge-noise", "0", "0.1", "--policies", *policies)
    assert {row["policy"] for row in rows} == set(policies)
    assert all((row["requests"], row["possible"], row["wrong"]) == (40, 20, 0) for row in rows)
    assert {row["hits"] for row in rows if row["policy"].startswith("cosine")} == {20}
    assert {row["judge_noise"] for row in rows if row["policy"] == "verified"} == {0.0, 0.1}


class Asking(measure.Cosine):
    """A rule that is certain of nothing, and has the nearest of each group asked about."""

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        decision, counters = super().decide(query, neighbours, state)
        trial = Trial((neighbours[0].exact,), b"", 0.9, 1.0, b"")
        doubtful = tuple((at, 0.9, b"") for at in range(min(2, len(neighbours)))) if query.may_ask else ()
        return Decision(None, decision.reasons, trial, doubtful), counters


@pytest.fixture
def unsure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same requests for a rule that leaves all to the verifier."""
    monkeypatch.setattr(measure, "rules", lambda error_max: {"verified": lambda: Asking(0.0)})
    return folder


def test_a_verifier_is_asked_before_an_answer_is_served(unsure: Path) -> None:
    """Every possible hit is served on the word of one that does not err, and each question is counted, in money and time."""
    (row,) = rows_of(unsure, "--verifier", "0")
    assert (row["hits"], row["verified"], row["wrong"]) == (20, 20, 0)
    assert row["questions"] > row["asked"] > 20
    assert row["money"] == row["questions"] / 16 / 40
    assert 0.0 < row["added_s"] <= 0.8
    assert sum(row["tenths"]) == row["hits"] > 10


def test_without_its_word_everything_is_generated(unsure: Path) -> None:
    """A slow verifier costs time and brings no hit; an absent one costs nothing."""
    (slow,) = rows_of(unsure, "--verifier", "0", "--pace", "slow")
    (absent,) = rows_of(unsure, "--verifier", "0", "--pace", "absent")
    assert (slow["hits"], absent["hits"]) == (0, 0)
    assert slow["questions"] > 0
    assert slow["added_s"] > 1.0
    assert (absent["questions"], absent["added_s"], absent["money"]) == (0, 0.0, 0.0)


def test_errors_by_topic_come_again() -> None:
    """One draw decides for all questions about a label; independent errors of the same share come on every label."""
    labels = [f"label {at % 10}" for at in range(200)]

    def errors(*, by_topic: bool) -> list[bool]:
        verifier = PlayedVerifier(0.5, 3, by_topic=by_topic)
        return [verifier.choose(label, [label]) is None for label in labels]

    assert len({tuple(errors(by_topic=True)[at::10]) for at in range(10)}) == 2
    assert all(len(set(errors(by_topic=False)[at::10])) == 2 for at in range(10))


def test_a_confirmation_errs_half_of_the_time_in_the_same_way() -> None:
    """Of the wrong answers that it chose it confirms a half and, anew, its share of the rest."""
    verifier = PlayedVerifier(0.2, 0)
    confirmed = [verifier.confirm("one", "two") for _ in range(4_000) if verifier.choose("one", ["two"]) is not None]
    assert 0.5 < sum(confirmed) / len(confirmed) < 0.7


def candidate(p: float) -> Asked:
    return Asked(bytes(16), b"g", 0.9, f"text {p}", p)


def test_a_yes_without_room_for_its_risk_is_confirmed_and_no_pair_is_asked_about_twice() -> None:
    """A yes on what was unlikely costs a second question, and what the account can't bear is not served."""
    gate, query = Gate(PlayedVerifier(0.0, 0), 0.01, 0), Query(bytes(16), bytes(16), "wish")
    sure, doubtful = candidate(0.99), candidate(0.1)
    gate.pay(query)
    first = gate.ask(query, "label", [sure], ["label"])
    assert (first.chosen, first.rights, first.questions, first.seconds) == (0, (True,), 1, 0.4)
    assert 0.0 < first.risk < 0.001
    gate.charge(query, 0.1)
    second = gate.ask(query, "label", [doubtful], ["label"])
    assert (second.chosen, second.questions, second.seconds) == (0, 2, 0.8)
    gate.charge(query, 0.45)
    again = gate.ask(query, "label", [doubtful], ["label"])
    assert (again.chosen, again.questions) == (None, 0)
    for _ in range(100):
        gate.pay(query)
    assert gate.ask(query, "label", [doubtful], ["label"]).chosen == 0


def test_a_question_that_does_not_pay_is_not_asked() -> None:
    """Where hardly an answer is right, the question costs more than it saves."""
    gate, query = Gate(PlayedVerifier(0.0, 0), 0.01, 0), Query(bytes(16), bytes(16), "wish")
    assert gate.ask(query, "label", [candidate(0.001)], ["label"]).questions == 0


def test_checks_are_drawn_of_hits(folder: Path) -> None:
    """None of the first three, of the next hundreds three in ten, whatever they are."""
    gate, query = Gate(None, 0.01, 0), Query(bytes(16), bytes(16), "wish")
    drawn = [gate.draw_check(query) for _ in range(300)]
    assert drawn[:3] == [None] * 3
    assert 60 < sum(one is not None for one in drawn) < 120
    assert {one for one in drawn if one is not None} == {0.3}


def test_a_half_fails_where_the_bound_is_refuted() -> None:
    """Of 750 requests 14 wrong ones may be chance at 1%, 15 may not."""
    assert not is_refuted(750, 14, 0.01)
    assert is_refuted(750, 15, 0.01)
    assert not is_refuted(0, 0, 0.01)


def test_vectors_are_kept(tmp_path: Path) -> None:
    """What one run encoded the next one reads, to the bit, and encodes only what is new."""
    first = Recall(FakeEmbedder(), ["some/part"], tmp_path)
    before = first.encode(["alpha", "beta gamma"])
    first.save()
    embedder = FakeEmbedder()
    again = Recall(embedder, ["some/other"], tmp_path).encode(["alpha", "beta gamma"])
    assert (again.vectors == before.vectors).all()
    assert again.tokens.tolist() == before.tokens.tolist()
    assert embedder.encoded == []


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
