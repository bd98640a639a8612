"""One request in the words of chats, responses and messages: one request inside, one cached answer; or a 400 with the field.

The corpus and the expected cells are tests/surfaces.py, from which docs/api.md has its table.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from anthropic.types import ModelInfo
from pydantic import BaseModel

from gateway.backends.anthropic.request import to_message
from gateway.backends.base import BackendRejected, BackendRequest, BackendUnfit
from gateway.backends.dialect import dialect_of
from gateway.backends.fitting import fitted
from gateway.backends.local.request import engine_requests
from gateway.backends.managed import ManagedBackend
from gateway.backends.refusals import UpstreamRefusal, refusal
from gateway.deployments.build import describe
from gateway.journey.turn import arrive, read_turn
from gateway.settings import CAPABILITIES, DeploymentSettings
from gateway.wire.types import Chunk, opened
from tests.journey.conftest import OpenWorld
from tests.surfaces import BACKENDS, FEATURES, QUESTION, Feature, Idle, Own, Refused
from tests.world import KEY, TOO_DEEP, Finish, Reply, Tokens, World, deployment

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
_USER = [{"role": "user", "content": QUESTION}]
_ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": _USER, "max_completion_tokens": 50},
    "responses": {"input": QUESTION, "max_output_tokens": 50, "store": False},
    "messages": {"messages": _USER, "max_tokens": 50},
}
_ABLE = {"mock": {"deployments": [deployment("able", capabilities=sorted(CAPABILITIES - {"messages", "responses"}))]}}


async def ask(world: World, surface: str, fields: Any) -> Reply:
    body = {"model": "mock", **_ASKED[surface], **fields}
    return await world.ask(path=PATHS[surface], raw=json.dumps(body).encode())


def said_by(reply: Reply) -> tuple[str, tuple[int, int]]:
    """The text and the tokens of an answer of any surface, whole or streamed."""
    if reply.is_stream:
        data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
        events = [json.loads(one) for one in data]
        if events[-1].get("type") == "response.completed":
            return _of(events[-1]["response"])
        if "choices" in events[0]:
            return reply.content, (0, 0)
        told = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
        usage = next(one["usage"] for one in events if one["type"] == "message_delta")
        return "".join(told), (usage["input_tokens"], usage["output_tokens"])
    return _of(reply.json)


def _of(body: Any) -> tuple[str, tuple[int, int]]:
    usage = body["usage"]
    if "choices" in body:
        return body["choices"][0]["message"]["content"], (usage["prompt_tokens"], usage["completion_tokens"])
    content = body["content"] if "content" in body else body["output"][0]["content"]
    return "".join(part["text"] for part in content), (usage["input_tokens"], usage["output_tokens"])


@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: one.name)
async def test_one_request_is_one_on_all_surfaces(open_a_world: OpenWorld, feature: Feature) -> None:
    """Whichever says it first, the others share its answer; what one cannot say is refused by its name, never left out."""
    world = await open_a_world(models=_ABLE)
    texts, first = set[Any](), True
    for surface in PATHS:
        said = getattr(feature, surface)
        if said is None:
            continue
        calls = world.backends["able"].calls
        if isinstance(said, Idle):
            await ask(world, surface, {})
            first = False
        before = len(calls)
        reply = await ask(world, surface, said.fields if isinstance(said, Refused | Own | Idle) else said)
        if isinstance(said, Refused):
            assert reply.status == 400, reply.text
            named = reply.error.get("param") or reply.error["message"]
            assert said.param in named
            assert len(calls) == before
            continue
        assert reply.status == 200, reply.text
        text, usage = said_by(reply)
        texts.add((text, usage) if usage != (0, 0) else (text, (10, 5)))
        assert reply.cache == ("miss" if first else "exact"), surface
        assert len(calls) == before + first
        first = isinstance(said, Own)
    assert len(texts) <= 1


async def test_a_deployment_with_the_responses_api_gets_as_it_came_what_no_chat_can_say(
    open_a_world: OpenWorld,
) -> None:
    """The table's word for each: a chat, the request with all its fields, or a 400; what is reserved stays so."""
    able = deployment("able", capabilities=sorted(CAPABILITIES - {"messages"}))
    world = await open_a_world(models={"mock": {"deployments": [able]}})
    calls = world.backends["able"].calls
    for feature in FEATURES:
        said = feature.responses
        if said is None:
            assert feature.passing == "–", feature.name
            continue
        fields = said if isinstance(said, dict) else said.fields  # type: ignore[union-attr]
        before = len(calls)
        reply = await ask(world, "responses", {**fields, "instructions": fields.get("instructions", feature.name)})
        sent = calls[before].body if len(calls) > before else {}
        as_chat = "none" if isinstance(said, Idle) else "yes"
        word = "400" if reply.status == 400 else "own" if "input" in sent else as_chat
        assert (reply.status, word) == (400 if word == "400" else 200, feature.passing), (feature.name, reply.text)
        assert bool(sent) is (word != "400")
        if word == "own":
            assert {name: sent[name] for name in fields} == fields


@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: one.name)
def test_each_kind_of_deployment_honours_it_refuses_it_or_is_said_to_ignore_it(feature: Feature) -> None:
    """The table's word for each: what the server gets differs from a plain request, or a 400 says why not."""
    said = feature.chat.fields if isinstance(feature.chat, Own) else feature.chat
    for backend, word in zip(BACKENDS, feature.backends.split(), strict=True):
        if isinstance(said, dict):
            assert _made_of(backend, said) == word, backend
        else:
            assert word == "–"


_MADE = {
    "openai": {"base_url": "http://0.0.0.0/v1", "model": "m"},
    "litellm": {"model": "openai/gpt-4o"},
    "anthropic": {"model": "m"},
    "local": {"engine": "default"},
}


def _made_of(backend: str, fields: dict[str, Any]) -> str:
    facts = describe(DeploymentSettings(backend=backend, **_MADE[backend]))  # type: ignore[arg-type]
    try:
        plain = {"tools": fields["tools"]} if "tool_choice" in fields else {}
        asked = {**_ASKED["chat"], "max_completion_tokens": 2_048}  # Anthropic's API thinks in no less
        sent = [_sent(backend, {**asked, **one}, facts.capabilities) for one in (plain, fields)]
    except BackendRejected:
        return "400"
    if sent[1] is None:
        return "400"
    return "none" if sent[0] == sent[1] and "stream" not in fields else "yes"


class _Litellm:
    """The provider of a model, without the import of seconds."""

    openai_compatible_providers: tuple[str, ...] = ()

    @staticmethod
    def get_llm_provider(model: str) -> tuple[str, str]:
        return model, "openai"

    @staticmethod
    def get_supported_openai_params(**_: str) -> None:
        """All of them."""


def _sent(backend: str, asked: dict[str, Any], capabilities: frozenset[str]) -> Any:
    """What a server gets for a chat; None where routing keeps the request from it."""
    turn = read_turn(msgspec.json.encode({"model": "m", **asked}), {}, arrive("chat"))
    if not turn.demand.needs <= capabilities:
        return None
    body, prefix = opened(turn.body) if "prefill" in capabilities else (turn.body, "")
    request = BackendRequest(
        body=body, is_stream=False, salt=b"", request_id="req_1", ttft_timeout_s=1, idle_timeout_s=1, prefix=prefix
    )
    match backend:
        case "anthropic":
            dialect = dialect_of(backend, "", "claude-sonnet-4-5")
            return to_message(fitted(body, dialect)[0], dialect)
        case "litellm":
            return ManagedBackend("x", model="m", capabilities=capabilities).arguments(request, _Litellm, False)
        case "local":
            return engine_requests(request)
    return body


_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_CALLED = {"type": "tool_use", "id": "c1", "name": "look", "input": {}, **_MARK}


async def test_marks_of_a_prompts_cache_reach_the_deployments_that_keep_them(open_a_world: OpenWorld) -> None:
    """On blocks, tools, calls and results; others get the same request without, and both share the answer."""
    models = {
        "mock": {
            "policy": "cheapest",
            "deployments": [
                deployment("keeps", usd=(0, 0), capabilities=["tools", "cache_control"]),
                deployment("lacks", capabilities=["tools"]),
            ],
        }
    }
    world = await open_a_world(models=models)
    block = {"type": "text", "text": "hello", **_MARK}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "north", **_MARK}
    asked = {
        "system": [block],
        "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {"cache_control": {}}}, **_MARK}],
        "messages": [
            {"role": "user", "content": [block]},
            {"role": "assistant", "content": [block, _CALLED]},
            {"role": "user", "content": [result, block]},
        ],
    }
    assert (await ask(world, "messages", asked)).headers["x-sameway-backend"] == "keeps"
    kept = world.backends["keeps"].calls[0].body
    assert json.dumps(kept).count('"ephemeral"') == json.dumps(asked).count('"ephemeral"') == 7
    assert kept["messages"][0]["content"] == kept["messages"][1]["content"] == [block]
    assert [kept["messages"][3]["cache_control"], kept["tools"][0]["cache_control"]] == [_MARK["cache_control"]] * 2
    world.backends["keeps"].is_down("a test")
    bare = json.loads(json.dumps(asked).replace(f", {json.dumps(_MARK)[1:-1]}", ""))
    assert (await ask(world, "messages", bare)).cache == "exact"
    other = {**asked, "system": [{**block, "text": "another"}]}
    assert (await ask(world, "messages", other)).headers["x-sameway-backend"] == "lacks"
    sent = world.backends["lacks"].calls[0].body
    assert "ephemeral" not in json.dumps(sent)
    assert [one["content"] for one in sent["messages"]] == ["another", "hello", "hello", "north", "hello"]
    assert sent["tools"][0]["function"]["parameters"]["properties"] == {"cache_control": {}}


async def test_a_beginning_of_the_answer_goes_to_a_deployment_that_goes_on_with_it(open_a_world: OpenWorld) -> None:
    """Said as a message or as a chat with `prefix`; without such a deployment a message is refused, and a chat passes."""
    models = {
        "mock": {"deployments": [deployment("goes on", capabilities=["prefill"])]},
        "shut": {"deployments": [deployment("shut")]},
    }
    world = await open_a_world(models=models)
    begun = [*_USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    assert (await ask(world, "messages", {"messages": begun})).status == 200
    call = world.backends["goes on"].calls[0]
    assert (call.prefix, call.body["messages"]) == ("It is", _USER)
    refused = await ask(world, "messages", {"model": "shut", "messages": begun})
    assert (refused.status, "prefill" in refused.error["message"]) == (400, True)
    chat = [*_USER, {"role": "assistant", "content": "It is", "prefix": True}]
    assert (await ask(world, "chat", {"model": "shut", "messages": chat})).status == 200
    assert world.backends["shut"].calls[0].body["messages"] == chat


@pytest.mark.parametrize(
    ("surface", "fields", "param"),
    [
        ("responses", {"text": {"mood": "good"}}, "text.mood"),
        ("responses", {"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ("responses", {"include": ["file_search_call.results", "thoughts"]}, "include[1]"),
        ("messages", {"thinking": {"type": "between_tools"}}, "thinking.type"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "search_result", "content": ["x"]}]}]},
            "messages[0].content[0].content[0]",
        ),
        ("messages", {"messages": [*_USER, {"role": "assistant", "content": [_CALLED]}]}, "messages[1].content"),
    ],
)
async def test_a_part_of_a_field_is_never_left_out(world: World, surface: str, fields: Any, param: str) -> None:
    """A 400 names it."""
    refused = await ask(world, surface, fields)
    assert refused.status == 400
    assert param in (refused.error.get("param") or refused.error["message"])


async def test_a_container_belongs_to_the_team_whose_answer_named_it(open_a_world: OpenWorld) -> None:
    """Another team that names it finds nothing; the team itself goes on there, past the cache."""
    able = deployment("able", capabilities=sorted(CAPABILITIES | {"messages"}), allow_fields=["container"])
    world = await open_a_world(models={"mock": {"deployments": [able]}})
    mine, another = [await world.team(name) for name in ("mine", "others")]
    message = {"type": "message", "id": "msg_1", "content": [], "container": {"id": "container_1"}}
    chat = {"id": "msg_1", "created": 1, "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}
    data, native = json.dumps(chat).encode(), json.dumps(message).encode()
    world.backends["able"].plays(Chunk(data, has_content=True, finish_reasons=("stop",), native=native), Tokens())
    asked = {"model": "mock", "max_tokens": 9, "messages": _USER}
    first = await world.ask(None, path=PATHS["messages"], key=mine.key, **asked)
    assert first.json["container"] == {"id": "container_1"}
    for key, statuses in ((another.key, [404, 404]), (mine.key, [200, 200])):
        replies = [
            await world.ask(None, path=PATHS["messages"], key=key, **asked, container="container_1") for _ in range(2)
        ]
        assert [reply.status for reply in replies] == statuses
    assert len(world.backends["able"].calls) == 3


_GIVEN = {"base_url": "http://0.0.0.0/v1", "passthrough": ["GET /files/*"]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATHS["chat"], {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "ID"}}]}]}),
        (PATHS["responses"], {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "ID"}]}]}),
        (PATHS["responses"], {"input": "x", "tools": [{"type": "file_search", "vector_store_ids": ["other", "ID"]}]}),
        (PATHS["responses"], {"input": "x", "tools": [{"type": "code_interpreter", "container": "ID"}]}),
        (PATHS["messages"], {"max_tokens": 9, "messages": _USER, "container": {"id": "ID"}}),
        *(
            (path, {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "ID"}]}]})
            for path in (PATHS["messages"], "/v1/messages/count_tokens")
        ),
    ],
)  # fmt: skip
async def test_what_a_provider_gave_to_another_team_is_not_there(
    open_a_world: OpenWorld, path: str, fields: dict[str, Any]
) -> None:
    """By no surface, also where its field is written with escapes; the team's own and what no team was given pass."""
    models = {"mock": {"deployments": [{**deployment("able", capabilities=sorted(CAPABILITIES)), **_GIVEN}]}}
    world = await open_a_world(models=models)
    mine, another = [await world.team(name) for name in ("mine", "others")]
    await world.gives(mine, "obj_mine")
    await world.gives(another, "obj_theirs")

    async def refused(id: str, key: str) -> bool:
        raw = json.dumps({"model": "mock", **fields}).replace("ID", id)
        escaped = (
            raw.replace("file", "fil\\u0065").replace("container", "c\\u006fntainer").replace("store", "s\\u0074ore")
        )
        told = [await world.ask(path=path, raw=one.encode(), key=key) for one in (raw, escaped)]
        return {(one.status, "There is no obj_" in one.text) for one in told} == {(404, True)}

    assert await refused("obj_theirs", mine.key)
    assert await refused("obj_mine", another.key)
    assert await refused("obj_mine\\u0000", mine.key)
    assert not await refused("obj_mine", mine.key)
    assert not await refused("obj_unknown", mine.key)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_message_that_no_check_expects_is_refused(open_a_world: OpenWorld, path: str) -> None:
    """With a deployment that takes Anthropic's requests as they come: parts that are no objects, and deep ones."""
    world = await open_a_world(models={"mock": {"deployments": [deployment("able", capabilities=["messages"])]}})
    deep = "[" * TOO_DEEP + "]" * TOO_DEEP
    text = f'{{"type": "text", "text": "x", "odd": {deep}}}'
    for more in (
        '"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [1]}]}]',
        f'"messages": [{{"role": "user", "content": [{text}]}}]',
        f'"context_management": {deep}, "messages": [{{"role": "user", "content": [{{"type": "container_upload"}}]}}]',
    ):
        refused = await world.ask(path=path, raw=f'{{"model": "mock", "max_tokens": 5, {more}}}'.encode())
        assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")


def _tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": "Looks", "input_schema": {"type": "object", "properties": {}}, **more}


def _picture(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def _result(id: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": id,
        "content": [{"type": "text", "text": "Error rate"}, *content],
        **more,
    }


_CALLS = [{"type": "tool_use", "id": id, "name": id, "input": {"cache_control": 1}} for id in ("a", "b")]
_DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
_THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
_WHOLE: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be kind"}, {"type": "text", "text": "Be brief"}],
    "tools": [_tool("a", defer_loading=True), _tool("b", input_examples=[{"cache_control": 1}])],
    "tool_choice": {"type": "any"},
    "messages": [
        {"role": "user", "content": [_DOCUMENT, {"type": "text", "text": QUESTION}, _picture("aGk=")]},
        {"role": "assistant", "content": [_THOUGHT, {"type": "text", "text": "one"}, *_CALLS]},
        {
            "role": "user",
            "content": [_result("a", _picture("aGk="), is_error=True), _result("b"), {"type": "text", "text": "D"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
        {"role": "user", "content": [{"type": "text", "text": "D"}]},
    ],
}


def _others(value: Any) -> Iterator[Any]:
    """`value` with one difference each: a part less, another leaf, a field more, or a block moved behind the next."""
    if isinstance(value, dict):
        yield {**value, "further": 1}
        for name, item in value.items():
            if name != "content":  # no content and an empty one are the same
                yield {key: one for key, one in value.items() if key != name}
            yield from ({**value, name: other} for other in _others(item))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield [*value[:at], *value[at + 1 :]]
            yield [*value[:at], *value[at + 1 : at + 2], item, *value[at + 2 :]]
            yield from ([*value[:at], other, *value[at + 1 :]] for other in _others(item))
    else:
        yield f"{value}b" if isinstance(value, str) else value + 1 if type(value) is int else not value


def _moved(messages: list[Any]) -> Iterator[Any]:
    """A block of any turn, or of a result in it, in another turn or result."""
    for source, target in itertools.permutations(range(len(messages)), 2):
        for at, block in enumerate(messages[source]["content"]):
            moved = copy.deepcopy(messages)
            del moved[source]["content"][at]
            moved[target]["content"].insert(0, block)
            yield moved
    swapped = copy.deepcopy(messages)
    first, second = swapped[2]["content"][:2]
    second["content"].append(first["content"].pop())
    yield swapped


async def test_messages_that_differ_share_no_cached_answer(open_a_world: OpenWorld) -> None:
    """Wherever they do, but in marks of a prompt's cache, also where a chat completion would say the same of both."""
    models = {"mock": {"deployments": [deployment("able", capabilities=sorted(CAPABILITIES))]}}
    world = await open_a_world(models=models)
    bodies = [_WHOLE, *_others(_WHOLE), *({**_WHOLE, "messages": one} for one in _moved(_WHOLE["messages"]))]
    bodies += [{**_WHOLE, "tools": [_tool("a"), {**_WHOLE["tools"][1], "defer_loading": True}]}]
    plain = {**_WHOLE, "tools": [_tool("a", defer_loading=True), _tool("b")]}
    bodies += [plain, *_others(plain), *({**plain, "messages": one} for one in _moved(plain["messages"]))]
    told: dict[str, Any] = {}
    for raw in dict.fromkeys(json.dumps(body, sort_keys=True) for body in bodies):
        world.backends["able"].plays(f"Answer {len(told)}", Finish(), Tokens())
        reply = await ask(world, "messages", json.loads(raw))
        if reply.status == 200:
            assert told.setdefault(said_by(reply)[0], raw) == raw
    assert len(told) > 100
    marked = json.dumps({"model": "mock", **_ASKED["messages"], **plain}).replace(
        '"D"', '"D", "cache_control": {"type": "x"}', 1
    )
    for sent in (marked, marked.replace("cache_", "cache\\u005f")):
        assert (await world.ask(path=PATHS["messages"], raw=sent.encode())).cache == "exact"


async def test_a_picture_stays_with_its_result(open_a_world: OpenWorld) -> None:
    """A chat completion has it in the next message, and the result refers to it."""
    world = await open_a_world(models=_ABLE)
    kept = set()
    for first, second in (("ab", ""), ("a", "b"), ("", "ab")):
        results = [_result("a", *map(_picture, first)), _result("b", *map(_picture, second))]
        fields = {"messages": [*_USER, {"role": "assistant", "content": _CALLS}, {"role": "user", "content": results}]}
        reply = await ask(world, "messages", {**fields, "tools": [_tool("a"), _tool("b")]})
        kept.add((reply.status, reply.cache))
    assert kept == {(200, "miss")}


async def test_a_schema_and_biases_are_no_part_of_the_prompt(open_a_world: OpenWorld) -> None:
    """However long they are, they fill no context."""
    models = {"mock": {"deployments": [deployment("able", capabilities=sorted(CAPABILITIES), context_tokens_max=4000)]}}
    world = await open_a_world(models=models)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"description": "x" * 100_000}}}
    biases = {str(token): 1 for token in range(9_000)}
    for fields in ({"response_format": schema}, {"logit_bias": biases}):
        assert (await ask(world, "chat", fields)).status == 200
    assert (await ask(world, "chat", {"messages": [{"role": "user", "content": "x" * 100_000}]})).status == 400


@pytest.mark.parametrize("depth", [300, 500, 700, 900])
async def test_what_is_nested_too_deeply_is_refused_or_answered(world: World, depth: int) -> None:
    """It is never an error of the gateway's own."""
    deep = json.loads("[" * depth + "]" * depth)
    call = {"type": "tool_use", "id": "a", "name": "a", "input": {"a": deep}}
    for fields in (
        {"messages": [*_USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [_result("a")]}]},
        {"tools": [_tool("a", input_schema={"const": deep})]},
        {"system": [{"type": "text", "text": "x", "further": deep}]},
    ):
        assert (await ask(world, "messages", fields)).status in (200, 400)


async def test_another_deployment_honours_what_the_first_cannot(open_a_world: OpenWorld) -> None:
    """A field that one kind of API lacks is no reason to refuse the request."""
    models = {"mock": {"policy": "cheapest", "deployments": [deployment("first", usd=(0, 0)), deployment("second")]}}
    world = await open_a_world(models=models)
    with pytest.raises(BackendUnfit) as unfit:
        to_message({"messages": _USER, "logit_bias": {"5": 1}})
    world.backends["first"].plays(unfit.value)
    assert (await ask(world, "chat", {"logit_bias": {"5": 1}})).headers["x-sameway-backend"] == "second"
    world.backends["second"].plays(unfit.value)
    refused = await ask(world, "chat", {"logit_bias": {"5": 2}})
    assert (refused.status, refused.error["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("surface", "words"),
    [("chat", "has a context of"), ("responses", "has a context of"), ("messages", "prompt is too long: ")],
)
@pytest.mark.parametrize("has_refused", [False, True])
async def test_a_prompt_beyond_the_context_is_told_in_the_words_of_each_surface(
    open_a_world: OpenWorld, surface: str, words: str, has_refused: bool
) -> None:
    """With the limit, by the gateway or by the server: an agent knows that it must compact."""
    able = deployment("able", **({} if has_refused else {"context_tokens_max": 50}))
    world = await open_a_world(models={"mock": {"deployments": [able]}})
    if has_refused:
        body = b'{"error": {"message": "This model has a context of 50 tokens", "code": "context_length_exceeded"}}'
        world.backends["able"].plays(refusal(UpstreamRefusal(400, body)))
    told = "x " * 2_000
    asked = {"input": told} if surface == "responses" else {"messages": [{"role": "user", "content": told}]}
    reply = await ask(world, surface, asked)
    assert reply.status == 400
    assert words in reply.error["message"]
    assert "50 tokens" in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"
    assert surface == "messages" or reply.error["code"] == "context_length_exceeded"


class _Page(BaseModel):
    """A page of Anthropic's list."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def test_models_have_anthropics_shape_for_its_clients(world: World) -> None:
    """In pages of a size, forwards and backwards, each once; an unknown model is an error of that shape."""
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    names = [one.id for one in (await world.client().models.list()).data]
    async with httpx.AsyncClient(transport=world.front(), base_url="http://world/v1", headers=headers) as http:

        async def page(**query: Any) -> _Page:
            return _Page.model_validate((await http.get("/models", params=query)).json())

        found, last = list[str](), await page(limit=7)
        while last.has_more:
            found += [one.id for one in last.data]
            last = await page(limit=7, after_id=last.last_id)
        assert found + [one.id for one in last.data] == names
        before = await page(before_id=names[9], limit=4)
        assert ([one.id for one in before.data], before.has_more) == (names[5:9], True)
        assert (before.first_id, before.last_id) == (names[5], names[8])
        one = ModelInfo.model_validate((await http.get(f"/models/{names[0]}")).json())
        assert (one.type, one.display_name, one.created_at.timestamp()) == ("model", names[0], 0)
        for path, kind in (
            ("/models/unknown", "not_found_error"),
            ("/models?limit=0", "invalid_request_error"),
            ("/models?limit=1001", "invalid_request_error"),
            ("/models?after_id=unknown", "invalid_request_error"),
        ):
            assert (await http.get(path)).json()["error"]["type"] == kind
