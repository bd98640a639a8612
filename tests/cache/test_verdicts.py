"""Verdicts in a real Redis: taken once, learned alike by every host and after a restart, and obeyed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from redis.asyncio import Redis

from cache import ExactCache, Hit, Miss, MissReason, Partition, Purge
from cache.decision.features import FEATURES
from cache.decision.prior import PRIOR
from cache.decision.rule import VerifiedRule
from cache.query import Neighbourhood, Trial
from cache.semantic.cache import SemanticCache
from cache.semantic.follower import Follower
from cache.verdicts.records import AnswerRef, Scope, ServedReply, Source, Suspension, Verdict
from cache.verdicts.store import VerdictStore
from tests.cache.fakes import ACME, OTHER, FakeEmbedder, ask, entry_for, query

TEXTS = [f"open the {thing} please" for thing in ["box", "crate", "door", "chest", "lid"]]


class Host:
    """A semantic cache that follows Redis, as a cache worker does; every text is near every other."""

    def __init__(self, redis: Redis, thread: ThreadPoolExecutor) -> None:
        self.cache = SemanticCache(FakeEmbedder(is_constant=True), VerifiedRule(PRIOR))
        self.follower = Follower(redis, self.cache, thread, b"fakefake")

    async def asks(self, text: str, tenant: Partition = ACME) -> Hit | Miss:
        await self.follower.follow()
        (answer,) = self.cache.lookup([query(text, tenant)])
        return answer

    async def sees(self) -> list[Neighbourhood]:
        await self.follower.follow()
        asked = [query(text, error_max=0.01) for text in (*TEXTS, "open it")]
        return self.cache.near([msgspec.structs.replace(one, is_try=True) for one in asked], 16)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def exact(redis: Redis) -> ExactCache:
    return ExactCache(redis)


@pytest.fixture
def verdicts(redis: Redis) -> VerdictStore:
    return VerdictStore(redis)


async def put(exact: ExactCache, text: str, tenant: Partition = ACME) -> AnswerRef:
    fp, now = ask(text, tenant), time.time()
    await exact.store(entry_for(fp, now))
    return AnswerRef(fp.exact, now)


def verdict(is_right: bool | None, asked: AnswerRef | None = None, seed: int = 0) -> Verdict:
    """A verdict; the first number of its evidence is positive where it says right."""
    features = np.random.default_rng(seed).random(len(FEATURES))
    features[0] = 1.0 if is_right else -1.0
    exact, at = (asked.exact, asked.created_at) if asked is not None else (b"", 0.0)
    rule = SemanticCache(FakeEmbedder(is_constant=True)).rule_name
    trial = Trial((), features.astype("<f4").tobytes(), 0.8, 1.0, rule)
    return Verdict(
        source=Source.MISS,
        compat=ask("open it").compat,
        is_right=is_right,
        trial=trial,
        at=time.time(),
        exact=exact,
        created_at=at,
    )


def suspension(answer: AnswerRef) -> Suspension:
    return Suspension(exact=answer.exact, source=Source.FEEDBACK, at=time.time())


async def test_hosts_and_a_rebuild_learn_the_same(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore, thread: ThreadPoolExecutor
) -> None:
    """Stores, new answers, purges, verdicts, suspensions and clearings at random, followed at different times: two hosts that
    follow and one that starts afterwards decide alike, down to the tallies."""
    often, seldom = Host(redis, thread), Host(redis, thread)
    draw = random.Random(5)
    living: dict[str, AnswerRef] = {}
    for number in range(160):
        text = draw.choice(TEXTS)
        match draw.randrange(10):
            case 0 | 1:
                living[text] = await put(exact, text)
            case 2:
                await exact.purge(Purge(text=text))
                living.pop(text, None)
            case 3 if living:
                for name in list(await verdicts.suspended(ACME))[:2]:
                    await verdicts.clear(ACME, name)
            case _ if len(living) > 1:
                asked, other = draw.sample(list(living.values()), 2)
                is_right = draw.random() < 0.6
                scope = draw.choice(list(Scope)) if draw.random() < 0.1 else Scope.NOTHING
                found = verdict(is_right, asked, number)
                equal = other if is_right else None
                await verdicts.take(ACME, str(number), found, other, equal, scope, suspension(other))
        if number % 3 == 0:
            await often.follower.follow()
        if number % 41 == 0:
            await seldom.follower.follow()
    seen = await often.sees()
    assert any(one.verdicts and one.neighbours for one in seen)
    assert await seldom.sees() == seen
    assert await Host(redis, thread).sees() == seen


async def test_a_new_host_draws_checks_at_the_share_that_others_have_reached(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore, thread: ThreadPoolExecutor
) -> None:
    """The checks of all hosts say how many hits these stand for: a host that has served none goes on from there, as does one
    that was there before, and not from the share of a namespace's first hits."""
    answer, early = await put(exact, "open it"), Host(redis, thread)
    assert (await early.asks("open the door")).trial is not None
    for number in range(120):
        checked = verdict(None, seed=number)
        checked = msgspec.structs.replace(checked, trial=msgspec.structs.replace(checked.trial, chance=0.3))
        await verdicts.take(ACME, str(number), checked, answer)
    for host in (early, Host(redis, thread)):
        trial = (await host.asks("open the door")).trial
        assert trial is not None
        assert 390 <= trial.hits <= 410


async def test_a_verdict_is_taken_once(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore, thread: ThreadPoolExecutor
) -> None:
    """Told again with its id it changes nothing."""
    one, other = await put(exact, TEXTS[0]), await put(exact, TEXTS[1])
    assert [await verdicts.take(ACME, "v", verdict(True, one), other, other) for _ in range(3)] == [True, False, False]
    host = Host(redis, thread)
    near = (await host.sees())[0].neighbours[0]
    assert (near.keys, near.right, near.wrong) == (2, 1.0, 0.0)


async def test_the_ids_of_taken_verdicts_have_a_bound(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 the last ten are known, taken whole or by their ids alone; the oldest give way, and another partition's stay."""
    monkeypatch.setattr("cache.verdicts.store.TAKEN_MAX", 10)
    one = await put(exact, TEXTS[0])
    await verdicts.take_once(OTHER, "0")
    for number in range(30):
        if number % 2:
            assert await verdicts.take(ACME, str(number), verdict(True, one), one)
        else:
            assert await verdicts.take_once(ACME, str(number))
        await asyncio.sleep(0.002)  # times are of milliseconds
    assert [number for number in range(30) if await verdicts.was_taken(ACME, str(number))] == list(range(20, 30))
    assert not await verdicts.take_once(ACME, "29")
    assert await verdicts.was_taken(OTHER, "0")
    assert await redis.zcard(f"sameway:{{{ACME.hex()}}}:told") == 10


async def test_what_nobody_announced_is_read_with_the_next(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore, thread: ThreadPoolExecutor
) -> None:
    """A process killed between the verdict and the log leaves hosts behind, until any verdict comes in that partition."""
    one, other = await put(exact, TEXTS[0]), await put(exact, TEXTS[1])
    host = Host(redis, thread)
    await host.follower.follow()
    await verdicts.take(ACME, "first", verdict(True, one), other, other)
    await redis.xtrim("sameway:cache:log", maxlen=2)  # the record of the verdict is the last of three
    await redis.execute_command("XDEL", "sameway:cache:log", (await redis.xrevrange("sameway:cache:log"))[0][0])
    assert (await host.sees())[0].neighbours[0].right == 0.0
    await verdicts.take(ACME, "second", verdict(False, one), other)
    near = (await host.sees())[0].neighbours[0]
    assert (near.right, near.wrong) == (1.0, 1.0)
    assert (await host.sees()) == await Host(redis, thread).sees()


@pytest.mark.parametrize("scope", [Scope.ANSWER, Scope.GROUP])
async def test_out_of_service_until_cleared(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore, thread: ThreadPoolExecutor, scope: Scope
) -> None:
    """On every host and after a restart: an answer alone, or with all that were found equal to it. Other teams' are untouched."""
    asked = "please open the box"
    host = Host(redis, thread)
    first, second = await put(exact, TEXTS[0]), await put(exact, "open the box")
    await put(exact, TEXTS[0], OTHER)
    await verdicts.take(ACME, "equal", verdict(True, second), first, first)
    served = await host.asks(asked)
    assert isinstance(served, Hit)
    answer = first if served.exact == first.exact else second
    await verdicts.take(ACME, "wrong", verdict(False), answer, None, scope, suspension(answer))
    for one in (host, Host(redis, thread)):
        miss = await one.asks(asked)
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.SUSPENDED
        assert miss.trial is not None
        assert isinstance(await one.asks(asked, OTHER), Hit)
    reasons = {near.exact: near.reason for near in host.cache.near([query(asked)], 4)[0].neighbours}
    assert reasons[answer.exact] is MissReason.SUSPENDED
    both = [reason is MissReason.SUSPENDED for reason in reasons.values()]
    assert both.count(True) == (2 if scope is Scope.GROUP else 1)
    ((name, why),) = (await verdicts.suspended(ACME)).items()
    assert why.exact == answer.exact
    assert await verdicts.clear(ACME, name)
    assert not await verdicts.clear(ACME, name)
    for one in (host, Host(redis, thread)):
        assert isinstance(await one.asks(asked), Hit)
        wrong = {near.wrong for seen in await one.sees() for near in seen.neighbours}
        assert wrong == (
            {0.0} if scope is Scope.GROUP else {1.0}
        )  # what was reported is taken back, what was compared is not


async def test_an_answer_made_anew_starts_anew(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore, thread: ThreadPoolExecutor
) -> None:
    """Neither out of service nor equal to what its predecessor was equal to."""
    first, second = await put(exact, TEXTS[0]), await put(exact, TEXTS[1])
    await verdicts.take(ACME, "1", verdict(True, second), first, first, Scope.ANSWER, suspension(first))
    host = Host(redis, thread)
    assert (await host.sees())[0].neighbours[0].keys == 2
    await put(exact, TEXTS[0])
    await put(exact, TEXTS[1])
    for one in (host, Host(redis, thread)):
        (seen,) = (await one.sees())[:1]
        assert [near.keys for near in seen.neighbours] == [1, 1]
        assert isinstance(await one.asks(TEXTS[0].upper()), Hit)


async def test_verdicts_leave_no_text_and_groups_leave_with_their_entries(
    redis: Redis, exact: ExactCache, verdicts: VerdictStore
) -> None:
    """After a purge there is nothing to read of what was asked."""
    one, other = await put(exact, "the secret word"), await put(exact, TEXTS[1])
    await verdicts.take(ACME, "1", verdict(True, one), other, other, Scope.GROUP, suspension(other))
    await exact.purge(Purge(partition=ACME))
    kept = b""
    for key in await redis.keys("*"):
        kind = await redis.type(key)
        reads = {b"string": redis.get, b"hash": redis.hgetall, b"stream": redis.xrange}
        kept += key + (repr(await reads[kind](key)).encode() if kind in reads else b"")
    assert b"secret" not in kept
    assert not await redis.exists(f"sameway:{{{ACME.hex()}}}:groups")


async def test_a_reply_is_remembered_for_a_while(redis: Redis, verdicts: VerdictStore) -> None:
    """By its id and its answer's, of its own partition alone."""
    trial = Trial((), b"", 0.9, 1.0, b"rule")
    reply = ServedReply(id="req_1", exact=b"e" * 16, created_at=1.5, compat=b"c" * 16, alias="m", at=2.5, trial=trial)
    await verdicts.remember_replies([(ACME, reply, ["chatcmpl-1"])], 60.0)
    assert await verdicts.reply(ACME, "req_1") == await verdicts.reply(ACME, "chatcmpl-1") == reply
    assert await verdicts.reply(OTHER, "req_1") is None
    assert 0 < await redis.pttl(f"sameway:{{{ACME.hex()}}}:reply:req_1") <= 60_000


async def test_a_partitions_replies_have_a_bound(
    redis: Redis, verdicts: VerdictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 the last ten are remembered; the oldest give way, and another partition's stay."""
    monkeypatch.setattr("cache.verdicts.store.REPLIES_MAX", 10)
    trial = Trial((), b"", 0.9, 1.0, b"rule")
    for number in range(30):
        reply = ServedReply(
            id=f"req_{number:02}", exact=b"e" * 16, created_at=1.5, compat=b"c" * 16, alias="m", at=2.5, trial=trial
        )
        if number == 0:
            await verdicts.remember_replies([(OTHER, reply, ())], 60.0)
        await verdicts.remember_replies([(ACME, reply, ())], 60.0)
        await asyncio.sleep(0.002)  # times are of milliseconds
    found = [number for number in range(30) if await verdicts.reply(ACME, f"req_{number:02}") is not None]
    assert found == list(range(20, 30))
    assert await verdicts.reply(OTHER, "req_00") is not None
    assert len(await redis.keys(f"sameway:{{{ACME.hex()}}}:reply:*")) == 10


def test_verdicts_and_replies_are_stored_and_read_as_they_are() -> None:
    """A verdict is read as it was, but for the order of its trial's answers; a reply's bytes stay these, across versions."""
    trial = Trial((), b"\0\0\x80?", 0.75, 0.2, b"rule")
    verdict = Verdict(
        source=Source.AUDIT,
        compat=b"c" * 16,
        exact=b"e" * 16,
        created_at=1.5,
        is_right=False,
        trial=trial,
        at=2.5,
        judge="equality",
        why="other words",
    )
    assert Verdict.decode(verdict.encode()) == verdict
    kept = bytes.fromhex(
        "98a27232a57265715f31c41065656565656565656565656565656565cb3ff8000000000000c4106363636363636363636363"
        "6363636363a16dcb40040000000000009990c4040000803fcb3fe8000000000000cb3ff0000000000000c40472756c659000"
        "90cb0000000000000000"
    )
    reply = ServedReply.decode(kept)
    assert (reply.id, reply.exact, reply.created_at, reply.compat) == ("req_1", b"e" * 16, 1.5, b"c" * 16)
    assert (reply.alias, reply.at, reply.trial) == ("m", 2.5, Trial((), b"\0\0\x80?", 0.75, 1.0, b"rule"))
    assert reply.encode() == kept
