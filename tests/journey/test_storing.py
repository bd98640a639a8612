"""Which answers become entries, and why the others do not."""

from __future__ import annotations

import msgspec
import pytest

from gateway.wire.types import Chunk
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Step, Tokens, Whole, World, broken


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (("cut", Finish("length"), Tokens()), "truncated"),
        (("not that", Finish("content_filter"), Tokens()), "filtered"),
        (("and then", broken()), "incomplete"),
        ((Finish(), Tokens()), "empty"),
        (("odd", Finish("paused"), Tokens()), "unfinished"),
        (("no end", Tokens()), "unfinished"),
        ((Whole("cut", "length"),), "truncated"),
        ((Whole(""),), "empty"),
    ],
    ids=["length", "filter", "broken", "no text", "unknown end", "no end", "whole, length", "whole, no text"],
)
async def test_what_is_not_complete_is_not_stored(
    world: World, steps: tuple[Step, ...], reason: str, is_stream: bool
) -> None:
    """The record says why an answer was not stored, and the same request is generated again."""
    world.backends["plain"].plays_once(*steps)
    reply = await world.ask(stream=is_stream)
    assert (await world.record(reply)).cache.store == reason
    assert (await world.ask()).cache == "miss"


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "function_call"])
async def test_what_is_complete_is_stored(world: World, reason: str) -> None:
    """Every way in which an answer may end well makes an entry."""
    world.backends["plain"].plays("whole", Finish(reason), Tokens())
    assert (await world.record(await world.ask())).cache.store == "stored"
    assert (await world.ask()).cache == "exact"


async def test_the_callers_wish_comes_first(world: World) -> None:
    """Of several reasons the first counts: no-store before anything that is wrong with the answer."""
    world.backends["plain"].plays("cut", Finish("length"), Tokens())
    assert (await world.record(await world.ask(cache={"no-store": True}))).cache.store == "no_store"


async def test_an_answer_that_is_too_large_is_not_stored(open_a_world: OpenWorld) -> None:
    """An entry is bounded: a longer answer is served and not kept."""
    world = await open_a_world(cache={"entry_bytes_max": 2_000})
    world.backends["plain"].plays_once("x" * 5_000, Finish(), Tokens())
    reply = await world.ask()
    assert (reply.content, (await world.record(reply)).cache.store) == ("x" * 5_000, "too_large")
    assert (await world.ask()).cache == "miss"
    await world.is_released()


async def test_a_ttl_is_bounded(open_a_world: OpenWorld) -> None:
    """A request may ask for a longer life than the default, up to the longest that is configured."""
    world = await open_a_world(cache={"ttl_s": 10, "ttl_s_max": 100})
    await world.ask("default")
    await world.ask("longest", cache={"ttl": 1_000})
    world.clock.passes(50)
    assert (await world.ask("default")).cache == "miss"
    assert (await world.ask("longest")).cache == "exact"
    world.clock.passes(80)
    assert (await world.ask("longest")).cache == "miss"
    await world.is_released()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_cut_by_its_own_limit_is_the_answer_to_that_request(
    world: World, name: str, is_stream: bool
) -> None:
    """It is served again to the same request with the same limit, and to no other one."""
    world.backends["plain"].plays("cut", Finish("length"), Tokens(completion=7))
    reply = await world.ask(stream=is_stream, **{name: 7})
    assert (await world.record(reply)).cache.store == "stored"
    again = await world.ask(stream=not is_stream, **{name: 7})
    assert (again.cache, again.content) == ("exact", "cut")
    assert (await world.ask(**{name: 8})).cache == "miss"
    assert (await world.ask()).cache == "miss"


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"max_tokens": 8}, ("cut", Finish("length"), Tokens(completion=7))),
        ({"max_tokens": 7}, ("cut", Finish("length"))),
        ({"max_tokens": 7, "max_completion_tokens": 8}, ("cut", Finish("length"), Tokens(completion=7))),
        ({"max_tokens": 7}, (Finish("length"), Tokens(completion=7))),
        ({}, ("cut", Finish("length"), Tokens(completion=7))),
    ],
    ids=["under the limit", "not counted", "two limits", "nothing said", "no limit"],
)
async def test_an_answer_cut_by_anything_else_is_not_stored(
    world: World, fields: dict[str, int], steps: tuple[Step, ...]
) -> None:
    """A provider's own limit, the context's, or one that cannot be told: the answer is a part of another."""
    world.backends["plain"].plays(*steps)
    reply = await world.ask(**fields)
    assert (await world.record(reply)).cache.store in ("truncated", "empty")
    assert (await world.ask(**fields)).cache == "miss"


async def test_a_completion_that_ran_its_length_is_stored(world: World) -> None:
    """A text completion is asked for with a length: one that used it is whole."""
    world.backends["plain"].plays("x", Finish("length"), Tokens())
    reply = await world.ask(path="/v1/completions", prompt="one", max_tokens=1)
    assert (await world.record(reply)).cache.store == "stored"


async def test_a_hit_has_the_padding_that_its_client_wants(world: World) -> None:
    """OpenAI pads chunks against those who measure them; `include_obfuscation: false` leaves the padding out."""
    piece = {"choices": [{"index": 0, "delta": {"content": 'a \\"obfuscation\\":"b"'}}], "obfuscation": "xx", "n": 1}
    world.backends["plain"].plays(Chunk(msgspec.json.encode(piece), has_content=True), Finish(), Tokens())
    padded, bare = (
        await world.ask(stream=True),
        await world.ask(stream=True, stream_options={"include_obfuscation": False}),
    )
    assert (bare.cache, padded.body.count(b'"obfuscation":"xx"')) == ("exact", 1)
    assert bare.body == padded.body.replace(b',"obfuscation":"xx"', b"")
