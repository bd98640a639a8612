"""Allow a team one budget of each window and hardness.

Of several, the smallest stays: it was the effective one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    budgets = sa.table("budgets", *map(sa.column, ("id", "team_id", "window_kind", "limit_microusd", "is_hard")))
    other = budgets.alias()
    is_of_kind = sa.and_(*(other.c[name] == budgets.c[name] for name in ("team_id", "window_kind", "is_hard")))
    is_smaller = sa.tuple_(other.c.limit_microusd, other.c.id) < sa.tuple_(budgets.c.limit_microusd, budgets.c.id)
    smaller = sa.select(other.c.id).where(is_of_kind, is_smaller)
    op.execute(sa.delete(budgets).where(smaller.exists()))
    op.create_index("uq_budgets_kind", "budgets", ["team_id", "window_kind", "is_hard"], unique=True)
