"""The verifier that the settings give each alias, and what a question to it is expected to cost.

By the settings and the price tables alone: connects to nothing and knows no health. Invariant: with
`auto` no deployment outside the alias is chosen, except an engine of this host where none can chat.
"""

from collections.abc import Iterator, Sequence

import msgspec

from gateway.deployments.build import describe
from gateway.settings import AUTO, DeploymentSettings, Settings, deployment_name, is_pattern
from policies import Usage
from policies.verification import Verify

QUESTION = Usage(800, 2)
"""The tokens of a typical question."""


class Assigned(msgspec.Struct, frozen=True):
    """The verifier of `alias`. `deployment` is empty where no deployment can be asked; `microusd` is
    the expected cost of a question, None where no price is known.
    """

    alias: str
    mode: Verify
    verifier: str
    deployment: str
    microusd: int | None

    @property
    def line(self) -> str:
        """The assignment in words, or what is missing and what helps."""
        when = {Verify.BEFORE: "before answers that are not certain", Verify.AFTER: "after misses"}
        if not self.deployment:
            whose = "it and no local engine" if self.verifier == AUTO else f"its verifier {self.verifier!r}"
            return (
                f"{self.alias}: verify is `{self.mode}`, and no deployment of {whose} can chat: nothing is asked; "
                "name an alias that can in `verifier`"
            )
        cost = "of unknown price" if self.microusd is None else f"about ${self.microusd / 1e6:.6f} each"
        asked = when.get(self.mode, "to show what would be served; nothing found by meaning is")
        return f"{self.alias}: {self.deployment}, {asked}; questions {cost}"


def assigned(settings: Settings) -> Iterator[Assigned]:
    """The verifier of each alias that has one and is looked up by meaning."""
    for alias, model in settings.models.items():
        mode, verifier, _ = settings.verification(alias)
        if verifier is None or not (settings.cache.is_semantic and model.is_semantic):
            continue
        is_auto = verifier == AUTO
        target = alias if is_auto else verifier
        able = _able(target, settings.models[target].deployments)
        if not able and is_auto:
            for name, other in settings.models.items():
                able += _able(name, other.deployments, is_local=True)
        cost, name = min(able, default=(None, ""))
        is_priced = cost is not None and cost < _UNKNOWN and not is_pattern(target)
        yield Assigned(alias, mode, verifier, name, cost if is_priced else None)


def _able(alias: str, deployments: Sequence[DeploymentSettings], *, is_local: bool = False) -> list[tuple[int, str]]:
    """The cost of a question in µUSD and the name, for each deployment that can chat; with
    `is_local` for engines alone. Those without a known price come last.
    """
    described = [(place, describe(place)) for place in deployments if place.engine or not is_local]
    return [
        (facts.price.cost(QUESTION) if facts.is_price_known else _UNKNOWN, deployment_name(alias, place))
        for place, facts in described
        if facts.can_chat
    ]


_UNKNOWN = 1 << 60
