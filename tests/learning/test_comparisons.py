"""What a worker learns from, without a gateway around it: how much it holds, and what it draws by chance."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from cache import CacheWorkerUnavailable, Entry, ExactCache, Partition, Recorded, Trial
from cache.verdicts import Judge, Judgement, QAPair, Ruling, Source, Verdict, VerdictStore
from cache.verdicts.records import AnswerJudged, answer_name
from cache.worker import AnswerText
from gateway.deployments.progress import Progress
from gateway.journey.flight import Flight
from gateway.journey.generation import Compared, generation_of
from gateway.journey.outcomes import Asking, Looked, SemanticResult, Stored
from gateway.journey.record import CacheFacts, Record, RequestFacts
from gateway.journey.turn import Ended, arrive, read_turn
from gateway.learning.checks import Checks
from gateway.learning.comparisons import QUEUE_MAX, Judging
from gateway.learning.internal_requests import InternalRequests
from gateway.learning.verifier import NO_ANSWER
from gateway.telemetry.measured_error import Cell, CheckCounts
from gateway.wire.types import Chunk
from tests.cache.fakes import ask, entry_for

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "open the box"}]}'
OTHER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"17"},"finish_reason":"stop"}]}'
TOOLS = b'{"choices":[{"index":0,"message":{"role":"assistant","content":null},"finish_reason":"stop"}]}'
WHOLE = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"42"},"finish_reason":"stop"}]}'


class Waits:
    """Judges that answer when they may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def compare(
        self, partition: Partition, compat: bytes, fresh: AnswerText, others: Sequence[AnswerText]
    ) -> list[Judgement]:
        await self.may.wait()
        return [Judgement(Ruling.SAME, "waits", "so")] * len(others)


class Says:
    """A judge, or judges, that always say the same; without a ruling they have no time."""

    def __init__(self, ruling: Ruling | None) -> None:
        self._ruling = ruling
        self.compared: list[tuple[AnswerText, Sequence[AnswerText]]] = []

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        assert self._ruling is not None
        return Judgement(self._ruling, "says", "so")

    async def compare(
        self, partition: Partition, compat: bytes, fresh: AnswerText, others: Sequence[AnswerText]
    ) -> list[Judgement]:
        self.compared.append((fresh, others))
        if self._ruling is None:
            raise CacheWorkerUnavailable("no time")
        return [Judgement(self._ruling, "says", "so")] * len(others)


class Equal:
    """A judge that compares texts."""

    async def compare(
        self, partition: Partition, compat: bytes, fresh: AnswerText, others: Sequence[AnswerText]
    ) -> list[Judgement]:
        rulings = [Ruling.SAME if fresh.text == other.text else Ruling.DIFFERENT for other in others]
        return [Judgement(ruling, "equal", "so") for ruling in rulings]


class Heard:
    """Everything that was noted and counted."""

    def __init__(self) -> None:
        self.counts = CheckCounts()
        self.verdicts: Counter[tuple[Source, Ruling, str]] = Counter()

    def note(self, record: Record, events: tuple[str, ...]) -> None:
        for event in events:
            self.counts.count(event)

    def count(self, source: Source, ruling: Ruling, judge: str) -> None:
        self.verdicts[source, ruling, judge] += 1


def over(chance: float = 1.0, entry: Entry | None = None, verified_by: str = "") -> tuple[Flight, Record]:
    """A request that is over: one that was generated, or with `entry` one that was a hit; with both the check of that hit."""
    turn = read_turn(BODY, {}, arrive("chat"))
    unused: Any = None
    caller: Any = SimpleNamespace(key=SimpleNamespace(id=1))
    trial = Trial((ask("open the crate").exact,), b"", 0.9, chance, b"rule")
    is_check = chance < 1.0
    found, semantic = (None if is_check else entry), SemanticResult(miss_reason="no-cache")
    if not is_check:
        semantic = SemanticResult(entry=found, trial=trial, verified_by=verified_by)
    generation = generation_of(
        turn, caller, unused, Looked(ask("open the box"), entry=found, semantic=semantic), unused
    )
    request = RequestFacts(f"req_{random.random()}", time.time(), team_id=1, key_id=1, alias="m")
    record = Record(request, cache=CacheFacts(similarity=0.9))
    if is_check:
        assert entry is not None
        generation.checks = Compared(record, trial, entry, verified_by)
        record = Record(msgspec.structs.replace(request, id=f"{request.id}c", operation="check"))
    progress = Progress("somewhere")
    progress.complete()
    generation.answered = msgspec.structs.replace(generation.answered, progress=progress)
    flight = Flight(generation=generation)
    flight.extend([Chunk(WHOLE, is_whole=True)])
    return flight, record


def look(flight: Flight, semantic: SemanticResult) -> None:
    """Let the semantic lookup of the request have another outcome."""
    looked = flight.generation.looked
    flight.generation.looked = msgspec.structs.replace(looked, entry=semantic.entry, semantic=semantic)


def judging(
    redis: Redis,
    judges: Says | Waits,
    heard: Heard,
    *,
    fallback: Any = None,
    defer: Callable[[Callable[[], None]], object] = lambda leave: leave(),
) -> Judging:
    return Judging(
        exact=ExactCache(redis),
        verdicts=VerdictStore(redis),
        judges=judges,
        fallback=fallback,
        reply_ttl_s=60.0,
        findings=heard,
        checks=Checks(0.0, InternalRequests(), lambda: 1.0),
        defer=defer,
    )


async def judged(one: Judging) -> None:
    """Wait until no answer is still to be judged."""
    async with asyncio.timeout(20):
        while one.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_cut_answer_is_no_material_for_judges(redis: Redis) -> None:
    """Neither a fresh answer that a length limit cut nor a cached one without a text is compared."""
    heard, judge = Heard(), Says(Ruling.DIFFERENT)
    exact = ExactCache(redis)
    entry = msgspec.structs.replace(entry_for(ask("open the crate"), time.time()), text=None)
    await exact.store(entry)
    one = judging(redis, judge, heard)
    running = asyncio.create_task(one.run())
    flight, record = over(0.5, entry)
    flight.generation.answered.progress.finish_reasons.append("length")
    one.recorded(flight, record)
    assert one.waiting == 0
    one.recorded(*over(1.0))
    await judged(one)
    assert [others for _, others in judge.compared] == [[]]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_finds_no_room_is_not_judged(redis: Redis) -> None:
    """A judge that hangs holds a bounded number of answers; the rest is counted and let go, and nothing waits for it."""
    heard, judge = Heard(), Waits()
    one = judging(redis, judge, heard)
    for _ in range(QUEUE_MAX + 30):
        one.recorded(*over(1.0))
    assert heard.verdicts[Source.MISS, Ruling.UNKNOWN, "no room"] == 30
    await one.aclose()


@pytest.mark.parametrize(
    ("answer", "cached", "finish", "cell"),
    [
        (WHOLE, WHOLE, "stop", Cell(right=1)),
        (WHOLE, OTHER, "stop", Cell(wrong=1)),
        (WHOLE, TOOLS, "stop", Cell(open=1)),
        (TOOLS, WHOLE, "stop", Cell(open=1)),
        (WHOLE, WHOLE, "length", Cell(open=1)),
    ],
)
@pytest.mark.parametrize("verifier", ["", "small"])
async def test_a_check_counts_by_what_came_of_it(
    redis: Redis, answer: bytes, cached: bytes, finish: str, cell: Cell, verifier: str
) -> None:
    """Right, wrong, or open where nothing could be compared, also of an answer that has left the cache; that of a hit which a verifier
    had allowed counts apart, too."""
    heard, crate = Heard(), ask("open the crate")
    entry = msgspec.structs.replace(entry_for(crate, time.time()), chunks=(Recorded(cached, is_whole=True),))
    one = judging(redis, Equal(), heard)
    running = asyncio.create_task(one.run())
    flight, record = over(0.3, entry, verified_by=verifier)
    assert await ExactCache(redis).lookup_many(crate.partition, crate.compat, [entry.exact]) == [None]
    flight.chunks[:] = [Chunk(answer, is_whole=True)]
    flight.generation.answered.progress.finish_reasons.append(finish)
    one.recorded(flight, record)
    one.recorded(*over(1.0))  # a miss is no check
    one.recorded(*over(1.0, entry, verified_by=verifier))
    await judged(one)
    running.cancel()
    await one.aclose()
    assert heard.counts.cells == {300: cell}
    assert heard.counts.verified == ({300: cell} if verifier else {})
    assert heard.counts.verified_hits == bool(verifier)
    assert heard.counts.judges == ({} if cell.open else {"equal": 1})


@pytest.mark.parametrize(
    ("status", "cells"), [(400, {300: Cell(open=1)}), (429, {}), (424, {}), (499, {}), (502, {}), (503, {})]
)
async def test_a_check_that_could_not_be_made(redis: Redis, status: int, cells: dict[int, Cell]) -> None:
    """One that was refused for what it asked is open; one without money or a deployment was not drawn, and is counted apart."""
    heard = Heard()
    one = judging(redis, Equal(), heard)
    flight, record = over(0.3, entry_for(ask("open the crate"), time.time()))
    flight.generation.answered = msgspec.structs.replace(flight.generation.answered, progress=Progress("somewhere"))
    one.recorded(flight, msgspec.structs.replace(record, ended=Ended(status, "an_error")))
    assert heard.counts.cells == cells
    assert heard.verdicts == ({} if cells else {(Source.AUDIT, Ruling.UNKNOWN, "not made"): 1})
    assert one.waiting == 0


async def test_two_answers_to_one_prompt_depend_on_the_moment(redis: Redis) -> None:
    """Where a check of a hit by the same words finds another answer, both live a minute; where it finds the same, both stay."""
    exact = ExactCache(redis)
    for cached, is_moving in ((WHOLE, False), (OTHER, True)):
        now, chunks = time.time(), (Recorded(cached, is_whole=True),)
        served = msgspec.structs.replace(entry_for(ask("open the crate"), now), ttl_s=3_600, chunks=chunks)
        fresh = msgspec.structs.replace(entry_for(ask("open the box"), now), ttl_s=3_600)
        for entry in (served, fresh):
            await exact.store(entry)
        one = judging(redis, Equal(), Heard())
        running = asyncio.create_task(one.run())
        flight, record = over(0.3, served)
        flight.generation.stored = Stored(entry=fresh, outcome="stored")
        one.recorded(flight, record)
        await judged(one)
        running.cancel()
        await one.aclose()
        found = await exact.lookup_many(served.partition, served.compat, [served.exact, fresh.exact])
        assert [entry is not None and entry.ttl_s <= 60 for entry in found] == [is_moving] * 2


async def test_a_hit_found_wrong_is_served_no_more(redis: Redis) -> None:
    """A check takes the answer that was served out of service; a miss that finds a near answer different does not."""
    crate, store = ask("open the crate"), VerdictStore(redis)
    entry = msgspec.structs.replace(entry_for(crate, time.time()), chunks=(Recorded(OTHER, is_whole=True),))
    await ExactCache(redis).store(entry)
    for chance, suspended in ((1.0, []), (0.1, [b"a" + answer_name(entry.exact, entry.created_at)])):
        one = judging(redis, Equal(), Heard())
        running = asyncio.create_task(one.run())
        one.recorded(*over(chance, entry if suspended else None))
        await judged(one)
        running.cancel()
        await one.aclose()
        assert list(await store.suspended(crate.partition)) == suspended
    verdicts = await read_verdicts(store, crate.partition)
    assert [(one.source, one.is_right, one.trial.chance) for one in verdicts] == [
        (Source.MISS, False, 1.0), (Source.AUDIT, False, 0.1),
    ]  # fmt: skip


async def test_a_check_asks_the_judge_that_costs_beside_a_verifier(redis: Redis) -> None:
    """So that few checks stay open; one that does not answer leaves it open."""
    crate = ask("open the crate")
    entry = msgspec.structs.replace(entry_for(crate, time.time()), chunks=(Recorded(OTHER, is_whole=True),))
    await ExactCache(redis).store(entry)
    for judge, cell in ((Says(Ruling.SAME), Cell(right=1)), (Silent(), Cell(open=1))):
        heard = Heard()
        one = judging(redis, Says(Ruling.UNKNOWN), heard, fallback=Costly(judge))
        running = asyncio.create_task(one.run())
        flight, record = over(0.1, entry)
        look(flight, msgspec.structs.replace(flight.generation.looked.semantic, asking=Asking("reader")))
        one.recorded(flight, record)
        await judged(one)
        running.cancel()
        await one.aclose()
        assert heard.counts.cells == {100: cell}


class Silent:
    """A judge model that no deployment answers for."""

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        return Judgement(Ruling.UNKNOWN, "silent", NO_ANSWER)


class Costly:
    """The judge that costs, of every request."""

    def __init__(self, judge: Judge | None) -> None:
        self._judge = judge

    def of(self, record: Record, space: bytes) -> Judge | None:
        return self._judge


DIFFERENT = Costly(Says(Ruling.DIFFERENT))


@pytest.mark.parametrize(
    ("fallback", "is_asked", "ruling", "is_right"),
    [
        (None, False, Ruling.UNKNOWN, [None]),
        (DIFFERENT, False, Ruling.UNKNOWN, [False]),
        (DIFFERENT, False, Ruling.SAME, [True]),
        (DIFFERENT, True, Ruling.SAME, [True]),
        (DIFFERENT, True, Ruling.UNKNOWN, []),
        (Costly(None), False, Ruling.UNKNOWN, [None]),
        (Costly(Silent()), False, Ruling.UNKNOWN, [None]),
    ],
)
async def test_the_judge_that_costs_is_asked_about_what_is_open(
    redis: Redis, fallback: Costly | None, is_asked: bool, ruling: Ruling, is_right: list[bool | None]
) -> None:
    """Where a verifier was asked before, its word is the verdict: no judge is paid for another, and none is made up."""
    asking = Asking("reader") if is_asked else None
    found, _ = await judged_once(redis, Says(ruling), fallback, asking=asking)
    assert [one.is_right for one in found] == is_right
    assert all((one.alias, one.trial.features) == ("m", b"1234") for one in found)


async def judged_once(
    redis: Redis, judge: Says, fallback: Costly | None, *, peers: int = 0, asking: Asking | None = None
) -> tuple[list[Verdict], list[bytes]]:
    """The verdicts on a fresh answer with a near one, whose group has so many further answers; and these."""
    store, now = VerdictStore(redis), time.time()
    found, exact = ask("open the crate"), ExactCache(redis)
    others = [ask(f"open the crate {number}") for number in range(peers)]
    for one in (found, *others):
        await exact.store(msgspec.structs.replace(entry_for(one, now), chunks=(Recorded(WHOLE, is_whole=True),)))
    one = judging(redis, judge, Heard(), fallback=fallback)
    running = asyncio.create_task(one.run())
    flight, record = over(1.0)
    trial = flight.generation.looked.semantic.trial
    assert trial is not None
    names = tuple(one.exact for one in others)
    trial = msgspec.structs.replace(trial, features=b"1234", peers=names)
    look(flight, SemanticResult(trial=trial, asking=asking))
    one.recorded(flight, record)
    await judged(one)
    running.cancel()
    await one.aclose()
    records, _ = await store.read(found.partition, b"0-0")
    return [one.verdict for one in records if isinstance(one, AnswerJudged)], list(names)


class InTurn:
    """A judge with a list of rulings."""

    def __init__(self, *rulings: Ruling) -> None:
        self.rulings = list(rulings)

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        return Judgement(self.rulings.pop(0), "in turn", "so")


@pytest.mark.parametrize(
    ("rulings", "is_right"),
    [
        ((Ruling.SAME,), True),
        ((Ruling.DIFFERENT, Ruling.DIFFERENT), False),
        ((Ruling.DIFFERENT, Ruling.SAME, Ruling.SAME), True),
        ((Ruling.DIFFERENT, Ruling.SAME, Ruling.UNKNOWN), None),
        ((Ruling.UNKNOWN, Ruling.SAME, Ruling.DIFFERENT), None),
        ((Ruling.UNKNOWN, Ruling.UNKNOWN, Ruling.UNKNOWN), None),
    ],
)
async def test_a_surprising_ruling_needs_a_second_opinion(
    redis: Redis, rulings: tuple[Ruling, ...], is_right: bool | None
) -> None:
    """The answers found equal to a likely one are compared too, until two rulings agree: a judge's slip is not a wrong answer."""
    judge = InTurn(*rulings)
    ((judged,), _) = await judged_once(redis, Says(Ruling.UNKNOWN), Costly(judge), peers=2)
    assert (judged.is_right, judge.rulings) == (is_right, [])


async def judged_with(redis: Redis, judges: Says, answer: bytes, cached: bytes = WHOLE) -> Heard:
    """One answer after a miss, compared with one cached answer by such judges."""
    heard, exact = Heard(), ExactCache(redis)
    await exact.store(
        msgspec.structs.replace(
            entry_for(ask("open the crate"), time.time()), chunks=(Recorded(cached, is_whole=True),)
        )
    )
    one = judging(redis, judges, heard)
    running = asyncio.create_task(one.run())
    flight, record = over(1.0)
    look(flight, SemanticResult(trial=Trial((ask("open the crate").exact,), b"1234", 0.9, 1.0, b"rule")))
    flight.generation.stored = Stored(entry=entry_for(ask("open the box"), 5.0), outcome="stored")
    flight.chunks[:] = [Chunk(answer, is_whole=True)]
    one.recorded(flight, record)
    await judged(one)
    running.cancel()
    await one.aclose()
    return heard


async def read_verdicts(store: VerdictStore, partition: Partition) -> list[Verdict]:
    records, _ = await store.read(partition, b"0-0")
    return [one.verdict for one in records if isinstance(one, AnswerJudged)]


async def test_served_hits_are_remembered_together(redis: Redis) -> None:
    """What feedback needs leaves when it is due, or where the worker ends before: of no hit it is lost."""
    leaving: list[Callable[[], None]] = []
    heard, store = Heard(), VerdictStore(redis)
    one = judging(redis, Says(None), heard, defer=leaving.append)
    hits = [over(1.0, entry_for(ask("open the crate"), time.time())) for _ in range(3)]

    async def remembered(number: int) -> bool:
        return await store.reply(ask("open the box").partition, hits[number][1].request.id) is not None

    for hit in hits[:2]:
        one.recorded(*hit)
    (leave,) = leaving
    assert one.waiting == 0
    leave()
    async with asyncio.timeout(30):
        while not (await remembered(0) and await remembered(1)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    one.recorded(*hits[2])
    await one.aclose()
    assert await remembered(2)


async def test_judges_without_time_teach_nothing(redis: Redis) -> None:
    """Whatever would have been found, no verdict is taken: what was not dropped is no sample of what was. It is counted."""
    heard = await judged_with(redis, Says(None), WHOLE)
    assert heard.verdicts == {(Source.MISS, Ruling.UNKNOWN, "no room"): 1}
    assert await VerdictStore(redis).read(ask("open the crate").partition, b"0-0") == ([], b"0-0")


async def test_the_judges_get_the_answers_with_their_entries(redis: Redis) -> None:
    """The fresh one's own entry is named, so that it is kept to compare later ones with."""
    says = Says(Ruling.SAME)
    await judged_with(redis, says, WHOLE)
    ((fresh, others),) = says.compared
    assert (fresh.exact, fresh.created_at, fresh.text) == (ask("open the box").exact, 5.0, "42")
    assert [(one.exact, one.text) for one in others] == [(ask("open the crate").exact, "42")]


@pytest.mark.parametrize(("fresh", "cached", "others"), [(16 << 20, 10, None), (70_000, 10, None), (10, 2 << 20, 0)])
async def test_answers_over_the_limit_reach_no_judge(redis: Redis, fresh: int, cached: int, others: int | None) -> None:
    """Fresh or cached: nothing that long is folded, sent or compared."""
    says = Says(Ruling.SAME)
    long, other = (WHOLE.replace(b"42", b"x" * size) for size in (fresh, cached))
    heard = await judged_with(redis, says, long, other)
    assert [len(one) for _, one in says.compared] == ([] if others is None else [others])
    assert not any(ruling is Ruling.SAME for _, ruling, _ in heard.verdicts)
