"""OpenAI-compatible servers over HTTP: OpenAI itself, vLLM, SGLang, Ollama, another Sameway.

Each deployment has a pool of connections. A request is forwarded as the client wrote it, with the
deployment's model and a request for usage. Chunks are forwarded as the server wrote them, and each
is parsed once, in part. Knows no teams, caches or routes. Invariant: every failure is a
BackendError without the deployment's key.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from gateway.backends.base import BackendRejected, BackendRequest, BackendUnavailable, Load
from gateway.backends.fitting import said
from gateway.backends.keys import Keys
from gateway.backends.openai.errors import Translator
from gateway.backends.openai.stream import EventReader, OpenAIStream
from gateway.transport.http_client import Exchange
from gateway.transport.http_pool import Origin, Pool, basic, proxy_authorization, proxy_of, split_socket
from gateway.wire.types import CHAT, KINDS

_SET_ANEW = frozenset({"cache", "stream", "stream_options"})  # `cache` is Sameway's own
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding", "upgrade", "expect", "te", "trailer"})
_HEADS_MAX = 256
_METRICS_BYTES_MAX = 4 << 20
_IN_PATHS = "/%:@!$&'()*+,;=~-._"  # characters that need no quoting in a path


class OpenAIBackend:
    """One deployment behind an OpenAI-compatible server.

    `headers` are sent with each request. At most `connections_max` connections are kept.
    `is_salted` adds vLLM's `cache_salt`. For `tail_timeout_s` see `OpenAIStream`.

    A backend for a server of other shapes overrides `paths`, which maps a kind's path to the
    server's; `reader`, which translates its answers; and the methods for its fields and bodies.
    """

    paths: Mapping[str, str] = {kind.path: kind.path for kind in KINDS}
    reader: Callable[[int], EventReader] | None = None

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        model: str,
        capabilities: frozenset[str],
        api_key: str = "",
        keys: Keys | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 3.0,
        connections_max: int = 1000,
        is_salted: bool = False,
        tail_timeout_s: float = 5.0,
        wall_clock: Callable[[], float] = time.time,
        statuses: Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self.running = 0
        self._model = model
        self._keys = Keys.fixed(api_key) if keys is None else keys
        self._connect_timeout_s = connect_timeout_s
        self._connections_max = connections_max
        self._is_salted = is_salted
        self._tail_timeout_s = tail_timeout_s
        self._wall_clock = wall_clock
        self._statuses = statuses
        self._media = "application/json"
        self._socket_path, base_url = split_socket(base_url)
        self._url, self._headers = urlsplit(base_url), dict(headers or {})
        self._heads: dict[tuple[str, str], bytes] = {}  # by a kind's own path and the key, once it was sent to
        self._unready = self._fields()[1]
        self._pool: Pool | None = None

    @functools.cached_property
    def _origin(self) -> Origin:
        url, host = self._url, self._url.hostname or ""
        return Origin(
            host if host.isascii() else host.encode("idna").decode(),
            url.port or (443 if url.scheme == "https" else 80),
            url.scheme == "https",
            proxy_of(url.scheme, host),
            self._socket_path,
        )

    def _fields(
        self, client_headers: Iterable[tuple[str, str]] = (), api_key: str = ""
    ) -> tuple[dict[str, tuple[str, str]], str]:
        """The header fields of every request by lower-case name, and why they cannot be sent, or
        empty.

        A deployment's header replaces the header of the same name in `client_headers`.
        """
        url, headers = self._url, self._headers
        fields = {
            "accept": ("Accept", "application/json, text/event-stream"),
            # compression gains nothing on small chunks; a server that compresses anyway is
            # understood
            "accept-encoding": ("Accept-Encoding", "identity"),
            "user-agent": ("User-Agent", "sameway"),
        }
        fields |= {name: (name, value) for name, value in client_headers}
        if url.username is not None:
            fields["authorization"] = ("Authorization", basic(url).decode())
        fields |= self._own_fields(api_key) if api_key else {}
        fields |= {name.lower(): (name, value) for name, value in headers.items()}
        self._media = fields.pop("content-type", ("", self._media))[1]  # a form has another one
        for name, (_, value) in fields.items():
            if name in _FRAMING:
                return {}, f"the header {name!r} is not to be set: it belongs to the connection"
            if not (name.isascii() and name.isprintable() and not set(name) & set(" :")) or set(
                value + self._media
            ) & set("\r\n\0"):
                return {}, f"the header {name!r} holds characters that no header can carry"
        return fields, ""

    def _head(
        self,
        path: str,
        method: str = "POST",
        query: str = "",
        headers: Iterable[tuple[str, str]] = (),
        root: str | None = None,
        api_key: str = "",
    ) -> bytes:
        """The request line and the headers that all requests to `path` share, below the base URL's path
        or `root`.
        """
        origin, url = self._origin, self._url
        root = url.path.rstrip("/") if root is None else root
        query = "&".join(filter(None, (url.query, query)))
        target = quote(root + path, safe=_IN_PATHS) + (f"?{query}" if query else "")
        if origin.is_forwarded:
            target = f"http://{origin.authority}{target}"
        fields = {"host": ("Host", origin.authority)} | self._fields(headers, api_key)[0]
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.values()), ""]
        head = "\r\n".join(lines).encode()
        return head + (proxy_authorization(origin.proxy) if origin.is_forwarded and origin.proxy is not None else b"")

    def _own_fields(self, api_key: str) -> dict[str, tuple[str, str]]:
        """The header fields that authenticate the gateway, by lower-case name: name and value."""
        return {"authorization": ("Authorization", f"Bearer {api_key}")}

    def _fields_of(self, request: BackendRequest) -> str:
        """The further header lines of one request."""
        return ""

    async def start(self) -> None:
        """Make the connection pool, without connecting."""
        # in a thread, because reading the machine's certificates takes tens of milliseconds
        self._pool = await asyncio.to_thread(Pool, self._origin, self._connect_timeout_s, self._connections_max)

    async def aclose(self) -> None:
        """Close every connection; running streams break."""
        if self._pool is not None:
            self._pool.aclose()
            self._pool = None

    async def metrics(self) -> str:
        """The text at the server's `/metrics`, beside its `/v1`; empty where it has none.

        Raises TransportError.
        """
        if self._pool is None:
            return ""
        head = self._head(
            "/metrics", "GET", root=self._url.path.rstrip("/").removesuffix("/v1"), api_key=self._keys.take()
        )
        exchange, text = Exchange(head + b"\r\n"), b""
        try:
            await self._pool.send(exchange)
            while len(text) < _METRICS_BYTES_MAX and (data := await exchange.read()):
                text += data
        finally:
            exchange.release()
        return text.decode("utf-8", "replace") if exchange.status == 200 else ""

    def stream(self, request: BackendRequest) -> OpenAIStream:
        translate = Translator("", self._wall_clock, self._statuses)  # with the key of each try
        return OpenAIStream(
            request,
            admit=functools.partial(self._admit, translate),
            send=self._sent,
            translate=translate,
            on_end=self._left,
            is_asked_again=functools.partial(self._keys.refused, translate),
            tail_timeout_s=self._tail_timeout_s,
            reader=self.reader(int(self._wall_clock())) if self.reader is not None else None,
        )

    def load(self, prompt_tokens: int) -> Load:
        reason = self._unready or self._keys.problem
        return Load(is_ready=not reason, reason=reason, detail=self._keys.names if reason else "", running=self.running)

    def payload(self, request: BackendRequest) -> bytes:
        """The body to send. Raises BackendRejected."""
        try:
            return msgspec.json.encode(request.body if request.passage is not None else self._body(request))
        except RecursionError:  # decoding skipped a field that is too deep for encoding
            raise BackendRejected("The body is nested too deeply") from None

    def _body(self, request: BackendRequest) -> dict[str, Any]:
        """The client's body without Sameway's extensions, with the deployment's model, and usage
        for streams.

        Raises BackendRejected.
        """
        body = {**request.body, "model": request.model or self._model}
        if request.kind.is_plain:
            body.pop("cache", None)
            return body
        if request.prefix:
            body |= request.prefilled
            body["model"] = request.model or self._model
            if request.kind is CHAT:  # for vLLM and SGLang
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        for name in _SET_ANEW.intersection(body):
            del body[name]
        if request.is_stream:
            body["stream"] = True
            body["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
        if self._is_salted:
            body["cache_salt"] = _salt(request.salt, body.get("cache_salt"))
        return said(body, request.dialect, request.kind)

    def _admit(self, translate: Translator, request: BackendRequest) -> Exchange:
        """Build the exchange of a request, and count it as running. Raises BackendError."""
        if reason := self._unready or self._keys.problem:
            raise BackendUnavailable(f"The deployment is not ready: {reason}")
        api_key = translate.api_key = self._keys.take()
        if self._pool is None:
            raise BackendUnavailable("The deployment is not started")
        passage = request.passage
        if passage is not None and request.upload is None and not request.body:
            media, pieces, body, size = self._media, None, b"", 0
        elif request.upload is None:
            media, pieces, body = self._media, None, self.payload(request)
            size = len(body)
        else:
            body, (media, size, pieces) = (
                b"",
                request.upload.written(self._body(request) if passage is None else request.body),
            )
        trace = ""
        if request.trace:
            given = set(map(str.lower, self._headers))
            trace = "".join(f"{name}: {value}\r\n" for name, value in request.trace if name not in given)
        header_lines = (
            f"{trace}X-Request-Id: {request.request_id}\r\n{self._fields_of(request)}Content-Type: {media}\r\n"
        )
        header_lines += f"Content-Length: {size}\r\n\r\n"
        if passage is not None:
            head = self._head(passage.path, passage.method, passage.query, passage.headers, api_key=api_key)
        elif (head := self._heads.get((request.kind.path, api_key), b"")) == b"":
            if len(self._heads) > _HEADS_MAX:  # of keys that have changed
                self._heads.clear()
            head = self._heads[request.kind.path, api_key] = self._head(self.paths[request.kind.path], api_key=api_key)
        self.running += 1
        return Exchange(head + header_lines.encode(), body, pieces=pieces)

    async def _sent(self, exchange: Exchange) -> None:
        assert self._pool is not None  # `_admit` has checked it
        await self._pool.send(exchange)

    def _left(self) -> None:
        self.running -= 1


def _salt(partition: bytes, client_salt: Any) -> str:
    """The `cache_salt` of a partition, which does not reveal the partition.

    A `client_salt`, which only some clients may send, divides the partition further and joins none.
    """
    given = b"" if client_salt is None else msgspec.json.encode(client_salt)
    return blake2b(partition + given, digest_size=16, person=b"sw.cache-salt").hexdigest()
