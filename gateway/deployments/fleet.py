"""The deployments of this worker, by the aliases that they answer.

Knows no teams, budgets or caches. Invariant: each name in a request belongs to at most one alias:
the alias of that name, else the pattern with the longest prefix.
"""

import asyncio
import dataclasses
import random
from collections.abc import Callable, Collection, Mapping

from cache import SemanticClient
from gateway.backends.base import Backend
from gateway.backends.embedder import EmbedderBackend
from gateway.deployments.alias import Alias
from gateway.deployments.build import Facts, build_backend, describe
from gateway.deployments.deployment import Deployment
from gateway.deployments.slots import Slots
from gateway.loggers import get_logger
from gateway.settings import (
    DeploymentSettings,
    EngineSettings,
    ModelSettings,
    PriceSettings,
    Settings,
    deployment_name,
    is_pattern,
)
from gateway.wire.errors import NotFound, shown
from policies import Estimate, Health, RoutingPolicy
from policies.routing import PolicyKind

EMBEDDER = "embedder"  # the name of its deployment, in the ledger and in budgets
_NAMES_SHOWN_MAX = 10

_log = get_logger()


class Fleet:
    """Every configured alias with its deployments, and the alias of the packaged `embedder`.

    Raises NotFound for an unknown name.
    """

    def __init__(self, aliases: Mapping[str, Alias], embedder: Alias) -> None:
        self.aliases = aliases
        self._embedder = embedder
        self._closing: set[asyncio.Future[None]] = set()
        self._whole_names = frozenset(name for name in aliases if not is_pattern(name))
        # the longest prefix first
        self._patterns = sorted((name for name in aliases if is_pattern(name)), key=len, reverse=True)

    def configured(self, name: str) -> str:
        """The alias that takes requests for `name`; empty if no alias does."""
        if name in self._whole_names or name == self._embedder.name:
            return name
        return next((one for one in self._patterns if name.startswith(one[:-1]) and len(name) >= len(one)), "")

    @property
    def deployments(self) -> list[Deployment]:
        return [d for alias in self.aliases.values() for d in alias.deployments.values()]

    def alias(self, name: str, allowed: Collection[str] | None = None) -> Alias:
        """The alias of this name. Raises NotFound, whose message lists the names in `allowed`
        (None: all).
        """
        alias = self.aliases.get(name) or self.aliases.get(configured := self.configured(name))
        if alias is None and configured:
            return self._embedder
        if alias is None:
            names = [one for one in self.aliases if allowed is None or one in allowed]
            names_shown = ", ".join(f"`{one}`" for one in names[:_NAMES_SHOWN_MAX]) or "none that this API key may use"
            more = ", ..." if len(names) > _NAMES_SHOWN_MAX else ""
            raise NotFound(
                f"The model `{shown(name)}` does not exist; there is {names_shown}{more} (GET /v1/models)",
                param="model",
                code="model_not_found",
            )
        return alias.for_name(name) if alias.is_pattern else alias

    def take_uses(self, uses: Mapping[str, str]) -> None:
        """Set the use of each deployment from `uses`; a missing deployment is in use.

        Answers of a newly disabled deployment are closed.
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


def build_fleet(settings: Settings, clock: Callable[[], float], embedder: SemanticClient) -> Fleet:
    """Build the fleet that the settings describe, unconnected. The caller owns `embedder`."""
    aliases = {}
    for alias, model in settings.models.items():
        deployments = [_build(alias, d, settings, clock) for d in model.deployments]
        policy = RoutingPolicy(
            kind=PolicyKind(model.policy),
            ttft_ms_max=model.ttft_ms_max,
            cost_microusd_max=model.cost_microusd_max,
        )
        aliases[alias] = Alias(alias, model, policy, {d.name: d for d in deployments})
    return Fleet(aliases, _embedder(settings, clock, embedder))


def _embedder(settings: Settings, clock: Callable[[], float], client: SemanticClient) -> Alias:
    """The alias of the packaged embedder, with its one deployment."""
    name = settings.embedding_alias
    price = PriceSettings(input_usd_per_mtok=settings.embedding_usd_per_mtok)
    # no setting names this kind of backend
    deployment = DeploymentSettings.model_construct(name=EMBEDDER, backend="local", model=name, price=price)
    model = ModelSettings.model_construct(deployments=[deployment], is_semantic=False)
    backend = EmbedderBackend(EMBEDDER, name, client)
    facts = dataclasses.replace(describe(deployment), capabilities=backend.capabilities)
    return Alias(name, model, RoutingPolicy(), {EMBEDDER: _deployed(deployment, facts, backend, clock)})


def _build(alias: str, deployment: DeploymentSettings, settings: Settings, clock: Callable[[], float]) -> Deployment:
    facts = describe(deployment)
    if not facts.is_price_known and not is_pattern(alias):
        _log.warning("price_unknown", deployment=deployment_name(alias, deployment), consequence="counted as free")
    engine = settings.engines[deployment.engine] if deployment.engine else None
    return _deployed(deployment, facts, build_backend(alias, deployment, facts, settings), clock, engine)


def _deployed(
    settings: DeploymentSettings,
    facts: Facts,
    backend: Backend,
    clock: Callable[[], float],
    engine: EngineSettings | None = None,
) -> Deployment:
    return Deployment(
        name=backend.name,
        model=settings.model or (engine.model if engine else ""),
        backend=backend,
        output_tokens_default=engine.output_tokens_default if engine else None,
        settings=settings,
        health=Health(clock, random.random),
        estimate=Estimate(clock),
        slots=Slots(settings.concurrency_max, settings.queue_max),
        **facts.by_name(),
    )
