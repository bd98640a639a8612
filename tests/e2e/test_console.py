"""The commands over the admin API, against a gateway that runs."""

from __future__ import annotations

import json
import signal
import threading
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli import main
from tests.e2e.gateway import ADMIN_KEY, API_KEY, WITHOUT_EMBEDDER, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWAY_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("SAMEWAY_API_KEY", API_KEY)
    monkeypatch.setenv("COLUMNS", "120")


class Console:
    """What commands print, and their exit status."""

    def __init__(self, gateway: Gateway, printed: pytest.CaptureFixture[str]) -> None:
        self._url = gateway.root
        self._printed = printed
        self.told = ""

    def run(self, *words: str, status: int = 0) -> str:
        """Run a command, check its status, and return what it printed; `told` is what it said beside."""
        self._printed.readouterr()
        assert main([*words, "--url", self._url]) == status, self._printed.readouterr().err
        out, self.told = self._printed.readouterr()
        return out

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))


@pytest.fixture
def console(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(gateway, capsys)


def _lines(path: Path, count: int, model: str = "mock") -> Path:
    name = uuid.uuid4().hex
    asked = [{"model": model, "messages": [{"role": "user", "content": f"{n} of {name}?"}]} for n in range(count)]
    path.write_text(
        "".join(json.dumps({"request": one, "answer": f"Answer {n}."}) + "\n" for n, one in enumerate(asked))
    )
    return path


def test_teams_keys_and_budgets_from_first_to_last(console: Console) -> None:
    """Made, listed, shown, changed and removed, each by the same words; values have the types of their fields."""
    name = f"team {uuid.uuid4().hex[:6]}"
    team = console.json("teams", "create", "--name", name, "--requests-per-min", "100")
    id = str(team["id"])
    assert (team["name"], team["requests_per_min"]) == (name, 100)
    assert name in console.run("teams")
    changed = console.json("teams", "update", id, "--requests-per-min", "null", "--is-semantic-enabled=false")
    assert (changed["requests_per_min"], changed["is_semantic_enabled"]) == (None, False)
    made = console.json("keys", "create", id, "--name", "123", "--models", "mock,dear")
    assert (made["key"]["name"], made["key"]["models"]) == ("123", ["mock", "dear"])
    assert console.json("keys", "list", id)["keys"][0]["id"] == made["key"]["id"]
    budget = console.json("budgets", "create", id, "--limit-microusd", "5000000", "--window", "day")
    shown = dict(line.split(maxsplit=1) for line in console.run("budgets", "list", id).splitlines())
    assert (shown["id"], shown["window"], shown["limit_usd"]) == (str(budget["id"]), "day", "5")
    console.run("budgets", "create", id, "--limit-microusd", "7000000", "--window", "month")
    head, *rows = console.run("budgets", "list", id).splitlines()[:3]
    assert head.split()[:3] == ["id", "team_id", "window"]
    assert [row.split()[2] for row in rows] == ["day", "month"]
    assert "limit_usd" in head
    assert console.json("budgets", "reset", str(budget["id"]))["spent"] == 0
    assert console.run("teams", "delete", id).strip() == ""
    assert "404" in console.run("teams", "show", id, status=1) + console.told


def test_what_was_spent_and_asked_is_a_table_for_people(console: Console, gateway: Gateway) -> None:
    """Money is in USD, times are dates, and the columns that do not fit are counted."""
    first, asked = [gateway.chat(f"spent {uuid.uuid4().hex}").headers["x-request-id"] for _ in range(2)]
    wait_for(lambda: console.json("requests", "--request-id", asked)["routes"] != [])
    wait_for(lambda: console.json("spend", "--by", "team")["sums"] != [])
    assert "cost_usd" in console.run("spend", "--by", "team")
    assert "baseline_usd" in console.run("savings")
    assert console.run("savings", "csv").startswith("day,team_id,team,line")
    gateway.chat(f"spent {uuid.uuid4().hex}", user="\x1b]0;title\x07\x9b31m")
    wait_for(lambda: "title" in console.run("spend", "--by", "user"))
    for told in (console.run("spend", "--by", "user"), console.run("spend", "--by", "user", "--json")):
        assert all(char.isprintable() or char == "\n" for char in told)
    assert f"request_id  {asked}" in console.run("requests", "--request-id", asked)
    lines = console.run("requests").strip().splitlines()
    head = next(line for line in lines if line.startswith("request_id"))
    assert {first, asked} <= {line.split()[0] for line in lines if line}
    assert "more columns" in lines[-1]
    assert max(len(line) for line in lines[lines.index(head) :]) <= 120


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("teams", "frob"), "expected one of create, delete, list, show, update"),
        (("teams", "show"), "teams show: expected teams show TEAM_ID"),
        (("deployments", "drain", "up"), "deployments drain up: expected deployments drain\n"),
        (("teams", "--frob", "1"), "unknown option --frob"),
        (("teams", "create", "--nam", "x"), "--name"),
        (("cache", "import"), "expected one file"),
        (("cache", "import", "/nowhere"), "/nowhere cannot be read"),
        (("cache", "import", "/"), "/ cannot be read"),
        (("cache", "warm", "/nowhere", "--fast"), "expected one file"),
        (("cache", "warm", __file__, "--per-second", "-1"), "expected numbers above 0"),
    ],
)
def test_a_command_that_is_none_says_what_there_is(console: Console, words: tuple[str, ...], says: str) -> None:
    """Exit status 2, and nothing happened."""
    console.run(*words, status=2)
    assert says in console.told


def test_each_refusal_has_its_status_and_words(
    console: Console, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gateway's own words, a missing key, and a gateway that is not there."""
    console.run("teams", "create", status=1)
    assert "400: Missing required field: name" in console.told
    assert main(["teams", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    monkeypatch.delenv("SAMEWAY_ADMIN_KEY")
    monkeypatch.setenv("SAMEWAY_DATA_DIR", "/nowhere")
    console.run("teams", status=2)
    assert "set SAMEWAY_ADMIN_KEY" in console.told
    monkeypatch.setenv("SAMEWAY_DATA_DIR", str(gateway.data_dir))
    (gateway.data_dir / "admin.key").write_text(ADMIN_KEY)
    assert "default" in console.run("teams")
    (gateway.data_dir / "admin.key").unlink()


def test_help_lists_what_a_noun_can_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation with its ids and options, without a gateway; all else asks the one at SAMEWAY_PORT."""
    monkeypatch.setenv("SAMEWAY_PORT", "9")
    assert main(["teams"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert main(["cache", "--help"]) == main(["keys", "--help"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "sameway cache import FILE",
        "sameway cache warm FILE",
        "sameway cache purge [--dry-run] [--id]",
        "sameway keys update KEY_ID [--models]",
    ):
        assert line in shown


def test_a_file_of_answers_is_imported_and_exported(console: Console, gateway: Gateway, tmp_path: Path) -> None:
    """Curated answers are served, streamed or whole, and marked in header and log; the same file again changes nothing."""
    file = _lines(tmp_path / "answers.jsonl", 3)
    file.write_text(file.read_text() + '{"answer": "to nothing"}\n')
    assert console.run("cache", "import", str(file), "--team-id", "1", status=1) == "3 stored, 0 unchanged, 1 refused\n"
    assert "line 4: expected `entry`" in console.told
    assert console.run("cache", "import", str(file), "--team-id", "1", status=1) == "0 stored, 3 unchanged, 1 refused\n"
    asked = json.loads(file.read_text().splitlines()[1])["request"]
    content = asked["messages"][0]["content"]
    whole, streamed = gateway.chat(content), gateway.chat(content, stream=True)
    assert whole.json()["choices"][0]["message"]["content"] == "Answer 1."
    assert '"content":"Answer' in streamed.text.replace(" ", "")
    assert {reply.headers["x-sameway-kept"] for reply in (whole, streamed)} == {"curated"}
    wait_for(
        lambda: (
            [r["kept"] for r in gateway.records() if r["request_id"] == whole.headers["x-request-id"]] == ["curated"]
        )
    )
    fresh = gateway.chat(content, headers={"cache-control": "no-cache"})
    assert fresh.headers["x-sameway-cache"] == "bypass"
    assert gateway.chat(content).json()["choices"][0]["message"]["content"] == "Answer 1."


def test_a_file_of_requests_warms_the_cache_within_its_cost(
    console: Console, gateway: Gateway, upstream: Upstream, tmp_path: Path
) -> None:
    """Each request once, until another one might cost more than is allowed; again, and all are hits."""
    file = _lines(tmp_path / "requests.jsonl", 5)
    bounds = ("--per-second", "100", "--concurrency", "2")
    first = console.run("cache", "warm", str(file), "--cost-max-usd", "0.000001", *bounds, status=1)
    assert first.startswith(("5 left out, as they might cost more", "4 left out")), first
    assert console.run("cache", "warm", str(file), *bounds).endswith(" USD\n")
    assert console.run("cache", "warm", str(file), *bounds) == "5 exact; 0.000000 USD\n"
    assert upstream.seen().generations == 5


@pytest.mark.long
def test_an_import_survives_kills_and_doubles_nothing(
    upstream: Upstream, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A worker and the Redis that holds the answers are killed in the middle: every line is there, once."""
    models = {"mock": {"deployments": [deployment(upstream.url, "plain")]}}
    count = 100_000
    file = _lines(tmp_path / "answers.jsonl", count)
    with run_gateway(tmp_path, {**WITHOUT_EMBEDDER, "models": models}) as gateway:
        gateway.wait_ready()
        console = Console(gateway, capsys)

        def kill() -> None:
            for mark, share in ((" worker --address", 0.2), ("redis-server", 0.4)):
                wait_for(lambda share=share: _entries(gateway) > share * count, within_s=120)  # type: ignore[misc]
                for one in gateway.children(mark):
                    one.send_signal(signal.SIGKILL)

        killing = threading.Thread(target=kill)
        killing.start()
        console.run("cache", "import", str(file), "--team-id", "1")
        killing.join()
        assert console.told.count("goes on at line") > 1
        assert console.json("cache")["entries"] == count
        assert (
            console.run("cache", "import", str(file), "--team-id", "1") == f"0 stored, {count:,} unchanged, 0 refused\n"
        )


def _entries(gateway: Gateway) -> int:
    try:
        return int(gateway.admin("GET", "/cache")["entries"])
    except httpx.HTTPError:
        return 0
