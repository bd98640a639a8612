"""OpenAI-compatible servers over HTTP: OpenAI itself, vLLM, SGLang, Ollama, another Sameway. One pooled client for each.

Chunks are forwarded as they came: `Chunk.data` is the server's own JSON, looked at once for content, finish, usage and
errors. A request is sent on as the client wrote it, with the deployment's model; usage is always asked for. Knows no
teams, caches or routes. Invariant: what goes wrong before the response's headers is a BackendError from here, and never
carries the deployment's key.
"""

import asyncio
import contextvars
import time
import urllib.request
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from gateway.backends.base import BackendError, BackendRequest, BackendUnavailable, Load
from gateway.backends.openai_stream import OpenAIStream
from gateway.backends.refusals import Refused, in_band, refusal, retry_after_s, scrubbed

_DRAIN_TIMEOUT_S = 1.0
_KEEP_ALIVE_S = 60.0
_READ_BYTES = 256 << 10
_OWN_FIELDS = ("cache",)  # Sameway's extensions of a request

_is_reused: contextvars.ContextVar[bool] = contextvars.ContextVar("is_reused", default=False)


class _Connector(aiohttp.TCPConnector):
    """Tells, in the context of the request, whether its connection has served one before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        is_reused = protocol in self._known
        if not is_reused:
            self._known.add(protocol)
        _is_reused.set(is_reused)
        return connection


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
        self._url = URL(base_url.rstrip("/") + "/chat/completions")
        self._model = model
        self.api_key = api_key
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",  # nothing to gain on small chunks; one that compresses anyway is understood
            "User-Agent": "sameway",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            **(headers or {}),
        }
        self._connect_timeout_s = connect_timeout_s
        self.concurrency_max = concurrency_max
        self._unready = unready
        self._wall_clock = wall_clock
        self._session: aiohttp.ClientSession | None = None
        self._drains: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Make the pool; nothing is connected yet."""
        # This class bounds concurrency itself (`concurrency_max`): a full pool refuses at once instead of queueing.
        connector = _Connector(limit=0, ttl_dns_cache=30, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            read_bufsize=_READ_BYTES,
            proxy=_proxy_of(self._url),
        )

    async def aclose(self) -> None:
        """Close every connection; running streams break."""
        for task in self._drains:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def stream(self, request: BackendRequest) -> OpenAIStream:
        return OpenAIStream(self, request)

    def load(self, prompt_tokens: int) -> Load:
        return Load(is_ready=not self._unready, reason=self._unready, running=self.running)

    def payload(self, request: BackendRequest) -> bytes:
        """The body to send: the client's, with our model, without our extensions, usage asked for on streams."""
        body = {**request.body, "model": self._model}
        for name in (*_OWN_FIELDS, "stream", "stream_options"):
            body.pop(name, None)
        if request.is_stream:
            body["stream"] = True
            body["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
        return msgspec.json.encode(body)

    async def post(self, request: BackendRequest) -> aiohttp.ClientResponse:
        """Send it; the answer is a response whose body has not been read. Raises BackendUnavailable."""
        if self._session is None:
            raise BackendUnavailable("The deployment is not started")
        data, headers = self.payload(request), {"X-Request-Id": request.request_id}
        is_retried = False
        while True:
            _is_reused.set(False)
            try:
                return await self._session.post(self._url, data=data, headers=headers, allow_redirects=False)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise BackendUnavailable("The deployment cannot be reached", detail=self.told(error)) from None
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # An idle connection that the server closed just as we wrote into it: RFC 9112, section 9.3.1.
                if _is_reused.get() and not is_retried:
                    is_retried = True
                    continue
                raise BackendUnavailable("The deployment closed the connection", detail=self.told(error)) from None
            except aiohttp.ClientError as error:
                raise BackendUnavailable("The deployment does not speak HTTP", detail=self.told(error)) from None

    def refused(self, response: aiohttp.ClientResponse, body: bytes) -> BackendError:
        after_s = retry_after_s(response.headers, self._wall_clock())
        return refusal(Refused(response.status, body, after_s, self.api_key))

    def in_band(self, error: Any) -> BackendError:
        return in_band(error, self.api_key)

    def told(self, error: BaseException) -> str:
        """An exception in words for the log."""
        return scrubbed(f"{type(error).__name__}: {error}", self.api_key)

    def drain(self, response: aiohttp.ClientResponse) -> None:
        """Read the last bytes of a finished answer, so that its connection can serve another."""
        task = asyncio.get_running_loop().create_task(_drain(response))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)


async def _drain(response: aiohttp.ClientResponse) -> None:
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            while await response.content.readany():
                continue
    except (aiohttp.ClientError, OSError):  # the answer was complete; only its connection is lost
        response.close()


def _proxy_of(url: URL) -> str | None:
    """The proxy that the environment names for `url` (HTTPS_PROXY, NO_PROXY, ...); never one for this machine itself."""
    host = url.host or ""
    if host == "localhost" or host.startswith("127.") or host == "::1" or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(url.scheme)
