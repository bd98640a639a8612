"""People that the OpenID provider vouches for: when last, who is disabled here, and whose tokens it has ended.

Values alone, of the accounts' snapshot, since what changes it is seen by all workers and hosts at once, as a
revoked key is; no SQL. Invariants: a person who is disabled is out until
an operator lets them in, however the provider writes capitals; an end counts for what the provider issued up to that moment. Source: OpenID
Connect Back-Channel Logout 1.0, section 2.4.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

DAY_S = 86_400.0


class Person(msgspec.Struct, frozen=True):
    """A person by `name`, which is the `access.user_claim`; `seen_at_s` (unix seconds) is exact to a day."""

    name: str
    seen_at_s: float
    is_disabled: bool


class Persons:
    """Those of one snapshot. `ended` has moments in unix seconds by the names that `ends_of` makes;
    `leavers_days` gives the setting of the moment.
    """

    def __init__(
        self, listed: Mapping[str, Person], ended: Mapping[str, float], leavers_days: Callable[[], int | None]
    ) -> None:
        self.listed = listed
        self._ended = ended
        self._leavers_days = leavers_days
        self._out = dict[str, list[str]]()
        for name, person in listed.items():
            if person.is_disabled:
                self._out.setdefault(name.casefold(), []).append(name)

    def is_disabled(self, name: str) -> bool:
        return name.casefold() in self._out

    def disabled_as(self, name: str) -> list[str]:
        """The names that are disabled and differ from `name` in capitals alone, itself among them."""
        return self._out.get(name.casefold(), [])

    def keys_stop_at_s(self, name: str) -> float | None:
        """When the keys of an owner stop, or stopped, as the owner does not sign in; None: never."""
        person, days = self.listed.get(name), self._leavers_days()
        return None if person is None or days is None else person.seen_at_s + days * DAY_S

    def why_stopped(self, owner: str, now_s: float) -> str:
        """Why the keys of `owner` do not work now; empty where they do."""
        if self.is_disabled(owner):
            return f"{owner}, whose key this is, is disabled here: ask whoever runs this gateway"
        stop_at_s = self.keys_stop_at_s(owner)
        if stop_at_s is None or stop_at_s > now_s:
            return ""
        return (
            f"{owner}, whose key this is, has not signed in for {self._leavers_days()} days: sign in at the dashboard, "
            "and give the keys back on the page My keys"
        )

    def is_ended(self, claims: Mapping[str, Any]) -> bool:
        """Whether the provider ended the session of a token with `claims` after it had issued the token."""
        subject, sid = (str(claims.get(name) or "") for name in ("sub", "sid"))
        names = (f"sub {subject}", f"sid {sid}" if sid else f"alone {subject}")
        return any(self._ended.get(name, -1.0) >= claims["iat"] for name in names)


def ends_of(subjects: set[str], sid: str) -> list[str]:
    """The names of what a logout ends: of a session `sid` its tokens, and those of its `subjects` that name no
    session; without one all tokens of the `subjects`.
    """
    return [f"sid {sid}", *(f"alone {one}" for one in subjects)] if sid else [f"sub {one}" for one in subjects]
