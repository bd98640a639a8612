"""The deployments of this worker, by the aliases that they answer.

Knows no teams, budgets or caches. Invariant: each name in a request belongs to at most one alias:
the alias of that name, else the pattern with the longest prefix.
"""

import asyncio
import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from urllib.parse import urlsplit

from cache import SemanticClient
from gateway.backends.base import Backend
from gateway.backends.embedder import EmbedderBackend
from gateway.deployments.alias import Alias
from gateway.deployments.build import SLOTS_DEFAULT, Facts, build_backend, describe
from gateway.deployments.catalog import PRICES, use
from gateway.deployments.deployment import Deployment
from gateway.deployments.replicas import Replicas
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
from policies.replicas import Backlog, Prefixes
from policies.routing import PolicyKind

EMBEDDER = "embedder"  # the name of its deployment, in the ledger and in budgets
_NAMES_SHOWN_MAX = 10

_log = get_logger()


class Fleet:
    """Every configured alias with its deployments, and the alias of the packaged `embedder`.

    Raises NotFound for an unknown name.
    """

    def __init__(
        self, aliases: Mapping[str, Alias], embedder: Alias, replicas: Mapping[str, Sequence[Replicas]] = {}
    ) -> None:
        self.aliases = aliases
        self.replicas = replicas
        self._uses: Mapping[str, str] = {}
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
        """Set the use of each deployment from `uses`, the oldest first; a missing deployment is in use.

        What is said of a deployment holds for its replicas, until more is said of one of them. Answers of
        a newly disabled deployment are closed.
        """
        self._uses = uses
        for deployment in self.deployments:
            said = [use for name, use in uses.items() if name in (deployment.name, deployment.group)]
            for answer in deployment.take_use(said[-1] if said else ""):
                closing = asyncio.ensure_future(answer.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def start(self) -> None:
        for deployment in self.deployments:
            await deployment.backend.start()
        await self.reread()

    async def reread(self) -> None:
        """Read the lists of replicas again."""
        for name, lists in self.replicas.items():
            if any([await replicas.reread() for replicas in lists]):
                alias, known = self.aliases[name], {replicas.name for replicas in lists}
                fixed = {d.name: d for d in alias.deployments.values() if d.group not in known}
                alias.deployments = fixed | {d.name: d for one in lists for d in one.by_url.values()}
                self.take_uses(self._uses)

    async def aclose(self) -> None:
        for deployment in self.deployments:
            await deployment.backend.aclose()
        for replicas in (one for lists in self.replicas.values() for one in lists):
            await replicas.aclose()


def build_fleet(settings: Settings, clock: Callable[[], float], embedder: SemanticClient) -> Fleet:
    """Build the fleet that the settings describe, unconnected. The caller owns `embedder`."""
    use(settings.data_dir / PRICES)
    aliases, replicas = {}, dict[str, list[Replicas]]()
    for alias, model in settings.models.items():
        deployments = [_build(alias, d, settings, clock) for d in model.deployments if not d.replicas]
        prefixes = Prefixes()
        for deployment in [d for d in model.deployments if d.replicas]:
            make = partial(_replica, alias, deployment, settings, clock)
            group = Replicas(deployment_name(alias, deployment), deployment.replicas, make, prefixes)
            replicas.setdefault(alias, []).append(group)
            deployments += group.by_url.values()
        policy = RoutingPolicy(
            kind=PolicyKind(model.policy),
            ttft_ms_max=model.ttft_ms_max,
            cost_microusd_max=model.cost_microusd_max,
        )
        by_name = {d.name: d for d in deployments}
        aliases[alias] = Alias(alias, model, policy, by_name, prefixes=prefixes if alias in replicas else None)
    return Fleet(aliases, _embedder(settings, clock, embedder), replicas)


def _replica(
    alias: str, deployment: DeploymentSettings, settings: Settings, clock: Callable[[], float], url: str
) -> Deployment:
    """The deployment of the replica at `url`."""
    group, host = deployment_name(alias, deployment), urlsplit(url).netloc.rpartition("@")[2]
    one_of_them = deployment.model_copy(update={"name": f"{group}/{host}", "base_url": url, "replicas": []})
    replica = _build(alias, one_of_them, settings, clock)
    replica.group, replica.backlog = group, Backlog(clock)
    return replica


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
        slots=Slots(settings.concurrency_max or SLOTS_DEFAULT, settings.queue_max),
        **facts.by_name(),
    )
