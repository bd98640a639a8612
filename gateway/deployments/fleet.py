"""The deployments of this worker, by the aliases that they answer.

Knows no teams, budgets or caches. Invariant: each name that a request gives belongs to at most one
alias: itself, else the longest prefix.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping

from gateway.deployments.alias import Alias
from gateway.deployments.build import build_backend, describe
from gateway.deployments.deployment import Deployment
from gateway.deployments.places import Places
from gateway.loggers import get_logger
from gateway.settings import DeploymentSettings, Settings, deployment_name, is_pattern
from gateway.wire.errors import NotFound, shown
from policies import Breaker, Estimate, RoutingPolicy
from policies.routing import PolicyKind

_NAMES_SHOWN_MAX = 10

_log = get_logger()


class Fleet:
    """Every alias with its deployments. Raises NotFound for a name it does not have."""

    def __init__(self, aliases: Mapping[str, Alias], embedding_alias: str = "") -> None:
        self.aliases = aliases
        self._embedding_alias = embedding_alias
        self._closing: set[asyncio.Future[None]] = set()
        self._whole_names = frozenset(name for name in aliases if not is_pattern(name))
        # the longest prefix first
        self._patterns = sorted((name for name in aliases if is_pattern(name)), key=len, reverse=True)

    def configured(self, name: str) -> str:
        """The configured alias that takes requests for `name`; empty if there is none."""
        if name in self._whole_names:
            return name
        if name == self._embedding_alias:
            return ""
        return next((one for one in self._patterns if name.startswith(one[:-1]) and len(name) >= len(one)), "")

    @property
    def deployments(self) -> list[Deployment]:
        return [d for alias in self.aliases.values() for d in alias.deployments.values()]

    def alias(self, name: str, allowed: Collection[str] | None = None) -> Alias:
        """The alias of this name. Raises NotFound, which names those of `allowed`; None: all."""
        found = self.aliases.get(self.configured(name))
        if found is None:
            names = [one for one in self.aliases if allowed is None or one in allowed]
            there = ", ".join(f"`{one}`" for one in names[:_NAMES_SHOWN_MAX]) or "none that this API key may use"
            more = ", ..." if len(names) > _NAMES_SHOWN_MAX else ""
            raise NotFound(
                f"The model `{shown(name)}` does not exist; there is {there}{more} (GET /v1/models)",
                param="model",
                code="model_not_found",
            )
        return found.for_name(name) if found.is_pattern else found

    def take_uses(self, uses: Mapping[str, str]) -> None:
        """Take the deployments in `uses` out of use, and the others in.

        Answers of one that was disabled are given up.
        """
        for deployment in self.deployments:
            for answer in deployment.take_use(uses.get(deployment.name, "")):
                closing = asyncio.ensure_future(answer.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def start(self) -> None:
        for deployment in self.deployments:
            await deployment.backend.start()

    async def aclose(self) -> None:
        for deployment in self.deployments:
            await deployment.backend.aclose()


def build_fleet(settings: Settings, clock: Callable[[], float]) -> Fleet:
    """The fleet that the settings describe; nothing is connected yet."""
    aliases = {}
    for alias, model in settings.models.items():
        deployments = [_build(alias, d, settings, clock) for d in model.deployments]
        policy = RoutingPolicy(
            kind=PolicyKind(model.policy),
            ttft_ms_max=model.ttft_ms_max,
            cost_microusd_max=model.cost_microusd_max,
        )
        aliases[alias] = Alias(alias, model, policy, {d.name: d for d in deployments})
    return Fleet(aliases, settings.embedding_alias)


def _build(alias: str, deployment: DeploymentSettings, settings: Settings, clock: Callable[[], float]) -> Deployment:
    facts = describe(deployment)
    if not facts.is_price_known and not is_pattern(alias):
        _log.warning("price_unknown", deployment=deployment_name(alias, deployment), consequence="counted as free")
    return Deployment(
        name=deployment_name(alias, deployment),
        model=deployment.model or settings.engines[deployment.engine or ""].model,
        backend=build_backend(alias, deployment, settings),
        price=facts.price,
        capabilities=facts.capabilities,
        context_tokens_max=facts.context_tokens_max,
        output_tokens_max=facts.output_tokens_max,
        output_tokens_default=settings.engines[deployment.engine].output_tokens_default if deployment.engine else None,
        settings=deployment,
        is_price_known=facts.is_price_known,
        are_capabilities_assumed=facts.are_capabilities_assumed,
        can_chat=facts.can_chat,
        breaker=Breaker(clock, random.random),
        estimate=Estimate(clock),
        places=Places(deployment.concurrency_max, deployment.queue_max),
        claim=_alone,
        allowed=facts.allowed,
        tiers=facts.tiers,
        factors=facts.factors,
        batch_factor=facts.batch_factor,
        may_reason=facts.may_reason,
    )


async def _alone() -> bool:
    """The claim of a worker that shares nothing."""
    return True
