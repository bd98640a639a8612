"""A day in the life of a gateway: four teams, a few thousand requests, near misses, failures, a spent budget and a hostile prompt."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

from cache import Trial
from cache.verdicts import AnswerRef, Scope, Source, Suspension, Verdict
from gateway.accounts import HitsRow
from gateway.batches.lines import LineSpan
from gateway.deployments.progress import Attempt
from gateway.journey.outcomes import Rejection
from gateway.journey.record import Record, of_flat
from gateway.telemetry import measured_error
from gateway.telemetry.parts import GatewayPart, PartHealth
from policies import WindowKind
from tests.admin.world import LOCAL, NOW_S, REMOTE, World

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
_SURFACES = (
    "chat",
    "chat",
    "chat",
    "messages",
    "messages",
    "responses",
    "embeddings",
    "rerank",
    "image_edits",
    "passthrough",
)
_MISSES = (("numbers", 0.941), ("far", 0.712), ("marks", 0.905), ("unsure", 0.887), ("words", 0.861))


async def seed(world: World) -> dict[str, int]:
    """Fills the world; answers the teams' ids by name."""
    ids = await _seed_teams(world)
    await seed_batch(world, ids["search"])
    chance = random.Random(7)
    for number in range(2_600):
        world.stats.add(_record(chance, number, ids))
        if number % 90 == 0:
            await world.stats.flush()
    for number in range(60):
        for team, every in (("search", 30), ("support", 4)):
            is_right = None if number == 59 else number % every != 0
            events = measured_error.checked(0.3, is_right, "agreement", is_verified=number % 3 == 0)
            world.stats.add_checks(ids[team], "small", (*events, "verified_hits"))
    for is_wrong in (True, False):
        world.stats.add_checks(ids["search"], "small", measured_error.reported(is_wrong=is_wrong))
    for team, cost in (("search", 40), ("search", 55), ("support", 0)):
        world.stats.add_question(ids[team], "small", cost)
    await world.stats.flush()
    teams = await world.accounts.list_teams()
    certificates = await world.admin.certificates.update(teams, "all-MiniLM-L6-v2", "f3a9")
    world.admin.truth.update(await world.stats.hours(), teams, certificates)
    for team, prompts in {
        "search": ("What is the capital of France?", "How do I reset my password?", HOSTILE),
        "support": ("How do I reset my password?", "Where is my invoice?"),
    }.items():
        for prompt in prompts:
            await world.cache_answer(ids[team], prompt)
    for prompt, source, scope in (
        ("What is the capital of France?", Source.FEEDBACK, Scope.GROUP),
        (HOSTILE, Source.AUDIT, Scope.ANSWER),
    ):
        await _suspend(world, ids["search"], prompt, source, scope)
    for number in range(130):
        cost = 1_900 + 37 * number
        rest = {"cheaper_route": 3_000, "dearer_route": -900, "local_engine": 4_000, "": 0}
        mechanism = list(rest)[number % 4]
        await world.spend(
            ids["search" if number % 3 else "support"],
            cost,
            number,
            baseline_microusd=None if number % 9 == 0 else cost + rest[mechanism] + 300,
            prefix_read_microusd=400,
            prefix_write_microusd=100,
            mechanism=mechanism,
        )
    for place, (source, requests) in enumerate({"exact": 700, "semantic": 240, "coalesced": 60}.items()):
        hits = HitsRow(
            id=source,
            at_ms=int((NOW_S - 86_400 * place) * 1000),
            team_id=ids["search"],
            key_id=1,
            alias="small",
            source=source,
            requests=requests,
            unknown=place,
            baseline_microusd=requests * 2_100,
        )
        await world.ledger.append_hits([hits])
    await world.spend(ids["batch jobs"], 5_000_000, 900)
    world.parts[:] = [
        GatewayPart("redis", PartHealth.OK),
        GatewayPart("database", PartHealth.OK),
        GatewayPart("cache worker", PartHealth.OK, "1,204 prompts, all-MiniLM-L6-v2"),
        GatewayPart("small@local", PartHealth.OK),
    ]
    world.deployments[:] = [
        LOCAL,
        REMOTE,
        REMOTE.model_copy(update={"name": "big@api", "alias": "big", "model": "gpt-big"}),
    ]
    return ids


async def _suspend(world: World, team_id: int, prompt: str, source: Source, scope: Scope) -> None:
    """A cached answer that was found wrong."""
    entry = await world.cache_answer(team_id, prompt)
    at = NOW_S - 3_000
    found = Verdict(source=source, compat=entry.compat, is_right=False, trial=Trial((), b"", 0.9, 1.0, b""), at=at)
    out = Suspension(
        exact=entry.exact,
        source=source,
        at=at,
        judge="agreement",
        why="numbers differ",
        request_id="req_00042",
        alias="small",
    )
    answer = AnswerRef(entry.exact, entry.created_at)
    await world.admin.verdicts.take(entry.partition, prompt, found, answer, None, scope, out)


async def _seed_teams(world: World) -> dict[str, int]:
    ids = {}
    for name in ("search", "support", "batch jobs", "research & <b>development</b>"):
        ids[name] = (await world.accounts.create_team(name)).id
    await world.accounts.create_key(ids["search"], "production")
    await world.accounts.create_key(ids["search"], "staging", models=("small",), expires_at_s=NOW_S + 20 * 86_400)
    old = await world.accounts.create_key(ids["search"], "old laptop")
    await world.accounts.revoke_key(old.key.id)
    await world.accounts.create_key(ids["support"], "helpdesk")
    await world.accounts.create_budget(ids["search"], WindowKind.MONTH, 1_000_000)
    await world.accounts.create_budget(ids["search"], WindowKind.DAY, 400_000, is_hard=False)
    await world.accounts.create_budget(ids["support"], WindowKind.MONTH, 10_000_000)
    await world.accounts.create_budget(ids["batch jobs"], WindowKind.MONTH, 5_000_000)
    return ids


def _record(chance: random.Random, number: int, ids: dict[str, int]) -> Record:
    back_s = 86_000 * (1 - number / 2_600)
    back_s -= 9_000 * math.sin(back_s / 86_400 * 2 * math.pi)  # nights are quieter than days
    names = list(ids)
    team = chance.choices(names, (6, 3, 1, 1))[0]
    kinds = ("exact", "semantic", "coalesced", "miss", "bypass")
    kind = chance.choices(kinds, (38, 14, 3, 40, 5))[0]
    record = SimpleNamespace(
        request_id=f"req_{number:05}",
        route=_SURFACES[number % len(_SURFACES)],
        batch="batch_1" if number % 11 == 0 else "",
        at_s=NOW_S - back_s,
        team_id=ids[team],
        team=team,
        key_id=1,
        key="production",
        alias=chance.choice(("small", "small", "big")),
        is_stream=chance.random() < 0.6,
        cache=kind,
        prompt_tokens=chance.randrange(20, 900),
        completion_tokens=chance.randrange(5, 400),
    )
    if kind in ("miss", "bypass"):
        _generate(chance, record)
    else:
        record.ttft_ms = chance.uniform(0.6, 4.0) if kind == "exact" else chance.uniform(9.0, 40.0)
        record.duration_ms = record.ttft_ms + chance.uniform(0.1, 3.0)
        record.saved_microusd = record.baseline_microusd = record.avoided_microusd = chance.randrange(300, 9_000)
        record.saved_ms = chance.uniform(400, 6_000)
        record.similarity = chance.uniform(0.95, 1.0) if kind == "semantic" else None
        if kind == "semantic" and chance.random() < 0.7:
            record.verifier, record.verdict, record.verify_ms = "small@api", "yes", chance.uniform(200, 700)
    return of_flat(vars(record))


def _generate(chance: random.Random, record: SimpleNamespace) -> None:
    record.deployment = f"{record.alias}@api" if chance.random() < 0.5 or record.alias == "big" else "small@local"
    record.policy = "balanced"
    record.why = "balanced: 410 ms to the first token and $0.0009 expected, best of 2"
    record.store = "stored" if chance.random() < 0.9 else "too_large"
    record.ttft_ms = chance.lognormvariate(5.9, 0.5)
    record.duration_ms = record.ttft_ms + record.completion_tokens * chance.uniform(6, 14)
    record.cost_microusd = 0 if "local" in record.deployment else chance.randrange(300, 9_000)
    record.attempts = (Attempt(record.deployment, "ok", record.duration_ms),)
    if record.cache == "miss" and chance.random() < 0.35:
        record.miss_reason, record.similarity = chance.choice(_MISSES)
        record.nearest = HOSTILE if chance.random() < 0.1 else "How do I reset the password of my account?"
        record.verifier, record.verify_ms = "small@api", chance.uniform(200, 700)
        record.verdict = chance.choice(("no", "no", "unsure", "late"))
    elif record.cache == "miss":
        record.miss_reason = "far"
    fate = chance.random()
    if fate < 0.03:
        record.attempts = (
            Attempt("small@api", "timed out: no first token within 5.0 s", 5_003.0),
            *record.attempts,
        )
        record.rejected = (Rejection("small@big", "can't do tools"), Rejection("small@old", "rate limited for 12 s"))
    elif fate < 0.05:
        record.status, record.error, record.attempts, record.cost_microusd = 429, "insufficient_quota", (), 0
        record.deployment = record.store = record.why = ""
        record.duration_ms, record.ttft_ms = 1.4, None
    elif fate < 0.06:
        record.status, record.error = 502, "upstream_error"
        record.attempts = (Attempt(record.deployment, "connection reset", 212.0),)


async def seed_batch(world: World, team_id: int) -> str:
    """A batch that has begun; its id."""
    batches = world.admin.batches
    upload = await batches.files.begin(team_id)
    await upload.write(b"{}\n")
    file = await upload.keep("batch", HOSTILE)
    await batches.create(team_id, 1, "/v1/chat/completions", file.id, {"for": HOSTILE}, None)
    others = {team.id for team in await world.admin.accounts.list_teams()} - {team_id}
    work = await batches.claim("tests", others)
    assert work is not None
    chunk = LineSpan(number=0, offset=0, size=3, first_line=1, lines=1, repeated=[])
    await batches.plan(work, [chunk])
    return work.batch.id
