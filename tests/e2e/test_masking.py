"""Masking over real sockets: planted values on every surface, and everything that a gateway writes or sends searched for them."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
from openai import OpenAI

from tests.e2e.gateway import ADMIN_KEY, API_KEY, Gateway
from tests.e2e.upstream import Upstream

EMAIL, CARD = "planted.person@secret-corp.example", "4111-1111-1111-1111"
SECRETS = (EMAIL, CARD, "secret-corp")
ASKED = f"Repeat <b>: {EMAIL} and {CARD}."


def shows_none(where: str, text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text], where


def test_no_planted_value_is_sent_or_written(gateway: Gateway, client: OpenAI, upstream: Upstream) -> None:
    """Chats, completions, responses, messages and embeddings, whole and streamed, a refused request too: the upstream, every
    file of the data directory, the log, the metrics and the dashboard's pages have no planted value.
    """
    said: dict[str, Any] = {"messages": [{"role": "user", "content": ASKED}]}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": said | {"user": EMAIL, "metadata": {"for": EMAIL}},
        "completions": {"prompt": ASKED},
        "responses": {"input": ASKED, "instructions": f"You serve {EMAIL}"},
        "messages": said | {"max_tokens": 50, "metadata": {"user_id": EMAIL}},
    }
    refused = said | {"max_completion_tokens": 5, "n": 500, "user": EMAIL}
    with httpx.Client(base_url=gateway.base_url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=30) as http:
        for path, fields in bodies.items():
            for is_stream in (False, True):
                reply = http.post(f"/{path}", json={"model": "masked", **fields, "stream": is_stream})
                assert reply.status_code == 200, reply.text
        assert http.post("/embeddings", json={"model": "masked", "input": ASKED}).status_code in (200, 400)
        assert http.post("/chat/completions", json={"model": "masked", **refused}).status_code == 400
        assert http.post("/messages/count_tokens", json={"model": "masked", **said}).status_code == 200
        file = {"image": (f"{EMAIL}.png", b"png", "image/png")}
        assert http.post("/images/edits", data={"model": "masked", "prompt": ASKED}, files=file).status_code == 200
    sent = json.dumps(upstream.seen().requests)
    assert "<EMAIL_1> and <CARD_1>" in sent
    shows_none("upstream", sent)
    time.sleep(0.3)
    with httpx.Client(base_url=gateway.root, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=30) as admin:
        for path in (
            "/metrics",
            "/admin/api/routes",
            "/admin/api/near-misses",
            "/admin/api/ledger",
            "/admin/api/cache",
        ):
            reply = admin.get(path)
            assert reply.status_code == 200, path
            shows_none(path, reply.text)
    shows_none("the log", gateway.log.read_text())
    for file in gateway.data_dir.rglob("*"):
        if file.is_file():
            shows_none(str(file), file.read_bytes().decode("latin-1"))


def test_an_answer_has_the_callers_own_values(client: OpenAI, upstream: Upstream) -> None:
    """The official client reads its own values in a whole and in a stream, a hit as well."""
    upstream.labels({"Greet <EMAIL_1>": "Dear <EMAIL_1>, welcome"})
    for name in ("ann@x.example", "bob@y.example"):
        ask: Any = {"model": "masked", "messages": [{"role": "user", "content": f"Greet {name}"}]}
        whole = client.chat.completions.create(**ask)
        assert whole.choices[0].message.content == f"Dear {name}, welcome"
        parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)]
        assert "".join(parts) == f"Dear {name}, welcome"
    assert upstream.seen().generations == 1
