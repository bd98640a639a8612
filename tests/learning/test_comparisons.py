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

from cache import CacheWorkerUnavailable, Entry, ExactCache, Fingerprint, Partition, Recorded, Trial
from cache.verdicts import EARLY, PROSE, Judge, Judgement, QAPair, Ruling, Source, Verdict, VerdictStore
from cache.verdicts.records import AnswerJudged
from cache.worker import AnswerText
from gateway.deployments.progress import Progress
from gateway.journey.flight import Flight
from gateway.journey.generation import generation_of
from gateway.journey.outcomes import Looked, SemanticResult, Stored
from gateway.journey.record import CacheFacts, Record, RequestFacts
from gateway.journey.turn import Turn, arrive, read_turn
from gateway.learning.comparisons import EARLY_MAX, QUEUE_MAX, Judging, Regenerate
from gateway.learning.verifier import NO_ANSWER
from gateway.telemetry.measured_error import Cell, CheckCounts, chances
from gateway.wire.types import Chunk
from tests.cache.fakes import ask, entry_for

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "open the box"}]}'
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
        self.judge_chance: list[tuple[AnswerText, Sequence[AnswerText]]] = []

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        assert self._ruling is not None
        return Judgement(self._ruling, "says", "so")

    async def compare(
        self, partition: Partition, compat: bytes, fresh: AnswerText, others: Sequence[AnswerText]
    ) -> list[Judgement]:
        self.judge_chance.append((fresh, others))
        if self._ruling is None:
            raise CacheWorkerUnavailable("no time")
        return [Judgement(self._ruling, "says", "so")] * len(others)


class Heard:
    """Everything that was noted and counted. Each judge has the error rates `flips`."""

    def __init__(self, flips: tuple[float, float] = (0.0, 0.0)) -> None:
        self._flips = flips
        self.compares: list[tuple[Ruling, Ruling]] = []
        self.counts = CheckCounts()
        self.certificates: Counter[str] = Counter()
        self.verdicts: Counter[tuple[Source, Ruling, str]] = Counter()

    def note(self, team_id: int, alias: str, events: tuple[str, ...], certificate: str | None) -> str:
        for event in events:
            self.counts.count(event)
        self.certificates[certificate or "new"] += 1
        return "now"

    def count(self, source: Source, ruling: Ruling, judge: str) -> None:
        self.verdicts[source, ruling, judge] += 1

    def compared(self, one: Judgement, other: Judgement) -> None:
        self.compares.append((one.ruling, other.ruling))

    def flips(self, judge: str) -> tuple[float, float]:
        return self._flips


def over(chance: float, entry: Entry | None = None) -> tuple[Flight, Record]:
    """A request that is over: one that was generated, or with `entry` one that was a hit."""
    turn = read_turn(BODY, {}, arrive("chat"))
    unused: Any = None
    caller: Any = SimpleNamespace(key=SimpleNamespace(id=1))
    trial = Trial((ask("open the crate").exact,), b"", 0.9, chance, b"rule")
    looked = Looked(ask("open the box"), entry=entry, semantic=SemanticResult(entry=entry, trial=trial))
    generation = generation_of(turn, caller, unused, looked, unused)
    progress = Progress("somewhere")
    progress.complete()
    generation.answered = msgspec.structs.replace(generation.answered, progress=progress)
    flight = Flight(generation=generation)
    flight.extend([Chunk(WHOLE, is_whole=True)])
    request = RequestFacts(f"req_{random.random()}", time.time(), team_id=1, key_id=1, alias="m")
    return flight, Record(request, cache=CacheFacts(similarity=0.9))


def look(flight: Flight, semantic: SemanticResult) -> None:
    """Let the semantic lookup of the request have another outcome."""
    looked = flight.generation.looked
    flight.generation.looked = msgspec.structs.replace(looked, entry=semantic.entry, semantic=semantic)


def missing(record: Record, reason: str) -> Record:
    """The record of the same request with another reason for its semantic miss."""
    return msgspec.structs.replace(record, cache=CacheFacts(similarity=0.9, miss_reason=reason))


def judging(
    redis: Redis,
    judges: Says | Waits,
    heard: Heard,
    *,
    share: float = 0.0,
    fallback: Any = None,
    regenerate: Regenerate | None = None,
    draw: Callable[[], float] = random.random,
    **more: Any,
) -> Judging:
    store = more.pop("store", None) or VerdictStore(redis)
    return Judging(
        exact=ExactCache(redis),
        verdicts=store,
        judges=judges,
        fallback=fallback,
        regenerate=regenerate,
        share=lambda *_: share,
        reply_ttl_s=60.0,
        random=draw,
        findings=heard,
        **more,
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
    await exact.store(msgspec.structs.replace(entry_for(ask("open the crate"), time.time()), text=None))
    one = judging(redis, judge, heard, draw=lambda: 0.0)
    running = asyncio.create_task(one.run())
    flight, record = over(0.5)
    flight.generation.answered.progress.finish_reasons.append("length")
    one.recorded(flight, record)
    assert one.waiting == 0
    one.recorded(*over(1.0))
    await judged(one)
    assert [others for _, others in judge.judge_chance] == [[]]
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


@pytest.mark.parametrize(("share", "audited"), [(0.25, 0.1), (1.0, 0.02)])
async def test_hits_are_drawn_at_the_share_they_stand_for(redis: Redis, share: float, audited: float) -> None:
    """As many are generated afresh as the setting says, and each stands for the served ones that were not."""
    heard, judge, regenerated = Heard(), Waits(), list[Turn]()
    judge.may.set()

    async def regenerate(turn: Turn) -> bytes:
        regenerated.append(turn)
        return WHOLE

    one = judging(redis, judge, heard, share=share, regenerate=regenerate, draw=random.Random(4).random)
    running = asyncio.create_task(one.run())
    found, count = ask("open the crate"), 400
    entry = msgspec.structs.replace(entry_for(found, time.time()), chunks=(Recorded(WHOLE, is_whole=True),))
    for number in range(count):
        one.recorded(*over(audited, entry))
        if number % 50 == 49:
            await judged(one)
    running.cancel()
    await one.aclose()
    assert len(regenerated) == pytest.approx(share * count, rel=0.2)
    ((step, cell),) = heard.counts.cells.items()
    assert chances(step)[0] <= audited + (1 - audited) * share <= chances(step)[1]
    assert cell == Cell(served=count, shadowed=len(regenerated), shadows_right=len(regenerated))
    assert heard.certificates == {"new": count, "now": len(regenerated)}


async def test_an_audit_counts_when_it_is_drawn(redis: Redis) -> None:
    """So one that is lost on its way to a judge stays open, and its verdict counts for the certificate of its draw."""
    heard, judge = Heard(), Waits()
    judge.may.set()
    one = judging(redis, judge, heard)
    found = ask("open the crate")
    await one.exact.store(
        msgspec.structs.replace(entry_for(found, time.time()), chunks=(Recorded(WHOLE, is_whole=True),))
    )
    running = asyncio.create_task(one.run())
    for is_lost in (False, True):
        flight, record = over(0.1)
        semantic = flight.generation.looked.semantic
        assert semantic.trial is not None
        audit = one.audited(1, "m", semantic.trial)
        look(flight, msgspec.structs.replace(semantic, audit=audit))
        if not is_lost:
            one.recorded(flight, missing(record, "audit"))
    await judged(one)
    running.cancel()
    await one.aclose()
    (cell,) = heard.counts.cells.values()
    assert cell == Cell(audited=2, audits_right=1)
    assert (cell.open, heard.counts.judges) == (1, {"waits": 1})
    assert heard.certificates == {"new": 2, "now": 1}


async def test_checks_that_cannot_be_made_are_not_drawn(redis: Redis) -> None:
    """Where the judge's team has no money left, one check is lost; the next ones are tries, of which the certificate knows nothing."""
    heard, judge, money = Heard(), Waits(), [False]
    judge.may.set()

    async def regenerate(turn: Turn) -> bytes | None:
        return WHOLE if money[0] else None

    one = judging(redis, judge, heard, share=1.0, regenerate=regenerate)
    running = asyncio.create_task(one.run())
    entry = msgspec.structs.replace(
        entry_for(ask("open the crate"), time.time()), chunks=(Recorded(WHOLE, is_whole=True),)
    )
    for has_money in (False, False, False, True, True):
        money[0] = has_money
        one.recorded(*over(0.1, entry))
        await judged(one)
    running.cancel()
    await one.aclose()
    without, with_checks = (cell for _, cell in sorted(heard.counts.cells.items(), reverse=True))
    assert with_checks == Cell(served=2, shadowed=2, shadows_right=1)
    assert without == Cell(served=3)


class Silent:
    """A judge model that no deployment answers for."""

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        return Judgement(Ruling.UNKNOWN, "silent", NO_ANSWER)


class Costly:
    """The judge that costs, of every request."""

    def __init__(self, judge: Judge | None, *, is_sparing: bool = False) -> None:
        self._judge = judge
        self.is_sparing = is_sparing

    def of(self, record: Record, space: bytes) -> Judge | None:
        return self._judge


DIFFERENT = Costly(Says(Ruling.DIFFERENT))
FLIPS = 0.0, 0.25


@pytest.mark.parametrize(
    ("fallback", "worth", "ruling", "row"),
    [
        (None, 0.0, Ruling.UNKNOWN, (None, None)),
        (DIFFERENT, 1.0, Ruling.UNKNOWN, (False, 1.0)),
        (DIFFERENT, 0.0, Ruling.SAME, (True, None)),
        (DIFFERENT, 0.0, Ruling.UNKNOWN, (None, 0.0)),
        (Costly(None), 1.0, Ruling.UNKNOWN, (None, 0.0)),
        (Costly(Silent()), 1.0, Ruling.UNKNOWN, (None, 0.0)),
    ],
)
async def test_a_record_says_with_which_chance_a_judge_that_costs_was_asked(
    redis: Redis, fallback: Costly | None, worth: float, ruling: Ruling, row: tuple[bool | None, float | None]
) -> None:
    """Not drawn, not affordable, not answered: it was not asked, which is no verdict; where the others ruled it had no say."""
    ((judged,), _) = await judged_once(redis, Says(ruling), fallback, worth=worth)
    assert (judged.is_right, judged.judge_chance) == row
    assert (judged.flips, judged.alias) == (FLIPS, "m")  # those of the judge that ruled, whether it costs or not
    assert judged.trial.features == b"1234"


async def judged_once(
    redis: Redis, judge: Says, fallback: Costly | None, *, worth: float = 1.0, peers: int = 0
) -> tuple[list[Verdict], list[bytes]]:
    """The verdicts on a fresh answer with a near one, whose group has so many further answers; and these."""
    store, now = VerdictStore(redis), time.time()
    found, exact = ask("open the crate"), ExactCache(redis)
    others = [ask(f"open the crate {number}") for number in range(peers)]
    for one in (found, *others):
        await exact.store(msgspec.structs.replace(entry_for(one, now), chunks=(Recorded(WHOLE, is_whole=True),)))
    one = judging(redis, judge, Heard(FLIPS), fallback=fallback)
    running = asyncio.create_task(one.run())
    flight, record = over(1.0)
    trial = flight.generation.looked.semantic.trial
    assert trial is not None
    names = tuple(one.exact for one in others)
    trial = msgspec.structs.replace(trial, features=b"1234", worth=worth, peers=names)
    look(flight, SemanticResult(trial=trial))
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


async def test_rulings_on_pairs_that_prompts_decide_are_set_beside_these(redis: Redis) -> None:
    """A check of a hit by the same words has two answers to one prompt; a miss without features is beside a veto."""
    for chance, reason, right in ((0.5, "audit", Ruling.SAME), (1.0, "", Ruling.DIFFERENT)):
        heard = Heard()
        exact, crate = ExactCache(redis), ask("open the crate")
        await exact.store(
            msgspec.structs.replace(entry_for(crate, time.time()), chunks=(Recorded(WHOLE, is_whole=True),))
        )
        one = judging(redis, Says(Ruling.SAME), heard)
        running = asyncio.create_task(one.run())
        flight, record = over(chance)
        one.recorded(flight, missing(record, reason))
        await judged(one)
        running.cancel()
        await one.aclose()
        assert heard.compares == [(Ruling.SAME, right)]


async def test_a_judge_that_costs_calibrates_those_that_do_not(redis: Redis) -> None:
    """Now and then it is asked about what they ruled on; both rulings are handed over, the verdict stays theirs."""
    heard = Heard()
    found, exact = ask("open the crate"), ExactCache(redis)
    await exact.store(msgspec.structs.replace(entry_for(found, time.time()), chunks=(Recorded(WHOLE, is_whole=True),)))
    store = VerdictStore(redis)
    one = judging(redis, Says(Ruling.SAME), heard, fallback=DIFFERENT, draw=lambda: 0.0)
    running = asyncio.create_task(one.run())
    flight, record = over(1.0)
    trial = flight.generation.looked.semantic.trial
    assert trial is not None
    look(flight, SemanticResult(trial=msgspec.structs.replace(trial, features=b"1234")))
    one.recorded(flight, record)
    await judged(one)
    running.cancel()
    await one.aclose()
    assert heard.compares == [(Ruling.SAME, Ruling.DIFFERENT)]
    records, _ = await store.read(found.partition, b"0-0")
    (verdict,) = [one.verdict for one in records if isinstance(one, AnswerJudged)]
    assert (verdict.is_right, verdict.judge_chance) == (True, None)


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


class Learns(Says):
    """A judge of prose that rules once it `can`."""

    def __init__(self) -> None:
        super().__init__(Ruling.SAME)
        self.can = False

    async def compare(
        self, partition: Partition, compat: bytes, fresh: AnswerText, others: Sequence[AnswerText]
    ) -> list[Judgement]:
        self.judge_chance.append((fresh, others))
        said = Judgement(Ruling.SAME, PROSE, "so") if self.can else Judgement(Ruling.UNKNOWN, PROSE, EARLY)
        return [said] * len(others)


class Held(VerdictStore):
    """Takes the first verdict when it may, and others at once."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.may = asyncio.Event()
        self._count = 0

    async def take(self, *verdict: Any) -> bool:
        self._count += 1
        if self._count == 1:
            await self.may.wait()
        return await super().take(*verdict)


def missed(entry: Entry, first: Fingerprint) -> tuple[Flight, Record]:
    """A request that is over, whose answer was stored as `entry` and is to be compared with `first`."""
    flight, record = over(1.0)
    assert entry.text is not None
    trial = Trial((first.exact,), entry.text.encode()[:8], 0.9, 1.0, b"rule")
    look(flight, SemanticResult(trial=trial))
    flight.generation.stored = Stored(entry=entry, outcome="stored")
    return flight, record


async def read_verdicts(store: VerdictStore, partition: Partition) -> list[Verdict]:
    records, _ = await store.read(partition, b"0-0")
    return [one.verdict for one in records if isinstance(one, AnswerJudged)]


async def test_what_came_too_early_is_compared_again(redis: Redis) -> None:
    """Once the judge of prose rules in a namespace, each comparison before gets a verdict in the place of its first, once,
    but for an answer that is gone or made anew."""
    heard, exact, store, judges, count = Heard(), ExactCache(redis), VerdictStore(redis), Learns(), 6
    whole = (Recorded(WHOLE, is_whole=True),)
    now = time.time()
    crate, box = ask("open the crate"), ask("open the box")
    await exact.store(msgspec.structs.replace(entry_for(crate, now), chunks=whole))
    one = judging(redis, judges, heard)
    running = asyncio.create_task(one.run())

    async def recorded(text: str, at: float, *, is_kept: bool = True) -> None:
        entry = msgspec.structs.replace(entry_for(ask(text), at), chunks=whole)
        if is_kept:
            await exact.store(entry)
        one.recorded(*missed(entry, crate))
        await judged(one)

    async def verdicts() -> list[Verdict]:
        return await read_verdicts(store, box.partition)

    for number in range(count):
        await recorded(f"{number:8} open the box", now)
    await recorded("gone     open the box", now, is_kept=False)
    await recorded("anew     open the box", now)
    await exact.store(msgspec.structs.replace(entry_for(ask("anew     open the box"), now + 1), chunks=whole))
    assert [(made.is_right, made.is_late) for made in await verdicts()] == [(None, False)] * (count + 2)
    judges.can = True
    await recorded("the last open the box", now)
    first, *late = (await verdicts())[count + 2 :]
    assert (first.is_right, first.is_late) == (True, False)
    assert [(made.is_right, made.is_late) for made in late] == [(True, True)] * count
    features = [made.trial.features for made in await verdicts()]
    assert sorted(made.trial.features for made in late) == features[:count]
    await recorded("one more open the box", now)
    assert len(await verdicts()) == 2 * count + 4
    running.cancel()
    await one.aclose()


@pytest.mark.parametrize("is_sparing", [True, False])
async def test_a_sparing_judge_leaves_what_is_early_to_the_judge_of_prose(redis: Redis, is_sparing: bool) -> None:
    """It is asked once as many comparisons as may wait do so; a judge that the operator named settles each at once."""
    heard, judges, crate = Heard(), Learns(), ask("open the crate")
    whole, now = (Recorded(WHOLE, is_whole=True),), time.time()
    one = judging(redis, judges, heard, fallback=Costly(Says(Ruling.DIFFERENT), is_sparing=is_sparing))
    running = asyncio.create_task(one.run())
    entries = [entry_for(ask(f"{number:8} open the box"), now) for number in range(EARLY_MAX + 1)]
    first, *others = [msgspec.structs.replace(entry, chunks=whole) for entry in (entry_for(crate, now), *entries)]
    await ExactCache(redis).store(first)
    for entry in others:
        one.recorded(*missed(entry, crate))
        await judged(one)
    rulings = Counter(verdict.is_right for verdict in await read_verdicts(VerdictStore(redis), crate.partition))
    assert rulings == ({None: EARLY_MAX, False: 1} if is_sparing else {False: EARLY_MAX + 1})
    running.cancel()
    await one.aclose()


async def test_a_late_verdict_follows_the_one_whose_place_it_takes(redis: Redis) -> None:
    """The judge of prose begins to rule while the first verdict of an early comparison is on its way."""
    heard, exact, store, judges = Heard(), ExactCache(redis), Held(redis), Learns()
    whole, now = (Recorded(WHOLE, is_whole=True),), time.time()
    crate = ask("open the crate")
    entries = [msgspec.structs.replace(entry_for(ask(f"open the {box}"), now), chunks=whole) for box in ("box", "bin")]
    for entry in (msgspec.structs.replace(entry_for(crate, now), chunks=whole), *entries):
        await exact.store(entry)
    one = judging(redis, judges, heard, store=store)
    running = asyncio.create_task(one.run())
    one.recorded(*missed(entries[0], crate))
    async with asyncio.timeout(20):
        while not judges.judge_chance:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    judges.can = True
    one.recorded(*missed(entries[1], crate))
    async with asyncio.timeout(20):
        while one.waiting > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    store.may.set()
    await judged(one)
    one.recorded(*missed(entries[1], crate))
    await judged(one)
    made = [verdict for verdict in await read_verdicts(store, crate.partition) if verdict.exact == entries[0].exact]
    assert [(verdict.is_right, verdict.is_late) for verdict in made] == [(None, False), (True, True)]
    running.cancel()
    await one.aclose()


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
    async with asyncio.timeout(5.0):
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
    ((fresh, others),) = says.judge_chance
    assert (fresh.exact, fresh.created_at, fresh.text) == (ask("open the box").exact, 5.0, "42")
    assert [(one.exact, one.text) for one in others] == [(ask("open the crate").exact, "42")]


@pytest.mark.parametrize(("fresh", "cached", "others"), [(16 << 20, 10, None), (70_000, 10, None), (10, 2 << 20, 0)])
async def test_answers_over_the_limit_reach_no_judge(redis: Redis, fresh: int, cached: int, others: int | None) -> None:
    """Fresh or cached: nothing that long is folded, sent or compared."""
    says = Says(Ruling.SAME)
    long, other = (WHOLE.replace(b"42", b"x" * size) for size in (fresh, cached))
    heard = await judged_with(redis, says, long, other)
    assert [len(one) for _, one in says.judge_chance] == ([] if others is None else [others])
    assert not any(ruling is Ruling.SAME for _, ruling, _ in heard.verdicts)
