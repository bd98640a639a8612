"""The local engine as a backend: a scripted engine on a real socket for every turn it can take, and a real one once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.backends.base import (
    BackendBroken,
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendRequest,
    BackendTimeout,
    BackendTooLong,
    BackendUnavailable,
    BackendUnfit,
)
from gateway.backends.local.backend import LocalBackend
from gateway.backends.local.request import engine_requests
from gateway.wire.chunks import read
from gateway.wire.fold import fold
from gateway.wire.types import COMPLETION, Chunk
from ipc import IncomingCall, RpcServer
from local_engine import (
    EngineFailed,
    EngineLoad,
    EngineUsage,
    GenerateRequest,
    Grammar,
    InvalidRequest,
    ModelInfo,
    Output,
    TokenLogprob,
)
from local_engine.messages import (
    WIRE,
    CallPart,
    EngineEnded,
    EngineError,
    EngineRequest,
    EngineState,
    write_ended,
)
from policies import Usage
from tests.backends.conftest import ask, collect, collect_into
from tests.engine.checkpoints import make_checkpoint
from tests.engine.workers import engine_argv
from tests.rpc import StandIn

INFO = ModelInfo(
    name="tiny", architecture="llama", context_tokens=64, vocabulary_size=320, parameters=1, dtype="float32",
    device="cpu", weights_size_bytes=1, kv_size_bytes=1, has_chat_template=True,
)  # fmt: skip
READY = EngineLoad(
    is_ready=True,
    progress=1.0,
    stage="ready",
    running=2,
    waiting=3,
    prefill_tokens_per_s=1000.0,
    decode_ms_per_token=10.0,
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
Script = Callable[[GenerateRequest], Sequence[Output | EngineError]]


def _schema(is_strict: bool) -> dict[str, Any]:
    inner = {"name": "x", "strict": is_strict, "schema": {"type": "integer"}}
    return {"type": "json_schema", "json_schema": inner}


class ScriptedEngine(StandIn):
    """Answers each generation by its script."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            RpcServer(
                WIRE,
                state=lambda: EngineState(self.load, INFO if self.load.is_ready else None),
                on_call=self._play,
                on_cancel=lambda call: self.aborted.set(),
            )
        )
        self.path = folder / "engine.sock"
        self.script: Script = lambda request: []
        self.requests: list[GenerateRequest] = []
        self.aborted = asyncio.Event()
        self.load = READY

    def _play(self, call: IncomingCall[EngineRequest]) -> None:
        assert isinstance(call.body, GenerateRequest)
        self.requests.append(call.body)
        for reply in self.script(call.body):
            if isinstance(reply, EngineError):
                call.fail(reply)
            else:
                call.reply(reply, is_last=reply.usage is not None)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(tmp_path)
    await engine.start(engine.path)
    yield engine
    await engine.stop()


@pytest.fixture
async def local(engine: ScriptedEngine) -> AsyncIterator[LocalBackend]:
    backend = make_local(engine.path)
    await backend.start()
    await backend.engine.wait_ready()
    yield backend
    await backend.aclose()


def make_local(path: Path) -> LocalBackend:
    return LocalBackend(
        "local", socket_path=path, model="alias", capabilities=frozenset(), wall_clock=lambda: 1_700_000_000.5
    )


def told(*outputs: Output, usage: EngineUsage | None = None) -> list[Output]:
    """One reply a step, the last with the usage."""
    return [*outputs[:-1], msgspec.structs.replace(outputs[-1], usage=usage)]


USAGE = EngineUsage(prompt_tokens=9, completion_tokens=3, cached_tokens=4)


async def test_an_answer_has_the_shape_of_openais(engine: ScriptedEngine, local: LocalBackend) -> None:
    """Role first, then text, the finish, and usage alone at the end; the official client's types accept each chunk."""
    engine.script = lambda request: told(
        Output(text="Hi "), Output(text='"é"\n'), Output(finish_reason="stop"), usage=USAGE
    )
    chunks = await collect(local.stream(ask()))
    parsed = [ChatCompletionChunk.model_validate_json(chunk.data) for chunk in chunks]
    assert [c.choices[0].delta.content for c in parsed[:-1]] == ["", "Hi ", '"é"\n', None]
    assert parsed[0].choices[0].delta.role == "assistant"
    assert parsed[-2].choices[0].finish_reason == "stop"
    assert parsed[-1].choices == []
    assert {(c.id, c.model, c.created, c.object) for c in parsed} == {
        ("chatcmpl-req-1", "alias", 1_700_000_000, "chat.completion.chunk")
    }
    assert chunks[-1].usage == Usage(9, 3, 4)
    assert [read(chunk.data) for chunk in chunks] == chunks
    whole = ChatCompletion.model_validate_json(fold(chunks))
    assert whole.choices[0].message.content == 'Hi "é"\n'
    assert whole.usage is not None
    assert whole.usage.total_tokens == 12


async def test_choices_and_log_probabilities(engine: ScriptedEngine, local: LocalBackend) -> None:
    """Each choice has its role and finish; log probabilities carry exact bytes, and never an infinity."""
    never = TokenLogprob(7, "�", b"\xf0", float("-inf"))
    token = TokenLogprob(5, "a", b"a", -0.5, top=(TokenLogprob(5, "a", b"a", -0.5), never))
    engine.script = lambda request: told(
        Output(index=1, text="a", logprobs=(token,)),
        Output(index=0, text="b", finish_reason="length"),
        Output(index=1, finish_reason="stop"),
        usage=USAGE,
    )
    chunks = await collect(local.stream(ask(n=2, logprobs=True, top_logprobs=2)))
    whole = ChatCompletion.model_validate_json(fold(chunks))
    assert [(c.message.content, c.finish_reason) for c in whole.choices] == [("b", "length"), ("a", "stop")]
    assert whole.choices[1].logprobs is not None
    [entry] = whole.choices[1].logprobs.content or []
    assert (entry.token, entry.bytes, entry.logprob) == ("a", [97], -0.5)
    assert [(t.token, t.bytes, t.logprob) for t in entry.top_logprobs] == [("a", [97], -0.5), ("�", [240], -9999.0)]
    assert engine.requests[0].n == 2
    assert engine.requests[0].sampling.logprobs == 2


def spelled(raw: bytes, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(raw[0] if raw else 0, raw.decode(errors="replace"), raw, logprob)


def of_completion(prompt: Any, **body: Any) -> BackendRequest:
    body = {"model": "alias", "prompt": prompt, "max_tokens": 16, **body}
    return BackendRequest(
        body=body,
        is_stream=True,
        salt=b"salt",
        request_id="req-1",
        ttft_timeout_s=5.0,
        idle_timeout_s=5.0,
        kind=COMPLETION,
    )


async def test_tokens_stand_where_their_text_does(engine: ScriptedEngine, local: LocalBackend) -> None:
    """In an echo what opens the prompt and a first space that the text lacks move nothing; a token whose text came in two pieces
    neither; the token that ended the answer is told, and what is part of a character is spelled as OpenAI does."""
    prompt = (spelled(b"<s>", 0.0), spelled(b" caf"), spelled("é".encode()[:1]), spelled("é".encode()[1:]))
    said = [
        Output(text="", prompt_logprobs=prompt),
        Output(text=" go", token_ids=(1,), logprobs=(spelled(b" go\n"),)),
        Output(text="\nto", token_ids=(2,), logprobs=(spelled(b"to"),)),
        Output(text="", stop_token=spelled(b"</s>", -1.5), finish_reason="stop"),
    ]
    engine.script = lambda request: told(*said, usage=EngineUsage(prompt_tokens=4, completion_tokens=3))
    chunks = await collect(local.stream(of_completion("café", echo=True, logprobs=1)))
    (choice,) = json.loads(fold(chunks))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("café go\nto", "stop")
    expected = ["<s>", " caf", "bytes:\\xc3", "bytes:\\xa9", " go\n", "to", "</s>"]
    assert choice["logprobs"]["tokens"] == expected
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 4, 4, 8, 10]
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * 5, -1.5]
    asked = engine.requests[0]
    assert (asked.prompt, asked.sampling.logprobs, asked.sampling.prompt_logprobs) == ("café", 1, 1)


def test_what_a_completion_asks_of_the_engine() -> None:
    """A request for each prompt, in their order; an echo of ids needs their spelling; of no tokens one must be generated."""
    requests = engine_requests(of_completion([[1, 2], [3]], echo=True, max_tokens=0, n=2, best_of=3))
    assert [(one.prompt, one.prompt_token_ids, one.n, one.best_of) for one in requests] == [
        (None, [1, 2], 2, 3),
        (None, [3], 2, 3),
    ]
    assert {(one.sampling.max_tokens, one.sampling.logprobs, one.sampling.prompt_logprobs) for one in requests} == {
        (1, None, 0)
    }
    (plain,) = engine_requests(of_completion("a", echo=True, prompt_logprobs=None))
    assert (plain.prompt, plain.sampling.prompt_logprobs) == ("a", None)
    with pytest.raises(BackendRejected) as caught:
        engine_requests(of_completion("a", suffix="b"))
    assert json.loads(caught.value.body or b"")["error"]["param"] == "suffix"


def request_of(**body: Any) -> GenerateRequest:
    (asked,) = engine_requests(ask(**body))
    return asked


def test_work_that_can_wait_goes_last() -> None:
    """OpenAI's flex tier stands behind everybody else's requests in the engine's queue; vLLM's `priority` says it in numbers."""
    assert [request_of(service_tier=tier).priority for tier in (None, "auto", "flex")] == [0, 0, 1]
    assert [request_of(priority=number, service_tier="flex").priority for number in (None, -3, 7)] == [1, -3, 7]


def test_a_client_s_salt_divides_its_team_s_blocks() -> None:
    """vLLM's `cache_salt` comes behind the partition, which it cannot leave."""
    assert [request_of(cache_salt=salt).salt for salt in (None, "", "mine")] == [b"salt", b"salt", b"saltmine"]


def test_a_predicted_answer_is_verified() -> None:
    """OpenAI's `prediction`, a text or its parts, is the engine's reference, unless the cache has a nearer one; it is bounded."""
    parts = [{"type": "text", "text": "North"}, {"type": "text", "text": "."}]
    for content in ("North.", parts):
        assert request_of(prediction={"type": "content", "content": content}).reference == "North."
    long = {"type": "content", "content": "x" * 1_000_000}
    assert 1_000 < len(request_of(prediction=long).reference or "") < 100_000
    (near,) = engine_requests(msgspec.structs.replace(ask(prediction=long), draft="South."))
    assert near.reference == "South."
    assert request_of(prediction=None).reference is None


def test_parameters_arrive_under_the_engines_names() -> None:
    """Each field of a request is mapped, absent ones are the engine's defaults, and the partition is the salt."""
    request = request_of(
        temperature=0, top_p=0, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1, frequency_penalty=1.5,
        logit_bias={"50": -100, "7": 3.5}, seed=-(2**70), stop="END", max_tokens=3, max_completion_tokens=5, n=4, user="u",
    )  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.0, 0, 0.1)
    assert 0 < sampling.top_p < 1e-3
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, -1.0, 1.5)
    assert sampling.logit_bias == {50: -100.0, 7: 3.5}
    assert sampling.seed is not None
    assert 0 <= sampling.seed < 2**63
    assert (sampling.stop, sampling.max_tokens, request.n, request.salt) == (("END",), 5, 4, b"salt")
    assert sampling.logprobs is None
    assert request_of(stop=["a", "b"]).sampling.stop == ("a", "b")
    assert request_of(logprobs=True).sampling.logprobs == 0
    assert request_of().sampling == type(sampling)()
    sampling.validate()


def test_conversations_become_roles_and_texts() -> None:
    """Developers are the system, parts are joined, calls of tools and their results stay what they are."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    request = request_of(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
        ]
    )
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}'),
        ({"response_format": _schema(True)}, "json", '{"type":"integer"}'),
        ({"response_format": _schema(False)}, "json", '{"type":"integer"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json", '{"type":"object"}'),
        ({"guided_json": {"type": "null"}}, "json", '{"type":"null"}'),
        ({"guided_json": '{"type": "null"}'}, "json", '{"type": "null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["é", "b"]}, "choice", '["é","b"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json", '{"type":"null"}'),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type":"object"}'),
        ({"structured_outputs": {"choice": ["a"], "json_object": False, "regex": None}}, "choice", '["a"]'),
    ],
)
def test_the_form_of_an_answer_reaches_the_engine(body: dict[str, Any], kind: str, text: str) -> None:
    """OpenAI's formats, strict and not, and vLLM's fields of both generations, in chats and completions."""
    for request in (ask(**body), msgspec.structs.replace(ask(prompt="x", **body), kind=COMPLETION)):
        assert [one.grammar for one in engine_requests(request)] == [Grammar(kind, text)]


async def test_a_schema_that_is_not_held_may_go_to_another_deployment(
    engine: ScriptedEngine, local: LocalBackend
) -> None:
    """The engine's refusal is a 400 that names the field, of the kind that lets others try."""
    why = InvalidRequest("the schema cannot be held: not (#/not)", param="grammar")
    engine.script = lambda request: [why]
    for field, body in (
        ("response_format", {"response_format": _schema(True)}),
        ("guided_regex", {"guided_regex": "a+"}),
        ("structured_outputs.json", {"structured_outputs": {"json": {}}}),
        ("tools", {"tools": [WEATHER], "tool_choice": "required"}),
    ):
        with pytest.raises(BackendUnfit) as caught:
            await collect(local.stream(ask(**body)))
        error = json.loads(caught.value.body or b"")["error"]
        assert (caught.value.status, error["param"], error["code"]) == (400, field, "unsupported_grammar")
        assert "#/not" in error["message"]


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({}, ("", 0)),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ("", 1)),
        ({"tool_choice": "required"}, ("*", 0)),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, ("weather", 1)),
    ],
)
def test_the_choice_of_a_tool_reaches_the_engine(body: dict[str, Any], asked: tuple[str, int]) -> None:
    """Any, one, or as the model likes; with none the engine gets no tools."""
    request = request_of(tools=[WEATHER], **body)
    assert (request.tool_choice, request.calls_max) == asked
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["weather"]
    assert request_of(tools=[WEATHER], tool_choice="none").tools is None


@pytest.mark.parametrize("is_stream", [True, False])
async def test_parts_of_an_answer_are_openais(engine: ScriptedEngine, local: LocalBackend, is_stream: bool) -> None:
    """Thinking is `reasoning_content`, calls are `tool_calls`, name first, each with an id of its own, and end as such."""
    said = (
        {"reasoning": "It is "}, {"reasoning": "raining."}, {"text": "I look."},
        {"calls": (CallPart(0, "weather"), CallPart(0, "", '{"city"'))}, {"calls": (CallPart(0, "", ': "x"}'),)},
        {"calls": (CallPart(1, "weather"), CallPart(1, "", "{}"))}, {"finish_reason": "stop"},
    )  # fmt: skip
    usage = EngineUsage(prompt_tokens=3, completion_tokens=9, reasoning_tokens=4)
    engine.script = lambda request: told(*(Output(token_ids=(1,), **one) for one in said), usage=usage)
    chunks = await collect(local.stream(ask(is_stream=is_stream, tools=[WEATHER])))
    parts = [ChatCompletionChunk.model_validate_json(chunk.data).choices for chunk in chunks]
    names = [call.function.name for choices in parts for one in choices for call in one.delta.tool_calls or ()]  # type: ignore[union-attr]
    assert names == ["weather", None, None, "weather", None]
    (choice,) = (whole := json.loads(fold(chunks)))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is raining.", "I look.")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "x"}', "{}"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"guided_json": "{}", "response_format": {"type": "json_object"}}, "guided_json"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"top_k": "many"}, "top_k"),
        ({"logit_bias": {"no number": 1}}, None),
        ({"min_p": [1]}, "min_p"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"prediction": {"type": "content", "content": 1}}, "prediction.content"),
    ],
)
async def test_what_the_engine_cannot_do_is_refused(
    engine: ScriptedEngine, local: LocalBackend, body: dict[str, Any], param: str | None
) -> None:
    """Clearly, as the client's 400, and without asking the engine."""
    with pytest.raises(BackendRejected) as caught:
        await collect(local.stream(ask(**body)))
    assert caught.value.status == 400
    error = json.loads(caught.value.body or b"")["error"]
    if param:
        assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize(
    ("kind", "expected", "code"),
    [
        ("PromptTooLong", BackendTooLong, "context_length_exceeded"),
        ("InvalidRequest", BackendRejected, "invalid_value"),
        ("Overloaded", BackendOverloaded, None),
        ("EngineFailed", BackendUnavailable, None),
        ("EngineLoading", BackendUnavailable, None),
        ("EngineUnavailable", BackendUnavailable, None),
    ],
)
async def test_the_engines_errors_have_their_place(
    engine: ScriptedEngine, local: LocalBackend, kind: str, expected: type[BackendError], code: str | None
) -> None:
    """Each error of the engine is one of the seam's; the client's own faults say so in OpenAI's shape."""
    facts = {"param": "seed", "prompt_tokens": 99, "context_tokens": 64, "is_death": False}
    (error,) = [error.__new__(error, "words") for error in WIRE.errors if error.__name__ == kind]
    vars(error).update(facts)
    engine.script = lambda request: [error]
    with pytest.raises(BackendError) as caught:
        await collect(local.stream(ask()))
    assert type(caught.value) is expected
    if code is not None:
        assert json.loads(caught.value.body or b"")["error"]["code"] == code
    if kind == "PromptTooLong":
        assert "64 tokens" in caught.value.message
        assert "99 tokens" in caught.value.message


@pytest.mark.parametrize("end", ["failed", "abort", "gone", "silent"])
async def test_a_broken_answer_is_never_a_finished_one(engine: ScriptedEngine, local: LocalBackend, end: str) -> None:
    """After its first piece an answer that fails, is given up, loses its engine or falls silent is an error."""

    def script(request: GenerateRequest) -> Sequence[Output | EngineError]:
        ends: dict[str, Sequence[Output | EngineError]] = {
            "failed": [EngineFailed("out of memory")],
            "abort": told(Output(finish_reason="abort"), usage=USAGE),
        }
        if end == "gone":
            asyncio.get_running_loop().call_later(0.05, engine.die)
        return [*told(Output(text="half")), *ends.get(end, [])]

    engine.script = script
    seen: list[Chunk] = []
    with pytest.raises(BackendTimeout if end == "silent" else BackendBroken):
        await collect_into(seen, local.stream(ask(idle_s=0.2)))
    assert [chunk.has_content for chunk in seen] == [False, True]
    if end == "silent":
        await asyncio.wait_for(engine.aborted.wait(), 30)


async def test_leaving_aborts_in_the_engine(engine: ScriptedEngine, local: LocalBackend) -> None:
    """In the middle, while waiting, by the first chunk's time-out; never where nothing was asked or all is told."""
    engine.script = lambda request: told(Output(text="half"))
    stream = local.stream(ask())
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(engine.aborted.wait(), 30)
    with pytest.raises(BackendBroken):
        await anext(stream)

    engine.aborted.clear()
    engine.script = lambda request: []
    stream = local.stream(ask())
    reader = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.05)
    await stream.aclose()
    with pytest.raises(BackendBroken):
        await reader
    await asyncio.wait_for(engine.aborted.wait(), 30)

    engine.aborted.clear()
    with pytest.raises(BackendTimeout):
        await collect(local.stream(ask(ttft_s=0.05)))
    await asyncio.wait_for(engine.aborted.wait(), 30)

    engine.aborted.clear()
    engine.script = lambda request: told(Output(text="a", finish_reason="stop"), usage=USAGE)
    asked = len(engine.requests)
    await local.stream(ask()).aclose()
    assert len(engine.requests) == asked
    stream = local.stream(ask())
    assert len(await collect(stream)) == 4
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert not engine.aborted.is_set()


async def test_a_request_that_kills_the_engine_is_refused(engine: ScriptedEngine, local: LocalBackend) -> None:
    """A request that was there when the engine died has one more chance, alone; after a second death it is refused as its own
    fault, and who was there by accident is answered."""

    def script(request: GenerateRequest) -> Sequence[Output | EngineError]:
        said = (request.messages or [{}])[0]["content"]
        if said == "poison":
            engine.die()
        return told(Output(text="well", finish_reason="stop"), usage=USAGE) if said == "again" else []

    async def back() -> None:
        async with asyncio.timeout(30):
            while not local.engine.load().is_ready:  # noqa: ASYNC110 - the client has no event for this
                await asyncio.sleep(0.01)

    def asking(content: str) -> BackendRequest:
        return ask(messages=[{"role": "user", "content": content}])

    engine.script = lambda request: engine.die() or [] if len(engine.requests) == 3 else []
    dying = [asyncio.create_task(collect(local.stream(asking(what)))) for what in ("again", "poison", "other")]
    for task in dying:
        with pytest.raises(BackendUnavailable):
            await task
    engine.script = script
    await back()
    both = [asyncio.create_task(collect(local.stream(asking(what)))) for what in ("poison", "again")]
    with pytest.raises(BackendUnavailable):
        await both[0]
    with contextlib.suppress(BackendUnavailable):  # it waited for its turn, and may have found nobody there
        await both[1]
    await back()
    with pytest.raises(BackendRejected) as refused:
        await collect(local.stream(asking("poison")))
    assert refused.value.status == 422
    assert [(r.messages or [{}])[0]["content"] for r in engine.requests].count("poison") == 2
    assert (await collect(local.stream(asking("again"))))[-1].usage is not None


async def test_load_is_what_the_engine_pushed(engine: ScriptedEngine, local: LocalBackend, tmp_path: Path) -> None:
    """Queue, speed and sizes for routing; a loading or missing engine is unready and says why."""
    load = local.load(500)
    assert (load.is_ready, load.reason, load.running, load.waiting) == (True, "", 2, 3)
    assert (load.ttft_ms, load.tpot_ms) == (510.0, 10.0)
    assert (load.context_tokens_max, load.output_tokens_max) == (64, 64)

    nobody = make_local(tmp_path / "nobody.sock")
    await nobody.start()
    assert nobody.load(1).reason == "the engine's process is not there"
    with pytest.raises(BackendUnavailable):
        await collect(nobody.stream(ask()))
    await nobody.aclose()

    engine.load = EngineLoad(progress=0.42, stage="reading weights")
    loading = make_local(engine.path)
    await loading.start()
    async with asyncio.timeout(30):
        while not loading.engine.load().is_connected:  # noqa: ASYNC110 - the client has no event for this
            await asyncio.sleep(0.01)
    assert loading.load(1).reason == "the model is loading: 42% (reading weights)"
    await loading.aclose()


async def test_an_engine_that_is_gone_says_why(engine: ScriptedEngine, local: LocalBackend) -> None:
    """What was left of an engine's end is its reason, until the next one is ready, but no client is told its words; nobody
    waits for one that is not started again, nor for one that dies each time before it is ready."""

    async def until_said(word: str) -> None:
        async with asyncio.timeout(30):
            while word not in local.load(1).why:  # noqa: ASYNC110 - the client has no event for this
                await asyncio.sleep(0.01)

    write_ended(engine.path, EngineEnded("it was killed by SIGKILL"))
    await engine.stop()
    await until_said("SIGKILL")
    assert local.load(1).is_starting
    engine.load = EngineLoad(stage="reading weights")
    for _ in range(3):
        await engine.start(engine.path)
        await until_said("reading weights")
        assert "SIGKILL" in local.load(1).why
        await engine.stop()
        await until_said("the engine's process ended")
    assert not local.load(1).is_starting
    engine.load = READY
    await engine.start(engine.path)
    await asyncio.wait_for(local.engine.wait_ready(), 30)
    assert (local.load(1).is_ready, local.load(1).why) == (True, "")
    write_ended(engine.path, EngineEnded("there is no model at /nowhere", is_final=True))
    await engine.stop()
    await until_said("is not started again: there is no model at /nowhere")
    assert local.load(1).reason.endswith("is not started again")
    assert not local.load(1).is_starting


@pytest.mark.slow
async def test_a_real_engine_answers(tmp_path: Path) -> None:
    """A worker process on a random checkpoint: greedy answers are equal, whole in OpenAI's shape, and the prompt counts."""
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    argv = engine_argv(tmp_path / "e.sock", model=str(checkpoint), kv_blocks=None, block_tokens=16)
    worker = await asyncio.create_subprocess_exec(*argv)
    backend = make_local(tmp_path / "e.sock")
    try:
        await backend.start()
        await asyncio.wait_for(backend.engine.wait_ready(), 120)
        request = ask(
            temperature=0, max_tokens=8, n=2, logprobs=True, ttft_s=60, messages=[{"role": "user", "content": "hi"}]
        )
        chunks = await collect(backend.stream(request))
        whole = ChatCompletion.model_validate_json(fold(chunks))
        assert len(whole.choices) == 2
        assert whole.choices[0].message.content == whole.choices[1].message.content
        assert all(choice.finish_reason in ("stop", "length") for choice in whole.choices)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens > 0
        too_long = [{"role": "user", "content": "word " * 500}]
        with pytest.raises(BackendRejected) as caught:
            await collect(
                backend.stream(
                    BackendRequest(
                        body={**request.body, "messages": too_long},
                        is_stream=True,
                        salt=b"",
                        request_id="r",
                        ttft_timeout_s=60,
                        idle_timeout_s=60,
                    )
                )
            )
        assert json.loads(caught.value.body or b"")["error"]["code"] == "context_length_exceeded"
    finally:
        await backend.aclose()
        worker.kill()
        await worker.wait()
