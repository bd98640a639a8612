"""One small request to any URL: the whole answer, within a time and a size.

Redirects are not followed. Invariants: an answer has at most `ANSWER_BYTES_MAX`; an exchange that is
not over in time is closed.
"""

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from gateway.transport.http_client import Exchange, NotHTTP
from gateway.transport.http_pool import Origin, Pool, proxy_authorization, proxy_of

ANSWER_BYTES_MAX = 256 << 10
_ENCODED = "whsec_"


class Fetcher:
    """Keeps connections to the origins that it fetched from, `idle_max` idle ones each. A fetch takes at most
    `timeout_s`; an answer has at most `bytes_max`.
    """

    def __init__(self, timeout_s: float = 10.0, idle_max: int = 1, bytes_max: int = ANSWER_BYTES_MAX) -> None:
        self._timeout_s = timeout_s
        self._idle_max = idle_max
        self._bytes_max = bytes_max
        self._pools: dict[Origin, Pool] = {}

    def aclose(self) -> None:
        """Close the connections."""
        for pool in self._pools.values():
            pool.aclose()
        self._pools.clear()

    async def status(self, url: str, fields: Mapping[str, str], body: bytes) -> int:
        """The status of the answer to a POST of `body`; the rest is not read. Raises TransportError, TimeoutError."""
        async with asyncio.timeout(self._timeout_s):
            exchange = await self._send(url, fields, body)
            exchange.release()
            return exchange.status

    async def fetch(self, url: str, fields: Mapping[str, str], body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to a GET, or to a POST of `body`. Raises TransportError, TimeoutError."""
        async with asyncio.timeout(self._timeout_s):
            exchange, answer = await self._send(url, fields, body), b""
            try:
                while data := await exchange.read():
                    answer += data
                    if len(answer) > self._bytes_max:
                        raise NotHTTP(f"the answer has more than {self._bytes_max} bytes")
            finally:
                exchange.close()
            return exchange.status, answer

    async def _send(self, url: str, fields: Mapping[str, str], body: bytes | None) -> Exchange:
        """The request, answered so far as its head."""
        parts = urlsplit(url)
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        origin = Origin(host, parts.port or (443 if is_tls else 80), is_tls, proxy_of(parts.scheme, host))
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        exchange = Exchange(_head(origin, target, fields, body), body or b"")
        if origin not in self._pools:  # in a thread: it reads the machine's certificates
            self._pools[origin] = await asyncio.to_thread(Pool, origin, self._timeout_s, self._idle_max)
        try:
            await self._pools[origin].send(exchange)
        except BaseException:
            exchange.close()
            raise
        return exchange


def signed(secret: str, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The fields that sign `body` for the moment `at_s`, unix seconds, by Standard Webhooks 1.0.0
    (https://github.com/standard-webhooks/standard-webhooks).

    The key is decoded from base64 after `whsec_`, else it is the text's bytes.
    """
    is_encoded = secret.startswith(_ENCODED)
    key = base64.b64decode(secret.removeprefix(_ENCODED), validate=True) if is_encoded else secret.encode()
    digest = hmac.new(key, f"{message_id}.{at_s}.".encode() + body, hashlib.sha256).digest()
    signature = f"v1,{base64.b64encode(digest).decode()}"
    return {"webhook-id": message_id, "webhook-timestamp": str(at_s), "webhook-signature": signature}


def _head(origin: Origin, target: str, fields: Mapping[str, str], body: bytes | None) -> bytes:
    proxy = origin.proxy
    lines = [
        f"{'GET' if body is None else 'POST'} {f'http://{origin.authority}' if origin.is_forwarded else ''}{target} HTTP/1.1",
        f"Host: {origin.authority}",
        "Accept-Encoding: identity",
        "User-Agent: sameway",
        *(f"{name}: {value}" for name, value in fields.items()),
        *([f"Content-Length: {len(body)}"] if body is not None else []),
        "",
    ]
    head = "\r\n".join(lines).encode()
    return head + (proxy_authorization(proxy) if proxy is not None and origin.is_forwarded else b"") + b"\r\n"
