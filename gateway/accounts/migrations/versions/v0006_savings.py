"""What each generation would have cost without Sameway, and what hits saved.

Rows from before have no known baseline: they count as unknown, and no sum is made of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    # the defaults also serve a process of the version before, which goes on writing rows
    op.add_column("ledger", sa.Column("baseline_microusd", sa.BigInteger))
    op.add_column("ledger", sa.Column("prefix_read_microusd", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("ledger", sa.Column("prefix_write_microusd", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("ledger", sa.Column("mechanism", sa.Text, nullable=False, server_default=""))
    op.add_column("ledger", sa.Column("provider_cost_microusd", sa.BigInteger))
    op.create_table(
        "ledger_hits",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("team_id", sa.Integer, nullable=False),
        sa.Column("alias", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("unknown", sa.BigInteger, nullable=False),
        sa.Column("baseline_microusd", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "savings_days",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("team_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("alias", sa.Text, primary_key=True),
        sa.Column("line", sa.Text, primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("amount_microusd", sa.BigInteger, nullable=False),
    )
