"""The base of endpoints for what a team keeps here: files, batches, responses and conversations.

It contains the wire, paging and no shapes. Invariants: every request gets one response and one
record; a path is an id and the name of an action, and an id is looked for among its team's only.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from gateway.accounts import Identity
from gateway.api import asgi
from gateway.api.headers import JSON, Headers, base_headers
from gateway.journey.record import record_of
from gateway.journey.turn import Ended, arrive, elapsed_ms_since
from gateway.pipeline import Pipeline
from gateway.wire.errors import BadRequest, NotFound, shown

_FIELDS_MAX = 50
_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")


class Call(msgspec.Struct, frozen=True):
    """An authenticated request. `object_id` and `action` are the parts of its path, or empty; `out`
    are the first headers of its response.
    """

    identity: Identity
    method: str
    object_id: str
    action: str
    query: dict[str, str]
    headers: Mapping[str, str]
    out: Headers
    scope: asgi.Scope
    receive: asgi.Receive
    send: asgi.Send


class Paging(msgspec.Struct, frozen=True):
    """The place and size of a page: the objects after `after`, or the first ones."""

    after: str
    limit: int


class StoredEndpoint(ABC):
    """One endpoint. A subclass defines `operation`, its name in records, `path` and `answer`."""

    operation: str
    path: str

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @abstractmethod
    async def answer(self, call: Call) -> Any:
        """The reply; None if it has been sent. Raises ApiError."""

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        headers = asgi.headers_of(scope)
        arrival = arrive(self.operation)
        identity: Identity | None = None
        ended = Ended()
        respond = partial(asgi.send_error, send, arrival.request_id)
        try:
            # decision: auth-before-body
            identity = await self._pipeline.authenticate(asgi.key_of(headers))
            limited = await self._pipeline.limits.take_requests(identity)
            object_id, _, action = scope["path"].removeprefix(self.path).strip("/").partition("/")
            out = [*base_headers(arrival.request_id), *limited.items()]
            call = Call(
                identity=identity,
                method="GET" if scope["method"] == "HEAD" else scope["method"],
                object_id=object_id,
                action=action,
                query=query_of(scope),
                headers=headers,
                out=out,
                scope=scope,
                receive=receive,
                send=send,
            )
            reply = await self.answer(call)
            if reply is not None:
                await asgi.send_whole(send, 200, [JSON, *out], msgspec.json.encode(reply))
        except (Exception, asyncio.CancelledError) as error:
            ended = await asgi.fail(error, arrival.request_id, respond)
        finally:
            record = record_of(arrival, ended, elapsed_ms_since(arrival.at_s), identity=identity, cache="bypass")
            self._pipeline.emit(record)


def query_of(scope: asgi.Scope) -> dict[str, str]:
    """The fields of a request's query. Raises BadRequest."""
    text = scope.get("query_string", b"").decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise BadRequest(f"The query has more than {_FIELDS_MAX} fields: send fewer", code="invalid_value") from None


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
    return NotFound(f"There is no {call.method} {path}/{{id}}/{shown(call.action)} here", code="unknown_url")
