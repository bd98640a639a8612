"""Routes `/v1` by a dictionary in front of FastAPI, and lists its routes in FastAPI's OpenAPI.

A request to `/v1` passes no routing table, dependency injection or response model, which only the
admin plane uses. Azure's paths below `/openai` lead to the same endpoints. Knows paths and methods,
not the work of endpoints. Invariant: errors under `/v1` have OpenAI's shape, or the shape of the
provider whose API the endpoint speaks.
"""

import ipaddress
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from operator import itemgetter
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from gateway.api.asgi import Message, Receive, Scope, Send, headers_of, send_error, with_headers, with_own_headers
from gateway.journey.bodies import Bodies, Body, ClientGone
from gateway.journey.turn import arrive
from gateway.wire.errors import ApiError, MethodNotAllowed, NotFound
from gateway.wire.types import MEDIA

_ADMIN_BODY_BYTES_MAX = 1 << 20
_BYTES_MAX = {"/admin/api/cache/import": 64 << 20}  # which is read line by line
_ID_BYTES_MAX = 200
_HINTED_CHARS_MAX = 200

_AZURE_DEPLOYMENTS = "/openai/deployments/"
_OF_DEPLOYMENTS = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/embeddings",
    "/rerank",
    "/moderations",
    *(kind.path for kind in MEDIA),
    "/models",
)

_SLASHES = re.compile("/{2,}")
_VERSIONS = re.compile("^(/v[12](?=/))+")  # `/v1/v1`: Anthropic's clients add theirs to a base URL
_NAME = itemgetter(0)

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
Routes = Mapping[str, Mapping[str, Endpoint]]

_METRICS = "/metrics"  # Prometheus' own, beside the one below /v1


class Front:
    """ASGI middleware.

    `routes` is a map from a path to its endpoints by method, filled when the parts are open; in a
    path, `{name}` is any one part, and a last `*` one or more. A path below `/v1` is served without
    it and with two, too. Other paths go to `app`.
    """

    def __init__(self, app: Any, routes: Routes) -> None:
        self._app = app
        self._routes = routes
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        routes = self._routes
        methods = routes.get(path)
        if methods is None:
            plain, model = _as_v1(_plain(path))
            methods = _methods_of(plain, routes)
            below = f"/v1{_VERSIONS.sub('', plain)}"
            if methods is None and plain != _METRICS and (methods := _methods_of(below, routes)):
                plain = below
            if methods is None and plain != "/v1" and not plain.startswith("/v1/"):
                body = self._bodies.of(receive, headers_of(scope), None)
                plainly = _with_get({**scope, "path": plain or "/"})
                await self._app(
                    plainly, _bounded(body, receive, _BYTES_MAX.get(plain, _ADMIN_BODY_BYTES_MAX)), _kept_close(send)
                )
                return
            scope = {**scope, "path": plain}
            if model:
                scope["path_params"] = {"model": model}
        names = dict(scope["headers"])
        if given := names.get(b"x-request-id"):
            send = _with_id(send, given[:_ID_BYTES_MAX])
        if b"origin" in names:
            # decision: any-origin
            send = with_headers(send, lambda _: _SHARED)
        if scope["method"] == "OPTIONS":
            # a page may read the refusal, too
            await _say_options(scope, methods or ("GET", "POST"), send)
        elif methods is None:
            await _errors_of(scope["path"], routes)(send, arrive("unknown").request_id, no_such_route(path, routes))
        elif (endpoint := methods.get("GET" if scope["method"] == "HEAD" else scope["method"])) is None:
            refusal = wrong_method(path, scope["method"], methods)
            await _errors_of(scope["path"], routes)(send, arrive("unknown").request_id, refusal)
        else:
            await endpoint(scope, receive, send)


def _methods_of(path: str, routes: Routes) -> Mapping[str, Endpoint] | None:
    """The endpoints of a path by method; None for an unknown path."""
    if (methods := routes.get(path)) is not None:
        return methods
    parts = path.split("/")
    for known, methods in routes.items():
        names = known.split("/")
        is_open = names[-1] == "*" and len(parts) >= len(names)
        if is_open or len(parts) == len(names):
            pairs = zip(names[:-1] if is_open else names, parts, strict=False)
            if all(name == part or (name[:1] == "{" and part) for name, part in pairs):
                return methods
    return None


def _with_id(send: Send, given: bytes) -> Send:
    """`send` that repeats the client's own id of a request; the gateway's has a name of its own then."""

    def named(start: Message) -> Iterator[tuple[bytes, bytes]]:
        for name, value in start["headers"]:
            yield b"x-sameway-request-id" if name == b"x-request-id" else name, value
        yield b"x-request-id", given

    return with_own_headers(send, named)


def _errors_of(path: str, routes: Routes) -> Any:
    """The function that sends errors for a path: its endpoint's, or the endpoint's above it."""
    return getattr(routes.get("/".join(path.split("/")[:3]), {}).get("POST"), "send_error", send_error)


def _plain(path: str) -> str:
    """`path` with single slashes and no final slash: a base URL may end in one and a path begin
    with one.
    """
    return _SLASHES.sub("/", path).rstrip("/")


def _as_v1(path: str) -> tuple[str, str]:
    """Translate an Azure path to the path below `/v1`, with the deployment that it names, or empty.

    Other paths stay. A deployment's name may have slashes. Source: Azure OpenAI REST API reference,
    where the path names the deployment, or has OpenAI's own path after `/openai/v1`.
    """
    if not path.startswith("/openai/"):
        return path, ""
    below = path.removeprefix(_AZURE_DEPLOYMENTS)
    if below != path and f"/{below}" not in _OF_DEPLOYMENTS:  # which has no name at all
        for ending in _OF_DEPLOYMENTS:
            if below.endswith(ending) and below != ending:
                return f"/v1{ending}", below.removesuffix(ending)
    return f"/v1/{path.removeprefix('/openai/').removeprefix('v1/')}", ""


def _with_get(scope: Scope) -> Scope:
    """`scope` with GET for HEAD (RFC 9110, section 9.3.2); the server omits the body."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def no_such_route(path: str, routes: Routes) -> NotFound:
    """The error for a wrong base URL or an unknown path; it suggests the path that it ends in, else
    a near one.
    """
    parts = _plain(path[:_HINTED_CHARS_MAX]).split("/")[1:]
    ends = (f"/v1/{'/'.join(parts[at:])}" for at in range(len(parts)))
    meant = next((end for end in ends if _methods_of(end, routes) is not None), "")
    near = meant or next(iter(get_close_matches("/".join(["", *parts]), routes, n=1, cutoff=0.8)), "")
    hint = "what there is stands at /docs"
    if near:
        hint = f"did you mean {near}?" + (" A base_url ends in /v1, once" if meant else "")
    return NotFound(f"There is no {path[:_HINTED_CHARS_MAX]} here: {hint}", code="unknown_url")


def wrong_method(path: str, method: str, methods: Collection[str]) -> MethodNotAllowed:
    """The error for a method that the path does not support; it lists `methods`. GET includes HEAD."""
    allowed = _listed(methods)
    return MethodNotAllowed(f"{path[:200]} takes {allowed}, not {method}", headers={"allow": allowed})


def _listed(methods: Collection[str]) -> str:
    return ", ".join(sorted({*methods, *(("HEAD",) if "GET" in methods else ())}))


async def _say_options(scope: Scope, methods: Collection[str], send: Send) -> None:
    """Answer OPTIONS with `methods`, for a browser's preflight.

    Source: Fetch standard, "CORS-preflight request".
    """
    allowed = _listed(methods).encode()
    headers = [(b"allow", allowed), (b"access-control-allow-methods", allowed), (b"access-control-max-age", b"7200")]
    headers += [
        (b"access-control-allow-headers", value)  # `*` would leave out Authorization
        for name, value in scope["headers"]
        if name == b"access-control-request-headers"
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


# A page of any origin may read the response. A browser adds no credentials to such a request, so a page
# without a key gets no answer. The admin plane, which uses cookies, does not get these headers.
_SHARED = ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*"))
_KEPT_CLOSE = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def _kept_close(send: Send) -> Send:
    """Wrap `send`: add headers that keep a response out of caches and frames, unless the response
    sets them.
    """

    def lacking(start: Message) -> list[tuple[bytes, bytes]]:
        given = set(map(_NAME, start["headers"]))
        return [header for header in _KEPT_CLOSE if header[0] not in given]

    return with_headers(send, lacking)


class BelowPath(ProxyHeadersMiddleware):
    """ASGI middleware: what proxies in front say, and the sub-path below which they show all of this.

    The sub-path is `public_path`, or the `X-Forwarded-Prefix` of a trusted proxy, which may have cut
    it off or not. Own redirects, and the cookies of `/admin`, get it. The settings are those of `state`,
    which a reload changes.
    """

    def __init__(self, app: Any, state: Any) -> None:
        super().__init__(app, [])
        self._state = state
        self._proxies: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        settings = self._state.settings
        if settings.trusted_proxies is not self._proxies:
            self._proxies = settings.trusted_proxies
            super().__init__(self.app, _as_seen(self._proxies))
        prefix = settings.public_path if scope["type"] == "http" else ""
        if scope["type"] == "http" and (scope.get("client") or ("",))[0] in self.trusted_hosts:
            prefix = headers_of(scope).get("x-forwarded-prefix", prefix).rstrip("/")
        if prefix and PUBLIC_PATH.fullmatch(prefix):
            path = scope["path"].removeprefix(prefix)
            if path[:1] in ("", "/"):
                raw_path = scope.get("raw_path", b"").removeprefix(prefix.encode())
                scope = {**scope, "path": path or "/", "raw_path": raw_path or b"/"}
            if not scope["path"].startswith(_MOUNTED):  # starlette would look for it below the sub-path
                scope["root_path"] = prefix
            send = _below(send, prefix.encode())
        await super().__call__(scope, receive, send)


def _as_seen(networks: list[str]) -> list[str]:
    """The networks, with each IPv4 network also as an IPv6 socket shows it (::ffff:...)."""
    parsed = [ipaddress.ip_network(network) for network in networks]
    mapped = [f"::ffff:{one.network_address}/{96 + one.prefixlen}" for one in parsed if one.version == 4]
    return [*map(str, parsed), *mapped]


PUBLIC_PATH = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,99}){1,10}")
_MOUNTED = "/static-offline-docs/"


def _below(send: Send, prefix: bytes) -> Send:
    """Wrap `send`: the response's own paths are below `prefix`."""

    def below(start: Message) -> Iterator[tuple[bytes, bytes]]:
        for name, value in start["headers"]:
            if name == b"location" and value[:1] == b"/":
                value = prefix + value
            elif name == b"set-cookie":
                value = value.replace(b"Path=/admin", b"Path=%b/admin" % prefix)
            yield name, value

    return with_own_headers(send, below)


def _bounded(body: Body, receive: Receive, bytes_max: int) -> Receive:
    """`receive` for `body`, bounded in time and size: FastAPI reads the body before it
    authenticates.
    """
    pieces: AsyncIterator[bytes] | None = body.read(bytes_max)

    async def bounded() -> Message:
        nonlocal pieces
        if pieces is None:
            return await receive()
        try:
            piece = await anext(pieces, None)
        except ClientGone:
            return {"type": "http.disconnect"}
        except ApiError as error:  # FastAPI makes others a 400
            raise HTTPException(error.http_status, error.message, dict(error.headers)) from None
        if piece is None:
            pieces = None
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    return bounded


def document(app: FastAPI, paths: Mapping[str, Any], schemas: Mapping[str, Any]) -> None:
    """Add `paths` (OpenAPI 3.1 path items) to `app.openapi()`, and the `schemas` that they and the admin
    plane's routes name.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schema["paths"] = {**paths, **schema["paths"]}
            components = schema.setdefault("components", {})
            components["schemas"] = {**schemas, **components.get("schemas", {})}
            components.setdefault("securitySchemes", {})["apiKey"] = {"type": "http", "scheme": "bearer"}
            app.openapi_schema = schema
        return app.openapi_schema

    # FastAPI's documented way to extend the schema
    app.openapi = openapi  # type: ignore[method-assign]


def operation(
    summary: str, body: Mapping[str, Any] | None, *, streams: bool = False, errors_of: str = "OpenAI"
) -> dict[str, Any]:
    """An OpenAPI operation with the error shape of a provider, `errors_of`.

    `body` is the JSON schema of its request; None: it has no body. `streams` adds server-sent
    events.
    """
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT_SCHEMA}
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_ERRORS[errors_of]}"}}}
    wrong = {"401": _WRONG["401"], "4XX": _WRONG["4XX"], "5XX": _WRONG["5XX"]} if body is None else _WRONG
    described_errors = {
        status: {"description": f"{what}, in {errors_of}'s shape", "content": error} for status, what in wrong.items()
    }
    described: dict[str, Any] = {
        "summary": summary,
        "tags": [errors_of],
        "security": [{"apiKey": []}],
        "responses": {"200": {"description": "OK", "content": content}, **described_errors},
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


_ERRORS = {"OpenAI": "ErrorBody", "Anthropic": "MessageError"}
_WRONG = {
    "400": "The request is not valid",
    "401": "The API key is missing or wrong",
    "403": "The key may not use this model",
    "404": "There is no such model or response",
    "413": "The body is too long",
    "415": "The body's encoding is not supported",
    "429": "A rate limit, a budget or the deployment has no room",
    "4XX": "Another refusal, such as the deployment's own",
    "503": "No deployment can answer now",
    "5XX": "The gateway or its deployments failed",
}
_EVENT_SCHEMA = {
    "type": "object",
    "description": "each event of the stream",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
