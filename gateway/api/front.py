"""The way to `/v1`: a dictionary look-up in front of FastAPI, and the same routes described in its OpenAPI.

A request to `/v1` costs no routing table, no dependency injection and no response model: those serve the admin plane. Knows
paths and methods, nothing of what endpoints do. Invariant: a path under `/v1` always answers in OpenAI's error shape.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from gateway.api.request import Message, Receive, Scope, Send, new_record, send_error
from gateway.errors import MethodNotAllowed, NotFound

_ADMIN_BODY_BYTES_MAX = 1 << 20

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """ASGI middleware. `routes` maps a path to its endpoints by method; a path that ends in `/*` covers what is below it."""

    def __init__(self, app: Any, routes: Callable[[], Mapping[str, Mapping[str, Endpoint]]]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] != "http" or not (path == "/v1" or path.startswith("/v1/")):
            await self._app(scope, _bounded(receive) if scope["type"] == "http" else receive, send)
            return
        routes = self._routes()
        methods = routes.get(path) or routes.get("/".join(path.split("/")[:3]) + "/*" if path.count("/") > 2 else "")
        if methods is None:
            error = NotFound(f"There is no {path} here; see /docs for what there is", code="unknown_url")
            await send_error(send, error, new_record("unknown").request_id)
            return
        endpoint = methods.get(scope["method"])
        if endpoint is None:
            allowed = ", ".join(sorted(methods))
            refusal = MethodNotAllowed(f"{path} takes {allowed}, not {scope['method']}", headers={"allow": allowed})
            await send_error(send, refusal, new_record("unknown").request_id)
            return
        await endpoint(scope, receive, send)


def _bounded(receive: Receive) -> Receive:
    """`receive` that gives up on a body no admin sends: FastAPI reads a body before it asks who sent it."""
    left = _ADMIN_BODY_BYTES_MAX

    async def bounded() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, "The request body is larger than an admin's request can be")
        return message

    return bounded


def document(app: FastAPI, paths: Mapping[str, Any]) -> None:
    """Have `app.openapi()` list `paths` (OpenAPI 3.1 path items) beside FastAPI's own."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schema["paths"] = {**paths, **schema["paths"]}
            schema.setdefault("components", {}).setdefault("securitySchemes", {})["apiKey"] = {
                "type": "http",
                "scheme": "bearer",
            }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema


def operation(summary: str, body: Mapping[str, Any] | None, *, streams: bool = False) -> dict[str, Any]:
    """An OpenAPI operation with OpenAI's error shape."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {
        "description": "An error in OpenAI's shape",
        "content": {"application/json": {"schema": _ERROR_SCHEMA}},
    }
    described: dict[str, Any] = {
        "summary": summary,
        "tags": ["OpenAI"],
        "security": [{"apiKey": []}],
        "responses": {"200": {"description": "OK", "content": content}, "default": error},
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
