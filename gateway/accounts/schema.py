"""The tables, as the last migration leaves them.

No connections. Invariant: `VERSION` is the latest of `migrations/versions`, and the migrations
create exactly these tables (tests/accounts/test_database.py compares them). Ids are never reused,
because the ledger and Redis name deleted teams and keys.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

VERSION = "0002"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

teams = Table(
    "teams",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_at_s", Double, nullable=False),
    Column("is_active", Boolean, nullable=False),
    Column("requests_per_min", BigInteger),
    Column("tokens_per_min", BigInteger),
    Column("semantic_error_max", Double),
    Column("is_semantic_enabled", Boolean, nullable=False),
    UniqueConstraint("name"),
    sqlite_autoincrement=True,
)

keys = Table(
    "keys",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("team_id", ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("created_at_s", Double, nullable=False),
    Column("is_active", Boolean, nullable=False),
    Column("expires_at_s", Double),
    Column("requests_per_min", BigInteger),
    Column("tokens_per_min", BigInteger),
    Column("models", JSON(none_as_null=True)),
    Column("last_used_at_s", Double),
    UniqueConstraint("digest"),
    UniqueConstraint("team_id", "name"),
    sqlite_autoincrement=True,
)

budgets = Table(
    "budgets",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("team_id", ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("window_kind", Text, nullable=False),
    Column("limit_microusd", BigInteger, nullable=False),
    Column("is_hard", Boolean, nullable=False),
    CheckConstraint("window_kind IN ('hour', 'day', 'week', 'month', 'total')", name="window_kind"),
    CheckConstraint("limit_microusd >= 0", name="limit_microusd"),
    # of two budgets of a kind only the smaller one would count
    Index("uq_budgets_kind", "team_id", "window_kind", "is_hard", unique=True),
    sqlite_autoincrement=True,
)

# One row. `version` grows with each change to the tables above. `is_claimed`: the first team and
# key exist.
installation = Table(
    "installation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("is_claimed", Boolean, nullable=False),
    CheckConstraint("id = 1", name="single"),
)

# One row per generation, by the id of its hold. No foreign keys: rows outlive teams and keys.
ledger = Table(
    "ledger",
    metadata,
    Column("id", Text, primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("team_id", Integer, nullable=False),
    Column("key_id", Integer, nullable=False),
    Column("alias", Text, nullable=False),
    Column("deployment", Text, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost_microusd", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Index(None, "at_ms", "id"),
    Index(None, "team_id", "at_ms", "id"),
)

# The ledger summed by UTC day (days since 1970), written in the transaction of the rows. Totals and
# budgets over years are read from it.
ledger_days = Table(
    "ledger_days",
    metadata,
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("team_id", Integer, primary_key=True, autoincrement=False),
    Column("key_id", Integer, primary_key=True, autoincrement=False),
    Column("alias", Text, primary_key=True),
    Column("deployment", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost_microusd", BigInteger, nullable=False),
)
