"""Agents that repeat themselves: seen in what they send, marked in every place, and refused where that is set."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.journey.loops import repeated_calls
from gateway.settings import LoopSettings
from gateway.telemetry.metrics import Metrics
from tests.world import World


def round_of(number: int, *results: Any, arguments: str = '{"cmd":"ls"}', **more: Any) -> list[dict[str, Any]]:
    """A turn that calls `bash` once for each result, and the results; ids differ from round to round."""
    ids = [f"call_{number}_{place}" for place in range(len(results))]
    called = {"name": "bash", "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": called} for id in ids]
    said = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in zip(ids, results, strict=True)]
    return [{"role": "assistant", "content": None, "tool_calls": calls, **more}, *said]


def dialogue(*rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "go"}, *(turn for each in rounds for turn in each)]


SAME = [round_of(number, "no such file") for number in range(5)]


@pytest.mark.parametrize(
    ("messages", "times", "names"),
    [
        (dialogue(*SAME), 5, "`bash`"),
        (dialogue(*SAME), 6, ""),
        (
            dialogue(*(round_of(n, "a", "b", content=f"try {n}", reasoning_content=str(n)) for n in range(5))),
            5,
            "`bash`",
        ),
        (dialogue(*(round_of(n, f"Chunk ID: 4{n}\nWall time: 0.{n} seconds\nhi") for n in range(5))), 5, "`bash`"),
        (dialogue(*SAME[:4], round_of(4, "another result")), 5, ""),
        (dialogue(*SAME[:4], round_of(4, "no such file", arguments="{}")), 5, ""),
        (dialogue(round_of(0, "first"), *SAME[1:]), 5, ""),
        (dialogue(*SAME, [{"role": "user", "content": "stop that"}]), 5, ""),
        (dialogue(*SAME[:2], [{"role": "user", "content": "go on"}], *SAME[2:]), 5, "`bash`"),
        (SAME[0][1:], 1, ""),
        ([None, "x", {"role": "tool"}, *SAME[0]], 2, ""),
        ([{"role": "assistant", "tool_calls": [7]}, {"role": "tool", "content": {}}], 1, ""),
        ([], 2, ""),
    ],
)
def test_equal_rounds_at_the_end_are_a_loop(messages: list[Any], times: int, names: str) -> None:
    """Ids, words and thoughts may differ; another call or result ends the row, and so does a user's last turn; no shape fails."""
    assert repeated_calls(messages, times) == names


def counted(world: World) -> list[str]:
    metrics = Metrics(None)
    for record in world.records:
        metrics.observe(record)
    return [line for line in metrics.render().decode().splitlines() if line.startswith("sameway_loops_total{")]


async def test_a_loop_of_tools_is_marked_on_each_surface_and_refused_where_set(world: World) -> None:
    """In the record and the metric, of chats, messages and responses; with `refuse` in each surface's error shape."""
    tool = {"name": "bash", "description": "", "parameters": {"type": "object", "properties": {}}}
    used = [{"type": "tool_use", "id": "c{}", "name": "bash", "input": {"cmd": "ls"}}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number in range(5):
        id = f"c{number}"
        result = {"type": "tool_result", "tool_use_id": id, "content": "no such file"}
        turns += [{"role": "assistant", "content": [{**used[0], "id": id}]}, {"role": "user", "content": [result]}]
        call = {"type": "function_call", "call_id": id, "name": "bash", "arguments": '{"cmd":"ls"}'}
        items += [call, {"type": "function_call_output", "call_id": id, "output": "no such file"}]
    chat = {"messages": dialogue(*SAME), "tools": [{"type": "function", "function": tool}]}
    claude = {"name": "bash", "input_schema": {"type": "object", "properties": {}}}
    surfaces: list[dict[str, Any]] = [
        {"path": "/v1/chat/completions", **chat},
        {"path": "/v1/messages", "messages": turns, "tools": [claude], "max_tokens": 100},
        {"path": "/v1/responses", "input": items, "tools": [{"type": "function", **tool}]},
    ]
    for surface in surfaces:
        assert (await world.record(await world.ask(None, **surface))).request.loop == "repeated_tool_calls"
    assert counted(world) == ['sameway_loops_total{loop="repeated_tool_calls",model="mock",outcome="marked"} 3.0']
    world.sets(loops=LoopSettings(action="refuse"))
    for surface in surfaces:
        refused = await world.ask(None, **surface)
        assert refused.status == 400
        assert (
            "called `bash` with the same arguments and got the same results 5 times in a row"
            in refused.error["message"]
        )
        record = await world.record(refused)
        assert (record.request.loop, record.ended.error) == ("repeated_tool_calls", "repeated_tool_calls")
    world.sets(loops=LoopSettings(tool_calls_max=0))
    assert (await world.record(await world.ask(None, **surfaces[0]))).request.loop == ""


async def test_equal_requests_of_one_session_are_a_loop(world: World) -> None:
    """The eleventh in a minute is marked, a hit or not; those of another session, others and those without one are not."""
    run = {"headers": {"x-sameway-session": "run"}}
    for _ in range(10):
        assert (await world.record(await world.ask("again", **run))).request.loop == ""
    assert (await world.record(await world.ask("again", **run))).request.loop == "repeated_requests"
    assert (await world.record(await world.ask("other", **run))).request.loop == ""
    assert (await world.record(await world.ask("again", prompt_cache_key="another"))).request.loop == ""
    for _ in range(12):
        assert (await world.record(await world.ask("again"))).request.loop == ""
    world.sets(loops=LoopSettings(action="refuse"))
    refused = await world.ask("again", **run)
    assert (refused.status, refused.error["code"]) == (400, "repeated_requests")
    assert "more than 10 times within a minute" in refused.error["message"]
