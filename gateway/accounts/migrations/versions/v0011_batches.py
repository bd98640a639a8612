"""Batches, and the chunks of lines that workers share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Integer, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
        sa.Column("key_id", sa.Integer, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=False),
        sa.Column("in_progress_at_s", sa.Double),
        sa.Column("finalizing_at_s", sa.Double),
        sa.Column("cancelling_at_s", sa.Double),
        sa.Column("ended_at_s", sa.Double),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("output_file_id", sa.Text),
        sa.Column("error_file_id", sa.Text),
        sa.Column("output_kept_s", sa.Integer),
        sa.Column("metadata", sa.JSON(none_as_null=True)),
        sa.Column("errors", sa.JSON(none_as_null=True)),
        sa.Column("leased_by", sa.Text, nullable=False),
        sa.Column("leased_until_s", sa.Double, nullable=False),
    )
    op.create_index("ix_batches_team_id_id", "batches", ["team_id", "id"])
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_table(
        "batch_chunks",
        sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("first_line", sa.Integer, nullable=False),
        sa.Column("lines", sa.Integer, nullable=False),
        sa.Column("repeated", sa.JSON, nullable=False),
        sa.Column("is_done", sa.Boolean, nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("leased_by", sa.Text, nullable=False),
        sa.Column("leased_until_s", sa.Double, nullable=False),
    )
