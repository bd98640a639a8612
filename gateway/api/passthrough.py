"""`/passthrough/{deployment}/...`: a provider's own paths, with the limits and records of any
request.

Only paths that a deployment's `passthrough` lists are sent. Of a provider's shapes it knows `id`,
`usage`, `model`, `store` and `data` alone. Invariants: a path is sent as it was checked, without a
character that could be decoded; a `*` of a path, and an id in a body or a query, is an id that the
provider gave to this team; a body is decoded, checked and encoded again, or is bytes of a media
type; a request costs the tokens that its answer reports, or the configured price of a request; of a
client's headers only those in `_SENT` are sent, and of a provider's only the content type comes
back.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from cache import Controls, Entry
from gateway.accounts.provider_ids import ProviderIds
from gateway.api import asgi
from gateway.api.chat import AnswerEndpoint, DisconnectWatcher, PlainRenderer, Renderer, read_form
from gateway.api.endpoint import Call
from gateway.api.provider_ids import BLANK, IDS_MAX, fields_of, ids_in
from gateway.backends.base import Passage
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.journey.bodies import Body
from gateway.journey.flight import Reply
from gateway.journey.turn import Ended, Turn, labels_of
from gateway.pipeline import Pipeline
from gateway.reserved import calls_of, reserved_names
from gateway.settings import ModelSettings, Settings, reports_tokens
from gateway.wire.chunks import UNREADABLE
from gateway.wire.errors import UNSUPPORTED_MEDIA, BadRequest, Forbidden, NotFound, UnsupportedMediaType, shown
from gateway.wire.forms import FormFiles, boundary_of
from gateway.wire.requests import decode_object
from gateway.wire.sse import Splitter
from gateway.wire.types import PASSAGE, Chunk
from policies import Demand, RoutingPolicy

PREFIX = "/passthrough/"
_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~:@=+-]{1,200}){1,20}")
_QUERY = re.compile(r"(?:[A-Za-z0-9._~:@=+,&\[\]-]|%(?!25)[2-7][0-9A-Fa-f])*")
_SECRETS = frozenset({"key", "apikey", "accesstoken", "token", "auth", "authorization", "subscriptionkey", "sig"})
_TEXT = re.compile("[ -~]*")
_BYTES = re.compile(
    r"(?:(?:audio|image|video)/[\w.+-]{1,60}|application/(?:octet-stream|pdf))(?:; ?[\w-]{1,60}=[\w.-]{1,60}){0,5}"
)
_SENT = ("accept", "openai-beta", "anthropic-version", "anthropic-beta")
_UNREPORTED = "An answer in the background reports no tokens to charge"
_CHOICES_MAX = 10_000
_TOKENS_MAX = 1 << 20  # of a prompt, or an answer, without a bound


class Passthrough(AnswerEndpoint):
    """The endpoint of one deployment. One instance per worker."""

    operation = PASSAGE.name

    def __init__(self, pipeline: Pipeline, settings: Settings, deployment: Deployment, ids: ProviderIds) -> None:
        super().__init__(pipeline, settings.body_bytes_max, PASSAGE)
        self._settings = settings
        self._deployment = deployment
        self._ids = ids
        self._rules = sorted(deployment.settings.passthrough, key=lambda rule: rule.count("*"))
        self.route = f"{PREFIX}{deployment.name}/*"
        self.methods = {rule.partition(" ")[0] for rule in self._rules}

    @property
    def alias(self) -> Alias:
        name, settings = self._deployment.name, self._deployment.settings
        model = ModelSettings.model_construct(deployments=[settings], is_semantic=False)
        return Alias(f"{PASSAGE.name}/{name}", model, RoutingPolicy(), {name: self._deployment})

    async def read(self, call: Call) -> tuple[Turn, Renderer]:
        scope, headers = call.scope, call.headers
        name, team_id = self._deployment.name, call.identity.team.id
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path, rule, ids = self._path_of(scope, method)
        is_counted = reports_tokens(rule)
        query, fields = _query_of(scope)
        media = headers.get("content-type", "")
        body: dict[str, Any] = {}
        upload = None
        if (boundary := boundary_of(media)) and method != "GET" and not is_counted:
            upload, body = await read_form(call.body, boundary, self._settings)
            fields += _by_names(body.items())
        elif method != "GET" and not is_counted and _BYTES.fullmatch(media):
            upload = await self._kept(call.body, media)
        elif method != "GET" and (raw := await call.body.whole(self._body_bytes_max)):
            if media.partition(";")[0].strip().lower() != "application/json":
                words = "Expected a body of application/json, or of multipart/form-data with files, or sounds, images, videos"
                raise UnsupportedMediaType(
                    f"{words} or other bytes; the latter two for a path that reports no tokens", code=UNSUPPORTED_MEDIA
                )
            body = decode_object(raw)
        with upload or nullcontext():
            named_ids = {*ids, *ids_in(body), *ids_in(fields)}
            if len(named_ids) > IDS_MAX:
                raise BadRequest(f"The request names more than {IDS_MAX} objects: send fewer", code="invalid_value")
            unknown = named_ids - await self._ids.of_team(name, team_id, named_ids)
            if unknown:
                raise NotFound(f"There is no {shown(min(unknown))} here", code="not_found")
            if upload is not None:
                await self._objects.check_files(upload, team_id, self._body_bytes_max)
            self._check(body, fields, is_counted=is_counted)
            self._complete(body, path, is_counted=is_counted)
            sent_headers = [(one, headers[one]) for one in _SENT if one in headers and _TEXT.fullmatch(headers[one])]
            turn = Turn(
                arrival=call.arrival,
                alias=f"{PASSAGE.name}/{name}",
                body=body,
                controls=Controls(no_cache=True, no_store=True),
                demand=self._demand(body) if is_counted else Demand(0, 0, 0, reserved=reserved_names(body)),
                is_stream=(method == "POST" and body.get("stream") is True)
                or (bool(ids) and path.endswith("/content")),
                wants_usage=False,
                kind=PASSAGE,
                started=time.perf_counter(),
                labels=labels_of(headers, body.get("metadata")),
                upload=upload,
                passage=Passage(method, path, query, tuple(sent_headers), is_counted),
            )
            owned_ids = await self._ids.of_team(name, team_id) if method == "GET" and not ids else None
            return turn, _PassedRenderer(self._ids, name, team_id, owned_ids, may_share=is_counted)

    async def _kept(self, incoming: Body, media: str) -> FormFiles:
        """Write a body's bytes to the disk. The caller closes the returned files. Raises ApiError."""
        first_byte = b""
        with FormFiles(self._settings.data_dir, media) as upload:
            async for data in incoming.pieces(self._settings.upload_bytes_max):
                first_byte = first_byte or data.lstrip(BLANK)[:1]
                if first_byte in (b"{", b"["):  # a provider that ignores the type would find ids in it
                    raise UnsupportedMediaType(
                        f"The body begins as JSON does, and is said to be {media}", code=UNSUPPORTED_MEDIA
                    )
                await upload.parcel.write(data)
            return upload

    async def _stream(self, renderer: Renderer, reply: Reply, watcher: DisconnectWatcher, send: asgi.Send) -> Ended:
        try:
            return await super()._stream(renderer, reply, watcher, send)
        finally:  # also where the client leaves: its objects exist
            with suppress(Forbidden):
                await renderer.keep()

    def _path_of(self, scope: asgi.Scope, method: str) -> tuple[str, str, list[str]]:
        """The path to send, its rule, and the ids in it. Raises BadRequest, NotFound."""
        own, raw = f"{PREFIX}{self._deployment.name}", scope.get("raw_path", b"").decode("latin-1")
        path = raw.removeprefix(own)
        if path == raw or not _PATH.fullmatch(path):
            words = "a path of letters, digits and any of - . _ ~ : @ = +, with single slashes and nothing encoded"
            raise BadRequest(f"The path can't be passed on: expected {words}", code="invalid_path")
        parts = f"{method} {path}".split("/")
        for rule in self._rules:
            listed = rule.split("/")
            if len(listed) == len(parts) and all(one in ("*", part) for one, part in zip(listed, parts, strict=True)):
                return path, rule, [part for one, part in zip(listed, parts, strict=True) if one == "*"]
        raise NotFound(f"{method} {shown(path)} is not passed on to {self._deployment.name}", code="path_not_allowed")

    def _check(self, body: Mapping[str, Any], query_fields: Sequence[Mapping[str, Any]], *, is_counted: bool) -> None:
        """Refuse a body whose cost would be unknown, or whose stored copies no team would own.

        `query_fields` are the fields of the query and of a form, by all names in each. Raises
        BadRequest.
        """
        name, model = self._deployment.name, self._deployment.model
        nested = [one for one in query_fields if "store" not in one or len(one) > 1]
        parts = fields_of([*nested, *(given for field, given in body.items() if field != "store")])
        stores = any(field == "store" and str(given).lower() in ("true", "1") for field, given in parts)
        is_unreported = is_counted and body.get("background")
        other, no_price = body.get("model", model) != model, is_counted and not self._deployment.is_price_known
        for is_wrong, message, param, code in (
            (other, f"`{name}` is priced for the model `{model}`: send that one", "model", "invalid_value"),
            (no_price, f"`{name}` has no known price: set `price` of the deployment", "model", "price_unknown"),
            (is_unreported, f"{_UNREPORTED}: leave `background` out", "background", "price_unknown"),
            (stores, "What a part of a request stores has no owner: leave its `store` out", "store", "invalid_value"),
        ):
            if is_wrong:
                raise BadRequest(message, param=param, code=code)

    def _complete(self, body: dict[str, Any], path: str, *, is_counted: bool) -> None:
        """Set the fields that make the cost and the owner of a request known."""
        if is_counted:
            body["model"] = self._deployment.model
            if body.get("stream") is True and path.endswith("/completions"):
                options = body.get("stream_options")
                body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        has_owner = any(rule.partition(" ")[2] == f"{path}/*" for rule in self._rules)
        if not has_owner and (body.get("store") or (is_counted and path.endswith("/responses"))):
            body["store"] = False

    def _demand(self, body: dict[str, Any]) -> Demand:
        """The worst case of a request with charged tokens, which may refer to content outside its
        body.
        """
        size, now = len(msgspec.json.encode(body)), self._deployment.candidate(Demand(0, 0, 0))
        context = now.context_tokens_max or _TOKENS_MAX
        prompts, many = body.get("prompt"), [body.get(name) for name in ("n", "best_of")]
        texts = sum(isinstance(one, str | list) for one in prompts) if isinstance(prompts, list) else 1
        choices = max(1, texts) * max([1, *(one for one in many if isinstance(one, int))])
        reserved = reserved_names(body)
        return Demand(
            prompt_tokens=size // 4,
            prompt_tokens_max=max(size, context),
            prompt_tokens_min=0,
            output_tokens_max=min(now.output_tokens_max or context, context),
            output_tokens_expected=0,
            choices=min(choices, _CHOICES_MAX),
            reserved=reserved,
            calls=calls_of(body, reserved),
            has_audio=True,
            has_long_writes=True,
            tier=str(body["service_tier"])[:100] if "service_tier" in reserved else "",
        )


def _query_of(scope: asgi.Scope) -> tuple[str, list[dict[str, Any]]]:
    """The query to send, and its fields, each by all names in its key. Raises BadRequest."""
    query = scope.get("query_string", b"").decode("latin-1")
    pairs = parse_qsl(query, keep_blank_values=True) if _QUERY.fullmatch(query) else None
    if pairs is None or not _SECRETS.isdisjoint(re.sub("[^a-z]", "", name.lower()) for name, _ in pairs):
        raise BadRequest("The query can't be passed on: it has odd characters, or a credential", code="invalid_query")
    return query, _by_names(pairs)


def _by_names(pairs: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The fields of a query or a form, by each part of their names; JSON texts also occur decoded."""
    fields = []
    for name, given in pairs:
        names = re.split(r"[^\w-]+", name)
        for value in (given if isinstance(given, list) else [given]) if names[0] != "metadata" else ():
            fields.append(dict.fromkeys(names, value))
            if isinstance(value, str):  # else it is a file
                with suppress(ValueError):  # no JSON
                    fields.append(dict.fromkeys(names, json.loads(value.lstrip("\ufeff"), object_pairs_hook=_each)))
    return fields


def _each(pairs: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """An object's pairs as separate objects, because the provider may read any field of a repeated
    name.
    """
    return [dict([pair]) for pair in pairs]


class _PassedRenderer(PlainRenderer):
    """Renders an answer and records its ids as the team's. Of a list the team gets only its own
    objects.

    `may_share`: another team's answers may have the same ids.
    """

    __slots__ = ("_deployment", "_ids", "_may_share", "_new_ids", "_owned", "_splitter", "_team_id")
    is_kept = True

    def __init__(
        self, ids: ProviderIds, deployment: str, team_id: int, owned: set[str] | None, *, may_share: bool
    ) -> None:
        super().__init__()
        self._ids, self._deployment, self._team_id, self._owned = ids, deployment, team_id, owned
        self._may_share = may_share
        self._new_ids = set[str]()
        self._splitter = Splitter()

    async def keep(self) -> None:
        ids, self._new_ids = self._new_ids, set()
        if not ids:
            return
        await self._ids.record(self._deployment, self._team_id, ids)
        asked_ids = ids if len(ids) <= IDS_MAX else None
        if not self._may_share and ids - await self._ids.of_team(self._deployment, self._team_id, asked_ids):
            raise _others()

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
            # a model writes the arguments of its calls
            self._new_ids.update(ids_in(msgspec.json.decode(data), ("metadata", "input", "arguments")))
        except UNREADABLE:  # no JSON has no ids
            return


def _filtered(body: bytes, owned_ids: set[str]) -> bytes:
    """A list without objects outside `owned_ids`. Raises Forbidden if another field may name
    another team's object.
    """
    try:
        answer = msgspec.json.decode(body or b"{}")
    except UNREADABLE:
        raise _others() from None
    if not isinstance(answer, dict):
        raise _others()
    objects = answer.pop("data", None)
    if isinstance(objects, list):
        data = [item for item in objects if isinstance(item, dict) and item.get("id") in owned_ids]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        answer |= {"first_id": first, "last_id": last}
        body = msgspec.json.encode({**answer, "data": data})
    elif objects is not None:
        answer["data"] = objects
    if not owned_ids.issuperset(ids_in(answer)) or any(isinstance(item, list) for item in answer.values()):
        raise _others()
    return body


def _others() -> Forbidden:
    return Forbidden("The answer may name what belongs to other teams", code="list_not_shown")
