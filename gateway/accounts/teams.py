"""Teams and their keys as plain values; generates keys, and computes their digests and prefixes.

No SQL. Invariant: no part of the gateway keeps a key's plaintext.

A key has 256 random bits, so a SHA-256 of it is enough. Slow password hashes (bcrypt, argon2)
defend secrets that people choose and that can be guessed offline; 2**256 keys cannot be, and each
request would pay for a slow hash. A look-up of the digest in a hash table leaks nothing useful by
its timing: steering the bits of a digest would need to invert SHA-256.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from policies import Budget
from policies.routing import Residency
from policies.verification import Verify
from policies.windows import DEPLOYMENT, Overdraft, Unit

if TYPE_CHECKING:
    from cache import Partition

_KEY_START = "sk-sw-"
_PREFIX_CHARS = len(_KEY_START) + 4


@dataclass(frozen=True, slots=True)
class Team:
    """The unit that pays. A limit of None means unlimited. Times are in unix seconds.

    `semantic_error_max` None: the gateway's own bound. `verify` None: the gateway's own mode. `regions`
    and `retention_days_max` say where its requests may go (`policies.routing.Residency`); `store_s_max` is
    how long anything of them is kept here, in seconds, 0: not at all.
    """

    id: int
    name: str
    created_at_s: float
    is_active: bool = True
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    semantic_error_max: float | None = None
    is_semantic_enabled: bool = True
    is_store_enabled: bool = True  # responses may be stored where a request asks for it
    verify: Verify | None = None
    time_zone: str = ""  # of its budgets' days, weeks and months; empty: UTC
    regions: tuple[str, ...] | None = None
    retention_days_max: int | None = None
    store_s_max: int | None = None

    @property
    def residency(self) -> Residency:
        """The rule on where its requests may go."""
        return Residency(self.regions, self.retention_days_max)

    @property
    def rules(self) -> tuple[Any, ...]:
        """Its rules on where requests go and what is kept; empty without one. They divide its cache."""
        if self.regions is None and self.retention_days_max is None and self.store_s_max is None:
            return ()
        return self.regions, self.retention_days_max, self.store_s_max

    def kept_s(self, seconds: int) -> int:
        """The seconds that something of its requests is kept, where the settings say `seconds`."""
        return seconds if self.store_s_max is None else min(seconds, self.store_s_max)


@dataclass(frozen=True, slots=True)
class Key:
    """A team's virtual key. `prefix` may be shown; `models` None: all models."""

    id: int
    team_id: int
    name: str
    prefix: str
    digest: bytes = field(repr=False)
    created_at_s: float
    is_active: bool = True
    expires_at_s: float | None = None
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    models: tuple[str, ...] | None = None
    last_used_at_s: float | None = None
    owner: str = ""  # the person whose key it is; empty: the team's


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key, with the plaintext that is shown once."""

    key: Key
    plaintext: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller of a request: the key, its team and the team's budgets; and of a person with a token the
    `user`, in place of what the request says.

    `at_deployments` are the `budgets` that limit deployments. `has_hard_money`: a hard budget
    limits money. `is_plain`: all budgets limit the team's money, and none allows overdraft.
    """

    key: Key
    team: Team
    budgets: tuple[Budget, ...]
    user: str = ""
    at_deployments: tuple[Budget, ...] = field(init=False)
    has_hard_money: bool = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        at_deployments = tuple(budget for budget in self.budgets if budget.axis == DEPLOYMENT)
        object.__setattr__(self, "at_deployments", at_deployments)
        has_hard_money = any(budget.is_hard and budget.unit is Unit.MONEY for budget in self.budgets)
        object.__setattr__(self, "has_hard_money", has_hard_money)
        is_plain = all(budget.is_shared and budget.overdraft is Overdraft.REFUSE for budget in self.budgets)
        object.__setattr__(self, "is_plain", is_plain)


def scope_of(team_id: int) -> str:
    """The scope that keeps a team's answers and rate limits apart from other teams'."""
    return f"team:{team_id}"


@lru_cache(maxsize=10_000)
def partition_of(secret: str | None, team_id: int) -> Partition:
    """The cache partition of a team, which holds its answers alone."""
    from cache import partition  # imports a Redis client, which accounts' values do without

    return partition((secret or "").encode(), scope_of(team_id))


def new_plaintext() -> str:
    """A new key: `sk-sw-` and 256 bits as 43 characters of base64url."""
    return _KEY_START + secrets.token_urlsafe(32)


def digest(plaintext: str) -> bytes:
    """The SHA-256 of a key; works for any text, also for invalid UTF-8."""
    return hashlib.sha256(plaintext.encode("utf-8", "surrogatepass")).digest()


def shown_prefix(plaintext: str) -> str:
    return plaintext[:_PREFIX_CHARS]
