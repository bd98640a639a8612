"""A webhook: one signed POST, by the specification Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks, version 1.0.0).

Knows no budgets and no queue. Invariants: a message is sent to the configured URL alone, and
redirects are not followed; every delivery ends within `timeout_s`; no error names the URL's path or
query, which may hold a token.
"""

from gateway.transport.fetch import Fetcher, signed
from gateway.transport.http_client import TransportError
from policies.durations import duration_s

_TIMEOUT_S = 10.0


class DeliveryFailed(Exception):
    """The receiver did not take the message; `str()` is the reason. `is_final`: it is not retried."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Webhook:
    """Posts alerts to `url`, signed with `secret`. A delivery takes at most `timeout_s`."""

    def __init__(self, url: str, secret: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._url = url
        self._secret = secret
        self._timeout_s = timeout_s
        self._fetcher = Fetcher(timeout_s)

    async def deliver(self, message_id: str, at_s: float, body: bytes) -> None:
        """POST `body`, JSON, signed for the moment `at_s`, unix seconds.

        Any 2xx is a delivery. Raises DeliveryFailed.
        """
        fields = {"Content-Type": "application/json", **signed(self._secret, message_id, int(at_s), body)}
        try:
            status = await self._fetcher.status(self._url, fields, body)
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {duration_s(self._timeout_s)}") from None
        except TransportError as error:
            raise DeliveryFailed(f"{type(error).__name__}: {error}"[:200]) from None
        if not 200 <= status < 300:
            also = "; redirects are not followed" if 300 <= status < 400 else ""
            raise DeliveryFailed(f"HTTP {status}{also}")

    def aclose(self) -> None:
        """Close the connections."""
        self._fetcher.aclose()
