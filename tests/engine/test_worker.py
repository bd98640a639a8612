"""The engine as a process: streams, aborts, errors and deaths, seen through its socket."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import uvloop

from ipc import CallFrame, ReplyFrame, ReplyStream
from local_engine import (
    AsyncEngine,
    EngineError,
    EngineLoading,
    EngineUnavailable,
    EngineUsage,
    GenerateRequest,
    InvalidRequest,
    Output,
    Overloaded,
    PromptTooLong,
    SamplingParams,
)
from local_engine.config import EngineConfig
from local_engine.engine import Engine, StepOutput
from local_engine.messages import WIRE, EngineLoad, EngineState, ModelInfo, TokenizeCall, read_ended
from local_engine.process.thread import EngineThread, Replies
from local_engine.process.worker import EngineServer
from local_engine.runner import ModelRunner
from local_engine.sequence import TokenChunk
from local_engine.step_in_flight import StepInFlight
from local_engine.text.tokenizer_loader import tokenizer_from_folder
from tests.engine.checkpoints import naive_greedy, random_prompt
from tests.engine.test_checkpoints import HOSTILE
from tests.engine.workers import Worker, connected, engine_argv, start, worker_process

Folder = Callable[[str], Path]


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def request(prompt: list[int], max_tokens: int, **more: object) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens), **more)  # type: ignore[arg-type]


async def collect(engine: AsyncEngine, what: GenerateRequest) -> list[Output]:
    async with engine.generate(what) as generation:
        return [output async for output in generation]


async def rest_of(generation: ReplyStream[Output]) -> list[Output]:
    return [output async for output in generation]


def usage_of(outputs: list[Output]) -> EngineUsage:
    """The counts, which come with the last output and no other."""
    (usage,) = [output.usage for output in outputs if output.usage is not None]
    assert usage is outputs[-1].usage
    return usage


def tokens_of(outputs: list[Output], index: int = 0) -> list[int]:
    return [id for output in outputs if output.index == index for id in output.token_ids]


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition, 20 s at most."""
    async with asyncio.timeout(20):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.01)


async def idle(engine: AsyncEngine) -> None:
    """Until nothing runs, waits or holds a block."""

    def is_idle() -> bool:
        load = engine.load()
        return load.is_ready and not (load.running or load.waiting or load.kv_blocks_used)

    await until(is_idle)


@pytest.fixture(scope="module")
def shared_worker(checkpoint: Folder) -> Iterator[Worker]:
    """One process for the tests that do not end it."""
    with worker_process(checkpoint("llama")) as running:
        yield running


@pytest.fixture
async def worker(shared_worker: Worker) -> AsyncIterator[AsyncEngine]:
    """A client of its own for every test."""
    async with connected(shared_worker.socket_path) as engine:
        yield engine


async def test_tokens_and_texts_are_the_models(worker: AsyncEngine, checkpoint: Folder) -> None:
    """A prompt and a conversation have the tokens that a generation reads, also beside one; ids come back as their text."""
    tokenizer = tokenizer_from_folder(checkpoint("llama"))
    asked = [{"role": "user", "content": "the quick <|im_end|> fox 東京"}]
    async with worker.generate(request(random_prompt(2, 20), 200)) as generation:
        await anext(generation)
        found = await worker.tokenize(TokenizeCall(prompt="a quick 東京 fox", has_special=True, wants_texts=True))
        assert found.token_ids == tokenizer.encode("a quick 東京 fox")
        assert found.texts == [tokenizer.token(id) for id in found.token_ids]
        chat = await worker.tokenize(TokenizeCall(messages=asked, has_special=False))
        assert (chat.token_ids, chat.texts) == (tokenizer.encode_chat(asked, None), None)
        async with worker.generate(GenerateRequest(messages=asked, sampling=greedy(1))) as counted:
            usage = usage_of(await rest_of(counted))
        assert usage.prompt_tokens == len(chat.token_ids)
        closed = await worker.tokenize(TokenizeCall(messages=asked, has_special=False, opens_answer=False))
        assert chat.token_ids[: len(closed.token_ids)] == closed.token_ids
        assert len(closed.token_ids) < len(chat.token_ids)
        text = await worker.detokenize(chat.token_ids)
        assert text.startswith("<|im_start|>user\nthe quick <|im_end|> fox 東京")
        for wrong in (-1, 10**6, 2**32, 2**40):
            with pytest.raises(InvalidRequest, match=rf"there is no token {wrong}"):
                await worker.detokenize([wrong])
        with pytest.raises(InvalidRequest, match="must not be empty"):
            await worker.tokenize(TokenizeCall(messages=[], has_special=False))
    await idle(worker)


@pytest.mark.parametrize(
    "wrong",
    [
        GenerateRequest(prompt_token_ids=[2**70]),
        GenerateRequest(prompt="x", sampling=greedy(1, logit_bias={2**70: 1.0})),
    ],
)
async def test_a_number_of_many_bits_is_the_callers_fault(worker: AsyncEngine, wrong: GenerateRequest) -> None:
    """What no message can carry is refused, and leaves nothing behind."""
    with pytest.raises(InvalidRequest, match="more than 64 bits"):
        await collect(worker, wrong)
    await idle(worker)


async def test_a_dead_engine_answers_no_question_for_tokens(checkpoint: Folder) -> None:
    """Where the process ends, what was asked of it fails and does not wait; the next question too."""
    with worker_process(checkpoint("llama")) as running:
        async with connected(running.socket_path) as engine:
            running.process.send_signal(signal.SIGSTOP)
            asked = asyncio.create_task(engine.tokenize(TokenizeCall(prompt="x", has_special=True)))
            await asyncio.sleep(0)
            running.process.kill()
            with pytest.raises(EngineUnavailable):
                await asked
            await until(lambda: not engine.load().is_connected)
            with pytest.raises(EngineUnavailable):
                await engine.detokenize([1])


async def test_a_generation_streams_and_counts(worker: AsyncEngine, checkpoint: Folder) -> None:
    """Tokens arrive in pieces, equal the naive ones, and the usage comes at the end."""
    prompt = random_prompt(1, 20)
    async with worker.generate(request(prompt, 12)) as generation:
        outputs = [output async for output in generation]
    assert tokens_of(outputs) == list(naive_greedy(checkpoint("llama"), tuple(prompt), 12))
    assert len(outputs) > 4
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
    assert (usage_of(outputs).prompt_tokens, usage_of(outputs).completion_tokens) == (20, 12)
    assert usage_of(await collect(worker, request(prompt, 1))).cached_tokens == 16


async def test_choices_share_their_prompt(worker: AsyncEngine) -> None:
    """n answers come under their indexes; seeded, they differ from each other and repeat as a whole."""
    sampling = SamplingParams(temperature=1.5, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)
    what = GenerateRequest(prompt="the quick brown", sampling=sampling, n=3)
    outputs, again = await collect(worker, what), await collect(worker, what)
    answers = [tokens_of(outputs, index) for index in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert answers == [tokens_of(again, index) for index in range(3)]
    first = next(output for output in outputs if output.logprobs).logprobs[0]
    assert len(first.top) == 2
    assert first.logprob <= first.top[0].logprob < 0


async def test_the_best_of_several_is_the_likeliest(worker: AsyncEngine) -> None:
    """best_of gives those of the candidates whose tokens have the highest mean log probability, best first, and charges
    for all of them."""
    sampling = SamplingParams(temperature=1.5, seed=3, max_tokens=8, ignore_eos=True, logprobs=0)
    outputs = await collect(worker, GenerateRequest(prompt="the quick brown", sampling=sampling, n=4))
    means = {index: sum(t.logprob for o in outputs if o.index == index for t in o.logprobs) / 8 for index in range(4)}
    order = sorted(means, key=lambda index: -means[index])
    plain = msgspec.structs.replace(sampling, logprobs=None)
    chosen = await collect(worker, GenerateRequest(prompt="the quick brown", sampling=plain, n=2, best_of=4))
    assert [tokens_of(chosen, i) for i in range(2)] == [tokens_of(outputs, index) for index in order[:2]]
    assert not any(output.logprobs for output in chosen)
    assert usage_of(chosen).completion_tokens == 32


async def test_a_token_that_ends_an_answer_is_told(worker: AsyncEngine) -> None:
    """With log probabilities, also the token that stopped a choice, which is no part of its text; without, only that it did."""
    (said,) = await collect(worker, request([5, 6, 7], 1))
    for logprobs in (None, 1):
        sampling = greedy(4, stop_token_ids=said.token_ids, logprobs=logprobs)
        (output,) = await collect(worker, GenerateRequest(prompt_token_ids=[5, 6, 7], sampling=sampling))
        assert (output.text, output.token_ids, output.logprobs, output.finish_reason) == ("", (), (), "stop")
        told = output.stop_token
        assert (told is None) is (logprobs is None)
        assert told is None or (told.token_id, told.top[0].logprob) == (said.token_ids[0], told.logprob)


async def test_prompt_logprobs_come_though_the_text_is_held_back(worker: AsyncEngine) -> None:
    """The prompt's log probabilities leave with the first token, also where its text may begin a stop string."""
    (said,) = await collect(worker, request([5, 6, 7], 1))
    assert said.text
    sampling = greedy(3, stop=(said.text + "never",), prompt_logprobs=0)
    outputs = await collect(worker, GenerateRequest(prompt_token_ids=[5, 6, 7], sampling=sampling))
    assert [token.token_id for token in outputs[0].prompt_logprobs] == [5, 6, 7]
    assert not any(output.prompt_logprobs for output in outputs[1:])


async def test_chat_goes_through_the_template(worker: AsyncEngine, checkpoint: Folder) -> None:
    """Messages are laid out by the chat template; its tokens are the prompt's."""
    messages = [{"role": "user", "content": "hello 東京"}]
    what = GenerateRequest(messages=messages, sampling=greedy(2))
    usage = usage_of(await collect(worker, what))
    tokens = tokenizer_from_folder(checkpoint("llama")).encode_chat(messages, None)
    assert usage.prompt_tokens == len(tokens)


def much(seed: int) -> GenerateRequest:
    """More work than a test waits for: 64 answers of 150 tokens."""
    return request(random_prompt(seed, 20), 150, n=64)


async def test_closing_a_generation_ends_its_work(worker: AsyncEngine) -> None:
    """aclose ends the work in the engine and frees its blocks, before the first item as well as in the middle."""
    await idle(worker)
    before = worker.load().answer_tokens_total
    unstarted = [worker.generate(much(seed)) for seed in range(2)]
    for generation in unstarted:
        await generation.aclose()
    started = worker.generate(much(3))
    await anext(started)
    await started.aclose()
    await idle(worker)
    assert worker.load().answer_tokens_total - before < 64 * 150
    for generation in (*unstarted, started):
        with pytest.raises(StopAsyncIteration):
            await anext(generation)


async def test_a_client_that_disappears_leaves_nothing(worker: AsyncEngine) -> None:
    """When a connection ends, everything it had running is aborted; other clients go on."""
    await idle(worker)
    before = worker.load().answer_tokens_total
    async with connected(Path(worker.socket_path)) as other:
        gone = [other.generate(much(seed)) for seed in range(3)]
        await anext(gone[0])
        mine = worker.generate(request(random_prompt(9, 10), 20))
    assert len(tokens_of(await rest_of(mine))) == 20
    await idle(worker)
    assert worker.load().answer_tokens_total - before < 2 * 64 * 150
    with pytest.raises(EngineUnavailable):
        await rest_of(gone[0])


async def test_two_clients_at_once_get_their_own_answers(worker: AsyncEngine, checkpoint: Folder) -> None:
    """Ids are each client's own: answers never cross."""
    other = AsyncEngine(worker.socket_path)
    other.start()
    await other.wait_ready()
    prompts = [random_prompt(seed, 10 + seed) for seed in range(8)]
    engines = [worker, other]
    found = await asyncio.gather(*(collect(engines[i % 2], request(p, 10)) for i, p in enumerate(prompts)))
    await other.aclose()
    for prompt, outputs in zip(prompts, found, strict=True):
        assert tokens_of(outputs) == list(naive_greedy(checkpoint("llama"), tuple(prompt), 10))


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00",
        b"\x00\x00\x00\x02\x91\x80",
        b"\x00\x00\x00\x00",
    ],
)
async def test_garbage_closes_its_own_connection_only(worker: AsyncEngine, garbage: bytes) -> None:
    """Bytes that are no message end that connection; the engine answers everyone else."""
    running = worker.generate(request(random_prompt(1, 10), 30))
    reader, writer = await asyncio.open_unix_connection(worker.socket_path)
    writer.write(garbage)
    writer.write_eof()
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()
    assert len(tokens_of([output async for output in running])) == 30


@pytest.mark.parametrize(
    "what",
    [
        "arrays 5,000 deep",
        *(
            pytest.param(what, marks=pytest.mark.long)
            for what in ("alignment in words", "an architecture of 2 MB", "no UTF-8")
        ),
    ],
)
def test_a_hostile_file_ends_the_process_in_one_line(tmp_path: Path, what: str) -> None:
    """With status 78, which is not started again, and the reason beside the socket."""
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[what])
    with worker_process(path) as engine:
        assert engine.process.wait(60) == 78
        log = engine.log_path.read_text()
        assert "Traceback" not in log
        *_, reason = log.splitlines()
        assert reason.startswith("local_engine: ")
        assert len(reason) < 1_100
        ended = read_ended(engine.socket_path)
        assert ended is not None
        assert (ended.why, ended.is_final) == (reason.removeprefix("local_engine: "), True)


async def test_bad_requests_are_answered_each_by_its_error(worker: AsyncEngine) -> None:
    """What a caller got wrong is told by type and field, and the loop lives on."""
    cases: list[tuple[GenerateRequest, type[EngineError]]] = [
        (GenerateRequest(), InvalidRequest),
        (GenerateRequest(prompt="a", messages=[]), InvalidRequest),
        (GenerateRequest(messages=[]), InvalidRequest),
        (GenerateRequest(prompt="a", n=0), InvalidRequest),
        (GenerateRequest(prompt="a", n=3, best_of=2), InvalidRequest),
        (GenerateRequest(prompt="a", sampling=SamplingParams(top_p=7.0)), InvalidRequest),
        (GenerateRequest(prompt_token_ids=[-1]), InvalidRequest),
        (GenerateRequest(prompt_token_ids=[10**9]), InvalidRequest),
        (GenerateRequest(prompt_token_ids=[5] * 192), PromptTooLong),
        (GenerateRequest(prompt="a", sampling=SamplingParams(stop=("x",) * 65)), InvalidRequest),
    ]
    for what, kind in cases:
        with pytest.raises(kind):
            await collect(worker, what)
    with pytest.raises(PromptTooLong) as caught:
        await collect(worker, GenerateRequest(prompt_token_ids=[5] * 300))
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (300, 192)
    assert len(tokens_of(await collect(worker, request([5], 3)))) == 3


async def test_a_full_queue_refuses(checkpoint: Folder) -> None:
    """Past queue_max a request is refused at once; those before it are served."""
    with worker_process(checkpoint("llama"), queue_max=2, sequences_max=1) as own:
        async with connected(own.socket_path) as engine:
            what = request(random_prompt(1, 10), 100)
            results = await asyncio.gather(*(collect(engine, what) for _ in range(8)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    served = [result for result in results if isinstance(result, list)]
    assert len(refused) + len(served) == 8
    assert refused
    assert all(len(tokens_of(outputs)) == 100 for outputs in served)


async def test_kill_9_is_an_honest_error_and_a_new_process_serves(checkpoint: Folder) -> None:
    """Death in mid-stream raises EngineUnavailable with what had left; the client finds the next process by itself."""
    with worker_process(checkpoint("llama")) as own:
        async with connected(own.socket_path) as engine:
            streaming = engine.generate(request(random_prompt(1, 10), 170))
            await anext(streaming)
            waiting = engine.generate(request(random_prompt(2, 10), 170))
            own.process.kill()
            with pytest.raises(EngineUnavailable):
                await rest_of(streaming)
            with pytest.raises(EngineUnavailable):
                await rest_of(waiting)
            own.process.wait()
            with pytest.raises(EngineUnavailable):
                await collect(engine, request([5], 1))
            successor = start(own.socket_path, own.log_path, model=str(checkpoint("llama")))
            try:
                async with asyncio.timeout(60):
                    await engine.wait_ready()
                assert len(tokens_of(await collect(engine, request([5], 3)))) == 3
            finally:
                successor.kill()
                successor.wait()


def test_a_process_that_is_killed_fails_what_comes_next(tmp_path: Path) -> None:
    """Asked in any turn of the event loop from the process' end on, on the loop that a gateway runs on, a generation and a
    question for tokens fail as for an engine that is not there."""

    info = ModelInfo(
        name="m",
        architecture="llama",
        context_tokens=10,
        vocabulary_size=10,
        parameters=1,
        dtype="float32",
        device="cpu",
        weights_size_bytes=1,
        kv_size_bytes=1,
        has_chat_template=False,
    )

    async def run() -> None:
        server_end = asyncio.get_running_loop().create_future()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(WIRE.encode(ReplyFrame(0, EngineState(EngineLoad(is_ready=True), info))))
            server_end.set_result(writer)

        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        async with connected(tmp_path / "s") as engine, asyncio.timeout(20):
            server.close()
            (await server_end).transport.abort()

            async def late(turns: int) -> None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                with pytest.raises(EngineUnavailable):
                    await rest_of(engine.generate(request([1, 2, 3], 1)))
                with pytest.raises(EngineUnavailable):
                    await engine.tokenize(TokenizeCall(prompt="x", has_special=False))

            await asyncio.gather(*map(late, range(60)))

    uvloop.run(run())


async def test_a_process_that_hangs_is_told_from_one_that_works(checkpoint: Folder) -> None:
    """Stopped, a worker falls silent: its generations end in an honest error, and none begins; continued, it serves again and
    has forgotten them."""
    with worker_process(checkpoint("llama")) as own:
        async with connected(own.socket_path, look_s=0.25) as engine:
            streaming = engine.generate(request(random_prompt(1, 10), 170))
            await anext(streaming)
            own.process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineUnavailable, match="silent") as caught:
                await rest_of(streaming)
            assert caught.value.is_death
            assert not engine.load().is_ready
            with pytest.raises(EngineError):
                await collect(engine, request([5], 1))
            own.process.send_signal(signal.SIGCONT)
            await idle(engine)
            assert len(tokens_of(await collect(engine, request([5], 3)))) == 3


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_step_that_never_ends_ends_the_process(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """A device that hangs takes the process with it, so that somebody starts it anew; a machine on which steps have been
    long of late is given longer."""
    healthy, hung, released = Engine.step, threading.Event(), threading.Event()

    def step(self: Engine) -> list[StepOutput]:
        if is_slow and not hung.is_set():
            time.sleep(0.4)
        return [] if hung.is_set() and released.wait() else healthy(self)

    monkeypatch.setattr(Engine, "step", step)
    if is_slow:
        monkeypatch.setattr(Engine, "step_s_expected", 60.0)
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", dtype="float32", threads=1, kv_blocks=64)
    serving = asyncio.create_task(EngineServer(config, step_s_max=0.2).serve(tmp_path / "e.sock"))
    try:
        await until(lambda: (tmp_path / "e.sock").exists())
        async with connected(tmp_path / "e.sock") as engine:
            if is_slow:
                assert len(tokens_of(await collect(engine, request([5], 2)))) == 2
                monkeypatch.setattr(Engine, "step_s_expected", 0.0)
            hung.set()
            with pytest.raises(EngineUnavailable):
                await collect(engine, request([5], 3))
        assert await asyncio.wait_for(serving, 20) == 1
    finally:
        released.set()


async def test_loading_is_told_from_the_start(checkpoint: Folder, tmp_path: Path) -> None:
    """The socket answers while the model loads, with EngineLoading and progress, and then serves."""
    socket_path = tmp_path / "e.sock"
    engine = AsyncEngine(socket_path)
    process = start(socket_path, tmp_path / "log", model=str(checkpoint("llama")))
    try:
        engine.start()
        await until(lambda: engine.load().is_connected)
        assert not engine.load().is_ready
        with pytest.raises(EngineLoading, match=r"\d+%"):
            await collect(engine, request([5], 1))
        async with asyncio.timeout(60):
            info = await engine.wait_ready()
        assert info.architecture == "LlamaForCausalLM"
        assert engine.load().predicted_ttft_ms(100) is not None
    finally:
        await engine.aclose()
        process.kill()
        process.wait()


async def test_sigterm_lets_running_answers_finish(checkpoint: Folder) -> None:
    """On SIGTERM what runs is finished, what comes is refused, and the process ends with 0, its socket gone."""
    with worker_process(checkpoint("llama"), drain_s=20) as own:
        async with connected(own.socket_path) as engine:
            running = engine.generate(request(random_prompt(1, 10), 150))
            await anext(running)
            own.process.send_signal(signal.SIGTERM)
            await until(lambda: engine.load().is_draining)
            with pytest.raises(EngineUnavailable):
                await collect(engine, request([5], 1))
            assert len(tokens_of(await rest_of(running))) == 149
        assert await asyncio.to_thread(own.process.wait, 20) == 0
        assert not own.socket_path.exists()


async def test_the_parent_s_death_ends_it(checkpoint: Folder, tmp_path: Path) -> None:
    """A worker whose parent was killed ends by itself."""
    program = (
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen(sys.argv[1:])\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    options = engine_argv(tmp_path / "e.sock", model=str(checkpoint("llama")))
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *options, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    async with connected(tmp_path / "e.sock"):
        parent.kill()
        await parent.wait()
        await until(lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_model_that_cannot_load_ends_with_ex_config(tmp_path: Path) -> None:
    """Exit status 78 and one plain line, which is left beside the socket as well: starting again would not help."""
    process = start(tmp_path / "e.sock", tmp_path / "log", model=str(tmp_path / "absent"))
    assert process.wait(60) == 78
    log = (tmp_path / "log").read_text()
    assert "absent" in log
    assert "Traceback" not in log
    ended = read_ended(tmp_path / "e.sock")
    assert ended is not None
    assert ended.is_final
    assert f"local_engine: {ended.why}" in log.splitlines()


async def test_a_slow_reader_does_not_hold_up_others(worker: AsyncEngine) -> None:
    """A client that never reads gets its own buffer; everyone else streams on."""
    _, writer = await asyncio.open_unix_connection(worker.socket_path)
    for id in range(1, 9):
        writer.write(WIRE.encode(CallFrame(id, request(random_prompt(id, 5), 100))))
    assert len(tokens_of(await collect(worker, request(random_prompt(20, 5), 50)))) == 50
    writer.close()
    await idle(worker)


def test_importing_the_package_loads_nothing_heavy() -> None:
    """The client's side costs a gateway worker neither torch nor tokenizers."""
    program = (
        "import json, sys, local_engine; local_engine.AsyncEngine('x');"
        "print(json.dumps([m for m in ('torch', 'numpy', 'tokenizers', 'transformers', 'gguf') if m in sys.modules]))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=os.getcwd())
    assert json.loads(found.stdout) == []


def test_an_idle_engine_checks_its_books(checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to do it looks once whether its blocks add up; where they do not it ends, to be started again."""
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", kv_blocks=16)
    thread: EngineThread[int] = EngineThread(config, lambda replies: None)
    checks: list[str] = []

    def check(engine: Engine) -> None:
        checks.append("checked")
        assert len(checks) < 2, "blocks are lost"

    monkeypatch.setattr(Engine, "check_integrity", check)
    thread.start()
    thread.submit(1, request([1, 2, 3], 2))
    while not checks:
        thread.join(0.01)
        assert thread.is_alive()
    thread.submit(2, request([1, 2, 3], 2))
    thread.join(20)
    assert isinstance(thread.error, AssertionError)
    assert len(checks) == 2


def ready_thread(checkpoint: Folder) -> tuple[EngineThread[int], queue.SimpleQueue[str]]:
    """A thread whose model is loaded, and the kinds of the replies that it delivers."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def deliver(replies: Replies[int]) -> None:
        for _, reply in replies:
            told.put(type(reply).__name__)

    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", kv_blocks=16)
    thread: EngineThread[int] = EngineThread(config, deliver)
    thread.start()
    while not thread.load.is_ready:
        thread.join(0.01)
        assert thread.error is None
    return thread, told


@pytest.mark.parametrize("is_poison", [True, False])
def test_an_engine_that_can_only_fail_ends(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, is_poison: bool
) -> None:
    """A step that fails is one request's bad luck, as often as it is sent; where the engine fails at a token of its own as well,
    time after time, it ends, to be started again."""
    thread, told = ready_thread(checkpoint)
    healthy = ModelRunner.run

    def run(self: ModelRunner, chunks: list[TokenChunk], before: StepInFlight | None) -> torch.Tensor:
        if is_poison and all(13 not in chunk.sequence.tokens for chunk in chunks):
            return healthy(self, chunks, before)
        raise RuntimeError("no memory for the step")

    monkeypatch.setattr(ModelRunner, "run", run)
    for id in range(1, 6 if is_poison else 2):
        thread.submit(id, request([13], 2))
        assert told.get(timeout=20) == "EngineFailed"
    if is_poison:
        thread.submit(99, request([5], 1))
        assert told.get(timeout=20) == "Output"
        assert thread.is_alive()
        thread.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert ("no memory for the step" in str(thread.error)) is not is_poison


def test_an_engine_that_fails_one_beside_its_own_token_can_still_end(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own token was right in a step that failed another: it asks anew when all steps fail later, and ends."""
    thread, told = ready_thread(checkpoint)
    healthy = ModelRunner.run
    shared: list[int] = []

    def run(self: ModelRunner, chunks: list[TokenChunk], before: StepInFlight | None) -> torch.Tensor:
        poisoned = [13 in chunk.sequence.tokens for chunk in chunks]
        if not shared and any(poisoned):
            shared.append(0)
            thread.submit(2, request([13], 2))  # stands beside the engine's own
            raise RuntimeError("no memory for the step")
        if any(poisoned):
            shared.append(len(chunks))
            logits = healthy(self, chunks, before).clone()
            logits[poisoned] = torch.nan
            return logits
        raise RuntimeError("no memory for any step")

    monkeypatch.setattr(ModelRunner, "run", run)
    thread.submit(1, request([13], 2))
    assert [told.get(timeout=20) for _ in range(2)] == ["EngineFailed", "EngineFailed"]
    thread.submit(3, request([5], 2))
    thread.join(20)
    assert not thread.is_alive()
    assert shared == [0, 2]
    assert "no memory for any step" in str(thread.error)
