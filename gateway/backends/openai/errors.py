"""Failures of one OpenAI-compatible server, as BackendErrors.

Knows no stream and no pool. Invariant: no message or detail contains the deployment's key.
"""

import time
from collections.abc import Callable, Mapping

import msgspec

from gateway.backends.base import (
    BackendBroken,
    BackendDenied,
    BackendError,
    BackendNotAsked,
    BackendRejected,
    BackendUnavailable,
)
from gateway.backends.refusals import UpstreamRefusal, in_band, limits_of, refusal, retry_after_s, scrubbed
from gateway.transport.http_client import Disconnected, Exchange, NotAsked, NotHTTP, TransportError, Unreachable

_ABSENT = (404, 405, 409, 410)


class Translator:
    """Translates failures of a request whose key is `api_key`. `wall_clock` gives unix seconds.

    `statuses` are those that the server's own codes stand for.
    """

    def __init__(
        self, api_key: str, wall_clock: Callable[[], float] = time.time, statuses: Mapping[str, int] | None = None
    ) -> None:
        self._statuses = statuses or {}
        self.api_key = api_key
        self._wall_clock = wall_clock

    def refused(self, exchange: Exchange, body: bytes, *, is_passage: bool = False) -> BackendError:
        """The error for a response with another status than 200.

        `is_passage`: a missing or moved path or object is the request's fault, and a refusal
        concerns that request alone.
        """
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()}
        after_s = retry_after_s(headers, self._wall_clock())
        if is_passage and exchange.status // 100 == 3:
            words = f"The provider redirected the request (HTTP {exchange.status}), and redirects are not followed"
            return BackendRejected(words, status=502)
        is_absent = is_passage and exchange.status in _ABSENT
        status, limits = 400 if is_absent else exchange.status, limits_of(headers)
        error = refusal(UpstreamRefusal(status, body, after_s, self.api_key, limits=limits, statuses=self._statuses))
        if is_absent:
            error.status = exchange.status
        if is_passage and isinstance(error, BackendDenied):
            error.mark = None
        return error

    def in_band(self, data: bytes) -> BackendError | None:
        """The error that `data` inside a 200 tells of; None if it tells of none."""
        return in_band(data, self.api_key, self._statuses)

    def failed(self, data: bytes) -> BackendError:
        """The error for `data` inside a 200 that is an error, with or without words."""
        return self.in_band(data) or BackendUnavailable("The deployment failed in its answer", is_final=True)

    def unsent(self, error: TransportError) -> BackendError:
        """The error for a request that got no response head."""
        match error:
            case NotAsked():
                return BackendNotAsked(self._text(error))
            case Unreachable():
                message = "The deployment cannot be reached"
            case Disconnected():
                message = "The deployment closed the connection"
            case _:
                message = "The deployment does not speak HTTP"
        return BackendUnavailable(message, detail=self._text(error))

    def cut(self, error: TransportError) -> BackendError:
        """The error for a response whose body broke off."""
        is_final = isinstance(error, NotHTTP)  # such as a coding that was not asked for
        return BackendBroken("The deployment's answer broke off", detail=self._text(error), is_final=is_final)

    def not_json(self, subject: str, payload: bytes, error: Exception) -> BackendError:
        """The error for an "answer" or "stream" (`subject`) that cannot be decoded: its cause, if its
        words tell that.
        """
        cause = self.in_band(payload)
        if cause is not None and (payload.lstrip()[:1] != b"{" or not isinstance(cause, BackendUnavailable)):
            return cause
        excerpt = scrubbed(payload[:200].decode("utf-8", "replace"), self.api_key)
        how = "is no answer" if isinstance(error, msgspec.ValidationError) else "is not JSON"
        return BackendBroken(f"The deployment's {subject} {how}", detail=f"{error}: {excerpt}", is_final=True)

    def _text(self, error: BaseException) -> str:
        return scrubbed(f"{type(error).__name__}: {error}", self.api_key)
