"""Schemas of tools and of answers as Anthropic's API takes them.

A tool's schema needs the type `object` at its top, and no union there; an answer's needs objects
without further keys, and has no bounds of numbers and lengths. What a schema cannot say so is told
the model in a description, as Anthropic's own SDK does (`lib/_parse/_transform.py`), so that nothing
of it is lost. Refusals: github.com/anomalyco/opencode/issues/37916, platform.claude.com: Structured
outputs, JSON Schema limitations. Pure.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.backends.refusals import unfit

_UNIONS = ("anyOf", "oneOf", "allOf")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BOUNDS = frozenset((*_NUMBERS, "minLength", "maxLength", "maxItems", "uniqueItems", "minProperties", "maxProperties"))
_SCHEMAS = frozenset(("properties", "$defs", "definitions"))


def input_schema(parameters: Any) -> dict[str, Any]:
    """A tool's schema with the type `object` at its top, which takes all that `parameters` takes."""
    schema = dict(parameters or {})
    if isinstance(reference := schema.pop("$ref", None), str):
        schema = _referenced(schema, reference) | schema
    if any(isinstance(schema.get(union), list) for union in _UNIONS):
        schema = _flat(schema)
    if schema.get("type") != "object" and "object" in (schema.get("type") or "object"):
        schema["type"] = "object"
    return schema if "properties" in schema else {**schema, "properties": {}}


def _referenced(schema: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """The part of `schema` that `reference` names, such as `#/$defs/Person`; {} if there is none."""
    part: Any = schema
    for name in reference.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, Mapping) else None
    return dict(part) if isinstance(part, Mapping) else {}


def _flat(schema: Mapping[str, Any]) -> dict[str, Any]:
    """One object with the properties of all parts of the unions at the top of `schema`.

    It requires what each part of a choice, or some part of `allOf`, requires.
    """
    flat = {name: value for name, value in schema.items() if name not in _UNIONS}
    properties, required = dict(flat.get("properties") or {}), list(flat.get("required") or ())
    for union in _UNIONS:
        parts = [input_schema(part) for part in schema.get(union) or () if isinstance(part, dict)]
        for part in parts:
            properties = part["properties"] | properties
        lists = [set(part.get("required") or ()) for part in parts]
        shared = (set.union if union == "allOf" else set.intersection)(*lists) if lists else set[str]()
        required += sorted(shared.difference(required))
    unions = {union: schema[union] for union in _UNIONS if union in schema}
    note = f"The arguments also match {msgspec.json.encode(unions).decode()}"
    flat |= {"properties": properties, "description": "\n\n".join(filter(None, (flat.get("description"), note)))}
    if flat.get("additionalProperties") is False:
        del flat["additionalProperties"]  # the parts' properties were additional
    return flat | ({"required": required} if required else {})


def output_schema(schema: Any) -> Any:
    """The schema of an answer, with its bounds in descriptions. Raises BackendUnfit for an object of
    any keys.
    """
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _SCHEMAS and isinstance(value, dict):
            changed[name] = {key: output_schema(one) for key, one in value.items()}
        elif name in _UNIONS and isinstance(value, list):
            changed["anyOf" if name == "oneOf" else name] = [output_schema(one) for one in value]
        elif name == "items":
            changed[name] = output_schema(value)
        elif name not in _BOUNDS and not (name == "minItems" and value not in (0, 1)):
            changed[name] = value
    if schema.get("type") == "object":
        if schema.get("additionalProperties") and not schema.get("properties"):
            raise unfit("`response_format` has an object of any keys, which this model's API lacks", "response_format")
        changed["additionalProperties"] = False
    if bounds := {name: value for name, value in schema.items() if name not in changed and name != "oneOf"}:
        note = msgspec.json.encode(bounds).decode()
        changed["description"] = "\n\n".join(filter(None, (schema.get("description"), note)))
    return changed
