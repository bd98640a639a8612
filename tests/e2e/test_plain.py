"""Embeddings, reranking and moderations of models behind an alias, through the official client, and those of the embedder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream

HEADERS = {"authorization": f"Bearer {API_KEY}"}
CHAT = {"messages": [{"role": "user", "content": "Hello?"}]}


@pytest.fixture(scope="module")
def gateway(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    url = upstream_process.url
    searches = {"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0, "request_usd": 0.002}
    models = {
        "vectors": {"deployments": [deployment(url, "vec", capabilities=["embeddings"])]},
        "mixed": {"deployments": [deployment(url, "all")]},
        "uncounted": {"deployments": [deployment(url, "silent", "mock?has_usage=0")]},
        "pair": {
            "deployments": [deployment(url, "broken", "mock?status=503", priority=1), deployment(url, "well")],
        },
        "searches": {"deployments": [{**deployment(url, "search"), "price": searches}]},
        "talks": {"deployments": [deployment(url, "talk", capabilities=["tools"])]},
        "refuses": {"deployments": [deployment(url, "refusing", "mock?status=400")]},
        "breaks": {"deployments": [deployment(url, "half", "mock?malformed=1")]},
    }
    folder: Path = tmp_path_factory.mktemp("plain")
    with run_gateway(folder, {"models": models}) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def client(gateway: Gateway) -> OpenAI:
    return OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=0)


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.base_url}/{path}", json=body, headers=HEADERS, timeout=30)


def record(gateway: Gateway, reply: httpx.Response) -> dict[str, Any]:
    id = reply.headers["x-request-id"]
    wait_for(lambda: any(one["request_id"] == id for one in gateway.records()))
    return next(one for one in gateway.records() if one["request_id"] == id)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("two words", 2), (["a b", "c"], 3), ([5, 6, 7], 3), ([[5, 6], [7]], 3)],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_embeddings_of_a_managed_model(client: OpenAI, gateway: Gateway, given: Any, tokens: int) -> None:
    """Texts and token ids pass with `dimensions`; the answer is the server's, and a repeat is an exact hit that costs nothing."""
    first = client.embeddings.with_raw_response.create(model="vectors", input=given, dimensions=6)
    made = first.parse()
    assert {len(one.embedding) for one in made.data} == {6}
    assert (made.model, made.usage.prompt_tokens) == ("mock", tokens)
    assert (first.headers["x-sameway-cache"], first.headers["x-sameway-backend"]) == ("miss", "vec")
    assert first.headers["x-sameway-cost-usd"] == f"0.00000{tokens}"
    again = client.embeddings.with_raw_response.create(model="vectors", input=given, dimensions=6)
    assert (again.headers["x-sameway-cache"], again.headers["x-sameway-cost-usd"]) == ("exact", "0")
    assert again.parse() == made
    other = client.embeddings.with_raw_response.create(model="vectors", input=given, dimensions=5)
    assert other.headers["x-sameway-cache"] == "miss"


def test_equal_requests_at_once_are_one(gateway: Gateway, upstream_process: Upstream) -> None:
    """Forty clients that ask for the same vectors cost one request."""
    before = upstream_process.seen().generations
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda _: post(gateway, "embeddings", model="vectors", input="the same"), range(40)))
    assert len({reply.content for reply in replies}) == 1
    assert upstream_process.seen().generations == before + 1


def test_moderations_and_ranks(client: OpenAI, gateway: Gateway) -> None:
    """Both pass as they came; a request with the same `input` of another kind is another request."""
    seen = client.moderations.create(model="mixed", input=["a calm day", "violence"])
    assert [one.flagged for one in seen.results] == [False, True]
    kinds = [post(gateway, path, model="mixed", input="one input") for path in ("embeddings", "moderations")]
    assert [reply.headers["x-sameway-cache"] for reply in kinds] == ["miss", "miss"]
    assert ["data" in reply.json() for reply in kinds] == [True, False]
    ranked = post(gateway, "rerank", model="mixed", query="red fox", documents=["a cow", "the red fox", {"text": "x"}])
    assert [one["index"] for one in ranked.json()["results"]] == [1, 0, 2]
    assert record(gateway, ranked)["prompt_tokens"] == 7


def test_a_price_of_a_search_covers_a_hundred_documents(gateway: Gateway) -> None:
    """101 documents are two searches, as the provider's price says."""
    replies = [
        post(gateway, "rerank", model="searches", query="q", documents=[f"{one}" for one in range(count)])
        for count in (100, 101)
    ]
    assert [reply.headers["x-sameway-cost-usd"] for reply in replies] == ["0.002000", "0.004000"]


def test_an_answer_without_usage_is_charged_by_its_texts(gateway: Gateway) -> None:
    """A token of four bytes and two around each text: an estimate, which the record says."""
    reply = post(gateway, "embeddings", model="uncounted", input=["abcd" * 10, "abcd" * 20])
    assert reply.json()["usage"] is None
    assert (record(gateway, reply)["prompt_tokens"], record(gateway, reply)["usage_estimated"]) == (34, True)


def test_the_next_deployment_answers(gateway: Gateway) -> None:
    """A failure before the answer is the next deployment's turn, as for chats."""
    reply = post(gateway, "embeddings", model="pair", input="please")
    assert (reply.status_code, reply.headers["x-sameway-backend"]) == (200, "well")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("embeddings", {"model": "talks", "input": "x"}, 400, "unsupported_feature", "model"),
        ("rerank", {"model": "vectors", "query": "x", "documents": ["y"]}, 400, "unsupported_feature", "model"),
        ("embeddings", {"model": "nowhere", "input": "x"}, 404, "model_not_found", "model"),
        ("embeddings", {"model": "vectors", "input": ["x", 5]}, 400, "invalid_type", "input"),
        ("embeddings", {"model": "vectors", "input": ["x", ""]}, 400, "invalid_value", "input"),
        ("embeddings", {"model": "vectors", "input": "x", "stream": True}, 400, "invalid_value", "stream"),
        ("embeddings", {"model": "vectors", "input": "x", **CHAT}, 400, "invalid_type", "messages"),
        ("rerank", {"model": "mixed", "query": "x", "documents": []}, 400, "invalid_value", "documents"),
        ("rerank", {"model": "mixed", "documents": ["y"]}, 400, "missing_required_parameter", "query"),
        ("moderations", {"model": "mixed"}, 400, "missing_required_parameter", "input"),
        ("embeddings", {"model": "refuses", "input": "x"}, 400, None, None),
        ("embeddings", {"model": "breaks", "input": "x"}, 502, "upstream_broken", None),
        ("chat/completions", {"model": "all-minilm-l6-v2", **CHAT}, 400, None, "model"),
        (
            "rerank",
            {"model": "all-minilm-l6-v2", "query": "x", "documents": ["y"]},
            400,
            "unsupported_feature",
            "model",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(
    gateway: Gateway, path: str, body: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    """A wrong request names its field, a model of another kind is named, and a server's refusal passes."""
    reply = post(gateway, path, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code) or (code is None and reply.status_code == status), error
    assert param is None or error["param"] == param
