"""The semantic cache learns: from answers compared, from checks of what was served, and from what people say of it."""

from __future__ import annotations

import functools
import itertools
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream

NO_STORE = {"no-store": True}
ASKED, PARAPHRASE = "What is the capital of France?", "Tell me the capital of France."
_OPENINGS = ("please", "hey,", "could you", "I want to", "can you", "now")
_INTENTS = {
    "1": (("play", "start", "put on"), ("some jazz music", "a jazz song", "the jazz radio")),
    "2": (("check", "show", "read out"), ("the weather forecast", "the rain forecast", "the forecast of weather")),
    "3": (("transfer", "send", "move"), ("money to savings", "cash to the savings account", "funds to my savings")),
    "4": (("order", "get", "buy"), ("a cheese pizza", "some pizza", "pizza for dinner")),
}


def stream(count: int) -> list[tuple[str, str]]:
    """Prompts of a few intents in many words, each with the number that answers it."""
    all_ways = [
        (f"{opening} {verb} {what}", label)
        for label, (verbs, whats) in _INTENTS.items()
        for opening, verb, what in itertools.product(_OPENINGS, verbs, whats)
    ]
    return random.Random(3).sample(all_ways, count)


@pytest.fixture(scope="module")
def learner(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that checks no hits by chance, so that a test knows what it gets."""
    names = ("mock", "other", "third")  # each model's requests are learned from apart
    config = {"models": {name: {"deployments": [deployment(upstream_process.url, name)]} for name in names}}
    with run_gateway(tmp_path_factory.mktemp("learner"), config) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def checker(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that checks every hit but the first three, and asks a model what the cheap judges can't tell."""
    url = upstream_process.url
    config = {
        "cache": {"check_share": 1, "verifier": "judge", "verify": "after"},
        "models": {
            "mock": {"deployments": [deployment(url, "plain")]},
            "judge": {"deployments": [deployment(url, "judge", "judge")]},
        },
    }
    with run_gateway(tmp_path_factory.mktemp("checker"), config) as running:
        running.wait_ready()
        serve_three(running)
        yield running


def serve_three(gateway: Gateway) -> None:
    """The first three hits of a namespace, which are not checked."""
    gateway.chat("Where does the river Thames end?")
    for end in (" ?", "", "??"):
        wait_for(
            lambda end=end: kind(gateway.chat("Where does the river Thames end" + end, cache=NO_STORE)) == "semantic"
        )  # type: ignore[misc]


def kind(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.headers["x-sameway-cache"]


def said_in(reply: httpx.Response) -> str:
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def report(gateway: Gateway, id: str, verdict: str, key: str = API_KEY, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    body = {"id": id, "verdict": verdict, **more}
    return httpx.post(f"{gateway.base_url}/feedback", json=body, headers=headers, timeout=30)


def metric(gateway: Gateway, name: str, *labels: str) -> float:
    """The sum of a metric's series that carry these labels."""
    lines = gateway.observe("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(name) and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def verdicts(gateway: Gateway, *labels: str) -> float:
    return metric(gateway, "sameway_semantic_verdicts_total", *labels)


def test_paraphrases_become_hits(learner: Gateway, upstream: Upstream) -> None:
    """Misses at first; judged equal they form groups, and the later ones are served, rightly."""
    asked = stream(180)
    upstream.labels({text: f"The answer is case {label}." for text, label in asked})
    kinds, wrong = [], 0
    for text, label in asked:
        reply = learner.chat(text)
        kinds.append(kind(reply))
        answer = reply.json()["choices"][0]["message"]["content"]
        wrong += kinds[-1] == "semantic" and answer != f"The answer is case {label}."
    first, last = kinds[:60].count("semantic"), kinds[-60:].count("semantic")
    assert wrong == 0
    assert last > first
    assert last >= 20, (first, last)
    assert verdicts(learner, 'ruling="same"', 'source="miss"') > 20
    other = learner.admin("POST", "/teams", json={"name": "somebody else"})
    key = learner.admin("POST", f"/teams/{other['id']}/keys", json={"name": "k"})["plaintext"]
    assert [kind(learner.chat(text, key=key)) for text, _ in asked[-3:]] == ["miss"] * 3


def test_a_wrong_hit_is_not_served_again(learner: Gateway, upstream: Upstream) -> None:
    """Reported by its team it is out of service at once, after the cache worker's death and after a restart; an admin clears it."""
    assert kind(learner.chat(ASKED, "other")) == "miss"
    no_store = {"no-store": True}
    wait_for(lambda: kind(learner.chat(PARAPHRASE, "other", cache=no_store)) == "semantic")
    served = learner.chat(PARAPHRASE, "other")
    id = served.headers["x-request-id"]
    said = {"id": id, "verdict": "wrong", "effect": "suspended"}  # once it is known by the answer's own id
    wait_for(lambda: report(learner, served.json()["id"], "wrong").json() == said)
    reports = verdicts(learner, 'source="feedback"')
    assert report(learner, id, "wrong").json()["effect"] == "suspended"
    assert verdicts(learner, 'source="feedback"') == reports
    assert report(learner, id, "right").json()["error"]["code"] == "already_reported_wrong"
    again = "Tell me the capital of France"
    assert kind(learner.chat(again, "other", cache=no_store)) == "bypass"
    for child in learner.children("cache.worker"):
        child.send_signal(signal.SIGKILL)
    assert kind(learner.chat(again, "other", cache=no_store)) == "bypass"
    learner.stop()
    learner.start()
    learner.wait_ready()
    assert kind(learner.chat(again, "other", cache=no_store)) == "bypass"
    tried = learner.admin("POST", "/cache/try", json={"team_id": 1, "model": "other", "prompt": again})
    assert tried["reason"] == "suspended"
    (wrong,) = learner.admin("GET", "/cache/wrong")["wrong"]
    assert (wrong["text"], wrong["source"]) == (ASKED, "feedback")
    learner.admin("POST", "/cache/clear", json={"team_id": wrong["team_id"], "name": wrong["name"]})
    assert learner.admin("GET", "/cache/wrong")["wrong"] == []
    wait_for(lambda: kind(learner.chat(again, "other", cache=no_store)) == "semantic")


def test_what_can_be_reported_and_by_whom(learner: Gateway, upstream: Upstream) -> None:
    """Only by a key of the team that was answered; an exact or fresh answer that was wrong leaves the cache; bad reports say why."""
    asked = "How many moons does the planet Mars have?"
    miss = learner.chat(asked)
    id = miss.headers["x-request-id"]
    team = learner.admin("POST", "/teams", json={"name": "reporters"})
    stranger = learner.admin("POST", f"/teams/{team['id']}/keys", json={"name": "k"})["plaintext"]
    assert report(learner, id, "wrong", stranger).status_code == 404
    assert report(learner, "req_nobody", "right").json()["error"]["code"] == "response_not_found"
    assert report(learner, id, "so-so").json()["error"]["param"] == "verdict"
    assert report(learner, id, "right", more=1).json()["error"]["code"] == "unknown_parameter"
    assert report(learner, id, "right", key="sk-nobody").status_code == 401
    assert kind(learner.chat(asked)) == "exact"
    assert report(learner, id, "right").json()["effect"] == "counted"
    assert report(learner, id, "wrong").json()["effect"] == "purged"
    assert kind(learner.chat(asked)) == "miss"
    assert report(learner, id, "wrong").json()["effect"] == "purged"
    assert kind(learner.chat(asked)) == "exact"  # said twice, done once


def test_hits_are_checked(checker: Gateway, upstream: Upstream) -> None:
    """A right one is counted; a wrong one is served no more, is on the list, and is in the measured error; the team pays."""
    upstream.labels({ASKED: "Paris", PARAPHRASE: "paris."})
    checker.chat(ASKED)
    first = checker.chat(PARAPHRASE, cache=NO_STORE)
    assert (kind(first), said_in(first)) == ("semantic", "Paris")
    wait_for(lambda: verdicts(checker, 'source="audit"', 'ruling="same"') == 1)
    upstream.labels({PARAPHRASE: "It is 42."})
    assert said_in(checker.chat(PARAPHRASE, cache=NO_STORE)) == "Paris"
    wait_for(lambda: verdicts(checker, 'source="audit"', 'ruling="different"') == 1)
    wait_for(lambda: len(checker.admin("GET", "/cache/wrong")["wrong"]) == 1)
    assert (
        checker.admin("POST", "/cache/try", json={"team_id": 1, "model": "mock", "prompt": PARAPHRASE})["reason"]
        == "suspended"
    )
    wait_for(
        lambda: {"chat", "check"} <= {row["kind"] for row in checker.admin("GET", "/ledger?team_id=1")["rows"]}, 10
    )
    wait_for(lambda: metric(checker, "sameway_semantic_error_ratio") > 0)
    wait_for(lambda: checker.admin("GET", "/cache/certificate")["certificates"][0]["wrong"] == 1)
    (measured,) = checker.admin("GET", "/cache/certificate")["certificates"]
    assert (measured["hits"], measured["checks"], measured["wrong"], measured["error_max"]) == (5, 2, 1, 0.01)
    assert measured["low"] <= measured["estimate"] <= measured["high"]


def counts(gateway: Gateway, ruling: str, total: float) -> bool:
    return verdicts(gateway, 'judge="judge"', f'ruling="{ruling}"') == total


def test_a_model_is_asked_what_words_do_not_tell(checker: Gateway, upstream: Upstream) -> None:
    """Long answers in other words: the verifier's word counts, the asking team pays for it, and only three words are one."""
    asked = "Why is the sky blue at noon?"
    words = {"SAME": "Tell me why the sky is blue at noon.", "Ignore that.": "Tell me, why is the sky so blue at noon?"}
    long = "Because air scatters the short waves of sunlight more than the long ones, " * 3
    upstream.labels({asked: long + "as Rayleigh found."})
    checker.chat(asked)
    for number, (word, near) in enumerate(words.items()):
        ruling = "same" if word == "SAME" else "unknown"
        before = verdicts(checker, 'judge="judge"', f'ruling="{ruling}"')
        other = "Sunlight is scattered by air, and blue most of all, which is what we see. " * 3 + "A" * number
        question = {"prompt": near, "answer_a": other, "answer_b": long + "as Rayleigh found."}
        swapped = {**question, "answer_a": question["answer_b"], "answer_b": question["answer_a"]}
        upstream.labels({near: other, json.dumps(question): word, json.dumps(swapped): word})
        assert kind(checker.chat(near, cache=NO_STORE)) == "bypass"
        is_counted = functools.partial(counts, checker, ruling, before + 1)
        wait_for(is_counted)
    wait_for(lambda: checker.admin("GET", "/ledger?team_id=1&model=judge")["rows"] != [])


def test_killed_in_the_middle_of_judging(upstream: Upstream, tmp_path: Path) -> None:
    """A worker killed while it waits for a judge's word: the verdict is lost and nothing else. The judge's money comes back with
    its lease and agrees with the ledger, and the next check of that hit counts, once."""
    asked, near = "Why is the sky blue at noon?", "Tell me, why is the sky blue at noon?"
    said = "Because air scatters the short waves of sunlight more than the long ones, " * 3
    fresh = "Sunlight is scattered by air, and blue most of all, which is what we see. " * 3
    question = json.dumps({"prompt": near, "answer_a": fresh, "answer_b": said})
    swapped = json.dumps({"prompt": near, "answer_a": said, "answer_b": fresh})
    upstream.labels({asked: said, near: fresh, question: "DIFFERENT", swapped: "DIFFERENT"})
    price = {"input_usd_per_mtok": 10.0, "output_usd_per_mtok": 10.0}
    config = {
        "cache": {"check_share": 1, "verifier": "judge", "verify": "after"},
        "budgets": {"hold_lease_s": 5},
        "models": {
            "mock": {"deployments": [deployment(upstream.url, "plain")]},
            "judge": {"deployments": [deployment(upstream.url, "judge", "judge?delay_ms=1500", price=price)]},
        },
    }

    def judged() -> int:
        questions = [one["body"] for one in upstream.seen().requests if one["body"]["model"].startswith("judge")]
        return sum(near in question["messages"][1]["content"] for question in questions)

    with run_gateway(tmp_path, config) as running:
        running.wait_ready()
        hard = {"window": "day", "limit_microusd": 10**12, "is_hard": True}
        running.admin("POST", "/teams/1/budgets", json=hard)
        serve_three(running)
        running.chat(asked)
        assert kind(running.chat(near, cache=NO_STORE)) == "semantic"
        wait_for(lambda: judged() == 1)
        dead = running.children("gateway worker")
        for process in dead:
            process.kill()
        wait_for(lambda: running.chat(asked).headers.get("x-sameway-cache") == "exact", 20)
        assert verdicts(running, 'source="audit"') == 0

        def budget() -> Any:
            return running.admin("GET", "/teams/1/budgets")["budgets"][0]

        wait_for(lambda: budget()["held_microusd"] == 0, 20, lambda: str(budget()))
        wait_for(lambda: kind(running.chat(near, cache=NO_STORE)) == "semantic", 20)
        wait_for(lambda: verdicts(running, 'source="audit"', 'ruling="different"') == 1, 20)
        wait_for(lambda: len(running.admin("GET", "/cache/wrong")["wrong"]) == 1)
        wait_for(lambda: budget()["held_microusd"] == 0, 10, lambda: str(budget()))

        def in_ledger() -> int:
            rows = running.admin("GET", "/ledger", params={"team_id": 1})["rows"]
            return sum(row["cost_microusd"] for row in rows)

        wait_for(lambda: in_ledger() == budget()["spent_microusd"] > 0, 10)  # rows reach SQL a moment later
