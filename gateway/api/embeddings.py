"""`POST /v1/embeddings`, served by the cache worker's sentence-transformers model.

Shapes: OpenAI API reference, "Create embeddings". Interprets no vectors. Invariants: a text that
does not fit the model is refused, never cut; each text that was read is charged once.
"""

import base64
import struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cache import CacheWorkerUnavailable, SemanticClient
from cache.worker import TextTooLong
from gateway.accounts import Identity, LedgerRow, charges_of
from gateway.api.endpoint import Answered, JsonEndpoint
from gateway.deployments.catalog import microusd
from gateway.journey.needs import booked_labels, values_of
from gateway.journey.turn import Arrival, Labels
from gateway.pipeline import Pipeline, may_use
from gateway.settings import Settings
from gateway.wire.errors import BadRequest, NotFound, Unavailable, shown
from gateway.wire.requests import convert
from policies import Demand, Hold, Price, Tokens
from policies.counters import Need
from policies.windows import DEPLOYMENT

INPUTS_MAX = 2048
_DEPLOYMENT = "embedder"  # in the ledger
_BYTES_PER_TOKEN = 4  # English prose, for what the limits expect
_MARKS = 2  # tokens around a text


class EmbeddingsRequest(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    safety_identifier: str | None = None


class Embeddings(JsonEndpoint[EmbeddingsRequest]):
    """The endpoint. One instance per worker."""

    operation = "embeddings"

    def __init__(self, settings: Settings, pipeline: Pipeline, semantic: SemanticClient) -> None:
        super().__init__(settings, pipeline)
        self._semantic = semantic
        self._price = Price(microusd(settings.embedding_usd_per_mtok), 0)

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

    async def answer(
        self, request: EmbeddingsRequest, identity: Identity, arrival: Arrival, labels: Labels
    ) -> Answered:
        """Takes tokens and money for the most that the texts can have, and keeps what they had."""
        may_use(identity, request.model)
        texts = _texts(request.input)
        limits, money, price = self._pipeline.limits, self._pipeline.money, self._price
        bound = sum(len(text.encode()) for text in texts)
        demand = Demand(-(-bound // _BYTES_PER_TOKEN), 0, 0, prompt_tokens_max=bound)
        limited = await limits.take_tokens(demand, identity)
        used = [0]
        hold = None
        try:
            tokens = bound + _MARKS * len(texts)
            values = {} if identity.is_plain else _values(request, identity, labels)
            need = Need(price.cost_max(tokens, 0), tokens, values=values)
            hold = await money.reserve(identity, arrival.request_id, need)
            reply = await self._embed(request, texts, used)
            return Answered(reply, used[0], price.cost(Tokens(used[0], 0)), limited)
        finally:
            correcting = limits.correct(demand, identity, used[0])
            if correcting is not None:
                await correcting
            if hold is not None and used[0]:
                await money.settle(hold, self._row(hold, identity, request, labels, used[0]))
            elif hold is not None:
                await money.release(hold)

    async def _embed(self, request: EmbeddingsRequest, texts: list[str], used: list[int]) -> dict[str, Any]:
        """The reply. Adds the tokens to `used` as the texts are read. Raises ApiError."""
        alias = request.model
        write = _base64 if request.encoding_format == "base64" else _floats
        data: list[msgspec.Raw] = []
        try:
            async for few in self._semantic.embed(texts):
                if request.dimensions not in (None, few.dims):
                    raise BadRequest(
                        f"`{alias}` has {few.dims} dimensions and can't be asked for {request.dimensions}",
                        param="dimensions",
                    )
                used[0] += sum(few.tokens)
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
        usage = {"prompt_tokens": used[0], "total_tokens": used[0]}
        return {"object": "list", "data": data, "model": alias, "usage": usage}

    def _row(
        self, hold: Hold, identity: Identity, request: EmbeddingsRequest, labels: Labels, tokens: int
    ) -> LedgerRow:
        user, tags = booked_labels(_named(request), labels)
        row = LedgerRow(
            id=hold.id,
            at_ms=hold.at_ms,
            request_id=hold.id,
            team_id=identity.team.id,
            key_id=identity.key.id,
            alias=request.model,
            deployment=_DEPLOYMENT,
            prompt_tokens=tokens,
            cached_tokens=0,
            completion_tokens=0,
            cost_microusd=self._price.cost(Tokens(tokens, 0)),
            kind=self.operation,
            baseline_microusd=self._price.cost(Tokens(tokens, 0)),
            user=user,
            tags=tags,
        )
        return msgspec.structs.replace(row, charges=charges_of(row, hold.more)) if hold.more else row


def _values(request: EmbeddingsRequest, identity: Identity, labels: Labels) -> dict[str, str]:
    return {**values_of(identity, request.model, _named(request), labels), DEPLOYMENT: _DEPLOYMENT}


def _named(request: EmbeddingsRequest) -> dict[str, Any]:
    return {"user": request.user, "safety_identifier": request.safety_identifier}


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
