"""`/passthrough/{deployment}/...`: paths of a provider's own, on the journey of every request.

Only what a deployment's `passthrough` lists is sent. Knows no provider's shapes but `id`, `usage`,
`model`, `store` and `data`. Invariants: a path is sent as it was checked, without a character that
could be decoded; a `*` of a path, and an id in a body or a query, is an id that the provider gave to
this team; a body is read, checked and written anew; of a client's headers only a few named ones are
sent, and of a provider's only the content type comes back.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from cache import Controls, Entry
from gateway.accounts import Identity
from gateway.accounts.provider_ids import ProviderIds
from gateway.api import asgi
from gateway.api.chat import Chat, Plain, Renderer, read_form
from gateway.backends.base import Passage
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.journey.turn import Arrival, Turn, labels_of
from gateway.pipeline import Pipeline
from gateway.reserved import reserved_names
from gateway.settings import ModelSettings, Settings
from gateway.wire.chunks import UNREADABLE
from gateway.wire.errors import BadRequest, Forbidden, NotFound, UnsupportedMediaType, shown
from gateway.wire.forms import boundary_of
from gateway.wire.requests import decode_object
from gateway.wire.sse import Splitter
from gateway.wire.types import PASSAGE, Chunk, Usage
from policies import Demand, RoutingPolicy

PREFIX = "/passthrough/"
_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~:@=+-]{1,200}){1,20}")
_QUERY = re.compile(r"(?:[A-Za-z0-9._~:@=+,&\[\]-]|%[2-7][0-9A-Fa-f])*")
_SECRETS = frozenset({"key", "apikey", "accesstoken", "token", "auth", "authorization", "subscriptionkey", "sig"})
_SENT = ("accept", "openai-beta", "anthropic-version", "anthropic-beta", "idempotency-key")
_ID_KEY = re.compile(
    r"(?:.*_)?(?:response|file|batch|thread|vector_store|assistant|conversation|container|run|step|message|upload|part"
    r"|item|job|video|skill|eval|checkpoint)_ids?|conversation|container|(?:training|validation)_file|id|after|before"
)
_IDS_MAX = 500
_OUTPUT_TOKENS_MAX = 65_536  # of an answer without a bound


def ids_in(value: Any) -> Iterator[str]:
    """The texts under names of ids, at any depth, but what `metadata` holds."""
    left = [value]
    while left:
        match left.pop():
            case dict() as fields:
                for name, given in fields.items():
                    if name == "metadata":
                        continue
                    if _ID_KEY.fullmatch(name.removesuffix("[]")):
                        yield from filter(_is_id, given if isinstance(given, list) else [given])
                    left.append(given)
            case list() as items:
                left += items


def _is_id(value: Any) -> bool:
    """A call of a tool has an id of its answer alone."""
    return isinstance(value, str) and len(value) > 0 and not value.startswith(("call_", "toolu_"))


class Passthrough(Chat):
    """The endpoint of one deployment. One instance per worker."""

    operation = PASSAGE.name

    def __init__(self, pipeline: Pipeline, settings: Settings, deployment: Deployment, ids: ProviderIds) -> None:
        super().__init__(pipeline, settings.body_bytes_max, PASSAGE)
        self._settings = settings
        self._deployment = deployment
        self._ids = ids
        listed = [(method, path.split("/")) for method, path in map(str.split, deployment.settings.passthrough)]
        self._listed = sorted(listed, key=lambda one: one[1].count("*"))
        self.route = f"{PREFIX}{deployment.name}/*"
        self.methods = {method for method, _ in listed}

    def own(self, turn: Turn) -> Alias:
        deployment, model = self._deployment, turn.body.get("model")
        if deployment.is_any_model and isinstance(model, str):
            deployment = deployment.for_model(model)
        elif model is not None and model != deployment.model:
            raise BadRequest(
                f"`{deployment.name}` is priced for the model `{deployment.model}`: send that one, or another path",
                param="model",
                code="invalid_value",
            )
        assert turn.passage is not None
        if turn.passage.method == "POST" and not deployment.is_price_known:
            raise BadRequest(
                f"`{deployment.name}` has no known price for this request: set `price` of the deployment",
                param="model",
                code="price_unknown",
            )
        settings = ModelSettings.model_construct(deployments=[deployment.settings], is_semantic=False)
        return Alias(turn.alias, settings, RoutingPolicy(), {deployment.name: deployment})

    async def take(
        self, scope: asgi.Scope, receive: asgi.Receive, headers: Mapping[str, str], arrival: Arrival, identity: Identity
    ) -> tuple[Turn, Renderer]:
        name, team_id = self._deployment.name, identity.team.id
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path, ids = self._path_of(scope, method)
        query, asked = _query_of(scope)
        media = headers.get("content-type", "")
        body: dict[str, Any] = {}
        upload = None
        if boundary := boundary_of(media):
            upload, body = await read_form(receive, headers, boundary, self._settings)
        elif raw := await asgi.read_body(receive, headers, self._body_bytes_max):
            if media.partition(";")[0].strip().lower() != "application/json":
                raise UnsupportedMediaType("Expected a body of application/json or multipart/form-data")
            body = decode_object(raw)
        try:
            mentioned = {*ids, *ids_in(body), *ids_in(asked)}
            if len(mentioned) > _IDS_MAX:
                raise BadRequest(f"The request names more than {_IDS_MAX} objects: send fewer", code="invalid_value")
            unknown = mentioned - await self._ids.of_team(name, team_id, mentioned)
            if unknown:
                raise NotFound(f"There is no {shown(min(unknown))} here", code="not_found")
            if method == "POST" and path.endswith(("/responses", "/completions")):
                has_owner = any(listed[:-1] == path.split("/") and listed[-1] == "*" for _, listed in self._listed)
                if not has_owner and (path.endswith("/responses") or "store" in body):
                    body["store"] = False
            is_counted = method == "POST" and upload is None
            has_price = not is_counted or self._deployment.price.request_microusd > 0
            turn = Turn(
                arrival=arrival,
                alias=f"{PASSAGE.name}/{name}",
                body=body,
                controls=Controls(no_cache=True, no_store=True),
                demand=self._demand(body) if is_counted else Demand(0, 0, 0, reserved=reserved_names(body)),
                is_stream=body.get("stream") is True or (bool(ids) and path.endswith("/content")),
                wants_usage=False,
                kind=PASSAGE,
                started=time.perf_counter(),
                labels=labels_of(headers, body.get("metadata")),
                upload=upload,
                passage=Passage(
                    method,
                    path,
                    query,
                    tuple((one, headers[one]) for one in _SENT if headers.get(one, "").isascii() and one in headers),
                    is_counted=is_counted,
                    uncounted=Usage(0, 0) if has_price else None,
                ),
            )
            owned = await self._ids.of_team(name, team_id) if method == "GET" and not ids else None
        except BaseException:
            if upload is not None:
                upload.parcel.close()
            raise
        return turn, _Passed(self._ids, name, team_id, owned)

    def _path_of(self, scope: asgi.Scope, method: str) -> tuple[str, list[str]]:
        """The path to send, and the ids in it. Raises BadRequest, NotFound."""
        own, raw = f"{PREFIX}{self._deployment.name}", scope.get("raw_path", b"").decode("latin-1")
        path = raw.removeprefix(own)
        if path == raw or not _PATH.fullmatch(path):
            words = "a path of letters, digits and any of - . _ ~ : @ = +, with single slashes and nothing encoded"
            raise BadRequest(f"The path can't be passed on: expected {words}", code="invalid_path")
        parts = path.split("/")
        for allowed, listed in self._listed:
            pairs = list(zip(listed, parts, strict=False))
            if allowed == method and len(listed) == len(parts) and all(one in ("*", part) for one, part in pairs):
                return path, [part for one, part in pairs if one == "*"]
        raise NotFound(f"{method} {shown(path)} is not passed on to {self._deployment.name}", code="path_not_allowed")

    def _demand(self, body: dict[str, Any]) -> Demand:
        """The worst case of a request whose tokens may be charged: it may refer to what it does not hold."""
        size = len(msgspec.json.encode(body))
        limits = [body.get(name) for name in ("max_output_tokens", "max_completion_tokens", "max_tokens")]
        output = max([one for one in limits if isinstance(one, int)], default=0)
        choices = body.get("n")
        return Demand(
            prompt_tokens=size // 4,
            prompt_tokens_max=max(size, self._deployment.context_tokens_max or 0),
            prompt_tokens_min=0,
            output_tokens_max=output if output > 0 else self._deployment.output_tokens_max or _OUTPUT_TOKENS_MAX,
            output_tokens_expected=0,
            choices=choices if isinstance(choices, int) and 0 < choices <= 128 else 1,
            reserved=reserved_names(body),
        )


def _query_of(scope: asgi.Scope) -> tuple[str, dict[str, str]]:
    """The query to send, and its fields. Raises BadRequest."""
    query = scope.get("query_string", b"").decode("latin-1")
    asked = dict(parse_qsl(query, keep_blank_values=True)) if _QUERY.fullmatch(query) else None
    if asked is None or not _SECRETS.isdisjoint(re.sub("[^a-z]", "", name.lower()) for name in asked):
        raise BadRequest("The query can't be passed on: it has odd characters, or a credential", code="invalid_query")
    return query, asked


class _Passed(Plain):
    """An answer whose ids belong to the team from then on; a list of which the team gets what is its own."""

    __slots__ = ("_deployment", "_found", "_ids", "_owned", "_splitter", "_team_id")
    is_kept = True

    def __init__(self, ids: ProviderIds, deployment: str, team_id: int, owned: set[str] | None) -> None:
        super().__init__()
        self._ids, self._deployment, self._team_id, self._owned = ids, deployment, team_id, owned
        self._found = set[str]()
        self._splitter = Splitter()

    async def keep(self) -> None:
        await self._ids.record(self._deployment, self._team_id, self._found)

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        body = super().whole(chunks, entry)
        if self._owned is None:
            self._note(body)
            return body
        return _filtered(body, self._owned)

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        body = super().events(chunks)
        if self.media.startswith("text/event-stream"):
            for payload in self._splitter.feed(body):
                self._note(payload)
        return body

    def _note(self, data: bytes) -> None:
        try:
            self._found.update(ids_in(msgspec.json.decode(data)))
        except UNREADABLE:  # no JSON has no ids
            return


def _filtered(body: bytes, owned: set[str]) -> bytes:
    """A list without what is not `owned`; another answer as it is. Raises Forbidden for a list in another shape."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return body
    if isinstance(found, dict) and isinstance(found.get("data"), list):
        data = [one for one in found["data"] if isinstance(one, dict) and one.get("id") in owned]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return msgspec.json.encode({**found, "data": data, "first_id": first, "last_id": last})
    if isinstance(found, list) or (isinstance(found, dict) and any(isinstance(one, list) for one in found.values())):
        raise Forbidden("The answer may list what belongs to other teams", code="list_not_shown")
    return body
