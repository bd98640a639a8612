"""The errors that a client can get instead of an answer.

    ApiError                   status, OpenAI's {message, type, param, code}, headers
    ├── ClientError            the base of the client's faults
    ├── BadRequest         400 the request is not valid, `param` names the field
    │   ├── BeyondChat     400 no chat completion can express the request
    │   ├── MissingField   400
    │   └── ThreadUnsupported 400 a conversation that the provider would keep
    ├── LoopRefused        400 the agent repeats itself
    ├── GuardRefused       400 the company's guard refused its texts, or those of the answer
    ├── Unauthenticated    401
    ├── Forbidden          403 the key may not use this model
    ├── NotFound           404 an unknown model or route
    ├── MethodNotAllowed   405 the path does not support the method
    ├── BodyTooSlow        408 the body did not come in time
    ├── TooLarge           413
    ├── UnsupportedMediaType 415 a body of another type, or in another compression than gzip
    ├── InUse              409 a batch needs the file, or has ended
    ├── ConversationLocked 409 another request writes the conversation
    ├── StorageFull        507 no room on the disk for a file
    ├── RateLimited        429 with retry-after: a retry can succeed
    ├── BudgetExceeded     429 insufficient_quota, x-should-retry: false
    │   └── SessionSpent   402 the same, of a session in total
    ├── NotCached          504 only-if-cached, and no cached answer
    ├── DeadlineExceeded   504 the client's deadline would pass first
    ├── Upstream           the failure of the last deployment tried
    │   └── UpstreamDenied 424 each deployment refused the gateway: a retry cannot help
    └── Unavailable        503 a required part of the gateway is missing
        └── DeploymentFull 503 every deployment runs as many requests as it may, and the queue is full

Shapes: OpenAI API reference, "Error codes". Invariant: `message` never carries an upstream's key, a
path or a stack trace.
"""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, ClassVar

import msgspec

from policies.durations import duration_s

_WORDS_MAX = 500
_NAMES_MAX, _NAME_CHARS_MAX = 100, 40
_MAIN_FIELDS = {"messages": "/v1/chat/completions", "input": "/v1/responses", "prompt": "/v1/completions"}
_NO_RETRY = {"x-should-retry": "false"}  # the official SDKs would send it again


class ApiError(Exception):
    """The base of the client's errors. `headers` has lower-case names, and the class's
    `own_headers`. `cause` is the status that a deployment's server answered with, if that is why.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    own_headers: ClassVar[Mapping[str, str]] = {}
    details: ClassVar[Mapping[str, Any]] = {}  # of an error in Anthropic's shape

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code
        self.headers = {**self.own_headers, **(headers or {})}
        self.http_status = self.status
        self.cause: int | None = None
        self.raw_body: bytes | None = None

    @property
    def own_words(self) -> str:
        """The message for records: bounded, in printable characters.

        Empty if a provider wrote it, for it may quote the prompt.
        """
        return shown(self.message, _WORDS_MAX) if self.raw_body is None else ""

    def body(self) -> bytes:
        """The JSON of OpenAI's error object."""
        return self.raw_body or msgspec.json.encode(error_object(self.message, self.type, self.param, self.error_code))


def error_object(message: str, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error object: `{"error": {message, type, param, code}}`."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def sentence(text: str) -> str:
    """`text` with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


def shown(text: str, characters_max: int = 100) -> str:
    """A client's text for messages and records: cut, with unprintable characters escaped."""
    cut = text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)[:characters_max]


class ClientError(ApiError):
    """The request is at fault."""

    status = 400
    type = "invalid_request_error"


class BadRequest(ClientError):
    """The request is not valid."""


class BeyondChat(BadRequest):
    """No chat completion can express the request; a deployment of the same API may take it
    unchanged.
    """

    code = "unsupported_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param)


class MissingField(BadRequest):
    """The required field `param` is missing. `given` are the names in its place: one may be misspelt, or another API's."""

    code = "missing_required_parameter"

    def __init__(self, param: str, given: Iterable[str] = ()) -> None:
        last = param.rpartition(".")[2]
        names = [name for name in islice(given, _NAMES_MAX) if len(name) <= _NAME_CHARS_MAX and name != last]
        near = get_close_matches(last, names, n=1, cutoff=0.7)
        near += [f"{name}, of {of}" for name, of in _MAIN_FIELDS.items() if name in names and last in _MAIN_FIELDS]
        hint = f"; instead there is {shown(near[0])}" if near else ""
        super().__init__(f"Missing required field: {param}{hint}", param=param)


class ThreadUnsupported(BadRequest):
    """The provider would keep the conversation, where no team owns it and no cache sees it.

    Anthropic's SDKs then send the whole conversation (anthropic-sdk-python, lib/threads).
    """

    code = "unsupported_parameter"
    details: ClassVar[Mapping[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

    def __init__(self) -> None:
        super().__init__("`thread` is not supported here: send the whole conversation as `messages`", param="thread")


class Unauthenticated(ClientError):
    status = 401
    code = "invalid_api_key"
    own_headers: ClassVar[Mapping[str, str]] = {"www-authenticate": "Bearer"}


class Forbidden(ClientError):
    status = 403
    code = "model_not_allowed"


class NotFound(ClientError):
    status = 404


class MethodNotAllowed(ClientError):
    status = 405
    code = "method_not_allowed"


class BodyTooSlow(ClientError):
    status = 408
    code = "request_timeout"

    def __init__(self, size_bytes: int, idle_s: float) -> None:
        super().__init__(
            f"The request's body came too slowly: {size_bytes} bytes of it; expected some of it every "
            f"{duration_s(idle_s)}. Send the request again"
        )


class TooLarge(ClientError):
    status = 413
    code = "request_too_large"


class InUse(ClientError):
    """The object is in use. A header keeps SDKs from retrying it, as they do for 409."""

    status = 409
    code = "conflict"
    own_headers = _NO_RETRY


class ConversationLocked(ClientError):
    status = 409
    code = "conversation_locked"

    def __init__(self, id: str) -> None:
        super().__init__(
            f"Another request writes the conversation '{id}': try again when it has ended", headers=retry_after(1.0)
        )


class StorageFull(ApiError):
    """The disk has no room for a file (RFC 4918, section 11.5)."""

    status = 507
    code = "storage_full"
    own_headers = _NO_RETRY


UNSUPPORTED_MEDIA = "unsupported_media_type"
"""The code of a body whose type, not its encoding, is not supported."""


class UnsupportedMediaType(ClientError):
    """The body's encoding or type is not supported.

    `accept-encoding` in the response lists the encodings of requests (RFC 9110, section 12.5.3).
    """

    status = 415
    code = "unsupported_content_encoding"
    own_headers: ClassVar[Mapping[str, str]] = {"accept-encoding": "gzip"}


class RateLimited(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, headers={**(headers or {}), **retry_after(retry_after_s)})


class BudgetExceeded(ApiError):
    """A budget has no room. `resets_in_s` None: a retry never succeeds."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    own_headers = _NO_RETRY

    def __init__(self, message: str, resets_in_s: float | None) -> None:
        super().__init__(message, headers=None if resets_in_s is None else retry_after(resets_in_s))
        self.resets_in_s = float("inf") if resets_in_s is None else resets_in_s


class SessionSpent(BudgetExceeded):
    """A session has no room in its total: agents that try again after any 429 stop at a 402."""

    status = 402


def last_to_reset(errors: Iterable[ApiError]) -> ApiError | None:
    """The refusal whose budget resets last, else the first refusal; None without refusals."""
    found = list(errors)
    budgets = [error for error in found if isinstance(error, BudgetExceeded)]
    return max(budgets, key=lambda error: error.resets_in_s) if budgets else next(iter(found), None)


class LoopRefused(ClientError):
    """The request is part of a loop, which `loops.action` refuses."""


class GuardRefused(ClientError):
    """A guard refused the texts of a request or of its answer; the message is the guard's."""

    code = "guard_refused"


class NotCached(ClientError):
    """only-if-cached found no stored answer (RFC 9111, section 5.2.1.7)."""

    status = 504
    code = "not_cached"
    own_headers = _NO_RETRY

    def __init__(self) -> None:
        super().__init__("only-if-cached was asked and no cached answer matches")


class DeadlineExceeded(ApiError):
    status = 504
    code = "deadline_exceeded"
    own_headers = _NO_RETRY


class Upstream(ApiError):
    """A deployment's failure: 429, 502, 503, 504, or the deployment's own 4xx."""

    type = "upstream_error"
    status = 502
    code = "upstream_error"


class UpstreamDenied(Upstream):
    """Another server refused the gateway: 424 (RFC 4918, section 11.4).

    The provider's 401 or 403 would read as a refusal of the client's key; the SDKs retry 409 and
    5xx.
    """

    status = 424
    code = "upstream_denied"
    own_headers = _NO_RETRY


class Unavailable(ApiError):
    status = 503
    code = "unavailable"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message, code=code, headers=retry_after(1.0))


class DeploymentFull(Unavailable):
    """The gateway's own bound on a deployment's requests is reached. The deployment itself did not
    fail.
    """

    code = "deployment_full"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers["x-sameway-reason"] = "full"


def retry_after(seconds: float) -> dict[str, str]:
    """`retry-after` in whole seconds and `retry-after-ms`, which the official SDKs read first."""
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}
