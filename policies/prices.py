"""The price of tokens: integers of µUSD, rounded up.

Knows no deployments, teams or limits. Invariant: no float ever carries money, and a cost is never
less than the exact product of tokens and price.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import msgspec
from msgspec.structs import astuple

MicroUSD = int
"""A millionth of a US dollar, always a whole number."""

MICROUSD_MAX = 2**53 - 1
"""The largest amount that Lua's numbers in Redis represent exactly: about nine billion dollars."""

_PER_MTOK = 1_000_000


def dollars(microusd: MicroUSD) -> str:
    """`microusd` in dollars, exact, with six decimals: 0.000120."""
    return f"{microusd // _PER_MTOK}.{microusd % _PER_MTOK:06d}"


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of one generation, as its provider bills them.

    Parts of `prompt`, none counted twice: `cached` were read from the provider's prompt cache, of
    which `cached_audio` are sounds, `cache_write` were written to it for its usual life and
    `cache_write_1h` for an hour, `audio_prompt` and `image_prompt` were sounds and images. Parts of
    `completion`: `reasoning`, `audio_completion` and `image_completion`. `tool_calls` counts the
    calls of tools that the provider ran, and `units` the images or seconds that it reported instead
    of tokens; 0: none.

    Raises ValueError for negative numbers and for parts above their whole.
    """

    prompt: int
    completion: int
    cached: int = 0
    cache_write: int = 0
    cache_write_1h: int = 0
    audio_prompt: int = 0
    image_prompt: int = 0
    reasoning: int = 0
    audio_completion: int = 0
    image_completion: int = 0
    tool_calls: int = 0
    units: int = 0
    cached_audio: int = 0

    def __post_init__(self) -> None:
        if self.prompt >= 0 <= self.completion and astuple(self)[2:] == _NO_PARTS:
            return
        inside = self.cached + self.cache_write + self.cache_write_1h + self.audio_prompt + self.image_prompt
        inside_completion = self.reasoning + self.audio_completion + self.image_completion
        is_over = inside > self.prompt or self.cached_audio > self.cached or inside_completion > self.completion
        if is_over or min(astuple(self)) < 0:
            raise ValueError(f"tokens must be at least 0, and their parts at most the whole: {self}")

    def unread(self) -> Tokens:
        """As if nothing had been read from the provider's prompt cache."""
        sounds = self.audio_prompt + self.cached_audio
        return msgspec.structs.replace(self, cached=0, cached_audio=0, audio_prompt=sounds)


_NO_PARTS = (0,) * len(Tokens.__struct_fields__[2:])


@dataclass(frozen=True, slots=True)
class Price:
    """A deployment's price in µUSD per million tokens, plus flat amounts per request and per call
    of a tool that the provider runs.

    `units` are prices in µUSD for a million of what is not billed in tokens: `characters`,
    `seconds`, `images`, and images of a quality or a size, such as `images/hd/1024x1024`.

    A price that is None is that of `input` or `output`, and of cached sounds the dearer one of
    cached tokens and of sounds; calls of tools without one are free.
    Raises ValueError for a negative price.
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

    def cost(self, tokens: Tokens) -> MicroUSD:
        """The cost of `tokens`, rounded up to a whole µUSD once, after the sum."""
        plain, answer = self.input_microusd_per_mtok, self.output_microusd_per_mtok
        scaled, calls = tokens.prompt * plain + tokens.completion * answer, 0
        if astuple(tokens)[2:] != _NO_PARTS:
            calls = tokens.tool_calls * (self.tool_call_microusd or 0)
            read = plain if self.cached_input_microusd_per_mtok is None else self.cached_input_microusd_per_mtok
            for count, price, usual in (
                (tokens.cached, read, plain),
                (tokens.cached_audio, self.cached_audio_input_microusd_per_mtok, read),
                (tokens.cache_write, self.cache_write_microusd_per_mtok, plain),
                (tokens.cache_write_1h, self.cache_write_1h_microusd_per_mtok, plain),
                (tokens.audio_prompt, self.audio_input_microusd_per_mtok, plain),
                (tokens.image_prompt, self.image_input_microusd_per_mtok, plain),
                (tokens.reasoning, self.reasoning_microusd_per_mtok, answer),
                (tokens.audio_completion, self.audio_output_microusd_per_mtok, answer),
                (tokens.image_completion, self.image_output_microusd_per_mtok, answer),
            ):
                if count and price is not None:
                    scaled += count * (price - usual)
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

        `has_audio`: sounds may be among them; `has_long_writes`: the request asks the provider to
        keep a prefix for an hour.
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

        Images without a price of their own have that of their size, of their quality, or of images;
        otherwise the dearest one. None where units of this kind have no price.
        """
        kind, _, detail = measure.partition("/")
        quality, _, size = detail.partition("/")
        known = dict(self.units)
        for name in (measure, f"{kind}/{size}", f"{kind}/{quality}", kind):
            if name in known and "auto" not in (quality, size):
                return known[name]
        return max([price for name, price in self.units if name.partition("/")[0] == kind], default=None)


FREE = Price(0, 0)
