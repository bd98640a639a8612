"""The admin API: /admin/api. The dashboard shows the same values.

Each route needs the admin key (or the dashboard's session) and answers errors in OpenAI's shape.
`admin_routes` makes the whole admin plane, pages included. The docstrings of routes are
descriptions in the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import APIKeyCookie, HTTPBearer
from pydantic import BeforeValidator, Field
from starlette.routing import BaseRoute

from gateway.accounts import LedgerFilter
from gateway.accounts.ledger import CURSOR
from gateway.admin import budget_views, cache_views, misses, models, operations, savings_views, views
from gateway.admin.guard import COOKIE, ApiRoute, check_query, who
from gateway.admin.pages import page_routes
from gateway.admin.parquet import ParquetFile
from gateway.admin.parts import AdminParts
from gateway.admin.views import ROUTES_CURSOR, CacheKind, Outcome, RouteFilter
from gateway.telemetry.summary import StatsWindow

PARQUET = "application/vnd.apache.parquet"


def _digits(text: Any) -> Any:
    """A whole number of a path or a query, where pydantic would take 1_0 and 10.0 too."""
    if isinstance(text, str) and not (text.isascii() and text.isdigit()):
        raise ValueError("expected a whole number, in digits")
    return text


_Whole = BeforeValidator(_digits)
_Id = Annotated[int, Field(ge=0, le=2**31 - 1), _Whole]
_Limit = Annotated[int, Field(ge=1, le=500), _Whole]
_Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False, description="unix seconds")]
_Label = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f]*$")]
# the views check these, with better words
_RoutesCursor = Annotated[str, Field(json_schema_extra={"pattern": ROUTES_CURSOR}, description="of an earlier page")]
_LedgerCursor = Annotated[str, Field(json_schema_extra={"pattern": f"^{CURSOR}$"}, description="of an earlier page")]
_group = f"({'|'.join(views.GROUPS)})"
_Groups = Annotated[str, Field(pattern=f"^({_group}(,{_group}){{0,6}})?$", description="such as `team,user`")]
_WRONG: dict[int | str, str] = {
    400: "The request is not valid",
    401: "The admin key is missing or wrong",
    403: "Another site's page asked for a change",
    429: "Wrong keys came from this address, and the key was not read",
    "4XX": "There is no such thing (404), the change contradicts the state (409) or is too long (413)",
    503: "Redis or the database does not answer",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": models.ErrorBody, "description": f"{what}, in OpenAI's error shape"}
    for status, what in _WRONG.items()
}
# for the OpenAPI document; the guard does the work
_SECURITY = (HTTPBearer(scheme_name="adminKey", auto_error=False), APIKeyCookie(name=COOKIE, auto_error=False))


def admin_routes(parts: AdminParts) -> list[BaseRoute]:
    """All routes under /admin.

    A list, as a router that is included builds each of its routes once more.
    """
    api = APIRouter(
        prefix="/admin/api",
        tags=["admin"],
        route_class=ApiRoute,
        dependencies=[*(Depends(one) for one in _SECURITY), Depends(parts.guard.check_api), Depends(check_query)],
        responses=_ERRORS,
    )
    _add_teams(api, parts)
    _add_keys_and_budgets(api, parts)
    _add_history(api, parts)
    _add_ledger(api, parts)
    _add_machine(api, parts)
    _add_cache(api, parts)
    routes = [route for route in api.routes if isinstance(route, ApiRoute)]
    operations = {
        f"{method} {route.path.removeprefix(api.prefix)}": route.endpoint
        for route in routes
        for method in route.methods or ()
    }
    return [*routes, *page_routes(parts, operations)]


def _add_teams(api: APIRouter, parts: AdminParts) -> None:
    accounts = parts.accounts

    @api.get("/teams")
    async def list_teams() -> models.TeamsOut:
        """All teams with their keys and budgets."""
        return models.TeamsOut(teams=await views.teams(parts), holds=budget_views.holds(parts))

    @api.post("/teams", status_code=201)
    async def create_team(body: models.NewTeamIn) -> models.TeamOut:
        """A new team, also with its first budget. 409 where the name is taken."""
        return await views.team(parts, (await accounts.create_team(**budget_views.team_fields(body))).id)

    @api.get("/teams/{team_id}")
    async def get_team(team_id: _Id) -> models.TeamOut:
        """One team with its keys and its budgets as they stand."""
        return await views.team(parts, team_id)

    @api.patch("/teams/{team_id}")
    async def update_team(team_id: _Id, body: models.TeamPatch) -> models.TeamOut:
        """Changes the fields that are sent. An inactive team's keys stop working."""
        await accounts.update_team(team_id, **body.given())
        return await views.team(parts, team_id)

    @api.delete("/teams/{team_id}", status_code=204, response_class=Response)
    async def delete_team(team_id: _Id) -> None:
        """Deletes a team with its keys and budgets; its ledger rows stay."""
        await accounts.delete_team(team_id)


def _add_keys_and_budgets(api: APIRouter, parts: AdminParts) -> None:
    accounts = parts.accounts

    @api.get("/keys")
    async def list_keys() -> models.KeysOut:
        """All keys. Only the first characters of a key are known."""
        return models.KeysOut(keys=[models.KeyOut.model_validate(key) for key in await accounts.list_keys()])

    @api.get("/teams/{team_id}/keys")
    async def list_keys_of_team(team_id: _Id) -> models.KeysOut:
        """One team's keys."""
        return models.KeysOut(keys=(await views.team(parts, team_id)).keys)

    @api.post("/teams/{team_id}/keys", status_code=201)
    async def create_key(team_id: _Id, body: models.KeyIn, response: Response) -> models.NewKeyOut:
        """A new key. The answer is the only place where its plaintext is ever shown."""
        response.headers["cache-control"] = "no-store"
        fields = body.given()
        return models.NewKeyOut.model_validate(await accounts.create_key(team_id, fields.pop("name"), **fields))

    @api.patch("/keys/{key_id}")
    async def update_key(key_id: _Id, body: models.KeyPatch) -> models.KeyOut:
        """Changes the fields that are sent."""
        return models.KeyOut.model_validate(await accounts.update_key(key_id, **body.given()))

    @api.delete("/keys/{key_id}")
    async def revoke_key(key_id: _Id) -> models.KeyOut:
        """The key stops working at once; its row stays for the ledger's sake."""
        return models.KeyOut.model_validate(await accounts.revoke_key(key_id))

    @api.get("/budgets")
    async def list_budgets() -> models.BudgetsOut:
        """All budgets, with what is spent, held and left now."""
        return models.BudgetsOut(budgets=await budget_views.budgets(parts))

    @api.get("/teams/{team_id}/budgets")
    async def list_budgets_of_team(team_id: _Id) -> models.BudgetsOut:
        """One team's budgets, with what is spent, held and left now."""
        return models.BudgetsOut(budgets=(await views.team(parts, team_id)).budgets)

    @api.post("/teams/{team_id}/budgets", status_code=201)
    async def create_budget(team_id: _Id, body: models.BudgetIn) -> models.BudgetOut:
        """A new budget. On the team's money it counts from its window's start, else from now. 409 where one of its kind is."""
        made = await accounts.create_budget(team_id, **budget_views.fields_of(body))
        return await budget_views.one(parts, made.id)

    @api.patch("/budgets/{budget_id}")
    async def update_budget(budget_id: _Id, body: models.BudgetPatch) -> models.BudgetOut:
        """Changes the fields that are sent. 409 where the team has one of that kind."""
        return await budget_views.change(parts, budget_id, body)

    @api.get("/budgets/{budget_id}/values")
    async def list_values(budget_id: _Id) -> models.BudgetValuesOut:
        """The values of a budget on each value that used the most in the running window."""
        return await budget_views.values(parts, budget_id)

    @api.post("/budgets/{budget_id}/raise")
    async def raise_budget(budget_id: _Id, body: models.BudgetRaiseIn, request: Request) -> models.BudgetOut:
        """Raises the limit until a moment; a later raise replaces it. It is in the audit log."""
        return await budget_views.raise_limit(parts, budget_id, body, *who(request))

    @api.post("/budgets/{budget_id}/reset")
    async def reset_budget(budget_id: _Id, request: Request) -> models.BudgetOut:
        """Counts from 0 again. Requests under way count before the reset. It is in the audit log."""
        return await budget_views.reset(parts, budget_id, *who(request))

    @api.delete("/budgets/{budget_id}", status_code=204, response_class=Response)
    async def delete_budget(budget_id: _Id) -> None:
        """The team is no longer held to it."""
        await accounts.delete_budget(budget_id)


def _add_history(api: APIRouter, parts: AdminParts) -> None:
    @api.get("/stats")
    async def stats(
        window: StatsWindow = StatsWindow.DAY, team: _Id | None = None, model: _Label | None = None
    ) -> models.StatsOut:
        """Hit rate by kind, tokens, money and time saved, latency: in total, by team, model and surface, and over time."""
        return await views.stats(parts, window, team, model)

    @api.get("/routes")
    async def routes(
        where: Annotated[RouteFilter, Depends(route_filter)], cursor: _RoutesCursor = "", limit: _Limit = 50
    ) -> models.RoutesOut:
        """The latest requests, newest first, each with the winner, why, each rejection and each attempt."""
        return await views.routes(parts, where, cursor, limit)

    @api.get("/near-misses")
    async def near_misses(
        where: Annotated[RouteFilter, Depends(route_filter)], cursor: _RoutesCursor = "", limit: _Limit = 50
    ) -> models.RoutesOut:
        """The latest requests that came close to a cached answer (similarity 0.6 or more) and did not get it, with the reason."""
        return await views.near_misses(parts, where, cursor, limit)

    @api.get("/savings")
    async def savings(
        team_id: _Id | None = None,
        model: _Label | None = None,
        from_s: _Moment | None = None,
        until_s: _Moment | None = None,
    ) -> models.SavingsOut:
        """What Sameway saved, by mechanism, team and UTC day, with what cost more; at first of the last 30 days."""
        where = ledger_filter(team_id=team_id, model=model, from_s=from_s, until_s=until_s)
        return await savings_views.savings(parts, where)


def _add_ledger(api: APIRouter, parts: AdminParts) -> None:
    @api.get("/ledger")
    async def ledger(
        where: Annotated[LedgerFilter, Depends(ledger_filter)], cursor: _LedgerCursor | None = None, limit: _Limit = 100
    ) -> models.LedgerOut:
        """One row per generation, also those that cost nothing, newest first."""
        return await views.ledger(parts, where, cursor, limit)

    @api.get("/ledger/sums")
    async def ledger_sums(
        where: Annotated[LedgerFilter, Depends(ledger_filter)],
        by: _Groups = "",
        user: _Label | None = None,
        tag: _Label | None = None,
        tag_value: _Label | None = None,
        limit: Annotated[int, Field(ge=1, le=10_000), _Whole] = 1_000,
    ) -> models.LedgerSumsOut:
        """Sums of whole UTC days by team, key, user, model, deployment, tag and day, those that cost most first. Users and
        tags go with teams and days alone; the values of one tag are those of `tag`, without which `by=tag` gives their names."""
        where = replace(where, user=user, tag=tag, tag_value=tag_value)
        return await views.ledger_sums(parts, by.split(",") if by else (), where, limit)

    @api.get(
        "/ledger.csv",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
    )
    async def ledger_csv(where: Annotated[LedgerFilter, Depends(ledger_filter)]) -> StreamingResponse:
        """The same as CSV (RFC 4180), all of it."""
        headers = {"content-disposition": 'attachment; filename="sameway-ledger.csv"'}
        return StreamingResponse(_csv(views.ledger_rows(parts, where)), media_type="text/csv", headers=headers)

    @api.get(
        "/ledger.parquet",
        response_class=StreamingResponse,
        responses={200: {"content": {PARQUET: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def ledger_parquet(where: Annotated[LedgerFilter, Depends(ledger_filter)]) -> StreamingResponse:
        """The same as Parquet, with the moments, numbers and truths as such; needs the extra `parquet`."""
        headers = {"content-disposition": 'attachment; filename="sameway-ledger.parquet"'}
        file = await asyncio.to_thread(ParquetFile, _COLUMNS)
        return StreamingResponse(file.stream(views.ledger_rows(parts, where)), media_type=PARQUET, headers=headers)


def route_filter(
    team_id: _Id | None = None,
    model: _Label = "",
    cache: CacheKind = "",
    deployment: _Label = "",
    outcome: Outcome = "",
    request_id: _Label = "",
) -> RouteFilter:
    """The requests of a team, model or deployment, with an answer or an outcome of one kind, or one by its id."""
    return RouteFilter(
        team_id=team_id, model=model, cache=cache, deployment=deployment, outcome=outcome, request_id=request_id
    )


def ledger_filter(
    team_id: _Id | None = None,
    key_id: _Id | None = None,
    model: _Label | None = None,
    deployment: _Label | None = None,
    from_s: _Moment | None = None,
    until_s: _Moment | None = None,
) -> LedgerFilter:
    """The rows of a team, key, model or deployment, from `from_s` on and before `until_s`."""
    return LedgerFilter(
        team_id=team_id,
        key_id=key_id,
        alias=model or None,
        deployment=deployment or None,
        from_ms=int(from_s * 1000) if from_s is not None else None,
        until_ms=int(until_s * 1000) if until_s is not None else None,
    )


_COLUMNS = (
    "id", "at_ms", "request_id", "team_id", "team", "key_id", "key", "alias", "deployment",
    "prompt_tokens", "cached_tokens", "completion_tokens", "cost_microusd", "usage_estimated", "cache_write_tokens",
    "cache_write_1h_tokens", "audio_prompt_tokens", "image_prompt_tokens", "reasoning_tokens",
    "audio_completion_tokens", "image_completion_tokens", "tool_calls", "baseline_microusd", "prefix_read_microusd",
    "prefix_write_microusd", "mechanism", "provider_cost_microusd", "user", "tags", "kind",
)  # fmt: skip


async def _csv(rows: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["at", *_COLUMNS])
    async for row in rows:
        at = datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat(timespec="milliseconds")
        writer.writerow([at, *(_cell(row[name]) for name in _COLUMNS)])
        if buffer.tell() > 32_768:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _cell(value: Any) -> Any:
    """Quote a text that a spreadsheet would run as a formula (OWASP, CSV Injection)."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(_FORMULA) else value


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four: full width


def _add_machine(api: APIRouter, parts: AdminParts) -> None:
    @api.get("/overview")
    async def overview(window: StatsWindow = StatsWindow.DAY) -> models.OverviewOut:
        """What the dashboard's first page shows."""
        return await views.overview(parts, window)

    @api.get("/batches")
    async def batches(cursor: _Label = "", limit: _Limit = 100) -> models.BatchesOut:
        """The batches of all teams with their progress, newest first."""
        return await views.batches(parts, cursor, limit)

    @api.post("/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> models.BatchOut:
        """Cancels a batch of any team; the lines that ran keep their answers. It is written to the audit log."""
        return await operations.cancel_batch(parts, batch_id, *who(request))

    @api.get("/status")
    async def status() -> models.StatusOut:
        """Every part's health, and what deserves a look."""
        return await views.status(parts)

    @api.get("/deployments")
    async def deployments() -> models.DeploymentsOut:
        """Every deployment: health, estimates, queue."""
        return models.DeploymentsOut(deployments=await views.deployments(parts))

    @api.post("/deployments/try")
    async def try_deployment(body: models.TryDeploymentIn, request: Request) -> models.TriedOut:
        """Sends one short question to a deployment, whatever its state. An answer ends its rests."""
        return await operations.try_out(parts, body, *who(request))

    @api.post("/deployments/{act}")
    async def act(act: models.Act, body: models.ActIn, request: Request) -> models.DeploymentOut:
        """Drains, disables, enables or resets a deployment on every host; each act is in the audit log."""
        return await operations.act(parts, act, body.name, *who(request))


def _add_cache(api: APIRouter, parts: AdminParts) -> None:
    @api.get("/cache")
    async def cache() -> models.CacheOut:
        """How much is cached, by team, and the semantic index."""
        return await cache_views.cache(parts)

    @api.post("/cache/purge")
    async def purge(body: models.PurgeIn) -> models.PurgeOut:
        """Removes entries by id, text, team, model, namespace, deployment and age; with `dry_run` (the default) only counts them."""
        return await cache_views.purge(parts, body)

    @api.post("/cache/try")
    async def try_prompt(body: models.TryIn) -> models.TryOut:
        """What the cache would do with a prompt, and its nearest neighbours. Nothing is served, stored, counted or learned."""
        return await cache_views.try_prompt(parts, body)

    @api.get("/cache/misses")
    async def cache_misses() -> models.MissesOut:
        """Why the latest prompts did not hit: the share of each cause of each model's misses, an example, what to do."""
        return await misses.misses(parts)

    @api.get("/cache/wrong")
    async def wrong() -> models.WrongsOut:
        """Answers that were found wrong and are out of service by meaning, the latest first."""
        return await cache_views.wrong(parts)

    @api.post("/cache/clear")
    async def clear(body: models.ClearIn) -> models.ClearOut:
        """Puts an answer, or a group of equal ones, back into service."""
        return await cache_views.clear(parts, body)

    @api.get("/cache/certificate")
    async def certificate(team_id: _Id | None = None, model: _Label = "") -> models.CertificatesOut:
        """By team and model: at most which share of the requests since when was answered wrongly by meaning, and what that rests on."""
        return await cache_views.certificates(parts, team_id, model)

    @api.post("/cache/certificate", status_code=201)
    async def certify(body: models.CertificateIn, request: Request) -> models.CertificateOut:
        """Starts a new certificate, which counts from now on. It is written to the audit log."""
        return await cache_views.certify(parts, body, *who(request))

    @api.post("/answer")
    async def answer(body: models.AnswerIn, request: Request, response: Response) -> models.AnswerOut:
        """Question and answer of a response, as far as the cache keeps them. Each look is written to the audit log."""
        response.headers["cache-control"] = "no-store"
        return await cache_views.answer(parts, body, *who(request))

    @api.get("/audit")
    async def audit(cursor: _Id | None = None, limit: _Limit = 100) -> models.AuditOut:
        """Which texts an admin asked to see, which certificates were started, what was done with deployments and batches, newest first."""
        return await cache_views.audit(parts, limit, cursor)

    @api.post("/feedback")
    async def feedback(body: models.FeedbackIn) -> models.FeedbackOut:
        """Says of any team's response what `POST /v1/feedback` says of one's own."""
        return await cache_views.feedback(parts, body)
