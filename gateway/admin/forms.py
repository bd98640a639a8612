"""The dashboard's forms: a table of POSTs, each an operation of the admin API, and one handler.

Each change redirects to the page that shows it. An invalid value shows the form again, with the
problem beside it. A new key is the exception to the redirect: its plaintext is in the answer to the
POST and nowhere else. The API's models and the accounts check the values.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ValidationError

from gateway import accounts
from gateway.admin import budgets, cache_views, configuration, operations, teams
from gateway.admin.guard import principal_of
from gateway.admin.html import is_own_path
from gateway.admin.models import Act, SessionId
from gateway.admin.parts import AdminParts
from gateway.learning.reports import ReportOutcome
from gateway.wire.errors import BadRequest
from gateway.wire.requests import in_json_words

Render = Callable[..., Awaitable[Response]]


class FormProblem(Exception):
    """An invalid field; `str()` is the message in the form."""


_REFUSALS = (FormProblem, ValidationError, accounts.AlreadyExists, accounts.Invalid)
_OF_CACHE = (*_REFUSALS, accounts.DoesNotExist)


class _Ids(BaseModel):
    """The values in the path of a form."""

    team_id: int = 0
    key_id: int = 0
    budget_id: int = 0
    batch_id: str = ""
    session_id: SessionId = ""
    act: Act = "reset"


@dataclass(frozen=True, slots=True)
class _Post:
    """A form as it was sent. `fields` has its texts as `read_form` returns them."""

    parts: AdminParts
    ids: Mapping[str, Any]
    fields: dict[str, str]
    models: tuple[str, ...]


async def _as_sent(post: _Post) -> Mapping[str, Any]:
    return post.fields


@dataclass(frozen=True, slots=True)
class _Form:
    """A row of the table.

    `read` makes the values of the operation's body. Afterwards the browser goes to `back`, or gets
    `page` with the operation's result as `shows`. An error in `refusals` shows `page` with the
    problem at the form called `name`; any other error has a page of its own.
    """

    path: str
    operation: Callable[..., Any]
    back: str = ""
    page: str = ""
    name: str = ""
    read: Callable[[_Post], Awaitable[Mapping[str, Any]]] = _as_sent
    refusals: tuple[type[Exception], ...] = _REFUSALS
    shows: str = ""


def add_forms(router: APIRouter, parts: AdminParts, renders: Mapping[str, Render]) -> None:
    """Add a route for each row of the table. `renders` are the pages by name."""
    for form in FORMS:
        name = f"{form.operation.__name__} {form.page}".strip()
        router.add_api_route(form.path, _handler(form, parts, renders.get(form.page)), methods=["POST"], name=name)


def _handler(form: _Form, parts: AdminParts, render: Render | None) -> Callable[[Request], Awaitable[Response]]:
    names, model = signature(form.operation).parameters, get_type_hints(form.operation).get("body")

    async def handle(request: Request) -> Response:
        post = await _post(parts, request)
        arguments = {**post.ids, "parts": parts, "operator": principal_of(request)}
        context = {**post.ids, "form": form.name.format(**post.ids), "values": post.fields, "back": _back(post.fields)}
        try:
            values = await form.read(post)
            if model is not None:
                arguments["body"] = model.model_validate(dict(values), strict=False)  # a form has texts only
            result = await form.operation(**{name: arguments[name] for name in names})
        except Exception as error:
            if render is not None and isinstance(error, form.refusals):
                return await render(request, **context, status=_status(error), problem=words_of(error))
            if isinstance(error, ValidationError):  # in the hidden fields of a button
                raise BadRequest(words_of(error), code="invalid_value") from None
            raise
        if render is not None and form.shows:
            return await render(request, **context, **{form.shows: result})
        return RedirectResponse(form.back.format(**context, result=result, done=_noted(result)), 303)

    return handle


async def _post(parts: AdminParts, request: Request) -> _Post:
    try:
        ids = _Ids.model_validate(request.path_params).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("path", *one["loc"])} for one in error.errors()]) from None
    models = tuple(str(name) for name in (await request.form()).getlist("models"))
    return _Post(parts, ids, await read_form(request), models)


async def read_form(request: Request) -> dict[str, str]:
    """The texts of a form without surrounding space; empty ones are left out."""
    form = await request.form()
    texts = {name: value.strip() for name, value in form.items() if isinstance(value, str)}
    return {name: value for name, value in texts.items() if value}


def _status(error: Exception) -> int:
    return (
        409 if isinstance(error, accounts.AlreadyExists) else 404 if isinstance(error, accounts.DoesNotExist) else 400
    )


def _noted(result: Any) -> str:
    """The name of the message that the dashboard shows after a report of an answer; else empty."""
    if not isinstance(result, ReportOutcome):
        return ""
    return "right" if result.verdict == "right" else f"wrong-{result.effect}"


def _back(fields: Mapping[str, str]) -> str:
    """The page that sent the form."""
    back = fields.get("back", "")
    return back if is_own_path(back) and "?" not in back else "/admin/quality"


# -- the values of a model, from the fields of its form


def _hidden(*names: str) -> Callable[[_Post], Awaitable[Mapping[str, Any]]]:
    async def read(post: _Post) -> Mapping[str, Any]:
        return {name: post.fields.get(name, "") for name in names}

    return read


async def _new_team(post: _Post) -> Mapping[str, Any]:
    fields = post.fields
    budget = await _new_budget(post) if "limit_usd" in fields else None
    return {"name": fields.get("name", ""), "budget": budget, **_rates(fields)}


async def _team(post: _Post) -> Mapping[str, Any]:
    fields = post.fields
    switches = ("is_active", "is_semantic_enabled", "is_store_enabled")
    return {
        "name": fields.get("name", ""),
        **{name: name in fields for name in switches},
        "semantic_error_max": _share(fields.get("semantic_error_max_percent")),
        "verify": fields.get("verify") or None,
        "time_zone": fields.get("time_zone", ""),
        "new_keys": _new_keys(post),
        "regions": fields.get("regions", "").replace(",", " ").split() or None,
        **{name: _whole(fields.get(name), _LABELS[name]) for name in ("retention_days_max", "store_s_max")},
        **_rates(fields),
    }


def _new_keys(post: _Post) -> dict[str, Any]:
    fields = {name.removeprefix("new_"): text for name, text in post.fields.items() if name.startswith("new_")}
    return {"expires_in_s": _in_days(fields), "models": post.models or None, **_rates(fields), **_networks(fields)}


async def _confirmed(post: _Post) -> Mapping[str, Any]:
    team = await post.parts.accounts.team(post.ids["team_id"])
    if post.fields.get("name") != team.name:
        raise FormProblem(f"Type the team's name, {team.name}, to delete it.")
    return {}


async def _key(post: _Post) -> Mapping[str, Any]:
    expires_in_s = _in_days(post.fields)
    return {
        "name": post.fields.get("name", ""),
        "expires_at_s": post.parts.clock() + expires_in_s if expires_in_s is not None else None,
        "models": post.models or None,
        **_rates(post.fields),
        **_networks(post.fields),
    }


async def _rotation(post: _Post) -> Mapping[str, Any]:
    return {"overlap_s": (_number(post.fields.get("overlap_hours"), "The old secret works for, hours") or 0) * 3_600}


def _in_days(fields: Mapping[str, str]) -> float | None:
    days = _number(fields.get("expires_in_days"), "Expires in")
    return days * 86_400 if days is not None else None


def _networks(fields: Mapping[str, str]) -> dict[str, list[str] | None]:
    listed = [part.strip() for part in fields.get("addresses", "").split(",")]
    return {"addresses": listed if any(listed) else None}


async def _new_budget(post: _Post) -> Mapping[str, Any]:
    fields = {"limit_usd": "", **post.fields}
    axis, hours = fields.get("axis", "team"), _number(fields.get("rolling_hours"), "Rolling window, hours")
    if axis == "tag":
        axis = f"tag:{fields.get('tag', '')}"
    value = {"one": fields.get("value", ""), "none": ""}.get(fields.get("whose", ""))
    return {
        "window": fields.get("window", ""),
        **_limit(fields),
        **_kind(fields),
        "axis": axis,
        "value": None if axis == "team" else value,
        "rolling_s": round((hours or 0) * 3600) if fields.get("window") == "rolling" else 0,
    }


def _kind(fields: Mapping[str, str]) -> dict[str, Any]:
    return {"is_hard": fields.get("kind") != "soft", "overdraft": fields.get("overdraft", "refuse")}


async def _budget(post: _Post) -> Mapping[str, Any]:
    return {**_limit(post.fields), **_kind(post.fields)}


async def _raise(post: _Post) -> Mapping[str, Any]:
    days = _number(post.fields.get("days"), "For, days")
    if days is None:
        raise FormProblem("For, days: expected a number")
    (by,) = _limit(post.fields).values()
    return {"by": by, "until_s": post.parts.clock() + days * 86_400}


async def _purge(post: _Post) -> Mapping[str, Any]:
    fields = post.fields
    hours = _number(fields.get("older_than_h"), "Older than")
    names = ("id", "text", "team_id", "namespace", "model", "deployment", "tag")
    values: dict[str, Any] = {name: fields[name] for name in names if name in fields}
    values |= {"older_than_s": hours * 3_600} if hours is not None else {}
    if not values and "all" not in fields:
        raise FormProblem("Fill in at least one field, or tick “Everything, of every team”.")
    if values and "all" in fields:
        raise FormProblem("Tick “Everything, of every team”, or fill in what must match: not both.")
    return {**values, "all": "all" in fields, "dry_run": fields.get("confirmed") != "yes"}


async def _purge_team(post: _Post) -> Mapping[str, Any]:
    return {"team_id": post.ids["team_id"], **{name: post.fields[name] for name in ("tag",) if name in post.fields},
            "dry_run": False}  # fmt: skip


# -- fields


def words_of(error: Exception) -> str:
    """The message that the form shows for an error."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        name = str(first["loc"][-1]) if first["loc"] else ""
        return f"{_label(name)}: {in_json_words(first['msg'])}"
    if isinstance(error, accounts.Invalid):
        _, _, message = str(error).partition(": ")
        return f"{_label(error.field)}: {message}"
    message = str(error)
    return f"{message[:1].upper()}{message[1:]}"


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " ").capitalize())


_LABELS = {
    "requests_per_min": "Requests per minute",
    "tokens_per_min": "Tokens per minute",
    "semantic_error_max": "Wrong semantic hits at most",
    "verify": "The verifier is asked",
    "retention_days_max": "Days kept by providers, at most",
    "store_s_max": "Seconds kept here, at most",
    "limit_microusd": "Limit",
    "expires_at_s": "Expires in",
    "overlap_s": "The old secret works for, hours",
    "text": "Prompt",
    "team_id": "Team",
    "id": "Entry id",
    "older_than_s": "Older than",
}


def _limit(fields: Mapping[str, str]) -> dict[str, int]:
    """The form's amount in the form's unit, under the API's name for it."""
    unit, text = fields.get("unit", "money"), fields.get("limit_usd")
    if unit == "money":
        return {"limit_microusd": _microusd(text)}
    number = _whole(text, "Limit")
    if number is None:
        raise FormProblem(f"Limit: expected a whole number of {unit}")
    return {f"limit_{unit}": number}


def _rates(fields: Mapping[str, str]) -> dict[str, Any]:
    return {name: _whole(fields.get(name), _LABELS[name]) for name in ("requests_per_min", "tokens_per_min")}


# A comma only groups thousands: a decimal comma would mean a hundred times the amount.
_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+"
_WHOLE = re.compile(_GROUPED)
_DOLLARS = re.compile(rf"\$? ?(?P<whole>{_GROUPED}|)(?:\.(?P<fraction>[0-9]{{0,6}}))?")


async def _model(post: _Post) -> Mapping[str, Any]:
    """A model as it stands in a file: YAML, of which JSON is a part."""
    import yaml

    try:
        model = yaml.safe_load(post.fields.get("model", ""))
    except yaml.YAMLError as error:
        raise FormProblem(f"Model: not YAML: {error}") from None
    if not isinstance(model, dict | None):
        raise FormProblem("Model: expected settings by name, such as `deployments:`")
    return {**post.fields, "model": model}


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


# -- the table

_TEAM, _TO_TEAM = "/teams/{team_id}", "/admin/teams/{team_id}?done="
_BUDGET, _AT_BUDGET = _TEAM + "/budgets/{budget_id}", "budget-{budget_id}"
FORMS = (
    _Form("/teams", teams.create_team, "/admin/teams/{result.id}?done=team-created", "teams", "team", read=_new_team),
    _Form(_TEAM, teams.update_team, _TO_TEAM + "team-saved", "team", "settings", read=_team),
    _Form(_TEAM + "/delete", teams.delete_team, "/admin/teams?done=team-deleted", "team", "delete", read=_confirmed),
    _Form(_TEAM + "/keys", teams.create_key, "", "team", "key", read=_key, shows="new_key"),
    _Form(_TEAM + "/keys/{key_id}/rotate", teams.rotate_key, "", "team", "key", read=_rotation, shows="new_key"),
    _Form(_TEAM + "/keys/{key_id}/revoke", teams.revoke_key, _TO_TEAM + "key-revoked"),
    _Form(_TEAM + "/purge", cache_views.purge, _TO_TEAM + "purged", read=_purge_team),
    _Form("/me/{team_id}/keys", teams.create_own_key, "", "me", "key-{team_id}", read=_key, shows="new_key"),
    _Form("/me/keys/{key_id}/rotate", teams.rotate_key, "", "me", read=_rotation, shows="new_key"),
    _Form("/me/keys/{key_id}/revoke", teams.revoke_key, "/admin/me?done=key-revoked"),
    _Form("/me/keep-keys", teams.keep_keys, "/admin/me?done=keys-kept"),
    _Form("/people/disable", teams.disable_person, "/admin/sessions?done=person-disabled", "sessions", "people"),
    _Form("/people/enable", teams.enable_person, "/admin/sessions?done=person-enabled", read=_hidden("name")),
    _Form("/sessions/{session_id}/end", teams.end_session, "/admin/sessions?done=session-ended"),
    _Form(_TEAM + "/budgets", budgets.create_budget, _TO_TEAM + "budget-created", "team", "budget", read=_new_budget),
    _Form(_BUDGET, budgets.update_budget, _TO_TEAM + "budget-saved", "team", _AT_BUDGET, read=_budget),
    _Form(_BUDGET + "/raise", budgets.raise_budget, _TO_TEAM + "budget-raised", "team", _AT_BUDGET, read=_raise),
    _Form(_BUDGET + "/reset", budgets.reset_budget, _TO_TEAM + "budget-reset"),
    _Form(_BUDGET + "/delete", budgets.delete_budget, _TO_TEAM + "budget-deleted"),
    _Form("/deployments/try", operations.try_deployment, "", "deployments", "try",
          read=_hidden("name", "model"), refusals=(accounts.Invalid,), shows="tried"),
    _Form("/deployments/{act}", operations.act, "/admin/deployments?done=deployment-{act}", read=_hidden("name")),
    # a dry run first, as for a purge
    _Form("/models", configuration.set_model, "", "models", "model", read=_model, refusals=_OF_CACHE, shows="changes"),
    _Form("/models/revert", configuration.revert, "", "models", "revert", refusals=_OF_CACHE, shows="changes"),
    _Form("/batches/{batch_id}/cancel", operations.cancel_batch, "/admin/batches?done=batch-cancelled"),
    # a POST, since each look at the texts of a response is written to the audit log
    _Form("/answer", cache_views.answer, "", "answer", read=_hidden("id"), refusals=(), shows="answer"),
    # a dry run first, whose page has a button that repeats the selection for real
    _Form("/cache/purge", cache_views.purge, "", "cache", "purge", read=_purge, refusals=_OF_CACHE, shows="purge"),
    _Form("/cache/certificate", cache_views.certify, "/admin/quality?done=certified"),
    _Form("/cache/clear", cache_views.clear, "/admin/quality?done=cleared"),
    _Form("/cache/report", cache_views.feedback, "{back}?done={done}", read=_hidden("id", "verdict")),
    _Form("/cache/try", cache_views.try_prompt, "", "cache", "try", refusals=_OF_CACHE, shows="tried"),
)  # fmt: skip
