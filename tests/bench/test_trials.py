"""The trials of the semantic bench that are no stream, with a stand-in for the encoder: equal words are equal vectors."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench import semantic
from bench.labelled import joined, load
from bench.meaning import measure
from bench.meaning.additions import Addition, load_additions, longer_text
from bench.meaning.moving import kind_of, of_notes
from bench.meaning.rows import kind
from cache import MissReason, Trial
from cache.decision.rule import Decision, NamespaceCounters
from tests.cache.fakes import FakeEmbedder

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All benches here read words alone; every rule serves what has the same words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(semantic, "open_embedder", lambda precision="float32": FakeEmbedder())
    monkeypatch.setattr(measure, "rules", lambda error_max: {"verified": lambda: measure.Cosine(0.99)})


def made(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir()
    (folder / "stream.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return folder


def rows_of(tmp_path: Path, *flags: object) -> list[Row]:
    """The rows of a run."""
    out = tmp_path / "rows.json"
    assert semantic.main([*map(str, flags), "--json", str(out)]) == 0
    rows: list[Row] = json.loads(out.read_text())
    return rows


def test_a_stream_by_zipf_counts_exact_repeats_apart(tmp_path: Path) -> None:
    """Repeats of what was generated are exact hits; what is left is counted by meaning."""
    folder = made(
        tmp_path / "small", [{"text": f"{a} word{n}", "label": n, "part": "one"} for n in range(10) for a in ("x", "X")]
    )
    (row,) = rows_of(tmp_path, folder, "--zipf", 200)
    assert row["requests"] + row["exact"] == 200
    assert row["exact"] > 50
    assert (row["hits"], row["wrong"]) == (row["possible"], 0)
    (found,) = load(folder)
    counts = Counter(request.label for request in found.drawn(0, 1_000)).most_common()
    assert counts[0][1] > 3 * counts[-1][1]


def test_parts_are_chosen_and_joined(tmp_path: Path) -> None:
    """A stream of two of three parts has the requests of both and says so."""
    folder = made(tmp_path / "small", [{"text": f"word{n}", "label": n, "part": f"p{n % 3}"} for n in range(9)])
    rows = rows_of(tmp_path, folder, "--parts", "p0", "p2", "--join")
    assert [(row["set"], row["requests"]) for row in rows] == [("small/p0+p2", 6)]


@pytest.mark.parametrize(
    ("note", "label", "other", "near", "expected"),
    [
        ("same fact in another version", "doc/d01v2/q1", "doc/d01/q1", "", "same fact, other version"),
        ("fact changed in another version", "doc/d01v2/q1", "doc/d01/q1", "x", "other version"),
        ("depends on the plan", "s2/fee/a", "s2/fee/b", "x", "variant"),
        ("", "dialogue/p01a", "dialogue/p01b", "x", "other dialogue of the pair"),
        ("moves", "moving/m1", "moving/m2", "x", "moves"),
        ("", "plain/one", "plain/two", "x", "near"),
        ("", "plain/one", "plain/two", "y", "other"),
    ],
)
def test_a_wrong_hit_has_a_kind(tmp_path: Path, note: str, label: str, other: str, near: str, expected: str) -> None:
    """The labels and the note say in what the served request differs."""
    rows = [
        {"id": "r", "text": "a", "label": label, "note": note, "must_miss_with": near},
        {"id": "x", "text": "b", "label": other},
    ]
    (found,) = load(made(tmp_path / "small", rows))
    assert kind(*found.requests) == expected


def test_pairs_are_sent_alone_cold_and_beside_verdicts(tmp_path: Path) -> None:
    """Each pair is counted by what it is; what was served of one is not there for the next."""
    pairs = [
        {"id": "1", "part": "english", "kind": "names", "language": "en", "a": "a b", "b": "b a", "same": True},
        {"id": "2", "part": "english", "kind": "names", "language": "en", "a": "a b", "b": "b a", "same": False},
        {"id": "3", "part": "languages", "kind": "order", "language": "de", "a": "c", "b": "d", "same": False},
        {"id": "4", "part": "long", "kind": "order", "language": "en", "a": "e", "b": "e", "same": False},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in pairs))
    beside = made(tmp_path / "other", [{"text": f"word{n}", "label": n} for n in range(9)])
    rows = rows_of(tmp_path, "--pairs", file, "--beside", beside)
    assert [(row["group"], row["is_cold"], row["count"], row["served"]) for row in rows] == [
        ("different", True, 2, 1), ("same", True, 1, 1), ("different", False, 2, 1), ("same", False, 1, 1),
    ]  # fmt: skip


class Doubtful(measure.Cosine):
    """Leaves what it would serve to a verifier."""

    def decide(self, *asked: Any) -> tuple[Decision, NamespaceCounters]:
        decision, counters = super().decide(*asked)
        if decision.served is None:
            return decision, counters
        trial = Trial(ranked=(asked[1][0].exact,), features=b"", p=0.3, chance=1.0, rule=b"")
        return Decision(None, (MissReason.UNSURE,) * len(asked[1]), trial, ((0, 0.3, b""),)), counters


def test_a_pair_is_put_to_the_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of a trial pays into its namespace's account like any other: else no question would be asked."""
    monkeypatch.setattr(measure, "rules", lambda error_max: {"verified": lambda: Doubtful(0.99)})
    file = tmp_path / "pairs.jsonl"
    pair = {"id": "1", "part": "english", "kind": "names", "language": "en", "a": "a b", "b": "b a", "same": True}
    file.write_text(json.dumps(pair))
    beside = made(tmp_path / "other", [{"text": f"word{n}", "label": n} for n in range(3)])
    rows = rows_of(tmp_path, "--pairs", file, "--beside", beside, "--verifier", 0)
    assert [row["verified"] for row in rows if row["group"] == "same"] == [1, 1]


def test_a_shift_of_topic_shows_both_topics_with_and_without(tmp_path: Path) -> None:
    """Four streams; equal labels of two sets are two answers."""
    first = made(tmp_path / "first", [{"text": f"{a} one{n}", "label": n} for n in range(8) for a in ("x", "X")])
    second = made(tmp_path / "second", [{"text": f"{a} two{n}", "label": n} for n in range(4) for a in ("x", "X")])
    rows = rows_of(tmp_path, "--topic-shift", first, second, "--requests", 8)
    assert [(row["set"], row["policy"], row["requests"]) for row in rows] == [
        ("second", "alone", 8), ("second", "after other", 8), ("first", "later half", 8), ("first", "later, other", 8),
    ]  # fmt: skip
    assert all(row["hits"] > 0 and row["wrong"] == 0 for row in rows)


def test_additions_are_put_round_questions_both_ways(tmp_path: Path) -> None:
    """What only repeats words of the question has its words here, and is served; the file has what the bench needs."""
    folder = made(tmp_path / "small", [{"text": f"how do i block my card{n}", "label": n} for n in range(9)])
    rows = {(row["group"], row["is_cold"]): row for row in rows_of(tmp_path, folder, "--additions", "--verdicts", 3)}
    assert len(rows) == 8
    additions = load_additions()
    repeated = [one for one in additions if one.kind == "repetition" and set(one.text.split()) == {"{}", "{words}"}]
    assert rows["additions", True]["served"] >= 3 * len(repeated) > 0
    harmful = [one for one in additions if one.kind != "courtesy"]
    assert len(harmful) >= 90
    assert rows["additions", True]["count"] == 3 * len(harmful)
    assert {one.language for one in harmful} == {"en", "de", "es", "fr"}
    assert longer_text(Addition("k", "en", "Not {words}: {}"), "How do I block my card?") == (
        "Not block my card: How do I block my card?"
    )


def test_moving_questions_are_asked_again_when_they_have_aged(tmp_path: Path) -> None:
    """The rule of this test serves all, but for the answer that a time word lets live for a minute."""
    texts = {"Is it open today?": "moves", "Is it open?": "moves", "When does it open?": "stays", "a b": "", "b a": ""}
    folder = made(tmp_path / "small", [{"text": t, "label": t, "note": note} for t, note in texts.items()])
    rows = rows_of(tmp_path, folder, "--moving")
    assert len(rows) == 2 * 3 * 3
    unserved = {tuple(row.values())[1] for row in rows if not row["served"]}
    assert unserved == {f"moves, with a time word, {age}" for age in ("an hour", "a day")}
    moving = of_notes(joined(load(folder)).requests)
    assert [kind_of(one) for one in moving] == ["moves, with a time word", "moves, without", "stays"]


def test_flags_that_make_no_sense_together_are_refused(tmp_path: Path) -> None:
    """Nothing is ignored."""
    for flags in (
        ["--pairs", "p"],
        ["f", "--verdicts", "3"],
        ["f", "--zipf", "3", "--requests", "3"],
        ["f", "--judge", "p"],
    ):
        with pytest.raises(SystemExit) as stop:
            semantic.main(flags)
        assert stop.value.code == 2
