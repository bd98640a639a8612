"""Authentication of the operators' endpoints, and the admin plane's errors.

The API takes `Authorization: Bearer <admin key>`; a person's session has the roles of the person's
groups, by the configuration of the moment; `/metrics` and `/readyz` take the metrics key,
too. A browser gets a session from the login form; its cookie is HttpOnly and SameSite=Strict, and
changes must come from the dashboard's own pages (Fetch Metadata, else `Origin`; OWASP Cross-Site
Request Forgery Prevention Cheat Sheet). A new admin key ends all sessions.

Invariants: under /admin only the login form and static files answer without key and session; keys
are compared in constant time, and a client that sent wrong ones waits before the next is read; one
with an open session waits only for those that came from its address in a session.
"""

import hashlib
import hmac
import ipaddress
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from fastapi import Depends, Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.params import Query
from fastapi.routing import APIRoute
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from cache import CacheUnavailable
from gateway import accounts
from gateway.access.agents import Agents
from gateway.access.people import ADMIN_KEY, roles_of
from gateway.access.provider import Provider
from gateway.accounts.database import is_down
from gateway.accounts.sessions import Session, Sessions
from gateway.admin.guesses import Guesses
from gateway.exceptions import let_go
from gateway.loggers import get_logger
from gateway.settings import Role, Settings
from gateway.wire.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    MissingField,
    NotFound,
    RateLimited,
    TooLarge,
    Unauthenticated,
    Unavailable,
    sentence,
)
from gateway.wire.requests import decode_strictly, in_json_words
from policies.durations import duration_s
from policies.redis import RedisCommands

COOKIE = "sameway_admin"
ADMIN_ALONE: Mapping[Role, frozenset[int]] = {Role.ADMIN: frozenset()}
SESSION_S = 12 * 3_600
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]*)?", re.IGNORECASE)

_log = get_logger(__name__)


class Endpoint(StrEnum):
    """The endpoints that read an operator's key; wrong keys are counted by endpoint."""

    LOGIN = "login"
    ADMIN_API = "admin_api"
    METRICS = "metrics"
    READYZ = "readyz"


NEEDS = {
    Endpoint.LOGIN: "That is not the admin key.",
    Endpoint.ADMIN_API: "The admin API needs `Authorization: Bearer <admin key>`; it is SAMEWAY_ADMIN_KEY where that "
    "is set, else in the data directory's admin.key",
    Endpoint.METRICS: "/metrics needs `Authorization: Bearer <key>`, with SAMEWAY_METRICS_KEY or the admin key",
    Endpoint.READYZ: "This is neither SAMEWAY_METRICS_KEY nor the admin key; without a key /readyz says whether the "
    "gateway is ready",
}


class StateConflict(ApiError):
    """409: the request contradicts the current state."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class CrossSite(Forbidden):
    """403: a change that comes from a page of another site."""

    code = "cross_site_request"


class TooManyWrongKeys(RateLimited):
    """429: wrong keys came from this client; for a while the next one is not read."""

    code = "too_many_wrong_keys"


class Principal(NamedTuple):
    """Who sent a request: the person or `admin key`, the address, `dashboard` or `api`, and the roles, each
    with the ids of its teams; none where it is for all.
    """

    actor: str
    client: str
    way: str
    roles: Mapping[Role, frozenset[int]]

    @property
    def is_admin(self) -> bool:
        return Role.ADMIN in self.roles


class Guard:
    """Checks requests by the keys in `settings`.

    `sessions` are those of all processes; `count` counts refused keys, by endpoint and outcome;
    `clock` gives steady seconds; `redis` has the wrong keys that other workers saw; `provider` is where
    people sign in.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        count: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        redis: RedisCommands | None = None,
        provider: Provider | None = None,
    ) -> None:
        if not settings.admin_key:
            raise ValueError("the admin plane needs an admin key")
        self._admin_key = _digest(settings.admin_key)
        self._metrics_key = _digest(settings.metrics_key) if settings.metrics_key else None
        self._settings = settings
        self._own_host = settings.host.lower()
        self.sessions = sessions
        self.agents: Agents  # set where Redis is there
        self.provider = provider or Provider(settings)
        self._count = count
        self.guesses = Guesses(clock, redis)

    async def check_key(self, request: Request, endpoint: Endpoint, key: str) -> None:
        """Check an operator's key. Raises Unauthenticated for a wrong key, TooManyWrongKeys before reading it."""
        client, scope = client_of(request), endpoint.value
        wait_s = await self.guesses.wait_s(scope, client)
        if wait_s and await self.session(request) is not None:
            scope = f"{endpoint} in a session"
            wait_s = await self.guesses.wait_s(scope, client)
        if wait_s:
            self._count(endpoint, "not_read")
            then = f"Wait {duration_s(math.ceil(wait_s))}, then send the right one."
            raise TooManyWrongKeys(f"Too many wrong keys came from your address. {then}", wait_s)
        digest = _digest(key)
        if endpoint in (Endpoint.LOGIN, Endpoint.ADMIN_API) and not self._settings.access.is_admin_key_taken:
            raise Unauthenticated("The admin key is switched off by `access.is_admin_key_taken`: sign in")
        if hmac.compare_digest(digest, self._admin_key):
            await self.guesses.forget(scope, client)
            return
        # the metrics key forgets nothing: with it a client could guess the admin's for ever
        is_observer = endpoint in (Endpoint.METRICS, Endpoint.READYZ)
        if is_observer and self._metrics_key and hmac.compare_digest(digest, self._metrics_key):
            return
        pause_s = await self.guesses.add(scope, client)
        self._count(endpoint, "wrong")
        _log.warning("wrong_key", endpoint=endpoint.value, client=client, pause_s=pause_s)
        raise Unauthenticated(NEEDS[endpoint])

    async def enter(self, request: Request) -> Principal | None:
        """Who sent a request to the API or a page, by key or session; None for neither.

        Raises Unauthenticated, TooManyWrongKeys, CrossSite.
        """
        is_api = request.scope["route"].path.startswith("/admin/api/")
        key = _bearer(request) if is_api else ""
        if key:
            await self.check_key(request, Endpoint.ADMIN_API, key)
            session = None
        elif (session := await self.session(request)) is not None:
            check_same_site(request)
        else:
            return None
        roles = ADMIN_ALONE
        if session is not None and session.subject:
            known = request.app.state.parts.accounts.team_ids
            roles = roles_of(session.groups, self._settings.access, known)
        actor = session.actor if session is not None else ADMIN_KEY
        principal = Principal(actor, client_of(request), "api" if is_api else "dashboard", roles)
        request.state.principal = principal
        return principal

    async def may_observe(self, request: Request, endpoint: Endpoint) -> bool:
        """Whether the request may see the figures of teams and parts in `/metrics` and `/readyz`.

        Raises Unauthenticated and TooManyWrongKeys for a wrong key.
        """
        key = _bearer(request)
        if key:
            await self.check_key(request, endpoint, key)
        return bool(key) or (self._settings.is_metrics_open and self._is_addressed(request))

    async def check_observer(self, request: Request, endpoint: Endpoint) -> None:
        """Refuse a request that may not observe. Raises Unauthenticated, TooManyWrongKeys, Forbidden for a foreign `Host`."""
        if not await self.may_observe(request, endpoint):
            if self._settings.is_metrics_open:
                raise Forbidden(
                    "Without a key, this address answers only to localhost, to an IP address and to the setting `host`"
                    " in `Host`: another name may be a page's that was bound to this address",
                    code="unknown_host",
                )
            raise Unauthenticated(NEEDS[endpoint])

    def _is_addressed(self, request: Request) -> bool:
        """Whether the request names this host.

        A loopback address under a foreign name does not count: a page of another site may have bound
        that name to the address (DNS rebinding), and would read the answer.
        """
        server = request.scope.get("server") or ("", None)
        address = _address(server[0])
        if address is None or not address.is_loopback:
            return True
        hosts = request.headers.getlist("host")
        host = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if host is None:
            return False
        name = (host["ipv6"] or host["name"]).lower().removesuffix(".")
        return name in ("localhost", self._own_host) or _address(name) is not None

    def mark(self, kind: str) -> bytes:
        """What sessions of a kind begin under: `admin` of the admin key, `sign-in` of the provider and its client.

        It is keyed, so that a copy of the database is no help in guessing the key.
        """
        settings = self._settings
        secret = hashlib.blake2b((settings.secret or "").encode()).digest()
        of = settings.admin_key if kind == "admin" else f"{settings.access.issuer} {settings.access.client_id}"
        person = f"sameway-{kind}".encode()
        return hashlib.blake2b((of or "").encode(), digest_size=32, key=secret, person=person).digest()

    @property
    def marks(self) -> list[bytes]:
        """Those of the sessions that are open."""
        access = self._settings.access
        return [self.mark("admin")] * access.is_admin_key_taken + [self.mark("sign-in")] * bool(access.client_id)

    @property
    def all_marks(self) -> list[bytes]:
        """Those, and those of agents that people signed in."""
        return [*self.marks, self.mark("agent")]

    async def new_session(self, client: str = "") -> str:
        """A cookie value of the admin key, valid for SESSION_S."""
        return await self.sessions.start(self.mark("admin"), SESSION_S, client=client, actor=ADMIN_KEY)

    async def session(self, request: Request) -> Session | None:
        """The session of a request's cookie."""
        token = request.cookies.get(COOKIE, "")
        session = await self.sessions.find(token, self.marks) if token else None
        if session is not None and session.subject:
            return None if request.app.state.parts.accounts.persons.is_disabled(session.actor) else session
        return session

    async def end_session(self, request: Request) -> None:
        """End the request's session: no copy of its cookie opens a page any more."""
        await self.sessions.end(request.cookies.get(COOKIE, ""))


def _digest(key: str) -> bytes:
    """The digest of a key. All digests have one length, so that comparing them does not show the key's length."""
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read a name as an IP address; None where it is not one."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def client_of(request: Request) -> str:
    """The address of the client; empty where the server does not know it."""
    return request.client.host if request.client is not None else ""


def principal_of(request: Request) -> Principal:
    """Who sent a request that the guard has let in."""
    principal: Principal = request.state.principal
    return principal


Acting = Annotated[Principal, Depends(principal_of)]


def check_same_site(request: Request) -> None:
    """Refuse a change that comes from a page of another site. Raises CrossSite."""
    if request.method in _SAFE_METHODS:
        return
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site not in ("same-origin", "none"):
            raise CrossSite("This change was asked for by another site's page")
        return
    host = _host_of(request.headers.get("origin", ""))
    if not host or host != request.headers.get("host"):
        raise CrossSite("This change did not come from the dashboard's own pages")


class _StrictRequest(Request):
    """A request that refuses a JSON object with the same name twice."""

    async def json(self) -> Any:
        return decode_strictly(await self.body())


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # a bracket that is not closed
        return ""


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
                let_go(error)
                return Response(
                    refusal.body(), refusal.http_status, headers=refusal.headers, media_type="application/json"
                )

        return guarded


def check_query(request: Request) -> None:
    """Refuse a query parameter that the route does not have, or has twice. Raises BadRequest."""
    allowed = [
        parameter.alias
        for parameter in get_flat_params(request.scope["route"].dependant)
        if isinstance(parameter.field_info, Query)
    ]
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in allowed:
            there_is = f"there is {', '.join(allowed)}" if allowed else "this route has none"
            message = f"Unknown query parameter: {name[:100]}; {there_is}"
            raise BadRequest(message, param=name[:100], code="unknown_parameter")
        if names.count(name) > 1:
            raise BadRequest(f"The query has {name} twice: send it once", param=name, code="invalid_value")


def as_api_error(error: Exception) -> ApiError | None:
    """The error that a client sees for an exception; None for an unexpected exception."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            if isinstance(error.body, bytes):  # parsed as JSON only with a JSON content type
                return BadRequest("Send the body as JSON, with `Content-Type: application/json`", code="invalid_body")
            return _bad_request(error)
        case accounts.DoesNotExist():
            return NotFound(sentence(str(error)), code="not_found")
        case accounts.AlreadyExists():
            return StateConflict(sentence(str(error)))
        case accounts.Invalid():
            return BadRequest(f"Invalid {error}", param=error.field, code="invalid_value")
        case RedisError() | CacheUnavailable():
            _log.warning("admin_without_redis", reason=str(error))
            return Unavailable("Redis does not answer; try again shortly", code="redis_unavailable")
        case _ if is_down(error):
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
        nothing = BadRequest("Send a body: a JSON object", code=MissingField.code)
        return MissingField(path, first["input"] or ()) if path else nothing
    if first["type"] == "extra_forbidden":
        return BadRequest(f"Unknown field: {path}", param=path, code="unknown_parameter")
    message = in_json_words(first["msg"].removeprefix("Value error, "))
    return BadRequest(f"{path}: {message}" if path else message, param=path or None, code="invalid_value")
