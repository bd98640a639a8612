"""Conversations that callers store, in the accounts' database: their metadata, and their items in
order.

Knows no HTTP and no shape of an item: an item is an id and bytes of JSON. Invariants: a
conversation is found, changed and deleted under its team alone, and is deleted with it, as are its
items; items that are added together stay together; an expired conversation counts as missing; while
a request's lock is leased, no other request changes the conversation's items.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.database import Database, uncancelled
from gateway.accounts.holdings import ROW_BYTES, Holdings
from gateway.accounts.schema import conversation_items, conversations

_ITEMS_AT_ONCE = 1_000
LEASE_S = 15.0
"""The seconds for which a killed worker keeps its leases."""

Added = Sequence[tuple[str, bytes]]
"""Items with their ids, in order."""


class HistoryTooLong(Exception):
    """A request continues a history that is longer than a request may be."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, without its items. Times are in unix seconds."""

    id: str
    team_id: int
    key_id: int
    created_at_s: float
    metadata: Mapping[str, str]


class Conversations:
    """Stores conversations. A team's hold at most `team_bytes_max` bytes: the oldest are deleted.

    `clock` gives unix seconds; `retention_s` is how long a conversation is kept after its last
    change.
    """

    def __init__(self, database: Database, clock: Callable[[], float], retention_s: float, team_bytes_max: int) -> None:
        self._database = database
        self._team_bytes_max = team_bytes_max
        self.held = Holdings(database, conversations)
        self._clock = clock
        self._retention_s = retention_s
        self._locked: dict[str, str] = {}  # of this worker: conversations by their requests

    # -- locks

    @property
    def _is_free(self) -> sa.ColumnElement[bool]:
        return conversations.c.locked_until_s <= self._clock()

    async def lock(self, team_id: int, id: str, request_id: str) -> bool:
        """Lock a conversation's items for a request until `release`.

        Returns False if it is missing or locked.
        """
        lease = {"locked_by": request_id, "locked_until_s": self._clock() + LEASE_S}
        taken = sa.update(conversations).where(self._is_teams(team_id, id), self._is_free).values(lease)
        is_taken = await self._database.write(taken, is_durable=False) > 0
        if is_taken:
            self._locked[request_id] = id
        return is_taken

    async def release(self, request_id: str) -> None:
        """Release the lock of a request, if it has one. If the database fails, the lease expires."""
        if request_id in self._locked:
            with suppress(SQLAlchemyError):
                await self._lease({request_id: self._locked.pop(request_id)}, locked_by="", locked_until_s=0.0)

    async def renew(self) -> None:
        """Renew the leases of the locks of this worker's requests."""
        if self._locked:
            await self._lease(self._locked, locked_until_s=self._clock() + LEASE_S)

    async def _lease(self, locked: Mapping[str, str], **values: Any) -> None:
        c = conversations.c
        are_held = sa.and_(c.id.in_(list(locked.values())), c.locked_by.in_(list(locked)))
        await self._database.write(sa.update(conversations).where(are_held).values(values), is_durable=False)

    # -- conversations and items

    def _is_teams(self, team_id: int, id: str) -> sa.ColumnElement[bool]:
        c = conversations.c
        return sa.and_(c.id == id, c.team_id == team_id, c.expires_at_s > self._clock())

    @uncancelled
    async def create(self, conversation: Conversation, items: Added) -> None:
        async with self._database.writing(is_durable=False) as connection:
            values = {
                "id": conversation.id,
                "team_id": conversation.team_id,
                "key_id": conversation.key_id,
                "metadata": dict(conversation.metadata),
            }
            times = {"created_at_s": conversation.created_at_s, "expires_at_s": self._clock() + self._retention_s}
            size = _size_of(conversation.metadata)
            await self.held.add(connection, conversation.team_id, size)
            await connection.execute(sa.insert(conversations).values(**values, **times, size_bytes=size))
            await self.append(connection, conversation.team_id, conversation.id, items)

    @uncancelled
    async def add(self, team_id: int, id: str, items: Added) -> bool:
        """Append items; returns False if the conversation is missing or locked. Raises OverQuota."""
        async with self._database.writing(is_durable=False) as connection:
            return await self.append(connection, team_id, id, items)

    async def append(
        self, connection: AsyncConnection, team_id: int, id: str, items: Added, ended: str | None = None
    ) -> bool:
        """Do `add` in the transaction of `connection`. With `ended`, a request's id, also release
        its lock; where another request has locked the conversation since, append nothing.
        """
        where, values = [self._is_free], dict[str, Any]()
        if ended is not None:
            # not again, where an earlier try was committed and the answer to that was lost
            is_new = [~sa.exists().where(_is_item(id, item_id)) for item_id, _ in items[:1]]
            where = [sa.or_(conversations.c.locked_by == ended, self._is_free), *is_new]
            values = {"locked_by": "", "locked_until_s": 0.0}  # a renewal under way finds no lock of it any more
            self._locked.pop(ended, None)
        size = sum(ROW_BYTES + len(item) for _, item in items)
        if not await self._changed(connection, team_id, id, *where, size=size, **values):
            return False
        rows = [{"conversation_id": id, "id": item_id, "item": item} for item_id, item in items]
        for start in range(0, len(rows), _ITEMS_AT_ONCE):
            await connection.execute(sa.insert(conversation_items), rows[start : start + _ITEMS_AT_ONCE])
        return True

    async def _changed(
        self,
        connection: AsyncConnection,
        team_id: int,
        id: str,
        *where: sa.ColumnElement[bool],
        size: int = 0,
        **values: Any,
    ) -> bool:
        """Add `size` to the bytes of a conversation, and extend its life."""
        await self.held.lock(connection, team_id)
        kept = {"size_bytes": conversations.c.size_bytes + size, "expires_at_s": self._clock() + self._retention_s}
        change = sa.update(conversations).where(self._is_teams(team_id, id), *where).values(**kept, **values)
        if not (await connection.execute(change)).rowcount:
            return False
        held = await self.held.add(connection, team_id, size, 0)
        await self.held.bound(connection, team_id, held, self._team_bytes_max, id)
        return True

    @uncancelled
    async def change(self, team_id: int, id: str, metadata: Mapping[str, str]) -> bool:
        """Set the metadata; returns whether the conversation exists."""
        async with self._database.writing(is_durable=False) as connection:
            await self.held.lock(connection, team_id)
            before = sa.select(conversations.c["metadata"]).where(self._is_teams(team_id, id))
            more = _size_of(metadata) - _size_of((await connection.execute(before)).scalar() or {})
            return await self._changed(connection, team_id, id, size=more, metadata=dict(metadata))

    @uncancelled
    async def delete(self, team_id: int, id: str) -> bool:
        """Delete a conversation with its items; returns whether it existed."""
        async with self._database.writing(is_durable=False) as connection:
            return await self.held.delete(connection, team_id, self._is_teams(team_id, id)) > 0

    async def item(self, id: str, item_id: str) -> bytes | None:
        """An item of a conversation; None if missing."""
        asked = sa.select(conversation_items.c.item).where(_is_item(id, item_id))
        return next(iter(await self._database.scalars(asked)), None)

    @uncancelled
    async def remove(self, team_id: int, id: str, item_id: str) -> bool:
        """Delete an item if it exists; returns False if the conversation is missing or locked."""
        async with self._database.writing(is_durable=False) as connection:
            await self.held.lock(connection, team_id)
            length = sa.func.length(conversation_items.c.item)
            size = (await connection.execute(sa.select(length).where(_is_item(id, item_id)))).scalar()
            less = 0 if size is None else -(size + ROW_BYTES)
            is_changed = await self._changed(connection, team_id, id, self._is_free, size=less)
            if is_changed:
                await connection.execute(sa.delete(conversation_items).where(_is_item(id, item_id)))
            return is_changed

    async def find(self, team_id: int, id: str) -> Conversation | None:
        c = conversations.c
        asked = sa.select(c.id, c.team_id, c.key_id, c.created_at_s, c["metadata"])
        rows = await self._database.rows(asked.where(self._is_teams(team_id, id)))
        return Conversation(*rows[0]) if rows else None

    @uncancelled
    async def page(self, id: str, after: str, limit: int, *, is_ascending: bool) -> list[bytes] | None:
        """The items after the item `after`, or the first items; None if the conversation lacks
        `after`.
        """
        items = conversation_items
        where, order = items.c.conversation_id == id, items.c.number if is_ascending else items.c.number.desc()
        async with self._database.reading() as connection:
            if after:
                place = sa.select(items.c.number).where(where, items.c.id == after)
                number = (await connection.execute(place)).scalar()
                if number is None:
                    return None
                where = sa.and_(where, items.c.number > number if is_ascending else items.c.number < number)
            asked = sa.select(items.c.item).where(where).order_by(order).limit(limit)
            return list((await connection.execute(asked)).scalars())

    @uncancelled
    async def items(
        self, team_id: int, bytes_max: int, *, id: str | None = None, item_ids: Collection[str] = ()
    ) -> list[bytes]:
        """All items of the conversation `id`, in order; or the items `item_ids` in any of the
        team's.

        Raises HistoryTooLong if they have more than `bytes_max` bytes.
        """
        items, c = conversation_items, conversations.c
        whose = sa.and_(c.team_id == team_id, c.expires_at_s > self._clock())
        is_wanted = items.c.conversation_id == id if id is not None else items.c.id.in_(item_ids)
        statement = sa.select(items.c.item).join(conversations, c.id == items.c.conversation_id).where(whose, is_wanted)
        async with self._database.reading() as connection:
            total = sa.select(sa.func.sum(sa.func.length(statement.subquery().c.item)))
            if ((await connection.execute(total)).scalar() or 0) > bytes_max:
                raise HistoryTooLong
            return list((await connection.execute(statement.order_by(items.c.number))).scalars())


def _size_of(metadata: Mapping[str, str]) -> int:
    return ROW_BYTES + sum(len(name.encode()) + len(value.encode()) for name, value in metadata.items())


def _is_item(id: str, item_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(conversation_items.c.conversation_id == id, conversation_items.c.id == item_id)
