"""Budgets on keys, users, tags, models and deployments, in money, tokens or requests; time zones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_KIND = ("team_id", "window_kind", "is_hard", "axis", "whose", "unit", "rolling_s")


def upgrade() -> None:
    # the defaults also serve a process of the version before
    op.add_column("teams", sa.Column("time_zone", sa.Text, nullable=False, server_default=""))
    for name, default in (("axis", "team"), ("whose", ""), ("unit", "money"), ("overdraft", "refuse")):
        op.add_column("budgets", sa.Column(name, sa.Text, nullable=False, server_default=default))
    for name in ("rolling_s", "epoch"):
        op.add_column("budgets", sa.Column(name, sa.Integer, nullable=False, server_default="0"))
    for name in ("raised_by", "raised_until_ms", "begun_ms"):
        op.add_column("budgets", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.drop_index("uq_budgets_kind", "budgets")
    op.create_index("uq_budgets_kind", "budgets", list(_KIND), unique=True)
    op.create_table(
        "budget_counts",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("field", sa.Text, primary_key=True),
        sa.Column("spent", sa.BigInteger, nullable=False),
        sa.Column("keep_until_ms", sa.BigInteger, nullable=False),
    )
