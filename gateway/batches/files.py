"""Files of teams: a row for each in SQL, its content in a folder or bucket that all hosts share.

Knows no HTTP, and no shape of a content. Invariants: a content's name is the file's id, never a
text of a client; a row exists before its content does, so a content without a row may be removed; a
team's files, including uploads and the outcomes of its batches, stay within its quota; contents of
another database are neither read nor removed: a marker beside them has the database's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import schema
from gateway.accounts.database import Database, uncancelled
from gateway.accounts.holdings import Holdings, OverQuota
from gateway.accounts.schema import MARKER
from gateway.accounts.teams import Team
from gateway.loggers import get_logger
from gateway.settings import BatchSettings
from gateway.transport.contents import Contents, Writing
from gateway.wire.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    InUse,
    NotFound,
    StorageFull,
    TooLarge,
    Unavailable,
    shown,
)

INPUT, OUTPUT = "batch", "batch_output"
INPUTS = ("user_data", "assistants", "vision")
"""The purposes of files that a request may have in its content."""
PURPOSES = (INPUT, OUTPUT, *INPUTS)
_STALE_S = 3_600.0  # an upload without a byte for as long has no process any more
_PIECE_BYTES = 256 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CONTENT = re.compile(r"file-[0-9a-f]{32}")
_OWN = re.compile(r"(?:[0-9]+/)?(?:file-|batch_)[0-9a-f]{32}")  # with all its parts
_LOOK_EVERY_S = 10.0
DAY_S = 86_400
_FORM_BYTES_MAX = 64 << 10  # of an upload around its file
EXPIRES_S = (3_600, 30 * DAY_S)

_log = get_logger()
_files, _batches = schema.files, schema.batches

LIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""The statuses of a batch that has not ended."""
_UNNEEDED = sa.and_(
    *(
        _files.c.id.not_in(sa.select(one).where(_batches.c.status.in_(LIVE)))
        for one in (_batches.c.input_file_id, _batches.c.id)
    )
)


def new_object_id(kind: str, at_s: float) -> str:
    """A new id. Ids of one `kind` sort by their time, `at_s` in unix seconds."""
    return f"{kind}{int(at_s * 1000):012x}{secrets.token_hex(10)}"


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A complete file. Times are in unix seconds; `expires_at_s` None: it never expires."""

    id: str
    team_id: int
    purpose: str
    filename: str
    bytes: int
    created_at_s: float
    expires_at_s: float | None

    def as_json(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_at_s),
            "expires_at": None if self.expires_at_s is None else int(self.expires_at_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def storage_error(error: OSError) -> ApiError:
    """The client's error for a full or unusable folder; only the log names the path."""
    _log.error("storage_failed", reason=f"{type(error).__name__}: {error}")
    if error.errno in _FULL:
        return StorageFull("The gateway's storage for files is full: delete files, or ask your admin for room")
    return Unavailable("The gateway's storage for files can't be used at the moment", code="storage_unavailable")


def key_of(team_id: int, object_id: str) -> str:
    """The key of a file's content, or of a batch's outcomes. The ids come from rows, never from a request."""
    return f"{team_id}/{object_id}"


class Upload:
    """An arriving file: `write` its pieces, then `keep` or `drop` it, once."""

    def __init__(self, files: Files, file_id: str, team_id: int, at_s: float, bytes_max: int) -> None:
        self._files = files
        self.id = file_id
        self._team_id = team_id
        self._at_s = at_s
        self._bytes_max = bytes_max
        self._file: Writing | None = None
        self._waiting = bytearray()
        self.bytes = 0

    async def write(self, piece: bytes) -> None:
        """Append a piece. Raises TooLarge, StorageFull, Unavailable."""
        self.bytes += len(piece)
        if self.bytes > self._bytes_max:
            raise _too_large(self._bytes_max)
        self._waiting += piece
        if len(self._waiting) >= _PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        piece, self._waiting = self._waiting, bytearray()
        try:
            await asyncio.to_thread(self._write, piece)
        except OSError as error:
            raise storage_error(error) from None

    def append(self, piece: bytes) -> None:
        """Write a piece, for a caller in a thread: it blocks. Raises OSError."""
        self.bytes += len(piece)
        self._write(piece)

    def _write(self, piece: bytes | bytearray) -> None:
        if self._file is None:
            self._file = self._files.contents.create(key_of(self._team_id, self.id))
        if self._file.write(piece) != len(piece):
            raise OSError(errno.ENOSPC, "not all of it was written")

    async def keep(self, purpose: str, filename: str, expires_after_s: int | None = None) -> File:
        """Complete the file, and show it to its team. Raises StorageFull, Unavailable, NotFound (no
        team).
        """
        file = await self.sealed(purpose, filename, expires_after_s)
        await self._files.complete(file)
        return file

    async def sealed(self, purpose: str, filename: str, expires_after_s: int | None = None) -> File:
        """Write the whole file to disk, and return its row. Raises StorageFull, Unavailable."""
        await self.flush()
        assert self._file is not None
        try:
            await asyncio.to_thread(self._file.seal)
        except OSError as error:
            raise storage_error(error) from None
        kept_s = expires_after_s or self._files.settings.kept_days * DAY_S
        return File(
            id=self.id,
            team_id=self._team_id,
            purpose=purpose,
            filename=shown(filename, 255),
            bytes=self.bytes,
            created_at_s=self._at_s,
            expires_at_s=self._at_s + kept_s,
        )

    async def drop(self) -> None:
        """Remove the file and its row."""
        if self._file is not None:
            self._file.close()
        await self._files.remove(self._team_id, self.id)


class Files:
    """Stores files. `clock` gives unix seconds."""

    def __init__(
        self, database: Database, settings: BatchSettings, contents: Contents, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self.contents = contents
        self.trouble = ""  # why the contents are not this database's, as of the last look
        self._looked_s = -_LOOK_EVERY_S
        self.held = Holdings(database, _files, "bytes")
        self._database = database
        self.clock = clock

    async def are_ours(self, *, is_fresh: bool = False) -> bool:
        """Whether the contents are this database's, as of 10 s ago or, with `is_fresh`, of now.

        The first host of a database marks them; SQLite has one host, which marks a new place. Errors
        of the database pass through.
        """
        if is_fresh or time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            mark = ""
            (wanted,) = await self._database.scalars(sa.select(schema.installation.c.files_id))
            try:
                mark = await asyncio.to_thread(self._read_mark)
                if not wanted or (self._database.is_sqlite and not mark):
                    wanted = await self._mark()
                    mark = await asyncio.to_thread(self._read_mark)
                expected = wanted or "no mark, as the database has none"
                why = "" if mark and mark == wanted else f"they are of {mark or 'no database'}, expected {expected}"
            except OSError as error:
                why = f"{type(error).__name__}: {error}"
            self._looked_s = time.monotonic()
            if why and why != self.trouble:
                consequence = "no uploads and no lines of batches on this host"
                remedy = f"{MARKER} in it with {wanted}" if wanted else f"no {MARKER} in it, nor another gateway"
                everywhere = f"one batches.files_url for all hosts; after a move or a restore, {remedy}"
                _log.error("files_not_ours", reason=why, consequence=consequence, wanted=everywhere)
            self.trouble = why
        return not self.trouble

    @uncancelled
    async def _mark(self) -> str:
        """Mark the contents with the database's id, and return it, unless another host has done so."""
        async with self._database.writing() as connection:
            known = sa.select(schema.installation.c.files_id).with_for_update()
            wanted = str((await connection.execute(known)).scalar_one())
            with contextlib.suppress(OSError):  # the next look says why
                if (not wanted or self._database.is_sqlite) and not await asyncio.to_thread(self._read_mark):
                    mark = wanted or secrets.token_hex(16)
                    await asyncio.to_thread(self._write_mark, mark)
                    await connection.execute(sa.update(schema.installation).values(files_id=mark))
                    wanted = mark
        return wanted

    def _read_mark(self) -> str:
        try:
            with self.contents.open(MARKER) as file:
                return file.read(100).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return ""

    def _write_mark(self, mark: str) -> None:
        file = self.contents.create(MARKER)
        file.write(mark.encode())
        file.seal()

    @uncancelled
    async def begin(self, team_id: int, bytes_max: int | None = None, *, is_own: bool = False) -> Upload:
        """Begin an upload of at most `bytes_max` bytes (default: the setting), and reserve its
        quota.

        `is_own`: the gateway writes the output of a batch, whose outcomes have reserved the quota.
        Raises OverQuota, TooLarge, and NotFound if the team is gone.
        """
        if not await self.are_ours():
            raise Unavailable("This host does not reach the installation's files", code="storage_unavailable")
        file_bytes_max = self.settings.file_bytes_max
        if bytes_max is not None and bytes_max > file_bytes_max + _FORM_BYTES_MAX and not is_own:
            raise _too_large(file_bytes_max)
        room = 0 if is_own else file_bytes_max if bytes_max is None else min(bytes_max, file_bytes_max)
        at_s = self.clock()
        file_id = new_object_id("file-", at_s)
        row = {"id": file_id, "team_id": team_id, "purpose": "", "filename": "", "bytes": room, "created_at_s": at_s}
        try:
            async with self._database.writing() as connection:
                holding = await self.held.add(connection, team_id, room)
                excess = holding.bytes - self.settings.team_bytes_max
                if not is_own and holding.count > self.settings.team_files_max:
                    raise _over_quota(f"this team has {holding.count - 1:,} files, the most that it may have")
                if excess > 0 and not is_own:
                    if bytes_max is not None or excess >= room:
                        raise _over_quota(f"this team's files may take {max(0, room - excess):,} bytes more")
                    await self.held.add(connection, team_id, -excess, 0)
                    room = row["bytes"] = room - excess
                await connection.execute(sa.insert(_files).values(row | {"is_ready": False}))
        except IntegrityError:
            raise _no_file(file_id) from None
        return Upload(self, file_id, team_id, at_s, room)

    async def reserve(self, connection: AsyncConnection, batch_id: str, team_id: int, size: int) -> None:
        """Reserve `size` bytes of the quota for the outcomes of a batch. Raises OverQuota."""
        row = {"id": batch_id, "team_id": team_id, "purpose": "", "filename": "", "bytes": size, "is_ready": False}
        await self._take(connection, team_id, size, 1)
        await connection.execute(sa.insert(_files).values(row | {"created_at_s": self.clock()}))

    @uncancelled
    async def extend(self, batch_id: str, team_id: int, size: int) -> None:
        """Add `size` bytes, which may be negative, to the quota that a batch reserves. Raises
        OverQuota.
        """
        async with self._database.writing(is_durable=False) as connection:
            await self._take(connection, team_id, size, 0)
            extended = sa.update(_files).where(_files.c.id == batch_id).values(bytes=_files.c.bytes + size)
            await connection.execute(extended)

    async def _take(self, connection: AsyncConnection, team_id: int, size: int, count: int) -> None:
        held = await self.held.add(connection, team_id, size, count)
        if size > 0 and (excess := held.bytes - self.settings.team_bytes_max) > 0:
            raise _over_quota(f"this team's files may take {max(0, size - excess):,} bytes more")

    @uncancelled
    async def complete(self, file: File) -> None:
        """Show the file to its team. Raises NotFound if its row is gone."""
        async with self._database.writing() as connection:
            if not await self.completed(connection, file):
                raise _no_file(file.id)

    async def completed(self, connection: AsyncConnection, file: File) -> bool:
        """Do `complete` within the caller's transaction. Returns whether the row exists."""
        values = msgspec.structs.asdict(file) | {"is_ready": True}
        return await self.held.resize(connection, file.team_id, values, _files.c.id == file.id) is not None

    async def get(self, team_id: int, file_id: str) -> File:
        """A team's file. Raises NotFound, also for another team's file."""
        where = self._ready(team_id).where(_files.c.id == file_id)
        rows = await self._database.rows(where) if _CONTENT.fullmatch(file_id) else ()
        if not rows:
            raise _no_file(file_id)
        return _file(rows[0])

    async def page(
        self, team_id: int, after: str, limit: int, purpose: str = "", *, is_newest_first: bool = True
    ) -> list[File]:
        """A team's files after the file `after`, or from the first: at most `limit` + 1."""
        where = self._ready(team_id)
        if after:
            where = where.where(_files.c.id < after if is_newest_first else _files.c.id > after)
        if purpose:
            where = where.where(_files.c.purpose == purpose)
        ordered = where.order_by(_files.c.id.desc() if is_newest_first else _files.c.id).limit(limit + 1)
        return list(map(_file, await self._database.rows(ordered)))

    @uncancelled
    async def delete(self, team_id: int, file_id: str) -> None:
        """Delete a team's file. Raises NotFound, and InUse if a batch needs it."""
        file = await self.get(team_id, file_id)
        async with self._database.writing() as connection:
            # a batch of this file that begins meanwhile is waited for, and seen
            await self.held.lock(connection, team_id)
            if not await self.held.delete(connection, team_id, _files.c.id == file.id, _UNNEEDED):
                raise InUse("A batch that has not ended reads this file: cancel the batch first")
        await asyncio.to_thread(self.unlink, [key_of(team_id, file.id)])

    @uncancelled
    async def remove(self, team_id: int, file_id: str) -> None:
        """Remove an upload's row and content, unless the file is complete: its commit may have gone
        unseen.
        """
        async with self._database.writing() as connection:
            where = (_files.c.team_id == team_id) & (_files.c.id == file_id)
            await self.held.delete(connection, team_id, where, _files.c.is_ready.is_(False))
            is_complete = (await connection.execute(sa.select(_files.c.id).where(where))).scalar() is not None
        if not is_complete:
            await asyncio.to_thread(self.unlink, [key_of(team_id, file_id)])

    async def sweep(self) -> None:
        """Remove expired files, uploads of ended processes, and contents without a row.

        Errors of the database, and OSError, pass through.
        """
        if not await self.are_ours():
            return
        changes = dict[str, float]()
        for key, changed_s in (await asyncio.to_thread(self.contents.keys)).items():
            if match := _OWN.match(key):
                changes[match[0]] = max(changes.get(match[0], 0.0), changed_s)
        # after the contents: a row is made before its content
        await self._forget({_id_of(key): changed_s for key, changed_s in changes.items()})
        needed = set(await self._database.scalars(sa.select(_files.c.id)))
        await asyncio.to_thread(self.unlink, [key for key in changes if _id_of(key) not in needed])

    async def _forget(self, names: dict[str, float]) -> None:
        """Delete the rows of expired files and dead uploads; `names` are ids, each with its last change."""
        now_s = self.clock()
        is_stale = (_files.c.is_ready.is_(False)) & (_files.c.created_at_s < now_s - _STALE_S)
        arriving = await self._database.scalars(sa.select(_files.c.id).where(is_stale))
        late = _files.c.is_ready.is_(True) & (_files.c.expires_at_s < now_s) & _UNNEEDED
        expired_ids = await self._database.scalars(sa.select(_files.c.id).where(late))
        expired_ids += [file_id for file_id in arriving if names.get(file_id, 0.0) < now_s - _STALE_S]
        for start in range(0, len(expired_ids), 500):
            await self.held.purge(_files.c.id.in_(expired_ids[start : start + 500]), _UNNEEDED, most=500)

    def unlink(self, keys: Iterable[str]) -> None:
        """Remove contents, and outcomes of batches. Blocks."""
        for key in keys:
            try:
                self.contents.remove([key])
            except OSError as error:  # the next sweep tries again
                _log.warning("file_not_removed", name=key, reason=str(error))

    def _ready(self, team_id: int) -> sa.Select[Any]:
        is_late = _files.c.expires_at_s < self.clock()
        return sa.select(_files).where((_files.c.team_id == team_id) & _files.c.is_ready.is_(True) & sa.not_(is_late))


def _id_of(key: str) -> str:
    return key.rpartition("/")[2]


def _file(row: Any) -> File:
    return File(**{name: getattr(row, name) for name in File.__struct_fields__})


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {shown(file_id)}", param="id", code="file_not_found")


def _too_large(bytes_max: int) -> TooLarge:
    words = f"The file is larger than {bytes_max:,} bytes, the most that a file may have or the room that is left"
    return TooLarge(words, headers={"connection": "close"})


def _over_quota(reason: str) -> OverQuota:
    return OverQuota(
        f"The file does not fit: {reason}; delete files first, or ask your admin", code="file_quota_exceeded"
    )


def check_purpose(purpose: str) -> str:
    """Check the purpose of an upload, and return it. Raises BadRequest."""
    if purpose not in (INPUT, *INPUTS):
        raise BadRequest(
            f"Invalid purpose: expected one of {', '.join((INPUT, *INPUTS))}, got `{shown(purpose)}`; files for other "
            "uses are not kept here",
            param="purpose",
            code="invalid_value" if purpose else "missing_required_parameter",
        )
    return purpose


def kept_s_of(team: Team, settings: BatchSettings, expires_after_s: int | None = None) -> int:
    """The seconds that a file of `team` is kept. Raises Forbidden where it keeps none."""
    kept_s = team.kept_s(expires_after_s or settings.kept_days * DAY_S)
    if not kept_s:
        raise Forbidden(
            "Nothing of this team's is kept here, by its `store_s_max` of 0: send the requests one by one",
            code="storing_is_off",
        )
    return kept_s


def check_expiry(anchor: str | None, seconds: int | None) -> int:
    """Check an `expires_after`, and return its seconds. Raises BadRequest."""
    least, most = EXPIRES_S
    if anchor != "created_at" or seconds is None or not least <= seconds <= most:
        raise BadRequest(
            f"Invalid expires_after: expected `anchor` created_at and `seconds` from {least:,} to {most:,}",
            param="expires_after",
            code="invalid_value",
        )
    return seconds
