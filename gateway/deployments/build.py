"""Builds a deployment's backend, price, sizes and capabilities from its settings.

Facts come from the settings, else by the model's name from the packaged table, else from the kind of
backend. Connects to nothing and imports nothing heavy: `Backend.start` does.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from gateway.backends.anthropic.backend import AnthropicBackend
from gateway.backends.base import Backend
from gateway.backends.dialect import ANTHROPIC_URL, Dialect, dialect_of
from gateway.backends.keys import Keys
from gateway.backends.openai.backend import OpenAIBackend
from gateway.deployments.catalog import Known, can_chat, known, microusd, with_writes
from gateway.reserved import PAID, SEARCHES, canonical
from gateway.settings import CAPABILITIES, DeploymentSettings, PriceSettings, Settings, deployment_name
from gateway.wire.types import KINDS, MEDIA
from policies import Price
from policies.prices import FREE

# Capabilities by kind of backend, where the settings name none. The local engine fills no gap
# before a suffix.
_CAPABILITIES = {
    "local": frozenset({"n", "logprobs", "tools", "json_object", "json_schema", "completions", "prefill"}),
    "openai": CAPABILITIES - {"prefill", "messages", "cache_control", "responses"},
    "anthropic": frozenset({"tools", "json_schema", "vision", "files", "reasoning"}),
    "litellm": frozenset({"tools", "reasoning"}),
}
_NEVER = {
    "local": frozenset({"responses", *(kind.name for kind in KINDS if kind.is_plain)}),
    # litellm would turn a text completion into a chat, and renames the categories of a moderation
    "litellm": frozenset({"completions", "moderations", "responses", *(kind.name for kind in MEDIA)}),
    "anthropic": frozenset({"completions", "logprobs", "n", "suffix", "prefill", "audio"})
    | {kind.name for kind in KINDS if kind.is_plain},
}
_ALWAYS = {"anthropic": frozenset({"messages", "json_object"}), "litellm": frozenset({"cache_control"})}


SLOTS_DEFAULT = 1_000  # requests of a worker at a deployment without a limit
_NONE: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class Facts:
    """The facts of a deployment for routing and budgets. Without a known price it is free."""

    price: Price
    capabilities: frozenset[str]
    context_tokens_max: int | None
    output_tokens_max: int | None
    tiers: Mapping[str, Price] = field(default_factory=dict)  # by `service_tier`
    allowed: frozenset[str] = frozenset()  # reserved fields and tools that clients may send: those with a known price
    factors: Mapping[str, int] = field(
        default_factory=dict
    )  # by reserved field or tool: a million times the price's factor
    batch_factor: int = 1_000_000  # the same of a line of a batch
    may_reason: bool | None = None  # whether answers have tokens that no chunk shows; None: not known
    is_price_known: bool = True
    are_capabilities_assumed: bool = False  # those of its kind, as its model is in no table
    can_chat: bool = True
    image_hosts: tuple[str, ...] | None = None  # that it may fetch from for clients; None: all
    dialect: Dialect = field(default_factory=Dialect)

    def by_name(self) -> dict[str, Any]:
        """The facts as a dictionary."""
        return {one.name: getattr(self, one.name) for one in fields(Facts)}


def describe(deployment: DeploymentSettings) -> Facts:
    """The facts of one deployment, from its settings and the public table."""
    row = _row(deployment)
    settings = deployment.dialect.fields() if deployment.dialect is not None else None
    dialect = dialect_of(deployment.backend, deployment.base_url or "", deployment.model or "", settings)
    price = _price(deployment.price) if deployment.price is not None else (row.price if row else None)
    if price is not None:
        price = with_writes(price, dialect.cache_write_factors)
    tiers = row.tiers if row and deployment.price is None else {}
    factors = {}
    if deployment.price is not None:
        factors = {canonical(name): microusd(factor) for name, factor in deployment.price.factors.items()}
    capabilities = row.capabilities if row else _CAPABILITIES[deployment.backend]
    if deployment.capabilities is not None:
        capabilities = frozenset(deployment.capabilities)
    elif dialect.speaks_responses and can_chat(deployment.model or "", _host(deployment)):
        capabilities |= {"responses"}
    are_assumed = row is None and deployment.capabilities is None and deployment.backend != "local"
    if are_assumed and price and not (price.audio_input_microusd_per_mtok or price.audio_output_microusd_per_mtok):
        capabilities -= {"audio"}  # sounds would be charged as text
    return Facts(
        price=price or FREE,
        capabilities=capabilities - _NEVER.get(deployment.backend, _NONE) | _ALWAYS.get(deployment.backend, _NONE),
        context_tokens_max=deployment.context_tokens_max or (row.context_tokens_max if row else None),
        output_tokens_max=deployment.output_tokens_max or (row.output_tokens_max if row else None),
        tiers=tiers,
        allowed=_allowed(deployment, price, tiers, factors),
        factors=factors,
        batch_factor=microusd(deployment.price.batch_factor) if deployment.price is not None else 1_000_000,
        may_reason="reasoning" in row.capabilities if row else None if deployment.backend != "local" else False,
        is_price_known=price is not None or deployment.backend == "local",
        are_capabilities_assumed=are_assumed,
        can_chat=deployment.backend == "local" or can_chat(deployment.model or "", _host(deployment)),
        image_hosts=_image_hosts(deployment),
        dialect=dialect,
    )


def build_backend(
    alias: str,
    deployment: DeploymentSettings,
    facts: Facts,
    settings: Settings,
    keys: Keys,
) -> Backend:
    """The backend of one deployment, not started.

    While its `keys` cannot be read the deployment is unready; its `load` has the reason.
    """
    name = deployment_name(alias, deployment)
    if deployment.backend == "local":
        from gateway.backends.local.backend import LocalBackend

        assert deployment.engine is not None, "the settings see to it"
        return LocalBackend(
            name, socket_path=settings.engine_socket(deployment.engine), model=alias, capabilities=facts.capabilities
        )
    assert deployment.model is not None, "the settings see to it"
    common_arguments: dict[str, Any] = {
        "model": deployment.model,
        "capabilities": facts.capabilities,
        "keys": keys,
        "headers": deployment.headers,
    }
    if deployment.backend == "litellm":
        from gateway.backends.managed import ManagedBackend

        return ManagedBackend(name, base_url=deployment.base_url, **common_arguments)
    backend: type[OpenAIBackend] = OpenAIBackend
    base_url = deployment.base_url or ""
    if deployment.backend == "anthropic":
        backend, base_url = AnthropicBackend, (base_url or ANTHROPIC_URL).rstrip("/").removesuffix("/v1")
    return backend(
        name,
        base_url=base_url,
        connect_timeout_s=deployment.connect_timeout_ms / 1000.0,
        connections_max=deployment.concurrency_max or SLOTS_DEFAULT,
        is_salted=deployment.is_salted,
        statuses=facts.dialect.statuses,
        **common_arguments,
    )


def _row(deployment: DeploymentSettings) -> Known | None:
    if deployment.model is None or deployment.backend == "local":
        return None
    return known(deployment.model, _host(deployment))


def _host(deployment: DeploymentSettings) -> str:
    return urlsplit(deployment.base_url or "").hostname or ""


def _image_hosts(deployment: DeploymentSettings) -> tuple[str, ...] | None:
    """The hosts that a deployment may fetch from: the settings', else all if it is public, else
    none.
    """
    if deployment.image_hosts is not None:
        return tuple(deployment.image_hosts)
    host = _host(deployment).rstrip(".")
    try:
        is_public = not host or ipaddress.ip_address(host).is_global
    except ValueError:  # a name
        is_public = "." in host and not host.endswith(_PRIVATE_ENDINGS)
    return None if is_public else ()


_PRIVATE_ENDINGS = (".internal", ".local", ".localhost", ".lan", ".home.arpa", ".svc")


def _allowed(
    deployment: DeploymentSettings, price: Price | None, tiers: Mapping[str, Price], factors: Mapping[str, int]
) -> frozenset[str]:
    """The reserved fields and tools that clients may send.

    Those that raise the bill need a known price, unless the deployment is free.
    """
    names = frozenset(map(canonical, deployment.allow_fields))
    if price is None or price == FREE:
        return names
    priced = set(factors)
    if tiers:
        priced.add("service_tier")
    if price.tool_call_microusd is not None:
        priced |= SEARCHES
    return names - (PAID - priced)


def _price(settings: PriceSettings) -> Price:
    characters, minute = settings.characters_usd_per_m, settings.audio_minute_usd
    amounts: dict[str, Any] = {
        name.replace("usd", "microusd"): microusd(usd)
        for name, usd in settings
        if usd is not None and name.endswith(("_usd_per_mtok", "request_usd", "tool_call_usd"))
    }
    images = [
        (f"images/{name}".removesuffix("/default"), microusd(usd, 12)) for name, usd in settings.image_usd.items()
    ]
    spoken = [] if characters is None else [("characters", microusd(characters))]
    heard = [] if minute is None else [("seconds", -(-microusd(minute, 12) // 60))]
    return Price(**amounts, units=(*images, *spoken, *heard))
