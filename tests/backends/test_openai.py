"""The lean client against a real server process that misbehaves on command."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.backends.base import (
    BackendBroken,
    BackendDenied,
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendRequest,
    BackendTimeout,
    BackendTooLong,
    BackendUnavailable,
    Mark,
)
from gateway.backends.keys import Keys
from gateway.backends.openai.backend import OpenAIBackend
from gateway.backends.refusals import UpstreamRefusal, refusal, scrubbed
from gateway.settings import ApiKeySettings
from gateway.wire.chunks import read, unfold
from gateway.wire.fold import fold
from gateway.wire.types import COMPLETION, Chunk
from policies import Usage
from tests.backends.conftest import SECRET, ask, collect, collect_into, make_backend, until
from tests.e2e.upstream import Upstream, run_upstream
from tests.transport.servers import Wire, serve

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "find")]


def facts(answer: dict[str, Any]) -> Any:
    """What a client acts on, whichever way the answer came."""
    return [(c["message"], c["logprobs"], c["finish_reason"]) for c in answer["choices"]], answer["usage"]


@pytest.mark.parametrize(
    ("plan", "body"),
    [
        ("", {}),
        ("", {"n": 3}),
        ("", {"tools": TOOLS}),
        ("", {"tools": TOOLS, "n": 2}),
        ("", {"logprobs": True, "top_logprobs": 1}),
        ("has_reasoning=1", {}),
        ("", {"max_tokens": 2}),
        ("finish=content_filter", {}),
        ("split=1", {}),
        ("split=7;is_crlf=1;has_comments=1", {"n": 2}),
        ("has_done=0", {"n": 2}),
        ("is_until_close=1", {}),
        ("is_gzip=1", {}),
        ("huge=2000000", {}),
        ("chunks=300", {}),
        ("linger_ms=50", {}),
    ],
)
async def test_a_stream_tells_what_a_whole_tells(
    upstream: Upstream, backend: OpenAIBackend, plan: str, body: dict[str, Any]
) -> None:
    """However it is framed, a stream folds into the whole answer of the same request, and unfolds back."""
    upstream.plan(plan)
    [whole] = await collect(backend.stream(ask(is_stream=False, **body)))
    chunks = await collect(backend.stream(ask(**body)))
    assert whole.is_whole
    streamed, told = json.loads(fold(chunks)), json.loads(whole.data)
    assert facts(streamed) == facts(told)
    assert facts(json.loads(fold(unfold(whole.data)))) == facts(told)
    assert not any(chunk.is_whole for chunk in chunks)
    assert chunks[-1].is_usage_only
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.cached_tokens > 0
    assert [r for chunk in chunks for r in chunk.finish_reasons] == list(whole.finish_reasons)
    assert any(chunk.has_content for chunk in chunks)


async def test_a_salted_deployment_gets_a_salt_of_each_partition(upstream: Upstream) -> None:
    """It is stable, shows no partition, and a client's own divides it further; others get what the client may send."""
    salted, plain = make_backend(upstream.url, is_salted=True), make_backend(upstream.url)
    asked = ask(cache_salt="mine")
    for backend in (salted, plain):
        await backend.start()
    try:
        for one in (ask(), ask(is_stream=False), replace(ask(), salt=b"other"), asked, replace(asked, salt=b"other")):
            await collect(salted.stream(one))
        for one in (ask(), asked):
            await collect(plain.stream(one))
    finally:
        for backend in (salted, plain):
            await backend.aclose()
    sent = [request["body"].get("cache_salt") for request in upstream.seen().requests]
    first, again, other, own, own_of_other, *unsalted = sent
    assert first == again
    assert len({first, other, own, own_of_other}) == 4
    assert not {"salt", "other", "mine", b"salt".hex()} & {first, other, own, own_of_other}
    assert unsalted == [None, "mine"]


async def test_chunks_are_the_servers_own_bytes(upstream: Upstream, backend: OpenAIBackend) -> None:
    """Nothing is re-modelled on the way: the data is what the server wrote, field by field in its order."""
    chunks = await collect(backend.stream(ask()))
    assert chunks[0].data.startswith(b'{"id":"chatcmpl-')
    assert b'"system_fingerprint":"fp_upstream"' in chunks[0].data
    told = [(read(payload), chunk) for chunk in chunks for payload in chunk.each()]
    assert all(replace(one, data=b"", count=1) == replace(alone, data=b"") for alone, one in told)
    assert len(told) > len(chunks)  # text that came together


async def test_the_request_is_sent_on_as_it_came(upstream: Upstream) -> None:
    """Unknown fields pass, our own do not; the model, the key and usage are the deployment's; headers are sent."""
    backend = make_backend(upstream.url, headers={"x-team": "blue"})
    await backend.start()
    await collect(backend.stream(ask(cache={"ttl": 3}, x_new={"deep": [1, None]}, stream_options={"x": 1}, seed=2**70)))
    await collect(backend.stream(ask(is_stream=False, stream_options=None, stream=False)))
    await backend.aclose()
    first, second = upstream.seen().requests
    assert first["body"] == {
        "model": "mock",
        "messages": [{"role": "user", "content": "Say héllo 😀"}],
        "x_new": {"deep": [1, None]},
        "seed": 2**70,
        "stream": True,
        "stream_options": {"x": 1, "include_usage": True},
    }
    assert second["body"] == {"model": "mock", "messages": first["body"]["messages"]}
    assert first["headers"]["authorization"] == f"Bearer {SECRET}"
    assert first["headers"]["x-team"] == "blue"
    assert first["headers"]["x-request-id"] == "req-1"
    assert "cookie" not in first["headers"]


async def test_connections_are_used_again(upstream: Upstream, backend: OpenAIBackend) -> None:
    """Finished answers give their connection back, streamed, whole or refused, also when the last bytes come late."""
    told = 0
    for plan in ("", "linger_ms=20", "status=429", "has_done=0"):
        upstream.plan(plan)
        for is_stream in (True, False):
            try:
                await collect(backend.stream(ask(is_stream=is_stream)))
                told += 1
            except BackendOverloaded:
                assert plan == "status=429"
            await until(upstream, lambda seen: seen.finished == told)  # noqa: B023 - called at once
            await asyncio.sleep(0.01)  # the end is in our socket: let the loop see it
    assert upstream.seen().connections_total == 1


ANY = [True, False]


@pytest.mark.parametrize("is_stream", ANY)
@pytest.mark.parametrize(
    ("plan", "kind", "status", "retry_after_s"),
    [
        ("status=500", BackendUnavailable, 500, None),
        ("status=500;body=html", BackendUnavailable, 500, None),
        ("status=502;body=html", BackendUnavailable, 502, None),
        ("status=503;body=text", BackendUnavailable, 503, None),
        ("status=503;retry_after=3", BackendOverloaded, 503, 3.0),
        ("status=529;body=empty", BackendOverloaded, 529, None),
        ("status=429", BackendOverloaded, 429, None),
        ("status=429;retry_after=2", BackendOverloaded, 429, 2.0),
        ("status=429;retry_after=2;retry_after_ms=1500", BackendOverloaded, 429, 1.5),
        ("status=429;retry_after=Wed, 21 Oct 2015 07:28:30 GMT", BackendOverloaded, 429, 30.0),
        ("status=429;retry_after=Fri, 31 Dec 999999999 23:59:59 GMT", BackendOverloaded, 429, None),
        ("status=307", BackendUnavailable, 307, None),
        ("status=204;body=empty", BackendUnavailable, 204, None),
    ],
)
async def test_statuses_that_another_deployment_may_mend(
    upstream: Upstream, plan: str, kind: type[BackendError], status: int, retry_after_s: float | None, is_stream: bool
) -> None:
    """Each status has its error, and tells a client nothing of the provider's words, except about a limit."""
    backend = make_backend(upstream.url, wall_clock=lambda: 1445412480.0)  # 21 Oct 2015 07:28:00
    await backend.start()
    upstream.plan(plan)
    with pytest.raises(BackendError) as caught:
        await collect(backend.stream(ask(is_stream=is_stream)))
    await backend.aclose()
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert caught.value.retry_after_s == retry_after_s
    assert caught.value.body is None
    hidden = ("sk-", "nginx", 'quota"', *(() if status == 429 else ("upstream", "platform")))
    assert not any(word in caught.value.message for word in hidden)
    assert f"HTTP {status}" in caught.value.detail


@pytest.mark.parametrize("is_stream", ANY)
@pytest.mark.parametrize(
    ("plan", "status", "mark", "words"),
    [
        ("status=401;body=auth", 401, Mark.KEY, "Incorrect API key provided: [key]. Find yours at https://"),
        ("status=401;body=empty", 401, Mark.KEY, "HTTP 401 (key refused)"),
        ("status=400;body=auth", 400, Mark.KEY, "Incorrect API key"),
        ("status=402", 402, Mark.CREDIT, "upstream says no"),
        ("status=429;body=quota", 429, Mark.CREDIT, "You exceeded your current quota"),
        ("status=404;body=missing", 404, Mark.MODEL, "The model `x` does not exist"),
        ("status=403;body=missing", 403, Mark.MODEL, "The model `x` does not exist"),
        ("status=400;body=missing", 400, Mark.MODEL, "The model `x` does not exist"),
        ("status=404;body=html", 404, Mark.ABSENT, "HTTP 404 (not found there)"),
        ("status=405;body=empty", 405, Mark.ABSENT, "HTTP 405 (not found there)"),
        ("status=404", 404, None, "HTTP 404: upstream says no"),  # its param is `messages`
        ("status=403;body=html", 403, None, "HTTP 403"),
        ("status=409", 409, None, "HTTP 409: upstream says no"),
        ("status=451", 451, None, "HTTP 451: upstream says no"),
    ],
)
async def test_a_permanent_refusal_says_why(
    upstream: Upstream, plan: str, status: int, mark: Mark | None, words: str, is_stream: bool
) -> None:
    """A permanent refusal has the server's words without any key, and a mark where it concerns every request."""
    backend = make_backend(upstream.url)
    await backend.start()
    upstream.plan(plan)
    with pytest.raises(BackendDenied) as caught:
        await collect(backend.stream(ask(is_stream=is_stream)))
    await backend.aclose()
    assert (caught.value.status, caught.value.mark) == (status, mark)
    assert words in caught.value.message
    assert "nginx" not in caught.value.message
    assert not any(part in caught.value.message + caught.value.detail for part in ("sk-", "cret", "****"))
    assert len(upstream.seen().requests) == 1


@pytest.mark.parametrize(
    ("message", "more", "mark"),
    [
        ("model: claude-9", {"type": "not_found_error"}, Mark.ABSENT),
        ("The model `x` does not exist", {"code": "model_not_found", "param": "model"}, Mark.MODEL),
        ("Voice 'voice_123' not found", {"param": None}, Mark.ABSENT),
        ("No file found with ID 'file-model'", {"param": "file_id"}, None),
    ],
)
def test_a_404_is_read_by_its_types(message: str, more: dict[str, Any], mark: Mark | None) -> None:
    """No word of the message, which may be a client's, decides what is missing; a field that the refusal names does."""
    error = refusal(UpstreamRefusal(404, json.dumps({"error": {"message": message, **more}}).encode()))
    assert isinstance(error, BackendDenied)
    assert error.mark is mark


@pytest.mark.parametrize(
    ("message", "more", "size"),
    [
        ("This model's maximum context length is 8192 tokens. However, you asked for 9631", {}, 8192),
        ("prompt is too long: 200005 tokens > 200000 maximum", {}, 200000),
        ("The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", {}, 1048576),
        ("the request exceeds the available context size", {"type": "exceed_context_size_error", "n_ctx": 4096}, 4096),
        ("Unknown parameter: 'maximum context length is 16'.", {"code": "unknown_parameter"}, None),
        ("Bad value '...'; this model's maximum context length is 16 tokens", {}, None),
    ],
)
def test_the_size_of_a_context_is_read_where_no_client_writes(
    message: str, more: dict[str, Any], size: int | None
) -> None:
    """A size is in a server's own field, or at the beginning of its message; the rest may repeat a client's words."""
    error = refusal(UpstreamRefusal(400, json.dumps({"error": {"message": message, **more}}).encode()))
    assert isinstance(error, BackendTooLong)
    assert error.context_tokens == size


@pytest.mark.parametrize(
    "shown", ["sk-upstream-SECRET-111", "sk-upst***111", "sk-upstream-SEC...", "****-111", "sk-upstream-SECR…"]
)
def test_a_key_that_is_shown_in_part_is_cut_out(shown: str) -> None:
    """Providers repeat a wrong key, whole, masked or cut: a client gets none of it."""
    body = json.dumps({"error": {"message": f"Wrong key: {shown}"}}).encode()
    error = refusal(UpstreamRefusal(401, body, secret="sk-upstream-SECRET-111"))
    assert error.message == "The deployment refused the request with HTTP 401 (key refused): Wrong key: [key]"
    assert shown not in error.detail


def test_a_long_error_is_scrubbed_at_once() -> None:
    """Cutting out keys takes time in proportion to the text."""
    for text in ("a" * 60_000, "*" * 60_000, "a*" * 30_000, "sk-upstr" * 8_000):
        assert len(scrubbed(text, "sk-upstream-SECRET-111")) <= len(text)


@pytest.mark.parametrize("is_stream", ANY)
@pytest.mark.parametrize(
    ("plan", "status", "error"),
    [
        (
            "status=400",
            400,
            {"message": "upstream says no", "type": "invalid_request_error", "param": "messages", "code": None},
        ),
        (
            "status=422;body=detail",
            422,
            {"message": "Not this way", "type": "invalid_request_error", "param": None, "code": None},
        ),
        (
            "status=400;body=vllm",
            400,
            {"message": "vllm says no", "type": "BadRequestError", "param": None, "code": None},
        ),
        (
            "status=413;body=html",
            413,
            {
                "message": "502 Bad Gateway",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            },
        ),
        (
            "status=400;body=context",
            400,
            {
                "message": "This model's maximum context length is 8 tokens",
                "type": "invalid_request_error",
                "param": "messages",
                "code": "context_length_exceeded",
            },
        ),
    ],
)
async def test_what_the_client_must_mend_keeps_its_words(
    upstream: Upstream, backend: OpenAIBackend, plan: str, status: int, error: dict[str, Any], is_stream: bool
) -> None:
    """A rejection carries the deployment's status and an error object in OpenAI's shape, whatever the shape it came in."""
    upstream.plan(plan)
    with pytest.raises(BackendRejected) as caught:
        await collect(backend.stream(ask(is_stream=is_stream)))
    assert caught.value.status == status
    assert json.loads(caught.value.body or b"") == {"error": error}
    assert caught.value.message == error["message"]


async def test_the_key_is_in_no_error(upstream: Upstream) -> None:
    """A server that repeats our key gets it cut out of what is logged and what is told."""
    backend = make_backend(upstream.url, api_key="upstream says")
    await backend.start()
    upstream.plan("status=400")
    with pytest.raises(BackendRejected) as caught:
        await collect(backend.stream(ask()))
    await backend.aclose()
    assert json.loads(caught.value.body or b"")["error"]["message"] == "[key] no"
    assert "upstream says" not in caught.value.detail


@pytest.mark.parametrize(
    ("plan", "kind", "chunks"),
    [
        ("cut=headers", BackendUnavailable, 0),
        ("cut=headers;reset=1", BackendUnavailable, 0),
        ("cut=first", BackendBroken, 0),
        ("cut=first;reset=1", BackendBroken, 0),
        ("cut=middle", BackendBroken, 4),
        ("cut=middle;reset=1", BackendBroken, 4),
        ("cut=middle;is_until_close=1", BackendBroken, 4),
        ("cut=middle;is_gzip=1", BackendBroken, 4),
        ("hang=headers", BackendTimeout, 0),
        ("hang=first", BackendTimeout, 0),
        ("hang=middle", BackendTimeout, 4),
        ("malformed=first", BackendBroken, 0),
        ("malformed=middle", BackendBroken, 4),
        ("has_finish=0", BackendBroken, 8),
        ("has_finish=0;has_done=0", BackendBroken, 8),
        ("finish=error", BackendBroken, 7),
        ("finish=abort", BackendBroken, 7),
        ("error=first", BackendUnavailable, 0),
        ("error=first;error_code=429", BackendOverloaded, 0),
        ("error=first;error_code=rate_limit_exceeded", BackendOverloaded, 0),
        ("error=first;error_code=insufficient_quota", BackendDenied, 0),
        ("error=first;error_code=400", BackendRejected, 0),
        ("error=first;error_code=invalid_request_error", BackendRejected, 0),
        ("error=first;error_code=something_else", BackendUnavailable, 0),
        ("error=middle;error_code=502", BackendUnavailable, 4),
        ("is_whole=1;body=html", BackendUnavailable, 0),
        ("is_whole=1;body=text", BackendUnavailable, 0),
        ("is_whole=1;body=empty", BackendBroken, 0),
        ("is_whole=1;malformed=1", BackendBroken, 0),
    ],
)
async def test_a_broken_stream_is_never_a_finished_one(
    upstream: Upstream, backend: OpenAIBackend, plan: str, kind: type[BackendError], chunks: int
) -> None:
    """Every way of failing is an error of its kind, after the chunks that came before it, and frees the connection."""
    upstream.plan(plan)
    stream = backend.stream(ask(ttft_s=0.4, idle_s=0.4))
    seen: list[Chunk] = []
    with pytest.raises(BackendError) as caught:
        await collect_into(seen, stream)
    assert type(caught.value) is kind
    may_tell = kind in (BackendRejected, BackendDenied) or plan.startswith("error=")
    assert "upstream" not in caught.value.message or may_tell
    # RST may overtake bytes that were not read yet; everything else loses nothing
    count = sum(chunk.count for chunk in seen)
    assert count <= chunks if "reset" in plan else count == chunks
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert backend.running == 0
    await stream.aclose()


@pytest.mark.parametrize(
    "plan", ["cut=end", "hang=end", "cut=end;is_until_close=1", "malformed=none;has_done=0;has_usage=0"]
)
async def test_an_answer_is_complete_with_its_finish(upstream: Upstream, plan: str) -> None:
    """What fails after every choice's finish costs the usage at most."""
    backend = make_backend(upstream.url, tail_timeout_s=0.05)
    await backend.start()
    upstream.plan(plan)
    chunks = await collect(backend.stream(ask()))
    assert chunks[-1].finish_reasons == ("stop",)
    assert not any(chunk.usage for chunk in chunks)
    assert backend.running == 0
    await backend.aclose()


async def test_an_unfinished_choice_is_a_broken_answer(upstream: Upstream, backend: OpenAIBackend) -> None:
    """A stream of two choices that closes after the first one's finish is not complete."""
    upstream.plan("cut=between")
    seen: list[Chunk] = []
    with pytest.raises(BackendBroken):
        await collect_into(seen, backend.stream(ask(n=2)))
    assert [reason for chunk in seen for reason in chunk.finish_reasons] == ["stop"]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_prompt_without_an_answer_makes_a_broken_answer(is_whole: bool) -> None:
    """One choice for two prompts is not complete, whatever the server says."""
    choice = b'{"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'
    body = choice if is_whole else b"data: %b\n\ndata: [DONE]\n\n" % choice
    kind = b"application/json" if is_whole else b"text/event-stream"

    async def script(wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)
        )

    async with serve(script) as served:
        backend = make_backend(served.url)
        await backend.start()
        for prompts, is_broken in ((["one", "two"], True), (["one"], False)):
            request = BackendRequest(
                body={"prompt": prompts},
                is_stream=not is_whole,
                salt=b"salt",
                request_id="req-1",
                ttft_timeout_s=5.0,
                idle_timeout_s=5.0,
                kind=COMPLETION,
            )
            with pytest.raises(BackendBroken) if is_broken else contextlib.nullcontext():
                await collect(backend.stream(request))
        await backend.aclose()


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("cut=headers", BackendUnavailable),
        ("cut=middle", BackendBroken),
        ("cut=middle;reset=1", BackendBroken),
        ("hang=headers", BackendTimeout),
        ("hang=middle", BackendTimeout),
        ("malformed=1", BackendBroken),
        ("body=html", BackendUnavailable),
        ("body=empty", BackendBroken),
        ("has_finish=0", BackendBroken),
        ("error=first", BackendUnavailable),
        ("error=first;error_code=429", BackendOverloaded),
        ("error=first;error_code=400", BackendRejected),
    ],
)
async def test_a_broken_whole_is_an_error(
    upstream: Upstream, backend: OpenAIBackend, plan: str, kind: type[BackendError]
) -> None:
    """The same for answers in one piece."""
    upstream.plan(plan)
    with pytest.raises(BackendError) as caught:
        await collect(backend.stream(ask(is_stream=False, ttft_s=0.2, idle_s=0.2)))
    assert type(caught.value) is kind


async def test_either_shape_serves_either_request(upstream: Upstream, backend: OpenAIBackend) -> None:
    """A server that cannot stream answers a stream's request with a whole, and the other way round."""
    upstream.plan("is_whole=1")
    [whole] = await collect(backend.stream(ask()))
    assert whole.is_whole
    upstream.plan("is_stream=1")
    chunks = await collect(backend.stream(ask(is_stream=False)))
    assert json.loads(fold(chunks))["choices"] == json.loads(whole.data)["choices"]


async def test_a_whole_may_take_longer_than_a_first_chunk(upstream: Upstream, backend: OpenAIBackend) -> None:
    """Where all tokens come at once, the time-outs of the first and of the rest add up."""
    upstream.plan("delay_ms=250")
    with pytest.raises(BackendTimeout):
        await collect(backend.stream(ask(ttft_s=0.1, idle_s=60)))
    [whole] = await collect(backend.stream(ask(is_stream=False, ttft_s=0.1, idle_s=60)))
    assert whole.finish_reasons == ("stop",)


async def test_what_came_together_is_handed_on_together(upstream: Upstream, backend: OpenAIBackend) -> None:
    """64 chunks that come at once are one read and, but for the first and what ends them, one piece; and a warm request costs no
    task and no connection."""
    tasks = 0

    def counting(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal tasks
        tasks += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    upstream.plan("chunks=64")
    await collect(backend.stream(ask()))
    asyncio.get_running_loop().set_task_factory(counting)
    reads = [chunks async for chunks in backend.stream(ask())]
    [whole] = [chunks async for chunks in backend.stream(ask(is_stream=False))]
    asyncio.get_running_loop().set_task_factory(None)
    assert sum(chunk.count for chunks in reads for chunk in chunks) > 64
    assert sum(len(chunks) for chunks in reads) < 10
    assert len(reads) <= 2  # a kernel may cut them once
    assert [chunk.is_whole for chunk in whole] == [True]
    assert tasks == 0
    assert upstream.seen().connections_total == 1


async def test_slow_is_not_silent(upstream: Upstream, backend: OpenAIBackend) -> None:
    """A stream may take long as long as it says something; and a reader that dawdles is not the server's silence."""
    upstream.plan("pace_ms=60;chunks=6")
    chunks = await collect(backend.stream(ask(idle_s=0.3)))
    assert chunks[-1].usage is not None
    upstream.plan("chunks=6;pace_ms=5")
    stream = backend.stream(ask(idle_s=0.1))
    seen = await anext(stream)
    await asyncio.sleep(0.4)
    await collect_into(seen, stream)
    assert seen[-1].usage is not None


async def test_nobody_there(upstream: Upstream) -> None:
    """Refused connections, unknown hosts, and ports that do not speak TLS are all unavailable deployments."""
    with run_upstream() as gone:
        gone.stop()
        for url in (gone.url, "http://no-such-host.invalid/v1", upstream.url.replace("http:", "https:")):
            backend = make_backend(url, connect_timeout_s=2.0)
            await backend.start()
            with pytest.raises(BackendUnavailable) as caught:
                await collect(backend.stream(ask()))
            assert caught.value.message == "The deployment cannot be reached"
            await backend.aclose()


async def test_a_stopped_process_is_a_timeout(upstream: Upstream) -> None:
    """A server that accepts and says nothing costs the first chunk's budget, no more."""
    with run_upstream() as frozen:
        backend = make_backend(frozen.url)
        await backend.start()
        frozen.pause()
        with pytest.raises(BackendTimeout):
            await collect(backend.stream(ask(ttft_s=0.2)))
        frozen.resume()
        await backend.aclose()


async def test_a_connection_closed_while_idle_is_not_a_failure() -> None:
    """A server that came back between two requests is asked again on a fresh connection."""
    with run_upstream() as upstream:
        backend = make_backend(upstream.url)
        await backend.start()
        await collect(backend.stream(ask()))
        upstream.stop()
        upstream.start()  # our loop has not seen the close yet: the pooled connection looks alive
        assert (await collect(backend.stream(ask())))[-1].usage is not None
        await backend.aclose()


async def test_leaving_early_closes_the_connection(upstream: Upstream, backend: OpenAIBackend) -> None:
    """The upstream sees the reader go: in the middle, before the first byte, and while somebody waits for a chunk."""
    upstream.plan("chunks=1000;pace_ms=20")
    stream = backend.stream(ask())
    await anext(stream)
    await stream.aclose()
    await until(upstream, lambda seen: seen.dropped == 1)
    with pytest.raises(BackendBroken):
        await anext(stream)

    for plan in ("hang=headers", "hang=first", "hang=middle"):
        upstream.reset()
        upstream.plan(plan)
        stream = backend.stream(ask(ttft_s=60, idle_s=60))
        reader = asyncio.create_task(collect(stream))
        await until(upstream, lambda seen: seen.generations == 1)
        await asyncio.sleep(0.05)
        await stream.aclose()
        with pytest.raises(BackendBroken):
            await reader
        await until(upstream, lambda seen: seen.dropped == 1)


async def test_cancelling_the_reader_closes_the_connection(upstream: Upstream, backend: OpenAIBackend) -> None:
    """A cancelled task leaves nothing behind, even where nobody calls aclose."""
    for plan in ("hang=headers", "hang=middle"):
        upstream.reset()
        upstream.plan(plan)
        stream = backend.stream(ask(ttft_s=60, idle_s=60))

        reader = asyncio.create_task(collect_into([], stream))
        await until(upstream, lambda seen: seen.generations == 1)
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until(upstream, lambda seen: seen.dropped == 1)
        assert backend.running == 0


async def test_closing_before_the_first_chunk_asks_nobody(upstream: Upstream, backend: OpenAIBackend) -> None:
    """A stream that was never read sends nothing; closing after the end, or twice, changes nothing."""
    stream = backend.stream(ask())
    await stream.aclose()
    with pytest.raises(BackendBroken):
        await anext(stream)
    assert upstream.seen().requests == []
    stream = backend.stream(ask())
    chunks: list[Chunk] = []
    await collect_into(chunks, stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert chunks[-1].usage == Usage(6, 6, 3)
    assert upstream.seen().dropped == 0


async def test_many_at_once(upstream: Upstream, backend: OpenAIBackend) -> None:
    """A hundred streams and wholes side by side keep to themselves."""
    requests = [ask(is_stream=i % 2 == 0, messages=[{"role": "user", "content": f"number {i}"}]) for i in range(100)]
    answers = await asyncio.gather(*(collect(backend.stream(request)) for request in requests))
    for i, chunks in enumerate(answers):
        assert json.loads(fold(chunks))["choices"][0]["message"]["content"].endswith(f": number {i}")
    assert upstream.seen().finished == 100


async def test_an_unready_deployment_says_why(upstream: Upstream) -> None:
    """A key that is not in the environment keeps a deployment out of routing; only the operator learns its name."""
    backend = make_backend(upstream.url, keys=Keys([ApiKeySettings(env="OPENAI_API_KEY")], {}))
    await backend.start()
    assert backend.load(1).why == "the variable of its key is not set: OPENAI_API_KEY"
    with pytest.raises(BackendUnavailable, match="the variable of its key is not set"):
        await collect(backend.stream(ask()))
    await backend.aclose()


async def test_what_is_too_deep_to_be_written_is_the_clients_fault(upstream: Upstream) -> None:
    """A body that could just be read, in a field that nobody looked into, may need more stack to be written."""
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    backend = make_backend(upstream.url)
    await backend.start()
    with pytest.raises(BackendRejected, match="nested too deeply"):
        await collect(backend.stream(ask(metadata=deep)))
    await backend.aclose()


def spoken(text: str, **fields: Any) -> bytes:
    """A chunk as most servers spell it; `fields` of the chunk, its choice or its delta, wherever they belong."""
    choice = {"index": fields.pop("index", 0), "delta": {"content": text, **fields.pop("delta", {})}}
    choice |= {"finish_reason": fields.pop("finish", None)}
    if "logprobs" in fields:
        choice["logprobs"] = fields.pop("logprobs")
    body = {"id": "c", "created": 1, "model": "m", "choices": [choice], **fields}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


USED = {"prompt_tokens": 1, "completion_tokens": 2}
# each may stand anywhere in a stream of text; whoever took it for more of the same text would tell something else
INTRUDERS = {
    "another choice": spoken("b", index=1),
    "usage": spoken("a", usage=USED),
    "a sound": spoken("a", delta={"audio": {"data": "AA=="}}),
    "reasoning": spoken("a", delta={"reasoning_content": "hm"}),
    "log probabilities": spoken("a", logprobs={"content": [{"token": "a", "logprob": -1.0, "bytes": None}]}),
    "no text": spoken(""),
    "escapes": spoken('\\"\n\u2028'),
    "escaped": spoken("é").replace("é".encode(), b"\\u00e9"),
    "a quoted chunk": spoken('","finish_reason":"stop"},{"content":"'),
    "spaces": spoken("a").replace(b":", b": "),
    "two contents": spoken("a").replace(b'"content":"a"', b'"content":"a","content":"b"'),
    "two texts": spoken("a").replace(b'"content":"a"', b'"content":"a","refusal":"b"'),
    "two choices": spoken("a").replace(b'}],"', b'},{"index":1,"delta":{"content":"b"}}],"') + b" ",
    "a number out of range": spoken("a", note=0).replace(b'"note":0', b'"note":1e999'),
}


@pytest.mark.parametrize("intruder", INTRUDERS.values(), ids=INTRUDERS)
@pytest.mark.parametrize("is_split", [False, True])
async def test_text_that_goes_on_hides_nothing(intruder: bytes, is_split: bool) -> None:
    """Whatever comes between texts, first, in the middle or twice: every chunk is handed on, with what is in it."""
    texts = [spoken(text) for text in ("Hi", " there", " é😀", "!")]
    sent = [spoken("", delta={"role": "assistant"}), spoken("", index=1), intruder, *texts, intruder, intruder, *texts]
    sent += [*texts * 3, intruder, spoken("", finish="stop"), spoken("", index=1, finish="stop")]
    body = b"".join(b"data: %b\n\n" % payload for payload in [*sent, b"[DONE]"])

    async def script(wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body))
        step = 97 if is_split else len(body)
        for start in range(0, len(body), step):
            await wire.send(body[start : start + step])
            await asyncio.sleep(0)

    async with serve(script) as served:
        backend = make_backend(served.url)
        await backend.start()
        chunks = await collect(backend.stream(ask(n=2)))
        await backend.aclose()
    sent = [payload.replace(b"1e999", b"null") for payload in sent]  # which no float holds
    assert [payload for chunk in chunks for payload in chunk.each()] == sent
    alone = [read(payload) for payload in sent]
    told = [chunk for chunk in chunks for _ in range(chunk.count)]
    assert [replace(one, data=b"", count=1) for one in told] == [replace(one, data=b"") for one in alone]
    assert fold(chunks) == fold([read(payload + b" " * at) for at, payload in enumerate(sent)])


@pytest.mark.parametrize("place", ["first", "middle"])
async def test_an_error_inside_a_stream_is_told_in_its_own_words(
    upstream: Upstream, backend: OpenAIBackend, place: str
) -> None:
    """No status came with an error event, so none is made up: the message has the server's words."""
    upstream.plan(f"error={place}")
    with pytest.raises(BackendUnavailable) as caught:
        await collect(backend.stream(ask()))
    assert caught.value.message == "The deployment failed in its answer: upstream failed inside the stream"
    assert "HTTP" not in caught.value.detail


async def test_a_beginning_is_the_last_message(upstream: Upstream, backend: OpenAIBackend) -> None:
    """A deployment that goes on with an answer gets its text as the assistant's, without white space at its end."""
    await collect(backend.stream(msgspec.structs.replace(ask(), prefix="It begins ")))
    body = upstream.seen().requests[-1]["body"]
    assert body["messages"][-1] == {"role": "assistant", "content": "It begins", "prefix": True}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert len(body["messages"]) == 2


@pytest.mark.parametrize("is_stream", [True, False])
async def test_half_a_character_costs_no_answer(is_stream: bool) -> None:
    """An escape of a surrogate without its pair is read as U+FFFD, in texts and arguments; pairs and backslashes stay."""
    text = rb"a\ud83d\ude00b\uDC00\ud83d\ud83d\ude00\\ud800\n\ud800"
    call = b'[{"index":0,"id":"t","type":"function","function":{"name":"f","arguments":"{\\"x\\":\\"\\ud800\\"}"}}]'
    said = b'{"role":"assistant","content":"%b","tool_calls":%b}' % (text, call)
    whole = b'{"id":"c\\udfff","choices":[{"index":0,"message":%b,"finish_reason":"stop"}]}' % said
    events = [
        b'{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"one "}}]}',
        *[
            b'{"id":"c","choices":[{"index":0,"delta":{"content":"%b"}}]}' % one
            for one in (b"two ", b"\\ud83d", b" \\ude00 ")
        ],
        b'{"id":"c","choices":[{"index":0,"delta":%b,"finish_reason":"stop"}]}' % said,
        b"[DONE]",
    ]
    body = b"".join(b"data: %b\n\n" % event for event in events) if is_stream else whole
    kind = b"text/event-stream" if is_stream else b"application/json"

    async def script(wire: Wire) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
        await wire.send(head + body)

    async with serve(script) as served:
        backend = make_backend(served.url)
        await backend.start()
        chunks = await collect(backend.stream(ask(is_stream=is_stream)))
        await backend.aclose()
    message = json.loads(fold(chunks))["choices"][0]["message"]
    before = "one two \ufffd \ufffd " if is_stream else ""
    assert message["content"] == before + "a\U0001f600b\ufffd\ufffd\U0001f600\\ud800\n\ufffd"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x":"\ufffd"}'


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "1e400", "9" * 5000])
async def test_a_number_that_json_lacks_costs_no_answer(odd: str) -> None:
    """In a usage or a field that is not read, streamed or whole, it is null, and a text that looks like it stays."""
    usage = b'{"prompt_tokens":%b,"completion_tokens":5}' % odd.encode()
    text = b'NaN \\" 1e400 Infinity'
    whole = b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},"finish_reason":"stop"}],"usage":%b}'
    events = [
        b'{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"%b"},"finish_reason":"stop"}]}' % text,
        b'{"id":"c","choices":[],"usage":%b}' % usage,
        b"[DONE]",
    ]
    for is_stream in (True, False):
        body = b"".join(b"data: %b\n\n" % event for event in events) if is_stream else whole % (text, usage)
        body = body.replace(b'{"id":"c",', b'{"note":%b,' % odd.encode())
        kind = b"text/event-stream" if is_stream else b"application/json"

        async def script(wire: Wire, kind: bytes = kind, body: bytes = body) -> None:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
            await wire.send(head + body)

        async with serve(script) as served:
            backend = make_backend(served.url)
            await backend.start()
            chunks = await collect(backend.stream(ask(is_stream=is_stream)))
            await backend.aclose()
        told = json.loads(fold(chunks if is_stream else unfold(chunks[0].data)))
        assert (told["note"], told["choices"][0]["message"]["content"]) == (None, 'NaN " 1e400 Infinity')
        assert told["usage"] == {"prompt_tokens": None, "completion_tokens": 5}
