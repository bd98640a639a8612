"""Which verifier is asked about an alias's answers: the alias that is named, or with `auto` the
cheapest deployment of the alias's own that can chat and has not failed its exam.

Knows no questions. Invariants: a question would delay no client's request, as far as this worker
sees; those who are asked have breakers, estimates and slots of their own, and no fallbacks: no
other deployment sees a question. An answered question shows that its deployment answers.
"""

import dataclasses
import time
from collections.abc import Callable

from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.deployments.slots import Slots
from gateway.deployments.verifiers import QUESTION
from gateway.learning.exam import Exam
from gateway.loggers import get_logger
from gateway.settings import AUTO
from gateway.wire.errors import ApiError
from policies import Demand, Estimate, Health
from policies.asking import Expense

NO_VERIFIER = "no deployment of this model can chat, and there is no local engine"
_AT_ONCE = 32  # questions of one worker to one deployment
_COPIES_MAX = 200
# a verifier that hangs rests from then on, as one that fails does
_IN_TIME = {"ttft_timeout_ms": 10_000, "whole_timeout_ms": 10_000}
_ALONE = {"is_semantic": False, "fallbacks": [], "retry_first_ms": 0, "hedge_cost_max": 0.0}
_NOTHING_TRIED = frozenset[str]()
_log = get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class Askable:
    """Who is asked: an alias of the gateway's own, its name in verdicts, and its exam. `has_odds`:
    it gives the probabilities of tokens.
    """

    alias: Alias
    name: str
    exam: Exam
    has_odds: bool

    def expected(self, demand: Demand) -> Expense | None:
        """What a question is expected to cost and take; None where nobody can answer it now."""
        best = next(iter(self.alias.route(demand, {}, None, _NOTHING_TRIED).ranked), None)
        return Expense(best.cost_microusd, best.total_ms) if best is not None else None


class VerifierPool:
    """The verifiers that one worker may ask, of its fleet. `random` gives numbers in [0, 1), for exams."""

    def __init__(self, fleet: Fleet, random: Callable[[], float]) -> None:
        self._fleet = fleet
        self._random = random
        self._copies: dict[tuple[str, ...], Alias] = {}
        self._warned: set[str] = set()
        self.exams: dict[str, Exam] = {}  # by the names of who is asked

    def alias(self, name: str) -> Alias | None:
        try:
            return self._fleet.alias(name)
        except ApiError:
            return None

    def to_ask(self, alias: Alias, verifier: str | None) -> Askable | None:
        """Who is asked about an answer of `alias`; None where nobody may be now."""
        is_auto = verifier == AUTO
        target = alias if is_auto else self.alias(verifier) if verifier else None
        if target is None:
            return None
        able = [d for d in verifiers_of(target, self._fleet, is_auto=is_auto) if _has_room(d, is_auto=is_auto)]
        if not able:
            self._warn(target, is_auto=is_auto)
            return None
        unfailed = [d for d in able if (exam := self.exams.get(d.name)) is None or not exam.is_failed]
        chosen = (unfailed or able)[:1] if is_auto else able
        name = chosen[0].name if is_auto else target.name
        exam = self.exams.setdefault(name, Exam(self._random, is_named=not is_auto))
        has_odds = all("logprobs" in one.capabilities for one in chosen)
        return Askable(self._copy(target, chosen), name, exam, has_odds)

    def _warn(self, alias: Alias, *, is_auto: bool) -> None:
        """Say once that no deployment can be asked about an alias's answers."""
        if alias.name not in self._warned and not verifiers_of(alias, self._fleet, is_auto=is_auto):
            self._warned.add(alias.name)
            _log.warning("no_verifier", model=alias.name, reason=NO_VERIFIER)

    def _copy(self, alias: Alias, deployments: list[Deployment]) -> Alias:
        """An alias of these deployments, with breakers, estimates and slots of their own."""
        key = (alias.name, *sorted(d.model if d.is_any_model else d.name for d in deployments))
        known = self._copies.get(key)
        if known is None:
            if len(self._copies) >= _COPIES_MAX:
                self._copies.clear()
            copies = [
                dataclasses.replace(
                    deployment,
                    settings=deployment.settings.model_copy(update=_IN_TIME),
                    health=Health(time.monotonic, self._random, beside=deployment.health),
                    estimate=Estimate(time.monotonic),
                    slots=Slots(_AT_ONCE, 0),
                )
                for deployment in deployments
            ]
            settings = alias.settings.model_copy(update=_ALONE)
            by_name = {copy.name: copy for copy in copies}
            known = self._copies[key] = dataclasses.replace(alias, settings=settings, deployments=by_name)
        return known


def verifiers_of(alias: Alias, fleet: Fleet, *, is_auto: bool) -> list[Deployment]:
    """The deployments that can be asked about an alias's answers, the cheapest first."""
    able = [deployment for deployment in alias.deployments.values() if deployment.can_chat]
    if not able and is_auto:
        able = [deployment for deployment in fleet.deployments if deployment.settings.engine is not None]
    return sorted(able, key=lambda deployment: deployment.price.cost(QUESTION))


def _has_room(deployment: Deployment, *, is_auto: bool) -> bool:
    """True if a question would delay no client's request, as far as this worker sees."""
    load, slots = deployment.backend.load(0), deployment.slots
    is_shared = is_auto and deployment.settings.engine is not None
    is_idle = load.running == 0 if is_shared else 2 * slots.taken <= slots.slots_max
    return not deployment.absence and is_idle and not (load.waiting or slots.waiting)
