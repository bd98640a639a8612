"""Bytes in Redis that no version wrote: each reader goes on without them."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from cache import ExactCache, Hit, Miss, Query
from cache.decision.prior import PRIOR
from cache.decision.rule import VerifiedRule
from cache.exact.store import EntryStore, Sketched
from cache.query import Trial
from cache.semantic.cache import SemanticCache
from cache.semantic.follower import Follower
from cache.stored import reader
from cache.verdicts.records import AnswerRef, Scope, ServedReply, Source, Suspension, Verdict
from cache.verdicts.store import VerdictStore
from tests.cache.fakes import ACME, FakeEmbedder, ask, entry_for, query

ROUNDS = 60


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Some bytes are others, half of them no UTF-8; now and then the end is missing."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 2, 8))):
        if found:
            found[draw.randrange(len(found))] = draw.choice((0xFF, draw.randrange(256)))
    return bytes(found[: draw.randrange(len(found))] if found and draw.random() < 0.2 else found)


async def filled(redis: Redis) -> tuple[list[bytes], Trial]:
    """A partition with two entries, a vector, a sketch, a verdict, a group, a suspension and a reply."""
    exact, verdicts, store = ExactCache(redis), VerdictStore(redis), EntryStore(redis)
    now = time.time()
    ids, refs = [], []
    for text in ("wie heißt der Fluss", "wie heißt dieser Fluss"):
        fp = ask(text)
        await exact.store(entry_for(fp, now, labels={"größe": "zwölf"}))
        ids.append(fp.exact)
        refs.append(AnswerRef(fp.exact, now))
    await store.store_vectors(ACME, b"fakefake", [(ids[0], b"\0" * 32)])
    await store.store_sketches(ACME, b"fakefake", [Sketched(ids[0], now, b"\x94\xa2p2")], 1 << 20)
    trial = Trial((ids[1],), b"\0\0\0\0", 0.9, 0.5, b"rule")
    made = Verdict(
        source=Source.AUDIT, compat=ask("x").compat, is_right=False, trial=trial, at=now, judge="größer", why="weil"
    )
    out = Suspension(exact=ids[1], source=Source.FEEDBACK, at=now, judge="größer", why="weil")
    await verdicts.take(ACME, "one", made, refs[1], None, Scope.ANSWER, out)
    joined = msgspec.structs.replace(made, is_right=True, exact=ids[0], created_at=now)
    await verdicts.take(ACME, "two", joined, refs[1], refs[1])
    reply = ServedReply(id="r", exact=ids[1], created_at=now, compat=made.compat, alias="klärung", at=now, trial=trial)
    await verdicts.remember_replies([(ACME, reply, ())], 60.0)
    return ids, trial


async def spoil(redis: Redis, draw: random.Random) -> None:
    """Damage the values of all hashes, strings and streams of the cache. Their keys stay."""
    for key in sorted(await redis.keys("*")):
        match (await redis.type(key)).decode():
            case "hash":
                for field, value in (await redis.hgetall(key)).items():
                    await redis.hset(key, field, damaged(value, draw))
            case "string" if not key.endswith((b"epoch", b"bytes")):
                await redis.set(key, damaged(await redis.get(key), draw), keepttl=True)
            case "stream":
                for _, fields in await redis.xrange(key):
                    spoiled: dict[Any, Any] = {name: damaged(value, draw) for name, value in fields.items()}
                    await redis.xadd(key, spoiled)


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_damaged_bytes_stop_no_reader(redis: Redis, seed: int) -> None:
    """With damaged values, a lookup is a miss or an answer, a rebuild and a follower stay up, and a report finds no reply."""
    ids, trial = await filled(redis)
    exact, verdicts = ExactCache(redis), VerdictStore(redis)
    with ThreadPoolExecutor(1) as thread:
        host = SemanticCache(FakeEmbedder(is_constant=True), VerifiedRule(PRIOR))
        follower = Follower(redis, host, thread, b"fakefake")
        await follower.follow()
        await spoil(redis, random.Random(seed))
        rebuilt = SemanticCache(FakeEmbedder(is_constant=True), VerifiedRule(PRIOR))
        again = Follower(redis, rebuilt, thread, b"fakefake")
        for one in (follower, again):
            await one.follow()
            assert one.is_up
            assert one.is_following
        asked: Query = query("wie heißt denn der Fluss")
        for cache in (host, rebuilt):
            (answer,) = cache.lookup([asked])
            assert isinstance(answer, Hit | Miss)
    fp = ask("wie heißt der Fluss")
    await exact.lookup(fp, wants_warm=True)
    await exact.lookup_entry(fp, ids[1])
    await exact.lookup_about(ACME, ids[0])
    assert len(await exact.lookup_many(ACME, fp.compat, ids)) == 2
    await verdicts.suspended(ACME)
    await verdicts.groups(ACME, ids)
    reply = await verdicts.reply(ACME, "r")
    assert reply is None or reply.trial.rule is not trial.rule


def test_one_error_says_that_bytes_are_no_value() -> None:
    """A text that is no UTF-8, another type, a cut end and a deep nest are all msgspec.DecodeError."""
    read = reader(msgspec.msgpack.Decoder(list[str]))
    assert read(b"\x91\xa1a") == ["a"]
    for data in (b"\x91\xa1\xff", b"\x91\x01", b"\x91", b"", b"\x91" * 100_000):
        with pytest.raises(msgspec.DecodeError):
            read(data)
