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
from gateway.backends.keys import Keys
from gateway.deployments.alias import Alias
from gateway.deployments.build import SLOTS_DEFAULT, Facts, build_backend, describe
from gateway.deployments.catalog import use
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
    did_you_mean,
    is_pattern,
    keys_of,
)
from gateway.wire.errors import NotFound, shown
from gateway.wire.types import PASSAGE
from policies import Estimate, Health, RoutingPolicy
from policies.replicas import Backlog, Prefixes
from policies.routing import PolicyKind

EMBEDDER = "embedder"  # the name of its deployment, in the ledger and in budgets
_NAMES_SHOWN_MAX = 10
_COMPARED_CHARS_MAX, _COMPARED_MAX = 40, 50  # a comparison of two long names takes 0.3 ms, on the event loop

_log = get_logger()


class Fleet:
    """Every configured alias with its deployments, and the alias of the packaged `embedder`.

    Raises NotFound for an unknown name.
    """

    def __init__(
        self, aliases: Mapping[str, Alias], embedder: Alias, replicas: Mapping[str, Sequence[Replicas]] = {}
    ) -> None:
        self._uses: Mapping[str, str] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self.unproven = frozenset[str]()  # aliases that came while it ran: none of their deployments need be there yet
        self._take(aliases, embedder, replicas)

    def _take(self, aliases: Mapping[str, Alias], embedder: Alias, replicas: Mapping[str, Sequence[Replicas]]) -> None:
        self.aliases = aliases
        self.replicas = replicas
        self._embedder = embedder
        self._whole_names = frozenset(name for name in aliases if not is_pattern(name))
        # the longest prefix first
        self._patterns = sorted((name for name in aliases if is_pattern(name)), key=len, reverse=True)

    def take(self, fleet: "Fleet") -> list[Deployment]:
        """Answer with the aliases of `fleet`, which `build_fleet` made of this one, from now on.

        Requests under way go on with what they have. Returns the deployments that have gone, to be
        closed when no request is left that began before.
        """
        before, groups = self.deployments, [group for lists in self.replicas.values() for group in lists]
        self.unproven = frozenset(fleet.aliases.keys() - (self.aliases.keys() - self.unproven))
        self._take(fleet.aliases, fleet._embedder, fleet.replicas)
        self.take_uses(self._uses)
        kept = set(map(id, self.deployments))
        for deployment in self.deployments:
            slots_max = deployment.settings.concurrency_max
            deployment.slots.resize(
                slots_max or SLOTS_DEFAULT, deployment.settings.queue_max, is_shared=bool(slots_max)
            )
        now = [group for lists in self.replicas.values() for group in lists]
        before += [replica for group in groups if group not in now for replica in group.leaving]
        return [one for one in before if id(one) not in kept]

    def configured(self, name: str) -> str:
        """The alias that takes requests for `name`; empty if no alias does."""
        if name in self._whole_names or name == self._embedder.name:
            return name
        return next((one for one in self._patterns if name.startswith(one[:-1]) and len(name) >= len(one)), "")

    @property
    def deployments(self) -> list[Deployment]:
        return [d for alias in self.aliases.values() for d in alias.deployments.values()]

    def labels(self) -> dict[str, set[str]]:
        """The names of models and deployments that metrics may have as labels."""
        deployments = {EMBEDDER, *(deployment.name for deployment in self.deployments)}
        models = {self._embedder.name, *self.aliases, *(f"{PASSAGE.name}/{name}" for name in deployments)}
        return {"model": models, "gen_ai_request_model": models, "deployment": deployments}

    def alias(self, name: str, allowed: Collection[str] | None = None) -> Alias:
        """The alias of this name. Raises NotFound, whose message lists the names in `allowed`
        (None: all).
        """
        alias = self.aliases.get(name) or self.aliases.get(configured := self.configured(name))
        if alias is None and configured:
            return self._embedder
        if alias is None:
            listed = filter(None, (*self.aliases, self._embedder.name))
            names = [one for one in listed if allowed is None or one in allowed]
            names_shown = ", ".join(f"`{one}`" for one in names[:_NAMES_SHOWN_MAX]) or "none that this API key may use"
            more = ", ..." if len(names) > _NAMES_SHOWN_MAX else ""
            near = did_you_mean(name[:_COMPARED_CHARS_MAX].lower(), names[:_COMPARED_MAX])
            raise NotFound(
                f"The model `{shown(name)}` does not exist; there is {names_shown}{more} (GET /v1/models){near}",
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

    async def start(self, before: Sequence[Deployment] = ()) -> None:
        """Start all deployments but those of `before`, which run."""
        running = set(map(id, before))
        for deployment in self.deployments:
            if id(deployment) not in running:
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


def build_fleet(
    settings: Settings, clock: Callable[[], float], embedder: SemanticClient, before: Fleet | None = None
) -> Fleet:
    """Build the fleet that the settings describe, unconnected. The caller owns `embedder`.

    Of the fleet `before`, whatever is configured alike is part of the new one, and what has changed at
    the same server keeps its breaker, its estimate and its slots. `before` itself does not change.
    """
    use(settings.prices_path)
    aliases, replicas = {}, dict[str, list[Replicas]]()
    for alias, model in settings.models.items():
        old = before.aliases.get(alias) if before is not None else None
        groups = {group.name: group for group in before.replicas.get(alias, ())} if before is not None else {}
        outdated = {
            name for name, each in (old.deployments if old is not None else {}).items() if not each.is_as_described
        }
        if old is not None and old.settings == model and not outdated:
            aliases[alias] = old
            if groups:
                replicas[alias] = list(groups.values())
            continue
        known = {deployment_name(alias, each): each for each in old.settings.deployments} if old is not None else {}
        deployments = list[Deployment]()
        prefixes = old.prefixes if old is not None and old.prefixes is not None else Prefixes()
        for deployment in sorted(model.deployments, key=lambda each: bool(each.replicas)):
            name = deployment_name(alias, deployment)
            is_alike = known.get(name) == deployment and name not in outdated
            if deployment.replicas:
                make = partial(_replica, alias, deployment, settings, clock)
                is_alike = is_alike and outdated.isdisjoint(one.name for one in groups[name].by_url.values())
                group = groups[name] if is_alike else Replicas(name, deployment.replicas, make, prefixes)
                replicas.setdefault(alias, []).append(group)
                deployments += group.by_url.values()
            elif old is not None and name in old.deployments:
                same = old.deployments[name]
                deployments.append(same if is_alike else _inherited(_build(alias, deployment, settings, clock), same))
            else:
                deployments.append(_build(alias, deployment, settings, clock))
        policy = RoutingPolicy(
            kind=PolicyKind(model.policy),
            ttft_ms_max=model.ttft_ms_max,
            cost_microusd_max=model.cost_microusd_max,
        )
        by_name = {d.name: d for d in deployments}
        aliases[alias] = Alias(alias, model, policy, by_name, prefixes=prefixes if alias in replicas else None)
        if old is not None:
            aliases[alias].lengths, aliases[alias].hedges = old.lengths, old.hedges
    return Fleet(aliases, _embedder(settings, clock, embedder), replicas)


def _inherited(deployment: Deployment, old: Deployment) -> Deployment:
    """A deployment with what is known of the server from the `old` one, if it is the same server."""
    deployment.slots = old.slots  # requests that run in them still count
    if all(getattr(deployment.settings, name) == getattr(old.settings, name) for name in _SERVER):
        deployment.health, deployment.estimate, deployment.prompts = old.health, old.estimate, old.prompts
    return deployment


_SERVER = ("backend", "base_url", "engine", "model", "api_key_env", "api_key_file", "api_keys", "headers")


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
    keys = Keys(keys_of(deployment))
    deployed = _deployed(deployment, facts, build_backend(alias, deployment, facts, settings, keys), clock, engine)
    deployed.keys = keys
    return deployed


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
