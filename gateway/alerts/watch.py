"""Watches all budgets, and alerts once per window for each threshold and for a projected
exhaustion.

    sameway:{alerts}:sent:...   string  the alert was raised; expires with its window
    sameway:{alerts}:alike:...  string  how many values of an each-value budget raised it
    sameway:{alerts}:queue      zset    messages for the webhook, by the time of their next attempt, ms
    sameway:{alerts}:mail       zset    messages for the e-mail
    sameway:{alerts}:lock       string  the worker that now watches and delivers

Every worker runs a watch; the lock lets a single worker work. Knows no requests. Invariants:

- one script marks an alert and queues its messages, so no kill loses or doubles an alert, even if
  two workers have the lock;
- a message leaves the queue when the receiver took it, or after `KEPT_S`. A kill after the delivery
  repeats it with the same id, by which receivers drop repetitions;
- in an each-value budget every value has its own alert, whatever other values did; after the first
  `VALUES_TOLD` values an alert is sent when their number doubles, so that no client fills a
  mailbox;
- a queue has at most `QUEUE_MAX` messages; a queue that is full or whose receiver is away does not
  delay the other.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from gateway.accounts import Team
from gateway.accounts.accounts import Accounts
from gateway.alerts.webhook import DeliveryFailed
from gateway.journey.budget_words import amount_words, subject_words
from gateway.loggers import get_logger
from gateway.settings import AlertSettings
from policies import Budgets
from policies.holds import WINDOW_KEPT_S, BudgetState
from policies.lease import Lease
from policies.pace import pace_of
from policies.redis import RedisCommands
from policies.windows import WindowKind

KEPT_S = 86_400
"""The seconds for which a message is retried."""

QUEUE_MAX = 1_000

VALUES_TOLD = 20
"""How many values of a budget get their own message for the same alert in a window."""

_PREFIX = "sameway:{alerts}:"
_SENT, _ALIKE, _LOCK = _PREFIX + "sent:", _PREFIX + "alike:", _PREFIX + "lock"
CHANNELS = {"webhook": _PREFIX + "queue", "email": _PREFIX + "mail"}
"""The queues of the channels; the log needs no queue."""

DELIVERED, DELAYED, LOST = "delivered", "delayed", "lost"
"""The outcomes of a message: DELAYED after each failed attempt, LOST after the last."""

_LOOK_EVERY_S = 5.0
_IDLE_S = 1.0
_ASKED_AGAIN_MS = 600_000  # whether a rolling window's mark has expired
_LOCK_MS = 30_000  # longer than a delivery
_TRIES_AFTER_S = (5, 30, 120, 600, 1_800, 3_600, 7_200)  # the last one again until KEPT_S
_VALUE_CHARS_MAX = 64
_PROJECTED = "projected"

# KEYS mark, number of those alike, queues. ARGV the keys' life in ms (0: for ever), message, due,
# the most messages of a queue, VALUES_TOLD. Replies 0 where the alert was raised before or is not
# told, else the places of the queues that are full.
_RAISE = """
if redis.call('SETNX', KEYS[1], 1) == 0 then return 0 end
local number = redis.call('INCR', KEYS[2])
if ARGV[1] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
  if number == 1 then redis.call('PEXPIRE', KEYS[2], ARGV[1]) end
end
if number > tonumber(ARGV[5]) and math.frexp(number) ~= 0.5 then return 0 end
local full = {}
for place = 3, #KEYS do
  if redis.call('ZCARD', KEYS[place]) >= tonumber(ARGV[4]) then full[#full + 1] = place - 3
  else redis.call('ZADD', KEYS[place], ARGV[3], ARGV[2]) end
end
return full
"""

# KEYS queue. ARGV message, its successor, due. Replies 0 where the message is gone.
_PUT_BACK = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[2])
return 1
"""

_log = get_logger()


class AlertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The `data` of a message, and the fields of the log line. Amounts are in `unit`; money in
    µUSD.

    `percent` is the threshold, None for a projection; `value` is the axis value of an each-value
    budget.
    """

    budget_id: int
    team_id: int
    team: str
    axis: str
    value: str
    unit: str
    window: str
    window_id: str
    window_ends_at: str | None
    is_hard: bool
    limit: int
    spent: int
    percent: int | None
    used_up_at: str | None
    text: str


class Alert(msgspec.Struct, frozen=True):
    """A due alert. `kind` names the threshold or projection in a window of the budget; `mark` adds
    the axis value.

    Redis keeps both for `kept_ms`, 0 for ever.
    """

    kind: str
    mark: str
    kept_ms: int
    facts: AlertFacts

    @property
    def type(self) -> str:
        """The type of its message."""
        return "budget.exhaustion_projected" if self.facts.percent is None else "budget.threshold_reached"


class _QueuedMessage(msgspec.Struct, frozen=True):
    id: str
    at_ms: int
    body: str
    tries: int = 0


class Channel(Protocol):
    """A receiver of messages."""

    async def deliver(self, message_id: str, at_s: float, body: bytes) -> None:
        """Send `body`, JSON, at the time `at_s`, unix seconds. Raises DeliveryFailed."""

    def aclose(self) -> None:
        """Close the connections."""


@dataclass(eq=False, repr=False)
class AlertWatch:
    """Watches budgets and delivers alerts: `run` it until cancelled, or call `step`.

    `channels` are the configured members of `CHANNELS`. `count` is called with a channel and a
    message's outcome: delivered, delayed or lost. `clock` gives unix seconds.
    """

    redis: RedisCommands
    accounts: Accounts
    budgets: Budgets
    settings: AlertSettings
    channels: Mapping[str, Channel]
    _: KW_ONLY
    count: Callable[[str, str], None]
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lease = Lease(self.redis, _LOCK, secrets.token_hex(16), _LOCK_MS)
        self._looked_at_s: float | None = None
        self._known: dict[str, int] = {}  # marks that were in Redis at that moment

    async def run(self) -> None:
        """Step until cancelled. Errors of Redis and of the database pass through."""
        try:
            await self._lease.keep(self._turn)
        finally:
            for channel in self.channels.values():
                channel.aclose()

    async def _turn(self) -> float:
        await self.step()
        return _IDLE_S if self.channels else _LOOK_EVERY_S

    async def step(self) -> bool:
        """Check the budgets and deliver messages, each when due, if this worker has the lock.

        Returns whether it has.
        """
        if not await self._lease.take():
            return False
        now_s = self.clock()
        if self._looked_at_s is None or not 0 <= now_s - self._looked_at_s < _LOOK_EVERY_S:
            self._looked_at_s = now_s
            await self._look(int(now_s * 1000))
        for name in self.channels:
            await self._deliver(name)
        return True

    async def _look(self, at_ms: int) -> None:
        budgets = await self.accounts.list_budgets()
        if not budgets:
            return
        teams = {team.id: team for team in await self.accounts.list_teams()}
        alerts = list(due(await self.budgets.states(budgets, at_ms), self.settings, teams, at_ms))
        count_by_kind = Counter(alert.kind for alert in alerts)
        raised_before, self._known = self._known, {}
        for number, alert in enumerate(alerts):
            raised_ms = raised_before.get(alert.mark)
            if raised_ms is None or not 0 <= at_ms - raised_ms < _ASKED_AGAIN_MS:
                await self._raise(alert, number, count_by_kind[alert.kind] - 1, at_ms)
                raised_ms = at_ms
            self._known[alert.mark] = raised_ms

    async def _raise(self, alert: Alert, number: int, other_values: int, at_ms: int) -> None:
        """Log and queue an alert, unless it was raised before. `number` is its index among all due
        alerts.

        `other_values` is the number of further values of the budget with the same alert.
        """
        facts = alert.facts
        if other_values:
            facts = msgspec.structs.replace(facts, text=f"{facts.text}; so it is for {other_values} more")
        content = {"type": alert.type, "timestamp": _iso(at_ms), "data": facts}
        name = f"msg_{at_ms:012x}{number:06x}{secrets.token_hex(12)}"  # Redis sorts messages of one moment by it
        message = msgspec.json.encode(_QueuedMessage(name, at_ms, msgspec.json.encode(content).decode()))
        keys = [_SENT + alert.mark, _ALIKE + alert.kind, *(CHANNELS[channel] for channel in self.channels)]
        full_queues = await self.redis.eval(
            _RAISE, len(keys), *keys, alert.kept_ms, message, at_ms, QUEUE_MAX, VALUES_TOLD
        )
        if full_queues == 0:
            return
        _log.warning("budget_alert", **msgspec.structs.asdict(facts))
        for channel in (list(self.channels)[index] for index in full_queues):
            self.count(channel, LOST)
            reason = f"{QUEUE_MAX} messages wait"
            _log.warning("alert_not_queued", channel=channel, budget_id=alert.facts.budget_id, reason=reason)

    async def _deliver(self, channel: str) -> None:
        """Send the due messages of a channel until a delivery fails: all have the same receiver."""
        queue = CHANNELS[channel]
        while await self._lease.take():
            now_s = self.clock()
            queued = await self.redis.execute_command("ZRANGEBYSCORE", queue, "-inf", int(now_s * 1000), "LIMIT", 0, 1)
            if not queued or not await self._send(channel, queued[0], now_s):
                return

    async def _send(self, channel: str, queued: bytes, now_s: float) -> bool:
        """Send one message. Returns False if it will be retried later."""
        name, tries, outcome, reason, queue = None, 0, LOST, "", CHANNELS[channel]
        try:
            message = msgspec.json.decode(queued, type=_QueuedMessage)
            name, tries = message.id, message.tries + 1
            await self.channels[channel].deliver(name, now_s, message.body.encode())
            outcome = DELIVERED
        except msgspec.MsgspecError as error:
            reason = f"not a message: {error}"
        except DeliveryFailed as error:
            reason = str(error)
            wait_s = _TRIES_AFTER_S[min(tries, len(_TRIES_AFTER_S)) - 1]
            if now_s + wait_s < message.at_ms / 1000 + KEPT_S and not error.is_final:
                self.count(channel, DELAYED)
                _log.info("alert_delayed", channel=channel, message=name, tries=tries, next_in_s=wait_s, reason=reason)
                later = msgspec.json.encode(msgspec.structs.replace(message, tries=tries))
                await self.redis.eval(_PUT_BACK, 1, queue, queued, later, int((now_s + wait_s) * 1000))
                return False
        self.count(channel, outcome)
        if reason:
            _log.warning("alert_not_delivered", channel=channel, message=name, tries=tries, reason=reason)
        await self.redis.execute_command("ZREM", queue, queued)
        return True


def due(
    states: Sequence[BudgetState], settings: AlertSettings, teams: Mapping[int, Team], at_ms: int
) -> Iterator[Alert]:
    """All alerts that hold at `at_ms`, unix milliseconds, also if raised before; low thresholds
    first.
    """
    for state in states:
        limit = state.budget.limit_at(at_ms)
        if state.spent <= 0:
            continue
        team = teams.get(state.budget.team_id)
        name, made_ms = (team.name, int(team.created_at_s * 1000)) if team else (str(state.budget.team_id), 0)
        for percent in sorted(settings.thresholds):
            if state.spent * 100 >= limit * percent:
                yield _alert(state, limit, name, at_ms, percent)
        used_up_at_ms = pace_of(state, at_ms, team_made_ms=made_ms).used_up_at_ms
        if settings.is_projected and state.window.end_ms is not None and used_up_at_ms is not None:
            yield _alert(state, limit, name, at_ms, used_up_at_ms=used_up_at_ms)


def _alert(
    state: BudgetState,
    limit: int,
    team: str,
    at_ms: int,
    percent: int | None = None,
    used_up_at_ms: int | None = None,
) -> Alert:
    budget, window = state.budget, state.window
    is_rolling = budget.window is WindowKind.ROLLING
    threshold = _PROJECTED if percent is None else str(percent)
    used_up_at = None
    spent = f"{amount_words(state.spent, budget.unit)} of {amount_words(limit, budget.unit)}"
    subject = f"The {window.kind.value} budget of team {team}{subject_words(state)}"
    text = f"{subject} has reached {percent}%: {spent}"
    if used_up_at_ms is not None:
        used_up_at = _iso(used_up_at_ms)
        text = f"{subject} is used up at {used_up_at} at this pace, before its window ends: {spent} so far"
    facts = AlertFacts(
        budget_id=budget.id,
        team_id=budget.team_id,
        team=team,
        axis=budget.axis,
        value=_value(state),
        unit=budget.unit.value,
        window=window.kind.value,
        window_id=window.id,
        window_ends_at=None if window.end_ms is None or is_rolling else _iso(window.end_ms),
        is_hard=budget.is_hard,
        limit=limit,
        spent=state.spent,
        percent=percent,
        used_up_at=used_up_at,
        text=text,
    )
    kept_ms = 0 if window.end_ms is None else window.end_ms - at_ms + WINDOW_KEPT_S * 1000
    if is_rolling:
        kept_ms = budget.rolling_s * 1000
    kind = f"{budget.id}.{budget.epoch}:{window.id}:{limit}:{threshold}"
    return Alert(kind, f"{kind}:{state.digest}" if state.digest else kind, kept_ms, facts)


def _value(state: BudgetState) -> str:
    """The axis value of a state, shortened; `*` if values share a count."""
    value = state.budget.value if state.budget.value is not None else state.value.removeprefix("=")
    return value[:_VALUE_CHARS_MAX]


def _iso(at_ms: int) -> str:
    """The time `at_ms` by RFC 3339 in UTC; empty beyond the year 9999."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""
