"""The dashboard's forms. Each change is a POST that redirects to the page that shows it.

An invalid value shows the form again, with the problem beside it. A new key is the exception to the
redirect: its plaintext is in the answer to the POST and nowhere else. The API's models and the
accounts check the values.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ValidationError

from gateway import accounts
from gateway.admin import budget_views, cache_views, operations, views
from gateway.admin.guard import COOKIE, SESSION_S, Endpoint, Guard, TooManyWrongKeys, client_of
from gateway.admin.html import LOGIN, Pages, back_to, is_own_path
from gateway.admin.models import (
    Act,
    ActIn,
    AnswerIn,
    BudgetIn,
    BudgetPatch,
    BudgetRaiseIn,
    CertificateIn,
    ClearIn,
    FeedbackIn,
    KeyIn,
    NewTeamIn,
    PurgeIn,
    TeamIn,
    TryDeploymentIn,
    TryIn,
)
from gateway.admin.parts import AdminParts
from gateway.wire.errors import BadRequest, Unauthenticated
from gateway.wire.requests import in_json_words

Render = Callable[..., Awaitable[Response]]
_Body = TypeVar("_Body", bound=BaseModel)


class FormProblem(Exception):
    """An invalid field; `str()` is the message in the form."""


def add_session_forms(router: APIRouter, guard: Guard, pages: Pages) -> None:
    @router.get("/login")
    async def login_form(request: Request) -> Response:
        if await guard.has_session(request):
            return RedirectResponse("/admin", 303)
        return pages.render(request, "login.html", problem="")

    @router.post("/login")
    async def login(request: Request) -> Response:
        fields = await read_form(request)
        try:
            await guard.check_key(request, Endpoint.LOGIN, fields.get("key", ""))
        except (Unauthenticated, TooManyWrongKeys) as error:
            refusal = pages.render(request, "login.html", error.http_status, problem=error.message)
            refusal.headers.update(error.headers)
            return refusal
        target = request.query_params.get("next", "")
        reply = RedirectResponse(target if is_own_path(target) else "/admin", 303)
        reply.set_cookie(
            COOKIE,
            await guard.new_session(),
            max_age=SESSION_S,
            path="/admin",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return reply

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        await guard.end_session(request)
        reply = RedirectResponse(LOGIN, 303)
        reply.delete_cookie(COOKIE, path="/admin")
        return reply


def add_team_forms(router: APIRouter, parts: AdminParts, render_teams: Render, render_team: Render) -> None:
    known = parts.accounts

    @router.post("/teams")
    async def create_team(request: Request) -> Response:
        fields = await read_form(request)
        try:
            values = {"name": fields.get("name", ""), "budget": _new_budget(fields), **_rates(fields)}
            team = await known.create_team(**budget_views.team_fields(convert(NewTeamIn, values)))
        except _REFUSALS as error:
            return await render_teams(request, **_refusal(error, "team", fields))
        return back_to(f"/admin/teams/{team.id}", "team-created")

    @router.post("/teams/{team_id}")
    async def update_team(request: Request, team_id: int) -> Response:
        fields = await read_form(request)
        try:
            values = {
                "name": fields.get("name", ""),
                "is_active": "is_active" in fields,
                "is_semantic_enabled": "is_semantic_enabled" in fields,
                "is_store_enabled": "is_store_enabled" in fields,
                "semantic_error_max": _share(fields.get("semantic_error_max_percent")),
                "time_zone": fields.get("time_zone", ""),
                **_rates(fields),
            }
            await known.update_team(team_id, **convert(TeamIn, values).given())
        except _REFUSALS as error:
            return await render_team(request, team_id, **_refusal(error, "settings", fields))
        return back_to(f"/admin/teams/{team_id}", "team-saved")

    @router.post("/teams/{team_id}/delete")
    async def delete_team(request: Request, team_id: int) -> Response:
        fields = await read_form(request)
        team = await views.team(parts, team_id)
        if fields.get("name") != team.name:
            words = f"Type the team's name, {team.name}, to delete it."
            return await render_team(request, team_id, 400, form="delete", problem=words, values=fields)
        await known.delete_team(team_id)
        return back_to("/admin/teams", "team-deleted")

    _add_key_forms(router, parts, render_team)
    _add_budget_forms(router, parts, render_team)


def _add_key_forms(router: APIRouter, parts: AdminParts, render_team: Render) -> None:
    known = parts.accounts

    @router.post("/teams/{team_id}/keys")
    async def create_key(request: Request, team_id: int) -> Response:
        form = await request.form()
        fields = await read_form(request)
        models = tuple(str(name) for name in form.getlist("models"))
        try:
            days = _number(fields.get("expires_in_days"), "Expires in")
            values = {
                "name": fields.get("name", ""),
                "expires_at_s": parts.clock() + days * 86_400 if days is not None else None,
                "models": models or None,
                **_rates(fields),
            }
            given = convert(KeyIn, values).given()
            made = await known.create_key(team_id, given.pop("name"), **given)
        except _REFUSALS as error:
            return await render_team(request, team_id, **_refusal(error, "key", fields))
        return await render_team(request, team_id, new_key=made)

    @router.post("/teams/{team_id}/keys/{key_id}/revoke")
    async def revoke_key(team_id: int, key_id: int) -> Response:
        await known.revoke_key(key_id)
        return back_to(f"/admin/teams/{team_id}", "key-revoked")


def _add_budget_forms(router: APIRouter, parts: AdminParts, render_team: Render) -> None:
    known = parts.accounts

    @router.post("/teams/{team_id}/budgets")
    async def create_budget(request: Request, team_id: int) -> Response:
        fields = await read_form(request)
        try:
            fields.setdefault("limit_usd", "")
            body = convert(BudgetIn, _new_budget(fields) or {})
            await known.create_budget(team_id, **budget_views.fields_of(body))
        except _REFUSALS as error:
            return await render_team(request, team_id, **_refusal(error, "budget", fields))
        return back_to(f"/admin/teams/{team_id}", "budget-created")

    @router.post("/teams/{team_id}/budgets/{budget_id}")
    async def update_budget(request: Request, team_id: int, budget_id: int) -> Response:
        fields = await read_form(request)
        try:
            values = {
                **_limit(fields),
                "is_hard": fields.get("kind") != "soft",
                "overdraft": fields.get("overdraft", "refuse"),
            }
            await budget_views.change(parts, budget_id, convert(BudgetPatch, values))
        except _REFUSALS as error:
            return await render_team(request, team_id, **_refusal(error, f"budget-{budget_id}", fields))
        return back_to(f"/admin/teams/{team_id}", "budget-saved")

    @router.post("/teams/{team_id}/budgets/{budget_id}/raise")
    async def raise_budget(request: Request, team_id: int, budget_id: int) -> Response:
        fields = await read_form(request)
        try:
            days = _number(fields.get("days"), "For, days")
            if days is None:
                raise FormProblem("For, days: expected a number")
            (by,) = _limit(fields).values()
            body = convert(BudgetRaiseIn, {"by": by, "until_s": parts.clock() + days * 86_400})
            await budget_views.raise_limit(parts, budget_id, body, client_of(request), "dashboard")
        except _REFUSALS as error:
            return await render_team(request, team_id, **_refusal(error, f"budget-{budget_id}", fields))
        return back_to(f"/admin/teams/{team_id}", "budget-raised")

    @router.post("/teams/{team_id}/budgets/{budget_id}/reset")
    async def reset_budget(request: Request, team_id: int, budget_id: int) -> Response:
        await budget_views.reset(parts, budget_id, client_of(request), "dashboard")
        return back_to(f"/admin/teams/{team_id}", "budget-reset")

    @router.post("/teams/{team_id}/budgets/{budget_id}/delete")
    async def delete_budget(team_id: int, budget_id: int) -> Response:
        await known.delete_budget(budget_id)
        return back_to(f"/admin/teams/{team_id}", "budget-deleted")


def add_deployment_forms(router: APIRouter, parts: AdminParts, render_deployments: Render) -> None:
    @router.post("/deployments/try")
    async def try_out(request: Request) -> Response:
        fields = await read_form(request)
        body = _checked(TryDeploymentIn, {name: fields.get(name, "") for name in ("name", "model")})
        try:
            tried = await operations.try_out(parts, body, client_of(request), "dashboard")
        except accounts.Invalid as error:
            return await render_deployments(request, 400, problem=words_of(error), asked=body.name)
        return await render_deployments(request, tried=tried)

    @router.post("/deployments/{act}")
    async def act(request: Request, act: Act) -> Response:
        body = _checked(ActIn, {"name": (await read_form(request)).get("name", "")})
        await operations.act(parts, act, body.name, client_of(request), "dashboard")
        return back_to("/admin/deployments", f"deployment-{act}")


def add_batch_form(router: APIRouter, parts: AdminParts) -> None:
    @router.post("/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        await operations.cancel_batch(parts, batch_id, client_of(request), "dashboard")
        return back_to("/admin/batches", "batch-cancelled")


def add_answer_form(router: APIRouter, parts: AdminParts, pages: Pages) -> None:
    @router.post("/answer")
    async def answer(request: Request) -> Response:
        """Show the texts of a response. A POST, since each look is written to the audit log."""
        fields = await read_form(request)
        body = _checked(AnswerIn, {"id": fields.get("id", "")})
        found = await cache_views.answer(parts, body, client_of(request), "dashboard")
        return pages.render(request, "answer.html", answer=found, back=_back(fields))


_SELECTORS = ("id", "text", "team_id", "namespace", "model", "deployment")


def add_cache_forms(router: APIRouter, parts: AdminParts, render_cache: Render) -> None:
    @router.post("/cache/purge")
    async def purge(request: Request) -> Response:
        """A dry run first; its page has a button that repeats the selection for real."""
        fields = await read_form(request)
        try:
            hours = _number(fields.get("older_than_h"), "Older than")
            values: dict[str, Any] = {name: fields[name] for name in _SELECTORS if fields.get(name)}
            values |= {"older_than_s": hours * 3_600} if hours is not None else {}
            if not values and "all" not in fields:
                raise FormProblem("Fill in at least one field, or tick “Everything, of every team”.")
            if values and "all" in fields:
                raise FormProblem("Tick “Everything, of every team”, or fill in what must match: not both.")
            values |= {"all": True} if "all" in fields else {}
            body = convert(PurgeIn, {**values, "dry_run": fields.get("confirmed") != "yes"})
            result = await cache_views.purge(parts, body)
        except (*_REFUSALS, BadRequest, accounts.NotFound) as error:
            return await render_cache(request, **_refusal(error, "purge", fields))
        return await render_cache(request, form="purge", purge=result, values=fields)

    @router.post("/cache/certificate")
    async def certify(request: Request) -> Response:
        body = _checked(CertificateIn, await read_form(request))
        await cache_views.certify(parts, body, client_of(request), "dashboard")
        return back_to("/admin/cache", "certified")

    @router.post("/cache/clear")
    async def clear(request: Request) -> Response:
        await cache_views.clear(parts, _checked(ClearIn, await read_form(request)))
        return back_to("/admin/cache", "cleared")

    @router.post("/cache/report")
    async def report(request: Request) -> Response:
        """Report a response as right or wrong, and return to the page of the report."""
        fields = await read_form(request)
        body = _checked(FeedbackIn, {name: fields.get(name, "") for name in ("id", "verdict")})
        outcome = await cache_views.feedback(parts, body)
        done = "right" if body.verdict == "right" else f"wrong-{outcome.effect}"
        return back_to(_back(fields), done)

    @router.post("/cache/try")
    async def try_prompt(request: Request) -> Response:
        fields = await read_form(request)
        try:
            tried = await cache_views.try_prompt(parts, convert(TryIn, fields))
        except (*_REFUSALS, accounts.NotFound) as error:
            return await render_cache(request, **_refusal(error, "try", fields))
        return await render_cache(request, form="try", tried=tried, values=fields)


# -- fields


def _back(fields: Mapping[str, str]) -> str:
    """The page that a form was on."""
    back = fields.get("back", "")
    return back if is_own_path(back) and "?" not in back else "/admin/cache"


def _checked(model: type[_Body], values: Mapping[str, Any]) -> _Body:
    """Convert the hidden fields of a button. Raises BadRequest."""
    try:
        return convert(model, values)
    except ValidationError as error:
        raise BadRequest(words_of(error), code="invalid_value") from None


async def read_form(request: Request) -> dict[str, str]:
    """The texts of a form without surrounding space; empty ones are left out."""
    form = await request.form()
    found = {name: value.strip() for name, value in form.items() if isinstance(value, str)}
    return {name: value for name, value in found.items() if value}


_REFUSALS = (FormProblem, ValidationError, accounts.Conflict, accounts.Invalid)


def convert(model: type[_Body], values: Mapping[str, Any]) -> _Body:
    """Convert a form to a model of the API. Raises pydantic's ValidationError."""
    return model.model_validate(dict(values), strict=False)  # a form has texts only


def words_of(error: Exception) -> str:
    """The message for the form."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        name = str(first["loc"][-1]) if first["loc"] else ""
        return f"{_LABELS.get(name, name)}: {in_json_words(first['msg'])}"
    if isinstance(error, accounts.Invalid):
        _, _, words = str(error).partition(": ")
        return f"{_LABELS.get(error.field, error.field)}: {words}"
    words = str(error)
    return f"{words[:1].upper()}{words[1:]}"


_LABELS = {
    "name": "Name",
    "requests_per_min": "Requests per minute",
    "tokens_per_min": "Tokens per minute",
    "semantic_error_max": "Wrong semantic hits at most",
    "limit_microusd": "Limit",
    "window": "Window",
    "expires_at_s": "Expires in",
    "prompt": "Prompt",
    "text": "Prompt",
    "model": "Model",
    "team_id": "Team",
    "id": "Entry id",
    "older_than_s": "Older than",
}


def _refusal(error: Exception, form: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """The values of a page that shows `form` again with its problem."""
    status = 409 if isinstance(error, accounts.Conflict) else 404 if isinstance(error, accounts.NotFound) else 400
    return {"status": status, "form": form, "problem": words_of(error), "values": fields}


def _new_budget(fields: Mapping[str, str]) -> dict[str, Any] | None:
    """The values of a new budget; None where the form has no limit."""
    if "limit_usd" not in fields:
        return None
    axis, hours = fields.get("axis", "team"), _number(fields.get("rolling_hours"), "Rolling window, hours")
    if axis == "tag":
        axis = f"tag:{fields.get('tag', '')}"
    one = {"one": fields.get("value", ""), "none": ""}.get(fields.get("whose", ""))
    return {
        "window": fields.get("window", ""),
        **_limit(fields),
        "is_hard": fields.get("kind") != "soft",
        "axis": axis,
        "value": None if axis == "team" else one,
        "rolling_s": round((hours or 0) * 3600) if fields.get("window") == "rolling" else 0,
        "overdraft": fields.get("overdraft", "refuse"),
    }


def _limit(fields: Mapping[str, str]) -> dict[str, int]:
    """The amount of a form in the unit that it gives, under the API's name."""
    unit, text = fields.get("unit", "money"), fields.get("limit_usd")
    if unit == "money":
        return {"limit_microusd": _microusd(text)}
    number = _whole(text, "Limit")
    if number is None:
        raise FormProblem(f"Limit: expected a whole number of {unit}")
    return {f"limit_{unit}": number}


def _rates(fields: Mapping[str, str]) -> dict[str, Any]:
    names = {"requests_per_min": "Requests per minute", "tokens_per_min": "Tokens per minute"}
    return {name: _whole(fields.get(name), label) for name, label in names.items()}


# A comma only groups thousands: a decimal comma would mean a hundred times the amount.
_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+"
_WHOLE = re.compile(_GROUPED)
_DOLLARS = re.compile(rf"\$? ?(?P<whole>{_GROUPED}|)(?:\.(?P<fraction>[0-9]{{0,6}}))?")


def _whole(text: str | None, label: str) -> int | None:
    if text is None:
        return None
    digits = text.replace(",", "")
    if not _WHOLE.fullmatch(text) or len(digits) > 15:
        raise FormProblem(f"{label}: expected a whole number, like 1200 or 1,200, found {text!r}")
    return int(digits)


def _number(text: str | None, label: str) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        raise FormProblem(f"{label}: expected a number, found {text!r}") from None
    if not 0 <= number <= 1e7:
        raise FormProblem(f"{label}: expected a number from 0 on, found {text!r}")
    return number


def _share(text: str | None) -> float | None:
    percent = _number(text, _LABELS["semantic_error_max"])
    return None if percent is None else percent / 100


def _microusd(text: str | None) -> int:
    """The exact µUSD of a text in dollars."""
    amount = _DOLLARS.fullmatch(text or "")
    whole, fraction = (amount["whole"].replace(",", ""), amount["fraction"] or "") if amount else ("", "")
    if not whole + fraction or len(whole) > 9:
        raise FormProblem(
            "Limit: expected dollars with at most 6 decimals after a point, like 25, 0.50 or 1,000, "
            f"found {text or 'nothing'!r}"
        )
    return int(whole or "0") * 1_000_000 + int(fraction.ljust(6, "0"))
