"""The dashboard: /admin and the pages below it, on the same values as the API.

Each page names its JSON twin. Decides what each page shows; templates and the style sheet decide
its looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.routing import BaseRoute

from gateway.accounts import Group, LedgerFilter
from gateway.admin import budget_views, cache_views, misses, savings_views, views
from gateway.admin.charts import (
    answers_bar,
    kinds_bar,
    kinds_chart,
    money_chart,
    savings_chart,
    ttft_chart,
    waterfall,
)
from gateway.admin.forms import Render, add_forms, add_session_forms
from gateway.admin.html import Pages, page_route, static_file, with_query
from gateway.admin.models import StatsOut
from gateway.admin.parts import AdminParts
from gateway.admin.views import RouteFilter
from gateway.settings import NEAR_SIMILARITY_MIN
from gateway.telemetry.summary import StatsWindow
from gateway.wire.errors import NotFound

_ROUTES_PER_PAGE = 50
_LEDGER_PER_PAGE = 50
_SUMS_PER_PAGE = 200
_AUDIT_PER_PAGE = 100
_TEAMS_PER_PAGE = 100
_LATEST = 6
_SPANS = {"1": "today", "7": "7 days", "30": "30 days", "90": "90 days", "365": "a year"}
_NO_FORM: dict[str, Any] = {"form": "", "problem": "", "values": {}, "new_key": None, "purge": None, "tried": None}


def page_routes(parts: AdminParts, operations: Mapping[str, Callable[..., Any]]) -> list[BaseRoute]:
    """Every page and form of the dashboard, and its static files. `operations` are the API's, by method and path."""
    pages = Pages(parts.clock, parts.version)
    router = APIRouter(prefix="/admin", route_class=page_route(pages, parts.guard), include_in_schema=False)
    _add_history(router, parts, pages)
    renders = _add_overview(router, parts, pages) | _add_teams(router, parts, pages) | _add_cache(router, parts, pages)
    add_forms(router, parts, renders, operations)
    add_session_forms(router, parts.guard, pages)

    files = APIRouter(include_in_schema=False)

    @files.get("/admin/static/{name}")
    async def static(name: str) -> Response:
        return static_file(name) or Response(status_code=404)

    @files.get("/favicon.ico")
    async def favicon() -> Response:
        return static_file("favicon.svg") or Response(status_code=404)

    return [*files.routes, *router.routes]


def _add_overview(router: APIRouter, parts: AdminParts, pages: Pages) -> dict[str, Render]:
    @router.get("")
    async def overview(request: Request, window: StatsWindow = StatsWindow.DAY) -> Response:
        found = await views.overview(parts, window)
        teams = await parts.accounts.list_teams()
        return pages.render(
            request,
            "overview.html",
            overview=found,
            stats=found.stats,
            window=window,
            windows=list(StatsWindow),
            model=next(iter(parts.settings.models)),
            team_id=teams[0].id if teams else None,
            deployments=parts.deployments(),
            charts=charts_of(found.stats) if found.stats is not None else {},
        )

    async def render_deployments(request: Request, status: int = 200, **form: Any) -> Response:
        found = await views.deployments(parts)
        return pages.render(
            request,
            "deployments.html",
            status,
            aliases={
                alias: [one for one in found if one.alias == alias] for alias in dict.fromkeys(d.alias for d in found)
            },
            parts=[part for part in parts.healths() if part.name not in {view.name for view in found}],
            settings=parts.settings,
            **{**_NO_FORM, **form},
        )

    @router.get("/deployments")
    async def deployments(request: Request) -> Response:
        return await render_deployments(request)

    return {"deployments": render_deployments}


def charts_of(stats: StatsOut) -> dict[str, Any]:
    """The charts of one window."""
    return {
        "kinds": kinds_chart(stats),
        "bar": kinds_bar(stats.total),
        "answers": answers_bar(stats.total),
        "money": money_chart(stats),
        "ttft": ttft_chart(stats),
    }


def _add_history(router: APIRouter, parts: AdminParts, pages: Pages) -> None:
    @router.get("/requests")
    async def requests(request: Request, cursor: str = "") -> Response:
        where = _route_filter(request)
        found = await views.routes(parts, where, cursor, _ROUTES_PER_PAGE)
        return pages.render(
            request,
            "requests.html",
            routes=found.routes,
            older=with_query(request, {"cursor": found.cursor}) if found.cursor else None,
            where=where,
            is_filtered=where != RouteFilter(),
            choices=await views.route_choices(parts),
            models=parts.settings.names,
        )

    @router.get("/savings")
    async def savings(request: Request) -> Response:
        query = request.query_params
        days = query.get("days", "")
        days = days if days in _SPANS else str(savings_views.DAYS)
        now_ms = int(parts.clock() * 1000)
        where = LedgerFilter(
            team_id=_team_id(request),
            alias=query.get("model") or None,
            from_ms=now_ms - (int(days) - 1) * savings_views.DAY_S * 1000,
        )
        found = await savings_views.savings(parts, where)
        return pages.render(
            request,
            "savings.html",
            savings=found,
            bars=waterfall(found),
            chart=savings_chart(found),
            team_id=where.team_id,
            model=where.alias or "",
            days=days,
            spans=_SPANS,
            choices=await views.ledger_choices(parts),
        )

    @router.get("/ledger")
    async def ledger(request: Request, cursor: str = "") -> Response:
        query = request.query_params
        where = LedgerFilter(
            team_id=_team_id(request), alias=query.get("model") or None, deployment=query.get("deployment") or None
        )
        by = query.get("by", "")
        if by in ("user", "tag"):  # whose sums are kept by team and day alone
            where = replace(where, alias=None, deployment=None, tag=query.get("tag") or None if by == "tag" else None)
        sums = await views.ledger_sums(parts, [by], where, _SUMS_PER_PAGE) if by in views.GROUPS else None
        page = await views.ledger(parts, where, cursor or None, _LEDGER_PER_PAGE)
        totals = await parts.ledger.totals([Group.DAY], where)
        return pages.render(
            request,
            "ledger.html",
            rows=page.rows,
            older=with_query(request, {"cursor": page.cursor}) if page.cursor else None,
            csv=with_query(request, {"cursor": None, "by": None, "tag": None}),
            by=by,
            groups=views.GROUPS,
            sums=sums,
            twin=with_query(request, {"model": where.alias, "deployment": where.deployment, "tag": where.tag}),
            where=where,
            is_filtered=where != LedgerFilter(),
            requests=sum(total.requests for total in totals),
            cost_microusd=sum(total.cost_microusd for total in totals),
            choices=await views.ledger_choices(parts),
        )


def _route_filter(request: Request) -> RouteFilter:
    """The filter in the query; unknown values filter nothing."""
    query = request.query_params
    cache = query.get("cache", "")
    outcome = query.get("outcome", "")
    return RouteFilter(
        team_id=_team_id(request),
        model=query.get("model", ""),
        cache=cache if cache in CACHES else "",  # type: ignore[arg-type]
        deployment=query.get("deployment", ""),
        outcome=outcome if outcome in OUTCOMES else "",  # type: ignore[arg-type]
        request_id=query.get("request_id", "").strip(),
    )


def _team_id(request: Request) -> int | None:
    """The team in the query; None where no id can be like that."""
    given = request.query_params.get("team_id", "")
    return int(given) if given.isdecimal() and len(given) < 10 else None


CACHES = ("exact", "semantic", "coalesced", "miss", "bypass")
OUTCOMES = ("ok", "refused", "failed", "failover")


def _add_teams(router: APIRouter, parts: AdminParts, pages: Pages) -> dict[str, Render]:
    async def render_teams(
        request: Request, status: int = 200, name: str = "", cursor: int = 0, **form: Any
    ) -> Response:
        teams = await views.teams(parts, name, cursor, _TEAMS_PER_PAGE + 1)
        shown = teams[:_TEAMS_PER_PAGE]
        stats = await views.stats_or_none(parts, StatsWindow.DAY)
        return pages.render(
            request,
            "teams.html",
            status,
            teams=shown,
            name=name,
            more=with_query(request, {"cursor": str(shown[-1].id)}) if len(teams) > len(shown) else None,
            holds=budget_views.holds(parts),
            tallies={one.team_id: one for one in stats.by_team} if stats is not None else {},
            **{**_NO_FORM, **form},
        )

    async def render_team(request: Request, team_id: int, status: int = 200, **form: Any) -> Response:
        team = await views.team(parts, team_id)
        stats = await views.stats_or_none(parts, StatsWindow.DAY, team_id)
        by_model = await parts.ledger.totals([Group.ALIAS, Group.DEPLOYMENT], LedgerFilter(team_id=team_id))
        return pages.render(
            request,
            "team.html",
            status,
            team=team,
            holds=budget_views.holds(parts),
            keys=sorted(team.keys, key=lambda key: not key.is_active),
            stats=stats,
            certificates=await cache_views.certificates_of(parts, team_id),
            charts=charts_of(stats) if stats is not None else {},
            spent=sorted(by_model, key=lambda total: -total.cost_microusd),
            models=parts.settings.names,
            **{**_NO_FORM, **form},
        )

    @router.get("/teams")
    async def teams(
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
        found = await cache_views.cache(parts)
        near = await views.near_misses(parts, RouteFilter(), limit=10)
        stats = await views.stats_or_none(parts, StatsWindow.DAY)
        teams = await parts.accounts.list_teams()
        latest = await views.routes(parts, RouteFilter(cache="semantic"), limit=_LATEST)
        return pages.render(
            request,
            "cache.html",
            status,
            cache=found,
            near=near.routes,
            causes=(await misses.misses(parts)).causes,
            latest=latest.routes,
            wrong=(await cache_views.wrong(parts)).wrong,
            certificates=(await cache_views.certificates(parts)).certificates,
            stats=stats,
            charts=charts_of(stats) if stats is not None else {},
            teams=teams,
            models=list(parts.settings.models),
            past=await views.ledger_choices(parts),
            settings=parts.settings.cache,
            log_prompts=parts.settings.log_prompts,
            near_similarity_min=NEAR_SIMILARITY_MIN,
            **{**_NO_FORM, **form},
        )

    @router.get("/cache")
    async def cache(request: Request) -> Response:
        return await render_cache(request)

    async def render_answer(request: Request, **values: Any) -> Response:
        return pages.render(request, "answer.html", **values)

    @router.get("/batches")
    async def batches(request: Request, cursor: Annotated[str, Query(max_length=100)] = "") -> Response:
        found = await views.batches(parts, cursor, _AUDIT_PER_PAGE)
        return pages.render(request, "batches.html", batches=found.batches, older=found.cursor)

    @router.get("/audit")
    async def audit(request: Request, cursor: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None) -> Response:
        found = await cache_views.audit(parts, _AUDIT_PER_PAGE, cursor)
        return pages.render(request, "audit.html", rows=found.rows, older=found.cursor)

    return {"cache": render_cache, "answer": render_answer}
