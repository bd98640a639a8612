"""Batches by the official client: every line once, in the output or in the error file, and paid once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI

from gateway.accounts.ledger import LedgerFilter
from gateway.batches import work as work_module
from gateway.batches.batches import Batches, BatchLease
from gateway.batches.files import Files
from gateway.batches.lines import answered, scan
from gateway.wire.errors import InUse
from policies import WindowKind
from tests.e2e.gateway import deployment
from tests.e2e.upstream import Upstream
from tests.e2e.worker import Host, NewHost

CHAT = "/v1/chat/completions"


@pytest.fixture
async def host(new_host: NewHost, upstream: Upstream) -> Host:
    """A worker with a deployment that has a batch price, one that is slow and one that is full at once."""
    half = {"price": {"input_usd_per_mtok": 1000.0, "output_usd_per_mtok": 2000.0, "batch_factor": 0.5}}
    host = await new_host(
        {
            "mock": [deployment(upstream.url, "plain")],
            "half": [deployment(upstream.url, "half", **half)],
            "lines": [deployment(upstream.url, "lines", "mock?is_pretty=1")],
            "late": [deployment(upstream.url, "late", "mock?delay_ms=300")],
        }
    )
    assert await host.parts.writer.step()
    return host


def line(custom_id: str, content: str | None = None, model: str = "mock", **more: Any) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": content or custom_id}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **more}).encode()


async def begin(client: AsyncOpenAI, *lines: bytes, **more: Any) -> Any:
    """A new batch of these lines."""
    file = await client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more)


async def run(host: Host) -> None:
    """Do all that there is to do."""
    runner = host.parts.runner
    async with asyncio.timeout(60):
        is_idle = False
        while not is_idle:
            is_idle = not runner.works  # before the look: work that ends meanwhile may leave more
            is_idle = not await runner.step() and is_idle
            await asyncio.sleep(0.005)


async def results(client: AsyncOpenAI, batch_id: str) -> tuple[Any, list[Any], list[Any]]:
    """A batch, its output and its errors."""
    batch = await client.batches.retrieve(batch_id)
    found: list[list[Any]] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        text = (await client.files.content(file_id)).text if file_id else ""
        found.append([json.loads(one) for one in text.splitlines()])
    return batch, found[0], found[1]


async def test_every_line_is_answered_once(host: Host) -> None:
    """250 lines, after a byte order mark, with blank ones between, are 250 answers, and the counts and files say so."""
    lines = [line(f"line-{number}") for number in range(250)]
    made = await begin(
        host.client, b"\xef\xbb\xbf" + lines[0] + b"\r", *lines[1:120], b"  ", *lines[120:], metadata={"for": "tests"}
    )
    assert (made.status, made.endpoint, made.metadata) == ("validating", CHAT, {"for": "tests"})
    await run(host)
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, batch.error_file_id, errors) == ("completed", None, [])
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (250, 250, 0)
    assert sorted(one["custom_id"] for one in output) == sorted(f"line-{number}" for number in range(250))
    assert {one["response"]["status_code"] for one in output} == {200}
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in output)
    assert len({one["response"]["request_id"] for one in output}) == 250
    assert [file.purpose async for file in host.client.files.list(purpose="batch_output")] == ["batch_output"]
    assert not (host.folder / made.id).exists()
    assert [one.id async for one in host.client.batches.list(limit=1)] == [made.id]


async def test_a_batch_does_not_end_before_its_chunks(host: Host) -> None:
    """A worker that leases a batch just after another one has planned its chunks does not end it."""
    made = await begin(host.client, line("a"), line("b"))
    parts = host.parts
    ours, theirs = (Batches(parts.accounts.database, parts.files, parts.settings.batches) for _ in range(2))
    lease = ours.lease

    async def late(*asked: Any) -> BatchLease | None:
        """The lease, after another worker did its part."""
        if (work := await theirs.claim("theirs", ())) is not None:
            with (host.folder / made.input_file_id).open("rb") as file:
                await theirs.plan(work, scan(file, 10, 1_000))
        return await lease(*asked)

    ours.lease = late  # type: ignore[method-assign]
    assert await ours.claim("ours", ()) is None
    await run(host)
    batch, output, _ = await results(host.client, made.id)
    assert (batch.status, len(output)) == ("completed", 2)


async def test_an_end_that_is_not_seen_keeps_its_files(host: Host) -> None:
    """A worker that loses its connection, or is cancelled, while the end of a batch commits removes no output."""
    made = await begin(host.client, line("a"))
    end = host.parts.batches.end

    async def unseen(*asked: Any, **more: Any) -> bool:
        assert await end(*asked, **more)
        raise ConnectionError

    host.parts.batches.end = unseen  # type: ignore[method-assign]
    await run(host)
    batch, output, _ = await results(host.client, made.id)
    assert (batch.status, len(output)) == ("completed", 1)


async def test_a_response_on_several_lines_is_one_line(host: Host, upstream: Upstream) -> None:
    """An upstream's JSON on several lines is one line of the output, whole, and is paid once."""
    made = await begin(host.client, *[line(f"l{number}", model="lines") for number in range(3)])
    await run(host)
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, batch.request_counts.completed, errors) == ("completed", 3, [])
    assert sorted(one["custom_id"] for one in output) == ["l0", "l1", "l2"]
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in output)
    assert upstream.seen().generations == 3


@pytest.mark.parametrize("body", [b"", b"no\n1 1 {}\n", b'{"a":"\n"}', b"[" * 5_000, b'{"a":\n"\xff"}'])
def test_a_response_that_is_no_json_is_one_line(body: bytes) -> None:
    """A body that is no JSON is kept as a text, in one line that is JSON."""
    told = answered("id", "custom", 200, "request", body)
    assert b"\n" not in told
    found = json.loads(told.decode())["response"]["body"]
    assert found == {"a": "\ufffd"} if body.startswith(b'{"a":\n') else found == body.decode()


async def test_a_poisoned_line_is_an_error_line(host: Host) -> None:
    """Whatever a line holds, it is one line of the error file with its number, and its neighbours are answered."""
    poison = {
        "invalid_line": [
            b"nonsense",
            b'{"custom_id":"cut","method":"POST"',
            b"[" * 50_000,
            b'{"custom_id":"deep","method":"POST","url":"x","body":' + b'{"a":' * 50_000,
            b'{"custom_id":"\xff\xfe","method":"POST","url":"x","body":{}}',
            b"\x00\x00",
            b'{"custom_id":"half \\ud800","method":"POST","url":"x","body":{}}',
            b"[1, 2]",
            b'{"custom_id":"no body","method":"POST","url":"/v1/chat/completions"}',
        ],
        "line_too_long": [line("long", "x" * 1_100_000), b"y" * 3_000_000],
        "duplicate_custom_id": [line("good", "again")],
        "invalid_method": [line("get", method="GET")],
        "mismatched_endpoint": [line("other", url="/v1/embeddings"), line("admin", url="/admin/api/teams")],
        "invalid_custom_id": [line(""), line("x" * 513)],
        "unsupported_parameter": [line("stream", body={"stream": True})],
    }
    bodies = [line("no-model", body={}), line("no-such", model="nothing"), line("null", body=None)]
    bad = [one for lines in poison.values() for one in lines]
    made = await begin(host.client, line("good"), *bad, *bodies, line("last"))
    await run(host)
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, sorted(one["custom_id"] for one in output)) == ("completed", ["good", "last"])
    assert batch.request_counts.failed == len(errors) == len(bad) + len(bodies)
    codes = Counter(one["error"]["code"] for one in errors if one["error"])
    assert codes == {code: len(lines) for code, lines in poison.items()}
    lines = {one["error"]["line"] for one in errors if one["error"]}
    assert lines == set(range(2, 2 + len(bad)))
    assert {one["custom_id"] for one in errors if one["error"] and one["error"]["code"] == "invalid_custom_id"} == {
        "",
        "x" * 512,
    }
    answered = {one["custom_id"]: one["response"]["status_code"] for one in errors if one["response"]}
    assert answered == {"no-model": 400, "no-such": 404, "null": 400}


async def test_inputs_that_are_no_batch_fail(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file and one of too many lines end as failed, with the reason; a wrong request is a 400."""
    empty = await begin(host.client, b"\xef\xbb\xbf\n\n")
    monkeypatch.setattr(host.parts.runner, "settings", host.parts.settings.batches.model_copy(update={"lines_max": 2}))
    long = await begin(host.client, line("a"), line("b"), line("c"))
    await run(host)
    for made, code in ((empty, "empty_file"), (long, "too_many_lines")):
        batch = await host.client.batches.retrieve(made.id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [one.code for one in batch.errors.data] == [code]
    wrong: Any
    for wrong in ({"endpoint": "/v1/files"}, {"completion_window": "1h"}, {"metadata": {"a": "x" * 600}}):
        right: Any = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": empty.input_file_id}
        with pytest.raises(openai.BadRequestError):
            await host.client.batches.create(**{**right, **wrong})
    with pytest.raises(openai.NotFoundError):
        await host.client.batches.create(input_file_id="../../etc/passwd", endpoint=CHAT, completion_window="24h")


async def planned(host: Host, *lines: bytes) -> tuple[Any, Path]:
    """A new batch whose chunks are planned, and the content of its input."""
    made, parts = await begin(host.client, *lines), host.parts
    work = await parts.batches.claim("token", ())
    assert work is not None
    path = host.folder / made.input_file_id
    with path.open("rb") as file:
        await parts.batches.plan(work, scan(file, 10, 1_000))
    return made, path


async def test_a_batch_whose_input_is_gone_ends(host: Host) -> None:
    """Without its input a batch fails; a planned one keeps the answers that it has, and its other lines are errors."""
    unread = await begin(host.client, line("a"))
    (host.folder / unread.input_file_id).unlink()
    await run(host)
    batch = await host.client.batches.retrieve(unread.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "input_file_gone")  # type: ignore[index,union-attr]
    made, path = await planned(host, line("a"), line("b"))
    path.unlink()
    await run(host)  # so that the next claim has one batch to choose
    cut, path = await planned(host, line("a"), b"", line("b"))
    path.write_bytes(line("a") + b"\n")
    await run(host)
    for batch_id, answers, missing in ((made.id, [], [1, 2]), (cut.id, ["a"], [2])):
        batch, output, errors = await results(host.client, batch_id)
        assert (batch.status, [one["custom_id"] for one in output]) == ("completed", answers)
        assert sorted(one["error"]["line"] for one in errors) == missing
        assert {one["error"]["code"] for one in errors} == {"input_file_gone"}


async def test_a_batch_ends_when_its_parts_add_up(
    host: Host, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where outcomes of a chunk that is done are missing, the batch waits for them; when they stay away, their lines, and
    no others, run again."""
    monkeypatch.setattr(work_module, "PAUSE_S", 0.0)
    made = await begin(host.client, *[line(f"l{number}") for number in range(130)])
    folder, hidden = host.folder / made.id, host.folder.parent / "hidden"
    ending = host.parts.batches.chunks

    async def without(work: BatchLease) -> Any:
        """As where another host wrote them elsewhere, or its writes are not seen yet."""
        for one in folder.glob("1.*"):
            one.rename(hidden)
        return await ending(work)

    monkeypatch.setattr(host.parts.batches, "chunks", without)
    task = asyncio.create_task(run(host))
    async with asyncio.timeout(20):
        while (await host.client.batches.retrieve(made.id)).status != "finalizing":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    batch = await host.client.batches.retrieve(made.id)
    assert (batch.status, batch.output_file_id, upstream.seen().generations) == ("finalizing", None, 130)
    monkeypatch.setattr(host.parts.batches, "chunks", ending)
    now = host.parts.batches.clock()
    host.parts.batches.clock = lambda: now + 130.0
    await task
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, batch.request_counts.completed, errors) == ("completed", 130, [])
    assert sorted(one["custom_id"] for one in output) == sorted(f"l{number}" for number in range(130))
    assert upstream.seen().generations == 130  # the cache had their answers


async def test_a_batch_that_cannot_be_read_can_be_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its input cannot be read a batch waits; it ends once it is cancelled, or its window is over."""
    unread = await begin(host.client, line("a"))
    path = host.folder / unread.input_file_id
    path.unlink()
    path.mkdir()
    await host.client.batches.cancel(unread.id)
    await run(host)
    assert (await host.client.batches.retrieve(unread.id)).status == "cancelled"
    made, path = await planned(host, line("a"), line("b"))
    late = await begin(host.client, line("a"))
    for one in (path, host.folder / late.input_file_id):
        one.unlink()
        one.mkdir()
    monkeypatch.setattr(host.parts.batches, "clock", lambda: late.created_at + 86_402.0)
    await run(host)
    assert (await host.client.batches.retrieve(late.id)).status == "expired"
    batch, _, errors = await results(host.client, made.id)
    assert (batch.status, [one["error"]["code"] for one in errors]) == ("expired", ["batch_expired"] * 2)


async def test_a_file_is_not_deleted_under_a_batch(host: Host) -> None:
    """A file stays where a batch of it begins while it is being deleted."""
    file = await host.client.files.create(file=("in.jsonl", line("a")), purpose="batch")
    database, made = host.parts.accounts.database, []

    class Late:
        """The database, in which a batch begins just before the first write."""

        reading, rows = staticmethod(database.reading), staticmethod(database.rows)
        is_sqlite = database.is_sqlite

        @asynccontextmanager
        async def writing(self) -> AsyncIterator[Any]:
            if not made:
                made.append(await host.parts.batches.create(1, 1, CHAT, file.id, None, None))
            async with database.writing() as connection:
                yield connection

    files: Any = Files(cast(Any, Late()), host.parts.settings.batches, host.parts.files.contents)
    with pytest.raises(InUse):
        await files.delete(1, file.id)
    await run(host)
    batch, output, _ = await results(host.client, made[0].id)
    assert (batch.status, len(output)) == ("completed", 1)


async def test_moderations_run_in_a_batch(host: Host) -> None:
    """A line may ask for a moderation."""
    asked = {"url": "/v1/moderations", "body": {"model": "mock", "input": "text"}}
    file = await host.client.files.create(file=("in.jsonl", line("a", **asked)), purpose="batch")
    made = await host.client.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h")
    await run(host)
    _, output, errors = await results(host.client, made.id)
    assert (errors, [len(one["response"]["body"]["results"]) for one in output]) == ([], [1])


async def test_a_batch_may_have_azures_name_of_its_endpoint(host: Host) -> None:
    """Without `/v1`, for itself and in its lines; it is shown as it was sent."""
    file = await host.client.files.create(file=("in.jsonl", line("a", url="/chat/completions")), purpose="batch")
    made: Any = await host.client.batches.create(
        input_file_id=file.id,
        endpoint="/chat/completions",  # type: ignore[arg-type]
        completion_window="24h",
    )
    assert made.endpoint == "/chat/completions"
    await run(host)
    _, output, errors = await results(host.client, made.id)
    assert (errors, [one["response"]["status_code"] for one in output]) == ([], [200])


async def test_another_team_finds_no_batch(host: Host) -> None:
    """Another team can neither see nor cancel a batch, nor begin one of this team's file; deleting a team takes all."""
    team_id, other = await host.team()
    made = await begin(host.client, line("a"))
    theirs = await begin(other, line("b"))
    told = []
    for batch_id in (made.id, "batch_" + "0" * 32, "x\x00"):
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(batch_id)
            told.append(caught.value.code)
    assert set(told) <= {"batch_not_found", "unknown_url"}
    with pytest.raises(openai.NotFoundError):
        await other.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h")
    assert [one.id async for one in other.batches.list()] == [theirs.id]
    with pytest.raises(openai.ConflictError):
        await host.client.files.delete(made.input_file_id)
    await host.parts.accounts.delete_team(team_id)
    await run(host)
    await host.parts.files.sweep()
    batch, output, _ = await results(host.client, made.id)
    assert (batch.status, len(output)) == ("completed", 1)
    assert sorted(host.names) == sorted([made.input_file_id, batch.output_file_id])


async def test_a_cancelled_batch_keeps_what_it_has(host: Host) -> None:
    """A batch cancelled in the middle keeps its answers; the lines not run are in the error file; it is cancelled once."""
    made = await begin(host.client, *[line(f"l{number}", model="late") for number in range(150)])
    task = asyncio.create_task(run(host))
    async with asyncio.timeout(20):
        while not list((host.folder / made.id).glob("*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await host.client.batches.cancel(made.id)).status == "cancelling"
    await task
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, batch.cancelled_at is not None) == ("cancelled", True)
    assert output
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert sorted(one["custom_id"] for one in output + errors) == sorted(f"l{number}" for number in range(150))
    with pytest.raises(openai.ConflictError):
        await host.client.batches.cancel(made.id)


async def test_a_batch_beyond_its_teams_quota_ends_with_its_cause(new_host: NewHost, upstream: Upstream) -> None:
    """Answers count when they are written: of 300 with 20 kB those that fit are in the output, each other line says why not,
    the upstream was not asked for most of them, and nothing on disk is larger than the quota; a batch whose lines leave no room
    for their errors is refused."""
    quota = 2_000_000
    host = await new_host(
        {"huge": [deployment(upstream.url, "huge", "mock?huge=20000")], "mock": [deployment(upstream.url, "plain")]},
        batches={"file_bytes_max": 1_000_000, "team_bytes_max": quota},
    )
    names = [f"l{number}" for number in range(300)]
    sizes, made = [], await begin(host.client, *[line(name, model="huge") for name in names])

    async def look() -> None:
        while True:
            folder = host.folder / made.id
            sizes.append(sum(one.stat().st_size for one in folder.glob("*")))
            await asyncio.sleep(0.01)

    watch = asyncio.create_task(look())
    await run(host)
    watch.cancel()
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "file_quota_exceeded")
    assert "delete files" in batch.errors.data[0].message
    assert {one["error"]["code"] for one in errors} == {"file_quota_exceeded"}
    assert sorted(one["custom_id"] for one in output + errors) == sorted(names)
    assert 60 < len(output) < 100
    assert upstream.seen().generations < len(output) + 40
    held = (await host.parts.files.held.of_teams())[1]
    listed = [file async for file in host.client.files.list()]
    assert (held.count, held.bytes) == (len(listed), sum(file.bytes for file in listed))
    assert max(held.bytes, *sizes) <= quota
    for file in listed[:2]:
        await host.client.files.delete(file.id)
    for _ in range(2):
        await host.client.files.create(file=("a", b"x" * 900_000), purpose="batch")
    many = await begin(host.client, *[line(f"m{number}") for number in range(400)])
    await run(host)
    batch, output, errors = await results(host.client, many.id)
    assert (batch.status, batch.errors.data[0].code, output, errors) == ("failed", "file_quota_exceeded", [], [])


async def test_an_expired_batch_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day after its creation no line of a batch is run any more; its error file has them."""
    made = await begin(host.client, line("a"), line("b"))
    monkeypatch.setattr(host.parts.batches, "clock", lambda: made.created_at + 86_401.0)
    await run(host)
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, output) == ("expired", [])
    assert [one["error"]["code"] for one in errors] == ["batch_expired"] * 2


async def test_a_line_is_a_request_of_the_key(host: Host, upstream: Upstream) -> None:
    """A line shares the cache with requests, costs the batch price, is held to the budget line by line, and stops with the key."""
    asked = await host.client.chat.completions.create(model="half", messages=[{"role": "user", "content": "shared"}])
    made = await begin(host.client, line("shared", model="half"), line("own", "shared too", model="half"))
    await run(host)
    _, output, _ = await results(host.client, made.id)
    bodies = {one["custom_id"]: one["response"]["body"] for one in output}
    assert bodies["shared"]["choices"][0]["message"]["content"] == asked.choices[0].message.content
    assert upstream.seen().generations == 2
    while await host.parts.writer.backlog():
        await host.parts.writer.step()
    usage = bodies["own"]["usage"]
    full = usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 2000
    page = await host.parts.ledger.rows(LedgerFilter())
    assert sorted(row.cost_microusd for row in page.rows)[0] == -(-full // 2)
    await host.parts.accounts.create_budget(1, WindowKind.TOTAL, sum(row.cost_microusd for row in page.rows) + 1)
    poor = await begin(host.client, line("shared again", "shared", model="half"), line("dear", model="half"))
    await run(host)
    _, output, errors = await results(host.client, poor.id)
    assert [one["custom_id"] for one in output] == ["shared again"]
    assert [one["response"]["body"]["error"]["code"] for one in errors] == ["insufficient_quota"]
    late = await begin(host.client, line("late"))
    key_id = (await host.parts.accounts.list_keys())[0].id
    await host.parts.accounts.revoke_key(key_id)
    await run(host)
    key = await host.parts.accounts.create_key(1, "new")
    _, _, errors = await results(host.client_of(key.plaintext), late.id)
    assert [one["error"]["code"] for one in errors] == ["invalid_api_key"]


async def test_a_rate_limit_is_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond the team's rate limit wait and are answered; none fails."""
    made = await begin(host.client, *[line(f"l{number}") for number in range(6)])
    await host.parts.accounts.update_team(1, requests_per_min=4)
    monkeypatch.setattr(work_module, "WAIT_S_MAX", 0.05)
    monkeypatch.setattr(work_module, "PAUSE_S", 0.05)
    task = asyncio.create_task(run(host))
    async with asyncio.timeout(20):
        while not any(child.name.startswith("0.") for child in host.folder.glob("batch_*/*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await host.parts.accounts.update_team(1, requests_per_min=None)
    await task
    monkeypatch.undo()
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, len(output), errors) == ("completed", 6, [])


async def test_a_worker_that_is_killed_loses_no_line_and_doubles_none(host: Host, upstream: Upstream) -> None:
    """A worker ends in the middle of a chunk, with half a line on disk: another one goes on, each line is there once."""
    made = await begin(host.client, *[line(f"l{number}", model="late") for number in range(30)])
    task = asyncio.create_task(run(host))
    folder = host.folder / made.id
    async with asyncio.timeout(20):
        while sum(len(one.read_bytes().splitlines()) for one in folder.glob("0.*")) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    batches, runner = host.parts.batches, host.parts.runner

    async def lost(*_: object) -> None:
        """As after a kill, nothing is released or renewed."""

    kept = batches.release
    batches.release = lost  # type: ignore[method-assign,assignment]
    for one in list(runner.works):
        one.cancel()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while runner.works:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    batches.release = kept  # type: ignore[method-assign]
    (segment,) = folder.glob("0.*")
    done = len(segment.read_bytes().splitlines())
    with segment.open("ab") as file:
        file.write(b'29 1 {"id":"half a li')
    now = batches.clock()
    batches.clock = lambda: now + 20.0
    await run(host)
    batch, output, errors = await results(host.client, made.id)
    assert (batch.status, batch.request_counts.completed, errors) == ("completed", 30, [])
    assert sorted(one["custom_id"] for one in output) == sorted(f"l{number}" for number in range(30))
    assert upstream.seen().generations <= 30 + 8
    assert done < 30
