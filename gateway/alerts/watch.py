"""Watches all budgets, and alerts once a window for each threshold and for a projected end.

    sameway:{alerts}:sent:...   string  the alert was raised; expires with its window
    sameway:{alerts}:queue      zset    messages for the webhook, by the time of their next try, ms
    sameway:{alerts}:lock       string  the worker that watches and delivers now

Every worker runs a watch; the lock lets one of them work. Knows no requests. Invariants:

- one script marks an alert and queues its message, so no kill loses or doubles one, also where two
  workers have the lock;
- a message leaves the queue when the receiver took it, or after `KEPT_S`. A kill between the two
  repeats it with the same id, by which receivers drop repetitions;
- the queue has `QUEUE_MAX` messages at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec
from redis.exceptions import RedisError

from gateway.accounts import Accounts
from gateway.alerts.webhook import DeliveryFailed, Webhook
from gateway.journey.budget import amount_words, subject_words
from gateway.loggers import get_logger
from gateway.settings import AlertSettings
from policies import Budgets
from policies.holds import WINDOW_KEPT_S, BudgetState
from policies.pace import pace_of
from policies.redis import Redis
from policies.windows import WindowKind

KEPT_S = 86_400
"""How long a message is tried again."""

QUEUE_MAX = 1_000

_PREFIX = "sameway:{alerts}:"
_SENT, _QUEUE, _LOCK = _PREFIX + "sent:", _PREFIX + "queue", _PREFIX + "lock"
_LOOK_EVERY_S = 5.0
_IDLE_S = 1.0
_ASKED_AGAIN_MS = 600_000  # whether a rolling window's mark has expired
_LOCK_MS = 30_000  # longer than a delivery
_TRIES_AFTER_S = (5, 30, 120, 600, 1_800, 3_600, 7_200)  # the last one again until KEPT_S
_VALUE_CHARS_MAX = 64
_PROJECTED = "projected"

# KEYS lock. ARGV token, lease in ms. Replies 1 where the caller holds the lock now, else 0.
_TAKE_LOCK = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS lock. ARGV token.
_DROP_LOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

# KEYS mark, queue. ARGV the mark's life in ms (0: for ever), message (empty: none), due, the most
# messages. Replies 0 where the alert was raised before, 2 where the queue is full, else 1.
_RAISE = """
if redis.call('SETNX', KEYS[1], 1) == 0 then return 0 end
if ARGV[1] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
if ARGV[2] == '' then return 1 end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return 2 end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
return 1
"""

# KEYS queue. ARGV message, its successor, due. Replies 0 where the message is gone.
_PUT_BACK = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[2])
return 1
"""

_log = get_logger()


class AlertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The `data` of a message, and the fields of the log line. Amounts are in `unit`; money in µUSD.

    `percent` is the threshold, None for a projection; `value` is the fullest of a budget on each.
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
    """An alert that is due. `mark` names it among all; `kept_ms` is the mark's life, 0 for ever."""

    mark: str
    kept_ms: int
    facts: AlertFacts

    @property
    def type(self) -> str:
        """The type of its message."""
        return "budget.exhaustion_projected" if self.facts.percent is None else "budget.threshold_reached"


class _Message(msgspec.Struct, frozen=True):
    id: str
    at_ms: int
    body: str
    tries: int = 0


class AlertWatch:
    """`run` it until cancelled, or call `step`.

    `clock` gives unix seconds; `token` must differ between workers; `random_hex` gives so many
    random bytes.
    """

    def __init__(
        self,
        redis: Redis,
        accounts: Accounts,
        budgets: Budgets,
        settings: AlertSettings,
        webhook: Webhook | None,
        *,
        clock: Callable[[], float] = time.time,
        token: str | None = None,
        random_hex: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        self._redis = redis
        self._accounts = accounts
        self._budgets = budgets
        self._settings = settings
        self._webhook = webhook
        self._clock = clock
        self._token = token or secrets.token_hex(16)
        self._random_hex = random_hex
        self._looked_at_s: float | None = None
        self._known: dict[str, int] = {}  # marks that were in Redis at that moment

    async def run(self) -> None:
        """Step until cancelled. Errors of Redis and of the database pass through."""
        try:
            while True:
                await self.step()
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    # Python 3.11: wait_for in a Redis client can swallow it
                    raise asyncio.CancelledError
                await asyncio.sleep(_IDLE_S if self._webhook is not None else _LOOK_EVERY_S)
        finally:
            if self._webhook is not None:
                self._webhook.aclose()
            with contextlib.suppress(RedisError):  # its lease ends it anyway
                await self._redis.eval(_DROP_LOCK, 1, _LOCK, self._token)

    async def step(self) -> bool:
        """Look at the budgets where that is due, and deliver messages that are due, if this worker
        has the lock. Returns whether it has.
        """
        if not await self._has_lock():
            return False
        now_s = self._clock()
        if self._looked_at_s is None or not 0 <= now_s - self._looked_at_s < _LOOK_EVERY_S:
            self._looked_at_s = now_s
            await self._look(int(now_s * 1000))
        if self._webhook is not None:
            await self._deliver(self._webhook)
        return True

    def _has_lock(self) -> Awaitable[bool]:
        return self._redis.eval(_TAKE_LOCK, 1, _LOCK, self._token, _LOCK_MS)

    async def _look(self, at_ms: int) -> None:
        budgets = await self._accounts.list_budgets()
        if not budgets:
            return
        names = {team.id: team.name for team in await self._accounts.list_teams()}
        states = await self._budgets.spent(budgets, at_ms)
        known, self._known = self._known, {}
        for place, alert in enumerate(due(states, self._settings, names, at_ms)):
            raised_ms = known.get(alert.mark)
            if raised_ms is None or not 0 <= at_ms - raised_ms < _ASKED_AGAIN_MS:
                await self._raise(alert, place, at_ms)
                raised_ms = at_ms
            self._known[alert.mark] = raised_ms

    async def _raise(self, alert: Alert, place: int, at_ms: int) -> None:
        """Log and queue an alert that was not raised before, the one at this `place` of all."""
        message = b""
        if self._webhook is not None:
            content = {"type": alert.type, "timestamp": _iso(at_ms), "data": alert.facts}
            body = msgspec.json.encode(content).decode()
            name = f"msg_{at_ms:012x}{place:06x}{self._random_hex(12)}"  # Redis sorts messages of one moment by it
            message = msgspec.json.encode(_Message(name, at_ms, body))
        keys = (_SENT + alert.mark, _QUEUE)
        outcome = await self._redis.eval(_RAISE, 2, *keys, alert.kept_ms, message, at_ms, QUEUE_MAX)
        if outcome:
            _log.warning("budget_alert", **msgspec.structs.asdict(alert.facts))
        if outcome == 2:
            _log.warning("alert_not_queued", budget_id=alert.facts.budget_id, reason=f"{QUEUE_MAX} messages wait")

    async def _deliver(self, webhook: Webhook) -> None:
        """Send the messages that are due, until one fails: the others have the same receiver."""
        while await self._has_lock():
            now_s = self._clock()
            found = await self._redis.execute_command("ZRANGEBYSCORE", _QUEUE, "-inf", int(now_s * 1000), "LIMIT", 0, 1)
            if not found or not await self._send(webhook, found[0], now_s):
                return

    async def _send(self, webhook: Webhook, queued: bytes, now_s: float) -> bool:
        """Send one message. Returns False where it is tried again later."""
        try:
            message = msgspec.json.decode(queued, type=_Message)
        except msgspec.MsgspecError as error:
            _log.warning("alert_not_delivered", message=None, tries=0, reason=f"not a message: {error}")
            await self._redis.execute_command("ZREM", _QUEUE, queued)
            return True
        try:
            await webhook.deliver(message.id, now_s, message.body.encode())
        except DeliveryFailed as error:
            tries = message.tries + 1
            wait_s = _TRIES_AFTER_S[min(tries, len(_TRIES_AFTER_S)) - 1]
            if now_s + wait_s < message.at_ms / 1000 + KEPT_S:
                _log.info("alert_delayed", message=message.id, tries=tries, next_in_s=wait_s, reason=str(error))
                later = msgspec.json.encode(msgspec.structs.replace(message, tries=tries))
                await self._redis.eval(_PUT_BACK, 1, _QUEUE, queued, later, int((now_s + wait_s) * 1000))
                return False
            _log.warning("alert_not_delivered", message=message.id, tries=tries, reason=str(error))
        await self._redis.execute_command("ZREM", _QUEUE, queued)
        return True


def due(states: Sequence[BudgetState], settings: AlertSettings, teams: dict[int, str], at_ms: int) -> Iterator[Alert]:
    """The alerts that hold at `at_ms`, unix milliseconds, raised before or not; lower ones first."""
    for state in states:
        limit = state.budget.limit_at(at_ms)
        if state.spent <= 0:
            continue
        for percent in sorted(settings.thresholds):
            if state.spent * 100 >= limit * percent:
                yield _alert(state, limit, teams, at_ms, percent)
        used_up_at_ms = pace_of(state, at_ms).used_up_at_ms
        if settings.is_projected and state.window.end_ms is not None and used_up_at_ms is not None:
            yield _alert(state, limit, teams, at_ms, used_up_at_ms=used_up_at_ms)


def _alert(
    state: BudgetState,
    limit: int,
    teams: dict[int, str],
    at_ms: int,
    percent: int | None = None,
    used_up_at_ms: int | None = None,
) -> Alert:
    budget, window = state.budget, state.window
    is_rolling = budget.window is WindowKind.ROLLING
    what = _PROJECTED if percent is None else str(percent)
    team, used_up_at = teams.get(budget.team_id, str(budget.team_id)), None
    spent = f"{amount_words(state.spent, budget.unit)} of {amount_words(limit, budget.unit)}"
    whose = f"The {window.kind.value} budget of team {team}{subject_words(state)}"
    text = f"{whose} has reached {percent}%: {spent}"
    if used_up_at_ms is not None:
        used_up_at = _iso(used_up_at_ms)
        text = f"{whose} is used up at {used_up_at} at this pace, before its window ends: {spent} so far"
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
    return Alert(f"{budget.id}.{budget.epoch}:{window.id}:{limit}:{what}", kept_ms, facts)


def _value(state: BudgetState) -> str:
    """The value that the state belongs to, shortened; `*` for those that share a count."""
    shown = state.budget.value if state.budget.value is not None else state.value.removeprefix("=")
    return shown[:_VALUE_CHARS_MAX]


def _iso(at_ms: int) -> str:
    """RFC 3339 in UTC; empty for a moment beyond the year 9999."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""
