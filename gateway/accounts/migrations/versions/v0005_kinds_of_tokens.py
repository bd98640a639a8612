"""The kinds of tokens that providers bill apart, in the ledger and its days."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_KINDS = (
    "cache_write_tokens", "cache_write_1h_tokens", "audio_prompt_tokens", "image_prompt_tokens", "reasoning_tokens",
    "audio_completion_tokens", "image_completion_tokens", "tool_calls",
)  # fmt: skip


def upgrade() -> None:
    # the default also serves a process of the version before, which goes on writing rows
    for table in ("ledger", "ledger_days"):
        for kind in _KINDS:
            op.add_column(table, sa.Column(kind, sa.BigInteger, nullable=False, server_default="0"))
