"""`POST /v1/embeddings`, served by the cache worker's sentence-transformers model.

Shapes: OpenAI API reference, "Create embeddings". Interprets no vectors. Invariant: a text that
does not fit the model is refused, never cut.
"""

import base64
import struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cache import CacheWorkerUnavailable, SemanticClient
from cache.worker import TextTooLong
from gateway.accounts import Identity
from gateway.api.endpoint import JsonEndpoint
from gateway.pipeline import Pipeline, may_use
from gateway.settings import Settings
from gateway.wire.errors import BadRequest, NotFound, Unavailable, shown
from gateway.wire.requests import convert

INPUTS_MAX = 2048


class EmbeddingsRequest(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class Embeddings(JsonEndpoint[EmbeddingsRequest]):
    """The endpoint. One instance per worker."""

    operation = "embeddings"

    def __init__(self, settings: Settings, pipeline: Pipeline, semantic: SemanticClient) -> None:
        super().__init__(settings, pipeline)
        self._semantic = semantic

    def read(self, body: dict[str, Any]) -> tuple[EmbeddingsRequest, str]:
        request: EmbeddingsRequest = convert(body, EmbeddingsRequest)
        alias = self.settings.embedding_alias
        if request.model != alias:
            raise NotFound(
                f"The embedding model `{shown(request.model)}` does not exist; this gateway has `{alias}`",
                param="model",
                code="model_not_found",
            )
        return request, alias

    async def answer(self, request: EmbeddingsRequest, identity: Identity) -> tuple[dict[str, Any], int]:
        alias = request.model
        may_use(identity, alias)
        texts = _texts(request.input)
        write = _base64 if request.encoding_format == "base64" else _floats
        data: list[msgspec.Raw] = []
        prompt_tokens = 0
        try:
            async for few in self._semantic.embed(texts):
                if request.dimensions not in (None, few.dims):
                    raise BadRequest(
                        f"`{alias}` has {few.dims} dimensions and can't be asked for {request.dimensions}",
                        param="dimensions",
                    )
                prompt_tokens += sum(few.tokens)
                # written a few at a time: all together would hold other requests up
                for vector in few.vectors:
                    one = {"object": "embedding", "index": len(data), "embedding": write(vector)}
                    data.append(msgspec.Raw(msgspec.json.encode(one)))
        except CacheWorkerUnavailable as error:
            raise Unavailable(f"The embedding model is not there: {error}", code="embedder_unavailable") from None
        except TextTooLong as error:
            raise BadRequest(
                f"`input[{error.index}]` has {error.length:,} {error.unit}: `{alias}` reads at most {error.length_max:,} "
                "and cuts no text; send it in parts",
                param="input",
                code="context_length_exceeded",
            ) from None
        reply = {
            "object": "list",
            "data": data,
            "model": alias,
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }
        return reply, prompt_tokens


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _floats(vector: bytes) -> list[float]:
    """Little-endian float32 as numbers."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _texts(given: str | list[str | int | list[int]]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts or len(texts) > INPUTS_MAX:
        raise BadRequest(f"`input` must hold 1 to {INPUTS_MAX} texts", param="input", code="invalid_value")
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(texts):
        raise BadRequest(
            "`input` as token ids is not supported: they belong to another model's tokenizer; send texts "
            "(LangChain: check_embedding_ctx_length=False)",
            param="input",
            code="unsupported_feature",
        )
    if not all(strings):
        raise BadRequest("`input` must not hold an empty text", param="input", code="invalid_value")
    return strings
