"""The judge model of each request: the alias that is configured, or its own alias's cheapest place.

With `judge_model: auto` the judge of an answer is the cheapest deployment of its alias that can
chat; where there is none, a local engine. Knows no verdicts. Invariants: a question is dropped
rather than put into a queue; its outcome opens no breaker and teaches no estimate that routes
clients' requests, because it goes to a copy of the deployment with a breaker of its own; a question
of `auto` that costs is asked only after the team's allowance was reduced by its worst case.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cache import Partition, SemanticClient
from cache.verdicts import Judge, Judgement, Ruling, equal
from cache.worker import AnswerText
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.deployments.slots import Slots
from gateway.journey.record import Record
from gateway.learning.allowance import Allowance
from gateway.learning.exam import Exam, ExaminedJudge, Recent
from gateway.learning.internal_requests import InternalRequests
from gateway.learning.llm_judge import LlmJudge
from gateway.loggers import get_logger
from gateway.wire.errors import ApiError
from policies import Estimate, Health, Usage

_AT_ONCE = 2  # questions of one worker
_BUSY = 64  # generations under way from which on nothing is asked
_WITHIN_S = 30.0
_POOR_S = 10.0  # after a question that could not be paid
_COPIES_MAX = 200
_TYPICAL = Usage(1_000, 2)
_log = get_logger()

Note = Callable[[Record, int, str], None]
"""Takes the judged request, the cost of a question in µUSD, and `answered`, `unpaid` or `failed`."""


class OwnJudges:
    """The judges that cost no money: equality, then those of the cache worker."""

    names = "equality, prose"

    def __init__(self, semantic: SemanticClient) -> None:
        self._semantic = semantic

    async def compare(
        self, partition: Partition, compat: bytes, fresh: AnswerText, others: Sequence[AnswerText]
    ) -> list[Judgement]:
        """The rulings on a fresh answer against others of its partition and compat, in order.
        Raises CacheWorkerUnavailable.
        """
        judgements = [equal(fresh.text, other.text) for other in others]
        open_ = [index for index, judgement in enumerate(judgements) if judgement.ruling is Ruling.UNKNOWN]
        rulings = await self._semantic.judge(partition, compat, fresh, [others[index] for index in open_])
        for index, judgement in zip(open_, rulings, strict=True):
            judgements[index] = judgement
        return judgements


class ModelJudges:
    """`model` is an alias, or None for the judged request's own; `allowance` bounds what is spent
    for each team (None: the judge's budget alone). `clients` is the number of generations under
    way.
    """

    def __init__(
        self,
        model: str | None,
        fleet: Fleet,
        requests: InternalRequests,
        allowance: Allowance | None,
        clients: Callable[[], int],
        note: Note,
    ) -> None:
        self._model = model
        self._fleet = fleet
        self._requests = requests
        self._allowance = allowance
        self._clients = clients
        self._note = note
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._asking = 0
        self._copies: dict[tuple[str, str], Alias] = {}
        self._poor_until: dict[int, float] = {}
        self._warned: set[str] = set()
        self._recent = Recent()
        self.exams: dict[str, Exam] = {}  # by the deployment that judges; none where the operator named the judge

    @property
    def is_sparing(self) -> bool:
        return self._model is None

    def of(self, record: Record, space: bytes) -> Judge | None:
        """The judge of this request's answer, in its namespace; None where it may not be asked now."""
        if self._clients() - self._asking > _BUSY or time.monotonic() < self._poor_until.get(
            record.request.team_id, 0.0
        ):
            return None
        name = self._model or record.request.model or record.request.alias
        try:
            alias = self._fleet.alias(name)
        except ApiError:
            return None
        able = [one for one in judges_of(alias, self._fleet, is_auto=self._model is None) if _has_room(one)]
        if not able:
            self._warn(alias)
            return None
        best = able[0]
        ask = partial(self._ask, record, self._copy(alias, best))
        if self._model is not None:
            return LlmJudge(self._model, ask)
        exam = self.exams.setdefault(best.name, Exam(random.random))
        return ExaminedJudge(LlmJudge(name, ask, best.name), exam, self._recent, space)

    def flips(self, judge: str) -> tuple[float, float]:
        """The error rates of a judge, as a verdict has them."""
        exam = self.exams.get(judge)
        return exam.flips if exam is not None else (0.0, 0.0)

    def _warn(self, alias: Alias) -> None:
        """Say once that no deployment can judge an alias's answers."""
        if alias.name not in self._warned and not judges_of(alias, self._fleet, is_auto=self._model is None):
            self._warned.add(alias.name)
            _log.warning("no_judge", model=alias.name, reason=NO_JUDGE)

    def _copy(self, alias: Alias, deployment: Deployment) -> Alias:
        """An alias of this deployment alone, with a breaker, estimates and slots of its own."""
        key = (alias.name, deployment.name if not deployment.is_any_model else deployment.model)
        known = self._copies.get(key)
        if known is None:
            if len(self._copies) >= _COPIES_MAX:
                self._copies.clear()
            copy = dataclasses.replace(
                deployment,
                health=Health(time.monotonic, random.random),
                estimate=Estimate(time.monotonic),
                slots=Slots(_AT_ONCE, 0),
            )
            known = self._copies[key] = dataclasses.replace(alias, deployments={copy.name: copy})
        return known

    async def _ask(self, record: Record, judge: Alias, body: dict[str, Any]) -> bytes | None:
        paid, is_unpaid = 0, False

        async def reserve(amount: int) -> bool:
            nonlocal paid, is_unpaid
            if (
                self._allowance is not None
                and amount
                and not await self._allowance.reserve(record.request.team_id, amount)
            ):
                self._poor_until[record.request.team_id] = time.monotonic() + _POOR_S
                is_unpaid = True
                return False
            paid = amount
            return True

        async with self._places:
            self._asking += 1
            try:
                answer, cost = await self._requests.ask(body, judge, reserve, _WITHIN_S)
            finally:
                self._asking -= 1
        if self._allowance is not None and paid and cost is not None:
            await self._allowance.settle(record.request.team_id, paid, cost)
        self._note(record, cost or 0, "answered" if answer is not None else "unpaid" if is_unpaid else "failed")
        return answer


NO_JUDGE = "no deployment of this model can chat, and there is no local engine"


def judges_of(alias: Alias, fleet: Fleet, *, is_auto: bool) -> list[Deployment]:
    """The deployments that can judge an alias's answers, the cheapest first."""
    able = [deployment for deployment in alias.deployments.values() if deployment.can_chat]
    if not able and is_auto:
        able = [deployment for deployment in fleet.deployments if deployment.settings.engine is not None]
    return sorted(able, key=lambda deployment: deployment.price.cost(_TYPICAL))


def _has_room(deployment: Deployment) -> bool:
    """True if a question would delay no client's request, as far as this worker sees."""
    load, slots = deployment.backend.load(0), deployment.slots
    is_idle = load.running == 0 if deployment.settings.engine is not None else 2 * slots.taken <= slots.slots_max
    return not deployment.absence and is_idle and not (load.waiting or slots.waiting)
