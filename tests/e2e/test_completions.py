"""`/v1/completions` through the official client: an upstream that is compared with directly, and a local engine with transformers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, OpenAI
from tokenizers import Tokenizer

from tests.e2e.gateway import API_KEY, WITHOUT_EMBEDDER, Gateway, run_gateway, wait_for
from tests.e2e.upstream import Upstream
from tests.engine.checkpoints import TEXT, make_checkpoint, reference

_fresh = itertools.count(1)

# a prompt as a function of a number that nobody has asked about
PROMPTS: dict[str, Any] = {
    "text": lambda number: f"The number {number}",
    "texts": lambda number: [f"The number {number}", "and so on"],
    "ids": lambda number: [number, 5, 6],
    "lists of ids": lambda number: [[number, 5], [6]],
}


def gist(completion: Any) -> Any:
    """What must be equal however an answer was delivered."""
    choices = [choice.model_dump() for choice in sorted(completion.choices, key=lambda choice: choice.index)]
    return {"choices": choices, "usage": completion.usage.model_dump(exclude_none=True)}


def folded(chunks: list[Any]) -> Any:
    """A stream's chunks as a client would put them together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            piece = choice.model_dump()
            one = choices.setdefault(choice.index, {**piece, "text": "", "logprobs": None})
            one["text"] += piece["text"]
            one["finish_reason"] = piece["finish_reason"] or one["finish_reason"]
            if piece["logprobs"] is not None:
                told = one["logprobs"] = one["logprobs"] or {name: [] for name in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    told[name] = told[name] + values
    usage = chunks[-1].usage.model_dump(exclude_none=True)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def streamed(client: OpenAI, prompt: Any, model: str = "mock", **more: Any) -> tuple[Any, str]:
    """A streamed answer folded, and what the cache said."""
    raw = client.completions.with_raw_response.create(
        model=model, prompt=prompt, stream=True, stream_options={"include_usage": True}, **more
    )
    return folded(list(raw.parse())), raw.headers["x-sameway-cache"]


def whole(client: OpenAI, prompt: Any, model: str = "mock", **more: Any) -> tuple[Any, str]:
    """A whole answer, and what the cache said."""
    raw = client.completions.with_raw_response.create(model=model, prompt=prompt, **more)
    return gist(raw.parse()), raw.headers["x-sameway-cache"]


@pytest.mark.parametrize("form", PROMPTS)
@pytest.mark.parametrize("first", [streamed, whole], ids=["recorded streamed", "recorded whole"])
def test_replays_equal_what_was_recorded(client: OpenAI, upstream: Upstream, first: Any, form: str) -> None:
    """However a prompt is given, recorded as a stream or whole, replayed as either: all choices in order, text, echo, log
    probabilities, finishes and usage are what the server itself says."""
    prompt, more = PROMPTS[form](next(_fresh)), {"n": 2, "echo": True, "logprobs": 2, "max_tokens": 9}
    recorded, kind = first(client, prompt, **more)
    assert kind == "miss"
    sent = upstream.seen().requests[-1]
    assert sent["headers"][":path"] == "/v1/completions"
    assert sent["body"]["prompt"] == prompt
    direct = OpenAI(base_url=upstream.url, api_key="none")
    expected = gist(direct.completions.create(model="mock", prompt=prompt, **more))
    assert [choice["index"] for choice in expected["choices"]] == list(range(4 if "s" in form[4:] else 2))
    assert recorded == expected
    for again in (streamed, whole):
        replayed, kind = again(client, prompt, **more)
        assert kind == "exact"
        assert replayed == expected


async def test_async_client(gateway: Gateway) -> None:
    """The async client gets the same answer streamed and whole, side by side."""
    async with AsyncOpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=0) as client:
        prompt = PROMPTS["text"](next(_fresh))

        async def text_of_stream() -> str:
            stream = await client.completions.create(model="mock", prompt=prompt, stream=True)
            return "".join([choice.text async for chunk in stream for choice in chunk.choices])

        text, answer = await asyncio.gather(text_of_stream(), client.completions.create(model="mock", prompt=prompt))
        assert text == answer.choices[0].text


def test_the_length_is_openai_s_and_what_has_it_is_whole(gateway: Gateway, client: OpenAI, upstream: Upstream) -> None:
    """Without `max_tokens` a deployment is asked for 16, and an answer that was cut there is stored, also under that number; the
    longest answer is in the hold, so it settles."""
    prompt = " ".join(["word"] * 40) + str(next(_fresh))
    first, kind = whole(client, prompt)
    assert (first["choices"][0]["finish_reason"], kind) == ("length", "miss")
    assert upstream.seen().requests[-1]["body"]["max_tokens"] == 16
    assert whole(client, prompt, max_tokens=16) == (first, "exact")
    assert whole(client, prompt, max_tokens=15)[1] == "miss"

    def is_recorded() -> bool:
        found = [
            r for r in gateway.records() if r.get("route") == "text_completion" and r.get("completion_tokens") == 16
        ]
        return any(r.get("store") == "stored" and r["cost_microusd"] > 0 for r in found)

    wait_for(is_recorded)


def test_a_text_is_never_found_by_meaning(gateway: Gateway, client: OpenAI) -> None:
    """What follows a text depends on its very words: a paraphrase is a miss, with its reason."""
    assert whole(client, "What is the capital of Finland?")[1] == "miss"
    assert whole(client, "What's the capital of Finland?")[1] == "miss"
    assert gateway.chat("What is the capital of Finland?").headers["x-sameway-cache"] == "miss"
    wait_for(
        lambda: any(
            r.get("route") == "text_completion" and r.get("miss_reason") == "not_eligible" for r in gateway.records()
        )
    )


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_type"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
        ({"prompt": ["a"] * 2049}, "prompt", "invalid_value"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "invalid_type"),
        ({"prompt": "a", "logprobs": 6}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_type"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of", "invalid_value"),
        ({}, "prompt", "missing_required_parameter"),
    ],
)
def test_what_is_wrong_is_named(gateway: Gateway, body: dict[str, Any], param: str, code: str) -> None:
    """A field that does not fit is a 400 in OpenAI's shape that says which."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    reply = httpx.post(f"{gateway.base_url}/completions", json={"model": "mock", **body}, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)


def test_who_can_not_is_not_asked(client: OpenAI, upstream: Upstream) -> None:
    """A deployment that does not offer completions gets none, and the refusal says so; a prompt too long for one names the field."""
    with pytest.raises(
        BadRequestError, match="does not offer completions: GET /v1/models says which models do"
    ) as refused:
        client.completions.create(model="limited", prompt="a")
    assert (refused.value.param, refused.value.code) == ("model", "unsupported_feature")
    with pytest.raises(BadRequestError, match="context") as refused:
        client.completions.create(model="narrow", prompt="word " * 200)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    short = [f"word {number}" for number in range(30)]  # each has the context to itself
    assert len(client.completions.create(model="narrow", prompt=short).choices) == 30
    assert upstream.seen().generations == 1


def test_another_deployment_takes_over(client: OpenAI, upstream: Upstream) -> None:
    """Failover is a chat's. What servers refuse to stream is asked for whole, though a stream would tell sooner of a failure."""
    for more in ({}, {"best_of": 2}):
        answer = client.completions.create(model="flaky", prompt=f"The number {next(_fresh)}", **more)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "stop"
        assert upstream.seen().requests[-1]["body"].get("stream", False) is not bool(more)


def test_a_broken_stream_is_not_shown_as_finished(gateway: Gateway) -> None:
    """A server that goes away in the middle: an error event and no `[DONE]`; of a whole, a 502."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    body = {"model": "cut-three", "prompt": f"The number {next(_fresh)}", "stream": True}
    text = httpx.post(f"{gateway.base_url}/completions", json=body, headers=headers).text
    assert '"text"' in text
    assert '"error"' in text
    assert "[DONE]" not in text
    reply = httpx.post(f"{gateway.base_url}/completions", json={**body, "stream": False}, headers=headers)
    assert reply.status_code == 502


# -- the local engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@pytest.fixture(scope="module")
def local(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """The official client of a gateway with a random checkpoint in its local engine."""
    config = {
        "models": {"tiny": {"deployments": [{"name": "tiny", "backend": "local", "engine": "tiny"}]}},
        "engines": {"tiny": {"model": str(checkpoint), "dtype": "float32", "threads": 1}},
        **WITHOUT_EMBEDDER,
    }
    with run_gateway(tmp_path_factory.mktemp("tiny"), config) as gateway:
        gateway.wait_ready()
        with OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=0, timeout=60) as made:
            yield made


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("form", ["ids", "texts"])
def test_a_harness_scores_texts_as_transformers_does(
    local: OpenAI, checkpoint: Path, max_tokens: int, form: str
) -> None:
    """As lm-evaluation-harness asks (echo, logprobs, one token or none, prompts in batches, as ids or texts): each prompt token's
    log probability is the model's own, the likeliest is beside it, and offsets are where tokens stand in the text."""
    tokenizer, model = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), reference(checkpoint)
    texts = [f"{TEXT[start : start + 30]} {form} {max_tokens}" for start in (0, 40, 95)]  # the last: 東京 and an emoji
    batch = [tokenizer.encode(text).ids for text in texts]
    prompt: Any = batch if form == "ids" else texts
    made = local.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1234
    )
    assert made.usage is not None
    assert made.usage.prompt_tokens == sum(map(len, batch))
    assert made.usage.completion_tokens == max_tokens * len(batch)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    for choice, ids, text in zip(made.choices, batch, texts, strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert choice.text.startswith(text)
        told = choice.logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert told.text_offset is not None
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(ids) + max_tokens
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        for place, id in enumerate(ids[1:], 1):
            own, top = told.token_logprobs[place], told.top_logprobs[place]
            assert own == pytest.approx(float(rows[place - 1, id]), abs=1e-4)
            assert max(top.values()) == pytest.approx(float(rows[place - 1].max()), abs=1e-4)
            assert (own == max(top.values())) is (int(rows[place - 1].argmax()) == id)
            assert top[told.tokens[place]] == own
        for offset, token in zip(told.text_offset, told.tokens, strict=True):
            assert token.startswith("bytes:") or choice.text.startswith(token, offset)
        if max_tokens:
            assert told.token_logprobs[-1] == pytest.approx(float(rows[-1].max()), abs=1e-4)
        else:
            assert (choice.text, choice.finish_reason) == (text, "length")


def test_every_prompt_goes_on_by_itself(local: OpenAI) -> None:
    """Many prompts with several choices each: indexed prompt by prompt, each what it is alone, streamed and whole; of `best_of`
    the likeliest are given and all are charged."""
    prompts: Any = [[number, 40 + number, 7] for number in range(3, 73)]
    made = local.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in made.choices] == list(range(140))
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (210, 560)
    alone = local.completions.create(
        model="tiny", prompt=prompts[66], max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert alone.choices[0].text == made.choices[132].text == made.choices[133].text
    sampled: Any = {
        "max_tokens": 6,
        "seed": 5,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True, "cache": {"no-cache": True}},
    }
    stream, _ = streamed(local, prompts[:3], "tiny", n=2, **sampled)
    assert stream == whole(local, prompts[:3], "tiny", n=2, **sampled)[0]
    best = local.completions.create(model="tiny", prompt=prompts[:3], best_of=4, **sampled)
    assert best.usage is not None
    assert (len(best.choices), best.usage.completion_tokens) == (3, 72)
    all_of = local.completions.create(model="tiny", prompt=prompts[0], n=4, **sampled)
    means = [sum(choice.logprobs.token_logprobs or ()) for choice in all_of.choices if choice.logprobs]  # type: ignore[arg-type]
    assert best.choices[0].text == all_of.choices[means.index(max(means))].text


def test_the_engine_s_own_parameters(local: OpenAI) -> None:
    """vLLM's names reach the engine from a chat and from a completion: both are held to them."""
    exact: Any = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.3, "min_tokens": 5, "stop_token_ids": [9]}
    body: Any = {**exact, "ignore_eos": True, "prompt_logprobs": 2}
    for _ in range(2):  # generated, then replayed
        chat = local.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=6, extra_body=body
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens >= 5
        assert chat.model_extra is not None
        said = chat.model_extra["prompt_logprobs"]
        assert len(said) == chat.usage.prompt_tokens
        text = local.completions.create(model="tiny", prompt=[7, 8, 9], max_tokens=6, extra_body=body)
        assert text.choices[0].model_extra is not None
        said = text.choices[0].model_extra["prompt_logprobs"]
        assert (said[0], len(said)) == (None, 3)
        assert {entry["rank"] for entry in said[1].values()} >= {1, 2}
        assert set(said[1]["8"]) == {"logprob", "rank", "decoded_token"}
    for field, value in (("top_k", "x"), ("min_p", 7), ("repetition_penalty", 0), ("prompt_logprobs", 99)):
        with pytest.raises(BadRequestError) as refused:
            local.completions.create(model="tiny", prompt="a", extra_body={field: value})
        assert refused.value.param == field
    for prompt, why in (("", "empty"), ([100_000], "from 0 to"), ([5] * 200, "context")):
        with pytest.raises(BadRequestError, match=why) as refused:
            local.completions.create(model="tiny", prompt=prompt)  # type: ignore[arg-type]
        assert refused.value.param == "prompt"
    with pytest.raises(BadRequestError, match="does not offer suffix") as refused:
        local.completions.create(model="tiny", prompt="a", suffix="b")
    assert refused.value.param == "suffix"
