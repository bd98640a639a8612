"""Teams, keys, budgets, the ledger and its sums by day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "teams",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("is_active", sa.Boolean, nullable=False),
        sa.Column("requests_per_min", sa.BigInteger),
        sa.Column("tokens_per_min", sa.BigInteger),
        sa.Column("semantic_error_max", sa.Double),
        sa.Column("is_semantic_enabled", sa.Boolean, nullable=False),
        sa.UniqueConstraint("name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("team_id", sa.Integer, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("is_active", sa.Boolean, nullable=False),
        sa.Column("expires_at_s", sa.Double),
        sa.Column("requests_per_min", sa.BigInteger),
        sa.Column("tokens_per_min", sa.BigInteger),
        sa.Column("models", sa.JSON),
        sa.Column("last_used_at_s", sa.Double),
        sa.UniqueConstraint("digest"),
        sa.UniqueConstraint("team_id", "name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "budgets",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("team_id", sa.Integer, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False, index=True),
        sa.Column("window_kind", sa.Text, nullable=False),
        sa.Column("limit_microusd", sa.BigInteger, nullable=False),
        sa.Column("is_hard", sa.Boolean, nullable=False),
        sa.CheckConstraint("window_kind IN ('hour', 'day', 'week', 'month', 'total')", name="window_kind"),
        sa.CheckConstraint("limit_microusd >= 0", name="limit_microusd"),
        sqlite_autoincrement=True,
    )
    installation = op.create_table(
        "installation",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("is_claimed", sa.Boolean, nullable=False),
        sa.CheckConstraint("id = 1", name="single"),
    )
    op.bulk_insert(installation, [{"id": 1, "version": 1, "is_claimed": False}])
    _ledger()


def _ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("team_id", sa.Integer, nullable=False),
        sa.Column("key_id", sa.Integer, nullable=False),
        sa.Column("alias", sa.Text, nullable=False),
        sa.Column("deployment", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_microusd", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
    )
    op.create_index(None, "ledger", ["at_ms", "id"])
    op.create_index(None, "ledger", ["team_id", "at_ms", "id"])
    op.create_table(
        "ledger_days",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("team_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("alias", sa.Text, primary_key=True),
        sa.Column("deployment", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_microusd", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    for name in ("ledger_days", "ledger", "installation", "budgets", "keys", "teams"):
        op.drop_table(name)
