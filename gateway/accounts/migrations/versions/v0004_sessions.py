"""Sessions of the dashboard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("digest", sa.LargeBinary(32), primary_key=True),
        sa.Column("mark", sa.LargeBinary(32), nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=False),
    )
