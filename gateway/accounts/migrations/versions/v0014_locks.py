"""Locks of conversations, which expire by themselves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("conversations", sa.Column("locked_by", sa.Text, nullable=False, server_default=""))
    op.add_column("conversations", sa.Column("locked_until_s", sa.Double, nullable=False, server_default="0"))
