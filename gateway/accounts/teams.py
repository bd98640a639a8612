"""Teams and their keys, as plain values; how a key is made, shown and recognised.

Knows no SQL. Invariant: a key's plaintext exists in the moment it is made and in its owner's hands, nowhere else.

A key is 256 random bits, so its SHA-256 is all that has to be kept: slow password hashes (bcrypt, argon2) defend
secrets that people choose and that can be guessed offline; 2**256 keys cannot be, and a slow hash would be paid on
every request. Looking the digest up in a hash table leaks nothing useful by its timing either: who could steer a
digest's bits could invert SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypedDict

from cache import Partition, partition
from policies import Budget

_KEY_START = "sk-sw-"
_PREFIX_CHARS = len(_KEY_START) + 4


@dataclass(frozen=True, slots=True)
class Team:
    """Who pays. Limits None: unlimited. `semantic_error_max` None: the gateway's own bound. Times in unix seconds."""

    id: int
    name: str
    created_at_s: float
    is_active: bool = True
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    semantic_error_max: float | None = None
    is_semantic_enabled: bool = True


@dataclass(frozen=True, slots=True)
class Key:
    """A team's virtual key. `prefix` is what may be shown of it; `models` None: all of them."""

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


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made, with the plaintext that is shown this once."""

    key: Key
    plaintext: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is calling: the key, its team, and the team's budgets."""

    key: Key
    team: Team
    budgets: tuple[Budget, ...]


def scope_of(team_id: int) -> str:
    """The name under which a team's answers and rate limits are kept, apart from all others'."""
    return f"team:{team_id}"


@lru_cache(maxsize=10_000)
def partition_of(secret: str | None, team_id: int) -> Partition:
    """The cache partition of a team: its own answers, and no other team's."""
    return partition((secret or "").encode(), scope_of(team_id))


class TeamFields(TypedDict, total=False):
    """What can be set of a team beside its name."""

    is_active: bool
    requests_per_min: int | None
    tokens_per_min: int | None
    semantic_error_max: float | None
    is_semantic_enabled: bool


class TeamChanges(TeamFields, total=False):
    name: str


class KeyFields(TypedDict, total=False):
    """What can be set of a key beside its name."""

    is_active: bool
    expires_at_s: float | None
    requests_per_min: int | None
    tokens_per_min: int | None
    models: tuple[str, ...] | None


class KeyChanges(KeyFields, total=False):
    name: str


class BudgetChanges(TypedDict, total=False):
    limit_microusd: int
    is_hard: bool


def new_plaintext(random_bytes: Callable[[int], bytes]) -> str:
    """A new key: `sk-sw-` and 256 bits in 43 characters of base64url."""
    return _KEY_START + base64.urlsafe_b64encode(random_bytes(32)).rstrip(b"=").decode()


def digest(plaintext: str) -> bytes:
    """SHA-256 of the key as it came in the header; total, also for text that is not UTF-8."""
    return hashlib.sha256(plaintext.encode("utf-8", "surrogatepass")).digest()


def shown_prefix(plaintext: str) -> str:
    return plaintext[:_PREFIX_CHARS]
