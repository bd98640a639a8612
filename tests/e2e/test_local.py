"""The embedded default as a user gets it: no configuration, a real model, its process killed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.gateway import API_KEY, Gateway, run_gateway, wait_for

MODEL = "smollm2-135m-instruct"
KEY = {"authorization": f"Bearer {API_KEY}"}
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The embedded default, ready."""
    with run_gateway(tmp_path_factory.mktemp("local"), {}) as gateway:
        early = gateway.chat(
            "Hello!", model=MODEL, temperature=0, max_tokens=5
        )  # the port answers, the model still loads
        assert early.status_code == 200, early.text
        gateway.wait_ready(120)
        yield gateway


@pytest.fixture(scope="module")
def client(local: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=local.base_url, api_key=API_KEY, max_retries=0, timeout=60) as made:
        yield made


def test_the_capital_of_france(client: OpenAI) -> None:
    """Greedy, the default model answers with Paris, streamed; whole and by meaning it is the same answer from the cache."""
    stream = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Paris" in text
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=FRANCE, temperature=0)
    assert raw.headers["x-sameway-cache"] == "exact"
    again = raw.parse()
    assert again.choices[0].message.content == text
    assert again.choices[0].finish_reason == "stop"
    assert again.usage is not None
    assert again.usage.prompt_tokens > 5


def test_a_message_of_anthropics_client_is_counted_and_answered(local: Gateway) -> None:
    """The engine's count of a prompt is what its answer then reports; system texts and blocks included."""
    blocks: Any = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    prompt: Any = {"model": MODEL, "system": "Be brief.", "messages": [{"role": "user", "content": blocks}]}
    with Anthropic(base_url=local.root, api_key=API_KEY, max_retries=0, timeout=60) as claude:
        counted = claude.messages.count_tokens(**prompt).input_tokens
        with claude.messages.stream(**prompt, max_tokens=30) as stream:
            answer = stream.get_final_message()
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted


def test_a_message_goes_on_with_its_beginning(local: Gateway) -> None:
    """The answer is what follows the assistant's last words, whole and streamed, and said as a chat as well."""
    asked: Any = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}
    question = {"role": "user", "content": "What is the capital of France?"}
    begun = {"role": "assistant", "content": "The capital of France is"}
    with Anthropic(base_url=local.root, api_key=API_KEY, max_retries=0, timeout=60) as claude:
        whole = claude.messages.create(**asked, messages=[question, begun])  # type: ignore[list-item]
        with claude.messages.stream(**asked, messages=[question, begun]) as stream:  # type: ignore[list-item]
            assert stream.get_final_text() == whole.content[0].text  # type: ignore[union-attr]
    assert "Paris" in whole.content[0].text  # type: ignore[union-attr]
    assert "capital" not in whole.content[0].text  # type: ignore[union-attr]
    chat = local.chat("", MODEL, max_tokens=8, temperature=0, messages=[question, {**begun, "prefix": True}])
    assert chat.json()["choices"][0]["message"]["content"] == whole.content[0].text  # type: ignore[union-attr]


def test_the_program_of_the_readme(local: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what README shows: the source of each answer, and its last word (other words depend on the processor)."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    program, shown = (re.findall(rf"^```{kind}\n(.*?)^```$", readme, re.M | re.S) for kind in ("python", "text"))
    team = local.admin("POST", "/teams", json={"name": "readme"})
    key = local.admin("POST", f"/teams/{team['id']}/keys", json={"name": "k"})["plaintext"]
    exec(program[0].replace("http://127.0.0.1:8080/v1", local.base_url).replace("sk-sw-...", key), {})
    ends = [
        [(line.split()[0], line.split()[-1]) for line in text.splitlines()]
        for text in (capsys.readouterr().out, shown[0])
    ]
    assert ends[0] == ends[1]


def test_what_the_engine_can_do(client: OpenAI) -> None:
    """n, logprobs, stop, seed and max_tokens reach the engine; the fields before `tools` are refused with a reason."""
    asked: Any = [{"role": "user", "content": "Count from one to ten."}]
    made = client.chat.completions.create(
        model=MODEL,
        messages=asked,
        n=2,
        seed=7,
        max_tokens=12,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},  # else the length is up to what the seed draws
    )
    assert [choice.finish_reason for choice in made.choices] == ["length", "length"]
    assert made.usage is not None
    assert made.usage.completion_tokens == 24
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.content is not None
    assert all(len(token.top_logprobs) == 2 for token in made.choices[0].logprobs.content)
    stopped = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, stop=["Paris"])
    assert "Paris" not in (stopped.choices[0].message.content or "")
    assert stopped.choices[0].finish_reason == "stop"
    headers = {"authorization": f"Bearer {API_KEY}"}
    body = {"model": MODEL, "messages": FRANCE, "functions": [{"name": "f"}]}
    refused = httpx.post(f"{client.base_url}chat/completions", json=body, headers=headers)
    assert refused.status_code == 400
    assert "send `tools`" in refused.json()["error"]["message"]


LOOK_UP: dict[str, Any] = {
    "name": "look_up",
    "description": "Look a city up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {
    "name": "clock",
    "description": "Tell the time",
    "parameters": {"type": "object", "properties": {}},
}


def test_a_tool_is_called(client: OpenAI) -> None:
    """Named or required, whole and streamed, by chats and responses; the result goes back, and the call comes from the cache."""
    tools: Any = [{"type": "function", "function": one} for one in (LOOK_UP, CLOCK)]
    named: Any = {"type": "function", "function": {"name": "look_up"}}
    asked: Any = {"model": MODEL, "messages": FRANCE, "tools": tools, "temperature": 0}
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        choice = stream.get_final_completion().choices[0]
    assert len(deltas) > 2
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "look_up"
    assert set(json.loads(call.function.arguments)) == {"city"}
    again = client.chat.completions.with_raw_response.create(**asked, tool_choice=named)
    assert again.headers["x-sameway-cache"] == "exact"
    message = again.parse().choices[0].message
    assert [one.model_dump() for one in message.tool_calls or ()] == [
        {"id": call.id, "type": "function", "function": {"name": "look_up", "arguments": call.function.arguments}}
    ]
    whole = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert len(whole.choices[0].message.tool_calls or ()) == 1
    result = {"role": "tool", "tool_call_id": call.id, "content": "Paris is the capital of France."}
    history = [*FRANCE, message.model_dump(exclude_none=True), result]
    said = client.chat.completions.create(**{**asked, "messages": history}, max_tokens=30)
    assert said.choices[0].message.content
    flat: Any = [{"type": "function", **one} for one in (LOOK_UP, CLOCK)]
    made = client.responses.create(
        model=MODEL, input=FRANCE, tools=flat, tool_choice={"type": "function", "name": "look_up"}, temperature=0
    )
    (item,) = made.output
    assert item.type == "function_call"
    assert item.arguments == call.function.arguments
    with client.responses.stream(
        model=MODEL, input=FRANCE, tools=flat, tool_choice="required", parallel_tool_calls=False, max_output_tokens=90
    ) as events:
        assert [one.type for one in events.get_final_response().output] == ["function_call"]


def test_anthropics_client_gets_a_call(local: Gateway) -> None:
    """A forced tool as a `tool_use` block, whole and streamed."""
    tool: Any = {"name": "look_up", "input_schema": LOOK_UP["parameters"]}
    asked: Any = {"model": MODEL, "max_tokens": 90, "messages": FRANCE, "tools": [tool]}
    with Anthropic(base_url=local.root, api_key=API_KEY, max_retries=0, timeout=60) as claude:
        whole = claude.messages.create(**asked, tool_choice={"type": "tool", "name": "look_up"})
        with claude.messages.stream(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        assert block.type == "tool_use"
        assert set(block.input) == {"city"}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def test_a_schema_is_held(client: OpenAI) -> None:
    """`parse` gives an object of the model's, whole and streamed, by chats and responses; a schema that is not held is a 400
    with its place."""
    asked: Any = [{"role": "user", "content": "Invent a person."}]
    whole = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person, seed=1)
    assert isinstance(whole.choices[0].message.parsed, Person)
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model=MODEL, messages=asked, response_format=Person, seed=2) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    assert isinstance(client.responses.parse(model=MODEL, input=asked, text_format=Person).output_parsed, Person)
    choice = {"guided_choice": ["yes", "no"]}
    said = client.chat.completions.create(model=MODEL, messages=FRANCE, extra_body=choice)
    assert said.choices[0].message.content in choice["guided_choice"]
    schema: Any = {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}
    with pytest.raises(BadRequestError, match="#/properties/a/not") as caught:
        client.chat.completions.create(
            model=MODEL, messages=asked, response_format={"type": "json_schema", "json_schema": schema}
        )
    assert (caught.value.code, caught.value.param) == ("unsupported_grammar", "response_format")


async def test_a_text_goes_on(local: Gateway) -> None:
    """The same model continues texts, whole and streamed, and is told what the text was and how likely each of its tokens."""
    async with AsyncOpenAI(base_url=local.base_url, api_key=API_KEY, max_retries=0, timeout=60) as client:
        asked: Any = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 5}
        pieces = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
        text = "".join(choice.text for chunk in pieces for choice in chunk.choices)
        assert "Paris" in text
        raw = await client.completions.with_raw_response.create(**asked)
        assert (raw.headers["x-sameway-cache"], raw.parse().choices[0].text) == ("exact", text)
        scored = await client.completions.create(**{**asked, "max_tokens": 0}, echo=True, logprobs=5)
        assert scored.choices[0].text == asked["prompt"]
        told = scored.choices[0].logprobs
        assert told is not None
        assert "".join(told.tokens or ()) == asked["prompt"]
        assert told.top_logprobs is not None
        assert len(told.top_logprobs[-1]) in (5, 6)
        with pytest.raises(BadRequestError, match="does not offer suffix"):
            await client.completions.create(**asked, suffix="!")


def test_a_near_answer_is_a_draft(local: Gateway) -> None:
    """A prompt that comes near a cached one and must not have its answer is generated with that answer as a draft: fewer
    steps, and the log and the metrics say so. Another team's answer drafts for nobody else."""
    prompts = [f"Write {number} short sentences about the city of Paris." for number in ("two", "three")]

    def ask(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """The answer, and what the log says of it."""
        reply = local.chat(prompt, model=MODEL, temperature=0, **more)
        assert reply.status_code == 200
        found: list[dict[str, Any]] = []

        def is_logged() -> bool:
            found[:] = [one for one in local.records() if one["request_id"] == reply.headers["x-request-id"]]
            return bool(found)

        wait_for(is_logged)
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text, found[0]

    _, said = ask(prompts[1], cache={"no-cache": True, "no-store": True})
    assert "draft" not in said
    _, said = ask(prompts[0])
    assert said["store"] == "stored"
    other = local.admin("POST", "/teams", json={"name": "others"})
    key = local.admin("POST", f"/teams/{other['id']}/keys", json={"name": "theirs"})["plaintext"]
    _, said = ask(prompts[1], key=key)
    assert "draft" not in said

    def is_drafted() -> bool:
        """The index follows within a moment; an answer that is stored would be found, so none is."""
        nonlocal said
        _, said = ask(prompts[1], cache={"no-store": True})
        return "draft" in said and said.get("accepted_tokens", {}).get("reference", 0) > 0

    wait_for(is_drafted, 20)
    assert said["similarity"] > 0.6
    assert said["drafted_tokens"]["reference"] >= said["accepted_tokens"]["reference"]
    name = f'sameway_accepted_tokens_total{{deployment="{said["deployment"]}",source="reference"}}'
    metrics = local.observe("/metrics").text
    assert any(row.startswith(name) and float(row.split()[-1]) > 0 for row in metrics.splitlines())


def test_a_load_generator_of_vllms(local: Gateway) -> None:
    """guidellm's requests: its probes, then streams of an exact length, by chats in parts and by completions."""
    assert httpx.get(f"{local.root}/health").status_code == 200
    assert httpx.get(f"{local.base_url}/models", headers=KEY).json()["data"][0]["id"] == MODEL
    length = {"max_tokens": 7, "max_completion_tokens": 7, "stop": None, "ignore_eos": True}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in (
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]}),
        ("completions", {"prompt": "Say hello."}),
    ):
        body = {"model": MODEL, "stream": True, "stream_options": usage, **length, **asked}
        reply = httpx.post(f"{local.base_url}/{path}", json=body, headers=KEY, timeout=60)
        events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert (reply.status_code, events[-1]) == (200, "[DONE]"), reply.text
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 7


def ask_tokens(local: Gateway, path: str, key: str = API_KEY, **body: Any) -> httpx.Response:
    return httpx.post(f"{local.root}{path}", json=body, headers={"api-key": key}, timeout=30)


def test_tokens_are_counted_as_a_generation_counts_them(local: Gateway) -> None:
    """vLLM's tokenizer API: the tokens of a prompt and of messages, and the text of tokens; the only engine needs no name."""
    for asked in (
        {"prompt": "Hello, wörld!"},
        {"messages": FRANCE},
        {"messages": [*FRANCE, {"role": "developer", "content": "."}]},
    ):
        found = ask_tokens(local, "/tokenize", model=MODEL, **asked)
        assert found.status_code == 200, found.text
        tokens = found.json()
        assert (tokens["count"], tokens["max_model_len"], tokens["token_strs"]) == (len(tokens["tokens"]), 8192, None)
        path = "completions" if "prompt" in asked else "chat/completions"
        body = {"model": MODEL, "max_tokens": 1, **asked}
        generated = httpx.post(f"{local.base_url}/{path}", json=body, headers=KEY, timeout=60).json()
        assert generated["usage"]["prompt_tokens"] == tokens["count"]
    tokens = ask_tokens(local, "/tokenize", prompt="Hello, wörld!", return_token_strs=True).json()
    assert tokens["token_strs"][:2] == ["Hello", ","]
    assert ask_tokens(local, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "Hello, wörld!"}
    closed = ask_tokens(local, "/tokenize", messages=FRANCE, add_generation_prompt=False).json()
    assert ask_tokens(local, "/detokenize", tokens=closed["tokens"]).json()["prompt"].endswith("France?<|im_end|>\n")


def test_tokens_have_the_limits_of_generations(local: Gateway) -> None:
    """A key, its models and its rate; a prompt that is surely longer than the context; and each wrong field by its name."""
    assert ask_tokens(local, "/tokenize", key="sk-sw-wrong", prompt="x").status_code == 401
    team = local.admin("POST", "/teams", json={"name": "counting", "requests_per_min": 1})
    key = local.admin("POST", f"/teams/{team['id']}/keys", json={"name": "k"})["plaintext"]
    limited = local.admin("POST", f"/teams/{team['id']}/keys", json={"name": "l", "models": ["other"]})["plaintext"]
    wait_for(lambda: ask_tokens(local, "/tokenize", key=key, prompt="x").status_code == 429)
    other = local.admin("POST", "/teams", json={"name": "elsewhere"})
    limited = local.admin("POST", f"/teams/{other['id']}/keys", json={"name": "l", "models": ["other"]})["plaintext"]
    wait_for(lambda: ask_tokens(local, "/detokenize", key=limited, tokens=[1]).status_code == 403)
    refused: list[tuple[str, dict[str, Any], int, str | None, str]] = [
        ("/tokenize", {"prompt": "x " * 41_000}, 400, "prompt", "context_length_exceeded"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x " * 41_000}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
        ("/detokenize", {"tokens": [1] * 81_921}, 400, "tokens", "context_length_exceeded"),
        ("/tokenize", {}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"messages": [{"role": "system"}]}, 400, "messages[0].content", "missing_required_parameter"),
        ("/tokenize", {"prompt": "x", "messages": FRANCE}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt", "invalid_type"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, 400, "messages[0].role", "invalid_value"),
        ("/tokenize", {"messages": []}, 400, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, 400, "chat_template", "unsupported_parameter"),
        (
            "/tokenize",
            {"messages": FRANCE, "continue_final_message": True},
            400,
            "continue_final_message",
            "unsupported_parameter",
        ),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens", None),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens[0]", None),
        ("/detokenize", {"tokens": ["1"]}, 400, "tokens[0]", "invalid_type"),
        ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
        ("/tokenize", {"model": "none", "prompt": "x"}, 404, "model", "model_not_found"),
        ("/tokenize", {"model": "all-minilm-l6-v2", "prompt": "x"}, 400, "model", "unsupported_feature"),
    ]
    for path, body, status, param, code in refused:
        reply = ask_tokens(local, path, **body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), reply.text
        assert code is None or error["code"] == code, reply.text
    assert httpx.get(f"{local.root}/tokenize").status_code == 405


def test_a_prompt_that_does_not_fit(local: Gateway) -> None:
    """A prompt longer than the model's context is refused as the client's fault."""
    reply = local.chat("word " * 20_000, model=MODEL)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_an_admin_sees_what_the_engine_does(local: Gateway) -> None:
    """What it read, reused and said since its start is on the deployments page's twin, and its memory among the metrics."""
    body = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 9, "cache": {"no-cache": True}}
    for _ in range(2):
        assert httpx.post(f"{local.base_url}/chat/completions", json=body, headers=KEY, timeout=60).status_code == 200

    def engine() -> Any:
        return local.admin("GET", "/deployments")["deployments"][0]["engine"]

    wait_for(lambda: engine()["answer_tokens_total"] >= 16 and engine()["cached_tokens_total"] >= 16)
    assert engine()["prompt_tokens_total"] > engine()["cached_tokens_total"]
    assert 0.0 <= engine()["kv_usage"] < engine()["kv_blocks_total"]
    assert 'sameway_engine_kv_used_ratio{deployment="local"}' in local.observe("/metrics").text


def test_a_client_that_leaves_frees_the_engine(local: Gateway) -> None:
    """The only reader leaves in the middle of a long answer: the engine stops working on it."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a very long story."}], "stream": True}
    headers = {"authorization": f"Bearer {API_KEY}"}
    with httpx.stream("POST", f"{local.base_url}/chat/completions", json=body, headers=headers, timeout=60) as reply:
        next(reply.iter_bytes())

    def running() -> Any:
        return local.admin("GET", "/deployments")["deployments"][0]["running"]

    wait_for(lambda: running() == 0)


def test_the_engine_is_killed(local: Gateway) -> None:
    """Killed in the middle of answers: they end in an honest error, cached answers are still served, readiness says what
    happened, and it comes back."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me another long story."}], "stream": True}
    headers = {"authorization": f"Bearer {API_KEY}"}
    with httpx.stream("POST", f"{local.base_url}/chat/completions", json=body, headers=headers, timeout=60) as reply:
        pieces = reply.iter_text()
        text = next(pieces)
        dead = local.children("local_engine.process.worker")
        assert len(dead) == 1
        dead[0].kill()
        text += "".join(pieces)
    assert "[DONE]" not in text
    assert '"error"' in text
    assert local.chat(FRANCE[0]["content"], model=MODEL, temperature=0).headers["x-sameway-cache"] == "exact"
    wait_for(lambda: "killed by SIGKILL" in local.observe("/readyz").text)
    waiting = local.chat("Is anybody there?", model=MODEL, max_tokens=5)
    assert waiting.status_code in (200, 503)

    def answers() -> bool:
        return local.chat(f"Are you back? {time.time()}", model=MODEL, max_tokens=5).status_code == 200

    wait_for(answers, 60, local.why_not_ready)
    pids = {process.pid for process in local.children("local_engine.process.worker")}
    assert pids
    assert dead[0].pid not in pids
