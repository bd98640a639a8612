"""A verifier behind a real gateway of two workers: its yes serves a stored answer in other words, at the asking team's expense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.gateway import deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream

ASKED, NEAR = (
    "How do I get my money back for a broken lamp?",
    "What is the way to a refund when the lamp I bought is broken?",
)
OTHER = "Which way do I get a refund if my lamp came broken?"
SAID = "Send it to us in its box, and the money is on your account within a week."
DEAR = {"input_usd_per_mtok": 500.0, "output_usd_per_mtok": 500.0}
CHEAP = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 1.0}


def question(text: str) -> str:
    """What the verifier is asked about `text`."""
    candidate = {"number": 1, "request": ASKED, "answer": SAID}
    return json.dumps({"request": text, "candidates": [candidate]}, ensure_ascii=False)


@pytest.mark.parametrize("delay_ms", [0, 2500])
def test_a_verified_answer_is_served(upstream: Upstream, tmp_path: Path, delay_ms: int) -> None:
    """Generated once, found by a question, and remembered for its words; a word that comes too late serves nothing, and is a
    verdict all the same."""
    again = json.dumps({"old_request": ASKED, "answer": SAID, "new_request": NEAR}, ensure_ascii=False)
    upstream.labels({ASKED: SAID, question(NEAR): "1", again: "SAME", question(OTHER): "0"})
    config: dict[str, Any] = {
        "workers": 2,
        "cache": {"verifier": "small"},
        "models": {
            "mock": {"deployments": [deployment(upstream.url, "plain", price=DEAR)]},
            "small": {
                "deployments": [
                    deployment(
                        upstream.url, "reader", f"m?delay_ms={delay_ms}", price=CHEAP, capabilities=["json_object"]
                    )
                ]
            },
        },
    }
    with run_gateway(tmp_path, config) as running:
        running.wait_ready()
        running.chat(ASKED)
        no_store = {"no-store": True}

        def asked() -> httpx.Response | None:
            reply = running.chat(NEAR, cache=no_store)
            return reply if any(one["route"] == "verify" for one in running.records()) else None

        wait_for(lambda: asked() is not None, 20)
        if delay_ms:
            reply = running.chat(NEAR)
            assert (reply.headers["x-sameway-cache"], "x-sameway-verified" in reply.headers) == ("miss", False)
        else:
            reply = running.chat(NEAR)
            assert reply.headers["x-sameway-cache"] == "semantic"
            assert reply.headers["x-sameway-verified"] == "true"
            assert reply.json()["choices"][0]["message"]["content"] == SAID
            assert float(reply.headers["x-sameway-saved-usd"]) > 0
            assert running.chat(OTHER).headers["x-sameway-cache"] == "miss"
        words = 'sameway_semantic_verdicts_total{judge="small",ruling="same",source="verifier"}'
        wait_for(lambda: words in running.observe("/metrics").text)

        def rows() -> list[dict[str, Any]]:
            found = running.admin("GET", "/ledger", params={"team_id": 1})["rows"]
            return [row for row in found if row["kind"] == "verify"]

        wait_for(lambda: bool(rows()))
        assert {row["alias"] for row in rows()} == {"small"}
