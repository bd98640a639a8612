"""A worker's configuration, which is exchanged while it serves: built whole, then switched at once.

    prepare    the new settings are read and their fleet is built and started, beside the one in use
    switch     one step without awaiting: fleet, settings, routes and loops are the new ones
    settle     the deployments that have gone are closed, once every request from before has ended
    discard    in place of `switch`: another worker could not prepare

A request keeps the alias, the deployments and the prices with which it began; limits and times are
those of the moment. Invariants: what cannot be built changes nothing; no request is ended by a
switch; between two switches everything is of one configuration.
"""

import asyncio
import gc
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from cache import CacheLimits, SemanticClient
from cache.redis_link import RedisLink
from gateway import control
from gateway.accounts.audit import Audit
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet, build_fleet
from gateway.learning.build import Learning
from gateway.pipeline import Pipeline
from gateway.settings import Settings, differences, refuse_fixed
from gateway.telemetry import metric_names as m
from gateway.telemetry.metrics import Metrics

CONFIG_CHANNEL = "sameway:config"
_RELOAD_S = 60.0
_LOOKED_UP_S = 5.0  # what a request awaits between its alias and its generation takes less


@dataclass(eq=False)
class Configuration:
    """The configuration of one worker. `settings` is the object that all its parts hold.

    Each of `applied` is called within a switch, when settings and fleet are the new ones.
    """

    settings: Settings
    _pipeline: Pipeline
    _semantic: SemanticClient
    _learning: Learning
    _: KW_ONLY
    metrics: Metrics
    link: RedisLink

    def __post_init__(self) -> None:
        self.kept = frozenset[str]()  # the aliases that come from the database
        self.refused = ""  # why the latest file was, until one is taken
        self._fleet = self._pipeline.fleet
        self._audit = Audit(self._pipeline.accounts.database)
        self._here = f"{socket.gethostname()}:{self.settings.run_dir}"
        self.applied: list[Callable[[], None]] = []
        self._next: tuple[Settings, Fleet] | None = None
        self._leaving: list[Deployment] = []
        self.metrics.set(m.CONFIG_REFUSED, 0)

    async def obey(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what the supervisor asks. Raises SettingsError, OSError, ValueError."""
        match request["act"]:
            case "prepare":
                await self.prepare(Settings.model_validate_json(Path(request["file"]).read_bytes()))
                self.kept = frozenset(request["kept"])
            case "switch":
                self.switch()
            case "discard":
                await self.discard()
            case "settle":
                await self.settle()
            case "announce" if request["is_first"]:
                await self.link.execute_command("PUBLISH", CONFIG_CHANNEL, f"{self._here} {os.urandom(8).hex()}")
            case "refused":
                self.refused = request["reason"]
                self.metrics.set(m.CONFIG_REFUSED, bool(self.refused))
        return {}

    async def follow(self) -> None:
        """Have the configuration of this host read again when it has changed on another one, and the
        database's models used. Raises RedisError, SQLAlchemyError, OSError.
        """
        if await self._audit.kept_models():
            await self.reload("the models in the database", is_file_read=False)
        async with self.link.subscribe(CONFIG_CHANNEL) as subscription:
            async for message in subscription.listen():
                notice = message["data"].decode("utf-8", "replace") if message["type"] == "message" else self._here
                if not notice.startswith(self._here):
                    await self.reload("a change on another host", notice)

    async def reload(
        self,
        why: str,
        notice: str = "",
        kept: Mapping[str, Any] | None = None,
        *,
        is_file_read: bool = True,
        is_dry_run: bool = False,
    ) -> dict[str, Any]:
        """Have the supervisor read the configuration again, with the models that the database has, or with
        those in `kept`; its answer.

        Raises OSError where there is no supervisor.
        """
        kept = await self._audit.kept_models() if kept is None else kept
        how = {"why": why, "told": notice, "kept": kept, "is_file_read": is_file_read, "is_dry_run": is_dry_run}
        answer = await control.ask(self.settings.control_socket, _RELOAD_S, "reload", **how)
        self.kept = frozenset(answer.get("kept", self.kept))
        return answer

    async def prepare(self, settings: Settings) -> None:
        """Build what `settings` say, in place of an earlier one that was not switched to.

        Raises SettingsError.
        """
        await self.discard()
        refuse_fixed(differences(self.settings, settings))
        fleet = build_fleet(settings, time.monotonic, self._semantic, self._fleet)
        self._next = settings, fleet
        await fleet.start(self._fleet.deployments)

    async def discard(self) -> None:
        """Close what was prepared and is not in use."""
        if self._next is not None:
            (_, fleet), self._next = self._next, None
            kept = set(map(id, self._fleet.deployments))
            await _close([one for one in fleet.deployments if id(one) not in kept])

    def switch(self) -> None:
        """Use what was prepared. Raises ValueError if nothing was."""
        if self._next is None:
            raise ValueError("no configuration was prepared")
        (settings, fleet), self._next = self._next, None
        self._leaving += self._fleet.take(fleet)
        self.settings.adopt(settings)
        self._pipeline.exact.take(cache_limits(settings))
        self._semantic.timeout_s = settings.cache.semantic_timeout_ms / 1000.0
        self._learning.take(settings.cache)
        for applied in self.applied:
            applied()

    async def settle(self) -> None:
        """Close the deployments that have gone, once no request is left that began before this call."""
        leaving, self._leaving = self._leaving, []
        if leaving:
            await asyncio.sleep(_LOOKED_UP_S)
            if self._pipeline.generating:
                await asyncio.wait(set(self._pipeline.generating))
            await _close(leaving)
            del leaving
            gc.collect()  # a deployment and its shared health refer to each other, and collections are rare


async def _close(deployments: list[Deployment]) -> None:
    for deployment in deployments:
        await deployment.backend.aclose()


def cache_limits(settings: Settings) -> CacheLimits:
    return CacheLimits(
        size_bytes_max=settings.cache.size_bytes_max,
        entry_bytes_max=settings.cache.entry_bytes_max,
        ttl_s_max=settings.cache.ttl_s_max,
        moving_ttl_s=settings.cache.moving_ttl_s,
        l1_bytes_max=settings.cache.l1_bytes_max,
    )
