"""The packaged embedder, in the cache worker's process, as a backend of `/v1/embeddings`.

Shapes: OpenAI API reference, "Create embeddings". Interprets no vectors. Invariant: a text that
does not fit the model is refused, never cut.
"""

import base64
import struct
from collections.abc import AsyncGenerator

import msgspec

from cache import CacheWorkerUnavailable, SemanticClient
from cache.worker import TextTooLong
from gateway.backends.base import BackendRejected, BackendRequest, BackendUnavailable, Load
from gateway.backends.refusals import error_body
from gateway.wire.plain import chunk_of, inputs_of
from gateway.wire.types import EMBEDDING, Chunk


class EmbedderBackend:
    """The one deployment of `model`, the embedder's alias. The owner of `client` connects it."""

    def __init__(self, name: str, model: str, client: SemanticClient) -> None:
        self.name = name
        self.capabilities = frozenset({EMBEDDING.name})
        self._model = model
        self._client = client

    async def start(self) -> None:
        """Do nothing: the client's owner starts it."""

    async def aclose(self) -> None:
        """Do nothing: the client's owner closes it."""

    def load(self, prompt_tokens: int) -> Load:
        return Load()

    async def stream(self, request: BackendRequest) -> AsyncGenerator[list[Chunk], None]:
        """The answer in one piece. Raises BackendRejected, and BackendUnavailable if the worker is
        away.
        """
        body = request.body
        if request.kind is not EMBEDDING:
            raise _rejected(f"`{self._model}` makes embeddings: send it to /v1/embeddings", "model")
        texts = [text for text in inputs_of(body["input"]) if isinstance(text, str)]
        if not texts:
            raise _rejected(
                "`input` as token ids is not supported: they belong to another model's tokenizer; send texts "
                "(LangChain: check_embedding_ctx_length=False)",
                code="unsupported_feature",
            )
        is_base64 = body.get("encoding_format") == "base64"
        data: list[msgspec.Raw] = []
        tokens = 0
        try:
            async for batch in self._client.embed(texts):
                if body.get("dimensions") not in (None, batch.dims):
                    words = f"`{self._model}` has {batch.dims} dimensions and can't be asked for {body['dimensions']}"
                    raise _rejected(words, "dimensions")
                tokens += sum(batch.tokens)
                # written a few at a time: all together would hold other requests up
                for vector in batch.vectors:
                    floats = struct.unpack(f"<{len(vector) // 4}f", vector)
                    written = base64.b64encode(vector).decode() if is_base64 else floats
                    one = {"object": "embedding", "index": len(data), "embedding": written}
                    data.append(msgspec.Raw(msgspec.json.encode(one)))
        except CacheWorkerUnavailable as error:
            raise BackendUnavailable("The embedding model is not there", detail=str(error)) from None
        except TextTooLong as error:
            raise _rejected(
                f"`input[{error.index}]` has {error.length:,} {error.unit}: `{self._model}` reads at most "
                f"{error.length_max:,} and cuts no text; send it in parts",
                code="context_length_exceeded",
            ) from None
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": self._model, "usage": usage}
        yield [chunk_of(msgspec.json.encode(answer))]


def _rejected(message: str, param: str = "input", code: str | None = None) -> BackendRejected:
    return BackendRejected(message, status=400, body=error_body(message, "invalid_request_error", param, code))
