"""Requests whose answer is one JSON object without choices: embeddings, reranking, moderations.

Shapes: OpenAI API reference, "Create embeddings" and "Create moderation"; Cohere API reference,
"Rerank", which Jina, vLLM and Text Embeddings Inference share. Unknown fields pass through. Knows no
HTTP. Invariant: a text or document counts against budgets by at least its tokens.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.reserved import reserved_names
from gateway.wire.chunks import UNREADABLE
from gateway.wire.errors import BadRequest
from gateway.wire.types import EMBEDDING, MODERATION, RERANK, Chunk, Kind
from gateway.wire.usage import usage_of
from policies import Demand

INPUTS_MAX = 2048
_BYTES_PER_TOKEN = 4.0  # English prose; for expectations, not for bounds
_IMAGE_TOKENS_MAX = 50_000  # above every provider's maximum
_MARKS = 2  # tokens around a text
_DOCUMENTS_A_UNIT = 100  # Cohere's price of a search covers so many

_TokenId = Annotated[int, Meta(ge=0)]


class _Plain(msgspec.Struct, kw_only=True):
    """The fields of every plain request. `messages` would make it a dialogue."""

    model: Annotated[str, Meta(min_length=1)]
    user: str | None = None
    safety_identifier: str | None = None
    stream: Literal[False] | None = None
    stream_options: None = None
    messages: None = None

    def sizes(self) -> list[tuple[float, int]]:
        """The expected tokens, and the most, of each input that a model reads apart. Raises BadRequest."""
        raise NotImplementedError

    def demand(self, raw: bytes, body: dict[str, Any]) -> Demand:
        """The size of a request, and the capability that a deployment needs for it. Raises BadRequest."""
        sizes = self.sizes()
        marks = _MARKS * len(sizes)
        return Demand(
            prompt_tokens=int(sum(tokens for tokens, _ in sizes)) + marks,
            output_tokens_max=0,
            output_tokens_expected=0,
            needs=frozenset({_OF[type(self)].name}),
            prompt_tokens_min=0,  # some providers cut a long text, and the others refuse it themselves
            prompt_tokens_max=sum(most for _, most in sizes) + marks,
            reserved=reserved_names(body),
            units=self.units,
        )

    @property
    def units(self) -> int:
        """How often a provider's price of a request is charged for it."""
        return 1


def _size(given: Any) -> tuple[float, int]:
    """The expected tokens of an input, and the most: a token has at least one byte."""
    if isinstance(given, list):
        return len(given), len(given)
    if isinstance(given, dict) and given.get("type") == "image_url":
        return 0, _IMAGE_TOKENS_MAX
    size_bytes = len(given.encode() if isinstance(given, str) else msgspec.json.encode(given))
    return size_bytes / _BYTES_PER_TOKEN, size_bytes


class EmbeddingsRequest(_Plain, kw_only=True):
    """The known fields of a request for embeddings. `input` is one text or token ids, or several."""

    input: str | list[str | _TokenId | Annotated[list[_TokenId], Meta(min_length=1)]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    def sizes(self) -> list[tuple[float, int]]:
        return [_size(one) for one in inputs_of(self.input)]


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


class RerankRequest(_Plain, kw_only=True):
    """The known fields of a request to rank `documents` by how well they answer `query`."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    top_n: Annotated[int, Meta(ge=1)] | None = None

    def sizes(self) -> list[tuple[float, int]]:
        tokens, most = _size(self.query)
        return [(tokens + one, most + other) for one, other in map(_size, self.documents)]

    @property
    def units(self) -> int:
        return -(-len(self.documents) // _DOCUMENTS_A_UNIT)


class ModerationRequest(_Plain, kw_only=True):
    """The known fields of a request to judge texts and images by a provider's policy."""

    input: str | Annotated[list[str | dict[str, Any]], Meta(min_length=1, max_length=INPUTS_MAX)]

    def sizes(self) -> list[tuple[float, int]]:
        return [_size(one) for one in ([self.input] if isinstance(self.input, str) else self.input)]


_OF: dict[type[_Plain], Kind] = {EmbeddingsRequest: EMBEDDING, RerankRequest: RERANK, ModerationRequest: MODERATION}
PLAIN_SHAPES: dict[str, type[_Plain]] = {kind.name: shape for shape, kind in _OF.items()}


class _Units(msgspec.Struct):
    input_tokens: int | None = None


class _Meta(msgspec.Struct):
    billed_units: _Units | None = None
    tokens: _Units | None = None


class _Answer(msgspec.Struct):
    usage: dict[str, Any] | None = None
    meta: _Meta | None = None


def chunk_of(body: bytes) -> Chunk:
    """The chunk of a plain answer, a JSON object, which is complete."""
    try:
        found = msgspec.json.decode(body, type=_Answer)
    except UNREADABLE:  # a count of another shape costs no answer
        found = _Answer()
    meta, given = found.meta or _Meta(), found.usage or {}
    units = meta.tokens or meta.billed_units or _Units()
    tokens = given.get("prompt_tokens") or given.get("total_tokens") or units.input_tokens
    usage = usage_of(msgspec.json.encode({**given, "prompt_tokens": tokens})) if tokens else None
    return Chunk(body, is_whole=True, has_content=True, finish_reasons=("stop",), usage=usage)
