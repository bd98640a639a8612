"""A webhook: one signed POST, by the specification Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks, version 1.0.0).

Knows no budgets and no queue. Invariants: a message is sent to the configured URL alone, and
redirects are not followed; every delivery ends within `timeout_s`; no error names the URL's path or
query, which may hold a token.
"""

import asyncio
import base64
import hashlib
import hmac
from urllib.parse import urlsplit

from gateway.transport.http_client import Exchange, TransportError
from gateway.transport.http_pool import Origin, Pool, proxy_authorization, proxy_of
from policies.durations import duration_s

_TIMEOUT_S = 10.0
_ENCODED = "whsec_"


class DeliveryFailed(Exception):
    """The receiver did not take the message; `str()` is the reason. `is_final`: it is not retried."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Webhook:
    """Posts alerts to `url`, signed with `secret`. A delivery takes at most `timeout_s`."""

    def __init__(self, url: str, secret: str, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url)
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        self._origin = Origin(host, parts.port or (443 if is_tls else 80), is_tls, proxy_of(parts.scheme, host))
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._key = key_of(secret)
        self._timeout_s = timeout_s
        self._pool: Pool | None = None

    async def deliver(self, message_id: str, at_s: float, body: bytes) -> None:
        """POST `body`, JSON, signed for the moment `at_s`, unix seconds.

        Any 2xx is a delivery. Raises DeliveryFailed.
        """
        if self._pool is None:  # in a thread: it reads the machine's certificates
            self._pool = await asyncio.to_thread(Pool, self._origin, self._timeout_s, 1)
        exchange = Exchange(self._head(message_id, int(at_s), body), body)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.send(exchange)
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {duration_s(self._timeout_s)}") from None
        except TransportError as error:
            raise DeliveryFailed(f"{type(error).__name__}: {error}"[:200]) from None
        finally:
            if exchange.status:
                exchange.release()
            else:
                exchange.close()
        if not 200 <= exchange.status < 300:
            also = "; redirects are not followed" if 300 <= exchange.status < 400 else ""
            raise DeliveryFailed(f"HTTP {exchange.status}{also}")

    def aclose(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            self._pool.aclose()
            self._pool = None

    def _head(self, message_id: str, at_s: int, body: bytes) -> bytes:
        origin, proxy = self._origin, self._origin.proxy
        target = f"http://{origin.authority}{self._target}" if origin.is_forwarded else self._target
        lines = (
            f"POST {target} HTTP/1.1",
            f"Host: {origin.authority}",
            "Content-Type: application/json",
            "Accept-Encoding: identity",
            "User-Agent: sameway",
            f"webhook-id: {message_id}",
            f"webhook-timestamp: {at_s}",
            f"webhook-signature: {signature(self._key, message_id, at_s, body)}",
            f"Content-Length: {len(body)}",
            "",
        )
        head = "\r\n".join(lines).encode()
        return head + (proxy_authorization(proxy) if proxy is not None and origin.is_forwarded else b"") + b"\r\n"


def key_of(secret: str) -> bytes:
    """The key of a secret: decoded from base64 after `whsec_`, else the text's bytes."""
    is_encoded = secret.startswith(_ENCODED)
    return base64.b64decode(secret.removeprefix(_ENCODED), validate=True) if is_encoded else secret.encode()


def signature(key: bytes, message_id: str, at_s: int, body: bytes) -> str:
    """The value of `webhook-signature`."""
    signed = f"{message_id}.{at_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
