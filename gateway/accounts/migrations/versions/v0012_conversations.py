"""Dialogues that callers keep here, with their items, and responses that are generated in the background."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("responses", sa.Column("status", sa.Text))
    op.add_column("responses", sa.Column("leased_until_s", sa.Double))
    op.create_table(
        "conversations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Integer, sa.ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
        sa.Column("key_id", sa.Integer, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
    )
    op.create_index("ix_conversations_expires_at_s", "conversations", ["expires_at_s"])
    op.create_index(
        "ix_conversations_team_id_expires_at_s_size_bytes", "conversations", ["team_id", "expires_at_s", "size_bytes"]
    )
    op.create_table(
        "conversation_items",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("conversation_id", sa.Text, sa.ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("item", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_conversation_items_id", "conversation_items", ["id"])
    op.create_index("ix_conversation_items_conversation_id_number", "conversation_items", ["conversation_id", "number"])
