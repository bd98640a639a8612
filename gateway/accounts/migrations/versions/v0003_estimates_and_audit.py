"""Mark rows of the ledger whose tokens are estimated; keep what an admin asked to see."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # the default also serves a process of the version before, which goes on writing rows
    op.add_column("ledger", sa.Column("usage_estimated", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("team_id", sa.Integer, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("entry", sa.Text, nullable=False),
        sa.Column("client", sa.Text, nullable=False),
        sa.Column("way", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
