"""The base of endpoints that generate nothing: a team's stored objects, their lists, and JSON
objects.

Contains the wire and no shapes. Invariants: every request gets one response and one record; below
an endpoint's path stand an id and the name of an action.
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
from gateway.deployments.alias import Alias
from gateway.journey.bodies import Body
from gateway.journey.recording import record_of
from gateway.journey.turn import Arrival, Ended, arrive, elapsed_ms_since
from gateway.pipeline import Pipeline
from gateway.wire.errors import BadRequest, Forbidden, shown
from gateway.wire.requests import decode_object

_FIELDS_MAX = 50


class Call(msgspec.Struct):
    """An authenticated request. `object_id` and `action` are parts of its path, or empty.

    `out` holds the first headers of its response. The record names `alias` or, if that is empty,
    `named_model`.
    """

    identity: Identity
    arrival: Arrival
    headers: Mapping[str, str]
    scope: asgi.Scope
    body: Body
    send: asgi.Send
    method: str = ""
    object_id: str = ""
    action: str = ""
    out: Headers = []
    alias: str = ""
    named_model: str = ""

    def check_has_key(self) -> None:
        """Refuse a person with a token, whose work would go on after the token's end. Raises Forbidden."""
        if self.identity.user:
            raise Forbidden("A batch outlives a token: make it with an API key", code="api_key_needed")

    @property
    def query(self) -> dict[str, str]:
        """The fields of the query. Raises BadRequest."""
        return query_of(self.scope)


def query_of(scope: asgi.Scope) -> dict[str, str]:
    """The fields of a request's query. Raises BadRequest."""
    text = scope.get("query_string", b"").decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise BadRequest(f"The query has more than {_FIELDS_MAX} fields: send fewer", code="invalid_value") from None


class ObjectEndpoint(ABC):
    """One endpoint. A subclass defines `answer`, `operation`, its name in records, and if ids follow
    it, `path`.
    """

    operation: str
    path = ""
    send_error = staticmethod(asgi.send_error)

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @abstractmethod
    async def answer(self, call: Call) -> Any:
        """The reply; None if it has been sent. Rate limits are checked before the call. Raises
        ApiError.
        """

    async def body(self, call: Call) -> tuple[bytes, dict[str, Any]]:
        """The body as bytes and as an object; an empty body is an empty object. Raises ApiError."""
        raw = await call.body.whole(self._pipeline.settings.body_bytes_max)
        body = decode_object(raw or b"{}", asgi.model_of(call.scope))
        call.named_model = shown(model) if isinstance(model := body.get("model"), str) else ""
        return raw, body

    def alias(self, call: Call, name: str) -> Alias:
        """The alias of this name, which the key may use. Raises NotFound, Forbidden."""
        alias = self._pipeline.fleet.alias(name, call.identity.key.models)
        call.alias = alias.name
        alias.allow(call.identity.key.models, name)
        return alias

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        headers = asgi.headers_of(scope)
        arrival = arrive(self.operation, headers, traces=self._pipeline.settings.traces)
        object_id, _, action = scope["path"].removeprefix(self.path).strip("/").partition("/")
        call: Call | None = None
        ended = Ended()
        try:
            # decision: auth-before-body
            identity = await self._pipeline.authenticate(asgi.key_of(headers), scope.get("client"))
            call = Call(
                identity=identity,
                arrival=arrival,
                method="GET" if scope["method"] == "HEAD" else scope["method"],
                object_id=object_id,
                action=action,
                headers=headers,
                out=base_headers(arrival.request_id),
                scope=scope,
                body=self._pipeline.bodies.of(receive, headers, identity),
                send=send,
            )
            call.body.is_counted = True
            call.out += (await self._pipeline.limits.take_requests(call.identity)).items()
            reply = await self.answer(call)
            if reply is not None:
                await asgi.send_whole(send, 200, [JSON, *call.out], msgspec.json.encode(reply))
        except (Exception, asyncio.CancelledError) as error:
            ended = await asgi.fail(error, arrival.request_id, partial(self.send_error, send, arrival.request_id))
        finally:
            facts: dict[str, Any] = {}
            if call is not None:
                named = "" if call.alias else call.named_model
                facts = {"identity": call.identity, "alias": call.alias, "model": named}
            self._pipeline.emit(record_of(arrival, ended, elapsed_ms_since(arrival.at_s), source="bypass", **facts))


# -- what a team keeps here: files, batches, responses, conversations

ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")


def page_of(objects: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Anthropic's page of these objects; `has_more`: others follow in the direction of the request."""
    ids = [one["id"] for one in objects] or [None]
    return {"data": objects, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}


def limit_of(query: Mapping[str, str], usual: int, most: int) -> int:
    """The size of the page that `query` asks for. Raises BadRequest."""
    limit = query.get("limit", str(usual))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise _wrong("limit", limit, f"a number from 1 to {most:,}")
    return int(limit)


def after_of(query: Mapping[str, str], name: str = "after") -> str:
    """The id that precedes the page of `query`; empty for the first page. Raises BadRequest."""
    after = query.get(name, "")
    if after and not ID.fullmatch(after):
        raise _wrong(name, after, "an id of the list")
    return after


def one_of(query: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    """The value of the field `name` of `query`, one of `allowed`; empty if missing. Raises
    BadRequest.
    """
    value = query.get(name)
    if value not in (None, *allowed):
        raise _wrong(name, str(value), f"one of {', '.join(allowed)}")
    return value or ""


def _wrong(name: str, value: str, expected: str) -> BadRequest:
    return BadRequest(f"Invalid {name}: expected {expected}, got {shown(value)}", param=name, code="invalid_value")


def listed(objects: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list object with the first `limit` of `objects`."""
    return {"object": "list", **page_of(objects[:limit], has_more=len(objects) > limit)}
