"""OpenAI-compatible servers over HTTP: OpenAI itself, vLLM, SGLang, Ollama, another Sameway. One pooled client for each.

Chunks are forwarded as they came: `Chunk.data` is the server's own JSON, looked at once for content, finish, usage and
errors. A request is sent on as the client wrote it, with the deployment's model; usage is always asked for. Knows no
teams, caches or routes. Invariant: what goes wrong before the response's headers is a BackendError from here, and never
carries the deployment's key.
"""

import asyncio
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from gateway.backends.base import BackendError, BackendRejected, BackendRequest, Load
from gateway.backends.openai.stream import OpenAIStream
from gateway.backends.refusals import Refused, in_band, refusal, retry_after_s, scrubbed
from gateway.transport.http_client import Exchange
from gateway.transport.http_pool import Origin, Pool, basic, proxy_authorization
from gateway.wire.types import CHAT, COMPLETION

_OWN_FIELDS = ("cache",)  # Sameway's extensions of a request
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding", "upgrade", "expect", "te", "trailer"})
_IN_PATHS = "/%:@!$&'()*+,;=~-._"  # what a path may hold as it is


class OpenAIBackend:
    """One deployment behind an OpenAI-compatible server. `unready` says what keeps it from being used at all."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        model: str,
        capabilities: frozenset[str],
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 3.0,
        concurrency_max: int = 1000,
        unready: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self.running = 0
        self._model = model
        self.api_key = api_key
        self._connect_timeout_s = connect_timeout_s
        self.concurrency_max = concurrency_max
        self._wall_clock = wall_clock
        url = urlsplit(base_url)
        host = url.hostname or ""
        self._origin = Origin(
            host if host.isascii() else host.encode("idna").decode(),
            url.port or (443 if url.scheme == "https" else 80),
            url.scheme == "https",
            _proxy_of(url.scheme, host),
        )
        self._heads: dict[str, bytes] = {}
        for path in (CHAT.path, COMPLETION.path):
            self._heads[path], problem = self._written_head(url, path, headers or {})
        self._unready = unready or problem
        self.pool: Pool | None = None

    def _written_head(self, url: SplitResult, path: str, headers: Mapping[str, str]) -> tuple[bytes, str]:
        """What every request to `path` begins with, and what is wrong with it."""
        target = quote(url.path.rstrip("/") + path, safe=_IN_PATHS) + (f"?{url.query}" if url.query else "")
        if self._origin.is_forwarded:
            target = f"http://{self._origin.authority}{target}"
        fields = {
            "host": ("Host", self._origin.authority),
            "content-type": ("Content-Type", "application/json"),
            "accept": ("Accept", "application/json, text/event-stream"),
            # nothing to gain on small chunks; one that compresses anyway is understood
            "accept-encoding": ("Accept-Encoding", "identity"),
            "user-agent": ("User-Agent", "sameway"),
        }
        if url.username is not None:
            fields["authorization"] = ("Authorization", basic(url).decode())
        if self.api_key:
            fields["authorization"] = ("Authorization", f"Bearer {self.api_key}")
        fields |= {name.lower(): (name, value) for name, value in headers.items()}
        for name, (_, value) in fields.items():
            if name in _FRAMING:
                return b"", f"the header {name!r} is not to be set: it belongs to the connection"
            if not (name.isascii() and name.isprintable() and not set(name) & set(" :")) or set(value) & set("\r\n\0"):
                what = "the API key" if name == "authorization" and not headers.get(name) else f"the header {name!r}"
                return b"", f"{what} holds characters that no header can carry"
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.values()), ""]
        head = "\r\n".join(lines).encode()
        if self._origin.is_forwarded and self._origin.proxy is not None:
            head += proxy_authorization(self._origin.proxy)
        return head, ""

    async def start(self) -> None:
        """Make the pool; nothing is connected yet."""
        # This class bounds concurrency itself (`concurrency_max`): a full pool refuses at once instead of queueing.
        # In a thread, because reading the machine's certificates takes tens of milliseconds.
        self.pool = await asyncio.to_thread(Pool, self._origin, self._connect_timeout_s, self.concurrency_max)

    async def aclose(self) -> None:
        """Close every connection; running streams break."""
        if self.pool is not None:
            self.pool.aclose()
            self.pool = None

    def stream(self, request: BackendRequest) -> OpenAIStream:
        return OpenAIStream(self, request)

    def load(self, prompt_tokens: int) -> Load:
        return Load(is_ready=not self._unready, reason=self._unready, running=self.running)

    def payload(self, request: BackendRequest) -> bytes:
        """The body to send: the client's, with our model, without our extensions, usage asked for on streams. Raises
        BackendRejected."""
        body = {**request.body, "model": self._model}
        for name in (*_OWN_FIELDS, "stream", "stream_options"):
            body.pop(name, None)
        if request.is_stream:
            body["stream"] = True
            body["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
        try:
            return msgspec.json.encode(body)
        except RecursionError:  # reading it had the stack for as deep a field that nobody looked into
            raise BackendRejected("The body is nested too deeply") from None

    def exchange(self, request: BackendRequest) -> Exchange:
        """The request as it is sent, not sent yet."""
        body = self.payload(request)
        more = f"X-Request-Id: {request.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        return Exchange(self._heads[request.kind.path] + more.encode(), body)

    def refused(self, exchange: Exchange, body: bytes) -> BackendError:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()}
        after_s = retry_after_s(headers, self._wall_clock())
        return refusal(Refused(exchange.status, body, after_s, self.api_key))

    def in_band(self, error: Any) -> BackendError:
        return in_band(error, self.api_key)

    def told(self, error: BaseException) -> str:
        """An exception in words for the log."""
        return scrubbed(f"{type(error).__name__}: {error}", self.api_key)


def _proxy_of(scheme: str, host: str) -> SplitResult | None:
    """The proxy that the environment names for a server (HTTPS_PROXY, NO_PROXY, ...); never one for this machine itself."""
    if host == "localhost" or host.startswith("127.") or host == "::1" or urllib.request.proxy_bypass(host):
        return None
    proxy = urllib.request.getproxies().get(scheme)
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
