"""`POST /tokenize` and `POST /detokenize`: the tokens of a local engine's model.

Shapes: vLLM's server, "Tokenizer API". Invariant: the tokens of a conversation are those that a
generation reads; what cannot be so is refused by its name.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.accounts import Identity
from gateway.api.endpoint import JsonEndpoint
from gateway.backends.base import BackendError
from gateway.backends.local.backend import LocalBackend
from gateway.backends.refusals import from_backend
from gateway.deployments.alias import Alias
from gateway.journey.turn import Arrival
from gateway.pipeline import Pipeline, may_use
from gateway.settings import Settings
from gateway.wire.errors import BadRequest
from gateway.wire.requests import BYTES_PER_TOKEN_MAX, ChatRequest, convert

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


class _OfEngine:
    """The engines behind the aliases."""

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        self._settings = settings
        self._fleet = pipeline.fleet
        with_engine = [alias.name for alias in self._fleet.aliases.values() if alias.has_engine]
        self._default = with_engine[0] if len(with_engine) == 1 else None

    def named(self, body: dict[str, Any]) -> str:
        """The alias in `body`, where the only one with an engine is set if it names none; empty for
        an unknown one.
        """
        if body.get("model") is None and self._default is not None:
            body["model"] = self._default
        name = body.get("model")
        return name if isinstance(name, str) and name in self._fleet.aliases else ""

    def engine(self, name: str, identity: Identity, size: int, param: str) -> tuple[LocalBackend, int]:
        """The first local engine of an alias, and its context's length in tokens.

        `size` is that of the request's content in bytes or tokens, in the field `param`. Raises
        ApiError.
        """
        if name == self._settings.embedding_alias:
            raise _without_engine(name)
        alias = self._fleet.alias(name, identity.key.models)
        may_use(identity, name)
        backend = _engine_of(alias)
        if backend is None:
            raise _without_engine(name)
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


async def counted_by_engine(alias: Alias, messages: list[dict[str, Any]], size_bytes: int) -> int | None:
    """The tokens of a conversation, as the local engine of `alias` reads it; None where it has none, and
    for a conversation far beyond its context.

    Raises ApiError.
    """
    backend = _engine_of(alias)
    if backend is None or size_bytes > BYTES_PER_TOKEN_MAX * (backend.load(0).context_tokens_max or 0):
        return None
    try:
        ids, _ = await backend.tokenize({"messages": messages}, has_special=False, opens_answer=True, wants_texts=False)
    except BackendError as error:
        raise from_backend(error) from None
    return len(ids)


def _without_engine(name: str) -> BadRequest:
    return BadRequest(
        f"The model `{name}` has no local engine: the tokenizers of other servers are not known here",
        param="model",
        code="unsupported_feature",
    )


class Tokenize(JsonEndpoint[_TokenizeRequest]):
    """The endpoint. One instance per worker."""

    operation = "tokenize"

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        super().__init__(settings, pipeline)
        self._engines = _OfEngine(settings, pipeline)

    def read(self, body: dict[str, Any]) -> tuple[_TokenizeRequest, str]:
        alias = self._engines.named(body)
        for name in _UNSUPPORTED:
            if body.get(name):
                raise BadRequest(f"`{name}` is not supported here", param=name, code="unsupported_parameter")
        request: _TokenizeRequest = convert(body, _TokenizeRequest)
        if (request.prompt is None) == (request.messages is None):
            raise BadRequest("Give either `prompt` or `messages`", param="prompt", code="missing_required_parameter")
        if request.messages is not None:
            chat: ChatRequest = convert(body, ChatRequest)
            chat.check_contents(body)
        return request, alias

    async def answer(self, request: _TokenizeRequest, identity: Identity, arrival: Arrival) -> Any:
        given = request.prompt if request.prompt is not None else request.messages
        param = "prompt" if request.messages is None else "messages"
        backend, context_tokens = self._engines.engine(request.model, identity, len(msgspec.json.encode(given)), param)
        has_special = request.add_special_tokens
        try:
            ids, texts = await backend.tokenize(
                {param: given},
                has_special=request.messages is None if has_special is None else has_special,
                opens_answer=request.add_generation_prompt,
                wants_texts=bool(request.return_token_strs),
            )
        except BackendError as error:
            raise from_backend(error) from None
        return {"count": len(ids), "max_model_len": context_tokens, "tokens": ids, "token_strs": texts}


class Detokenize(JsonEndpoint[DetokenizeRequest]):
    """The endpoint. One instance per worker."""

    operation = "detokenize"

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        super().__init__(settings, pipeline)
        self._engines = _OfEngine(settings, pipeline)

    def read(self, body: dict[str, Any]) -> tuple[DetokenizeRequest, str]:
        alias = self._engines.named(body)
        request: DetokenizeRequest = convert(body, DetokenizeRequest)
        return request, alias

    async def answer(self, request: DetokenizeRequest, identity: Identity, arrival: Arrival) -> Any:
        backend, _ = self._engines.engine(request.model, identity, len(request.tokens), "tokens")
        try:
            return {"prompt": await backend.detokenize(request.tokens)}
        except BackendError as error:
            raise from_backend(error) from None
