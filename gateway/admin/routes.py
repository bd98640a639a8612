"""The admin API: /admin/api. The dashboard shows the same values.

Each route needs the admin key or a session of the dashboard, and a role that may do its operation; it
answers errors in OpenAI's shape.
`api_routes` makes it; `page_routes` of `pages` makes the dashboard. The operations are in the modules
beside this one. Read `views.py` next.
"""

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import APIKeyCookie, HTTPBearer
from starlette.routing import BaseRoute

from gateway.accounts.ledger import COLUMNS
from gateway.accounts.parquet import ParquetFile
from gateway.admin import (
    budgets,
    cache_views,
    configuration,
    misses,
    models,
    operations,
    savings_views,
    teams,
    transfer,
    verifier_views,
    views,
)
from gateway.admin.guard import COOKIE, NEEDS, ApiRoute, Endpoint, check_query
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import LedgerRows, Moment
from gateway.admin.roles import OF, allow
from gateway.wire.errors import Unauthenticated

PARQUET = "application/vnd.apache.parquet"
_WRONG: dict[int | str, str] = {
    400: "The request is not valid",
    401: "The admin key is missing or wrong",
    403: "The caller's roles do not allow it, or another site's page asked for a change",
    429: "Wrong keys came from this address, and the key was not read",
    "4XX": "There is no such thing (404), the change contradicts the state (409) or is too long (413)",
    503: "Redis or the database does not answer",
}
# by reference: of a `model` FastAPI makes a validator for each status of each route, half the time that all routes take
ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": ERROR, "description": f"{what}, in OpenAI's error shape"} for status, what in _WRONG.items()
}
# for the OpenAPI document; the guard does the work
_SECURITY = (HTTPBearer(scheme_name="adminKey", auto_error=False), APIKeyCookie(name=COOKIE, auto_error=False))


def api_routes() -> list[BaseRoute]:
    """All routes under /admin/api; they find their parts in the state of the application that they serve.

    A list, as a router that is included builds each of its routes once more.
    """

    async def enter(request: Request) -> None:
        principal = await request.app.state.parts.guard.enter(request)
        if principal is None:
            raise Unauthenticated(NEEDS[Endpoint.ADMIN_API])
        await allow(request, principal, request.scope["route"].name)

    api = APIRouter(
        prefix="/admin/api",
        tags=["admin"],
        route_class=ApiRoute,
        dependencies=[*(Depends(scheme) for scheme in _SECURITY), Depends(enter), Depends(check_query)],
        responses=_ERRORS,
    )
    _add_accounts(api)
    _add_history(api)
    _add_machine(api)
    api.get("/me")(teams.me)
    api.post("/me/keep-keys", status_code=204, response_class=Response)(teams.keep_keys)
    api.get("/people")(teams.list_people)
    api.post("/people/disable", status_code=204, response_class=Response)(teams.disable_person)
    api.post("/people/enable", status_code=204, response_class=Response)(teams.enable_person)
    api.get("/sessions")(teams.list_sessions)
    api.delete("/sessions/{session_id}", status_code=204, response_class=Response)(teams.end_session)
    unknown = {route.name for route in api.routes if isinstance(route, ApiRoute)} - OF.keys()
    if unknown:
        raise LookupError(f"no row of the table of roles has {', '.join(sorted(unknown))}")
    return list(api.routes)


def _no_store(response: Response) -> None:
    response.headers["cache-control"] = "no-store"


_SECRET = [Depends(_no_store)]


def _add_accounts(api: APIRouter) -> None:
    api.get("/teams")(teams.list_teams)
    api.post("/teams", status_code=201)(teams.create_team)
    api.get("/teams/{team_id}")(teams.get_team)
    api.patch("/teams/{team_id}")(teams.update_team)
    api.delete("/teams/{team_id}", status_code=204, response_class=Response)(teams.delete_team)
    api.get("/keys")(teams.list_keys)
    api.get("/teams/{team_id}/keys")(teams.list_keys_of_team)
    api.post("/teams/{team_id}/keys", status_code=201, dependencies=_SECRET)(teams.create_key)
    api.patch("/keys/{key_id}")(teams.update_key)
    api.post("/keys/{key_id}/rotate", dependencies=_SECRET)(teams.rotate_key)
    api.delete("/keys/{key_id}")(teams.revoke_key)
    api.get("/budgets")(budgets.list_budgets)
    api.get("/teams/{team_id}/budgets")(budgets.list_budgets_of_team)
    api.post("/teams/{team_id}/budgets", status_code=201)(budgets.create_budget)
    api.patch("/budgets/{budget_id}")(budgets.update_budget)
    api.get("/budgets/{budget_id}/values")(budgets.list_values)
    api.post("/budgets/{budget_id}/raise")(budgets.raise_budget)
    api.post("/budgets/{budget_id}/reset")(budgets.reset_budget)
    api.delete("/budgets/{budget_id}", status_code=204, response_class=Response)(budgets.delete_budget)


def _add_history(api: APIRouter) -> None:
    api.get("/stats")(views.stats)
    api.get("/routes")(views.routes)
    api.get("/near-misses")(views.near_misses)
    api.get("/savings")(savings_views.savings)
    api.get("/ledger")(views.ledger)
    api.get("/ledger/sums")(views.ledger_sums)
    _add_files(api, "/savings", "savings", _savings, "All lines of savings that match, by day and team", _SAVINGS)
    _add_files(api, "/ledger", "ledger", _ledger, "All rows of the ledger that match", (*COLUMNS, "team", "key"))
    _add_files(
        api,
        "/ledger/sums",
        "ledger_sums",
        views.ledger_sum_rows,
        "All sums of the ledger that match, by their groups",
        _SUMS,
    )


def _add_machine(api: APIRouter) -> None:
    ndjson = {"content": {transfer.NDJSON: {"schema": {"type": "string"}}}}
    ndjson_body: dict[str, Any] = {"requestBody": {"required": True, **ndjson}}
    api.get("/overview")(views.overview)
    api.get("/batches")(views.batches)
    api.post("/batches/{batch_id}/cancel")(operations.cancel_batch)
    api.get("/status")(views.status)
    api.get("/hosts")(views.hosts)
    api.get("/deployments")(views.deployments)
    api.post("/deployments/try")(operations.try_deployment)
    api.post("/deployments/{act}")(operations.act)
    api.get("/cache")(cache_views.cache)
    api.post("/cache/purge")(cache_views.purge)
    api.post("/cache/import", openapi_extra=ndjson_body)(transfer.import_answers)
    api.post("/cache/export", response_class=StreamingResponse, responses={200: ndjson})(transfer.export_answers)
    api.post("/cache/try")(cache_views.try_prompt)
    api.get("/cache/misses")(misses.cache_misses)
    api.get("/cache/verifier")(verifier_views.cache_verifier)
    api.get("/cache/wrong")(cache_views.wrong)
    api.post("/cache/clear")(cache_views.clear)
    api.get("/cache/certificate")(cache_views.certificate)
    api.post("/cache/certificate", status_code=201)(cache_views.certify)
    api.post("/answer", dependencies=_SECRET)(cache_views.answer)
    api.post("/config/reload")(configuration.reload)
    api.get("/config/models")(configuration.list_models)
    api.post("/config/models")(configuration.set_model)
    api.post("/config/models/revert")(configuration.revert)
    api.get("/audit")(cache_views.audit)
    api.get("/audit/export", response_class=StreamingResponse, responses={200: ndjson})(export_audit)
    api.post("/feedback")(cache_views.feedback)


_Rows = AsyncIterator[dict[str, Any]]


def _add_files(
    api: APIRouter, path: str, name: str, rows_of: Callable[..., Any], purpose: str, columns: tuple[str, ...]
) -> None:
    """The routes of two files of the rows that `rows_of` finds; who may see the list `name` may have them."""

    async def as_csv(rows: Annotated[Any, Depends(rows_of)]) -> StreamingResponse:
        return StreamingResponse(_csv(rows, columns), media_type="text/csv", headers=_attached(f"{name}.csv"))

    async def as_parquet(rows: Annotated[Any, Depends(rows_of)]) -> StreamingResponse:
        file = await asyncio.to_thread(ParquetFile, columns)
        return StreamingResponse(file.stream(rows), media_type=PARQUET, headers=_attached(f"{name}.parquet"))

    as_csv.__doc__ = f"{purpose}, as CSV (RFC 4180)."
    as_parquet.__doc__ = f"{purpose}, as Parquet with types; needs the extra `parquet`."
    text, binary = ({"schema": {"type": "string", **more}} for more in ({}, {"format": "binary"}))
    for end, media, schema, endpoint in (("csv", "text/csv", text, as_csv), ("parquet", PARQUET, binary, as_parquet)):
        replies: dict[int | str, dict[str, Any]] = {200: {"content": {media: schema}}}
        api.get(f"{path}.{end}", name=name, response_class=StreamingResponse, responses=replies)(endpoint)


async def export_audit(parts: WorkerParts, from_s: Moment = 0, until_s: Moment = 1e11) -> StreamingResponse:
    """All rows of the audit log from `from_s` on and before `until_s`, oldest first, as a JSON object on each line."""
    rows = parts.audit.between(int(from_s * 1000), int(until_s * 1000))
    lines = (msgspec.json.encode(row) + b"\n" async for row in rows)
    return StreamingResponse(lines, media_type=transfer.NDJSON)


def _attached(name: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="sameway-{name.replace("_", "-")}"'}


async def _ledger(parts: WorkerParts, where: LedgerRows) -> _Rows:
    return views.ledger_rows(parts, where)


async def _savings(parts: WorkerParts, where: savings_views.Saved) -> _Rows:
    return savings_views.savings_rows(parts, where)


_SAVINGS = ("day", "team_id", "team", "line", "requests", "amount_microusd")
_SUMS = tuple(models.SUM.split())


async def _csv(rows: _Rows, columns: Sequence[str]) -> AsyncIterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    names = ["at", *columns] if "at_ms" in columns else columns
    writer.writerow(names)
    async for row in rows:
        writer.writerow([_iso(row["at_ms"]) if name == "at" else _cell(row[name]) for name in names])
        if buffer.tell() > 32_768:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _cell(value: Any) -> Any:
    """Quote a text that a spreadsheet would run as a formula (OWASP, CSV Injection)."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(_FORMULA) else value


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four: full width
