"""Azure's clients against the gateway, changed in nothing but their endpoint and key; and probes under vLLM's names."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncAzureOpenAI, AzureOpenAI, NotFoundError

from tests.e2e.gateway import API_KEY, Gateway

_ABOUT: Any = [{"role": "user", "content": "Tell me something about Azure's paths."}]
_USAGE: Any = {"include_usage": True}
_VERSION = "2024-10-21"


@pytest.fixture
def azure(gateway: Gateway) -> Iterator[AzureOpenAI]:
    with AzureOpenAI(azure_endpoint=gateway.root, api_key=API_KEY, api_version=_VERSION, max_retries=0) as made:
        yield made


def test_the_sync_client(azure: AzureOpenAI, gateway: Gateway) -> None:
    """Chats whole and streamed, completions, responses, embeddings and models; a repeat under `/v1` is an exact hit."""
    raw = azure.chat.completions.with_raw_response.create(model="mock", messages=_ABOUT)
    whole = raw.parse()
    assert raw.http_request.url.path == "/openai/deployments/mock/chat/completions"
    assert whole.choices[0].finish_reason == "stop"
    again = gateway.chat(_ABOUT[0]["content"])
    assert (again.headers["x-sameway-cache"], again.json()["id"]) == ("exact", whole.id)
    chunks = list(azure.chat.completions.create(model="mock", messages=_ABOUT, stream=True, stream_options=_USAGE))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage is not None
    assert azure.completions.create(model="mock", prompt="Once").choices[0].text
    assert azure.responses.create(model="mock", input="Hello").output_text
    assert len(azure.embeddings.create(model="all-minilm-l6-v2", input="Hello").data[0].embedding) == 384
    assert "mock" in [model.id for model in azure.models.list()]
    assert azure.models.retrieve("mock").id == "mock"
    with pytest.raises(NotFoundError, match="`gpt-unknown` does not exist"):
        azure.chat.completions.create(model="gpt-unknown", messages=_ABOUT)


async def test_the_async_client_with_a_deployment(gateway: Gateway) -> None:
    """With `azure_deployment` the path names the alias, and the SDK's `model` may be anything."""
    async with AsyncAzureOpenAI(
        azure_endpoint=gateway.root, azure_deployment="mock", api_key=API_KEY, api_version=_VERSION, max_retries=0
    ) as client:
        whole = await client.chat.completions.create(model="gpt-4o", messages=_ABOUT)
        stream = await client.chat.completions.create(model="gpt-4o", messages=_ABOUT, stream=True)
        text = "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])
        assert text == whole.choices[0].message.content
        assert (await client.responses.create(model="mock", input="Hello")).output_text
        assert "mock" in [model.id async for model in client.models.list()]


def test_the_path_names_the_alias(gateway: Gateway) -> None:
    """With no model in the body, or another one; also of a response, and in gzip."""
    url = f"{gateway.root}/openai/deployments/mock"
    for body in ({"messages": _ABOUT}, {"model": "no-such", "messages": _ABOUT}, {"model": 5, "messages": _ABOUT}):
        sent = gzip.compress(json.dumps(body).encode())
        headers = {"api-key": API_KEY, "content-encoding": "gzip"}
        reply = httpx.post(f"{url}/chat/completions?api-version={_VERSION}", content=sent, headers=headers)
        assert reply.status_code == 200, reply.text
    reply = httpx.post(f"{url}/responses", json={"input": "Hi", "model": "x"}, headers={"api-key": API_KEY})
    assert (reply.status_code, reply.json()["model"]) == (200, "mock")


def test_keys_in_any_header(gateway: Gateway) -> None:
    """`api-key` and `x-api-key` do what a bearer does, on `/v1` alone; no key reaches the log, and a body waits for its key."""
    models, other = f"{gateway.base_url}/models", "sk-sw-other-0123456789abcdef"
    for name in ("api-key", "x-api-key"):
        assert httpx.get(models, headers={name: API_KEY}).status_code == 200
        assert httpx.get(f"{gateway.root}/admin/api/teams", headers={name: "sk-admin-test"}).status_code == 401
        reply = httpx.get(models, headers={name: other, "authorization": f"Bearer {API_KEY}"})
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert "two different API keys" in reply.json()["error"]["message"]
    reply = httpx.post(
        f"{gateway.base_url}/chat/completions",
        content=b"no gzip",
        headers={"content-encoding": "gzip", "api-key": other},
    )
    assert reply.status_code == 401
    assert API_KEY not in gateway.log.read_text()
    assert other not in gateway.log.read_text()


def test_other_servers_tokens_are_not_known(gateway: Gateway) -> None:
    """Without a local engine there is no tokenizer, neither for a named model nor for any."""
    asked = {"model": "mock", "prompt": "x"}
    reply = httpx.post(f"{gateway.root}/tokenize", json=asked, headers={"api-key": API_KEY})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
    reply = httpx.post(f"{gateway.root}/detokenize", json={"tokens": [1]}, headers={"api-key": API_KEY})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")


def test_health_under_both_names(gateway: Gateway) -> None:
    """`/health` is `/healthz`: no key, no details, GET and HEAD."""
    for path in ("/health", "/healthz"):
        reply = httpx.get(f"{gateway.root}{path}")
        assert (reply.status_code, reply.json()["status"]) == (200, "ok")
        assert httpx.head(f"{gateway.root}{path}").status_code == 200
