"""`POST /tokenize` and `POST /detokenize`: the tokens of a local engine's model.

Shapes: vLLM's server, "Tokenizer API". Invariant: the tokens of a conversation are those that a
generation reads; a field that would change them otherwise is refused by its name.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.api.endpoint import Call, ObjectEndpoint
from gateway.backends.local.backend import LocalBackend
from gateway.deployments.alias import Alias
from gateway.pipeline import Pipeline
from gateway.wire.errors import BadRequest, NotFound
from gateway.wire.requests import BYTES_PER_TOKEN_MAX, SHAPES, ChatRequest, convert
from gateway.wire.types import CHAT, Kind

_UNSUPPORTED = ("chat_template", "chat_template_kwargs", "continue_final_message", "mm_processor_kwargs", "tools")


class _TokenizeRequest(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1)]
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # vLLM: true for a prompt, false for messages
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    """The body; `model` may be left out if only one model has a local engine."""

    model: Annotated[str, Meta(min_length=1)]
    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]


class _OfEngine(ObjectEndpoint):
    """The base of endpoints that use the local engines of aliases."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._with_engine = [alias.name for alias in pipeline.fleet.aliases.values() if alias.has_engine]

    async def named(self, call: Call) -> dict[str, Any]:
        """The body; if it names no model, `model` becomes the only alias with an engine. Raises
        ApiError.
        """
        _, body = await self.body(call)
        if body.get("model") is None and len(self._with_engine) == 1:
            body["model"] = self._with_engine[0]
        if not self._with_engine:
            raise NotFound("No model here has a local engine, whose tokens are known", param="model")
        return body

    def engine(self, call: Call, name: str, size: int, param: str) -> tuple[LocalBackend, int]:
        """The first local engine of an alias, and its context's length in tokens.

        `size` is the content's size in bytes or tokens, in the field `param`. Raises ApiError.
        """
        embedder = self._pipeline.settings.embedding_alias
        backend = _engine_of(self.alias(call, name)) if name != embedder else None
        if backend is None:
            raise BadRequest(
                f"The model `{name}` has no local engine: the tokenizers of other servers are not known here",
                param="model",
                code="unsupported_feature",
            )
        context_tokens = backend.load(0).context_tokens_max or 0
        if context_tokens and size > BYTES_PER_TOKEN_MAX * context_tokens:
            raise BadRequest(
                f"`{param}` is longer than {BYTES_PER_TOKEN_MAX:.0f} times this model's context of {context_tokens} tokens",
                param=param,
                code="context_length_exceeded",
            )
        return backend, context_tokens


def _engine_of(alias: Alias) -> LocalBackend | None:
    """The first local engine of an alias."""
    return next((d.backend for d in alias.deployments.values() if isinstance(d.backend, LocalBackend)), None)


async def counted(alias: Alias, body: dict[str, Any], kind: Kind = CHAT) -> int:
    """The number of a prompt's tokens.

    The alias's local engine counts a chat without tools, unless its bytes are far beyond the
    engine's context. Otherwise the number is the estimate of routing and budgets. Raises ApiError, BackendError.
    """
    raw, backend = msgspec.json.encode(body), _engine_of(alias)
    estimated = convert(body, SHAPES[kind.name]).demand(raw, body).prompt_tokens
    if backend is None or kind is not CHAT or body.get("tools"):
        return int(estimated)
    if len(raw) > BYTES_PER_TOKEN_MAX * (backend.load(0).context_tokens_max or 0):
        return int(estimated)
    asked = {"messages": body["messages"]}
    ids, _ = await backend.tokenize(asked, has_special=False, opens_answer=True, wants_texts=False)
    return len(ids)


class TokenizeEndpoint(_OfEngine):
    """The endpoint for `/tokenize`. One instance per worker."""

    operation = "tokenize"

    async def answer(self, call: Call) -> Any:
        body = await self.named(call)
        for name in _UNSUPPORTED:
            if body.get(name):
                raise BadRequest(f"`{name}` is not supported here", param=name, code="unsupported_parameter")
        request: _TokenizeRequest = convert(body, _TokenizeRequest)
        if (request.prompt is None) == (request.messages is None):
            raise BadRequest("Give either `prompt` or `messages`", param="prompt", code="missing_required_parameter")
        if request.messages is not None:
            chat: ChatRequest = convert(body, ChatRequest)
            chat.check_contents(body)
        param = "prompt" if request.messages is None else "messages"
        backend, context_tokens = self.engine(call, request.model, len(msgspec.json.encode(body[param])), param)
        has_special = request.add_special_tokens
        ids, texts = await backend.tokenize(
            {param: body[param]},
            has_special=request.messages is None if has_special is None else has_special,
            opens_answer=request.add_generation_prompt,
            wants_texts=bool(request.return_token_strs),
        )
        return {"count": len(ids), "max_model_len": context_tokens, "tokens": ids, "token_strs": texts}


class DetokenizeEndpoint(_OfEngine):
    """The endpoint for `/detokenize`. One instance per worker."""

    operation = "detokenize"

    async def answer(self, call: Call) -> Any:
        request: DetokenizeRequest = convert(await self.named(call), DetokenizeRequest)
        backend, _ = self.engine(call, request.model, len(request.tokens), "tokens")
        return {"prompt": await backend.detokenize(request.tokens)}
