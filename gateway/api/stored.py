"""Queries, lists and refusals of endpoints for what a team keeps here: files, batches, responses, conversations."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.endpoint import Call
from gateway.wire.errors import BadRequest, NotFound, shown

_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")


class Paging(msgspec.Struct, frozen=True):
    """The place and size of a page: the objects after `after`, or the first ones."""

    after: str
    limit: int


def paging(query: Mapping[str, str], usual: int, most: int) -> Paging:
    """The page that `query` asks for. Raises BadRequest."""
    limit, after = query.get("limit", str(usual)), query.get("after", "")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise _wrong("limit", limit, f"a number from 1 to {most:,}")
    if after and not _ID.fullmatch(after):
        raise _wrong("after", after, "an id of the list")
    return Paging(after, int(limit))


def one_of(query: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    """A field of `query` that has one of a few values, or is missing: then empty. Raises BadRequest."""
    found = query.get(name, "")
    if found and found not in allowed:
        raise _wrong(name, found, f"one of {', '.join(allowed)}")
    return found


def _wrong(name: str, found: str, expected: str) -> BadRequest:
    return BadRequest(f"Invalid {name}: expected {expected}, got {shown(found)}", param=name, code="invalid_value")


def listed(found: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list of the first `limit` of `found`."""
    data = found[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}


def no_such_action(path: str, call: Call) -> NotFound:
    """The error for a path or a method that an endpoint does not have."""
    place = "/".join(filter(None, (path, call.object_id and "{id}", shown(call.action))))
    return NotFound(f"There is no {call.method} {place} here", code="unknown_url")
