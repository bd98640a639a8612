"""What is answered from the cache, for whom, and what the headers say of it."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, wait_for
from tests.e2e.upstream import Upstream

_fresh = itertools.count()


def question() -> str:
    return f"caching question {next(_fresh)}"


def kind(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.headers["x-sameway-cache"])


def test_headers_of_a_miss_and_a_hit(gateway: Gateway, upstream: Upstream) -> None:
    """A miss says what it cost and where it went; a hit what it saved, how old it is, and costs nothing."""
    asked = question()
    miss, hit = gateway.chat(asked), gateway.chat(asked)
    assert kind(miss) == "miss"
    assert miss.headers["x-sameway-backend"] == "plain"
    assert float(miss.headers["x-sameway-cost-usd"]) > 0
    assert miss.headers["cache-status"] == "sameway; fwd=uri-miss"
    assert "age" not in miss.headers
    assert kind(hit) == "exact"
    assert hit.headers["x-sameway-saved-usd"] == miss.headers["x-sameway-cost-usd"]
    assert float(hit.headers["x-sameway-cost-usd"]) == 0
    assert hit.headers["cache-status"].startswith("sameway; hit; ttl=")
    assert int(hit.headers["age"]) >= 0
    assert hit.headers["x-request-id"] != miss.headers["x-request-id"]
    assert hit.content == miss.content
    assert upstream.seen().generations == 1


@pytest.mark.parametrize(
    ("first", "again", "expected"),
    [
        ({}, {"stream": True}, "exact"),
        ({}, {"user": "somebody"}, "exact"),
        ({}, {"metadata": {"trace": "1"}}, "exact"),
        ({"temperature": 1}, {"temperature": 1.0}, "exact"),
        ({}, {"temperature": None}, "exact"),
        ({}, {"temperature": 0.5}, "miss"),
        ({}, {"seed": 1}, "miss"),
        ({}, {"n": 2}, "miss"),
        ({}, {"stop": "x"}, "miss"),
        ({}, {"a_field_of_tomorrow": 1}, "miss"),
        ({}, {"cache": {"namespace": "other"}}, "miss"),
        ({}, {"cache": {"no-cache": True}}, "bypass"),
        ({}, {"headers": {"cache-control": "no-cache"}}, "bypass"),
        ({"cache": {"no-store": True}}, {}, "miss"),
        ({"headers": {"cache-control": "No-Store"}}, {}, "miss"),
        ({}, {"headers": {"cache-control": "max-age=600"}}, "exact"),
        ({}, {"headers": {"cache-control": "only-if-cached"}}, "exact"),
    ],
)
def test_what_makes_two_requests_the_same(
    gateway: Gateway, first: dict[str, Any], again: dict[str, Any], expected: str
) -> None:
    """Delivery does not change the key, meaning does, and the caller's controls are obeyed."""
    asked = question()
    assert gateway.chat(asked, **copy.deepcopy(first)).status_code == 200
    if not {"cache", "headers"} & set(first):
        again = {**first, **again}
    assert kind(gateway.chat(asked, **copy.deepcopy(again))) == expected


def test_no_cache_refreshes(gateway: Gateway, upstream: Upstream) -> None:
    """no-cache generates anew and stores the new answer for those who come after."""
    asked = question()
    gateway.chat(asked)
    assert kind(gateway.chat(asked, cache={"no-cache": True})) == "bypass"
    assert kind(gateway.chat(asked)) == "exact"
    assert upstream.seen().generations == 2


def test_only_if_cached_never_generates(gateway: Gateway, upstream: Upstream) -> None:
    """only-if-cached answers 504 where nothing is cached, and asks nobody."""
    reply = gateway.chat(question(), headers={"cache-control": "only-if-cached"})
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "not_cached"
    assert reply.headers["x-should-retry"] == "false"
    assert upstream.seen().generations == 0


def test_ttl_and_max_age(gateway: Gateway) -> None:
    """An entry is gone after its TTL, and too old for who asks for a fresher one; a hit refreshes neither."""
    short, aged = question(), question()
    gateway.chat(short, cache={"ttl": 1})
    gateway.chat(aged)
    assert kind(gateway.chat(short)) == "exact"
    time.sleep(1.2)
    assert kind(gateway.chat(short)) == "miss"
    assert kind(gateway.chat(aged)) == "exact"
    assert kind(gateway.chat(aged, headers={"cache-control": "max-age=1"})) == "miss"


@pytest.mark.parametrize(
    ("model", "reason"), [("long", "truncated"), ("filtered", "filtered"), ("cut-too", "incomplete")]
)
def test_what_is_not_complete_is_not_stored(gateway: Gateway, upstream: Upstream, model: str, reason: str) -> None:
    """A truncated, filtered or broken answer is generated again, streamed or not, and the reason is counted."""
    asked = question()
    for is_stream in (True, True, False, False):
        reply = gateway.chat_anew(asked, model=model, stream=is_stream)
        assert reply.headers.get("x-sameway-cache", "miss") == "miss"
    wait_for(lambda: any(r.get("store") == reason for r in gateway.records()))


def test_a_fallbacks_answer_is_not_stored(gateway: Gateway) -> None:
    """What another model answered for the first choice is not kept under the alias; what the same model answered is."""
    asked = question()
    assert [kind(gateway.chat_anew(asked, model="other-model")) for _ in range(2)] == ["miss", "miss"]


def test_teams_do_not_see_each_other(gateway: Gateway, upstream: Upstream) -> None:
    """The same request of another team is generated for that team: exact, by meaning, and in flight."""
    team = gateway.admin("POST", "/teams", json={"name": f"tenant {next(_fresh)}"})
    other = gateway.admin("POST", f"/teams/{team['id']}/keys", json={"name": "k"})["plaintext"]
    asked = "What is the boiling point of water at sea level?"
    gateway.chat(asked)
    assert kind(gateway.chat(asked)) == "exact"
    assert kind(gateway.chat(asked, key=other)) == "miss"
    assert kind(gateway.chat("Tell me the boiling point of water at sea level", key=other)) in ("miss", "semantic")
    assert upstream.seen().generations >= 2
    assert gateway.chat(asked, key=other, user="team:1").headers["x-sameway-cache"] == "exact"  # its own by now


def test_by_meaning(gateway: Gateway, upstream: Upstream) -> None:
    """A paraphrase gets the recorded answer; a negation, another number, another name and another system prompt do not."""
    assert kind(gateway.chat("What is the capital of France?")) == "miss"
    for paraphrase in ("What's the capital of France?", "Tell me the capital of France."):
        hit = gateway.chat(paraphrase)
        assert kind(hit) == "semantic", paraphrase
        assert float(hit.headers["x-sameway-similarity"]) > 0.8
        assert "What is the capital of France?" in hit.json()["choices"][0]["message"]["content"]
    assert kind(gateway.chat("What is the capital of Italy?")) == "miss"
    assert kind(gateway.chat("What is not the capital of France?")) == "miss"
    assert kind(gateway.chat("What is 12 times 11?")) == "miss"
    assert kind(gateway.chat("What is 12 times 13?")) == "miss"
    assert kind(gateway.chat("What's the capital of France", temperature=0.3)) == "miss"
    assert kind(gateway.chat("What's the capital of France", stream=True)) == "semantic"


def test_purge_is_obeyed_at_once(gateway: Gateway) -> None:
    """A purged answer is served by nobody any more: not exactly, not by meaning, not from a worker's own memory."""
    asked = "Which ocean is the largest one on Earth?"
    reply = gateway.chat(asked)
    assert kind(gateway.chat(asked)) == "exact"
    dry = gateway.admin("POST", "/cache/purge", json={"text": asked, "dry_run": True})
    assert dry["count"] == 1
    assert kind(gateway.chat(asked)) == "exact"
    assert gateway.admin("POST", "/cache/purge", json={"text": asked, "dry_run": False})["count"] == 1
    again = gateway.chat("Which ocean is the largest on Earth?")
    assert kind(again) == "miss"
    assert reply.status_code == 200


def test_purges_reach_what_they_name_and_nothing_else(gateway: Gateway) -> None:
    """By namespace, by model and by age: counted first, then gone, beside an answer that stays."""
    asked, stays = "How many moons does Jupiter have in total?", "Which metal is liquid at room temperature?"
    own = {"cache": {"namespace": f"purge {next(_fresh)}"}}
    gateway.chat(stays)
    for selector in (
        {"namespace": own["cache"]["namespace"]},
        {"text": asked, "older_than_s": 0},
        {"text": asked, "model": "mock"},
    ):
        assert kind(gateway.chat(asked, **own)) == "miss"
        assert kind(gateway.chat(asked, **own)) == "exact"
        dry = gateway.admin("POST", "/cache/purge", json=selector)
        assert (dry["dry_run"], dry["count"], [one["text"] for one in dry["samples"]]) == (True, 1, [asked]), selector
        assert gateway.admin("POST", "/cache/purge", json={**selector, "dry_run": False})["count"] == 1
    assert gateway.admin("POST", "/cache/purge", json={"namespace": "nobody's"})["count"] == 0
    assert gateway.admin("POST", "/cache/purge", json={"text": stays, "deployment": "nobody"})["count"] == 0
    assert kind(gateway.chat(stays)) == "exact"


def test_long_prompts_are_not_matched_by_meaning(gateway: Gateway) -> None:
    """Two instructions after one long document differ in what the encoder can't see: neither is matched by meaning."""
    document = "The quick brown fox jumps over the lazy dog. " * 80
    assert kind(gateway.chat(document + "Summarise this.")) == "miss"
    assert kind(gateway.chat(document + "Translate this.")) == "miss"
