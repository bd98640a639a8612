"""Runs the lines of batches, each as a request of the key that made the batch.

It calls the endpoints of `/v1` in this process, so a line has the stages, limits and budgets of any
request. Invariants: a line's outcome is on disk before it counts; a line with an outcome is not run
again; a refusal that passes is waited for; lines leave room to other requests.

The order of effects: the generation's money is settled, its answer stored, its outcome appended;
then the chunk is done; then the files and the end of the batch are one transaction. A worker that
is killed loses the lines that it ran: another worker asks them again, and the cache has the answers
of those that had been stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, BinaryIO

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.accounts import Accounts, Identity
from gateway.accounts.holdings import OverQuota
from gateway.batches.batches import LEASE_S, Batch, Batches, Work
from gateway.batches.files import OUTPUT, Files, new_object_id
from gateway.batches.lines import (
    EXPIRED,
    LINE_BYTES,
    LineOutcome,
    LineRefused,
    LineRequest,
    LineSpan,
    Segment,
    answered,
    assemble,
    id_of,
    outcomes,
    parse,
    read_lines,
    refused,
    scan,
)
from gateway.journey.turn import Caller
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.settings import BatchSettings
from gateway.transport.http_server import WHEN_GONE
from gateway.wire.errors import ApiError

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/moderations",
    "/v1/responses",
)
_CHUNKS_MAX, _CHUNKS_A_TEAM = 16, 2  # at once, in a worker
_LOOK_EVERY_S = 1.0
_ROOM_EVERY_S = 0.02
_PAUSE_S = 1.0
_TRIES_MAX, _WAIT_S_MAX = 5, 60.0
_ROOM_LEFT = 5  # of a rate limit, a fifth is left to other requests
_BLOCK_BYTES = 256 << 10
_GONE = "input_file_gone", "The content of the input file is gone: upload it again"
_PASSING = ("rate_limit_exceeded", "deployment_full", "budget_unavailable")  # waited for until the batch expires
_STATUSES_TRIED_AGAIN = (408, 429, 500, 502, 503, 504)

_log = get_logger()

Endpoint = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class _Reply:
    """The response to a line."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.code = ""

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")

    def read_code(self) -> None:
        with contextlib.suppress(msgspec.DecodeError, AttributeError, TypeError, UnicodeDecodeError):
            self.code = str(msgspec.json.decode(self.body).get("error", {}).get("code") or "")

    def wait_s(self, tries: int) -> float | None:
        """The seconds until the line is tried again; None if this is its response."""
        if self.status == 200 or self.headers.get("x-should-retry") == "false":
            return None
        told = self.headers.get("retry-after-ms", "")
        pause_s = min(_WAIT_S_MAX, int(told) / 1000.0 if told.isdecimal() else 2.0**tries)
        if self.code in _PASSING:
            return pause_s
        is_passing = self.status in _STATUSES_TRIED_AGAIN and tries < _TRIES_MAX
        return max(pause_s, 2.0**tries / 2) if is_passing else None

    @property
    def is_near_a_limit(self) -> bool:
        """Whether little is left of a rate limit."""
        for unit in ("requests", "tokens"):
            left, limit = (self.headers.get(f"x-ratelimit-{what}-{unit}", "") for what in ("remaining", "limit"))
            if left.isdecimal() and limit.isdecimal() and int(left) * _ROOM_LEFT < int(limit):
                return True
        return False


class _Lease:
    """A lease that is kept while its work is done: the batch as it is now, and the lines that ended."""

    def __init__(self, batches: Batches, work: Work) -> None:
        self._batches = batches
        self.work = work
        self.batch: Batch = work.batch
        self.is_lost = False
        self.completed = self.failed = 0

    @property
    def counts(self) -> tuple[int, int]:
        return self.completed, self.failed

    def count(self, outcome: LineOutcome) -> None:
        self.completed += outcome.is_ok
        self.failed += not outcome.is_ok

    def why_not(self) -> LineRefused | None:
        """Why the lines that are left are not run; None if they are."""
        if self.batch.status == "cancelling":
            return LineRefused("batch_cancelled", "The batch was cancelled before this line was run")
        if self.batch.errors is not None:
            error = self.batch.errors["data"][0]
            return LineRefused(error["code"], error["message"])
        if self._batches.clock() >= self.batch.expires_at_s:
            return LineRefused(EXPIRED, "This line could not be run before the completion window ended")
        return None

    async def keep(self) -> None:
        """Renew it until cancelled, or it was lost."""
        while not self.is_lost:
            await asyncio.sleep(LEASE_S / 8)
            try:
                batch = await self._batches.renew(self.work, self.counts)
            except Exception as error:  # the lease may outlast it
                _log.warning("batch_not_renewed", batch=self.batch.id, reason=f"{type(error).__name__}: {error}")
                continue
            self.is_lost, self.batch = batch is None, batch or self.batch


class _Room:
    """The room that a chunk's outcomes have in their team's quota, which is taken a block at a time."""

    def __init__(self, files: Files, batch: Batch) -> None:
        self._files = files
        self._batch = batch
        self._left = 0

    async def take(self, size: int) -> None:
        """Take room for an outcome. Raises OverQuota."""
        if (lacking := size - self._left) > 0:
            try:
                await self._extend(lacking + _BLOCK_BYTES)
            except OverQuota:
                await self._extend(lacking)
        self._left -= size

    async def _extend(self, size: int) -> None:
        await self._files.extend(self._batch.id, self._batch.team_id, size)
        self._left += size

    async def close(self) -> None:
        """Give back what is left."""
        if self._left:
            await self._extend(-self._left)


class BatchRunner:
    """`run` it until cancelled, or call `step`; `stop` it before it is closed. `routes` gives the
    endpoint of a path and method.

    `on_line` is called with the outcome of each line: `ok`, the status of its response, or why it
    got none.
    """

    def __init__(
        self,
        batches: Batches,
        files: Files,
        pipeline: Pipeline,
        accounts: Accounts,
        settings: BatchSettings,
        routes: Mapping[str, Mapping[str, Endpoint]],
        on_line: Callable[[str], None],
    ) -> None:
        self._batches = batches
        self._files = files
        self._pipeline = pipeline
        self._accounts = accounts
        self._settings = settings
        self._routes = routes
        self._on_line = on_line
        self._works: dict[asyncio.Task[None], int] = {}  # with the team of each
        self._running = 0
        self._is_stopping = False
        self._paused: dict[int, float] = {}
        self.woken = asyncio.Event()

    async def run(self) -> None:
        """Step until cancelled. Errors of the database pass through."""
        while True:
            if not await self.step():
                self.woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.woken.wait(), _LOOK_EVERY_S)

    def stop(self) -> list[asyncio.Task[None]]:
        """Begin no more lines; returns what is under way, which releases its lease at its end."""
        self._is_stopping = True
        return list(self._works)

    async def step(self) -> bool:
        """Lease one thing and begin it. Returns False if there is none, or no room for one."""
        if not self._settings.concurrency or len(self._works) >= _CHUNKS_MAX or self._is_stopping:
            return False
        teams = list(self._works.values())
        work = await self._batches.claim(
            secrets.token_hex(8), {one for one in teams if teams.count(one) >= _CHUNKS_A_TEAM}
        )
        if work is None:
            return False
        task = asyncio.create_task(self._do(work))
        self._works[task] = work.batch.team_id
        task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._works[task]
        self.woken.set()

    async def _do(self, work: Work) -> None:
        """Do what was leased, and release it on every exit."""
        lease = _Lease(self._batches, work)
        keeping = asyncio.create_task(lease.keep())
        try:
            if work.chunk is not None:
                await self._run_chunk(lease, work.chunk)
            elif work.batch.status == "validating" or work.batch.in_progress_at_s is None:
                await self._read_input(lease)
            else:
                await self._end(lease)
        except Exception as error:
            _log.warning("batch_interrupted", batch=work.batch.id, reason=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_PAUSE_S)
        finally:
            keeping.cancel()
            with contextlib.suppress(Exception):  # the lease ends by itself
                await self._batches.release(work)

    async def _read_input(self, lease: _Lease) -> None:
        work, settings = lease.work, self._settings
        path = self._files.path(work.batch.input_file_id)
        try:
            chunks = await asyncio.to_thread(scan, path, settings.lines_max, settings.line_bytes_max)
        except LineRefused as why:
            await self._batches.refuse(work, why)
        except OSError as error:
            await self._batches.refuse(work, self._why_unread(lease, error))
        else:
            try:
                await self._batches.plan(work, chunks)
            except OverQuota as error:
                await self._batches.refuse(work, LineRefused(str(error.error_code), error.message))

    def _why_unread(self, lease: _Lease, error: OSError) -> LineRefused:
        """Why an input is not read any more. Raises the error if that may still help."""
        if (why := lease.why_not()) is not None:
            return why
        if isinstance(error, FileNotFoundError) and self._files.folder.is_dir():
            return LineRefused(*_GONE)
        raise error

    async def _end(self, lease: _Lease) -> None:
        """Write the output and the errors, and end the batch."""
        batch, work = lease.batch, lease.work
        chunks, folder = await self._batches.chunks(work), self._files.folder / batch.id
        uploads = [await self._files.begin(batch.team_id, is_own=True) for _ in range(2)]
        kept, is_over = [], False
        try:
            counts = await asyncio.to_thread(assemble, folder, chunks, *uploads)
            for upload, kind in zip(uploads, ("output", "error"), strict=True):
                name = f"{batch.id}_{kind}.jsonl"
                kept.append(await upload.sealed(OUTPUT, name, batch.output_kept_s) if upload.bytes else None)
            is_expired = self._batches.clock() >= batch.expires_at_s
            is_over = await self._batches.end(work, counts, is_expired=is_expired, output=kept[0], errors=kept[1])
        finally:
            for upload in uploads:
                if not (is_over and upload.bytes):
                    await upload.drop()
        if is_over:
            await asyncio.to_thread(self._files.unlink, [batch.id])

    # -- a chunk

    async def _run_chunk(self, lease: _Lease, chunk: LineSpan) -> None:
        """Run the lines of a chunk that have no outcome yet."""
        folder = self._files.folder / lease.batch.id
        ended = set[int]()
        for one in await asyncio.to_thread(lambda: [(o.line, o.is_ok) for o in outcomes(folder, chunk.number)]):
            ended.add(one[0])
            lease.count(LineOutcome(*one, b""))
        segment, places = Segment(folder, chunk.number, lease.work.token), asyncio.Semaphore(self._settings.concurrency)
        appending, room = asyncio.Lock(), _Room(self._files, lease.batch)

        async def run_line(number: int, raw: bytes | LineRefused | None) -> None:
            try:
                outcome = await self._outcome(lease, number, raw, is_repeated=number in chunk.repeated)
                if outcome is not None:
                    async with appending:
                        outcome = await self._append(lease, room, segment, outcome)
                    lease.count(outcome)
            finally:
                places.release()

        try:
            async with asyncio.TaskGroup() as group:
                async for number, raw in self._lines(lease, chunk, ended):
                    await places.acquire()
                    if lease.is_lost or self._is_stopping:
                        break
                    group.create_task(run_line(number, raw))
        finally:
            segment.close()
        await room.close()
        if not lease.is_lost and sum(lease.counts) == chunk.lines:
            await self._batches.chunk_done(lease.work, lease.counts)

    async def _append(self, lease: _Lease, room: _Room, segment: Segment, outcome: LineOutcome) -> LineOutcome:
        """Write an outcome, or that there is no room for it in the team's quota; returns what was
        written.

        Waits while the disk is full or the database fails, as a line that is run again is paid
        again.
        """
        has_room = len(outcome.data) <= LINE_BYTES
        while True:
            try:
                if not has_room:
                    await room.take(len(outcome.data))
                has_room = True
                await asyncio.to_thread(segment.append, outcome)
                return outcome
            except OverQuota as error:
                why, has_room = LineRefused(str(error.error_code), error.message, id_of(outcome.data)), True
                line_id = new_object_id("batch_req_", time.time())
                outcome = LineOutcome(outcome.line, False, refused(line_id, outcome.line, why))
                lease.batch = await self._batches.stop(lease.work, why)
            except (OSError, SQLAlchemyError) as error:
                _log.error("storage_failed", reason=f"{type(error).__name__}: {error}")
                await asyncio.sleep(_PAUSE_S)

    async def _lines(
        self, lease: _Lease, chunk: LineSpan, ended: Collection[int]
    ) -> AsyncIterator[tuple[int, bytes | LineRefused | None]]:
        """The lines of a chunk that are not blank nor `ended`, with their numbers; one at a time is
        in memory. Where the input cannot be read any more, the reason stands for each line that is
        left.
        """
        number, left, why = chunk.first_line, chunk.lines - len(ended), LineRefused(*_GONE)
        try:
            file: BinaryIO = await asyncio.to_thread(self._files.path(lease.batch.input_file_id).open, "rb")
            with file:
                file.seek(chunk.offset)
                lines: Iterator[tuple[bytes | None, int]] = read_lines(file, chunk.size, self._settings.line_bytes_max)
                while (found := await asyncio.to_thread(next, lines, None)) is not None:
                    if found[0] != b"" and number not in ended:
                        left -= 1
                        yield number, found[0]
                    number += 1
        except OSError as error:
            why = self._why_unread(lease, error)
        while left > 0:
            if number not in ended:
                left -= 1
                yield number, why
            number += 1

    async def _outcome(
        self, lease: _Lease, number: int, raw: bytes | LineRefused | None, *, is_repeated: bool
    ) -> LineOutcome | None:
        """The end of one line; None if this worker stops, or lost the chunk, before it ended."""
        line_id = new_object_id("batch_req_", time.time())
        try:
            if isinstance(raw, LineRefused):
                raise raw
            line, model = parse(raw, lease.batch.endpoint, self._settings.line_bytes_max)
            if is_repeated:
                raise LineRefused("duplicate_custom_id", "Another line before has this `custom_id`", line.custom_id)
            reply = await self._reply(lease, line, model)
        except LineRefused as why:
            self._on_line(why.code)
            return LineOutcome(number, False, refused(line_id, number, why))
        if reply is None:
            return None
        self._on_line("ok" if reply.status == 200 else str(reply.status))
        request_id = reply.headers.get("x-request-id", "")
        body = answered(line_id, line.custom_id, reply.status, request_id, reply.body)
        return LineOutcome(number, reply.status == 200, body)

    async def _reply(self, lease: _Lease, line: LineRequest, model: str) -> _Reply | None:
        """The response to a line, which is asked again while that may help. Raises LineRefused."""
        tries = 0
        while True:
            if not await self._room(lease, line, model):
                return None
            identity = await self._accounts.of_key(lease.batch.key_id)
            if identity is None:
                words = "The key that made the batch was revoked, or has expired"
                raise LineRefused("invalid_api_key", words, line.custom_id)
            self._running += 1
            try:
                reply = await self._call(line, identity, lease.batch.id)
            finally:
                self._running -= 1
            tries += 1
            if reply.status != 200:
                reply.read_code()
            if lease.is_lost or reply.code == "shutting_down":
                return None
            if reply.is_near_a_limit:
                self._paused[identity.team.id] = time.monotonic() + _PAUSE_S
            wait_s = reply.wait_s(tries)
            if wait_s is None:
                return reply
            until = time.monotonic() + wait_s
            while (left_s := until - time.monotonic()) > 0 and not (self._is_stopping or lease.why_not()):  # noqa: ASYNC110
                await asyncio.sleep(min(left_s, _PAUSE_S))

    async def _room(self, lease: _Lease, line: LineRequest, model: str) -> bool:
        """Wait until other requests leave room; returns False if this worker stops, or lost the
        chunk. Raises LineRefused if the batch is over first.
        """
        while not (lease.is_lost or self._is_stopping):
            if (why := lease.why_not()) is not None:
                raise LineRefused(why.code, why.message, line.custom_id)
            others = self._pipeline.generations - self._running
            places = self._settings.concurrency if others <= 0 else max(1, self._settings.concurrency // 4)
            is_paused = self._paused.get(lease.batch.team_id, 0.0) > time.monotonic()
            if self._running < places and not is_paused and not self._is_busy(model):
                return True
            await asyncio.sleep(_ROOM_EVERY_S)
        return False

    def _is_busy(self, model: str) -> bool:
        """Whether each deployment of a model has half its places taken, or requests that wait."""
        try:
            alias = self._pipeline.fleet.alias(model)
        except ApiError:
            return False
        return all(
            one.slots.waiting or 2 * one.slots.taken >= max(2, one.slots.slots_max) or one.backend.load(0).waiting
            for one in alias.deployments.values()
        )

    async def _call(self, line: LineRequest, identity: Identity, batch_id: str) -> _Reply:
        """One request to an endpoint of this worker."""
        body: list[bytes] = [bytes(line.body)]

        async def receive() -> dict[str, Any]:
            if not body:
                await asyncio.get_running_loop().create_future()  # a line does not leave
            return {"type": "http.request", "body": body.pop(), "more_body": False}

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": line.url,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "extensions": {WHEN_GONE: lambda _: None},
            "caller": Caller(identity, batch_id),
        }
        reply = _Reply()
        await self._routes[line.url]["POST"](scope, receive, reply.send)
        return reply
