"""Values that all rooms of the gateway share: a piece of an answer, a request's kind.

Shapes: OpenAI API reference, "Create chat completion" and "Create completion". Contains no services
and no sockets.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from policies import Usage


class Kind(msgspec.Struct, frozen=True):
    """A kind of request, by its answer: a chat's next message, a text's continuation, or a plain
    answer.

    A plain answer (`is_plain`) has no choices and is passed on unchanged: JSON, text, bytes or
    events. A deployment needs the capability of the kind's `name`.
    """

    name: str  # in records
    path: str  # on OpenAI-compatible servers
    prompt: str  # the field that is answered
    # the length of an answer without a bound; None: unbounded, so a cut answer is incomplete
    output_tokens_default: int | None = None
    is_plain: bool = False
    is_form: bool = False  # its files come as multipart/form-data
    is_bytes: bool = False  # its answer leaves while it arrives
    is_repeatable: bool = True  # an equal request may get the same answer


CHAT = Kind("chat", "/chat/completions", "messages")


COMPLETION = Kind("text_completion", "/completions", "prompt", 16)


EMBEDDING = Kind("embeddings", "/embeddings", "input", is_plain=True)


RERANK = Kind("rerank", "/rerank", "documents", is_plain=True)


MODERATION = Kind("moderations", "/moderations", "input", is_plain=True)


IMAGE = Kind("images", "/images/generations", "prompt", is_plain=True, is_repeatable=False)
IMAGE_EDIT = Kind("image_edits", "/images/edits", "prompt", is_plain=True, is_form=True, is_repeatable=False)
VARIATION = Kind("image_variations", "/images/variations", "image", is_plain=True, is_form=True, is_repeatable=False)
SPEECH = Kind("speech", "/audio/speech", "input", is_plain=True, is_bytes=True)
TRANSCRIPTION = Kind("transcriptions", "/audio/transcriptions", "file", is_plain=True, is_form=True)
TRANSLATION = Kind("translations", "/audio/translations", "file", is_plain=True, is_form=True)


RESPONSE = Kind("responses", "/responses", "input", is_plain=True)
"""An unchanged request of the Responses API, for providers with that API."""


PASSAGE = Kind("passthrough", "", "", is_plain=True, is_repeatable=False)
"""A request to a provider's own path."""


MEDIA = (IMAGE, IMAGE_EDIT, VARIATION, SPEECH, TRANSCRIPTION, TRANSLATION)
"""The kinds with images or audio, which are priced by other units than tokens."""


KINDS = (CHAT, COMPLETION, EMBEDDING, RERANK, MODERATION, *MEDIA, RESPONSE)


def prompts_of(body: dict[str, Any]) -> list[str | list[int]]:
    """A completion's prompts, each a text or token ids."""
    given = body["prompt"]
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


def opened(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Split off a last message with `prefix`: `body` without it, and its text, which begins the
    answer.

    Source: DeepSeek's and Mistral's API references, "Chat prefix completion".
    """
    messages = body.get("messages") or ()
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].get("prefix") is not True:
        return body, ""
    content = messages[-1].get("content")
    return ({**body, "messages": messages[:-1]}, content) if isinstance(content, str) else (body, "")


TOLD = b" "
"""The `native` of a chunk that came with the one before it."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One piece of an answer.

    `data` is the JSON of a `chat.completion.chunk` or of a whole `chat.completion`; for a
    completion both are a `text_completion`. A plain answer is a whole, or bytes of the type
    `media`. Chunks that arrived together and differ only in their text are one piece: `count` of
    them, each on a line of `data`. The other fields are the results of a partial parse, so that no
    later step parses `data` again. `native` has what `data` was translated from, as it came: an event
    or the whole answer of Anthropic's API. An event that a chat completion lacks has no `data`.
    """

    data: bytes
    is_whole: bool = False  # `data` is a complete answer
    has_content: bool = False  # has a delta that a person would see; ends the time to first token
    has_words: bool = False  # has a text that is not blank; unset, it may have one all the same
    finish_reasons: tuple[str, ...] = ()
    usage: Usage | None = None
    is_usage_only: bool = False  # `choices: []`: forwarded only to clients that asked for usage
    # decision: chunks-in-lists
    count: int = 1
    media: str = ""
    status: int = 200  # of the response that it belongs to
    mended: int = 0  # fields of it that were not what they should be
    native: bytes = b""

    def each(self) -> list[bytes]:
        """The JSON of each chunk in this piece."""
        if self.count == 1:
            return [self.data] if self.data else []
        return self.data.split(b"\n")


_data_of, _count_of = attrgetter("data"), attrgetter("count")


def each_of(chunks: Sequence[Chunk]) -> list[bytes]:
    """The JSON of each chunk in these pieces."""
    lines = b"\n".join(map(_data_of, chunks)).split(b"\n")
    if len(lines) == sum(map(_count_of, chunks)) and b"" not in lines:
        return lines
    return [data for chunk in chunks for data in chunk.each()]


def size_of(chunks: Iterable[Chunk]) -> int:
    """The bytes of `chunks` together."""
    return sum(map(len, map(_data_of, chunks)))
