"""The dialect of valkey-search, by replies as its documentation and its source give them: no server of it can be had.

The options and the form of replies: https://github.com/valkey-io/valkey-search/blob/main/docs/commands/ft.search.md and
docs/commands/ft.create.md. The words of refusals: src/query/search.cc and search.h, src/commands/ft_search_parser.cc,
src/schema_manager.cc and vmsdk/src/type_conversions.h there. FLOAT16: its pull request 1001, of release 1.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.semantic.engine import EngineAway, EngineUnfit, PlacedKey
from cache.semantic.redis_engine import RedisEngine
from tests.cache.fakes import ACME

DIMS, KEY, ROOM = 4, b"valkeyxx", b"r" * 16
VECTORS = {number: np.eye(DIMS, dtype="<f2")[number].tobytes() for number in range(3)}
CHECK = b"12345678"
HANDSHAKE = b"%2\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n$5\r\nproto\r\n:3\r\n"


class Valkey:
    """Answers as valkey-search of a release does, on `url`; `refusal` is what it says to a search for now."""

    def __init__(self, release: tuple[int, int], folder: Path) -> None:
        self.url = f"unix://{folder / 's'}"
        self.refusal = ""
        self.searches: list[list[bytes]] = []
        self.found: list[Any] = [0]
        self.removed: list[bytes] = []
        self.has_halves = release >= (1, 3)
        self._release = release
        self._indexes: set[bytes] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                count = int((await reader.readuntil(b"\r\n"))[1:])
                command = []
                for _ in range(count):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    command.append((await reader.readexactly(size + 2))[:-2])
                writer.write(HANDSHAKE if command[0] == b"HELLO" else _resp(self._reply(command)))
        writer.close()

    def _reply(self, command: list[bytes]) -> Any:
        name, rest = command[0], command[1:]
        if name == b"FT.CREATE":
            return self._create(rest)
        if name == b"FT.SEARCH":
            return Refused(self.refusal) if self.refusal else self._search(rest)
        if name == b"UNLINK":
            self.removed += rest
        return 1

    def _create(self, words: list[bytes]) -> Any:
        if b"FLOAT16" in words and not self.has_halves:
            return Refused(
                "Invalid field type for field `v`: Error parsing value for the parameter `TYPE` - Unknown argument `FLOAT16`"
            )
        if words[0] in self._indexes:
            return Refused(f"Index {words[0].decode()} in database 0 already exists.")
        self._indexes.add(words[0])
        return "OK"

    def _search(self, words: list[bytes]) -> Any:
        """The options of FT.SEARCH and the modifiers of KNN; others are refused, by the words of the parser."""
        self.searches.append(words)
        at, knn = 2, re.search(rb"=>\[KNN \d+ @v \$q ?(.*)\]$", words[1])
        while at < len(words):
            option = words[at].upper()
            if option in (b"RETURN", b"PARAMS"):
                at += 2 + int(words[at + 1])
            elif option in (b"LIMIT", b"SORTBY") and (option == b"LIMIT" or self._release >= (1, 2)):
                at += 3
            elif option == b"DIALECT":
                at += 2
            else:
                return Refused(f"Unexpected parameter at position {at + 1}:{words[at].decode()}")
        modifiers = knn.group(1).split() if knn else []
        for modifier in modifiers[::2]:
            if modifier not in (b"EF_RUNTIME", b"AS"):
                return Refused(
                    "Error parsing vector similarity parameters: `"
                    f"{words[1].partition(b'=>')[2].decode()}`. Unexpected argument `{modifier.decode()}`"
                )
        return self.found


class Refused(Exception):
    """An error reply: modules say it without a word before it."""


def _resp(reply: Any) -> bytes:
    if isinstance(reply, Refused):
        return b"-%s\r\n" % str(reply).encode()
    if isinstance(reply, str):
        return b"+%s\r\n" % reply.encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n%s" % (len(reply), b"".join(map(_resp, reply)))


@contextlib.asynccontextmanager
async def run_valkey(release: tuple[int, int] = (1, 3)) -> AsyncIterator[tuple[Valkey, RedisEngine]]:
    with tempfile.TemporaryDirectory(prefix="sameway-valkey-") as folder:
        valkey = Valkey(release, Path(folder))
        server = await asyncio.start_unix_server(valkey.serve, Path(folder) / "s")
        engine = RedisEngine(valkey.url, DIMS, KEY, 5.0)
        yield valkey, engine
        await engine.aclose()
        server.close()


def name_of(number: int) -> bytes:
    return f"sameway:index:{{{KEY.hex()}}}:{ACME.hex()}-{number:032x}".encode()


async def test_valkeys_replies_are_read() -> None:
    """Lists of names and fields, in RESP3 too: with a distance among the fields or without one, with a missing field, none found."""
    async with run_valkey() as (valkey, engine):
        await engine.open()
        await engine.open()  # its index is there
        with_distance = [[b"__v_score", b"0.0123456789", b"v", VECTORS[0], b"c", CHECK.hex().encode()]]
        plain = [[b"v", VECTORS[1]], [b"v", VECTORS[2], b"c", b""]]
        valkey.found = [3]
        for number, fields in enumerate([*with_distance, *plain]):
            valkey.found += [name_of(number), fields]
        expected = {number.to_bytes(16, "big"): vector + CHECK * (number == 0) for number, vector in VECTORS.items()}
        assert await engine.sample(ROOM, 10) == expected
        assert await engine.nearest(ROOM, np.ones(DIMS, dtype=np.float32), 3, 10**6) == expected
        valkey.found = [0]
        assert await engine.sample(ROOM, 10) == {}
        key = PlacedKey(ACME, bytes(16), (ROOM,), 2e9, VECTORS[0])
        await engine.put([key])
        await engine.drop(ACME, [key.exact])
        assert valkey.removed == [name_of(0)]


async def test_what_valkey_has_no_word_for_is_not_said() -> None:
    """It has no HYBRID_POLICY: large rooms are searched without one, after that was asked once."""
    async with run_valkey() as (valkey, engine):
        await engine.open()
        assert sum(b"HYBRID_POLICY" in words[1] for words in valkey.searches) == 1
        del valkey.searches[:]
        await engine.nearest(ROOM, np.ones(DIMS, dtype=np.float32), 3, 10**6)
        ((_, asked, *options),) = valkey.searches
        assert asked == b"@r:{%s}=>[KNN 3 @v $q EF_RUNTIME 160]" % ROOM.hex().encode()
        assert options[:3] == [b"PARAMS", b"2", b"q"]


@pytest.mark.parametrize(
    ("release", "has_halves", "part", "said"),
    [
        ((1, 2), False, "FT.CREATE with FLOAT16", "Unknown argument `FLOAT16`"),
        ((1, 1), True, "FT.SEARCH by tag alone, sorted by a number", "Unexpected parameter"),
    ],
)
async def test_a_release_that_lacks_a_part_is_named(
    release: tuple[int, int], has_halves: bool, part: str, said: str
) -> None:
    """With what the server said, and what has the part."""
    async with run_valkey(release) as (valkey, engine):
        valkey.has_halves = has_halves
        with pytest.raises(EngineUnfit, match=f"no {re.escape(part)} .*{said}.*valkey-search 1.3"):
            await engine.open()


# src/query/search.h, and https://valkey.io/topics/search for CONSISTENT and ALLSHARDS
FOR_NOW = (
    "Search operation cancelled due to timeout",
    "Search query queue depth exceeded",
    "Index or slot consistency check failed",
    "OOM command not allowed when used memory > 'maxmemory'",
    "LOADING Valkey is loading the dataset in memory",
)


@pytest.mark.parametrize("refusal", FOR_NOW)
async def test_a_refusal_that_passes_is_no_error_of_the_configuration(refusal: str) -> None:
    """Busy, out of memory, behind with its index, or loading: the engine is away, and has all its parts a moment later."""
    async with run_valkey() as (valkey, engine):
        valkey.refusal = refusal
        with pytest.raises(EngineAway, match=refusal[:20]):
            await engine.open()
        with pytest.raises(EngineAway, match=refusal[:20]):
            await engine.sample(ROOM, 10)
        valkey.refusal = ""
        await engine.open()
        assert await engine.sample(ROOM, 10) == {}
