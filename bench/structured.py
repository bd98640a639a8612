"""`./run bench structured`: answers that have a schema, beside free ones, by the embedded model.

    ./run bench structured [--part speed] [--part validity] [--generations 2000] [--schemas 300] [--batch 8] [--seed 1]

validity: draws schemas and asks a started gateway for one answer after the other at temperature 1, streamed and whole, as a
`response_format` or as the arguments of a forced tool call; one request in five is free text. The jsonschema library checks
every answer that ends by itself. speed: steps of one batch: free, with masks, and with a schema that forces half of the
tokens. Exits with 1 where an answer is invalid or a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from local_engine.config import EngineConfig
from local_engine.engine import Engine
from local_engine.messages import Grammar, SamplingParams
from local_engine.process import prepare_environment
from tests.e2e.gateway import API_KEY, run_gateway

_NAMES = ("name", "id", "tags", "note", "größe", "items", "is_open", "x y", "price", "when")
_WORDS = ("red", "green", "", "née", 'a"b', "10", "日本", "line\nbreak", "back\\slash", "😀")
_PATTERNS = (
    r"^[A-Z]{2}-\d{3}$",
    r"^[a-z]+(-[a-z]+)*$",
    r"^\d{4}-\d{2}$",
    r"^(foo|bar)?$",
    r"x[0-9a-f]{4}",
    r"^.{2,5}$",
)


def draw_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema: types, enums, nesting, arrays with bounds, `$ref`, patterns, `anyOf`, `additionalProperties`."""
    schema = _drawn(draw, depth)
    if draw.random() < 0.3:
        node = {
            "type": "object",
            "properties": {"value": _scalar(draw), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        }
        node |= {"required": ["value", "next"], "additionalProperties": False}
        leaf = _drawn(draw, 1)
        schema = _object(draw, {"root": schema, "list": {"$ref": "#/$defs/node"}, "leaf": {"$ref": "#/$defs/leaf"}})
        schema["$defs"] = {"node": node, "leaf": leaf}
    return schema


def _drawn(draw: random.Random, depth: int) -> dict[str, Any]:
    kind = draw.choice(("object", "object", "array", "anyOf", "scalar")) if depth else "scalar"
    if kind == "object":
        names = draw.sample(_NAMES, draw.randint(0, 4))
        return _object(draw, {name: _drawn(draw, depth - 1) for name in names})
    if kind == "array":
        low = draw.randint(0, 2)
        schema = {
            "type": "array",
            "items": _drawn(draw, depth - 1),
            "minItems": low,
            "maxItems": low + draw.randint(0, 3),
        }
        if draw.random() < 0.2:
            schema["prefixItems"] = [_scalar(draw)]
        return schema
    if kind == "anyOf":
        return {"anyOf": [_drawn(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
    return _scalar(draw)


def _object(draw: random.Random, properties: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if draw.random() < 0.7]
    more = draw.choice((False, False, True, "schema", None))
    if more is not None:
        schema["additionalProperties"] = _scalar(draw) if more == "schema" else more
    return schema


def _scalar(draw: random.Random) -> dict[str, Any]:
    match draw.randrange(9):
        case 0:
            return {"enum": draw.sample([*_WORDS, 1, None, True, 2.5], 3)}
        case 1:
            return {"const": draw.choice(_WORDS)}
        case 2:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case 3:
            low = draw.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 9)}
        case 4:
            low = draw.randint(-200, 200)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 2_000)}
        case 5:
            return {"type": "number", "exclusiveMinimum": draw.randint(-9, 9)}
        case 6:
            return {"type": draw.choice(("boolean", "null", "integer"))}
        case 7:
            return {"type": "string", "format": draw.choice(("date", "uuid", "ipv4", "email", "date-time"))}
        case _:
            return {"type": ["string", "null"], "maxLength": 20}


def faults(schema: dict[str, Any], text: str) -> str | None:
    """Why the text is no valid value of the schema; None where it is one."""
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return None


@dataclass(slots=True)
class Seen:
    """Answers by their kind and end, and the wrong ones in words."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def validity(options: argparse.Namespace) -> Seen:
    """Ask a gateway of its own for all generations, `options.batch` at a time."""
    model = {"model": options.model} if options.model else {}
    engines = {"engines": {"default": model}, "models": {_ALIAS: {"deployments": [_LOCAL]}}}
    with (
        tempfile.TemporaryDirectory() as folder,
        run_gateway(Path(folder), {**engines, "cache": {"is_semantic": False}}) as gateway,
    ):
        gateway.wait_ready(300)
        seen, asked = Seen(), _asked(options)
        asyncio.run(_ask_all(f"{gateway.base_url}/chat/completions", asked, seen, options))
    return seen


_ALIAS = "structured"
_LOCAL = {"name": "local", "backend": "local", "engine": "default"}


def _asked(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any] | None, dict[str, Any]]]:
    """What each answer is, its schema, and the request for it."""
    draw = random.Random(options.seed)
    schemas = [draw_schema(draw) for _ in range(options.schemas)]
    for number in range(options.generations):
        prompt = f"Give me an example as JSON of {draw.choice(_NAMES)} and {draw.choice(_WORDS)}."
        body: dict[str, Any] = {
            "model": _ALIAS,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 1.0,
            "max_tokens": draw.choice((8, 60, 150, 150)),
            "seed": number,
            "stream": bool(number % 2),
            "cache": {"no-cache": True, "no-store": True},
        }
        yield "free", None, body
        for schema in draw.choices(schemas, k=4):
            if schema.get("type") == "object" and draw.random() < 0.4:
                function = {"name": "use", "parameters": schema}
                form: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
                yield "call", schema, {**body, **form, "tool_choice": "required", "parallel_tool_calls": False}
            else:
                form = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema}}
                yield "schema", schema, {**body, "response_format": form}


async def _ask_all(url: str, asked: Iterator[Any], seen: Seen, options: argparse.Namespace) -> None:
    left, began = options.generations, time.monotonic()

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal left
        for kind, schema, body in asked:
            if kind != "free":
                if not left:
                    return
                left -= 1
            await _ask(client, url, kind, schema, body, seen)
            if not left % 100 and kind != "free":
                took_s = time.monotonic() - began
                print(
                    f"{took_s:6.0f} s, {left} left, {len(seen.wrong)} invalid, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )

    async with httpx.AsyncClient(headers={"authorization": f"Bearer {API_KEY}"}, timeout=600) as client:
        await asyncio.gather(*(work(client) for _ in range(options.batch)))


async def _ask(
    client: httpx.AsyncClient, url: str, kind: str, schema: dict[str, Any] | None, body: dict[str, Any], seen: Seen
) -> None:
    reply = await client.post(url, json=body)
    if reply.status_code != 200:
        error = reply.json()["error"]
        seen.counts[f"{kind}: {error['code']}"] += 1
        if error["code"] != "unsupported_grammar":
            seen.wrong.append(f"{reply.status_code} {error['message']} of {json.dumps(schema)[:500]}")
        return
    text, reason = _folded(reply.text) if body["stream"] else _read(reply.json()["choices"][0], "message")
    seen.counts[f"{kind}{', streamed' if body['stream'] else ''}: {reason}"] += 1
    if schema is not None and reason != "length" and (fault := faults(schema, text)):
        seen.wrong.append(f"{fault}: {text[:200]} of {json.dumps(schema)[:500]}")


def _folded(events: str) -> tuple[str, str | None]:
    """The text of a stream's answer or of its call, and why it ended."""
    text, reason = "", None
    for event in events.split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                piece, found = _read(choice, "delta")
                text, reason = text + piece, found or reason
    return text, reason


def _read(choice: dict[str, Any], where: str) -> tuple[str, str | None]:
    said = choice[where]
    calls = "".join(call["function"].get("arguments") or "" for call in said.get("tool_calls") or ())
    return (said.get("content") or "") + calls, choice["finish_reason"]


def in_turns(engines: Sequence[Engine], schemas: Sequence[dict[str, Any] | None], options: argparse.Namespace) -> Any:
    """The seconds of each step of two batches of equal requests, step by step in turns, so that a busy machine slows both;
    and how many tokens each batch made."""
    for engine, schema in zip(engines, schemas, strict=True):
        grammar = engine.grammars.compiled(Grammar("json", json.dumps(schema)), b"") if schema is not None else None
        asked = [{"role": "user", "content": "Describe a person and what they own."}]
        for seed in range(options.batch):
            params = SamplingParams(temperature=1.0, max_tokens=options.tokens, seed=seed, ignore_eos=True)
            engine.submit(engine.tokenizer.encode_chat(asked, None), params, grammar=grammar)
    took: list[list[float]] = [[], []]
    made = [0, 0]
    while any(engine.has_work for engine in engines):
        for index, engine in enumerate(engines):
            if engine.has_work:
                began = time.perf_counter()
                made[index] += sum(one.usage.completion_tokens for one in engine.step() if one.usage is not None)
                took[index].append(time.perf_counter() - began)
    return took, made


_FORCING = {
    "type": "object",
    "properties": {
        name: {"type": "string", "minLength": 3, "maxLength": 12}
        for name in ("given_name", "family_name", "home_country", "favourite_colour", "mother_tongue", "profession")
    },
    "additionalProperties": False,
}
_FORCING["required"] = list(_FORCING["properties"])  # type: ignore[call-overload]
_OPEN = {"type": "array", "items": {"type": "string"}, "minItems": 50}


def speeds(options: argparse.Namespace) -> None:
    """Print the pace of a batch that a schema forces half of, and the step of one with masks, each beside free text."""
    prepare_environment()
    for name, schema, drafts in (("half forced", _FORCING, None), ("masked", _OPEN, 0)):
        more = {} if drafts is None else {"draft_tokens_max": drafts}
        config = EngineConfig(model=options.model, context_tokens_max=1_024, **more)
        engines = Engine(config), Engine(config)
        ratios, rates, steps = [], [], []
        for _ in range(options.repeats):
            took, made = in_turns(engines, (schema, None), options)
            ratios += [held / free for held, free in zip(*took, strict=False)]
            middle = [statistics.median(own) for own in took]
            steps.append(middle)
            rates.append([count / (len(own) * step) for count, own, step in zip(made, took, middle, strict=True)])
        held_ms, free_ms = (1000 * statistics.median(column) for column in zip(*steps, strict=True))
        print(
            f"{name}: a step {held_ms:.1f} ms, of free text {free_ms:.1f} ms; ratio of pairs {statistics.median(ratios):.3f}"
        )
        held_rate, free_rate = (statistics.median(column) for column in zip(*rates, strict=True))
        each = statistics.median(held / free for held, free in rates)
        print(f"{name}: {held_rate:.0f} tokens/s, free text {free_rate:.0f}; ratio {each:.3f}", flush=True)
        totals = engines[0].load()
        print(
            f"{name}: of {totals.answer_tokens_total} tokens {totals.accepted_tokens_total.get('grammar', 0)} forced",
            flush=True,
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench structured", description=__doc__)
    parser.add_argument("--part", action="append", choices=("speed", "validity"), help="default: both")
    parser.add_argument("--model", default=None, help="a GGUF file, a checkpoint folder or a hub name")
    parser.add_argument("--generations", type=int, default=2_000, help="those with a schema")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=60, help="of each answer whose step is timed")
    options = parser.parse_args(argv)
    parts = options.part or ["speed", "validity"]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    if "speed" in parts:
        speeds(options)
    if "validity" not in parts:
        return 0
    seen = validity(options)
    print(", ".join(f"{name} {count}" for name, count in sorted(seen.counts.items())))
    print(f"invalid among those that ended by themselves, and failed requests: {len(seen.wrong)}")
    for one in seen.wrong[:20]:
        print("  " + one)
    return int(bool(seen.wrong))
