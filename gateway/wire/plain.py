"""Requests whose answer has no choices: embeddings, reranking, moderations, images and audio.

Shapes: OpenAI API reference, "Create embeddings", "Create moderation", "Images" and "Audio"; Cohere
API reference, "Rerank", which Jina, vLLM and Text Embeddings Inference share. Unknown fields pass
through. Knows no HTTP. Invariant: a text, document, image or sound counts against budgets by at
least its tokens and units.
"""

import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.reserved import calls_of, reserved_names
from gateway.wire.chunks import UNREADABLE
from gateway.wire.errors import BadRequest, MissingField
from gateway.wire.types import (
    EMBEDDING,
    IMAGE,
    IMAGE_EDIT,
    MODERATION,
    RERANK,
    RESPONSE,
    SPEECH,
    TRANSCRIPTION,
    TRANSLATION,
    VARIATION,
    Chunk,
    Kind,
)
from gateway.wire.usage import count_of, renamed, usage_of
from policies import Demand, Usage

INPUTS_MAX = 2048
OUTPUT_TOKENS_MAX = 4096  # of an answer without a bound, in the worst case
BYTES_PER_TOKEN = 4.0  # English prose; for expectations, not for bounds
MEDIA_TOKENS_MAX = 50_000  # of one image, sound or file; above every provider's maximum
_MARKS = 2  # tokens around a text
_DOCUMENTS_A_UNIT = 100  # Cohere's price of a search covers so many
_IMAGE_OUTPUT_TOKENS_MAX = 16_384  # of one image with its partial ones; above every provider's maximum
_SPEECH_TOKENS_PER_BYTE = 4  # 20 tokens are a second of speech, which has at least five characters
_SOUND_BYTES_PER_S = 1_000  # 8 kbit/s: hardly any recording has fewer
_SOUND_TOKENS_PER_S = 50  # above every provider's count

_SIZE = re.compile(r"\d{1,5}x\d{1,5}")

_TokenId = Annotated[int, Meta(ge=0)]


class _PlainRequest(msgspec.Struct, kw_only=True):
    """The fields of every plain request. `messages` would make it a dialogue."""

    model: Annotated[str, Meta(min_length=1)]
    user: str | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    stream_options: None = None
    messages: None = None
    # its fields with another meaning than the reserved ones of their names
    unreserved: ClassVar[frozenset[str]] = frozenset()

    def extent(self) -> "Extent":
        """The size and the units of the request. Raises BadRequest."""
        raise NotImplementedError

    def demand(self, raw: bytes, body: dict[str, Any]) -> Demand:
        """The size of a request, and the capability that its deployment needs. Raises BadRequest."""
        extent = self.extent()
        marks, reserved = _MARKS * len(extent.inputs), reserved_names(body) - self.unreserved
        return Demand(
            prompt_tokens=int(sum([tokens for tokens, _ in extent.inputs])) + marks,
            output_tokens_max=extent.output_tokens,
            output_tokens_expected=0,
            needs=_NEEDS[type(self)],
            prompt_tokens_min=0,  # some providers cut a long text, and the others refuse it themselves
            prompt_tokens_max=sum([most for _, most in extent.inputs]) + marks,
            reserved=reserved,
            calls=calls_of(body, reserved),
            units=extent.units,
            measure=extent.measure,
        )


class Extent(NamedTuple):
    """The size of a plain request, and the units that its price counts."""

    inputs: list[tuple[float, int]]  # the expected tokens, and the most, of each that a model reads apart
    units: int = 1  # how often the price of a request is charged, or the most units of the `measure`
    measure: str = ""  # the unit as `policies.Price.unit` takes it; empty: billed by requests and tokens
    output_tokens: int = 0  # the most of the answer, where a provider counts them


def _size(value: Any) -> tuple[float, int]:
    """The expected tokens of an input and the most, since a token has at least one byte."""
    if isinstance(value, list):
        return len(value), len(value)
    if isinstance(value, dict) and value.get("type") == "image_url":
        return 0, MEDIA_TOKENS_MAX
    size_bytes = len(value.encode() if isinstance(value, str) else msgspec.json.encode(value))
    return size_bytes / BYTES_PER_TOKEN, size_bytes


class EmbeddingsRequest(_PlainRequest, kw_only=True):
    """The known fields of a request for embeddings. `input` is one text or token ids, or several."""

    stream: Literal[False] | None = None
    input: str | list[str | _TokenId | Annotated[list[_TokenId], Meta(min_length=1)]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    def extent(self) -> Extent:
        return Extent([*map(_size, inputs_of(self.input))])


def inputs_of(given: str | list[Any]) -> list[str | list[int]]:
    """The texts, or lists of token ids, in an `input`. Raises BadRequest."""
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not inputs or len(inputs) > INPUTS_MAX:
        raise BadRequest(f"`input` must hold 1 to {INPUTS_MAX} texts", param="input", code="invalid_value")
    if not all(inputs):
        raise BadRequest("`input` must not hold an empty text", param="input", code="invalid_value")
    if len({*map(type, given)}) > 1:
        words = "`input` must be a text, token ids, or a list of texts or of token ids"
        raise BadRequest(words, param="input", code="invalid_type")
    return inputs


class RerankRequest(_PlainRequest, kw_only=True):
    """The known fields of a request to rank `documents` by their relevance to `query`."""

    stream: Literal[False] | None = None
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    top_n: Annotated[int, Meta(ge=1)] | None = None

    def extent(self) -> Extent:
        tokens, most = _size(self.query)
        pairs = [(tokens + expected, most + limit) for expected, limit in map(_size, self.documents)]
        return Extent(pairs, units=-(-len(self.documents) // _DOCUMENTS_A_UNIT))


class ModerationRequest(_PlainRequest, kw_only=True):
    """The known fields of a request to classify texts and images by a provider's policy."""

    model: Annotated[str, Meta(min_length=1)] = "omni-moderation-latest"  # defaults as at OpenAI
    stream: Literal[False] | None = None
    input: str | Annotated[list[str | dict[str, Any]], Meta(min_length=1, max_length=INPUTS_MAX)]

    def extent(self) -> Extent:
        return Extent([*map(_size, [self.input] if isinstance(self.input, str) else self.input)])


class ImageRequest(_PlainRequest, kw_only=True):
    """The known fields of a request for images that `prompt` describes."""

    model: Annotated[str, Meta(min_length=1)] = "gpt-image-1.5"
    prompt: Annotated[str, Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    size: str | None = None
    quality: str | None = None

    def extent(self) -> Extent:
        # a size in the place of a quality, or the other way round, would find another price
        quality = "auto" if _SIZE.fullmatch(self.quality or "") else self.quality
        size = "auto" if self.size and not _SIZE.fullmatch(self.size) else self.size
        units, measure = self.n or 1, f"images/{quality or ''}/{size or ''}"
        inputs = [_size(self.prompt), *[(0.0, MEDIA_TOKENS_MAX)] * self.images_read()]
        return Extent(inputs, units, measure, output_tokens=_IMAGE_OUTPUT_TOKENS_MAX * units)

    def images_read(self) -> int:
        """The number of images that the model reads. Raises BadRequest."""
        return 0


class ImageEditRequest(ImageRequest, kw_only=True):
    """The fields of `ImageRequest`, with images to edit: `image`, `image[]` or JSON's `images`, and
    `mask`.
    """

    image: Any = None
    images: list[Any] | None = None
    images_in_form: Any = msgspec.field(default=None, name="image[]")
    mask: Any = None

    def images_read(self) -> int:
        images_given = [
            *(self.images or ()),
            *(self.images_in_form or ()),
            *(one for named in (self.image, self.mask) if type(named) is list for one in named),
        ]
        images = [one for one in (self.image, self.mask, *images_given) if one is not None and type(one) is not list]
        if not images:
            raise MissingField("image")
        return len(images)


class VariationRequest(ImageEditRequest, kw_only=True):
    """The known fields of a request for variations of `image`."""

    model: Annotated[str, Meta(min_length=1)] = "dall-e-2"
    prompt: str = ""


class SpeechRequest(_PlainRequest, kw_only=True):
    """The known fields of a request to speak the text `input`."""

    input: Annotated[str, Meta(min_length=1)]
    voice: Any
    instructions: str | None = None
    unreserved = frozenset({"speed"})  # of the voice

    def extent(self) -> Extent:
        inputs, output_tokens = [_size(self.input), _size(self.instructions or "")], len(self.input.encode())
        return Extent(inputs, len(self.input), "characters", _SPEECH_TOKENS_PER_BYTE * output_tokens)


class _Sound(msgspec.Struct):
    """The body's description of a form's file; see `gateway.wire.forms`."""

    bytes: Annotated[int, Meta(ge=0)]


class TranscriptionRequest(_PlainRequest, kw_only=True):
    """The known fields of a request to transcribe or translate the speech in `file`."""

    file: _Sound
    prompt: str | None = None

    def extent(self) -> Extent:
        seconds = 1 + self.file.bytes // _SOUND_BYTES_PER_S
        tokens = seconds * _SOUND_TOKENS_PER_S
        return Extent([_size(self.prompt or ""), (0.0, tokens)], seconds, "seconds", tokens)


class TranslationRequest(TranscriptionRequest, kw_only=True):
    """The known fields of a request to translate the speech in `file` to English."""


class _Options(msgspec.Struct):
    include_usage: None = None


class PassedResponseRequest(_PlainRequest, kw_only=True):
    """The known fields of a request to a provider's Responses API, with all items that it
    continues.
    """

    stream_options: _Options | None = None  # type: ignore[assignment]  # the others are never streamed with any
    input: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    def demand(self, raw: bytes, body: dict[str, Any]) -> Demand:
        demand = super().demand(raw, body)
        media = raw.count(b'"input_image"') + raw.count(b'"input_file"') + raw.count(b'"computer_screenshot"')
        return msgspec.structs.replace(
            demand,
            prompt_tokens=len(raw) // int(BYTES_PER_TOKEN),
            prompt_tokens_max=len(raw) + MEDIA_TOKENS_MAX * media,
            output_tokens_max=self.max_output_tokens or OUTPUT_TOKENS_MAX,
            is_output_asked=self.max_output_tokens is not None,
            tier=str(body["service_tier"])[:100] if "service_tier" in demand.reserved else "",
        )

    def extent(self) -> Extent:
        return Extent([])


_OF: dict[type[_PlainRequest], Kind] = {
    EmbeddingsRequest: EMBEDDING,
    RerankRequest: RERANK,
    ModerationRequest: MODERATION,
    PassedResponseRequest: RESPONSE,
    ImageRequest: IMAGE,
    ImageEditRequest: IMAGE_EDIT,
    VariationRequest: VARIATION,
    SpeechRequest: SPEECH,
    TranscriptionRequest: TRANSCRIPTION,
    TranslationRequest: TRANSLATION,
}
_NEEDS = {shape: frozenset({kind.name}) for shape, kind in _OF.items()}
PLAIN_SHAPES: dict[str, type[_PlainRequest]] = {kind.name: shape for shape, kind in _OF.items()}


class _Units(msgspec.Struct):
    input_tokens: int | None = None
    search_units: Any = None


class _Meta(msgspec.Struct):
    billed_units: _Units | None = None
    tokens: _Units | None = None


class _Inner(msgspec.Struct):
    usage: dict[str, Any] | None = None
    output: Any = None
    incomplete_details: Any = None


class _PlainAnswer(_Inner):
    meta: _Meta | None = None
    data: list[msgspec.Raw] | None = None
    created: float | None = None
    duration: float | str | None = None
    response: _Inner | None = None
    message: _Inner | None = None


_IMAGE = re.compile(rb'"(?:b64_json|url)"')


def _type_of(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else None


def _is_search(item: Any) -> bool:
    """Whether an item of a response is a search that its provider charges; opening a page is not."""
    if _type_of(item) != "web_search_call":
        return False
    action = item.get("action")
    return not isinstance(action, dict) or action.get("type") in (None, "search")


class Counted:
    """Counts the tokens and units that the parts of a plain answer report.

    A later part's values replace an earlier part's.
    """

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._units = self._searches = self._rounds = 0
        self.finish_reason = "stop"

    def read(self, body: bytes) -> None:
        """Read a whole answer, or the data of an event."""
        try:
            try:
                answer = msgspec.json.decode(body, type=_PlainAnswer)
            except msgspec.ValidationError:  # a provider of its own has other fields of these names
                answer = _PlainAnswer(**msgspec.structs.asdict(msgspec.json.decode(body, type=_Inner)))
        except UNREADABLE:  # a count of another shape costs no answer
            return
        given = next((one.usage for one in (answer, answer.response, answer.message) if one and one.usage), None)
        self._usage |= {name: value for name, value in (given or {}).items() if value is not None}
        response = answer.response or answer
        if response.incomplete_details:
            self.finish_reason = "content_filter" if b'"content_filter"' in body else "length"
        if isinstance(response.output, list):
            self._searches = sum(map(_is_search, response.output))
            self._rounds = sum(_type_of(item) != "message" for item in response.output)
        meta = answer.meta or _Meta()
        billed = meta.billed_units or _Units()
        if tokens := (meta.tokens or billed).input_tokens:
            self._usage.setdefault("prompt_tokens", tokens)
        counted = [billed.search_units, self._usage.get("seconds"), answer.duration]
        if answer.created is not None and answer.data and _IMAGE.search(answer.data[0]):
            counted.append(len(answer.data))
        self._units = max(self._units, *[count_of(units) or 0 for units in counted])

    @property
    def usage(self) -> Usage | None:
        """The counted usage; None if no part reported usage."""
        counts = renamed(self._usage)
        counts.setdefault("prompt_tokens", counts.get("total_tokens"))
        counts["rounds"] = self._rounds or counts.get("rounds")
        if self._searches:
            counts["server_tool_use"] = {"web_search_requests": self._searches}
        usage = usage_of(msgspec.json.encode(counts)) if counts["prompt_tokens"] else None
        if self._units:
            return msgspec.structs.replace(usage or Usage(0, 0), units=self._units)
        return usage


def counted_in(body: bytes) -> Counted:
    """What a whole answer, or one event, reports."""
    counted = Counted()
    counted.read(body)
    return counted


def chunk_of(body: bytes) -> Chunk:
    """The chunk of a complete plain answer, which is a JSON object."""
    counted = counted_in(body)
    return Chunk(body, is_whole=True, has_content=True, finish_reasons=(counted.finish_reason,), usage=counted.usage)
