"""The values that all rooms of the gateway share: a piece of an answer, its tokens, and the kind of request that it answers.

Shapes: OpenAI API reference, "Create chat completion" and "Create completion". It contains no services and no sockets.
"""

from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one generation, as its backend counted them; a local engine's guesses by their source."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: dict[str, int] | None = None
    accepted_tokens: dict[str, int] | None = None


class Kind(msgspec.Struct, frozen=True):
    """What is asked for: a chat's next message, or a text's continuation. All that differs on the journey is here."""

    name: str  # in records
    path: str  # on OpenAI-compatible servers
    prompt: str  # the field that is answered
    # how long an answer becomes where its caller does not say; None: as long as it takes, and one that was cut is not whole
    output_tokens_default: int | None = None


CHAT = Kind("chat", "/chat/completions", "messages")


COMPLETION = Kind("text_completion", "/completions", "prompt", 16)


def prompts_of(body: dict[str, Any]) -> list[str | list[int]]:
    """A completion's prompts, of which there may be one or many: each a text or token ids."""
    given = body["prompt"]
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One piece of an answer: `data` is the JSON of a `chat.completion.chunk`, or of a whole `chat.completion`; of a completion
    either is a `text_completion`. Chunks that came together and differ in their one text alone are one piece: `count` of them,
    each on a line of `data`.

    The other fields are what a light parse found, so that nobody parses `data` again on the way to the client.
    """

    data: bytes
    is_whole: bool = False  # data is one complete answer
    has_content: bool = False  # some delta that a person would see; time to first token counts to here
    finish_reasons: tuple[str, ...] = ()
    usage: Usage | None = None
    is_usage_only: bool = False  # `choices: []`: sent on only to clients that asked for usage
    # decision: chunks-in-lists
    count: int = 1

    def each(self) -> list[bytes]:
        """The JSON of each chunk in this piece."""
        return [self.data] if self.count == 1 else self.data.split(b"\n")
