"""The team that pays for what the cache asks by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.accounts import Accounts
from gateway.learning.internal_requests import TEAM, own_identity
from gateway.settings import CacheSettings
from policies import WindowKind


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        (CacheSettings(judge_model="judge", judge_budget_usd=0), []),
        (CacheSettings(), []),
        (CacheSettings(judge_model="judge"), [1_000_000]),
        (CacheSettings(judge_model="judge", judge_budget_usd=0.5), [500_000]),
    ],
    ids=["no money", "nothing to ask", "money by default", "a judge"],
)
async def test_what_is_asked_has_a_budget(tmp_path: Path, settings: CacheSettings, limits: list[int]) -> None:
    """A team with the hard budget of a day that is configured, the same after each start; without money, or without anything to
    ask, there is no team, and so no judge model."""
    accounts = Accounts(f"sqlite:///{tmp_path / 'sameway.db'}")
    await accounts.open()
    for _ in range(2):
        identity = await own_identity(settings, accounts)
        assert [team.name for team in await accounts.list_teams()] == [TEAM] * len(limits)
        budgets = identity.budgets if identity is not None else ()
        assert [(one.window, one.is_hard, one.limit) for one in budgets] == [
            (WindowKind.DAY, True, limit) for limit in limits
        ]
    await accounts.close()
