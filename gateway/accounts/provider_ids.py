"""Ids that providers gave to teams, by deployment: such an object belongs to its team alone.

Knows no HTTP. Invariant: an id belongs to the team that first got it, for as long as that team
exists.
"""

from collections.abc import Collection

import sqlalchemy as sa

from gateway.accounts.database import Database
from gateway.accounts.schema import provider_ids


class ProviderIds:
    """The ids in the accounts' database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_team(self, deployment: str, team_id: int, ids: Collection[str] | None = None) -> set[str]:
        """The members of `ids` that the team has at `deployment`; with None, all its ids there."""
        statement = sa.select(provider_ids.c.id).where(
            provider_ids.c.deployment == deployment, provider_ids.c.team_id == team_id
        )
        if ids is not None:
            if not ids:
                return set()
            statement = statement.where(provider_ids.c.id.in_(ids))
        return set(await self._database.scalars(statement))

    async def of_others(self, team_id: int, ids: Collection[str]) -> set[str]:
        """The members of `ids` that another team has at any deployment, and this team has nowhere."""
        asked = sa.select(provider_ids.c.id, provider_ids.c.team_id).where(provider_ids.c.id.in_(ids))
        found = await self._database.rows(asked)
        return {row.id for row in found} - {row.id for row in found if row.team_id == team_id}

    async def record(self, deployment: str, team_id: int, ids: Collection[str]) -> None:
        """Give `ids` to the team. An id that already has a team stays with it."""
        rows = [{"deployment": deployment, "id": one, "team_id": team_id} for one in sorted(ids)]
        if rows:
            insert = self._database.insert(provider_ids).on_conflict_do_nothing()
            await self._database.write(insert, rows, is_durable=False)
