"""Ids that providers gave to teams."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "provider_ids",
        sa.Column("deployment", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Integer, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
    )
    op.create_index("ix_provider_ids_team_id", "provider_ids", ["team_id"])
