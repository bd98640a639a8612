"""What servers send, as data: each answer and each error by each surface, whole, streamed and from the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.backends.anthropic.backend import AnthropicBackend
from gateway.backends.openai.backend import OpenAIBackend
from tests.dialects.player import BACK, SURFACES, cases, expected, inputs_of, next_turn, playing, sent_back, told
from tests.services import RedisServer
from tests.world import World, open_world

ANSWERS, ERRORS = dict(cases("answers")), dict(cases("errors"))


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_the_same_however_it_is_asked_for(
    redis_server: RedisServer, tmp_path: Path, name: str
) -> None:
    """On each surface, streamed and whole, fresh, again, and in a second turn: text, thoughts, calls, end; it is kept, or not."""
    case = ANSWERS[name]
    for is_stream_first in (True, False):
        async with open_world(redis_server, tmp_path / str(is_stream_first)) as world, playing(case) as served:
            await world.connects("plain", served.url, AnthropicBackend if case.get("api") else OpenAIBackend)
            own: dict[str, Any] = {}
            for surface, (path, fields) in SURFACES.items():
                sent = len(served.requests)
                for is_stream in (is_stream_first, not is_stream_first):
                    reply = await world.ask(path=path, stream=is_stream, **fields)
                    assert (reply.status, told(surface, reply)) == (200, expected(surface, case["says"])), surface
                    await check(world, reply, case["says"])
                assert len(served.requests) - sent == (1 if case["says"]["kept"] == "stored" else 2)
                if surface == "chat" and is_stream_first:
                    own = {name: value for name, value in reply.json["choices"][0]["message"].items() if name in BACK}
                if is_stream_first and (body := next_turn(surface, reply)):
                    await world.ask(path=path, **body)
                    sent_body = json.loads(served.requests[-1][1].partition(b"\r\n\r\n")[2])
                    assert sent_back(sent_body) == [case["says"]["text"], inputs_of(case["says"]["calls"]), own], (
                        surface
                    )
            await world.is_released()


async def check(world: World, reply: Any, says: dict[str, Any]) -> None:
    """The record of a reply has the tokens that the server counted, and says whether its answer was kept and a field mended."""
    record = await world.record(reply)
    if record.cache.source == "exact":
        return
    usage = record.usage
    assert record.cache.store == says["kept"]
    assert bool(record.answer.attempts[-1].mended) == says.get("is_mended", False)
    if any(says["usage"]):
        assert [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens] == says["usage"]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_is_read_for_its_cause(
    redis_server: RedisServer, tmp_path: Path, name: str, is_stream: bool
) -> None:
    """Its words reach the client on each surface, it is asked for once, and a request's own fault leaves the deployment in use."""
    case = ERRORS[name]
    async with open_world(redis_server, tmp_path / "world") as world, playing(case) as served:
        await world.connects("plain", served.url)
        for surface, (path, fields) in SURFACES.items():
            asked = len(served.requests)
            reply = await world.ask(path=path, stream=is_stream, **fields)
            assert case["tells"] in reply.text, surface
            assert len(served.requests) == asked + 1
        if case.get("is_fault") or 400 <= case.get("status", 200) < 500:
            for _ in range(3):
                await world.ask(**SURFACES["chat"][1], stream=is_stream)
            assert len(served.requests) == 6, "the deployment rests"
        await world.connects("first", served.url)
        await world.ask(**SURFACES["chat"][1], model="pair", stream=is_stream)
        assert bool(world.backends["second"].calls) == (
            case.get("next", case.get("status", 200) == 200 and not case.get("is_fault"))
        )
        await world.is_released()
