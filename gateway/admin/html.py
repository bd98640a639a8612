"""Responses of the dashboard: templates, static files, headers, and errors as pages.

jinja2 escapes everything, and the content security policy allows only our own style sheet and
script, so a hostile prompt stays text. No data. Invariant: no page is cached, framed, or scripted
by another site.
"""

import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute

from gateway.admin import format as fmt
from gateway.admin.guard import Guard, Principal, as_api_error, check_same_site
from gateway.admin.roles import OF, TeamNotNamed, allow, may
from gateway.loggers import get_logger
from gateway.wire.errors import Unauthenticated

_FOLDER = Path(__file__).parent
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",  # for browsers that do not know `frame-ancestors`
    "referrer-policy": "same-origin",
}
_STATIC_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_LINK = re.compile(r' (?:href|src|action)="(?=/[^/])')
_log = get_logger(__name__)


class Pages:
    """Renders templates. `clock` gives unix seconds; pages have the current time as `now_s`."""

    def __init__(self, clock: Callable[[], float], version: str) -> None:
        self._clock = clock
        self._version = version
        self.routes: list[tuple[str, re.Pattern[str], str]] = []  # methods, path and name of each page and form
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        for name, function in inspect.getmembers(fmt, inspect.isfunction):
            self.templates.filters[name] = function
        self.templates.filters["ago"] = lambda at_s: fmt.ago(at_s, self._clock())
        self.templates.filters["clock"] = lambda at_s: fmt.clock(at_s, self._clock())
        self.templates.globals.update(form="", problem="", values={}, new_key=None, purge=None, tried=None)
        self.templates.filters["words"] = lambda text: str(text).replace("_", " ").replace("-", " ")

    def render(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
        """Render a page with the values of its template, without the forms and links that are not for its reader."""
        principal: Principal | None = getattr(request.state, "principal", None)
        text = self.templates.get_template(template).render(
            values,
            path=request.url.path,
            query=request.query_params,
            linked=lambda changes: with_query(request, changes),
            here=_here(request),
            base_url=str(request.base_url).rstrip("/"),
            version=self._version,
            now_s=self._clock(),
            nav=[(path, words) for path, words, name in _PAGES if principal is not None and may(principal, name)],
            actor=principal.actor if principal is not None else "",
            is_admin=principal is not None and principal.is_admin,
        )
        if principal is not None and not principal.is_admin:
            text = _FORM.sub(lambda form: form[0] if self._may(principal, "POST", form[1]) else _GONE, text)
            text = _EMPTY.sub(_GONE, _EMPTY.sub(_GONE, text)).replace(_GONE, "")  # what had no more than forms
            text = _ANCHOR.sub(lambda link: link[0] if self._may(principal, "GET", link[1]) else link[2], text)
        if below := request.scope.get("root_path"):  # values are escaped, so these are the templates' own
            text = _LINK.sub(rf"\g<0>{below}", text)
        return HTMLResponse(text, status, headers=_HEADERS)

    def _may(self, principal: Principal, method: str, path: str) -> bool:
        found = [name for methods, route, name in self.routes if method in methods and route.fullmatch(path)]
        return may(principal, found[0]) if found else method == "GET"


def page_route(pages: Pages, guard: Guard) -> type[APIRoute]:
    """The route class of the dashboard.

    It needs a session of someone whose roles allow it, refuses changes from other sites, and shows errors as
    pages. The route's name says what it does and shows, as in the table of roles.
    """

    class PageRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            is_door = self.path in DOORS
            if not is_door and (unknown := set(self.name.split()) - OF.keys()):
                raise LookupError(f"no row of the table of roles has {', '.join(sorted(unknown))}")
            if self.path != "/admin":  # which leads to the first page that one may see
                pages.routes.append((" ".join(self.methods or ()), self.path_regex, "" if is_door else self.name))

            async def guarded(request: Request) -> Response:
                try:
                    check_same_site(request)
                    if not is_door:
                        principal = await guard.enter(request)
                        if principal is None:
                            return to_login(request)
                        if self.path == "/admin" and not may(principal, self.name):
                            own = [path for path, _, name in _PAGES if may(principal, name)]
                            if own:
                                return RedirectResponse(own[0], 303)
                        await allow(request, principal, self.name)
                    return await handle(request)
                except TeamNotNamed as error:
                    is_list = request.method == "GET" and "{team_id}" not in self.path
                    if is_list and error.teams and "team_id" not in request.query_params:
                        return RedirectResponse("?" + with_query(request, {"team_id": str(min(error.teams))}), 303)
                    return pages.render(request, "error.html", error.http_status, error=error)
                except Exception as error:
                    refusal = as_api_error(error)
                    if refusal is None:
                        raise
                    if isinstance(refusal, Unauthenticated):
                        return to_login(request)
                    return pages.render(request, "error.html", refusal.http_status, error=refusal)

            return guarded

    return PageRoute


LOGIN = "/admin/login"
SIGN_IN = "/admin/sign-in"
DOORS = (LOGIN, "/admin/logout", SIGN_IN, SIGN_IN + "/callback")
"""The pages that open without a session."""
_PAGES = (
    ("/admin", "Overview", "overview"),
    ("/admin/requests", "Requests", "requests"),
    ("/admin/teams", "Teams", "teams"),
    ("/admin/savings", "Savings", "savings"),
    ("/admin/cache", "Cache", "cache"),
    ("/admin/quality", "Quality", "quality"),
    ("/admin/deployments", "Deployments", "deployments"),
    ("/admin/models", "Models", "models"),
    ("/admin/batches", "Batches", "batches"),
    ("/admin/ledger", "Ledger", "ledger"),
    ("/admin/audit", "Audit", "audit"),
    ("/admin/sessions", "Sessions", "sessions"),
    ("/admin/me", "My keys", "me"),
    ("/admin/playground", "Playground", "playground"),
)
_FORM = re.compile(r'<form[^>]* method="post" action="([^"#?]*)[^"]*".*?</form>', re.DOTALL)
_ANCHOR = re.compile(r'<a [^>]*href="(/admin[^"#?]*)[^"]*"[^>]*>(.*?)</a>', re.DOTALL)
_GONE = "<!---->"
_TEXT = r"(?:(?!</?section|<table|<ul|<dl|<form|</?details).)*?"
_EMPTY = re.compile(rf"<(section|details)[^>]*>{_TEXT}{_GONE}{_TEXT}</\1>", re.DOTALL)


def to_login(request: Request) -> Response:
    """Redirect to the login form, which leads back to the page if the request was a GET."""
    leads_back = request.method == "GET" and request.url.path != "/admin"
    return RedirectResponse(LOGIN + (f"?next={quote(_here(request), safe='/')}" if leads_back else ""), 303)


_OWN_PATH = re.compile(r"/admin(?:/[A-Za-z0-9_-]+)*(?:\?[!-~]*)?")


def is_own_path(path: str) -> bool:
    """Whether a path leads into the dashboard, in every browser and behind every proxy.

    A path with a dot, a backslash, an escape or an empty part does not count: each may lead elsewhere.
    """
    return _OWN_PATH.fullmatch(path) is not None


def _here(request: Request) -> str:
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path


def with_query(request: Request, changes: Mapping[str, str | None]) -> str:
    """The query of this page with some parameters set, or removed where None."""
    merged = {**dict(request.query_params), **changes}
    return "&".join(f"{quote(name)}={quote(value)}" for name, value in merged.items() if value)


@cache
def static_file(name: str) -> Response | None:
    """A static file with its type; None for an unknown name."""
    path = _FOLDER / "static" / name
    if path.parent != _FOLDER / "static" or path.suffix not in _STATIC_TYPES or not path.is_file():
        return None
    headers = {"cache-control": "public, max-age=300", "x-content-type-options": "nosniff"}
    return Response(path.read_bytes(), media_type=_STATIC_TYPES[path.suffix], headers=headers)
