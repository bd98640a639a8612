"""The doors of the dashboard: login with the admin key, sign-in at the OpenID provider, and logout.

A sign-in that is under way is a cookie with a moment and random bytes; its `state`, `nonce` and PKCE
verifier are digests of these under a key of the gateway, so no worker keeps anything until the provider
has answered. Sources: OpenID Connect Core 1.0 section 3.1, RFC 9700 (OAuth 2.0 security). Invariants: a
sign-in ends in the browser in which it began, within `_SIGN_IN_S`, and once; who has no role here gets no
session; each session's begin and end is in the audit log.
"""

import base64
import hashlib
import hmac
import secrets

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from gateway.access.people import ADMIN_KEY, groups_of, name_of, refusal_of, roles_of
from gateway.access.provider import ProviderAway, TokenRefused
from gateway.accounts.audit import SIGNED_IN, SIGNED_OUT
from gateway.accounts.persons import ends_of
from gateway.admin.forms import read_form
from gateway.admin.guard import (
    ADMIN_ALONE,
    COOKIE,
    SESSION_S,
    Endpoint,
    Principal,
    TooManyWrongKeys,
    client_of,
)
from gateway.admin.html import LOGIN, SIGN_IN, Pages, is_own_path
from gateway.admin.parts import AdminParts
from gateway.loggers import get_logger
from gateway.wire.errors import Unauthenticated

_COOKIE = "sameway_sign_in"
_SIGN_IN_S = 600
_log = get_logger()


def add_doors(router: APIRouter, parts: AdminParts, pages: Pages) -> None:
    """Login, sign-in and logout, on the dashboard's `router`."""
    _add_login(router, parts, pages)
    _add_sign_in(router, parts, pages)


def _add_login(router: APIRouter, parts: AdminParts, pages: Pages) -> None:
    guard = parts.guard

    @router.get("/login")
    async def login_form(request: Request) -> Response:
        if await guard.session(request) is not None:
            return RedirectResponse("/admin", 303)
        return _door(parts, pages, request, 200, "")

    @router.post("/login")
    async def login(request: Request) -> Response:
        fields = await read_form(request)
        try:
            await guard.check_key(request, Endpoint.LOGIN, fields.get("key", ""))
        except (Unauthenticated, TooManyWrongKeys) as error:
            refusal = _door(parts, pages, request, error.http_status, error.message)
            refusal.headers.update(error.headers)
            return refusal
        await _note(parts, request, SIGNED_IN, ADMIN_KEY)
        reply = RedirectResponse(_target(request.query_params.get("next", "")), 303)
        _set_cookie(request, reply, COOKIE, await guard.new_session(client_of(request)), SESSION_S)
        return reply

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        session = await guard.session(request)
        await guard.end_session(request)
        url = None
        if session is not None:
            await _note(parts, request, SIGNED_OUT, session.actor)
            if session.subject:
                url = await parts.guard.provider.logout_url(f"{public_url(parts, request)}{LOGIN}")
        reply: Response = RedirectResponse(LOGIN, 303)
        if url is not None:  # a page, as `form-action` of our own pages allows no redirect elsewhere
            reply = pages.render(request, "away.html", url=url, words="You are logged out here.")
        reply.delete_cookie(COOKIE, path="/admin")
        return reply


def _add_sign_in(router: APIRouter, parts: AdminParts, pages: Pages) -> None:
    guard, access = parts.guard, parts.settings.access

    @router.get("/sign-in")
    async def begin(request: Request) -> Response:
        if not access.client_id:
            return RedirectResponse(LOGIN, 303)
        begun = f"{int(parts.clock())}-{secrets.token_urlsafe(32)}"
        challenge = hashlib.sha256(_derived(parts, begun, "verifier").encode()).digest()
        try:
            url = await parts.guard.provider.authorization_url(
                _callback(parts, request),
                state=_derived(parts, begun, "state"),
                nonce=_derived(parts, begun, "nonce"),
                challenge=_text(challenge),
            )
        except ProviderAway as error:
            return _door(parts, pages, request, 503, refusal_of(error).message)
        reply = RedirectResponse(url, 303)
        target = _target(request.query_params.get("next", ""))
        # lax, since the browser comes back from the provider's site
        _set_cookie(request, reply, _COOKIE, f"{begun}~{target}", _SIGN_IN_S, "lax")
        return reply

    @router.get("/sign-in/callback")
    async def callback(request: Request) -> Response:
        begun, _, target = request.cookies.get(_COOKIE, "").partition("~")
        try:
            token = await _signed_in(parts, request, begun)
        except (TokenRefused, ProviderAway) as error:
            _log.warning("sign_in_refused", client=client_of(request), reason=str(error))
            refusal = refusal_of(error)
            reply = _door(parts, pages, request, refusal.http_status, refusal.message)
        else:
            await guard.end_session(request)
            session = await guard.sessions.find(token, guard.marks)
            await _note(parts, request, SIGNED_IN, session.actor if session is not None else "")
            # a page, as a browser sends no strict cookie along redirects that began elsewhere
            reply = pages.render(request, "away.html", url=_target(target), words="You are signed in.")
            _set_cookie(request, reply, COOKIE, token, SESSION_S)
        reply.delete_cookie(_COOKIE, path=SIGN_IN)
        return reply


def _door(parts: AdminParts, pages: Pages, request: Request, status: int, problem: str) -> Response:
    access = parts.settings.access
    ways = {"has_sign_in": bool(access.client_id), "has_key": access.is_admin_key_taken}
    return pages.render(request, "login.html", status, problem=problem, **ways)


async def _note(parts: AdminParts, request: Request, action: str, actor: str) -> None:
    who = Principal(actor, client_of(request), "dashboard", ADMIN_ALONE)
    await parts.audit.add(parts.audit_row(action, "", who))


async def end_sessions(parts: AdminParts, request: Request) -> Response:
    """A back-channel logout: the provider's token ends a person's sessions (Back-Channel Logout 1.0)."""
    guard, token = parts.guard, (await read_form(request)).get("logout_token", "")
    try:
        if not parts.settings.access.client_id:
            raise TokenRefused("nobody signs in here")
        subject, sid, at_s = await parts.guard.provider.ended(token)
        if not await guard.sessions.use_once(token, guard.mark("used"), _SIGN_IN_S):
            raise TokenRefused("it was used before")
    except (TokenRefused, ProviderAway) as error:
        _log.warning("logout_refused", client=client_of(request), reason=str(error))
        return Response(status_code=400, headers={"cache-control": "no-store"})
    marks, access = [guard.mark("sign-in"), guard.mark("agent")], parts.settings.access
    subjects = {one.subject for one in await guard.sessions.open_ones(marks) if sid and one.sid == sid}
    names = ends_of({subject} - {""} | subjects, sid)
    await parts.accounts.end_tokens(names, at_s, access.token_s_max + access.leeway_s)
    ended = await guard.sessions.end_all(marks, **({"sid": sid} if sid else {"subject": subject}))
    _log.info("sessions_ended", by="the provider", sessions=ended)
    return Response(status_code=200, headers={"cache-control": "no-store"})


async def _signed_in(parts: AdminParts, request: Request, begun: str) -> str:
    """The token of a new session for whoever comes back from the provider. Raises TokenRefused, ProviderAway."""
    guard, access, answer = parts.guard, parts.settings.access, request.query_params
    at_s = begun.partition("-")[0]
    is_of_time = at_s.isdecimal() and len(at_s) < 12 and 0 <= parts.clock() - int(at_s) <= _SIGN_IN_S
    is_ours = hmac.compare_digest(answer.get("state", "").encode(), _derived(parts, begun, "state").encode())
    if not access.client_id or not is_of_time or not is_ours:
        raise TokenRefused("this browser did not begin it within the last ten minutes")
    if not (code := answer.get("code", "")):
        raise TokenRefused(f"the provider says {answer.get('error', 'nothing')[:60]!r}")
    claims = await parts.guard.provider.exchange(
        code,
        _callback(parts, request),
        verifier=_derived(parts, begun, "verifier"),
        nonce=_derived(parts, begun, "nonce"),
        issuer=answer.get("iss"),
    )
    actor, groups = name_of(claims, access), groups_of(claims, access)
    subject, sid = claims.get("sub"), claims.get("sid", "")
    if not isinstance(subject, str) or not subject or not isinstance(sid, str):
        raise TokenRefused("it has no subject")
    if parts.accounts.persons.is_disabled(actor):
        raise TokenRefused(f"{actor} is disabled here: ask whoever runs this gateway")
    if not roles_of(groups, access, parts.accounts.team_ids):
        raise TokenRefused(f"none of the groups of {actor} has a role here: ask whoever runs this gateway for one")
    if not await guard.sessions.use_once(begun, guard.mark("used"), 2 * _SIGN_IN_S):
        raise TokenRefused("this sign-in was used before")
    parts.accounts.saw(actor)
    await parts.accounts.save_seen()
    facts = {"client": client_of(request), "actor": actor, "subject": subject, "sid": sid, "groups": list(groups)}
    return await guard.sessions.start(guard.mark("sign-in"), SESSION_S, **facts)


def public_url(parts: AdminParts, request: Request) -> str:
    """Where browsers reach the gateway: a `Host` that others choose does not say where the provider sends them."""
    return (parts.settings.access.public_url or str(request.base_url)).rstrip("/")


def _callback(parts: AdminParts, request: Request) -> str:
    return f"{public_url(parts, request)}{SIGN_IN}/callback"


def _derived(parts: AdminParts, begun: str, use: str) -> str:
    """A secret of one sign-in, which only the gateway can make; another provider's would differ."""
    return _text(hmac.new(parts.guard.mark("sign-in"), f"{use} {begun}".encode(), hashlib.sha256).digest())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _target(path: str) -> str:
    return path if is_own_path(path) else "/admin"


def _set_cookie(request: Request, reply: Response, name: str, value: str, age_s: int, samesite: str = "strict") -> None:
    path = "/admin" if name == COOKIE else SIGN_IN
    is_tls = request.url.scheme == "https"
    reply.set_cookie(name, value, age_s, path=path, secure=is_tls, httponly=True, samesite=samesite)  # type: ignore[arg-type]
