"""Authentication of the admin plane, and its errors.

The API takes `Authorization: Bearer <admin key>`. A browser gets a session cookie from the login
form: an expiry, signed with a key derived from the admin's and the installation's. So a new admin
key ends all sessions, and no worker stores any. The cookie is HttpOnly and SameSite=Strict, and
changes must come from the dashboard's own pages (Fetch Metadata, else `Origin`; OWASP Cross-Site
Request Forgery Prevention Cheat Sheet).

Invariant: under /admin only the login form and static files answer without one of the two.
"""

import hashlib
import hmac
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.params import Query
from fastapi.routing import APIRoute
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from cache import CacheUnavailable
from gateway import accounts
from gateway.loggers import get_logger
from gateway.wire.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    NotFound,
    TooLarge,
    Unauthenticated,
    Unavailable,
    sentence,
)
from gateway.wire.requests import decode_strictly, in_json_words

COOKIE = "sameway_admin"
SESSION_S = 12 * 3_600
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))

_log = get_logger(__name__)


class Conflict(ApiError):
    """409: the request contradicts the current state."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class CrossSite(Forbidden):
    """403: a change that comes from a page of another site."""

    code = "cross_site_request"


class Guard:
    """Checks requests.

    `secret` is the installation's, equal on all its hosts; `clock` gives unix seconds.
    """

    def __init__(self, admin_key: str, secret: str, clock: Callable[[], float]) -> None:
        if not admin_key:
            raise ValueError("the admin plane needs an admin key")
        self._admin_key = admin_key.encode()
        keyed = hashlib.blake2b(key=hashlib.blake2b(secret.encode()).digest(), person=b"sameway-admin")
        keyed.update(self._admin_key)
        self._signing_key = keyed.digest()
        self._clock = clock

    def is_key(self, key: str) -> bool:
        """Whether this is the admin key; compares in constant time."""
        return hmac.compare_digest(key.encode(errors="replace"), self._admin_key)

    def new_session(self) -> str:
        """A cookie value that is valid for SESSION_S."""
        expires = str(int(self._clock()) + SESSION_S)
        return f"{expires}.{self._sign(expires)}"

    def has_session(self, request: Request) -> bool:
        expires, _, signature = request.cookies.get(COOKIE, "").partition(".")
        if not hmac.compare_digest(signature.encode(errors="replace"), self._sign(expires).encode()):
            return False
        return int(expires) > self._clock()

    def _sign(self, expires: str) -> str:
        return hmac.new(self._signing_key, expires.encode(errors="replace"), hashlib.sha256).hexdigest()

    def check_api(self, request: Request) -> None:
        """The dependency of each API route. Raises Unauthenticated, CrossSite."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_key(key.strip()):
            return
        if self.has_session(request):
            check_same_site(request)
            return
        raise Unauthenticated(
            "The admin API needs `Authorization: Bearer <admin key>`; it is SAMEWAY_ADMIN_KEY where that is set, "
            "else in the data directory's admin.key",
        )


def client_of(request: Request) -> str:
    """The address of the client; empty where the server does not know it."""
    return request.client.host if request.client is not None else ""


def check_same_site(request: Request) -> None:
    """Refuse a change that comes from a page of another site. Raises CrossSite."""
    if request.method in _SAFE_METHODS:
        return
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site not in ("same-origin", "none"):
            raise CrossSite("This change was asked for by another site's page")
        return
    origin = request.headers.get("origin")
    if origin is None or urlsplit(origin).netloc != request.headers.get("host"):
        raise CrossSite("This change did not come from the dashboard's own pages")


class _StrictRequest(Request):
    """A request whose JSON has each name once."""

    async def json(self) -> Any:
        return decode_strictly(await self.body())


class ApiRoute(APIRoute):
    """A route that reads strictly, and answers each error as OpenAI's error object."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except Exception as error:
                refusal = as_api_error(error)
                if refusal is None:
                    raise
                return Response(
                    refusal.body(), refusal.http_status, headers=refusal.headers, media_type="application/json"
                )

        return guarded


def check_query(request: Request) -> None:
    """Refuse a query parameter that the route does not have, or has twice. Raises BadRequest."""
    known = [
        one.alias for one in get_flat_params(request.scope["route"].dependant) if isinstance(one.field_info, Query)
    ]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            there_is = f"there is {', '.join(known)}" if known else "this route has none"
            message = f"Unknown query parameter: {name[:100]}; {there_is}"
            raise BadRequest(message, param=name[:100], code="unknown_parameter")
        if given.count(name) > 1:
            raise BadRequest(f"The query has {name} twice: send it once", param=name, code="invalid_value")


def as_api_error(error: Exception) -> ApiError | None:
    """The client's error for an exception; None for an unexpected one."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            if isinstance(error.body, bytes):  # parsed as JSON only with a JSON content type
                return BadRequest("Send the body as JSON, with `Content-Type: application/json`", code="invalid_body")
            return _bad_request(error)
        case accounts.NotFound():
            return NotFound(sentence(str(error)), code="not_found")
        case accounts.Conflict():
            return Conflict(sentence(str(error)))
        case accounts.Invalid():
            return BadRequest(sentence(str(error)), param=error.field, code="invalid_value")
        case RedisError() | CacheUnavailable():
            _log.warning("admin_without_redis", reason=str(error))
            return Unavailable("Redis does not answer; try again shortly", code="redis_unavailable")
        case SQLAlchemyError():
            _log.warning("admin_without_database", reason=str(error))
            return Unavailable("The database does not answer; try again shortly", code="database_unavailable")
        case HTTPException(__cause__=ApiError() as refusal):  # FastAPI's, for what reading the body raised
            return refusal
        case HTTPException(status_code=413):
            return TooLarge(str(error.detail))
        case HTTPException(status_code=400):  # a body that is neither JSON nor a form
            return BadRequest(str(error.detail), code="invalid_body")
    return None


def _bad_request(error: RequestValidationError) -> BadRequest:
    first = error.errors()[0]
    # the first part is the place (body, query, path), the rest are names of fields
    path = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "missing":
        message = f"Missing required field: {path}" if path else "Send a body: a JSON object"
        return BadRequest(message, param=path or None, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return BadRequest(f"Unknown field: {path}", param=path, code="unknown_parameter")
    message = in_json_words(first["msg"].removeprefix("Value error, "))
    return BadRequest(f"{path}: {message}" if path else message, param=path or None, code="invalid_value")
