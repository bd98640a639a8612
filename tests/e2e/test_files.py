"""Files of batches, by the official client: kept on disk, a team's own, within its quota, and gone when they should be."""

from __future__ import annotations

import asyncio
import errno
import os
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from gateway.accounts.schema import MARKER
from gateway.telemetry.parts import PartHealth
from gateway.transport import contents as contents_module
from tests.e2e.gateway import API_KEY, deployment
from tests.e2e.upstream import Upstream
from tests.e2e.worker import Host, NewHost

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}\n'


@pytest.fixture
async def host(new_host: NewHost, upstream: Upstream) -> Host:
    """A worker whose files may have 1 MB, and whose teams may have three, of 2 MB together."""
    return await new_host(
        {"mock": [deployment(upstream.url, "plain")]},
        batches={"file_bytes_max": 1_000_000, "team_bytes_max": 2_000_000, "team_files_max": 3},
    )


async def test_a_file_goes_up_and_comes_down(host: Host) -> None:
    """Created, retrieved, listed, read byte for byte, deleted; its name is a text and no path."""
    content = bytes(range(256)) * 3_000
    name = "../../etc/pass\x00wd\r\nx: y.jsonl"
    made = await host.client.files.create(file=("../../etc/passwd.jsonl", content), purpose="batch")
    assert (made.bytes, made.purpose, made.status, made.object) == (len(content), "batch", "processed", "file")
    assert host.names == [made.id]
    assert made.expires_at == made.created_at + 30 * 86_400
    assert await host.client.files.retrieve(made.id) == made
    assert (await host.client.files.content(made.id)).content == content
    assert [file.id async for file in host.client.files.list()] == [made.id]
    other = await host.client.files.create(
        file=(name, LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    assert other.expires_at == other.created_at + 3_600
    assert len(host.names) == 2
    assert (await host.client.files.delete(made.id)).deleted
    assert host.names == [other.id]
    with pytest.raises(openai.NotFoundError):
        await host.client.files.content(made.id)


async def test_pages(host: Host) -> None:
    """A list comes in pages, in both orders, and by purpose; the client walks through them."""
    ids = [(await host.client.files.create(file=("a", LINE), purpose="batch")).id for _ in range(3)]
    assert [file.id async for file in host.client.files.list(limit=1)] == ids[::-1]
    assert [file.id async for file in host.client.files.list(limit=2, order="asc")] == ids
    page = await host.client.files.list(limit=2, order="asc", purpose="batch")
    assert (page.has_more, [file.id for file in page.data]) == (True, ids[:2])
    assert (await host.client.files.list(purpose="batch_output")).data == []
    for query in ("limit=0", "limit=x", "after=../x", "order=up", "purpose=evals", "&".join(["a=b"] * 51)):
        assert await host.refusal(method="GET", path=f"/files?{query}") == (400, "invalid_value")


async def test_another_team_finds_nothing(host: Host) -> None:
    """Another team's file is not found by any route, as one that does not exist; nor does a path reach it."""
    _, other = await host.team()
    made = await host.client.files.create(file=("a", LINE), purpose="batch")
    told = []
    for file_id in (made.id, "file-" + "0" * 32):
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(file_id)
            told.append(caught.value.message.replace(file_id, "ID"))
    assert len(set(told)) == 1
    assert (await other.files.list()).data == []
    assert (await other.files.list(after=made.id, order="asc")).data == []
    for path in ("..%2F..%2Fsameway.db", "%2e%2e/content", f"{made.id}%00", made.id.upper()):
        assert await host.refusal(method="GET", path=f"/files/{path}") in {
            (404, "file_not_found"),
            (404, "unknown_url"),
        }
    assert (await host.client.files.content(made.id)).content == LINE


async def test_bad_uploads_leave_nothing(host: Host) -> None:
    """A form without a file, with two, cut, of another purpose or type: a 400, no row and no content."""
    form: Any = {"file": ("a", LINE)}
    for request, code in (
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, "missing_required_parameter"),
        ({"files": form}, "missing_required_parameter"),
        ({"data": {"purpose": "evals"}, "files": form}, "invalid_value"),
        ({"data": {"purpose": "batch"}, "files": [("file", ("a", LINE)), ("file", ("b", LINE))]}, "invalid_value"),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "5"}, "files": form}, "invalid_value"),
        ({"data": {"purpose": "b" * 5_000}, "files": form}, "invalid_value"),
        ({"json": {"purpose": "batch"}}, "invalid_type"),
        ({"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "invalid_form"),
        ({"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "invalid_form"),
    ):
        assert await host.refusal(**request) == (400, code)
    assert await host.refusal(files=form, headers={"content-encoding": "gzip"}) == (415, "unsupported_content_encoding")
    assert host.names == []
    assert await host.parts.files.held.of_teams() == {}


async def test_a_quota_holds_also_at_once(host: Host) -> None:
    """A file over its limit is a 413 and uploads at once stay within the team's bytes and number; another team has its own."""
    big = {"file": ("a", b"x" * 1_100_000)}
    assert await host.refusal(data={"purpose": "batch"}, files=big) == (413, "request_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(11):
            yield b"x" * 100_000

    kind = {"content-type": "multipart/form-data; boundary=x"}
    assert await host.refusal(content=chunks(), headers=kind) == (413, "request_too_large")
    made = await asyncio.gather(
        *(host.client.files.create(file=("a", b"x" * 900_000), purpose="batch") for _ in range(6)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, openai.PermissionDeniedError) for one in made) == 4
    await host.client.files.create(file=("a", b"x"), purpose="batch")
    with pytest.raises(openai.PermissionDeniedError, match="3 files"):
        await host.client.files.create(file=("a", b"x"), purpose="batch")
    assert (await host.parts.files.held.of_teams())[1].count == len(host.names) == 3
    _, other = await host.team()
    await other.files.create(file=("a", b"x"), purpose="batch")


async def test_a_client_that_leaves_leaves_nothing(host: Host) -> None:
    """A client that goes in the middle of its upload leaves no row and no content."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(host.url.split(":")[2].split("/")[0]))
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
    head += "content-type: multipart/form-data; boundary=x\r\ncontent-length: 900000\r\n\r\n"
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    writer.write(head.encode() + part + b"x" * 600_000)
    async with asyncio.timeout(10):
        while not host.names:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.close()
        while host.names or await host.parts.files.held.of_teams():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    reader.feed_eof()


async def test_a_full_disk_is_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without room is a 507 that says so and names no path; nothing is left."""

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert await host.parts.files.are_ours()
    monkeypatch.setattr(contents_module, "created", full)
    with pytest.raises(openai.InternalServerError) as caught:
        await host.client.files.create(file=("a", LINE), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
    assert str(host.parts.settings.data_dir) not in caught.value.message
    assert await host.parts.files.held.of_teams() == {}


async def test_contents_of_another_database_are_left_alone(host: Host) -> None:
    """A host whose folder is another installation's says so: no upload, no line and no sweep there, until it has its own."""
    made = await host.client.files.create(file=("a", LINE), purpose="batch")
    batch = await host.client.batches.create(
        input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    files, mark = host.parts.files, host.folder / MARKER
    own = mark.read_text()
    mark.write_text("0" * 32)
    stranger = host.folder / f"file-{0:032x}"
    stranger.write_bytes(b"of the other installation")
    assert not await files.are_ours(is_fresh=True)
    (part,) = [part for part in host.parts.watch.parts() if part.name == "files"]
    assert (part.health, part.detail[:15]) == (PartHealth.DOWN, "they are of 000")
    assert await host.refusal(files={"file": ("a", LINE)}, data={"purpose": "batch"}) == (503, "storage_unavailable")
    assert not await host.parts.runner.step()
    await files.sweep()
    assert host.names == sorted([made.id, stranger.name])
    mark.write_text(own)
    assert await files.are_ours(is_fresh=True)
    assert not [part for part in host.parts.watch.parts() if part.name == "files"]
    await files.sweep()
    assert host.names == [made.id]
    assert await host.parts.runner.step()
    assert (await host.client.batches.retrieve(batch.id)).status != "failed"


async def test_what_is_over_is_swept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired file, a deleted team's, and an upload whose process ended go; names of others in the folder stay."""
    files, folder = host.parts.files, host.folder
    team_id, other = await host.team()
    kept = await host.client.files.create(file=("a", LINE), purpose="batch")
    hour: Any = {"anchor": "created_at", "seconds": 3_600}
    expired = await host.client.files.create(file=("a", LINE), purpose="batch", expires_after=hour)
    await other.files.create(file=("a", LINE), purpose="batch")
    upload = await files.begin(1, 10)
    await upload.write(b"half")
    await upload.flush()
    (folder / "notes.txt").write_text("of an operator")
    await host.parts.accounts.delete_team(team_id)
    now = kept.created_at
    monkeypatch.setattr(files, "clock", lambda: now + 60.0)
    await files.sweep()
    assert host.names == sorted([kept.id, expired.id, upload.id, "notes.txt"])
    monkeypatch.setattr(files, "clock", lambda: now + 90_000.0)
    with pytest.raises(openai.NotFoundError):
        await host.client.files.retrieve(expired.id)
    os.utime(folder / upload.id, (now, now))
    await files.sweep()
    assert host.names == sorted([kept.id, "notes.txt"])
    assert {one: held.count for one, held in (await files.held.of_teams()).items()} == {1: 1}


async def test_memory_stays_flat(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 60 MB passes up and down through a few pieces of memory."""
    size = 60 << 20
    roomy = host.parts.settings.batches.model_copy(update={"file_bytes_max": size, "team_bytes_max": 2 * size})
    monkeypatch.setattr(host.parts.files, "settings", roomy)
    piece = b"x" * (1 << 20)

    async def body() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(size // len(piece)):
            yield piece
        yield b"\r\n--x--\r\n"

    headers = {"authorization": f"Bearer {API_KEY}", "content-type": "multipart/form-data; boundary=x"}
    tracemalloc.start()
    try:
        async with httpx.AsyncClient(timeout=60) as client:
            made = (await client.post(f"{host.url}/files", content=body(), headers=headers)).json()
            assert made["bytes"] == size
            async with client.stream("GET", f"{host.url}/files/{made['id']}/content", headers=headers) as reply:
                assert sum([len(part) async for part in reply.aiter_bytes(1 << 16)]) == size
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
