"""Translates a provider's refusal (status, headers, error object) into an error of base.py.

The rules are the same for HTTP, for errors inside a stream, and for litellm's exceptions. Shapes:
OpenAI API reference, "Error codes"; RFC 9110, sections 10.2.3 (Retry-After) and 15. Pure; the
current time is a parameter. Invariant: of a provider's text a client gets only the error object for
a faulty request and the message of a permanent refusal, of a limit or of an error inside a stream,
and never the provider's key.
"""

import email.utils
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.backends import base
from gateway.backends.base import Mark
from gateway.wire.errors import ApiError, Upstream, UpstreamDenied, error_object, retry_after

RETRY_AFTER_MAX_S = 3600.0
_DETAIL_CHARACTERS = 500
_REJECTED = frozenset({400, 413, 422})
_DENIED = frozenset({401, 402, 403, 404, 405, 409, 410, 451})
# Codes that decide before the status: providers send them with 400, 403, 404 and 429.
_MARKS = {
    "invalid_api_key": Mark.KEY,
    "authentication_error": Mark.KEY,
    "insufficient_quota": Mark.CREDIT,
    "billing_hard_limit_reached": Mark.CREDIT,
    "billing_error": Mark.CREDIT,
    "insufficient_balance": Mark.CREDIT,
    "insufficient_credits": Mark.CREDIT,
    "model_not_found": Mark.MODEL,
    "model_not_available": Mark.MODEL,
    "deploymentnotfound": Mark.MODEL,
}
_MARKS_BY_STATUS = {401: Mark.KEY, 402: Mark.CREDIT} | dict.fromkeys((404, 405, 410), Mark.ABSENT)
_PERMISSION = frozenset({"permission_error", "permission_denied"})
_MASKED = re.compile(r"(?<![\w.-])[\w.-]++\*{3,}[\w-]*|(?<![\w.*-])\*{4,}+[\w-]+")
_TOO_LONG = frozenset({"context_length_exceeded", "context_window_exceeded", "exceed_context_size_error"})
# the words of servers that send no code: vLLM, SGLang, Anthropic, Gemini, llama.cpp, TGI. They may be
# a client's, so they decide for its request alone: another deployment is asked
_TOO_LONG_WORDS = re.compile(
    r"maximum context length|context (?:length|window|size) (?:is |was )?(?:exceed|of only)|prompt is too long"
    r"|exceeds? (?:the )?(?:model'?s? )?(?:maximum |available )?context (?:length|window|size)"
    r"|exceeds the maximum number of tokens allowed",
    re.I,
)
# the beginnings of servers' messages with a size, where no client's word can be: OpenAI and vLLM,
# Anthropic, Gemini, SGLang
_CONTEXT = re.compile(
    r"(?:This model's maximum context length is|prompt is too long: \d+ tokens >"
    r"|The input token count \(\d+\) exceeds the maximum number of tokens allowed"
    r"|The input \(\d+ tokens\) is longer than the model's context length) \(?(\d[\d,]*)",
    re.I,
)
# FastAPI's and pydantic's, also as a text inside a text: {"loc": ["body", "max_completion_tokens"], ...}
_LOCATION = re.compile(rb"""\\?["']loc\\?["']: ?[\[(] ?\\?["']body\\?["'], ?\\?["'](\w+)""")
_STATUS_BY_WORD = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "rate_limit": 429,
    "overloaded_error": 529,
    "authentication_error": 401,
    "permission_error": 403,
    "permission_denied": 403,
    "not_found_error": 404,
    "invalid_request_error": 400,
    "invalid_request": 400,
    "badrequesterror": 400,
    "context_length_exceeded": 400,
    "server_error": 500,
    "api_error": 500,
    "internal_server_error": 500,
    "internalservererror": 500,
    "service_unavailable": 503,
    "timeout": 504,
}


class UpstreamRefusal(msgspec.Struct, frozen=True):
    """A refusal as received. `secret` is the provider's key, which all texts must lack.

    `is_in_band`: it came inside a 200, and its `status` is derived from its words. `limits` are the
    provider's headers about its rate limits.
    """

    status: int
    body: bytes = b""
    retry_after_s: float | None = None
    secret: str = ""
    is_in_band: bool = False
    limits: Mapping[str, str] = {}


def refusal(refused: UpstreamRefusal) -> base.BackendError:
    """The error for a refused request."""
    error = error_fields(refused.body)
    codes = [str(error[key]).lower() for key in ("code", "type") if error.get(key)]
    status = refused.status
    source = "in its answer" if refused.is_in_band else f"HTTP {status}"
    detail = scrubbed(f"{source}: {_excerpt(refused.body)}".removesuffix(": "), refused.secret)
    known = next((_MARKS[word] for word in codes if word in _MARKS), None)
    if known is not None or status in _DENIED or not _PERMISSION.isdisjoint(codes):
        mark = known or _mark(status, error)
        return base.BackendDenied(_denial(refused, error, mark), detail=detail, status=status, mark=mark)
    if status == 429 or (status in (503, 529) and (refused.retry_after_s is not None or status == 529)):
        message = f"The deployment is overloaded{_told(refused, error) if status == 429 else ''}"
        overloaded = base.BackendOverloaded(message, detail=detail, status=status, retry_after_s=refused.retry_after_s)
        overloaded.limits = refused.limits
        return overloaded
    if status in _REJECTED:
        body = _client_body(refused, error | {"param": error.get("param") or _location(refused.body)})
        message = str(msgspec.json.decode(body)["error"]["message"])
        if not _TOO_LONG.isdisjoint(codes) or _TOO_LONG_WORDS.search(message):
            context_tokens = _context_tokens(error, message)
            return base.BackendTooLong(message, detail=detail, status=status, body=body, context_tokens=context_tokens)
        return base.BackendRejected(message, detail=detail, status=status, body=body)
    how = "in its answer" if refused.is_in_band else f"with HTTP {status}"
    words_too = _told(refused, error) if refused.is_in_band else ""
    return base.BackendUnavailable(f"The deployment failed {how}{words_too}", detail=detail, status=status)


def _location(body: bytes) -> str | None:
    """The field of the request that a validation error is about, by pydantic's `loc`; None without
    one.
    """
    found = _LOCATION.search(body)
    return found[1].decode() if found else None


def _context_tokens(error: dict[str, Any], message: str) -> int | None:
    """The size of the context that a refusal states, in tokens; None if it states none."""
    named = error.get("n_ctx")  # llama.cpp
    if isinstance(named, int):
        return named
    found = _CONTEXT.match(message)
    return int(found[1].replace(",", "")[:12]) if found else None


def _mark(status: int, error: dict[str, Any]) -> Mark | None:
    """The mark that a status gives a deployment; None for ABSENT if the refusal names a request's
    field.
    """
    mark = _MARKS_BY_STATUS.get(status)
    return None if mark is Mark.ABSENT and error.get("param") not in (None, "", "model") else mark


def _denial(refused: UpstreamRefusal, error: dict[str, Any], mark: Mark | None) -> str:
    """The message of a permanent refusal, with the provider's text."""
    how = "in its answer" if refused.is_in_band else f"with HTTP {refused.status}"
    marked = f" ({mark})" if mark is not None else ""
    return f"The deployment refused the request {how}{marked}{_told(refused, error)}"


def _told(refused: UpstreamRefusal, error: dict[str, Any]) -> str:
    """The provider's message after a colon; empty without a message."""
    message = error.get("message")
    if not isinstance(message, str) or not message.strip():
        return ""
    return f": {scrubbed(' '.join(message.split())[:_DETAIL_CHARACTERS], refused.secret)}"


def in_band(error: Any, secret: str = "") -> base.BackendError:
    """The error for an error object inside a 200; its code or type gives the missing status."""
    fields = error if isinstance(error, dict) else {"message": str(error)}
    status = 500
    for key in ("code", "status", "type"):
        cause = fields.get(key)
        if isinstance(cause, int) and 400 <= cause <= 599:
            status = cause
            break
        if isinstance(cause, str):
            known = int(cause) if cause.isdecimal() and len(cause) == 3 else _STATUS_BY_WORD.get(cause.lower(), 0)
            if known >= 400:
                status = known
                break
    return refusal(UpstreamRefusal(status, msgspec.json.encode({"error": fields}), secret=secret, is_in_band=True))


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """The wait that `retry-after-ms` or `retry-after` (seconds or an HTTP date) asks for.

    In seconds, at most `RETRY_AFTER_MAX_S`; None without such a header.
    """
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        try:
            seconds = float(value) * scale
        except ValueError:
            date = email.utils.parsedate_tz(value) if value and name == "retry-after" else None
            if date is None:
                continue
            try:
                seconds = email.utils.mktime_tz(date) - now_s
            except (ValueError, OverflowError):  # a date that does not exist
                continue
        if seconds == seconds:  # not NaN
            return min(max(0.0, seconds), RETRY_AFTER_MAX_S)
    return None


_LIMIT = re.compile(r"(?:anthropic-|x-)?ratelimit-[a-z0-9-]{1,60}")


def limits_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers about rate limits, as OpenAI, Anthropic and others of their kind name them."""
    return {name: value for name, value in headers.items() if _LIMIT.fullmatch(name) and value.isprintable()}


def scrubbed(text: str, secret: str) -> str:
    """`text` without `secret`, and without masked keys as providers show them: `sk-ab***yz`."""
    text = text.replace(secret, "[key]") if len(secret) >= 4 else text
    if len(secret) >= 12:  # a key that was cut
        text = re.sub(re.escape(secret[:8]) + r"[\w-]*(?:\.{3}|…)?", "[key]", text)
    return _MASKED.sub("[key]", text)


def _excerpt(body: bytes) -> str:
    return " ".join(body[: 4 * _DETAIL_CHARACTERS].decode("utf-8", "replace").split())[:_DETAIL_CHARACTERS]


def error_fields(body: bytes) -> dict[str, Any]:
    """The error object in `body`, at any of the known places; {} without one."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if isinstance(answer, list) and answer:  # Gemini wraps its errors in a list
        answer = answer[0]
    if not isinstance(answer, dict):
        return {}
    error = answer.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str):
        return {"message": error}
    if isinstance(answer.get("message"), str):  # vLLM: {"object": "error", "message", "type", ...}
        return answer
    if "detail" in answer:  # FastAPI
        detail = answer["detail"]
        return {"message": detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()}
    return {}


def _client_body(refused: UpstreamRefusal, error: dict[str, Any]) -> bytes:
    """OpenAI's error object with the provider's message, else with the gateway's."""
    message = error.get("message")
    if not isinstance(message, str) or not message:
        message = f"The deployment rejected the request with HTTP {refused.status}"
    return error_body(scrubbed(message, refused.secret), error.get("type"), error.get("param"), error.get("code"))


def error_body(message: str, kind: Any, param: Any, code: Any) -> bytes:
    """OpenAI's error object as JSON; `kind`, `param` and `code` of a wrong type are left out."""
    error = error_object(
        message,
        kind if isinstance(kind, str) and kind else "invalid_request_error",
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )
    return msgspec.json.encode(error)


def unfit(message: str, param: str) -> base.BackendUnfit:
    """The refusal of a field that this deployment cannot honour; another deployment may."""
    body = error_body(message, None, param, "unsupported_parameter")
    return base.BackendUnfit(message, status=400, body=body)


def check_verbosity(body: Mapping[str, Any]) -> None:
    """Refuse a `verbosity` other than medium for a model without the field. Raises BackendUnfit."""
    if body.get("verbosity") not in (None, "medium"):
        raise unfit("`verbosity` other than medium is not supported by this model", "verbosity")


def from_backend(error: base.BackendError) -> ApiError:
    """The client's error for a deployment's failure. A rejection keeps its own body and status."""
    if isinstance(error, base.BackendDenied):
        return UpstreamDenied(error.message)
    if isinstance(error, base.BackendRejected):
        # for the log; the client gets the body
        is_long = isinstance(error, base.BackendTooLong)
        rejected = Upstream(error.message, code="context_length_exceeded" if is_long else "upstream_rejected")
        rejected.http_status = error.status or 400
        rejected.raw_body = error.body or msgspec.json.encode(
            error_object(error.message, "invalid_request_error", None, None)
        )
        return rejected
    translated = Upstream(error.message, code=_UPSTREAM_CODES.get(type(error), "upstream_unavailable"))
    translated.http_status = _UPSTREAM_STATUS.get(type(error), 503)
    translated.cause = error.status
    if isinstance(error, base.BackendOverloaded):
        translated.headers |= error.limits
    if error.retry_after_s is not None:
        translated.headers |= retry_after(error.retry_after_s)
    return translated


_UPSTREAM_STATUS = {base.BackendOverloaded: 429, base.BackendTimeout: 504, base.BackendBroken: 502}


_UPSTREAM_CODES = {
    base.BackendOverloaded: "upstream_overloaded",
    base.BackendTimeout: "upstream_timeout",
    base.BackendBroken: "upstream_broken",
}
