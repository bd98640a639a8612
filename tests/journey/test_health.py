"""What one team's requests cause at a deployment takes nothing from another team, and what is dead is left all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.backends.base import BackendError
from gateway.backends.refusals import UpstreamRefusal, refusal
from tests.journey.conftest import OpenWorld
from tests.world import Clock, World, denied, deployment, overloaded, timed_out, unavailable, until

_FAILURES: dict[str, Callable[[], BackendError]] = {
    "no such voice": lambda: denied(404, "Voice 'voice_123' not found"),
    "401 of a tool": lambda: denied(401, "The MCP server returned 401"),
    "no credit": lambda: denied(402, "You can only afford 120 max_tokens"),
    "500": unavailable,
    "silence": timed_out,
    "429": overloaded,
    "429 with a pause": lambda: overloaded(retry_after_s=60.0),
}


@pytest.fixture(autouse=True)
def rests_end_when_the_test_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second is no time on a busy machine."""
    monkeypatch.setattr(Clock, "going", Clock.steady)


def fails_on(world: World, name: str, word: str, failure: Callable[[], BackendError]) -> None:
    """A deployment fails each request with `word` in it, and no other."""
    backend: Any = world.backends[name]
    answer = backend.stream

    def stream(request: Any) -> Any:
        if word in json.dumps(request.body):
            backend.plays_once(failure())
        return answer(request)

    backend.stream = stream


@pytest.mark.parametrize("failure", _FAILURES.values(), ids=_FAILURES)
async def test_what_one_team_causes_rests_nothing_for_another(
    world: World, failure: Callable[[], BackendError]
) -> None:
    """In a loop, of a lone deployment, and whatever else the requests of the one are like."""
    fails_on(world, "plain", "boom", failure)
    other = await world.team()
    for number in range(12):
        more = {"tools": [{"type": "function", "function": {"name": "f"}}]} if number % 3 else {}
        await world.ask(f"boom {number}", **more)
        reply = await world.ask(f"question {number}", key=other.key)
        assert reply.status == 200, (number, reply.error)
        world.clock.passes(1.0)


@pytest.mark.parametrize("failure", _FAILURES.values(), ids=_FAILURES)
async def test_a_dead_deployment_is_left_after_three_requests(
    world: World, failure: Callable[[], BackendError]
) -> None:
    """Of one key; the fourth request costs no call."""
    world.backends["plain"].plays(failure())
    for number in range(3):
        await world.ask(f"question {number}")
    calls = len(world.backends["plain"].calls)
    reply = await world.ask("another")
    assert (reply.status, len(world.backends["plain"].calls)) == (
        424 if isinstance(failure(), type(denied(404))) else 503,
        calls,
    )


async def test_a_dead_deployment_is_left_by_all(world: World) -> None:
    """One request each of three keys is enough, and a fourth key's goes to the next deployment without a call."""
    world.backends["first"].plays(unavailable())
    for name in ("b", "c", "d"):
        await world.ask(f"question of {name}", model="pair", key=(await world.team(name)).key)
    calls = len(world.backends["first"].calls)
    reply = await world.ask(model="pair")
    assert (reply.headers["x-sameway-backend"], len(world.backends["first"].calls)) == ("second", calls)


async def test_a_request_counts_once_however_often_it_is_tried(world: World) -> None:
    """Two requests are six tries, and rest nothing yet."""
    fails_on(world, "plain", "boom", unavailable)
    for number in range(2):
        assert (await world.ask(f"boom {number}")).status == 503
    assert len(world.backends["plain"].calls) == 6
    assert (await world.ask("question")).status == 200


async def test_prompts_that_are_too_long_rest_no_others(world: World) -> None:
    """A server that fails them with a 500 answers the same key's others, also right after three of them."""
    await world.ask("hello, " * 20)
    fails_on(world, "plain", "long " * 200, unavailable)
    for number in range(6):
        assert (await world.ask(f"{number} " + "long " * (200 * (number + 1)))).status == 503
    assert len(world.backends["plain"].calls) < 6 * 3
    assert (await world.ask("hi")).status == 200


async def test_a_pause_for_what_is_too_large_is_for_the_large(world: World) -> None:
    """A request above the provider's minute rests no smaller one, of the same key either."""
    await world.ask("hello, " * 20)
    fails_on(world, "plain", "long " * 200, lambda: overloaded(retry_after_s=60.0))
    assert (await world.ask("long " * 400)).status == 429
    assert (await world.ask("hi")).status == 200


async def test_a_path_that_a_server_lacks_is_that_operations(world: World) -> None:
    """However many ask for it, chats go on."""
    absent = lambda: refusal(UpstreamRefusal(404, b"<html>not here</html>"))  # noqa: E731 - one line of a table
    fails_on(world, "plain", "boom", absent)
    for number in range(4):
        key = (await world.team(f"team {number}")).key
        reply = await world.ask(path="/v1/completions", key=key, prompt=f"boom {number}")
        assert reply.status == 424
    assert (await world.ask("question")).status == 200


async def test_a_name_that_fails_rests_no_other_name(open_a_world: OpenWorld) -> None:
    """Of an alias that takes every name, also where many ask for it."""
    world = await open_a_world(models={"*": {"deployments": [deployment("any", "*")]}})
    fails_on(world, "any", "boom", lambda: denied(404, "No model `made-up`", "model_not_found"))
    for number in range(5):
        key = (await world.team(f"team {number}")).key
        assert (await world.ask(f"boom {number}", model="made-up", key=key)).status == 424
    assert (await world.ask("question", model="gpt-4o")).status == 200


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Unknown parameter: 'maximum context length is 16'.", "unknown_parameter"),
        ("Unknown parameter: 'maximum context length is 16'.", "context_length_exceeded"),
        ("This model's maximum context length is 16 tokens.", "context_length_exceeded"),
    ],
)
async def test_a_clients_words_give_no_size(world: World, message: str, code: str, served: bool) -> None:
    """A refusal that repeats them keeps no one's longer prompt out: no size is below what was served, nor far below the prompt."""
    error = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    fails_on(world, "plain", "boom", lambda: refusal(UpstreamRefusal(400, json.dumps(error).encode())))
    other = await world.team()
    longer = "Please summarise this text for me, it is about nothing in particular. " * 10
    if served:
        await world.ask(longer, key=other.key)
    assert (await world.ask("boom" * (1 if served else 100))).status == 400
    assert (await world.ask(f"{longer} again", key=other.key)).status == 200


@pytest.mark.parametrize(("word", "is_well"), [("a word", True), ("", None)])
async def test_an_answer_that_is_left_early_shows_that_its_deployment_answers(
    world: World, word: str, is_well: bool | None
) -> None:
    """As a verifier's is, whose first word decides; one that had not begun shows nothing."""
    world.backends["plain"].plays(*filter(None, (word,)), asyncio.Event())
    client = world.begin(stream=True)
    await (client.sees(word) if word else until(lambda: bool(world.backends["plain"].calls)))
    client.leave()
    await world.is_released()
    assert world.is_available("plain") is is_well


async def test_an_answer_whose_stream_is_slow_to_close_is_complete(world: World) -> None:
    """The client may leave with the last word, while the deployment's connection ends."""
    backend: Any = world.backends["plain"]
    is_closing, answer = asyncio.Event(), backend.stream

    def stream(request: Any) -> Any:
        playing = answer(request)
        close = playing.aclose

        async def aclose() -> None:
            await close()
            is_closing.set()
            await asyncio.sleep(0.05)

        playing.aclose = aclose
        return playing

    backend.stream = stream
    client = world.begin(stream=True)
    await is_closing.wait()
    client.leave()
    await world.is_released()
    (record,) = world.records
    assert [one.outcome for one in record.answer.attempts] == ["ok"]
    assert world.is_available("plain") is True
