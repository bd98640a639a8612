"""Names in a request that look like misspelt ones: fields at any depth, headers, cache directives.

Each goes on as it is, because a server may know it; a warning says what it may have meant. Knows no
deployments. Invariant: what it costs the event loop is bounded, whatever a client sends.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from heapq import nsmallest
from itertools import islice
from typing import Any

from cache.fingerprint import FIELDS, TURN_FIELDS
from gateway.api.headers import Headers
from gateway.reserved import FIELDS as RESERVED
from gateway.wire.requests import SHAPES
from gateway.wire.types import CHAT, Kind

_TYPOS_MAX, _OBJECTS_MAX, _FIELDS_MAX, _LENGTH_MAX = 4, 32, 200, 40
_INSIDE = """
    allowed_tools arguments context custom data description detail file file_data file_id file_ids filename format
    function id image_url include_obfuscation include_usage input_audio json_schema logprob mode parameters schema
    stop_sequences strict system tool_choice type url
"""
_SHAPED = frozenset(name for shape in SHAPES.values() for name in shape.__struct_fields__)
_NAMES = _SHAPED.union(FIELDS, TURN_FIELDS, _INSIDE.split())
_KNOWN = _NAMES.union(RESERVED)
_WALKED = _NAMES - {"arguments", "documents", "metadata", "parameters", "schema"}  # which have the client's own names
_DIRECTIVES = frozenset({"no-cache", "no-store", "max-age", "only-if-cached"})
_HEADERS = ("x-sameway-session", "x-sameway-tags")
_WAYS = f"is no header that Sameway reads: it reads {', '.join(_HEADERS)}, and Cache-Control for the cache"


_IN_A_CHAT = {
    "instructions": "a message of the role `system`",
    "max_output_tokens": "`max_completion_tokens`",
    "stop_sequences": "`stop`",
    "system": "a message of the role `system`",
}
"""What a chat has in place of fields of the two other APIs, which most servers ignore."""


def warnings(body: dict[str, Any], headers: Mapping[str, str], kind: Kind) -> Headers:
    """The `x-sameway-warning` headers for a request's `body` and its `headers`, by lower-case name."""
    said = _said(_unknown(body), _NAMES, "is no field that Sameway knows")
    if kind is CHAT:
        said += [f"{name} is no field of a chat: send {way}" for name, way in _IN_A_CHAT.items() if name in body]
    if directives := headers.get("cache-control"):
        given = {part.partition("=")[0].strip().lower() for part in directives.split(",")}
        said += _said(given - _DIRECTIVES, _DIRECTIVES, "is no directive of Cache-Control")
    strange = [name for name in headers if name.startswith("x-sameway-") and name not in _HEADERS]
    said += [f"{name[:_LENGTH_MAX]} {_WAYS}" for name in strange[:_TYPOS_MAX]]
    return [(b"x-sameway-warning", one.encode("latin-1", "replace")) for one in said]


def _unknown(body: dict[str, Any]) -> set[str]:
    """The unknown names among the first ones of `body` and of the first objects within it."""
    unknown, objects = set[str](), [body]
    for fields in objects:  # which grows
        some = dict(islice(fields.items(), _FIELDS_MAX))
        unknown |= some.keys() - _KNOWN
        for name, held in some.items():
            if type(held) in (dict, list) and name in _WALKED and len(objects) < _OBJECTS_MAX:
                last = held[-_OBJECTS_MAX:] if type(held) is list else [held]
                objects += [one for one in last if type(one) is dict]
    return unknown


def _said(unknown: set[str], names: frozenset[str], what: str) -> list[str]:
    short = [name for name in unknown if len(name) <= _LENGTH_MAX]  # a longer name would stay in the cache
    near = [(name, _meant(name, names)) for name in nsmallest(_TYPOS_MAX, short)]
    return [f"{name} {what}; did you mean {meant}?" for name, meant in near if meant]


@lru_cache(1_000)
def _meant(name: str, names: frozenset[str]) -> str:
    """The one of `names` that is near `name`, else empty; a name that is no word is near none."""
    if not name.isascii() or not name.replace("-", "_").isidentifier():
        return ""
    plain, known = _plain(name), {_plain(real): real for real in names}
    twins = [other for other in known if sorted(other) == sorted(plain)]  # a turned pair: `cahce`
    close, shorter = get_close_matches(plain, known, cutoff=0.8), _shorter(plain)
    near = twins or [other for other in close if shorter & _shorter(other)]  # `customer` is not `custom`
    return known[near[0]] if near else ""


def _shorter(name: str) -> set[str]:
    """`name`, and without one of its letters: names that share one are a letter apart."""
    return {name, *(name[:at] + name[at + 1 :] for at in range(len(name)))}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")  # `maxTokens` is `max_tokens`
