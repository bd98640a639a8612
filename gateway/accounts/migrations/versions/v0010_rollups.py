"""Users and tags of generations, and sums of the ledger by one axis.

The gateway that writes the ledger fills the sums from `ledger_days`, block by block of days.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_SUMS = (
    "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_microusd", "cache_write_tokens",
    "cache_write_1h_tokens", "audio_prompt_tokens", "image_prompt_tokens", "reasoning_tokens",
    "audio_completion_tokens", "image_completion_tokens", "tool_calls",
)  # fmt: skip


def upgrade() -> None:
    # the defaults also serve a process of the version before
    for name in ("user", "tags"):
        op.add_column("ledger", sa.Column(name, sa.Text, nullable=False, server_default=""))
    op.create_table(
        "ledger_rollups",
        sa.Column("period", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("axis", sa.Text, primary_key=True),
        sa.Column("team_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("value", sa.Text, primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _SUMS),
        sqlite_with_rowid=False,
    )
