"""Conversations and responses in the background in SQL, on both databases: order, owners, leases, and the room they take."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.accounts.accounts import Accounts
from gateway.accounts.conversations import Conversation, HistoryTooLong
from gateway.accounts.holdings import ROW_BYTES, Holding
from gateway.accounts.stored_responses import LEASE_S, ResponseStore, StoredResponse
from gateway.settings import ResponseSettings

_TALK = "conv_" + "0" * 32


class Store:
    """A store of one team, and its clock."""

    def __init__(self, accounts: Accounts, team_id: int, url: str) -> None:
        self.url = url
        self.counted: list[tuple[str, int]] = []
        self.now_s = 1_000.0
        self.team_id = team_id
        self.responses = ResponseStore(
            accounts.database,
            lambda: self.now_s,
            ResponseSettings(retention_s=60),
            lambda *one: self.counted.append(one),
        )
        self.talks = self.responses.conversations

    def row(self, number: int, **fields: object) -> StoredResponse:
        added = ((f"a{number}", b'{"a":1}'), (f"b{number}", b'{"b":1}'))
        made = StoredResponse(f"resp_{number:032x}", self.team_id, 1, None, b"[]", b'{"error":null}', _TALK, added)
        return replace(made, **fields)  # type: ignore[arg-type]


@pytest.fixture
async def store(accounts: Accounts, database_url: str) -> Store:
    made = Store(accounts, (await accounts.create_team("a team")).id, database_url)
    await made.talks.create(Conversation(_TALK, made.team_id, 1, made.now_s, {"a": "b"}), [("first", b"{}")])
    return made


async def test_items_that_come_together_stay_together(store: Store) -> None:
    """Whichever responses end at once: in pages of either order, within a size, and under their team alone."""
    await asyncio.gather(*(store.responses.put(store.row(number)) for number in range(5)))
    items = await store.talks.items(store.team_id, 1_000, id=_TALK)
    assert items == [b"{}", *(b'{"a":1}', b'{"b":1}') * 5]
    pages = [await store.talks.page(_TALK, after, 2, is_ascending=True) for after in ("", "a0")]
    assert [len(page or ()) for page in pages] == [2, 2]
    assert await store.talks.page(_TALK, "", 20, is_ascending=False) == items[::-1]
    assert await store.talks.page(_TALK, "none", 2, is_ascending=False) is None
    with pytest.raises(HistoryTooLong):
        await store.talks.items(store.team_id, 10, id=_TALK)
    for found in (store.talks.items(7, 1_000, id=_TALK), store.talks.items(7, 1_000, item_ids=["a1"])):
        assert await found == []
    assert await store.talks.find(7, _TALK) is None
    await store.talks.remove(7, _TALK, "a1")
    assert await store.talks.item(_TALK, "a1") is not None
    await store.talks.remove(store.team_id, _TALK, "a1")
    assert await store.talks.item(_TALK, "a1") is None
    assert (await store.responses.room(store.team_id))["conversations"] == Holding(
        1, len("ab") + 2 + 9 * 7 + (1 + 10) * ROW_BYTES
    )


async def test_a_row_that_does_not_fit_is_lost_alone(store: Store) -> None:
    """Those that wait with it, and those that come later, are kept; a row that ends is given up."""
    gone = {"team_id": store.team_id + 1, "conversation_id": None}
    rows = [store.row(number, **(gone if number == 1 else {})) for number in range(4)]
    await asyncio.gather(*(store.responses.put(row) for row in rows))
    odd = replace(store.row(4), added=(("\0", b"{}"),))
    queued = store.row(5, added=odd.added, status="queued")
    await store.responses.begin(queued)
    await asyncio.gather(store.responses.put(odd), store.responses.end(replace(queued, status=None)))
    await store.responses.put(store.row(6))
    for row in (*rows, store.row(6)):
        assert (await store.responses.find(store.team_id, row.id) is None) == (row is rows[1])
    counted = {kind: sum(count for found, count in store.counted if found == kind) for kind in ("stored", "lost")}
    takes_zero = "sqlite" in store.url
    assert counted == ({"stored": 5, "lost": 1} if takes_zero else {"stored": 4, "lost": 3})


async def test_a_response_ends_once(store: Store) -> None:
    """In its worker's lease it is kept, with its items; after it has failed, or was cancelled, it stays so."""
    for number, changes in enumerate(("in_progress", "failed", "cancelled")):
        row = store.row(number, status="queued")
        await store.responses.begin(row)
        assert await store.responses.renew([row.id]) == {row.id}
        if changes == "failed":
            store.now_s += LEASE_S + 1
        else:
            await store.responses.change(row.id, status=changes)
        found = await store.responses.find(store.team_id, row.id)
        assert found is not None
        assert found.status == changes
        await store.responses.end(replace(row, status=None, body=b"{}"))
        ended = await store.responses.find(store.team_id, row.id)
        assert ended is not None
        assert (ended.status, ended.body) == (None, b"{}") if number == 0 else (changes, row.body)
    assert len(await store.talks.items(store.team_id, 1_000, id=_TALK)) == 3


async def test_a_request_whose_lock_another_has_taken_adds_nothing(store: Store, accounts: Accounts) -> None:
    """Its lock had lapsed: what it says would stand between the other's items."""
    assert await store.talks.lock(store.team_id, _TALK, "req_1")
    store.now_s += LEASE_S + 1
    assert await store.talks.lock(store.team_id, _TALK, "req_2")
    for request_id, is_added in (("req_1", False), ("req_2", True), ("req_3", True)):
        async with accounts.database.writing() as connection:
            items = [(request_id, b"{}")]
            added = await store.talks.append(connection, store.team_id, _TALK, items, ended=request_id)
            assert added is is_added


async def test_a_renewal_under_way_locks_nothing_again(store: Store, accounts: Accounts) -> None:
    """A request that ends while its worker renews its lock leaves the conversation free for the next one."""
    assert await store.talks.lock(store.team_id, _TALK, "req_1")
    async with accounts.database.writing() as connection:
        renewing = asyncio.create_task(store.talks.renew())
        for _ in range(5):
            await asyncio.sleep(0)
        assert await store.talks.append(connection, store.team_id, _TALK, [("next", b"{}")], ended="req_1")
    await renewing
    assert await store.talks.lock(store.team_id, _TALK, "req_2")
