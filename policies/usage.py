"""The tokens of one generation, as its backend counted them and as its provider bills them.

Knows no prices. Invariant: `within` returns non-negative counts, and parts at most as large as
their whole.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import astuple

COUNT_MAX = 1_000_000_000
"""The largest count, so that sums of counts cannot overflow."""


class Usage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens of one generation, as its backend counted them.

    Parts of the prompt, each counted once: read from the provider's prompt cache, written to it for
    its usual life or for an hour, audio, images. Parts of the completion: reasoning, audio, images.
    `tool_calls`: calls of tools that the provider ran. A local engine counts its drafted tokens by
    source. `units`: the images, seconds or searches that a provider counts instead of tokens.
    `cached_audio_tokens`: the audio part of `cached_tokens`. `rounds`: how often the provider read
    the prompt again, each time with the text that its tools had found.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_audio_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    audio_prompt_tokens: int = 0
    image_prompt_tokens: int = 0
    reasoning_tokens: int = 0
    audio_completion_tokens: int = 0
    image_completion_tokens: int = 0
    tool_calls: int = 0
    provider_cost_microusd: int | None = None  # as the provider says itself
    drafted_tokens: dict[str, int] | None = None
    accepted_tokens: dict[str, int] | None = None
    units: int = 0
    rounds: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether only the prompt and the completion are set."""
        return astuple(self)[2:] == _NO_PARTS

    @property
    def is_sound(self) -> bool:
        """Whether every count is at least 0, and the parts are at most their wholes."""
        if self.is_plain:
            return self.prompt_tokens >= 0 <= self.completion_tokens
        written = self.cache_write_tokens + self.cache_write_1h_tokens
        return (
            min(*astuple(self)[:_COUNTS], self.units, self.rounds) >= 0
            and self.cached_audio_tokens <= self.cached_tokens
            and self.cached_tokens + written + self.audio_prompt_tokens + self.image_prompt_tokens <= self.prompt_tokens
            and self.reasoning_tokens + self.audio_completion_tokens + self.image_completion_tokens
            <= self.completion_tokens
        )

    def parts(self) -> dict[str, Any]:
        """The fields other than prompt, completion, units and rounds, by name; empty if none is
        set.
        """
        return {} if self.is_plain else dict(zip(_PARTS, astuple(self)[2:-2], strict=True))

    def within(
        self, prompt_tokens: int, completion_tokens: int, tool_calls: int = COUNT_MAX, units: int = COUNT_MAX
    ) -> Usage:
        """A copy with counts up to the given ones; each part is cut to the remainder of its whole.

        Returns this usage itself if no count exceeds them.
        """
        is_within = self.prompt_tokens <= prompt_tokens and self.completion_tokens <= completion_tokens
        if is_within and self.is_sound and self.tool_calls <= tool_calls and self.units <= units:
            return self
        sizes = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        cut = {}
        for whole, parts in PARTS.items():
            tokens_left = cut[whole] = max(0, min(getattr(self, whole), sizes[whole]))
            for part in parts:
                cut[part] = max(0, min(getattr(self, part), tokens_left))
                tokens_left -= cut[part]
        cut["cached_audio_tokens"] = max(0, min(self.cached_audio_tokens, cut["cached_tokens"]))
        cut["tool_calls"], cut["units"] = max(0, min(self.tool_calls, tool_calls)), max(0, min(self.units, units))
        return msgspec.structs.replace(self, rounds=max(0, self.rounds), **cut)

    def unread(self) -> Usage:
        """This usage with the cached tokens counted as ordinary tokens."""
        sounds = self.audio_prompt_tokens + self.cached_audio_tokens
        return msgspec.structs.replace(self, cached_tokens=0, cached_audio_tokens=0, audio_prompt_tokens=sounds)


PARTS = {
    "prompt_tokens": (
        "cached_tokens", "cache_write_1h_tokens", "cache_write_tokens", "audio_prompt_tokens", "image_prompt_tokens",
    ),
    "completion_tokens": ("audio_completion_tokens", "image_completion_tokens", "reasoning_tokens"),
}  # fmt: skip
"""The fields of a `Usage` that are parts of another field, by that field."""

_COUNTS = Usage.__struct_fields__.index("tool_calls") + 1
_PARTS = Usage.__struct_fields__[2:-2]
_NO_PARTS = astuple(Usage(0, 0))[2:]
