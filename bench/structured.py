"""`./run bench structured`: answers that have a schema, beside free ones, by the embedded model.

    ./run bench structured [--model M] [--generations 2000] [--schemas 300] [--batch 8] [--seed 1]

Draws schemas, asks for one answer after the other at temperature 1, half of them without a schema, and checks every answer
that ends by itself with the jsonschema library. Then it measures steps of one batch: free, with masks, and with a schema
that forces half of the tokens. Exits with 1 where an answer is invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from typing import Any

import jsonschema

from local_engine.config import EngineConfig
from local_engine.engine import Engine
from local_engine.messages import Grammar, InvalidRequest, SamplingParams
from local_engine.process.options import prepare_environment

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


def validity(engine: Engine, options: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    """Generate, one half with schemas and one without, in one batch; returns counts and the invalid answers."""
    draw = random.Random(options.seed)
    schemas = [draw_schema(draw) for _ in range(options.schemas)]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    asked: dict[int, dict[str, Any] | None] = {}
    texts: dict[int, str] = {}
    left = options.generations * 2
    while left or asked:
        while left and len(asked) < options.batch:
            left -= 1
            schema = draw.choice(schemas) if left % 2 else None
            grammar = None
            if schema is not None:
                try:
                    grammar = engine.grammars.compiled(Grammar("json", json.dumps(schema)), b"")
                except InvalidRequest:
                    counts["refused"] += 1
                    continue
            prompt = f"Give me an example as JSON of {draw.choice(_NAMES)} and {draw.choice(_WORDS)}."
            tokens = engine.tokenizer.encode_chat([{"role": "user", "content": prompt}], None)
            params = SamplingParams(temperature=1.0, max_tokens=draw.choice((8, 60, 150)), seed=left)
            asked[engine.submit(tokens, params, grammar=grammar)] = schema
        for step in engine.step():
            texts[step.id] = texts.get(step.id, "") + step.output.text
            if step.output.finish_reason is None:
                continue
            schema, text = asked.pop(step.id), texts.pop(step.id)
            counts[f"{'free' if schema is None else 'schema'}: {step.output.finish_reason}"] += 1
            if schema is not None and step.output.finish_reason == "stop" and (fault := faults(schema, text)):
                wrong.append(f"{fault}: {text[:200]} of {json.dumps(schema)[:500]}")
    return counts, wrong


def speed(engine: Engine, schema: dict[str, Any] | None, batch: int, tokens: int) -> tuple[float, float]:
    """Tokens a second, and the median seconds of a step, of a batch of equal requests."""
    grammar = engine.grammars.compiled(Grammar("json", json.dumps(schema)), b"") if schema is not None else None
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "Describe a person and what they own."}], None)
    for seed in range(batch):
        engine.submit(prompt, SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True), grammar=grammar)
    made, steps, began = 0, [], time.perf_counter()
    while engine.has_work:
        at = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - at)
        made += sum(one.usage.completion_tokens for one in outputs if one.usage is not None)
    return made / (time.perf_counter() - began), statistics.median(steps)


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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench structured", description=__doc__)
    parser.add_argument("--model", default=None, help="a GGUF file, a checkpoint folder or a hub name")
    parser.add_argument("--generations", type=int, default=2_000)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    prepare_environment()
    engine = Engine(EngineConfig(model=options.model, context_tokens_max=1_024))
    plain = Engine(EngineConfig(model=options.model, context_tokens_max=1_024, draft_tokens_max=0))
    rates: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.repeats):  # in turn, so that a busy machine slows all
        for name, one, schema in (
            ("free, drafts", engine, None),
            ("half forced, drafts", engine, _FORCING),
            ("free", plain, None),
            ("masked", plain, _OPEN),
        ):
            rates.setdefault(name, []).append(speed(one, schema, options.batch, 60))
    for name, found in rates.items():
        rate, step = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:20} {rate:8.1f} tokens/s {1000 * step:8.2f} ms a step")
    counts, wrong = validity(engine, options)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"invalid among those that ended in stop: {len(wrong)}")
    for one in wrong[:20]:
        print("  " + one)
    return int(bool(wrong))
