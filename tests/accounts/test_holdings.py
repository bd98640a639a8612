"""What a team holds in each store: counted with its rows, bounded at the write, over all connections at once."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.accounts import schema
from gateway.accounts.accounts import Accounts
from gateway.accounts.conversations import Conversation
from gateway.accounts.database import Database
from gateway.accounts.schema import MARKER
from gateway.accounts.stored_responses import ResponseStore, StoredResponse
from gateway.batches.files import INPUT, Files, Upload
from gateway.settings import BatchSettings, ResponseSettings
from gateway.transport.contents import Folder
from gateway.wire.errors import Forbidden, Unavailable

MAX = 200_000
_STORES = ((schema.responses, "size_bytes"), (schema.conversations, "size_bytes"), (schema.files, "bytes"))


class Hosts:
    """Two connections to one database, as two workers have them, each with the stores of two teams."""

    def __init__(self, url: str, folder: Path) -> None:
        self.databases = [Database(url) for _ in range(2)]
        self.now_s = 1_000_000.0
        responses = ResponseSettings(team_bytes_max=MAX, retention_s=3_600)
        batches = BatchSettings(team_bytes_max=MAX, team_files_max=50, file_bytes_max=MAX)
        self.responses = [ResponseStore(one, lambda: self.now_s, responses, lambda *_: None) for one in self.databases]
        self.files = [Files(one, batches, Folder(folder), lambda: self.now_s) for one in self.databases]

    async def check(self) -> dict[tuple[int, str], tuple[int, int]]:
        """The counts by team and store, which are those of the rows, and their bytes those of all that a row has."""
        async with self.databases[0].reading() as connection:
            held = schema.holdings.c
            rows = await connection.execute(sa.select(held.team_id, held.store, held["count"], held.bytes))
            counted = {(team, store): (count, size) for team, store, count, size in rows if count or size}
            there: dict[tuple[int, str], tuple[int, int]] = {}
            for table, size in _STORES:
                sums = sa.select(table.c.team_id, sa.func.count(), sa.func.sum(table.c[size])).group_by(table.c.team_id)
                for team, count, total in await connection.execute(sums):
                    there[team, table.name] = (count, int(total))
            r, i = schema.responses.c, schema.conversation_items.c
            texts = sa.select(sa.func.count()).where(r.size_bytes < sa.func.length(r.input) + sa.func.length(r.body))
            assert (await connection.execute(texts)).scalar_one() == 0
            items = sa.select(sa.func.sum(sa.func.length(i.item)).label("size"), i.conversation_id)
            by_id = items.group_by(i.conversation_id).subquery()
            c = schema.conversations.c
            less = sa.select(sa.func.count()).join(by_id, by_id.c.conversation_id == c.id)
            assert (await connection.execute(less.where(c.size_bytes < by_id.c.size))).scalar_one() == 0
        assert counted == there
        assert all(size <= MAX for _, size in counted.values())
        return counted


@pytest.fixture
async def hosts(accounts: Accounts, database_url: str, tmp_path: Path) -> Any:
    for name in ("a", "b"):
        team = await accounts.create_team(name)
        await accounts.create_key(team.id, "k")
    made = Hosts(database_url, tmp_path / "files")
    yield made
    for one in made.databases:
        await one.close()


def response(team_id: int, size: int, **more: Any) -> StoredResponse:
    return StoredResponse(f"resp_{secrets.token_hex(16)}", team_id, 1, None, b"[]", b"x" * size, **more)


def items(*sizes: int) -> list[tuple[str, bytes]]:
    return [(f"msg_{secrets.token_hex(16)}_in0", b"x" * size) for size in sizes]


async def quietly(act: Awaitable[object]) -> object:
    """What an act gives, or the refusal that ended it."""
    try:
        return await act
    except Forbidden as error:
        return error


async def test_counts_equal_the_rows_whatever_happens_at_once(hosts: Hosts) -> None:
    """Two workers write, change and delete responses, conversations and files of two teams in a drawn order, all at once, time
    passes and purges run: each count is its rows' and no team has more than its room."""
    draw, teams = random.Random(7), (1, 2)
    conversations = [f"conv_{number:032x}" for number in range(6)]

    async def act(number: int) -> None:
        store, files, team = hosts.responses[number % 2], hosts.files[number % 2], draw.choice(teams)
        talks, id, size = store.conversations, draw.choice(conversations), draw.randrange(30_000)
        match draw.randrange(9):
            case 0:
                await asyncio.gather(*(store.put(response(team, size)) for _ in range(3)))
            case 1:
                one = response(team, size, status="queued")
                await quietly(store.begin(one))
                await store.end(response(team, 2 * size) if size % 2 else one)
            case 2:
                made = Conversation(f"conv_{secrets.token_hex(16)}", team, 1, hosts.now_s, {"k": "v" * 100})
                conversations.append(made.id)
                await quietly(talks.create(made, items(size, 5)))
            case 3:
                await quietly(talks.add(team, id, items(size, 5)))
            case 4:
                await quietly(talks.change(team, id, {"k": "w" * draw.randrange(400)}))
            case 5:
                page = await talks.page(id, "", 1, is_ascending=True)
                listed = await store.conversations.items(team, MAX, id=id) if page else []
                assert isinstance(listed, list)
                await talks.delete(team, id)
            case 6:
                upload = await quietly(files.begin(team, size + 1))
                if isinstance(upload, Upload):
                    await upload.write(b"x" * size)
                    await (upload.keep(INPUT, "a", 3_600) if size % 3 else upload.drop())
            case 7:
                for file in await files.page(team, "", 2):
                    await quietly(files.delete(team, file.id))
            case _:
                hosts.now_s += 300
                await asyncio.gather(store.purge(), files.sweep())

    for start in range(0, 160, 8):
        done = await asyncio.gather(*map(act, range(start, start + 8)), return_exceptions=True)
        odd = [
            one for one in done if isinstance(one, BaseException) and getattr(one, "http_status", 0) not in (404, 409)
        ]
        assert odd == []
        await hosts.check()
    for store in hosts.responses:
        await store.aclose()


async def test_a_bound_holds_at_once_and_the_newest_stay(hosts: Hosts) -> None:
    """Of 60 responses and 60 conversations that two workers write at once those stay that fit, the newest whole; another
    team's are untouched."""
    other = response(2, 1_000)
    await hosts.responses[0].put(other)
    for _ in range(6):
        hosts.now_s += 1
        rows = [response(1, 20_000) for _ in range(10)]
        talks = [Conversation(f"conv_{secrets.token_hex(16)}", 1, 1, hosts.now_s, {}) for _ in range(10)]
        await asyncio.gather(
            *(store.put(row) for store, row in zip(itertools.cycle(hosts.responses), rows)),
            *(
                store.conversations.create(one, items(20_000))
                for store, one in zip(itertools.cycle(hosts.responses), talks)
            ),
        )
    held = await hosts.check()
    assert held[1, "responses"][0] == held[1, "conversations"][0] == 9
    newest = [row.id for row in rows if await hosts.responses[0].find(1, row.id) is not None]
    assert len(newest) == 9
    assert await hosts.responses[1].find(2, other.id) is not None


async def test_the_first_host_marks_the_files_place(database_url: str, accounts: Accounts, tmp_path: Path) -> None:
    """Of workers that look at once, those with the marked folder know it as theirs; on PostgreSQL a host with a folder of
    its own does not, and SQLite, which has one host, marks a new one."""
    databases = [Database(database_url) for _ in range(4)]
    first, second = (Folder(tmp_path / name) for name in ("first", "second"))
    places = [Files(one, BatchSettings(), first) for one in databases]
    assert await asyncio.gather(*(one.are_ours() for one in places)) == [True] * 4
    moved = Files(databases[0], BatchSettings(), second)
    assert await moved.are_ours() == databases[0].is_sqlite
    (second.path / MARKER).parent.mkdir(exist_ok=True)
    (second.path / MARKER).write_text((first.path / MARKER).read_text() + "\n")
    assert await moved.are_ours(is_fresh=True)
    for one in databases:
        await one.close()


async def test_a_teams_live_responses_are_counted_over_workers(hosts: Hosts) -> None:
    """Of 300 responses in the background that two workers begin at once 250 begin; those that end, or whose worker is gone,
    make room."""
    rows = [response(1, 10, status="queued") for _ in range(300)]
    begun = await asyncio.gather(
        *(store.begin(row) for store, row in zip(itertools.cycle(hosts.responses), rows)), return_exceptions=True
    )
    assert sum(isinstance(one, Unavailable) for one in begun) == 50
    await hosts.responses[0].begin(response(2, 10, status="queued"))
    ended = next(row for row, one in zip(rows, begun, strict=True) if one is None)
    assert await hosts.responses[1].end(StoredResponse(ended.id, 1, 1, None, b"[]", b"done"))
    await hosts.responses[0].begin(response(1, 10, status="queued"))
    with pytest.raises(Unavailable, match="250"):
        await hosts.responses[0].begin(response(1, 10, status="queued"))
    hosts.now_s += 60
    await hosts.responses[0].begin(response(1, 10, status="queued"))
    await hosts.check()


async def test_sqlite_gives_back_what_was_deleted(tmp_path: Path) -> None:
    """A file that 30 MB went through is small again after the purge, and its log, too."""
    path = tmp_path / "sub" / "sameway.db"
    accounts = Accounts(f"sqlite:///{path}")
    await accounts.open()
    team = await accounts.create_team("a")
    await accounts.create_key(team.id, "k")
    now = [1_000_000.0]
    settings = ResponseSettings(retention_s=60)
    store = ResponseStore(accounts.database, lambda: now[0], settings, lambda *_: None)
    for _ in range(3):
        await asyncio.gather(*(store.put(response(team.id, 1 << 20)) for _ in range(10)))
    assert path.stat().st_size + path.with_name("sameway.db-wal").stat().st_size > 30 << 20
    now[0] += 61
    await store.purge()
    await accounts.close()
    assert path.stat().st_size < 2 << 20
