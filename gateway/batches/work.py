"""Runs the lines of batches, each as a request with the key that made the batch.

It calls the endpoints of `/v1` in this process, so a line has the stages, limits and budgets of any
request. Invariants: a line's outcome is kept before it counts; a line with an outcome is not run again; a
batch ends once each of its lines has one; a temporary refusal is retried; lines leave room for other requests.

The order of effects: the generation's money is settled, its answer stored, its outcome appended;
then the chunk is done; then the files and the end of the batch are one transaction. A killed worker
loses the lines that it ran: another worker runs them again, and the cache may have their answers.
"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, BinaryIO

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.accounts import Identity
from gateway.accounts.accounts import Accounts
from gateway.accounts.holdings import OverQuota
from gateway.batches.batches import LEASE_S, Batch, Batches, BatchLease
from gateway.batches.files import DAY_S, OUTPUT, Files, key_of, new_object_id
from gateway.batches.lines import (
    CANCELLED,
    EXPIRED,
    LINE_BYTES,
    LineOutcome,
    LineRefused,
    LineRequest,
    LineSpan,
    answered,
    assemble,
    id_of,
    merge,
    outcomes,
    parse,
    read_lines,
    refused,
    scan,
    written,
)
from gateway.journey.turn import Caller
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.settings import BatchSettings
from gateway.transport.contents import Parts
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
PAUSE_S = 1.0
_TRIES_MAX, WAIT_S_MAX = 5, 60.0
_ROOM_LEFT = 5  # of a rate limit, a fifth is left to other requests
_BLOCK_BYTES = 256 << 10
_SETTLED_S = 120.0  # a folder shared by a network shows within it what another host wrote
_GONE = "input_file_gone", "The content of the input file is gone: upload it again"
_PASSING = ("rate_limit_exceeded", "deployment_full", "budget_unavailable")  # waited for until the batch expires
_STATUSES_TRIED_AGAIN = (408, 429, 500, 502, 503, 504)

_log = get_logger()

Endpoint = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class _LineReply:
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
        """The seconds until the line is retried; None if this response is final."""
        if self.status == 200 or self.headers.get("x-should-retry") == "false":
            return None
        retry_after_ms = self.headers.get("retry-after-ms", "")
        pause_s = min(WAIT_S_MAX, int(retry_after_ms) / 1000.0 if retry_after_ms.isdecimal() else 2.0**tries)
        if self.code in _PASSING:
            return pause_s
        is_passing = self.status in _STATUSES_TRIED_AGAIN and tries < _TRIES_MAX
        return max(pause_s, 2.0**tries / 2) if is_passing else None

    @property
    def is_near_a_limit(self) -> bool:
        """Whether less than a fifth of a rate limit is left."""
        for unit in ("requests", "tokens"):
            remaining, limit = (self.headers.get(f"x-ratelimit-{part}-{unit}", "") for part in ("remaining", "limit"))
            if remaining.isdecimal() and limit.isdecimal() and int(remaining) * _ROOM_LEFT < int(limit):
                return True
        return False


class _HeldLease:
    """Renews a lease while its work runs; has the current batch and the counts of ended lines."""

    def __init__(self, batches: Batches, work: BatchLease) -> None:
        self._batches = batches
        self.work = work
        self.batch: Batch = work.batch
        self.is_lost = False
        self.ended = Counter[bool]()  # the lines, by whether they were answered

    @property
    def counts(self) -> tuple[int, int]:
        return self.ended[True], self.ended[False]

    def why_not(self) -> LineRefused | None:
        """The reason to run no further lines; None to run them."""
        if self.batch.status == "cancelling":
            return LineRefused(CANCELLED, "The batch was cancelled before this line was run")
        if self.batch.errors is not None:
            error = self.batch.errors["data"][0]
            return LineRefused(error["code"], error["message"])
        if self._batches.clock() >= self.batch.expires_at_s:
            return LineRefused(EXPIRED, "This line could not be run before the completion window ended")
        return None

    async def keep(self) -> None:
        """Renew the lease until cancelled, or until it is lost."""
        while not self.is_lost:
            await asyncio.sleep(LEASE_S / 8)
            try:
                batch = await self._batches.renew(self.work, self.counts)
            except Exception as error:  # the lease may outlast it
                _log.warning("batch_not_renewed", batch=self.batch.id, reason=f"{type(error).__name__}: {error}")
                continue
            self.is_lost, self.batch = batch is None, batch or self.batch


class _OutcomeQuota:
    """Reserves a team's quota for a chunk's outcomes, a block at a time."""

    def __init__(self, files: Files, batch: Batch) -> None:
        self._files = files
        self._batch = batch
        self._left = 0

    async def take(self, size: int) -> None:
        """Reserve quota for an outcome of `size` bytes. Raises OverQuota."""
        if (lacking_bytes := size - self._left) > 0:
            try:
                await self._extend(lacking_bytes + _BLOCK_BYTES)
            except OverQuota:
                await self._extend(lacking_bytes)
        self._left -= size

    async def _extend(self, size: int) -> None:
        await self._files.extend(self._batch.id, self._batch.team_id, size)
        self._left += size

    async def close(self) -> None:
        """Give back the unused quota."""
        if self._left:
            await self._extend(-self._left)


@dataclass(eq=False, repr=False)
class BatchRunner:
    """Runs batches with `run` until cancelled, or step by step with `step`; call `stop` before
    closing.

    `routes` has the endpoint of each path and method, `works` the running tasks with their teams.
    `on_line` is called with the outcome of each line: `ok`, its response's status, or the reason
    why it has no response.
    """

    _: KW_ONLY
    batches: Batches
    files: Files
    pipeline: Pipeline
    accounts: Accounts
    settings: BatchSettings
    routes: Mapping[str, Mapping[str, Endpoint]]
    on_line: Callable[[str], None]
    works: dict[asyncio.Task[None], int] = field(default_factory=dict)  # with the team of each
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    _running: int = 0
    _is_stopping: bool = False
    _paused: dict[int, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Step until cancelled. Errors of the database pass through."""
        while True:
            if not await self.step():
                self.woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.woken.wait(), _LOOK_EVERY_S)

    def stop(self) -> list[asyncio.Task[None]]:
        """Begin no more lines. Returns the running tasks, which release their leases at their end."""
        self._is_stopping = True
        return list(self.works)

    async def step(self) -> bool:
        """Lease a chunk or a batch and begin its work. Returns False if nothing is free, or this
        worker is full.
        """
        if not self.settings.concurrency or len(self.works) >= _CHUNKS_MAX or self._is_stopping:
            return False
        if not await self.files.are_ours():
            return False
        teams = list(self.works.values())
        work = await self.batches.claim(
            secrets.token_hex(8), {team_id for team_id in teams if teams.count(team_id) >= _CHUNKS_A_TEAM}
        )
        if work is None:
            return False
        task = asyncio.create_task(self._do(work))
        self.works[task] = work.batch.team_id
        task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        del self.works[task]
        self.woken.set()

    async def _do(self, work: BatchLease) -> None:
        """Do the leased work, and release the lease on every exit."""
        lease = _HeldLease(self.batches, work)
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
            await asyncio.sleep(PAUSE_S)
        finally:
            keeping.cancel()
            with contextlib.suppress(Exception):  # the lease ends by itself
                await self.batches.release(work)

    async def _read_input(self, lease: _HeldLease) -> None:
        work, settings = lease.work, self.settings
        key = key_of(work.batch.team_id, work.batch.input_file_id)

        def scanned() -> list[LineSpan]:
            with self.files.contents.open(key) as file:
                return scan(file, settings.lines_max, settings.line_bytes_max)

        try:
            chunks = await asyncio.to_thread(scanned)
        except LineRefused as refusal:
            await self.batches.refuse(work, refusal)
        except OSError as error:
            await self.batches.refuse(work, await self._why_unread(lease, error))
        else:
            try:
                await self.batches.plan(work, chunks)
            except OverQuota as error:
                await self.batches.refuse(work, LineRefused(str(error.error_code), error.message))

    async def _why_unread(self, lease: _HeldLease, error: OSError) -> LineRefused:
        """The reason to refuse an input. Raises the error if a retry may help."""
        if (refusal := lease.why_not()) is not None:
            return refusal
        if isinstance(error, FileNotFoundError) and await self.files.are_ours(is_fresh=True):
            return LineRefused(*_GONE)
        raise error

    async def _end(self, lease: _HeldLease) -> None:
        """Write the output and the errors, and end the batch."""
        batch, work = lease.batch, lease.work
        chunks, key = await self.batches.chunks(work), key_of(batch.team_id, batch.id)
        team = await self.accounts.team(batch.team_id)  # whose rule may have changed since
        kept_s = team.kept_s(batch.output_kept_s or self.files.settings.kept_days * DAY_S)
        uploads = [await self.files.begin(batch.team_id, is_own=True) for _ in range(2)]
        files, is_over = [], False
        try:
            counts = await asyncio.to_thread(assemble, self.files.contents, key, chunks, *uploads)
            lacking = [chunk.number for chunk in chunks if sum(counts[chunk.number]) != chunk.lines]
            if lacking:
                begun_s = batch.finalizing_at_s
                is_settled = begun_s is not None and self.batches.clock() - begun_s > _SETTLED_S
                if is_settled and await self.files.are_ours(is_fresh=True):
                    _log.error("outcomes_lost", batch=batch.id, chunks=len(lacking), consequence="lines run again")
                    await self.batches.reopen(work, lacking)
                raise OSError(f"outcomes of {len(lacking)} of {len(chunks)} chunks are not there")
            totals = sum(ok for ok, _ in counts.values()), sum(bad for _, bad in counts.values())
            for upload, kind in zip(uploads, ("output", "error"), strict=True):
                name = f"{batch.id}_{kind}.jsonl"
                files.append(await upload.sealed(OUTPUT, name, kept_s) if upload.bytes and kept_s else None)
            is_expired = self.batches.clock() >= batch.expires_at_s
            is_over = await self.batches.end(work, totals, is_expired=is_expired, output=files[0], errors=files[1])
        finally:
            for upload in uploads:
                if not (is_over and upload.bytes and kept_s):
                    await upload.drop()
        if is_over:
            await asyncio.to_thread(self.files.unlink, [key])

    # -- a chunk

    async def _run_chunk(self, lease: _HeldLease, chunk: LineSpan) -> None:
        """Run the lines of a chunk that have no outcome."""
        contents, key = self.files.contents, key_of(lease.batch.team_id, lease.batch.id)
        ended = set[int]()
        # without their data, which may be large
        for line, is_ok in await asyncio.to_thread(
            lambda: [(o.line, o.is_ok) for o in outcomes(contents, key, chunk.number)]
        ):
            ended.add(line)
            lease.ended[is_ok] += 1
        parts = contents.appending(f"{key}/{chunk.number}.{lease.work.token}")
        slots = asyncio.Semaphore(self.settings.concurrency)
        appending, room = asyncio.Lock(), _OutcomeQuota(self.files, lease.batch)

        async def run_line(number: int, raw: bytes | LineRefused | None) -> None:
            try:
                outcome = await self._outcome(lease, number, raw, is_repeated=number in chunk.repeated)
                if outcome is not None:
                    async with appending:
                        outcome = await self._append(lease, room, parts, outcome)
                    lease.ended[outcome.is_ok] += 1
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                async for number, raw in self._lines(lease, chunk, ended):
                    await slots.acquire()
                    if lease.is_lost or self._is_stopping:
                        break
                    group.create_task(run_line(number, raw))
        finally:
            parts.close()
        await room.close()
        if not lease.is_lost and sum(lease.counts) == chunk.lines:
            await asyncio.to_thread(merge, contents, key, chunk.number)
            await self.batches.chunk_done(lease.work, lease.counts)

    async def _append(self, lease: _HeldLease, room: _OutcomeQuota, parts: Parts, outcome: LineOutcome) -> LineOutcome:
        """Write an outcome, or a refusal instead if the team's quota is full. Returns the written
        outcome.

        Waits while the disk is full or the database fails, since a line that is run again is paid
        again.
        """
        has_room = len(outcome.data) <= LINE_BYTES
        while True:
            try:
                if not has_room:
                    await room.take(len(outcome.data))
                has_room = True
                await asyncio.to_thread(parts.append, written(outcome))
                return outcome
            except OverQuota as error:
                refusal, has_room = LineRefused(str(error.error_code), error.message, id_of(outcome.data)), True
                line_id = new_object_id("batch_req_", time.time())
                outcome = LineOutcome(outcome.line, False, refused(line_id, outcome.line, refusal))
                lease.batch = await self.batches.stop(lease.work, refusal)
            except (OSError, SQLAlchemyError) as error:
                _log.error("storage_failed", reason=f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_S)

    async def _lines(
        self, lease: _HeldLease, chunk: LineSpan, ended: Collection[int]
    ) -> AsyncIterator[tuple[int, bytes | LineRefused | None]]:
        """The numbers and texts of a chunk's lines that are neither blank nor in `ended`, one at a
        time.

        Once the input cannot be read, each further line has the reason in place of its text.
        """
        number, lines_left, refusal = chunk.first_line, chunk.lines - len(ended), LineRefused(*_GONE)
        try:
            key = key_of(lease.batch.team_id, lease.batch.input_file_id)
            file: BinaryIO = await asyncio.to_thread(self.files.contents.open, key)
            with file:
                file.seek(chunk.offset)
                lines: Iterator[tuple[bytes | None, int]] = read_lines(file, chunk.size, self.settings.line_bytes_max)
                while (line := await asyncio.to_thread(next, lines, None)) is not None:
                    if line[0] != b"" and number not in ended:
                        lines_left -= 1
                        yield number, line[0]
                    number += 1
        except OSError as error:
            refusal = await self._why_unread(lease, error)
        while lines_left > 0:
            if number not in ended:
                lines_left -= 1
                yield number, refusal
            number += 1

    async def _outcome(
        self, lease: _HeldLease, number: int, raw: bytes | LineRefused | None, *, is_repeated: bool
    ) -> LineOutcome | None:
        """Run a line and return its outcome; None if this worker stops or loses the chunk before."""
        line_id = new_object_id("batch_req_", time.time())
        try:
            if isinstance(raw, LineRefused):
                raise raw
            line, model = parse(raw, lease.batch.endpoint, self.settings.line_bytes_max)
            if is_repeated:
                raise LineRefused("duplicate_custom_id", "Another line before has this `custom_id`", line.custom_id)
            reply = await self._reply(lease, line, model)
        except LineRefused as refusal:
            self.on_line(refusal.code)
            return LineOutcome(number, False, refused(line_id, number, refusal))
        if reply is None:
            return None
        self.on_line("ok" if reply.status == 200 else str(reply.status))
        request_id = reply.headers.get("x-request-id", "")
        body = answered(line_id, line.custom_id, reply.status, request_id, reply.body)
        return LineOutcome(number, reply.status == 200, body)

    async def _reply(self, lease: _HeldLease, line: LineRequest, model: str) -> _LineReply | None:
        """Send a line until its response is final. Returns None like `_outcome`. Raises
        LineRefused.
        """
        tries = 0
        while True:
            if not await self._room(lease, line, model):
                return None
            identity = await self.accounts.of_key(lease.batch.key_id)
            if identity is None:
                message = "The key that made the batch was revoked, or has expired"
                raise LineRefused("invalid_api_key", message, line.custom_id)
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
                self._paused[identity.team.id] = time.monotonic() + PAUSE_S
            wait_s = reply.wait_s(tries)
            if wait_s is None:
                return reply
            until = time.monotonic() + wait_s
            while (left_s := until - time.monotonic()) > 0 and not (self._is_stopping or lease.why_not()):  # noqa: ASYNC110
                await asyncio.sleep(min(left_s, PAUSE_S))

    async def _room(self, lease: _HeldLease, line: LineRequest, model: str) -> bool:
        """Wait until other requests leave room. Returns False if this worker stops or loses the
        chunk.

        Raises LineRefused if the batch ends before.
        """
        while not (lease.is_lost or self._is_stopping):
            if (refusal := lease.why_not()) is not None:
                raise LineRefused(refusal.code, refusal.message, line.custom_id)
            other_generations = self.pipeline.generations - self._running
            slots = self.settings.concurrency if other_generations <= 0 else max(1, self.settings.concurrency // 4)
            is_paused = self._paused.get(lease.batch.team_id, 0.0) > time.monotonic()
            if self._running < slots and not is_paused and not self._is_busy(model):
                return True
            await asyncio.sleep(_ROOM_EVERY_S)
        return False

    def _is_busy(self, model: str) -> bool:
        """Whether each deployment of a model has half its slots taken, or waiting requests."""
        try:
            alias = self.pipeline.fleet.alias(model)
        except ApiError:
            return False
        return all(
            deployment.slots.waiting
            or 2 * deployment.slots.taken >= max(2, deployment.slots.slots_max)
            or deployment.backend.load(0).waiting
            for deployment in alias.deployments.values()
        )

    async def _call(self, line: LineRequest, identity: Identity, batch_id: str) -> _LineReply:
        """Send a line to its endpoint in this process, and collect the response."""
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
        reply = _LineReply()
        await self.routes[line.url]["POST"](scope, receive, reply.send)
        return reply
