"""The gateway protocol of coding agents: how Claude Code and `sameway login` sign a person in.

Sources: RFC 8414 (metadata), RFC 8628 (device grant), RFC 7009 (revocation), and the protocol as
Claude Code 2.1.197 has it: https://code.claude.com/docs/en/claude-apps-gateway. The page for the code
is one of the dashboard: it needs a person who signed in there. Invariants: without `access.client_id`
none of these routes is there; a code counts only by a POST of our own page.
"""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from gateway.access.agents import CODE_S, INTERVAL_S, CodeRequest, GrantRefused, plain
from gateway.access.people import team_of
from gateway.accounts.audit import AGENT_SIGNED_IN
from gateway.accounts.database import is_down
from gateway.admin.forms import read_form
from gateway.admin.guard import client_of, principal_of
from gateway.admin.guesses import network_of
from gateway.admin.html import Pages
from gateway.admin.parts import AdminParts
from gateway.admin.sign_in import public_url
from gateway.wire.errors import Forbidden, RateLimited

_NONE_WAITS = "No sign-in waits for this code: it is mistyped, was used, or is over ten minutes old."
_GRANT = "urn:ietf:params:oauth:grant-type:device_code"


def agent_routes(parts: AdminParts) -> list[BaseRoute]:
    """What agents ask for without a page."""
    router = APIRouter(include_in_schema=False)
    _add_begin(router, parts)
    _add_tokens(router, parts)
    _add_policy(router, parts)
    return router.routes


async def _answered(parts: AdminParts, grant: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    """What a grant gives, or why not, in OAuth's shape."""
    if not parts.settings.access.client_id:
        raise HTTPException(404)
    try:
        return _json(await grant())
    except GrantRefused as error:
        return _json({"error": error.error, "error_description": str(error)}, error.status)
    except Exception as error:
        if not isinstance(error, RedisError) and not is_down(error):
            raise
        return _json({"error": "temporarily_unavailable", "error_description": "try again shortly"}, 503)


def _add_begin(router: APIRouter, parts: AdminParts) -> None:
    @router.get("/.well-known/oauth-authorization-server")
    async def metadata(request: Request) -> Response:
        async def said() -> dict[str, Any]:
            root = public_url(parts, request)
            return {
                "issuer": root,
                "device_authorization_endpoint": f"{root}/oauth/device_authorization",
                "token_endpoint": f"{root}/oauth/token",
                "revocation_endpoint": f"{root}/oauth/revoke",
                "grant_types_supported": [_GRANT, "refresh_token"],
                "response_types_supported": [],
                "token_endpoint_auth_methods_supported": ["none"],
                "revocation_endpoint_auth_methods_supported": ["none"],
            }

        return await _answered(parts, said)

    @router.post("/oauth/device_authorization")
    async def begin(request: Request) -> Response:
        async def begun() -> dict[str, Any]:
            client = client_of(request)
            device_code, user_code = await parts.guard.agents.begin(client, network_of(client))
            page = f"{public_url(parts, request)}/admin/device"
            return {
                "device_code": device_code,
                "user_code": user_code,
                "verification_uri": page,
                "verification_uri_complete": f"{page}?user_code={user_code}",
                "expires_in": CODE_S,
                "interval": INTERVAL_S,
            }

        return await _answered(parts, begun)


def _add_tokens(router: APIRouter, parts: AdminParts) -> None:
    @router.post("/oauth/token")
    async def token(request: Request) -> Response:
        form = await read_form(request)

        async def tokens() -> dict[str, Any]:
            match form.get("grant_type"), form.get("device_code"), form.get("refresh_token"):
                case str(kind), str(code), _ if kind == _GRANT:
                    return await parts.guard.agents.poll(code)
                case "refresh_token", _, str(refresh):
                    return await parts.guard.agents.refresh(refresh)
                case kind, _, _ if kind in (_GRANT, "refresh_token", None):
                    raise GrantRefused("invalid_request", "expected grant_type and device_code or refresh_token")
            raise GrantRefused("unsupported_grant_type", f"expected {_GRANT} or refresh_token")

        return await _answered(parts, tokens)

    @router.post("/oauth/revoke")
    async def revoke(request: Request) -> Response:
        form = await read_form(request)

        async def revoked() -> dict[str, Any]:
            await parts.guard.agents.revoke(form.get("token", ""))
            return {}

        return await _answered(parts, revoked)


def _add_policy(router: APIRouter, parts: AdminParts) -> None:
    settings = parts.settings

    @router.get("/managed/settings")
    async def managed_settings(request: Request) -> Response:
        if not settings.access.client_id:
            raise HTTPException(404)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or await parts.guard.agents.session(given.strip()) is None:
            error = {"type": "authentication_error", "message": "The sign-in has ended: sign in again by /login"}
            return _json({"type": "error", "error": error}, 401)
        if not (policy := settings.access.claude_settings):
            raise HTTPException(404)  # no policy, which {} would be
        checksum = hashlib.sha256(msgspec.json.encode(policy, order="sorted")).hexdigest()
        etag = f'"{checksum}"'
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={"etag": etag})
        body = {"uuid": checksum[:32], "checksum": checksum, "settings": policy}
        return _json(body, headers={"etag": etag})


def add_device_page(router: APIRouter, parts: AdminParts, pages: Pages) -> None:
    """The page where a person lets an agent in, on the dashboard's `router`."""

    guesses = parts.guard.guesses

    def page(request: Request, status: int = 200, **values: Any) -> Response:
        return pages.render(request, "device.html", status, **{"outcome": "", "agent": None, "code": ""} | values)

    async def waiting(request: Request, code: str) -> CodeRequest | None:
        """Who waits with a code; a wrong code is counted. Raises RateLimited."""
        client = client_of(request)
        if wait_s := await guesses.wait_s("device", client):
            raise RateLimited("Too many wrong codes came from your address: wait, and try again", wait_s)
        if (found := await parts.guard.agents.find(code)) is None:
            await guesses.add("device", client)
        return found

    @router.get("/device", name="device")
    async def device(request: Request) -> Response:
        if not (code := plain(request.query_params.get("user_code", ""))[:8]):
            return page(request)
        if (agent := await waiting(request, code)) is None:
            return page(request, 400, code=code, problem=_NONE_WAITS)
        is_near = network_of(agent.client) == network_of(client_of(request))
        return page(request, code=code, agent=agent, is_near=is_near)

    @router.post("/device", name="device")
    async def decide(request: Request) -> Response:
        form, access, session = await read_form(request), parts.settings.access, await parts.guard.session(request)
        code, is_allowed = plain(form.get("user_code", ""))[:8], form.get("decision") == "allow"
        if session is None or not session.subject:
            raise Forbidden("The admin key has no team: sign in as a person, and open the page again")
        team_of(session.groups, access, parts.accounts.team_ids)
        person = {name: getattr(session, name) for name in ("actor", "subject", "sid")} | {"groups": [*session.groups]}
        agent = await waiting(request, code)
        if agent is not None and is_allowed:
            await parts.audit.add(parts.audit_row(AGENT_SIGNED_IN, agent.client, principal_of(request)))
        if agent is None or not await parts.guard.agents.decide(code, person if is_allowed else None):
            return page(request, 400, code=code, problem=_NONE_WAITS)
        await guesses.forget("device", client_of(request))
        return page(request, outcome="allowed" if is_allowed else "denied")


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    fields = {"cache-control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(body), status, fields, "application/json")
