"""The price of tokens: integers of µUSD, rounded up.

Knows no deployments, teams or limits. Invariant: no float ever carries money, and a cost is never
less than the exact product of tokens and price.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from policies.usage import Usage

MicroUSD = int
"""A millionth of a US dollar, always a whole number."""

MICROUSD_MAX = 2**53 - 1
"""The largest amount that Lua's numbers in Redis represent exactly: about nine billion dollars."""

_PER_MTOK = 1_000_000


def dollars(microusd: MicroUSD) -> str:
    """`microusd` in dollars, exact, with six decimals: 0.000120."""
    return f"{microusd // _PER_MTOK}.{microusd % _PER_MTOK:06d}"


@dataclass(frozen=True, slots=True)
class Price:
    """A deployment's price in µUSD per million tokens, plus flat amounts per request and per
    provider-run tool call.

    `units` are prices in µUSD per million units other than tokens: `characters`, `seconds`,
    `images`, and images of a quality or a size, such as `images/hd/1024x1024`. A price of None
    falls back to `input` or `output`; cached audio falls back to the dearer of cached tokens and
    audio; tool calls without a price are free. Raises ValueError for a negative price.
    """

    input_microusd_per_mtok: MicroUSD
    output_microusd_per_mtok: MicroUSD
    cached_input_microusd_per_mtok: MicroUSD | None = None
    request_microusd: MicroUSD = 0
    cache_write_microusd_per_mtok: MicroUSD | None = None
    cache_write_1h_microusd_per_mtok: MicroUSD | None = None
    audio_input_microusd_per_mtok: MicroUSD | None = None
    image_input_microusd_per_mtok: MicroUSD | None = None
    reasoning_microusd_per_mtok: MicroUSD | None = None
    audio_output_microusd_per_mtok: MicroUSD | None = None
    image_output_microusd_per_mtok: MicroUSD | None = None
    cached_audio_input_microusd_per_mtok: MicroUSD | None = None
    tool_call_microusd: MicroUSD | None = None
    units: tuple[tuple[str, MicroUSD], ...] = ()
    _dearest: tuple[MicroUSD, MicroUSD] = field(init=False, repr=False, compare=False)  # input, output of any request

    def __post_init__(self) -> None:
        amounts = [getattr(self, one.name) or 0 for one in fields(self) if one.init and one.name != "units"]
        if min(*amounts, *(price for _, price in self.units)) < 0:
            raise ValueError(f"prices must be at least 0: {self}")
        read, written = self.cached_input_microusd_per_mtok or 0, self.cache_write_microusd_per_mtok or 0
        inputs = self.input_microusd_per_mtok, read, written, self.image_input_microusd_per_mtok or 0
        reasoning, image = self.reasoning_microusd_per_mtok or 0, self.image_output_microusd_per_mtok or 0
        outputs = self.output_microusd_per_mtok, reasoning, image
        object.__setattr__(self, "_dearest", (max(inputs), max(outputs)))
        if self.cached_audio_input_microusd_per_mtok is None and self.audio_input_microusd_per_mtok is not None:
            usual = self.input_microusd_per_mtok if self.cached_input_microusd_per_mtok is None else read
            dearer = max(usual, self.audio_input_microusd_per_mtok)
            object.__setattr__(self, "cached_audio_input_microusd_per_mtok", dearer)

    def cost(self, usage: Usage) -> MicroUSD:
        """The cost of `usage`, rounded up to a whole µUSD once, after the sum.

        Raises ValueError for a negative sum or part, and for parts above their whole.
        """
        plain, answer = self.input_microusd_per_mtok, self.output_microusd_per_mtok
        scaled, calls = usage.prompt_tokens * plain + usage.completion_tokens * answer, 0
        if scaled < 0 or not usage.is_plain:
            if not usage.is_sound:
                raise ValueError(f"tokens must be at least 0, and their parts at most the whole: {usage}")
            calls = usage.tool_calls * (self.tool_call_microusd or 0)
            read = plain if self.cached_input_microusd_per_mtok is None else self.cached_input_microusd_per_mtok
            for count, price, usual_price in (
                (usage.cached_tokens, read, plain),
                (usage.cached_audio_tokens, self.cached_audio_input_microusd_per_mtok, read),
                (usage.cache_write_tokens, self.cache_write_microusd_per_mtok, plain),
                (usage.cache_write_1h_tokens, self.cache_write_1h_microusd_per_mtok, plain),
                (usage.audio_prompt_tokens, self.audio_input_microusd_per_mtok, plain),
                (usage.image_prompt_tokens, self.image_input_microusd_per_mtok, plain),
                (usage.reasoning_tokens, self.reasoning_microusd_per_mtok, answer),
                (usage.audio_completion_tokens, self.audio_output_microusd_per_mtok, answer),
                (usage.image_completion_tokens, self.image_output_microusd_per_mtok, answer),
            ):
                if count and price is not None:
                    scaled += count * (price - usual_price)
        return self.request_microusd + calls - (-scaled // _PER_MTOK)

    def cost_max(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        *,
        has_audio: bool = False,
        has_long_writes: bool = False,
        tool_calls: int = 0,
    ) -> MicroUSD:
        """The highest possible cost of a request of these sizes, for any kinds of tokens.

        `has_audio`: audio may be among them; `has_long_writes`: the request asks the provider to
        cache a prefix for an hour.
        """
        dearest_input, dearest_output = self._dearest
        if has_long_writes:
            dearest_input = max(dearest_input, self.cache_write_1h_microusd_per_mtok or 0)
        if has_audio:
            sounds = self.audio_input_microusd_per_mtok or 0, self.cached_audio_input_microusd_per_mtok or 0
            dearest_input = max(dearest_input, *sounds)
            dearest_output = max(dearest_output, self.audio_output_microusd_per_mtok or 0)
        scaled = prompt_tokens * dearest_input + completion_tokens * dearest_output
        return self.request_microusd + tool_calls * (self.tool_call_microusd or 0) - (-scaled // _PER_MTOK)

    def unit(self, measure: str) -> MicroUSD | None:
        """The price of a million units of `measure`: `characters`, `seconds`, or
        `images/QUALITY/SIZE`.

        Images without an exact price have the price of their size, of their quality, or of images;
        else the dearest price. None if units of this kind have no price.
        """
        kind, _, detail = measure.partition("/")
        quality, _, size = detail.partition("/")
        price_by_name = dict(self.units)
        for name in (measure, f"{kind}/{size}", f"{kind}/{quality}", kind):
            if name in price_by_name and "auto" not in (quality, size):
                return price_by_name[name]
        return max([price for name, price in self.units if name.partition("/")[0] == kind], default=None)


FREE = Price(0, 0)
