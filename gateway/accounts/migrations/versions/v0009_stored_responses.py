"""Responses that callers asked to keep, and a team's choice to keep none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    # the default also serves a process of the version before
    op.add_column("teams", sa.Column("is_store_enabled", sa.Boolean, nullable=False, server_default=sa.true()))
    op.create_table(
        "responses",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Integer, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
        sa.Column("key_id", sa.Integer, nullable=False),
        sa.Column("previous_id", sa.Text),
        sa.Column("expires_at_s", sa.Double, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_responses_expires_at_s", "responses", ["expires_at_s"])
    op.create_index(
        "ix_responses_team_id_expires_at_s_size_bytes", "responses", ["team_id", "expires_at_s", "size_bytes"]
    )
