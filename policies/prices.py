"""The price of tokens: integers of µUSD, rounded up.

Knows no deployments, teams or limits. Invariant: no float ever carries money, and a cost is never
less than the exact product of tokens and price.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

MicroUSD = int
"""A millionth of a US dollar, always a whole number."""

MICROUSD_MAX = 2**53 - 1
"""The largest amount that Lua's numbers in Redis represent exactly: about nine billion dollars."""

_PER_MTOK = 1_000_000


def dollars(microusd: MicroUSD) -> str:
    """`microusd` in dollars, exact, with six decimals: 0.000120."""
    return f"{microusd // _PER_MTOK}.{microusd % _PER_MTOK:06d}"


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of one generation. `cached` of the `prompt` tokens came from a prefix cache.

    Raises ValueError for negative numbers and for `cached` above `prompt`.
    """

    prompt: int
    completion: int
    cached: int = 0

    def __post_init__(self) -> None:
        if self.prompt < 0 or self.completion < 0 or not 0 <= self.cached <= self.prompt:
            raise ValueError(f"tokens must be at least 0 and cached at most prompt: {self}")


@dataclass(frozen=True, slots=True)
class Price:
    """A deployment's price in µUSD per million tokens, plus a flat amount per request.

    `cached_input_microusd_per_mtok` None charges cached prompt tokens like the others.
    Raises ValueError for a negative price.
    """

    input_microusd_per_mtok: MicroUSD
    output_microusd_per_mtok: MicroUSD
    cached_input_microusd_per_mtok: MicroUSD | None = None
    request_microusd: MicroUSD = 0

    def __post_init__(self) -> None:
        cached = self.cached_input_microusd_per_mtok
        if (
            min(self.input_microusd_per_mtok, self.output_microusd_per_mtok, self.request_microusd) < 0
            or (cached or 0) < 0
        ):
            raise ValueError(f"prices must be at least 0: {self}")

    def cost(self, tokens: Tokens) -> MicroUSD:
        """The cost of `tokens`, rounded up to a whole µUSD once, after the sum."""
        cached_price = self.cached_input_microusd_per_mtok
        if cached_price is None:
            cached_price = self.input_microusd_per_mtok
        scaled = (
            (tokens.prompt - tokens.cached) * self.input_microusd_per_mtok
            + tokens.cached * cached_price
            + tokens.completion * self.output_microusd_per_mtok
        )
        return self.request_microusd - (-scaled // _PER_MTOK)

    def cost_max(self, prompt_tokens: int, completion_tokens: int) -> MicroUSD:
        """The highest possible cost of a request of these sizes, for any share of cached prompt
        tokens.

        A provider that charges for writing its cache has a cached price above the plain one.
        """
        dearest = max(self.input_microusd_per_mtok, self.cached_input_microusd_per_mtok or 0)
        scaled = prompt_tokens * dearest + completion_tokens * self.output_microusd_per_mtok
        return self.request_microusd - (-scaled // _PER_MTOK)


FREE = Price(0, 0)
