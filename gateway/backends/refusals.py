"""Translates a provider's refusal (status, headers, error object) into an error of base.py.

The rules are the same for HTTP, for errors inside a stream, and for litellm's exceptions. Shapes:
OpenAI API reference, "Error codes"; RFC 9110, sections 10.2.3 (Retry-After) and 15. Pure; the
current time is a parameter. Invariant: of a provider's text a client gets only the error object for
a faulty request and the message of a permanent refusal, of a limit or of an error inside a stream,
and never the provider's key.
"""

import email.utils
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gateway.backends import base
from gateway.backends.base import Mark
from gateway.wire.chunks import UNREADABLE, decoded
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
_TOO_LONG |= {"model_max_prompt_tokens_exceeded", "tokens_limit_reached", "string_above_max_length"}
# How servers without such a code say that a request is longer than their context: what is too long, and
# that it is. The sentences of each, with sources, are in `tests/dialects/too_long.json`. They may be a
# client's words, so they decide for its request alone: another deployment is asked.
_SIZE = r"(?:context(?: (?:length|limit|size|window))?|(?:prompt|input|sequence) (?:length|limit|size)|model length|token limit)"
_TOO_LONG_WORDS = re.compile(
    "|".join(
        (
            rf"(?:exceed(?:s|ed)?|(?:longer|greater|larger) than) (?:[\w']+ ){{0,4}}?(?:allowed )?{_SIZE}",
            rf"{_SIZE} (?:is |was |has been )?(?:exceed|overflow|of only)|configured context size",
            r"max(?:imum)? (?:context|prompt|input|sequence) length",
            r"(?:prompt|inputs?|messages|request) (?:\([^)]*\) )?(?:is |are )?too (?:long|large)|too many (?:input )?tokens",
            r"(?:prompt|inputs?|sequence) (?:tokens? )?length .{0,40}?(?:exceeds|greater than|longer than|too long)",
            r"(?:token count|number of (?:input )?tokens)\b.{0,60} (?:exceeds?|supports up to)|inputs`? .{0,40}must (?:be <|have less)",
            r"body too large .{0,80}tokens|exceeds max length|range of input length|reduce the length of|超长",
        )
    ),
    re.I,
)
# a quota of tokens by time is no context: another deployment, or this one later, has room
_QUOTA_WORDS = re.compile(
    r"(?:per|a|each) (?:minute|min|day|hour|second)\b|\(?[TR]P[MDH]\b|rate.?limit|quota|please wait", re.I
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
# the statuses of codes and types, by these in lower case without marks, and without "error" or "exception"
_STATUS_BY_WORD = {
    **dict.fromkeys(("ratelimitexceeded", "ratelimit", "resourceexhausted", "throttling", "toomanyrequests"), 429),
    **dict.fromkeys(("overloaded",), 529),
    **dict.fromkeys(("authentication", "unauthenticated", "unauthorized"), 401),
    **dict.fromkeys(("permission", "permissiondenied", "forbidden", "accessdenied"), 403),
    **dict.fromkeys(("notfound", "resourcenotfound"), 404),
    **dict.fromkeys(("invalidrequest", "badrequest", "invalidargument", "invalidparameter", "validation"), 400),
    **dict.fromkeys(("contextlengthexceeded", "exceedcontextsize", "failedprecondition", "requesttoolarge"), 400),
    **dict.fromkeys(("server", "api", "internalserver", "internal"), 500),
    **dict.fromkeys(("serviceunavailable", "unavailable"), 503),
    **dict.fromkeys(("timeout", "deadlineexceeded"), 504),
}
_MARKS_OF_NAMES = re.compile(r"[^a-z]")
_MARKS_OF_WORDS = re.compile(r"[^a-z]|(?:error|exception)$")
# of an error object, by names without marks: OpenAI's fields, and by which other names servers have them
_FIELDS = {"type": "type", "param": "param", "code": "code", "status": "status", "nctx": "n_ctx"}
_FIELDS |= {"errortype": "type", "errorcode": "code", "statuscode": "code"}
_WORDS = (
    *("message", "msg", "error", "errors", "errormessage", "errormsg", "detail", "details", "description", "reason"),
    *("cause", "statusmsg", "baseresp", "fault", "faultstring", "title"),
)
_TITLE = re.compile(r"<(?:title|message)\b[^>]*>([^<]*)</", re.I)


_NO_STATUSES: Mapping[str, int] = {}


class UpstreamRefusal(msgspec.Struct, frozen=True):
    """A refusal as received. `secret` is the provider's key, which all texts must lack.

    `is_in_band`: it came inside a 200, and its `status` is derived from its words. `limits` are the
    provider's headers about its rate limits; `statuses` are those that its codes stand for.
    """

    status: int
    body: bytes = b""
    retry_after_s: float | None = None
    secret: str = ""
    is_in_band: bool = False
    limits: Mapping[str, str] = {}
    statuses: Mapping[str, int] = {}


def refusal(refused: UpstreamRefusal) -> base.BackendError:
    """The error for a refused request."""
    error = error_fields(refused.body)
    codes = [str(error[key]).lower() for key in ("code", "type") if error.get(key)]
    status = refused.statuses.get(codes[0], refused.status) if codes else refused.status
    how = "in its answer" if refused.is_in_band else f"with HTTP {status}"
    detail = scrubbed(f"{how.removeprefix('with ')}: {_excerpt(refused.body)}".removesuffix(": "), refused.secret)
    said = scrubbed(" ".join(error.get("message", "").split())[:_DETAIL_CHARACTERS], refused.secret)
    provider_words = f": {said}" if said else ""
    known = next((_MARKS[word] for word in codes if word in _MARKS), None)
    if known is not None or status in _DENIED or not _PERMISSION.isdisjoint(codes):
        mark = known or _mark(status, error)
        marked = f" ({mark})" if mark is not None else ""
        message = f"The deployment refused the request {how}{marked}{provider_words}"
        denied = base.BackendDenied(message, detail=detail, status=status)
        denied.mark = mark
        return denied
    if status == 429 or (status in (503, 529) and (refused.retry_after_s is not None or status == 529)):
        message = f"The deployment is overloaded{provider_words if status == 429 else ''}"
        overloaded = base.BackendOverloaded(message, detail=detail, status=status, retry_after_s=refused.retry_after_s)
        overloaded.limits = refused.limits
        return overloaded
    message = error.get("message") or f"The deployment rejected the request with HTTP {status}"
    message, place = scrubbed(message, refused.secret), _LOCATION.search(refused.body)
    param = error.get("param") or (place and place[1].decode())
    body = error_body(message, error.get("type"), param, error.get("code"))
    is_quota = "rate_limit_exceeded" in codes or _QUOTA_WORDS.search(message) is not None
    if not _TOO_LONG.isdisjoint(codes) or (_TOO_LONG_WORDS.search(message) and not is_quota):
        status = 400 if status >= 500 else status
        too_long = base.BackendTooLong(message, detail=detail, status=status, body=body)
        too_long.context_tokens = _context_tokens(error, message)
        return too_long
    if status in _REJECTED:
        # a request of more tokens than a minute allows fits another deployment
        kind = base.BackendUnfit if is_quota else base.BackendRejected
        return kind(message, detail=detail, status=status, body=body)
    is_final = refused.is_in_band or status < 400  # an answer, if no good one: asked again, it would be the same
    message = f"The deployment failed {how}{provider_words if refused.is_in_band else ''}"
    return base.BackendUnavailable(message, detail=detail, status=status, is_final=is_final)


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


def in_band(data: bytes, secret: str = "", statuses: Mapping[str, int] = _NO_STATUSES) -> base.BackendError | None:
    """The error that `data`, inside a 200, tells of; its code or type gives the missing status.

    None if it tells of none: it has neither words nor a code.
    """
    error = error_fields(data)
    if not error.get("message") and error.get("code") in (None, 0, "0", 200):
        return None
    causes = (_status_of(error.get(name)) for name in ("code", "status", "type"))
    status = next(filter(None, causes), 500)
    body = msgspec.json.encode({"error": error})
    return refusal(UpstreamRefusal(status, body, secret=secret, is_in_band=True, statuses=statuses))


def _status_of(cause: Any) -> int:
    """The HTTP status that a code or type means; 0 if it means none."""
    if isinstance(cause, str) and not cause.isdecimal():
        return _STATUS_BY_WORD.get(_MARKS_OF_WORDS.sub("", cause.lower()), 0)
    number = int(cause) if isinstance(cause, int | str) and len(str(cause)) == 3 else 0
    return number if 400 <= number <= 599 else 0


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


_TEXT_CHARS_MIN, _QUOTE_CHARS = 10, 15  # without blanks, of which a server may change the kind
_PIECES = re.compile(rf"(?s).{{{_QUOTE_CHARS}}}")
_STATUS = re.compile(r"HTTP \d+ ?|")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")  # in JSON


def without_quotes(said: str, texts: Iterable[str]) -> str:
    """What a server said of a request, or only its status where that has one of the request's `texts`, or a part.

    A quote of 30 characters is always found, one of 15 by chance: looking for all takes a second for a long prompt.
    """
    plain = said
    for _ in range(2):  # an error is often JSON in JSON
        plain = _ESCAPED.sub(lambda c: chr(int(c[1], 16)) if c[1] else " " if c[2].isalpha() else c[2], plain)
    plain = _solid(plain)
    parts = {plain[at : at + _QUOTE_CHARS] for at in range(len(plain) - _QUOTE_CHARS + 1)}
    for text in map(_solid, texts):
        if (len(text) >= _TEXT_CHARS_MIN and text in plain) or not parts.isdisjoint(_PIECES.findall(text)):
            return f"{_STATUS.match(said)[0]}in words of the request"  # type: ignore[index]  # it matches anything
    return said


def _solid(text: str) -> str:
    return text.replace(" ", "").replace("\n", "").replace("\t", "").replace("\r", "")


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
    """The error that `body` tells of, as OpenAI's error object; {} if it tells of none.

    It may be anywhere in an object or a list, a text, or the title of a page.
    """
    body = body.strip()
    try:
        answer = decoded(body[6:] if body[:6].lower() == b"error:" else body)  # llama.cpp's, in a stream
        fields, message = _typed(answer), _words(answer)
    except UNREADABLE:
        text = body[: 4 * _DETAIL_CHARACTERS].decode("utf-8", "replace")
        titles = _TITLE.findall(text) if text.startswith("<") else [text]
        fields, message = {}, " ".join(" ".join(titles).split())[:_DETAIL_CHARACTERS]
    return fields | ({"message": message} if message.strip() else {})


def _inner(value: dict[str, Any]) -> list[Any]:
    """Where an object may tell of an error: first under the usual names, then in what else it holds."""
    named = {_plain(name): inner for name, inner in value.items()}
    held = [
        inner for inner in value.values() if isinstance(inner[0] if isinstance(inner, list) and inner else inner, dict)
    ]
    return [*(named[name] for name in _WORDS if name in named), *held]


def _plain(name: str) -> str:
    return _MARKS_OF_NAMES.sub("", name.lower())


def _typed(value: Any) -> dict[str, Any]:
    """The fields of an error beside its words; the outer ones come first."""
    fields: dict[str, Any] = {}
    while isinstance(value, dict | list) and value:
        if isinstance(value, list):  # Gemini wraps its errors in one
            value = value[0]
            continue
        if "loc" not in value:  # FastAPI's: its type is no error's
            given = {_FIELDS.get(_plain(name)): held for name, held in value.items() if held not in (None, "", "error")}
            fields = {ours: held for ours, held in given.items() if ours} | fields
        inner = (value.get("error"), *_inner(value))
        value = next((one for one in inner if isinstance(one, dict | list) and one), None)
    return fields


def _words(value: Any) -> str:
    """What an error says: a text, the words of an object, or those of each in a list."""
    if isinstance(value, list):
        return "; ".join(filter(None, map(_words, value)))
    if not isinstance(value, dict):
        return value if isinstance(value, str) else ""
    message = next((said for one in _inner(value) if (said := _words(one)).strip()), "")
    relayed = value.get("metadata")  # OpenRouter's: its provider's own error, "Errors", `ProviderErrorMetadata`
    if message and isinstance(relayed, dict) and isinstance(raw := relayed.get("raw"), str):
        cause = str(error_fields(raw.encode()).get("message", ""))
        message = f"{message}: {cause}" if cause and cause not in message else message
    location = value.get("loc")
    return f"{'.'.join(map(str, location))}: {message}" if message and isinstance(location, list) else message


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


def from_backend(error: base.BackendError) -> ApiError:
    """The client's error for a deployment's failure. A rejection keeps its own body and status."""
    if isinstance(error, base.BackendDenied):
        return UpstreamDenied(error.message)
    if isinstance(error, base.BackendRejected):
        # for the log; the client gets the body
        is_long = isinstance(error, base.BackendTooLong)
        rejected = Upstream(error.message, code="context_length_exceeded" if is_long else "upstream_rejected")
        rejected.http_status = error.status or 400
        rejected.raw_body = error.body or error_body(error.message, None, None, None)
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
