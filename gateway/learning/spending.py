"""What teams spend on questions to verifiers, beside what their requests would have cost.

Both sums are of the last 30 days and of all workers, read from the statistics now and then; what
this worker spends in between is added. Knows no verifiers. Invariant: without the statistics, as
while Redis is away, nothing that costs is asked.
"""

import time
from collections.abc import Callable

import msgspec

from gateway.telemetry.stats import Stats
from gateway.telemetry.summary import StatsWindow
from policies.asking import is_affordable

_READ_EVERY_S = 10.0


class _TeamSpend(msgspec.Struct):
    """A team's sums in µUSD."""

    spent: int = 0
    baseline: int = 0
    is_first_day: bool = True


class Spending:
    """`share` of the baseline may be spent. `clock` gives seconds that never decrease."""

    def __init__(self, stats: Stats, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self.share = share
        self._clock = clock
        self._teams: dict[int, _TeamSpend] = {}
        self._read_at = -_READ_EVERY_S

    def allows(self, team_id: int, microusd: int) -> bool:
        """Whether a team may spend so much more."""
        team = self._teams.get(team_id) or _TeamSpend()
        return is_affordable(microusd, team.spent, team.baseline, self.share, is_first_day=team.is_first_day)

    def add(self, team_id: int, microusd: int) -> None:
        """A team has spent so much."""
        self._teams.setdefault(team_id, _TeamSpend()).spent += microusd

    async def read(self) -> None:
        """Read the sums, at most every ten seconds. Errors of the client pass through."""
        if self._clock() - self._read_at < _READ_EVERY_S:
            return
        self._read_at = self._clock()
        month, day = await self._stats.query(StatsWindow.MONTH), await self._stats.query(StatsWindow.DAY)
        teams = {
            team_id: _TeamSpend(
                baseline=tally.cost_microusd + tally.saved_microusd,
                is_first_day=team_id in day.by_team and tally.requests <= day.by_team[team_id].requests,
            )
            for team_id, tally in month.by_team.items()
        }
        for (team_id, _), counts in month.samples.items():
            teams.setdefault(team_id, _TeamSpend()).spent += counts.judging_microusd
        self._teams = teams
