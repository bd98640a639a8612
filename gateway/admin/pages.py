"""The dashboard: /admin and the pages below it, on the same values as the API.

Each page names its JSON twin. Decides what each page shows; templates and the style sheet decide
its looks.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from starlette.routing import BaseRoute

from gateway.accounts.ledger import Group, LedgerFilter
from gateway.admin import (
    budgets,
    cache_views,
    charts,
    configuration,
    misses,
    queries,
    savings_views,
    teams,
    verifier_views,
    views,
)
from gateway.admin.agents import add_device_page, agent_routes
from gateway.admin.forms import Render, add_forms
from gateway.admin.guard import principal_of
from gateway.admin.html import Pages, page_route, static_file, with_query
from gateway.admin.models import DeploymentOut, StatsOut
from gateway.admin.parts import AdminParts
from gateway.admin.roles import may
from gateway.admin.sign_in import add_doors, end_sessions
from gateway.settings import NEAR_SIMILARITY_MIN, Role, is_pattern
from gateway.telemetry.summary import StatsWindow
from gateway.wire.errors import NotFound

_ROUTES_PER_PAGE = 30
_LEDGER_PER_PAGE = 30
_SUMS_SHOWN = 24
_DAYS_SHOWN = 400
_MODELS_SHOWN = 15
_AUDIT_PER_PAGE = 100
_PEOPLE_SHOWN = 200
_TEAMS_PER_PAGE = 20
_LATEST = 6


def page_routes(parts: AdminParts) -> list[BaseRoute]:
    """Every page and form of the dashboard, and its static files."""
    pages = Pages(parts.clock, parts.version)
    router = APIRouter(prefix="/admin", route_class=page_route(pages, parts.guard), include_in_schema=False)
    _add_history(router, parts, pages)
    renders = _add_overview(router, parts, pages) | _add_teams(router, parts, pages) | _add_cache(router, parts, pages)
    renders |= _add_people(router, parts, pages)
    for name in ("cache", "deployments", "me", "models", "sessions"):
        router.add_api_route(f"/{name}", _shown(renders[name]), name=name)
    add_forms(router, parts, renders)
    add_doors(router, parts, pages)
    add_device_page(router, parts, pages)

    files = APIRouter(include_in_schema=False)

    @files.get("/admin/static/{name}")
    async def static(name: str) -> Response:
        return static_file(name) or Response(status_code=404)

    @files.post("/admin/sign-in/logout")
    async def logout_of_provider(request: Request) -> Response:
        return await end_sessions(parts, request)

    @files.get("/favicon.ico")
    async def favicon() -> Response:
        return static_file("favicon.svg") or Response(status_code=404)

    return [*agent_routes(parts), *files.routes, *router.routes]


def _shown(render: Render) -> Callable[[Request], Awaitable[Response]]:
    """A page as it is before a form of it was sent."""

    async def page(request: Request) -> Response:
        return await render(request)

    return page


def _add_overview(router: APIRouter, parts: AdminParts, pages: Pages) -> dict[str, Render]:
    @router.get("")
    async def overview(request: Request, window: StatsWindow = StatsWindow.DAY) -> Response:
        page = await views.overview(parts, window)
        teams = await parts.accounts.list_teams()
        return pages.render(
            request,
            "overview.html",
            overview=page,
            stats=page.stats,
            window=window,
            windows=list(StatsWindow),
            model=next(iter(parts.settings.models)),
            team_id=teams[0].id if teams else None,
            deployments=parts.deployments(),
            charts=charts_of(page.stats),
            verifier=await views.or_none(verifier_views.cache_verifier(parts, principal_of(request))),
        )

    async def render_deployments(request: Request, status: int = 200, **form: Any) -> Response:
        every, aliases = (await views.deployments(parts))["deployments"], dict[str, list[DeploymentOut]]()
        for view in every:
            aliases.setdefault(view.alias, []).append(view)
        chosen, meant = request.query_params.get("model"), form.get("values", {}).get("name")
        shown = [alias for alias in aliases if chosen in (None, "", alias)]
        if len(shown) > _MODELS_SHOWN:  # what a form was about, then what is in trouble
            rank = lambda view: (view.name != meant, view.is_available is not False)  # noqa: E731
            shown.sort(key=lambda alias: min(map(rank, aliases[alias])))
        return pages.render(
            request,
            "deployments.html",
            status,
            names={alias: alias for alias in aliases},
            aliases={alias: aliases[alias] for alias in shown[:_MODELS_SHOWN]},
            hosts=await views.or_none(parts.hosts.all()),
            parts=[part for part in parts.healths() if part.name not in {view.name for view in every}],
            **form,
        )

    @router.get("/playground")
    async def playground(request: Request) -> Response:
        names = [name for name in parts.settings.models if not is_pattern(name)]
        return pages.render(request, "playground.html", models=names)

    return {"deployments": render_deployments}


def charts_of(stats: StatsOut | None) -> dict[str, Any]:
    """The charts of one window; none without its counts."""
    if stats is None:
        return {}
    return {
        "kinds": charts.kinds_chart(stats),
        "bar": charts.kinds_bar(stats.total),
        "answers": charts.kinds_bar(stats.total, charts.ANSWERS),
        "money": charts.money_chart(stats),
        "ttft": charts.ttft_chart(stats),
    }


def _add_history(router: APIRouter, parts: AdminParts, pages: Pages) -> None:
    @router.get("/requests")
    async def requests(request: Request, cursor: str = "", after: str = "") -> Response:
        """The page, or only the list of those that came `after`."""
        where = _route_filter(request)
        shown = await _shown_routes(parts, request, where, cursor, after)
        if after:
            return pages.render(request, "routes.html", **shown)
        return pages.render(
            request,
            "requests.html",
            **shown,
            is_filtered=where != queries.RouteFilter(asked_by="caller"),
            choices=await views.route_choices(parts, _among(request, where.team_id)),
            models=parts.settings.names,
        )

    @router.get("/savings")
    async def savings(request: Request) -> Response:
        team_id, model = _team_id(request), request.query_params.get("model", "")
        where = savings_views.savings_filter(parts, team_id, model, **queries.days_of(request.query_params))
        sums = await savings_views.savings(parts, where)
        certified = await views.or_none(cache_views.certificate(parts, team_id, model))
        return pages.render(
            request,
            "savings.html",
            savings=sums,
            bars=charts.waterfall(sums),
            chart=charts.savings_chart(sums),
            team_id=team_id,
            model=model,
            days=_shown_days(parts, request, where),
            twin=_twin(where),
            by_team=[(one, with_query(request, {"team_id": str(one.team_id)})) for one in sums.by_team],
            certificates=[one for one in certified["certificates"] if one.hits] if certified is not None else None,
            choices=await views.ledger_choices(parts, _among(request, team_id)),
        )

    @router.get("/ledger")
    async def ledger(request: Request, cursor: str = "") -> Response:
        query = request.query_params
        model, deployment = query.get("model"), query.get("deployment")
        where = queries.ledger_filter(_team_id(request), model=model, deployment=deployment, **queries.days_of(query))
        by = query.get("by", "")
        if by in ("user", "tag", "region"):  # whose sums are kept by team and day alone
            where = replace(where, alias=None, deployment=None, tag=query.get("tag") or None if by == "tag" else None)
        shown = _DAYS_SHOWN if by == "day" else _SUMS_SHOWN
        sums = await views.ledger_sums(parts, ([queries.GROUPS[by]], where), shown) if by in queries.GROUPS else None
        page = await views.ledger(parts, where, cursor or None, _LEDGER_PER_PAGE)
        totals = await parts.ledger.totals([Group.DAY], where)
        return pages.render(
            request,
            "ledger.html",
            rows=page["rows"],
            older=_older(request, page["cursor"]),
            by=by,
            groups=queries.GROUPS,
            sums=sums,
            days=_shown_days(parts, request, where),
            twin=_twin(where, by=by, tag=where.tag) if sums else _twin(where),
            cursor=cursor,
            where=where,
            is_filtered=where != LedgerFilter(),
            requests=sum(total.requests for total in totals),
            cost_microusd=sum(total.cost_microusd for total in totals),
            choices=await views.ledger_choices(parts, _among(request, where.team_id)),
        )


async def _shown_routes(
    parts: AdminParts, request: Request, where: queries.RouteFilter, cursor: str, after: str
) -> dict[str, Any]:
    """The values of the list of requests."""
    page = await views.routes(parts, principal_of(request), where, cursor, after, _ROUTES_PER_PAGE)
    return {
        "routes": page["routes"],
        "newest": page["newest"],
        "older": _older(request, page["cursor"]),
        "where": where,
        "prices": {one.name: one for one in parts.deployments()},
        "advice": {reason: misses.CAUSES[cause] for reason, cause in misses.CAUSE_OF.items()},
    }


def _older(request: Request, cursor: str | int | None) -> str | None:
    """The query of the next page; None where this one is the last."""
    return with_query(request, {"cursor": str(cursor)}) if cursor else None


def _shown_days(parts: AdminParts, request: Request, where: LedgerFilter) -> dict[str, Any]:
    """The first and last day of a filter, and the periods that a page offers, each with its query and whether it is shown."""
    bounds = (where.from_ms, where.until_ms and where.until_ms - 1)
    shown = tuple(None if at is None else datetime.fromtimestamp(at / 1000, UTC).date() for at in bounds)
    offered = [
        (words, with_query(request, {"from": str(days[0]), "until": str(days[1]), "cursor": None}), days == shown)
        for words, days in queries.periods(parts.clock()).items()
    ]
    return {"first": shown[0], "last": shown[1], "offered": offered}


def _twin(where: LedgerFilter, **more: str | None) -> str:
    """The query of the API for the rows of a page."""
    bounds = {"from_s": where.from_ms and where.from_ms // 1000, "until_s": where.until_ms and where.until_ms // 1000}
    named = {"team_id": where.team_id, "model": where.alias, "deployment": where.deployment, **more, **bounds}
    return urlencode({name: value for name, value in named.items() if value not in (None, "")})


def _route_filter(request: Request) -> queries.RouteFilter:
    """The filter in the query; unknown values filter nothing."""
    query, request_id = request.query_params, request.query_params.get("request_id", "").strip()

    def known(name: str, values: Any) -> Any:
        return query[name] if query.get(name) in get_args(values) else ""

    askers: dict[str, queries.Asker] = {"sameway": "sameway", "all": ""}
    return queries.RouteFilter(
        team_id=_team_id(request),
        model=query.get("model", ""),
        cache=known("cache", queries.CacheKind),
        deployment=query.get("deployment", ""),
        outcome=known("outcome", queries.RouteOutcome),
        request_id=request_id,
        asked_by=askers.get(query.get("asked_by", "all" if request_id else ""), "caller"),
    )


def _among(request: Request, team_id: int | None) -> set[int] | None:
    """The teams whose names the filters of a page offer; None: all."""
    principal = principal_of(request)
    if team_id is None or may(principal, "list_teams"):
        return None
    return {team_id, *principal.roles.get(Role.TEAM_ADMIN, ())}


def _team_id(request: Request) -> int | None:
    """The team in the query; None where no id can be like that."""
    return queries.id_of(request.query_params.get("team_id"))


def _add_teams(router: APIRouter, parts: AdminParts, pages: Pages) -> dict[str, Render]:
    async def render_teams(
        request: Request, status: int = 200, name: str = "", cursor: int = 0, **form: Any
    ) -> Response:
        page = await teams.teams(parts, name, cursor, _TEAMS_PER_PAGE + 1)
        shown = page[:_TEAMS_PER_PAGE]
        stats = await views.or_none(views.stats(parts, StatsWindow.DAY))
        return pages.render(
            request,
            "teams.html",
            status,
            teams=shown,
            name=name,
            more=with_query(request, {"cursor": str(shown[-1].id)}) if len(page) > len(shown) else None,
            holds=budgets.holds(parts),
            tallies={tally.team_id: tally for tally in stats.by_team} if stats is not None else None,
            **form,
        )

    async def render_team(request: Request, team_id: int, status: int = 200, **form: Any) -> Response:
        team = await teams.get_team(parts, team_id)
        stats = await views.or_none(views.stats(parts, StatsWindow.DAY, team_id))
        certified = await views.or_none(cache_views.certificate(parts, team_id))
        totals = await parts.ledger.totals([Group.ALIAS, Group.DEPLOYMENT], LedgerFilter(team_id=team_id))
        by_model = [total for total in totals if total.deployment]
        return pages.render(
            request,
            "team.html",
            status,
            team=team,
            holds=budgets.holds(parts),
            keys=sorted(team.keys, key=lambda key: not key.is_active),
            stats=stats,
            certificates=certified["certificates"] if certified is not None else [],
            charts=charts_of(stats),
            spent=sorted(by_model, key=lambda total: -total.cost_microusd),
            models=parts.settings.names,
            **form,
        )

    @router.get("/teams", name="teams")
    async def teams_page(
        request: Request,
        name: Annotated[str, Query(max_length=200)] = "",
        cursor: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    ) -> Response:
        return await render_teams(request, name=name, cursor=cursor)

    @router.get("/teams/{team_id}")
    async def team(request: Request, team_id: int) -> Response:
        if team_id >= 2**31:
            raise NotFound(f"There is no team {team_id}", code="not_found")
        return await render_team(request, team_id)

    return {"teams": render_teams, "team": render_team}


def _add_cache(router: APIRouter, parts: AdminParts, pages: Pages) -> dict[str, Render]:
    async def render_cache(request: Request, status: int = 200, **form: Any) -> Response:
        sizes = await cache_views.cache(parts)
        reader = principal_of(request)
        near_misses = await views.near_misses(parts, reader, queries.RouteFilter(), limit=10)
        stats = await views.or_none(views.stats(parts, StatsWindow.DAY))
        return pages.render(
            request,
            "cache.html",
            status,
            cache=sizes,
            near=near_misses["routes"],
            causes=(await misses.cache_misses(parts, reader)).causes,
            stats=stats,
            charts=charts_of(stats),
            teams=await parts.accounts.list_teams(),
            models=list(parts.settings.models),
            past=await views.ledger_choices(parts),
            settings=parts.settings.cache,
            log_prompts=parts.settings.log_prompts,
            near_similarity_min=NEAR_SIMILARITY_MIN,
            **form,
        )

    @router.get("/quality")
    async def quality(request: Request) -> Response:
        reader = principal_of(request)
        latest = await views.routes(parts, reader, queries.RouteFilter(cache="semantic"), limit=_LATEST)
        return pages.render(
            request,
            "quality.html",
            certificates=(await cache_views.certificate(parts))["certificates"],
            verifier=await verifier_views.cache_verifier(parts, reader),
            wrong=(await cache_views.wrong(parts, reader))["wrong"],
            latest=latest["routes"],
            settings=parts.settings.cache,
            log_prompts=parts.settings.log_prompts,
        )

    async def render_answer(request: Request, **values: Any) -> Response:
        return pages.render(request, "answer.html", **values)

    async def render_models(request: Request, status: int = 200, **form: Any) -> Response:
        configured = await configuration.list_models(parts)
        return pages.render(request, "models.html", status, configured=configured, **form)

    @router.get("/batches")
    async def batches(request: Request, cursor: Annotated[str, Query(max_length=100)] = "") -> Response:
        page = await views.batches(parts, cursor, _AUDIT_PER_PAGE)
        return pages.render(request, "batches.html", batches=page["batches"], older=_older(request, page["cursor"]))

    @router.get("/audit")
    async def audit(request: Request, cursor: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None) -> Response:
        page = await cache_views.audit(parts, cursor, _AUDIT_PER_PAGE)
        days = parts.settings.access.audit_days
        return pages.render(
            request, "audit.html", rows=page["rows"], older=_older(request, page["cursor"]), kept_days=days
        )

    return {"cache": render_cache, "answer": render_answer, "models": render_models}


def _add_people(router: APIRouter, parts: AdminParts, pages: Pages) -> dict[str, Render]:
    async def render_me(request: Request, status: int = 200, **form: Any) -> Response:
        mine = await teams.me(parts, principal_of(request))
        return pages.render(request, "me.html", status, me=mine, models=parts.settings.names, **form)

    async def render_sessions(request: Request, status: int = 200, **form: Any) -> Response:
        listed, people = await teams.list_sessions(parts), (await teams.list_people(parts))["people"]
        first = sorted(people, key=lambda one: (not one["is_disabled"], -one["keys"]))[:_PEOPLE_SHOWN]
        shown = {"sessions": listed["sessions"], "people": first, "more": len(people) - len(first)}
        return pages.render(request, "sessions.html", status, **shown, **form)

    return {"me": render_me, "sessions": render_sessions}
