"""Batches of teams in SQL, and the leases by which the workers of all hosts share them.

Knows no HTTP and no requests. Shapes: OpenAI API reference, "Batch". Invariants: a change that
needs a lease is made only while its worker holds the lease; a batch ends once, together with its
files; a team finds its own batches alone.
"""

import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import schema
from gateway.accounts.audit import AuditRow, inserted
from gateway.accounts.database import Database, uncancelled
from gateway.batches.files import INPUT, LIVE, File, Files, new_object_id
from gateway.batches.lines import EXPIRED, LINE_BYTES, LineRefused, LineSpan
from gateway.settings import BatchSettings
from gateway.wire.errors import BadRequest, Forbidden, InUse, NotFound, shown

COMPLETION_WINDOW, _WINDOW_S = "24h", 86_400.0
LEASE_S = 15.0
_batches, _chunks = schema.batches, schema.batch_chunks
_UNDONE = sa.select(_chunks.c.batch_id).where(_chunks.c.is_done.is_(False))
_CHUNK = [_chunks.c[name] for name in LineSpan.__struct_fields__]
_ENDED = ("completed", "failed", "expired", "cancelled")
_KEPT_MAX = 10_000  # of a team's batches
_MOMENTS = ("created_at", "expires_at", "in_progress_at", "finalizing_at", "cancelling_at")


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with its counts of lines. Times are in unix seconds."""

    id: str
    team_id: int
    key_id: int
    endpoint: str
    input_file_id: str
    status: str
    created_at_s: float
    expires_at_s: float
    in_progress_at_s: float | None = None
    finalizing_at_s: float | None = None
    cancelling_at_s: float | None = None
    ended_at_s: float | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_kept_s: int | None
    metadata: dict[str, str] | None
    errors: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        moments = {name: _whole(getattr(self, f"{name}_s")) for name in _MOMENTS}
        ends = {f"{status}_at": _whole(self.ended_at_s) if self.status == status else None for status in _ENDED}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": self.errors,
            "input_file_id": self.input_file_id,
            "completion_window": COMPLETION_WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            **moments,
            **ends,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def _whole(moment_s: float | None) -> int | None:
    return None if moment_s is None else int(moment_s)


class BatchLease(msgspec.Struct, frozen=True):
    """A worker's lease of a chunk, or of the batch itself, to read its input or to end it."""

    batch: Batch
    chunk: LineSpan | None
    token: str


class Batches:
    """Stores batches, and leases them to workers. `clock` gives unix seconds.

    The clocks of several hosts must agree to within a few seconds.
    """

    def __init__(
        self, database: Database, files: Files, settings: BatchSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self.files = files
        self._settings = settings
        self.clock = clock

    # -- for callers

    async def create(
        self,
        team_id: int,
        key_id: int,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_kept_s: int | None,
        total: int = 0,
    ) -> Batch:
        """Create a batch of `total` lines, if known. Raises NotFound, Forbidden, and BadRequest for a file of another purpose."""
        file = await self.files.get(team_id, input_file_id)
        if file.purpose != INPUT:
            raise BadRequest(
                f"The file {file.id} has the purpose `{file.purpose}`: expected `{INPUT}`",
                param="input_file_id",
                code="invalid_value",
            )
        now_s = self.clock()
        batch = Batch(
            id=new_object_id("batch_", now_s),
            team_id=team_id,
            key_id=key_id,
            endpoint=endpoint,
            input_file_id=file.id,
            status="validating",
            created_at_s=now_s,
            expires_at_s=now_s + _WINDOW_S,
            output_kept_s=output_kept_s,
            metadata=metadata,
            total=total,
        )
        await self._insert(batch)
        return batch

    @uncancelled
    async def _insert(self, batch: Batch) -> None:
        async with self._database.writing() as connection:
            files, of_team = schema.files, _batches.c.team_id == batch.team_id
            live = sa.select(sa.func.count()).where(of_team, _batches.c.status.in_(LIVE))
            await self.files.held.lock(connection, batch.team_id)
            if (await connection.execute(live)).scalar_one() >= self._settings.active_max:
                raise Forbidden(
                    f"This team has {self._settings.active_max} batches that have not ended: wait for one, or cancel it",
                    code="too_many_batches",
                )
            input_file = sa.select(files.c.id).where(files.c.id == batch.input_file_id)
            if (await connection.execute(input_file)).scalar() is None:
                raise NotFound(f"No such File object: {batch.input_file_id}", param="id", code="file_not_found")
            row = msgspec.structs.asdict(batch)
            await connection.execute(sa.insert(_batches).values(**row, leased_by="", leased_until_s=0.0))
            oldest = sa.select(_batches.c.id).where(of_team).order_by(_batches.c.id.desc()).offset(_KEPT_MAX)
            is_old = _batches.c.id.in_(oldest.limit(_KEPT_MAX).scalar_subquery())
            await connection.execute(sa.delete(_batches).where(is_old, _batches.c.status.in_(_ENDED)))

    async def get(self, team_id: int | None, batch_id: str) -> Batch:
        """A team's batch, or any team's if `team_id` is None. Raises NotFound, also for another
        team's.
        """
        of_team = [] if team_id is None else [_batches.c.team_id == team_id]
        # PostgreSQL takes no NUL
        batches = [] if "\0" in batch_id else await self._select(*of_team, _batches.c.id == batch_id, limit=1)
        if not batches:
            raise NotFound(f"No batch found with id '{shown(batch_id)}'.", param="batch_id", code="batch_not_found")
        return batches[0]

    async def page(
        self, team_id: int | None, after: str, limit: int, *, before: str = "", endpoint: str = ""
    ) -> list[Batch]:
        """The batches of a team, or of all teams, older than the batch `after`, newest first.

        Or those newer than `before`, oldest first. Returns at most `limit` + 1.
        """
        where = [] if team_id is None else [_batches.c.team_id == team_id]
        where += [_batches.c.endpoint == endpoint] if endpoint else []
        where += [_batches.c.id < after] if after else []
        where += [_batches.c.id > before] if before else []
        return await self._select(*where, limit=limit + 1, is_oldest_first=bool(before))

    async def delete(self, batch: Batch) -> None:
        """Delete a batch that has ended; its files stay."""
        await self._database.write(sa.delete(_batches).where(_batches.c.id == batch.id, _batches.c.status.in_(_ENDED)))

    async def left(self) -> tuple[int, int]:
        """The number of live batches, and of their read lines that have not ended."""
        done = sa.select(sa.func.coalesce(sa.func.sum(_chunks.c.completed + _chunks.c.failed), 0)).scalar_subquery()
        sums = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_batches.c.total), 0) - done)
        ((count, lines),) = await self._database.rows(sums.where(_batches.c.status.in_(LIVE)))
        return count, max(0, int(lines))

    @uncancelled
    async def cancel(self, team_id: int, batch_id: str, row: AuditRow | None = None) -> None:
        """Begin to cancel a team's batch, and write `row` to the audit log, unless that was begun
        before.

        Raises NotFound, InUse.
        """
        batch = await self.get(team_id, batch_id)
        async with self._database.writing() as connection:
            update = await connection.execute(
                sa.update(_batches)
                .where(_batches.c.id == batch.id, _batches.c.status.in_(LIVE), _batches.c.status != "cancelling")
                .values(status="cancelling", cancelling_at_s=self.clock())
            )
            if update.rowcount and row is not None:
                await connection.execute(inserted(row))
        if not update.rowcount and (batch := await self.get(team_id, batch_id)).status not in LIVE:
            raise InUse(f"The batch has ended: its status is {batch.status}")

    @uncancelled
    async def _select(self, *where: Any, limit: int, is_oldest_first: bool = False) -> list[Batch]:
        async with self._database.reading() as connection:
            return await self._read(connection, *where, limit=limit, is_oldest_first=is_oldest_first)

    async def _read(
        self, connection: AsyncConnection, *where: Any, limit: int = 1, is_oldest_first: bool = False
    ) -> list[Batch]:
        """The batches, newest first; a running batch has the sums of its chunks' counts."""
        order = _batches.c.id if is_oldest_first else _batches.c.id.desc()
        selected = sa.select(_batches).where(*where).order_by(order).limit(limit)
        rows = list((await connection.execute(selected)).mappings())
        sums = (
            sa.select(_chunks.c.batch_id, sa.func.sum(_chunks.c.completed), sa.func.sum(_chunks.c.failed))
            .where(_chunks.c.batch_id.in_([row["id"] for row in rows]))
            .group_by(_chunks.c.batch_id)
        )
        counts = {
            batch_id: {"completed": int(completed), "failed": int(failed)}
            for batch_id, completed, failed in await connection.execute(sums)
        }
        batches = [{name: row[name] for name in Batch.__struct_fields__} for row in rows]
        return [Batch(**{**batch, **counts.get(batch["id"], {})}) for batch in batches]

    # -- for workers

    @uncancelled
    async def claim(self, token: str, busy_teams: Collection[int]) -> BatchLease | None:
        """Lease a free chunk or batch, except of `busy_teams`; None if nothing is free."""
        now_s = self.clock()
        async with self._database.reading() as connection:
            live = sa.select(_batches.c.id, _batches.c.team_id, _batches.c.leased_until_s)
            batches = list(await connection.execute(live.where(_batches.c.status.in_(LIVE))))
            if not batches:
                return None
            free = sa.case((_chunks.c.leased_until_s < now_s, _chunks.c.number))
            undone = sa.select(_chunks.c.batch_id, sa.func.min(free)).where(_chunks.c.is_done.is_(False))
            free_chunks: dict[str, int | None] = {  # of each batch with chunks to do, one that is free
                row[0]: row[1] for row in await connection.execute(undone.group_by(_chunks.c.batch_id))
            }
        free_work: dict[int, list[tuple[str, int | None]]] = {}
        for batch_id, team_id, leased_until_s in batches:
            is_free = free_chunks[batch_id] is not None if batch_id in free_chunks else leased_until_s < now_s
            if is_free and team_id not in busy_teams:
                free_work.setdefault(team_id, []).append((batch_id, free_chunks.get(batch_id)))
        if not free_work:
            return None
        # of each team alike, however many batches it has
        batch_id, number = random.choice(free_work[random.choice(list(free_work))])
        return await self.lease(batch_id, number, token, now_s)

    async def lease(self, batch_id: str, number: int | None, token: str, now_s: float) -> BatchLease | None:
        table, where = _of(batch_id, number)
        lease = {"leased_by": token, "leased_until_s": now_s + LEASE_S}
        async with self._database.writing() as connection:
            if number is None:  # PostgreSQL: a plan that commits meanwhile is waited for, and its chunks seen
                await connection.execute(sa.select(_batches.c.id).where(_batches.c.id == batch_id).with_for_update())
                where = (*where, _batches.c.id.not_in(_UNDONE))
            taken = sa.update(table).where(*where, table.c.leased_until_s < now_s).values(**lease)
            if not (await connection.execute(taken)).rowcount:
                return None
            (batch,) = await self._read(connection, _batches.c.id == batch_id) or (None,)
            if batch is None:
                return None
            if number is None:
                return BatchLease(batch, None, token)
            row = (await connection.execute(sa.select(*_CHUNK).where(*where))).mappings().one()
            return BatchLease(batch, LineSpan(**row), token)

    @uncancelled
    async def renew(self, work: BatchLease, counts: tuple[int, int]) -> Batch | None:
        """Renew a lease, and write a chunk's counts of completed and failed lines.

        Returns the current batch; None if the lease was lost.
        """
        values: dict[str, Any] = {"leased_until_s": self.clock() + LEASE_S}
        if work.chunk is not None:
            values |= {"completed": counts[0], "failed": counts[1]}
        async with self._database.writing() as connection:
            if not (await connection.execute(_held(work).values(**values))).rowcount:
                return None
            return next(iter(await self._read(connection, _batches.c.id == work.batch.id)), None)

    async def release(self, work: BatchLease) -> None:
        """End a lease, so that another worker can take it at once."""
        await self._database.write(_held(work).values(leased_by="", leased_until_s=0.0))

    @uncancelled
    async def plan(self, work: BatchLease, chunks: Sequence[LineSpan]) -> None:
        """Begin a batch with `chunks`, reserve room for an error of each line, and release the
        lease.

        Raises OverQuota if the team's files leave too little room.
        """
        async with self._database.writing() as connection:
            begun = sa.case((_batches.c.status == "validating", "in_progress"), else_=_batches.c.status)
            values = {"status": begun, "in_progress_at_s": self.clock(), "total": sum(chunk.lines for chunk in chunks)}
            if not (await connection.execute(_held(work).values(**values, leased_by="", leased_until_s=0.0))).rowcount:
                return
            size = sum(chunk.size + chunk.lines * LINE_BYTES for chunk in chunks)
            await self.files.reserve(connection, work.batch.id, work.batch.team_id, size)
            state = {"batch_id": work.batch.id, "is_done": False, "completed": 0, "failed": 0, "leased_by": ""}
            rows = [{**msgspec.structs.asdict(chunk), **state, "leased_until_s": 0.0} for chunk in chunks]
            for start in range(0, len(rows), 1_000):
                await connection.execute(sa.insert(_chunks), rows[start : start + 1_000])

    async def refuse(self, work: BatchLease, refusal: LineRefused) -> None:
        """End a batch with a refused or unreadable input."""
        is_expired = refusal.code == EXPIRED
        status = sa.case((_batches.c.status == "cancelling", "cancelled"), else_="expired" if is_expired else "failed")
        ended = {"status": status, "ended_at_s": self.clock(), "errors": _errors(refusal)}
        await self._database.write(_held(work).values(**ended))

    @uncancelled
    async def stop(self, work: BatchLease, refusal: LineRefused) -> Batch:
        """Begin no more lines of the batch, so that it fails once its outcomes are written.

        Returns the current batch.
        """
        async with self._database.writing() as connection:
            live = sa.update(_batches).where(_batches.c.id == work.batch.id, _batches.c.status.in_(LIVE))
            await connection.execute(live.values(errors=_errors(refusal)))
            return next(iter(await self._read(connection, _batches.c.id == work.batch.id)), work.batch)

    async def chunk_done(self, work: BatchLease, counts: tuple[int, int]) -> None:
        """Record that every line of the chunk has ended."""
        await self._database.write(_held(work).values(is_done=True, completed=counts[0], failed=counts[1]))

    @uncancelled
    async def chunks(self, work: BatchLease) -> list[LineSpan]:
        """The chunks of a batch; sets its status to finalizing."""
        async with self._database.writing() as connection:
            shown = sa.case((_batches.c.status == "in_progress", "finalizing"), else_=_batches.c.status)
            moment = sa.func.coalesce(_batches.c.finalizing_at_s, self.clock())
            await connection.execute(_held(work).values(status=shown, finalizing_at_s=moment))
            rows = sa.select(*_CHUNK).where(_chunks.c.batch_id == work.batch.id).order_by(_chunks.c.number)
            return [LineSpan(**row) for row in (await connection.execute(rows)).mappings()]

    @uncancelled
    async def reopen(self, work: BatchLease, numbers: Sequence[int]) -> None:
        """Let chunks whose outcomes are lost run again."""
        async with self._database.writing() as connection:
            if (await connection.execute(_held(work).values(finalizing_at_s=None))).rowcount:
                lost = sa.update(_chunks).where(_chunks.c.batch_id == work.batch.id, _chunks.c.number.in_(numbers))
                await connection.execute(lost.values(is_done=False, leased_by="", leased_until_s=0.0))

    @uncancelled
    async def end(
        self, work: BatchLease, counts: tuple[int, int], *, is_expired: bool, output: File | None, errors: File | None
    ) -> bool:
        """End a batch together with its files.

        Returns False, and changes nothing, if the lease was lost or a chunk is not done.
        """
        status = sa.case(
            (_batches.c.status == "cancelling", "cancelled"),
            (_batches.c.errors.is_not(None), "failed"),
            else_="expired" if is_expired else "completed",
        )
        async with self._database.writing() as connection:
            done = _held(work).where(_batches.c.id.not_in(_UNDONE))
            values = {
                "status": status,
                "ended_at_s": self.clock(),
                "completed": counts[0],
                "failed": counts[1],
                "output_file_id": output.id if output is not None else None,
                "error_file_id": errors.id if errors is not None else None,
            }
            if not (await connection.execute(done.values(**values))).rowcount:
                return False
            for file in (output, errors):
                if file is not None:
                    await self.files.completed(connection, file)
            is_folder = schema.files.c.id == work.batch.id
            await self.files.held.delete(connection, work.batch.team_id, is_folder)
            await connection.execute(sa.delete(_chunks).where(_chunks.c.batch_id == work.batch.id))
            return True

    async def forget(self) -> None:
        """Delete batches that ended longer ago than twice the files' lifetime."""
        long_ago_s = self.clock() - 2 * self._settings.kept_days * 86_400
        await self._database.write(sa.delete(_batches).where(_batches.c.ended_at_s < long_ago_s))


def _errors(refusal: LineRefused) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": refusal.code, "message": refusal.message, "line": None, "param": None}]}


def _of(batch_id: str, number: int | None) -> tuple[sa.Table, tuple[Any, ...]]:
    """The table that holds a lease, and the condition for its row."""
    if number is None:
        return _batches, (_batches.c.id == batch_id, _batches.c.status.in_(LIVE))
    return _chunks, (_chunks.c.batch_id == batch_id, _chunks.c.number == number, _chunks.c.is_done.is_(False))


def _held(work: BatchLease) -> sa.Update:
    """An update of the leased row, which changes nothing once the lease is lost."""
    table, where = _of(work.batch.id, work.chunk.number if work.chunk is not None else None)
    return sa.update(table).where(*where, table.c.leased_by == work.token)
