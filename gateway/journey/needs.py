"""What a request needs of its team's budgets: amounts, and the values that budgets go by.

Asks nothing and holds nothing. Invariants: a field that a client leaves out is a value of its own,
empty; a value of any JSON type is a text, the same for equal values; a team whose budgets are all
on its own money costs none of this work.
"""

import hashlib
from collections.abc import Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.accounts import Identity
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.journey.turn import NO_LABELS, Labels, Turn
from policies import Budget, Demand
from policies.counters import Need, value_of
from policies.windows import ALIAS, DEPLOYMENT, KEY, SESSION, TAG, USER, Overdraft

TAGS_MAX = 16
"""The tags of a request that its rows of the ledger have."""

_NAMED = frozenset({"user", "safety_identifier", "prompt_cache_key"})
_UNNAMED: dict[str, str] = {}
_READ_CHARS, _KEPT_CHARS, _DIGEST_CHARS = 1024, 64, 16


def need_of(identity: Identity, alias: Alias, demand: Demand, body: Mapping[str, Any], labels: Labels) -> Need:
    """What a request to `alias` may use at most, for the budgets that need no deployment."""
    microusd = alias.worst_case_microusd(demand)
    if identity.is_plain:
        return Need(microusd)
    usual = alias.usual_output(demand) if any(map(_may_run_over, identity.budgets)) else None
    return Need(
        microusd=microusd,
        tokens=alias.worst_case_tokens(demand),
        usual_microusd=None if usual is None else alias.worst_case_microusd(demand, usual),
        usual_tokens=None if usual is None else alias.worst_case_tokens(demand, usual),
        values=values_of(identity, alias.name, body, labels),
    )


def need_at(alias: Alias, deployment: Deployment, demand: Demand, beyond_microusd: int | None = None) -> Need:
    """What a try at `deployment` may use at most; `beyond_microusd` instead of its worst case."""
    output = alias.output_max(deployment, demand) * demand.choices
    microusd = alias.worst_case_at(deployment, demand) if beyond_microusd is None else beyond_microusd
    return Need(microusd, demand.prompt_tokens_read + output, values={DEPLOYMENT: deployment.group})


def _may_run_over(budget: Budget) -> bool:
    return budget.is_hard and budget.overdraft is not Overdraft.REFUSE


_HEADER_CHARS = 200


def values_of(identity: Identity, alias: str, body: Mapping[str, Any], labels: Labels) -> dict[str, str]:
    """The values of a request on the axes of its team's budgets."""
    values = {KEY: str(identity.key.id), ALIAS: alias, USER: identity.user or _user(body)}
    axes = {budget.axis for budget in identity.budgets}
    if names := [axis for axis in axes if axis.startswith(TAG)]:
        sent = _sent(labels)
        values |= {name: _tag(sent, name.removeprefix(TAG)) for name in names}
    if SESSION in axes:
        values[SESSION] = session_of(body, labels)
    return values


def booked_labels(turn: Turn, identity: Identity) -> dict[str, str]:
    """The `user`, the `session` and the `tags` of a request as its rows of the ledger have them, where
    it names any: texts of bounded length, the tags as a JSON object.
    """
    body, labels = turn.body, turn.labels
    if turn.booked is not None or (labels is NO_LABELS and not identity.user and _NAMED.isdisjoint(body)):
        return turn.booked or _UNNAMED
    booked = {}
    if user := identity.user or _user(body):
        booked["user"] = _kept(user)
    if session := session_of(body, labels):
        booked["session"] = session
    if labels is not NO_LABELS:
        header, metadata = sent = _sent(labels)
        first = islice(dict.fromkeys([*islice(metadata, TAGS_MAX), *header]), TAGS_MAX)
        tags = {_kept(name): _kept(_tag(sent, name)) for name in first}
        tags = {name: value for name, value in tags.items() if name and value}
        if tags:
            booked["tags"] = msgspec.json.encode(tags, order="deterministic").decode()
    return booked


def identity_headers(
    sources: Mapping[str, str], identity: Identity, body: Mapping[str, Any], labels: Labels, first_turn: bytes
) -> tuple[tuple[str, str], ...]:
    """The headers that name a request's team, user, session or tag, by their sources. What a client
    wrote is quoted as in a URL; a header without a value is left out.
    """
    sent = _sent(labels)
    values = {"team": str(identity.team.id), "key": str(identity.key.id), "user": identity.user or _user(body)}
    values["session"] = session_of(body, labels) or first_turn.hex()
    found = [(name, values.get(source) or _tag(sent, source.partition(":")[2])) for name, source in sources.items()]
    return tuple([(name.lower(), quote(value[:_HEADER_CHARS])) for name, value in found if value])


def _kept(text: str) -> str:
    """A value as budgets compare it, in characters that databases take; a long one ends in its digest."""
    whole = value_of(text[:_READ_CHARS]).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if len(text) <= _READ_CHARS and len(whole) <= _KEPT_CHARS:
        return whole
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST_CHARS // 2).hexdigest()
    return f"{whole[: _KEPT_CHARS - _DIGEST_CHARS - 1]}~{digest}"


def _user(body: Mapping[str, Any]) -> str:
    user = body.get("safety_identifier")
    return _text(body.get("user") if user is None else user)


def session_of(body: Mapping[str, Any], labels: Labels) -> str:
    """The session that a request names, as budgets, rows and headers have it: in one of
    SESSION_HEADERS, else in its tag `session_id`, else in `prompt_cache_key`. Empty without one.
    """
    return _kept(labels.session or _tag(_sent(labels), "session_id") or _text(body.get("prompt_cache_key")))


def _sent(labels: Labels) -> tuple[dict[str, str], Mapping[str, Any]]:
    """The tags of the header, which come first, and those of the body as sent: there may be a million."""
    named = [part.partition("=") for part in labels.header.split(",")]
    header = {name.strip(): value.strip() for name, _, value in reversed(named) if name.strip()}
    return header, labels.metadata if isinstance(labels.metadata, dict) else {}


def _tag(sent: tuple[dict[str, str], Mapping[str, Any]], name: str) -> str:
    header, metadata = sent
    return header[name] if name in header else _text(metadata.get(name))


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return msgspec.json.encode(value, order="deterministic").decode()
    except (TypeError, ValueError, RecursionError):
        return "unreadable"
