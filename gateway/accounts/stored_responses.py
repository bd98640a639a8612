"""Responses that callers asked to keep, in the accounts' database, until they expire.

Knows no HTTP and no shape of a response: inputs and bodies are bytes of JSON. Invariants: a row is
read, continued and deleted under its team alone, and is deleted with it; an expired row counts as
missing; each write bounds the team's bytes, and the queue of waiting rows is bounded; lost rows are
counted.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.conversations import LEASE_S, Added, Conversations, HistoryTooLong
from gateway.accounts.database import Database, name_of, uncancelled
from gateway.accounts.holdings import ROW_BYTES, Holding, Holdings, OverQuota
from gateway.accounts.schema import conversations, responses
from gateway.loggers import get_logger
from gateway.settings import ResponseSettings
from gateway.wire.errors import Unavailable

_QUEUE_BYTES_MAX = 64 << 20
_ROWS_AT_ONCE = 100
_WRITE_AWAITED_S = 2.0
_RETRY_S = 0.5
_PURGED_AT_ONCE, _PURGE_PAUSE_S = 200, 0.2
LIVE = ("queued", "in_progress")
"""The statuses of a response that its worker still generates under a lease."""
_LIVE_MAX = 250  # of a team, at all workers
_LINKS_MAX = 20_000  # as many messages as a request may have

_log = get_logger()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response. `input` is a JSON array of items, without the items that `previous_id` stands
    for.

    `added` are its items, which its conversation gets. Unless it `is_stored`, nothing else is kept.
    `status` is the status of a background response; None if it is complete.
    """

    id: str
    team_id: int
    key_id: int
    previous_id: str | None
    input: bytes
    body: bytes
    conversation_id: str | None = None
    added: Added = ()
    is_stored: bool = True
    status: str | None = None

    @property
    def request_id(self) -> str:
        return f"req_{self.id.removeprefix('resp_')}"

    @property
    def size_bytes(self) -> int:
        return ROW_BYTES + len(self.input) + len(self.body)


@dataclass(eq=False, repr=False)
class ResponseStore:
    """Stores responses. A team's hold at most `settings.team_bytes_max` bytes: the oldest are
    deleted.

    The same limit applies to its conversations. `clock` gives unix seconds. `count` is called with
    an outcome, `stored` or `lost`, and the number of responses.
    """

    database: Database
    clock: Callable[[], float]
    settings: ResponseSettings
    count: Callable[[str, int], None]

    def __post_init__(self) -> None:
        settings = self.settings
        self.conversations = Conversations(self.database, self.clock, settings.retention_s, settings.team_bytes_max)
        self._held = Holdings(self.database, responses)
        self._waiting: list[tuple[StoredResponse, asyncio.Future[None]]] = []
        self._waiting_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._is_failing = False
        self._is_closing = False

    # -- writing

    async def put(self, row: StoredResponse) -> None:
        """Write `row` soon, together with other rows; returns when it is written.

        Returns early after two seconds, at once while the database fails, and if the queue is full,
        which loses the row. Never raises.
        """
        if self._waiting and self._waiting_bytes + row.size_bytes > _QUEUE_BYTES_MAX:
            self._lost([row], "the queue is full")
            return
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((row, written))
        self._waiting_bytes += row.size_bytes
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        if not self._is_failing:
            await asyncio.wait([written], timeout=_WRITE_AWAITED_S)

    async def aclose(self) -> None:
        """Write the waiting rows, with one attempt."""
        self._is_closing = True
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        """Write until the queue is empty, and retry while the database fails.

        A row that the database refuses is lost alone.
        """
        at_once = _ROWS_AT_ONCE
        while self._waiting:
            batch = self._waiting[:at_once]
            rows = [row for row, _ in batch]
            try:
                await self._insert(rows)
                self._is_failing = False
                self.count("stored", len(rows))
            except (SQLAlchemyError, OverQuota) as error:
                is_refused = _is_refused(error)
                if is_refused and len(rows) > 1:
                    at_once = 1
                    continue
                at_once = _ROWS_AT_ONCE
                had_failed, self._is_failing = self._is_failing, not is_refused
                if self._is_failing and not had_failed:
                    _log.warning("responses_not_written", reason=name_of(error), waiting=len(self._waiting))
                if self._is_failing and not self._is_closing:
                    if had_failed:  # else at once: the connection may have been an old one
                        self._release(batch)
                        await asyncio.sleep(_RETRY_S)
                    continue
                if is_refused and await self._has(rows[0]):
                    self.count("stored", 1)
                else:
                    self._lost(rows, _why(error))
            del self._waiting[: len(batch)]
            self._waiting_bytes -= sum(row.size_bytes for row in rows)
            self._release(batch)
        self._writing = None

    async def _has(self, row: StoredResponse) -> bool:
        """Whether the database has the row: a commit may succeed although its reply is lost."""
        try:
            stored = await self.find(row.team_id, row.id)
        except SQLAlchemyError:
            return False
        return stored is not None and stored.body == row.body

    def _release(self, batch: Sequence[tuple[StoredResponse, asyncio.Future[None]]]) -> None:
        for _, written in batch:
            if not written.done():
                written.set_result(None)

    def _lost(self, rows: Sequence[StoredResponse], reason: str) -> None:
        self.count("lost", len(rows))
        _log.warning("responses_lost", responses=len(rows), first=rows[0].id, reason=reason)

    @uncancelled
    async def _insert(self, rows: Sequence[StoredResponse]) -> None:
        async with self.database.writing(is_durable=False) as connection:
            if values := [self._values(row) for row in rows if row.is_stored]:
                for team_id in sorted({row["team_id"] for row in values}):
                    sizes = [row["size_bytes"] for row in values if row["team_id"] == team_id]
                    held = await self._held.add(connection, team_id, sum(sizes), len(sizes))
                    await self._bound(connection, team_id, held, "")
                await connection.execute(sa.insert(responses), values)
            for row in rows:
                await self._join(connection, row)

    async def _join(self, connection: AsyncConnection, row: StoredResponse) -> None:
        if row.conversation_id is not None:
            await self.conversations.append(
                connection, row.team_id, row.conversation_id, row.added, ended=row.request_id
            )

    def _values(self, row: StoredResponse) -> dict[str, Any]:
        return {
            "id": row.id,
            "team_id": row.team_id,
            "key_id": row.key_id,
            "previous_id": row.previous_id,
            "expires_at_s": self.clock() + self.settings.retention_s,
            "size_bytes": row.size_bytes,
            "input": row.input,
            "body": row.body,
            "status": row.status,
        }

    # -- in the background

    @uncancelled
    async def begin(self, row: StoredResponse) -> None:
        """Insert a response that this worker generates from now on, and lease it.

        Raises OverQuota, and Unavailable if the team has too many running responses.
        """
        async with self.database.writing(is_durable=False) as connection:
            await self._bound(
                connection, row.team_id, await self._held.add(connection, row.team_id, row.size_bytes), row.id
            )
            r = responses.c
            are_live = (r.team_id == row.team_id, r.status.in_(LIVE), r.leased_until_s > self.clock())
            if (await connection.execute(sa.select(sa.func.count()).where(*are_live))).scalar_one() >= _LIVE_MAX:
                raise Unavailable(
                    f"This team has {_LIVE_MAX} responses in the background that have not ended: try again later",
                    code="busy",
                )
            values = {**self._values(row), "leased_until_s": self.clock() + LEASE_S}
            await connection.execute(sa.insert(responses).values(values))

    @uncancelled
    async def renew(self, ids: Collection[str]) -> set[str]:
        """Renew the leases of these responses; returns the ids of those still to be generated."""
        is_live = sa.and_(responses.c.id.in_(ids), responses.c.status.in_(LIVE))
        async with self.database.writing(is_durable=False) as connection:
            kept = sa.update(responses).where(is_live).values(leased_until_s=self.clock() + LEASE_S)
            await connection.execute(kept)
            return set((await connection.execute(sa.select(responses.c.id).where(is_live))).scalars())

    @uncancelled
    async def change(
        self, id: str, *where: sa.ColumnElement[bool], ended: StoredResponse | None = None, **values: Any
    ) -> bool:
        """Change the row of a response that is still generated; returns whether it was.

        If `ended` is given, its items join its conversation.
        """
        async with self.database.writing(is_durable=False) as connection:
            is_it = sa.and_(responses.c.id == id, responses.c.status.in_(LIVE), *where)
            if ended is None:
                return (await connection.execute(sa.update(responses).where(is_it).values(values))).rowcount > 0
            holding = await self._held.resize(connection, ended.team_id, values, is_it)
            if holding is not None:
                await self._bound(connection, ended.team_id, holding, id)
                await self._join(connection, ended)
            return holding is not None

    async def end(self, row: StoredResponse) -> bool:
        """Keep a response at its end, unless it was cancelled, given up or deleted meanwhile.

        Returns whether it is kept. Retries while the database fails. Never raises.
        """
        has_failed = False
        while True:
            try:
                fields = {"status": row.status, "body": row.body, "size_bytes": row.size_bytes}
                is_changed = await self.change(row.id, ended=row, **fields)
                return is_changed or (has_failed and await self._has(row))
            except (SQLAlchemyError, OverQuota) as error:
                if self._is_closing or _is_refused(error):
                    self._lost([row], _why(error))
                    return False
                has_failed = True
                _log.warning("responses_not_written", reason=name_of(error), waiting=1)
                await asyncio.sleep(_RETRY_S)

    # -- reading

    def _is_teams(self, team_id: int) -> sa.ColumnElement[bool]:
        return sa.and_(responses.c.team_id == team_id, responses.c.expires_at_s > self.clock())

    async def find(self, team_id: int, id: str) -> StoredResponse | None:
        """The team's response `id`, or None. A response whose lease has expired becomes failed."""
        asked = sa.select(responses).where(responses.c.id == id, self._is_teams(team_id))
        row = next(iter(await self.database.rows(asked)), None)
        if row is not None and row.status in LIVE and row.leased_until_s < self.clock():
            await self.change(id, responses.c.leased_until_s < self.clock(), status="failed")
            return await self.find(team_id, id)
        return _response(row) if row is not None else None

    async def page(self, team_id: int, prefix: str, after: str, limit: int, *, is_ascending: bool) -> dict[str, bytes]:
        """The bodies of the team's rows whose ids begin with `prefix`, in the order of their ids."""
        id = responses.c.id
        where = [self._is_teams(team_id), id.startswith(prefix, autoescape=True)]
        if after:
            where.append(id > after if is_ascending else id < after)
        ordered = sa.select(id, responses.c.body).where(*where).order_by(id if is_ascending else id.desc())
        return {row.id: row.body for row in await self.database.rows(ordered.limit(limit))}

    @uncancelled
    async def rewrite(self, row: StoredResponse, body: bytes) -> None:
        """Replace the body of a row that is complete. Raises OverQuota."""
        size_bytes = row.size_bytes + len(body) - len(row.body)
        async with self.database.writing(is_durable=False) as connection:
            values = {"body": body, "size_bytes": size_bytes}
            holding = await self._held.resize(connection, row.team_id, values, responses.c.id == row.id)
            if holding is not None:
                await self._bound(connection, row.team_id, holding, row.id)

    @uncancelled
    async def texts(self, team_id: int, ids: Collection[str], bytes_max: int, *, is_input: bool) -> dict[str, bytes]:
        """The inputs or the bodies of the team's responses `ids`, by id; missing ids are left out.

        Raises HistoryTooLong if they have more than `bytes_max` bytes.
        """
        column = responses.c.input if is_input else responses.c.body
        is_asked = sa.and_(responses.c.id.in_(ids), self._is_teams(team_id))
        async with self.database.reading() as connection:
            size = (await connection.execute(sa.select(sa.func.sum(sa.func.length(column))).where(is_asked))).scalar()
            if (size or 0) > bytes_max:
                raise HistoryTooLong
            found = await connection.execute(sa.select(responses.c.id, column.label("text")).where(is_asked))
            return {row.id: row.text for row in found}

    async def chain(self, team_id: int, last_id: str, bytes_max: int) -> tuple[list[StoredResponse], str | None]:
        """The responses that `last_id` continues, oldest first, then itself, in one query.

        The second value is the id of the latest missing link, or None. Raises HistoryTooLong if
        they have more than `bytes_max` bytes.
        """
        r, is_teams = responses.c, self._is_teams(team_id)
        last = sa.select(r.id, r.previous_id, r.size_bytes.label("total"), sa.literal(0).label("back"))
        links = last.where(r.id == last_id, is_teams).cte("links", recursive=True)
        is_within = sa.and_(links.c.total <= bytes_max, links.c.back < _LINKS_MAX)
        before = sa.select(r.id, r.previous_id, links.c.total + r.size_bytes, links.c.back + 1)
        links = links.union_all(before.where(r.id == links.c.previous_id, is_teams, is_within))
        asked = sa.select(*responses.c, links.c.total, links.c.back).join(links, links.c.id == r.id)
        rows = await self.database.rows(asked.order_by(links.c.back.desc()))
        if rows and (rows[0].total > bytes_max or rows[0].back >= _LINKS_MAX):
            raise HistoryTooLong
        if not rows or rows[0].previous_id is not None:
            return [], rows[0].previous_id if rows else last_id
        return [_response(row) for row in rows], None

    @uncancelled
    async def room(self, team_id: int) -> dict[str, Holding]:
        """The counts and bytes of a team's responses and conversations."""
        none = Holding(0, 0)
        stores = {responses.name: self._held, conversations.name: self.conversations.held}
        return {name: (await one.of_teams(team_id)).get(team_id, none) for name, one in stores.items()}

    async def _bound(self, connection: AsyncConnection, team_id: int, holding: Holding, kept_id: str) -> None:
        await self._held.bound(connection, team_id, holding, self.settings.team_bytes_max, kept_id)

    # -- removing

    @uncancelled
    async def delete(self, team_id: int, id: str) -> bool:
        """Delete one response of the team; returns whether it existed."""
        async with self.database.writing(is_durable=False) as connection:
            return await self._held.delete(connection, team_id, responses.c.id == id, self._is_teams(team_id)) > 0

    async def purge(self) -> None:
        """Delete expired responses and conversations, in batches with a pause after each."""
        for holdings, table in ((self._held, responses), (self.conversations.held, conversations)):
            purged = _PURGED_AT_ONCE
            while purged == _PURGED_AT_ONCE:
                purged = await holdings.purge(table.c.expires_at_s <= self.clock(), most=_PURGED_AT_ONCE)
                await asyncio.sleep(_PURGE_PAUSE_S)
        await self.database.shrink()


# data exceptions, violated constraints and limits; source: PostgreSQL, "PostgreSQL Error Codes"
_REFUSALS = ("22", "23", "54")


def _is_refused(error: Exception) -> bool:
    """Whether the database would refuse the row again: its team is gone, or it does not fit."""
    state = str(getattr(error.orig, "sqlstate", "")) if isinstance(error, DBAPIError) else ""
    return isinstance(error, DataError | IntegrityError | OverQuota) or state.startswith(_REFUSALS)


def _why(error: Exception) -> str:
    if isinstance(error, OverQuota):
        return error.message
    return "the database refused it" if _is_refused(error) else "the gateway was stopped while the database failed"


def _response(row: Any) -> StoredResponse:
    return StoredResponse(
        id=row.id,
        team_id=row.team_id,
        key_id=row.key_id,
        previous_id=row.previous_id,
        input=row.input,
        body=row.body,
        status=row.status,
    )
