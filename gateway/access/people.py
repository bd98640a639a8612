"""What a person's claims mean here: their name, groups, roles and teams; and callers of /v1 with a token.

No HTTP. A token that was seen before costs a digest and some comparisons: what it says is kept in memory
until it ends or the configuration changes. Invariants: a group that the configuration does not name
gives nothing; a name of a team that there is not gives nothing; the user of a person's requests is the
person, whatever the request says.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.access.agents import CHECK_S, Agents
from gateway.access.provider import Provider, ProviderAway, TokenRefused
from gateway.accounts import Identity
from gateway.accounts.accounts import ALL_PEOPLE, PEOPLE, Accounts
from gateway.accounts.database import is_down
from gateway.accounts.teams import digest
from gateway.loggers import get_logger
from gateway.settings import AccessSettings, GroupSettings, Role, Settings
from gateway.wire.errors import ApiError, Forbidden, Unauthenticated, Unavailable
from policies.counters import value_of

ADMIN_KEY = "admin key"
"""The name of whoever has it, in the audit log."""
_NAME_CHARS_MAX = 200
_SEEN_MAX = 10_000
_IN_TEAMS = (Role.TEAM_ADMIN, Role.MEMBER)
_log = get_logger()


class NoTeam(Forbidden):
    """403: the token is good, and its groups have no team here."""

    code = "no_team"


def name_of(claims: Mapping[str, Any], access: AccessSettings) -> str:
    """The person's name here. Raises TokenRefused."""
    name = claims.get(access.user_claim)
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS_MAX or not name.isprintable():
        raise TokenRefused(f"it has no text of up to {_NAME_CHARS_MAX} characters as `{access.user_claim}`")
    if name.casefold() in (ALL_PEOPLE, ADMIN_KEY) or name != value_of(name):
        raise TokenRefused("its name is one of the gateway's own, has spaces around it, or is not of the form NFKC")
    return name


def groups_of(claims: Mapping[str, Any], access: AccessSettings) -> tuple[str, ...]:
    """The person's groups of those that the configuration names."""
    groups: Any = claims.get(access.groups_claim)
    if groups is None:
        groups = claims
        for name in access.groups_claim.split("."):
            groups = groups.get(name) if isinstance(groups, dict) else None
    listed = groups if isinstance(groups, list) else [groups]
    return tuple([name for name in access.groups if name in listed])


def roles_of(groups: Iterable[str], access: AccessSettings, team_ids: Mapping[str, int]) -> dict[Role, frozenset[int]]:
    """The roles that groups give, each with its teams; `team_ids` are by name."""
    roles: dict[Role, frozenset[int]] = {}
    for group in (access.groups[name] for name in groups if name in access.groups):
        teams = frozenset(team_ids[name] for name in group.teams if name in team_ids)
        if teams or group.role not in _IN_TEAMS:
            roles[group.role] = roles.get(group.role, frozenset()) | teams
    return roles


def team_of(groups: Iterable[str], access: AccessSettings, team_ids: Mapping[str, int]) -> int:
    """The team for which a person's programs ask: that of the first group with one. Raises NoTeam."""
    named = (name for group in groups if group in access.groups for name in access.groups[group].teams)
    for name in named:
        if name in team_ids:
            return team_ids[name]
    raise NoTeam("The groups have no team here: ask whoever runs this gateway for one")


_OF_AGENT: dict[str, Any] = {"iat": 0}  # what a logout ends is its session


class _Seen(msgspec.Struct):
    """A token that was taken: until when, what a logout may name, its caller, and the settings of then, which no
    change keeps.
    """

    until_s: float
    claims: dict[str, Any]
    groups: dict[str, GroupSettings]
    identity: Identity


@dataclass(eq=False)
class Bearers:
    """Callers of /v1 whose bearer is a token of the provider, or one of the gateway's own `agents`.

    `clock` gives unix seconds.
    """

    _settings: Settings
    _provider: Provider
    _accounts: Accounts
    _agents: Agents
    _clock: Callable[[], float] = time.time
    _seen: dict[bytes, _Seen] = field(default_factory=dict, init=False)

    async def identify(self, token: str) -> Identity | None:
        """The caller of a token; None where no tokens are taken or this is none.

        Raises Unauthenticated, NoTeam, Unavailable.
        """
        access = self._settings.access
        if not (access.audience or access.client_id) or token.count(".") != 2:
            return None
        seen = self._seen.get(key := digest(token))
        if seen is None or seen.groups is not access.groups or seen.until_s <= self._clock():
            self._seen.pop(key, None)
            if access.client_id and self._agents.is_own(token):
                seen = await self._of_agent(token, seen)
            elif access.audience:
                seen = await self._taken(token)
            else:
                return None
            if len(self._seen) >= _SEEN_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = seen
        of_team = await self._of_team(seen.identity.team.id)
        if seen.identity.key is not of_team.key:  # the accounts have changed
            self._check_is_in(seen.identity.user, seen.claims)
            seen.identity = Identity(of_team.key, of_team.team, of_team.budgets, seen.identity.user)
        return seen.identity

    async def _taken(self, token: str) -> _Seen:
        access = self._settings.access
        try:
            claims = await self._provider.claims(token, access.audience)
            until_s = min(claims["exp"] + access.leeway_s, claims["iat"] + access.token_s_max)
            if until_s <= self._clock():
                raise TokenRefused(f"it was issued over {access.token_s_max} seconds ago")
            for name, value in access.required_claims.items():
                said = claims.get(name)
                if name == "scope" and isinstance(said, str):  # a list with spaces (RFC 9068, section 2.2.3)
                    said = said.split(" ")
                if value not in (said if isinstance(said, list) else [said]):
                    raise TokenRefused(f"its `{name}` is not the required one")
            user, groups = name_of(claims, access), groups_of(claims, access)
            self._check_is_in(user, claims)
        except TokenRefused as error:
            _log.info("token_refused", reason=str(error))
            raise Unauthenticated(f"The token is not taken: {error}") from None
        except ProviderAway as error:
            raise Unavailable(f"The token can't be checked: {error}", code="provider_away") from None
        self._accounts.saw(user)
        return await self._seen_as(user, groups, until_s, {name: claims.get(name) for name in ("sub", "sid", "iat")})

    async def _of_agent(self, token: str, seen: _Seen | None) -> _Seen:
        """The caller of a token of our own; `seen`, what it was before, holds while the database is away."""
        try:
            lasting = await self._agents.session(token)
        except Exception as error:
            if not is_down(error):
                raise
            if seen is None:
                raise Unavailable("The database does not answer; try again", code="database_unavailable") from None
            seen.until_s = self._clock() + CHECK_S
            return seen
        if lasting is None:
            raise Unauthenticated("The sign-in has ended: sign in again, such as by `/login` or `sameway login`")
        session, until_s = lasting
        self._check_is_in(session.actor, _OF_AGENT)
        return await self._seen_as(session.actor, session.groups, until_s, _OF_AGENT)

    async def _seen_as(self, user: str, groups: Iterable[str], until_s: float, claims: dict[str, Any]) -> _Seen:
        access = self._settings.access
        of_team = await self._of_team(team_of(groups, access, self._accounts.team_ids))
        identity = Identity(of_team.key, of_team.team, of_team.budgets, user)
        return _Seen(until_s, claims, access.groups, identity)

    def _check_is_in(self, user: str, claims: Mapping[str, Any]) -> None:
        """Refuse a token of who is disabled, or was logged out since. Raises Unauthenticated."""
        if self._accounts.persons.is_disabled(user):
            raise Unauthenticated(f"{user} is disabled here: ask whoever runs this gateway")
        if self._accounts.persons.is_ended(claims):
            raise Unauthenticated(
                "The token is not taken: its person was logged out at the provider. Sign in again there"
            )

    async def _of_team(self, team_id: int) -> Identity:
        """What all people of a team have in common. Raises Unauthenticated."""
        identity = self._accounts.people(team_id)
        if identity is None:
            identity = await self._accounts.find_people(team_id)
        if identity is None:
            raise Unauthenticated(f"The key `{PEOPLE}` of your team is revoked or has expired, or the team is off")
        return identity


def check_address(identity: Identity, address: str) -> None:
    """Refuse a request from an `address` that the key's `addresses` leave out. Raises Forbidden."""
    if not identity.is_taken_from(address):
        raise Forbidden(
            f"This API key is not taken from {address or 'here'}: its `addresses` have another network. Send the "
            "request from there, or ask whoever made the key",
            code="address_not_allowed",
        )


def refusal_of(error: TokenRefused | ProviderAway) -> ApiError:
    """What a person sees whose sign-in failed."""
    if isinstance(error, ProviderAway):
        return Unavailable(f"The identity provider can't be used now: {error}", code="provider_away")
    return Forbidden(f"You are not signed in: {error}", code="sign_in_refused")
