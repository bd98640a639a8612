"""Responses in the background: generated without their client, and followed at any worker.

The worker that receives a request generates its response, and renews the lease of its row: a
response whose lease has expired has failed, and is never generated again. Knows the events of a
response as bytes. Invariants: each response has one record, as any request; a stream has every
event once and in order, or ends with an error; its last event agrees with the row's status, which
the end or a cancellation sets, whichever is first; the script that appends events keeps the bytes
of a team's streams in Redis under their limit.

    sameway:{background:TEAM}:ID      list   the events of a streamed response, by their number; those
                                             of a cached answer are the last element, packed
    sameway:{background:TEAM}:bytes   hash   the bytes of each stream by its id, and of all
    sameway:{background:TEAM}:ends    zset   when each stream expires
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from cache.redis_link import RedisLink
from gateway.accounts import Identity, Team
from gateway.accounts.stored_responses import LIVE, ResponseStore
from gateway.api import asgi
from gateway.api.chat import COMMENT, SILENCE_S
from gateway.api.headers import EVENT_STREAM, Headers
from gateway.api.memory import Memory
from gateway.api.response_events import ResponseRenderer, framed
from gateway.journey.bodies import ClientGone
from gateway.journey.flight import Reply
from gateway.journey.turn import Ended, Turn
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.transport.http_server import WHEN_GONE
from gateway.wire.errors import ApiError, Unavailable

_AT_ONCE = 1_000  # in a worker
_RENEW_EVERY_S = 1.0
_EVENTS_KEPT_MS = 600_000
_PACKED = b"\0"  # how no event begins
_PACKED_BYTES_MAX = 4 << 20  # which a follower unpacks at once
_READ_AT_ONCE = 500
_LOOK_EVERY_S, _LOOKS_A_STATUS = 0.05, 20
_ENDS = tuple(b"event: response.%b\n" % status for status in (b"completed", b"incomplete", b"failed"))

# KEYS stream, bytes, ends. ARGV id, milliseconds that a stream is kept, bytes that all may have, events.
# Replies 1, or 0 where the events have no room, which leaves the stream without an end.
_TELL = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do
  redis.call('HINCRBY', KEYS[2], '', -(redis.call('HGET', KEYS[2], id) or 0))
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
end
local size = 0
for at = 4, #ARGV do size = size + #ARGV[at] end
if (tonumber(redis.call('HGET', KEYS[2], '')) or 0) + size > tonumber(ARGV[3]) then return 0 end
for at = 4, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[at]) end
redis.call('HINCRBY', KEYS[2], '', size)
redis.call('HINCRBY', KEYS[2], ARGV[1], size)
redis.call('ZADD', KEYS[3], now + ARGV[2], ARGV[1])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
return 1
"""

_log = get_logger()


class _Work:
    """A response that is being generated. `begun` resolves to its reply once a reader can leave
    that reply.
    """

    def __init__(self, response: ResponseRenderer, team_id: int) -> None:
        self.response = response
        self.team_id = team_id
        self.answering: asyncio.Task[Reply] | None = None
        self.begun: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.is_cut = False
        self.task: asyncio.Task[None] | None = None

    @property
    def reply(self) -> Reply | None:
        return self.begun.result() if self.begun.done() else None


class Background:
    """Generates this worker's background responses, and follows any worker's. One per worker.

    `count` is called with the outcome of each response: completed, failed or cancelled.
    """

    def __init__(
        self, pipeline: Pipeline, store: ResponseStore, memory: Memory, link: RedisLink, count: Callable[[str], None]
    ) -> None:
        self._pipeline = pipeline
        self._store = store
        self._memory = memory
        self._link = link
        self._count = count
        self._works: dict[str, _Work] = {}
        self._beginning = 0

    @property
    def _bytes_max(self) -> int:
        return self._pipeline.settings.responses.team_stream_bytes_max

    async def begin(self, turn: Turn, response: ResponseRenderer, identity: Identity) -> bytes:
        """Store a response and start its generation; returns its body as stored.

        Raises ApiError, also for a refusal before any deployment is asked.
        """
        if len(self._works) + self._beginning >= _AT_ONCE:
            raise Unavailable("Too many responses are generated in the background: try again later", code="busy")
        self._beginning += 1
        try:
            await response.keep()
            body, work = response.body(), _Work(response, identity.team.id)
            try:
                if not await self._tell(work, response.queued()):
                    raise Unavailable(
                        f"The streams of this team's responses in the background fill their {self._bytes_max:,} bytes: "
                        "try again in ten minutes, or leave out `stream`",
                        code="busy",
                    )
                work.answering = asyncio.create_task(self._pipeline.answer(turn, identity, work.begun.set_result))
                await asyncio.wait([work.answering, work.begun], return_when=asyncio.FIRST_COMPLETED)
                if work.answering.done() and not work.begun.done():
                    work.begun.set_result(work.answering.result())
            except BaseException:
                if work.answering is not None:
                    work.answering.cancel()
                await self._store.delete(identity.team.id, response.id)
                raise
            self._works[response.id] = work
        finally:
            self._beginning -= 1
        work.task = asyncio.create_task(self._generate(work, work.answering, turn, identity))
        return body

    async def _generate(self, work: _Work, answering: asyncio.Task[Reply], turn: Turn, identity: Identity) -> None:
        response, arrival, ended = work.response, turn.arrival, Ended()

        async def refused(error: ApiError) -> None:
            events = response.failed(error)
            with suppress(ClientGone):
                await response.keep()
                await self._tell(work, events)
            self._count("failed")

        try:
            reply = await answering
            await self._store.change(response.id, status="in_progress")
            if reply.reader is not None and turn.is_stream:
                while batch := await reply.reader.next():
                    await self._tell(work, response.events(batch))
                events = response.end()
            else:
                chunks = await reply.reader.whole() if reply.reader is not None else []
                served = reply.shown
                events = response.replay(served) if served is not None else response.events(chunks) + response.end()
            await response.keep()
            await self._tell(work, events, is_replay=reply.served is not None)
            self._count("completed")
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, ClientGone):
                self._count("cancelled")
            ended = await asgi.fail(error, arrival.request_id, refused)
        finally:
            if work.reply is not None and work.reply.reader is not None:
                work.reply.reader.close()
            self._pipeline.finish(arrival, ended, identity=identity, turn=turn, reply=work.reply)
            del self._works[response.id]
            await self._memory.conversations.release(arrival.request_id)

    def leave(self, id: str) -> None:
        """Stop the generation of a response that was cancelled or deleted, if this worker runs it."""
        work = self._works.get(id)
        if work is not None and work.reply is not None and work.reply.reader is not None:
            work.reply.reader.leave(ClientGone())

    async def renew(self) -> None:
        """Renew the leases and locks, and stop generations that lost their row."""
        await self._memory.conversations.renew()
        ids = list(self._works)
        if ids:
            live = await self._store.renew(ids)
            for id in ids:
                if id not in live:
                    self.leave(id)

    async def run(self) -> None:
        """Renew until cancelled. Errors of the database pass through."""
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            await self.renew()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The running generations. Cancelling one fails its response."""
        return [work.task for work in self._works.values() if work.task is not None]

    # -- events

    async def _tell(self, work: _Work, events: bytes, *, is_replay: bool = False) -> bool:
        """Append events to a stream. After one failure nothing more is appended, so that it has no
        gaps.

        `is_replay`: these are the stream's last events, all at once. Returns whether the team's
        streams had room.
        """
        if not events or work.is_cut:
            return True
        parts = [one + b"\n\n" for one in events.split(b"\n\n") if one]
        if is_replay and len(events) <= _PACKED_BYTES_MAX:
            parts = [_PACKED + await asyncio.to_thread(zlib.compress, events, 1)]
        id = work.response.id
        keys = [_key(work.team_id, name) for name in (id, "bytes", "ends")]
        reason = "its team's streams have no room"
        try:
            has_room = await self._link.eval(_TELL, 3, *keys, id, _EVENTS_KEPT_MS, self._bytes_max, *parts)
            if has_room:
                return True
        except RedisError as error:
            has_room, reason = True, str(error)
        work.is_cut = True
        _log.warning("background_stream_broken", response=id, reason=reason)
        return bool(has_room)

    async def has_events(self, team: Team, id: str) -> bool:
        """Whether a response has a stream. Raises Unavailable."""
        try:
            return bool(await self._link.execute_command("EXISTS", _key(team.id, id)))
        except RedisError:
            raise Unavailable("Redis does not answer; try again shortly", code="redis_unavailable") from None

    async def events(self, team: Team, id: str, after: int) -> AsyncIterator[bytes]:
        """The events of a response after the event number `after`, until its end; empty bytes while
        it waits.

        If the stream breaks off, the last event tells how the response ended. Never raises.
        """
        key, looks, is_over = _key(team.id, id), 0, False
        try:
            while True:
                start = after + 1
                batch = await self._link.execute_command("LRANGE", key, start, start + _READ_AT_ONCE - 1)
                if batch and batch[-1].startswith(_PACKED):
                    batch[-1:] = await _unpacked(batch[-1])
                after += len(batch)
                yield b"".join(batch)
                if batch and batch[-1].startswith(_ENDS):
                    return
                if batch:
                    looks = 0
                    continue
                if is_over:
                    last_element = await self._link.execute_command("LRANGE", key, -1, -1)
                    if last_element and last_element[-1].startswith(_PACKED):
                        first = await self._link.execute_command("LLEN", key) - 1
                        last_element = await _unpacked(last_element[-1])
                        yield b"".join(last_element[start - first :])
                    if last_element and last_element[-1].startswith(_ENDS):
                        return
                    break
                looks += 1
                if looks % _LOOKS_A_STATUS == 0:
                    is_over = (await self._memory.find(team, id)).status not in LIVE
                await asyncio.sleep(_LOOK_EVERY_S)
            body = (await self._memory.find(team, id)).body
            if msgspec.json.decode(body)["status"] in ("failed", "cancelled"):
                yield framed("response.failed", after + 1, response=msgspec.Raw(body))
                return
            why = "The stream broke off: read the response whole"
        except (RedisError, SQLAlchemyError, OSError, ApiError) as error:
            why = error.message if isinstance(error, ApiError) else "The stream broke off: try again, or read it whole"
        yield framed("error", after + 1, code="stream_broken", message=why, param=None)


def _key(team_id: int, name: str) -> str:
    return f"sameway:{{background:{team_id}}}:{name}"


async def _unpacked(packed: bytes) -> list[bytes]:
    """Decompress an element of the list into its events."""
    events = await asyncio.to_thread(zlib.decompress, packed[len(_PACKED) :])
    return [one + b"\n\n" for one in events.split(b"\n\n") if one]


async def send_events(scope: asgi.Scope, send: asgi.Send, headers: Headers, events: AsyncIterator[bytes]) -> None:
    """Send a stream of `events` until its end, or until the client leaves."""
    client_gone = asyncio.Event()
    when_gone = scope.get("extensions", {}).get(WHEN_GONE)
    if when_gone is not None:
        when_gone(client_gone.set)
    await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})
    told_at = time.monotonic()
    async for body in events:
        if client_gone.is_set():
            return
        if body or time.monotonic() - told_at >= SILENCE_S:
            await send({"type": "http.response.body", "body": body or COMMENT, "more_body": True})
            told_at = time.monotonic()
    await send({"type": "http.response.body", "body": b""})
