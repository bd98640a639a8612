"""The tables, as the last migration leaves them.

No connections. Invariant: `VERSION` is the latest of `migrations/versions`, and a database has
exactly these tables (tests/accounts/test_database.py compares them). Ids are never reused,
because the ledger and Redis name deleted teams and keys.
"""

from typing import Any

import sqlalchemy as sa

from gateway.accounts.row import COUNTS, KINDS, SUMS

VERSION = "20261128c"  # the last change of the tables: until the first release they change in place
LIMITS = ("requests_per_min", "tokens_per_min")
"""The rate limits of teams and keys."""


def _columns(
    kind: type[sa.types.TypeEngine[Any]] | sa.JSON, *names: str, nullable: bool = False, default: Any = None
) -> list[sa.Column[Any]]:
    """Columns of one type."""
    return [sa.Column(name, kind, nullable=nullable, server_default=default) for name in names]


def _key(**types: type[sa.types.TypeEngine[Any]]) -> list[sa.Column[Any]]:
    """The columns of a primary key."""
    return [sa.Column(name, type_, primary_key=True, autoincrement=False) for name, type_ in types.items()]


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _table(name: str, *parts: Any, **options: Any) -> sa.Table:
    return sa.Table(name, metadata, *parts, **options)


teams = _table(
    "teams",
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_at_s", sa.Double, nullable=False),
    sa.Column("is_active", sa.Boolean, nullable=False),
    *_columns(sa.BigInteger, *LIMITS, nullable=True),
    sa.Column("semantic_error_max", sa.Double),
    sa.Column("verify", sa.Text),
    sa.Column("is_semantic_enabled", sa.Boolean, nullable=False),
    sa.Column("time_zone", sa.Text, nullable=False, server_default=""),
    sa.Column("is_store_enabled", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("new_keys", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("regions", sa.JSON(none_as_null=True)),
    *_columns(sa.BigInteger, "retention_days_max", "store_s_max", nullable=True),
    sa.UniqueConstraint("name"),
    sqlite_autoincrement=True,
)

keys = _table(
    "keys",
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False),
    *_columns(sa.Text, "name", "prefix"),
    sa.Column("digest", sa.LargeBinary(32), nullable=False),
    sa.Column("created_at_s", sa.Double, nullable=False),
    sa.Column("is_active", sa.Boolean, nullable=False),
    sa.Column("expires_at_s", sa.Double),
    *_columns(sa.BigInteger, *LIMITS, nullable=True),
    sa.Column("models", sa.JSON(none_as_null=True)),
    sa.Column("last_used_at_s", sa.Double),
    sa.Column("owner", sa.Text, nullable=False, server_default=""),
    sa.Column("addresses", sa.JSON(none_as_null=True)),
    sa.Column("old_digest", sa.LargeBinary(32)),  # which works until then
    sa.Column("old_until_s", sa.Double),
    sa.UniqueConstraint("digest"),
    sa.UniqueConstraint("team_id", "name"),
    sqlite_autoincrement=True,
)

# `limit_microusd` is in the budget's unit. `whose` is `=` and a value, `*` for each value, or empty. A
# rolling window is a `total` with `rolling_s`.
budgets = _table(
    "budgets",
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("window_kind", sa.Text, nullable=False),
    sa.Column("limit_microusd", sa.BigInteger, nullable=False),
    sa.Column("is_hard", sa.Boolean, nullable=False),
    sa.Column("axis", sa.Text, nullable=False, server_default="team"),
    sa.Column("whose", sa.Text, nullable=False, server_default=""),
    sa.Column("unit", sa.Text, nullable=False, server_default="money"),
    sa.Column("overdraft", sa.Text, nullable=False, server_default="refuse"),
    *_columns(sa.Integer, "rolling_s", "epoch", default="0"),
    *_columns(sa.BigInteger, "raised_by", "raised_until_ms", "begun_ms", default="0"),
    sa.CheckConstraint("window_kind IN ('hour', 'day', 'week', 'month', 'total')", name="window_kind"),
    sa.CheckConstraint("limit_microusd >= 0", name="limit_microusd"),
    # of two budgets of a kind only the smaller one would count
    sa.Index("uq_budgets_kind", "team_id", "window_kind", "is_hard", "axis", "whose", "unit", "rolling_s", unique=True),
    sqlite_autoincrement=True,
)

# What the ledger's rows add to the counts that budgets have of their own, written in the transaction
# of the rows.
budget_counts = _table(
    "budget_counts",
    *_key(name=sa.Text, field=sa.Text),
    *_columns(sa.BigInteger, "spent", "keep_until_ms"),
)

# One row. `version` grows with each change to the tables above. `is_claimed`: the first team and
# key exist. `files_id`: the mark of the place that has the files' contents.
installation = _table(
    "installation",
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("is_claimed", sa.Boolean, nullable=False),
    sa.Column("files_id", sa.Text, nullable=False, server_default=""),
    sa.CheckConstraint("id = 1", name="single"),
)

# One row per session of the dashboard; `digest` is the token's, `mark` that of the admin key or the
# identity provider. `subject`, `sid` and `groups` are the provider's claims, empty for the admin key.
sessions = _table(
    "sessions",
    sa.Column("digest", sa.LargeBinary(32), primary_key=True),
    sa.Column("mark", sa.LargeBinary(32), nullable=False),
    sa.Column("expires_at_s", sa.Double, nullable=False),
    sa.Column("created_at_s", sa.Double, nullable=False, server_default="0"),
    *_columns(sa.Text, "client", "actor", "subject", "sid", default=""),
    sa.Column("groups", sa.JSON, nullable=False, server_default="[]"),
)

# People that the identity provider vouched for, by their names here.
people = _table(
    "people",
    *_key(name=sa.Text),
    sa.Column("seen_at_s", sa.Double, nullable=False),
    sa.Column("is_disabled", sa.Boolean, nullable=False, server_default=sa.false()),
)

# Whose tokens the provider has ended (`persons.py`), and when; kept as long as an older token could last.
ended_tokens = _table("ended_tokens", *_key(name=sa.Text), sa.Column("at_s", sa.Double, nullable=False))

# What each team holds of the rows of a table, written in their transactions (`holdings.py`).
holdings = _table(
    "holdings",
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("store", sa.Text, primary_key=True),
    *_columns(sa.BigInteger, "count", "bytes"),
)

_LIVE = sa.text("status IN ('queued', 'in_progress')")

# Responses that callers asked to keep: the request's own input items, and the response, as JSON.
# `status` is of one that is generated in the background until its lease's end, or was not completed.
responses = _table(
    "responses",
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False),
    sa.Column("key_id", sa.Integer, nullable=False),
    sa.Column("previous_id", sa.Text),
    sa.Column("expires_at_s", sa.Double, nullable=False, index=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    *_columns(sa.LargeBinary, "input", "body"),
    sa.Column("status", sa.Text),
    sa.Column("leased_until_s", sa.Double),
    sa.Index(None, "team_id", "expires_at_s", "size_bytes"),
    sa.Index("ix_responses_live", "team_id", sqlite_where=_LIVE, postgresql_where=_LIVE),
)

# Dialogues that callers keep here, with their items in the order of `number`.
conversations = _table(
    "conversations",
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False),
    sa.Column("key_id", sa.Integer, nullable=False),
    sa.Column("created_at_s", sa.Double, nullable=False),
    sa.Column("expires_at_s", sa.Double, nullable=False, index=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("locked_by", sa.Text, nullable=False, server_default=""),
    sa.Column("locked_until_s", sa.Double, nullable=False, server_default="0"),
    sa.Index(None, "team_id", "expires_at_s", "size_bytes"),
)

conversation_items = _table(
    "conversation_items",
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("conversation_id", sa.ForeignKey(conversations.c.id, ondelete="CASCADE"), nullable=False),
    sa.Column("id", sa.Text, nullable=False, index=True),
    sa.Column("item", sa.LargeBinary, nullable=False),
    sa.Index(None, "conversation_id", "number"),
    sqlite_autoincrement=True,
)

# One row per generation, by the id of its hold. No foreign keys: rows outlive teams and keys. PostgreSQL
# keeps each month in a partition (`months.py`), so its key has the moment, which the id determines.
ledger = _table(
    "ledger",
    *_key(id=sa.Text, at_ms=sa.BigInteger),
    sa.Column("request_id", sa.Text, nullable=False),
    *_columns(sa.Integer, "team_id", "key_id"),
    *_columns(sa.Text, "alias", "deployment"),
    *_columns(sa.BigInteger, *COUNTS),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("usage_estimated", sa.Boolean, nullable=False, server_default=sa.false()),
    *_columns(sa.BigInteger, *KINDS, default="0"),
    sa.Column("baseline_microusd", sa.BigInteger),
    *_columns(sa.BigInteger, "prefix_read_microusd", "prefix_write_microusd", default="0"),
    sa.Column("mechanism", sa.Text, nullable=False, server_default=""),
    sa.Column("provider_cost_microusd", sa.BigInteger),
    *_columns(sa.Text, "user", "tags", "session", "region", default=""),
    sa.Index(None, "at_ms", "id"),
    sa.Index(None, "team_id", "at_ms", "id"),
    postgresql_partition_by="RANGE (at_ms)",
)

# The ledger's costs by hour (hours since 1970), written in the transaction of the rows. Budgets of an
# hour are read from it.
ledger_hours = _table(
    "ledger_hours", *_key(hour=sa.BigInteger, team_id=sa.Integer), *_columns(sa.BigInteger, "cost_microusd")
)

# How often the rows and hits of an hour have changed, and up to which change its files have them
# (`ledger_files.py`).
ledger_exports = _table("ledger_exports", *_key(hour=sa.BigInteger), *_columns(sa.BigInteger, "changes", "exported"))

# What operators changed and asked to see. `change` is JSON: a changed field's values before and after. No
# foreign keys: rows outlive teams.
audit = _table(
    "audit",
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("team_id", sa.Integer, nullable=False),
    *_columns(sa.Text, "request_id", "entry", "client", "way"),
    *_columns(sa.Text, "actor", "change", default=""),
    sqlite_autoincrement=True,
)

# The ledger summed by UTC day (days since 1970), written in the transaction of the rows, and hits,
# which have no deployment. Totals and budgets over years are read from it.
ledger_days = _table(
    "ledger_days",
    *_key(day=sa.Integer, team_id=sa.Integer, key_id=sa.Integer, alias=sa.Text, deployment=sa.Text, kind=sa.Text),
    *_columns(sa.BigInteger, *SUMS, "hits", default="0"),
)

# The ledger summed by one axis at a time, over days and blocks of days (`rollups.py`), written in the
# transaction of the rows.
ledger_rollups = _table(
    "ledger_rollups",
    *_key(period=sa.Integer, axis=sa.Text, team_id=sa.Integer, value=sa.Text),
    *_columns(sa.BigInteger, *SUMS, "hits", default="0"),
    sqlite_with_rowid=False,
)

# Requests that were answered without a generation, summed by each worker every few seconds.
ledger_hits = _table(
    "ledger_hits",
    *_key(id=sa.Text, at_ms=sa.BigInteger),
    sa.Column("team_id", sa.Integer, nullable=False),
    sa.Column("key_id", sa.Integer, nullable=False, server_default="0"),
    *_columns(sa.Text, "alias", "source"),
    *_columns(sa.Text, "user", "tags", "session", default=""),
    *_columns(sa.BigInteger, "requests", "unknown", "baseline_microusd"),
    sa.Index(None, "at_ms"),
    postgresql_partition_by="RANGE (at_ms)",
)

# What the rows of both cost, would have cost, and why, summed by UTC day in their transaction.
# `line` is `baseline`, `spent`, `unknown_hits` or a mechanism; a mechanism's amount is what it
# saved. Rows of the ledger without a known baseline are in no line.
savings_days = _table(
    "savings_days",
    *_key(day=sa.Integer, team_id=sa.Integer, alias=sa.Text, line=sa.Text),
    *_columns(sa.BigInteger, "requests", "amount_microusd"),
)

# Files of batches. A row that is not ready is an upload under way, with the room that it may take.
files = _table(
    "files",
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False),
    *_columns(sa.Text, "purpose", "filename"),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at_s", sa.Double, nullable=False),
    sa.Column("expires_at_s", sa.Double),
    sa.Column("is_ready", sa.Boolean, nullable=False),
    sa.Index(None, "team_id", "id"),
)

# Requests of a file that run in the background. `leased_by`: the worker that reads its input or
# writes its output, until the lease's end.
batches = _table(
    "batches",
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False),
    sa.Column("key_id", sa.Integer, nullable=False),
    *_columns(sa.Text, "endpoint", "input_file_id", "status"),
    *_columns(sa.Double, "created_at_s", "expires_at_s"),
    *_columns(sa.Double, "in_progress_at_s", "finalizing_at_s", "cancelling_at_s", "ended_at_s", nullable=True),
    *_columns(sa.Integer, "total", "completed", "failed"),
    *_columns(sa.Text, "output_file_id", "error_file_id", nullable=True),
    sa.Column("output_kept_s", sa.Integer),
    *_columns(sa.JSON(none_as_null=True), "metadata", "errors", nullable=True),
    sa.Column("leased_by", sa.Text, nullable=False),
    sa.Column("leased_until_s", sa.Double, nullable=False),
    sa.Index(None, "team_id", "id"),
    sa.Index("ix_batches_status", "status"),
)

# Ids of objects at providers, by deployment: each belongs to the team that was first given it.
provider_ids = _table(
    "provider_ids",
    *_key(deployment=sa.Text, id=sa.Text),
    sa.Column("team_id", sa.ForeignKey(teams.c.id, ondelete="CASCADE"), nullable=False, index=True),
)

# Lines of a batch that one worker runs at a time; removed at the batch's end.
batch_chunks = _table(
    "batch_chunks",
    sa.Column("batch_id", sa.ForeignKey(batches.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    *_columns(sa.BigInteger, "offset", "size"),
    *_columns(sa.Integer, "first_line", "lines"),
    sa.Column("repeated", sa.JSON, nullable=False),
    sa.Column("is_done", sa.Boolean, nullable=False),
    *_columns(sa.Integer, "completed", "failed"),
    sa.Column("leased_by", sa.Text, nullable=False),
    sa.Column("leased_until_s", sa.Double, nullable=False),
)
