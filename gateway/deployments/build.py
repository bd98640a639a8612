"""From the settings of a deployment to its backend, its price, its sizes and its capabilities.

Facts come from the settings, else by the model's name from litellm's table, else from the kind of
backend. Connects to nothing and imports nothing heavy: `Backend.start` does.
"""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from gateway.backends.base import Backend
from gateway.deployments.catalog import Known, can_chat, known, microusd
from gateway.settings import CAPABILITIES, DeploymentSettings, PriceSettings, Settings, deployment_name
from policies import Price
from policies.prices import FREE

# Capabilities by kind of backend, where the settings name none. The local engine parses no tool
# calls, constrains no grammar and fills no gap before a suffix.
_CAPABILITIES = {
    "local": frozenset({"n", "logprobs", "completions", "prefill"}),
    "openai": CAPABILITIES - {"prefill"},
    "litellm": frozenset({"tools"}),
}
_NEVER = {"litellm": frozenset({"completions"})}  # litellm would turn a text completion into a chat


class Facts(msgspec.Struct, frozen=True):
    """The facts of a deployment for routing and budgets. Without a known price it is free."""

    price: Price
    capabilities: frozenset[str]
    context_tokens_max: int | None
    output_tokens_max: int | None
    is_price_known: bool = True
    are_capabilities_assumed: bool = False  # those of its kind, as its model is in no table
    can_chat: bool = True


def describe(deployment: DeploymentSettings) -> Facts:
    """The facts of one deployment, from its settings and the public table."""
    row = _row(deployment)
    price = _price(deployment.price) if deployment.price is not None else (row.price if row else None)
    capabilities = row.capabilities if row else _CAPABILITIES[deployment.backend]
    if deployment.capabilities is not None:
        capabilities = frozenset(deployment.capabilities)
    return Facts(
        price=price or FREE,
        capabilities=capabilities - _NEVER.get(deployment.backend, frozenset()),
        context_tokens_max=deployment.context_tokens_max or (row.context_tokens_max if row else None),
        output_tokens_max=deployment.output_tokens_max or (row.output_tokens_max if row else None),
        is_price_known=price is not None or deployment.backend == "local",
        are_capabilities_assumed=row is None and deployment.capabilities is None and deployment.backend != "local",
        can_chat=deployment.backend == "local" or can_chat(deployment.model or "", _host(deployment)),
    )


def build_backend(
    alias: str, deployment: DeploymentSettings, settings: Settings, environ: Mapping[str, str] = os.environ
) -> Backend:
    """The backend of one deployment, not started.

    A key whose variable `environ` lacks leaves the deployment unready; its `load` has the reason.
    """
    name = deployment_name(alias, deployment)
    facts = describe(deployment)
    if deployment.backend == "local":
        from gateway.backends.local.backend import LocalBackend

        assert deployment.engine is not None, "the settings see to it"
        return LocalBackend(
            name, socket_path=settings.engine_socket(deployment.engine), model=alias, capabilities=facts.capabilities
        )
    key = environ.get(deployment.api_key_env, "") if deployment.api_key_env else ""
    unready = f"{deployment.api_key_env} is not set in the environment" if deployment.api_key_env and not key else ""
    assert deployment.model is not None, "the settings see to it"
    if deployment.backend == "litellm":
        from gateway.backends.managed import ManagedBackend

        return ManagedBackend(
            name,
            model=deployment.model,
            capabilities=facts.capabilities,
            api_key=key,
            base_url=deployment.base_url,
            headers=deployment.headers,
            unready=unready,
        )
    from gateway.backends.openai.backend import OpenAIBackend

    assert deployment.base_url is not None, "the settings see to it"
    return OpenAIBackend(
        name,
        base_url=deployment.base_url,
        model=deployment.model,
        capabilities=facts.capabilities,
        api_key=key,
        headers=deployment.headers,
        connect_timeout_s=deployment.connect_timeout_ms / 1000.0,
        connections_max=deployment.concurrency_max,
        is_salted=deployment.is_salted,
        unready=unready,
    )


def _row(deployment: DeploymentSettings) -> Known | None:
    if deployment.model is None or deployment.backend == "local":
        return None
    return known(deployment.model, _host(deployment))


def _host(deployment: DeploymentSettings) -> str:
    return urlsplit(deployment.base_url or "").hostname or ""


def _price(settings: PriceSettings) -> Price:
    cached = settings.cached_input_usd_per_mtok
    return Price(
        input_microusd_per_mtok=microusd(settings.input_usd_per_mtok),
        output_microusd_per_mtok=microusd(settings.output_usd_per_mtok),
        cached_input_microusd_per_mtok=microusd(cached) if cached is not None else None,
        request_microusd=microusd(settings.request_usd),
    )
