"""Requests in OpenAI's shape: known fields with types and ranges, and the demand of a request.

Shapes: OpenAI API reference, "Create chat completion" and "Create completion". Unknown fields pass
through unchanged.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, reduce
from operator import attrgetter, getitem
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.reserved import calls_of, is_googles, may_name_urls, reserved_names
from gateway.wire.errors import BadRequest, MissingField
from gateway.wire.plain import BYTES_PER_TOKEN, MEDIA_TOKENS_MAX, OUTPUT_TOKENS_MAX, PLAIN_SHAPES
from gateway.wire.reader import field_of, steps_of
from gateway.wire.types import CHAT, COMPLETION, prompts_of
from policies import Demand

OUTPUT_TOKENS_EXPECTED = 256  # of an answer without a bound
BYTES_PER_TOKEN_MAX = 10.0  # long words: hardly any prompt has fewer tokens
PROMPTS_MAX = 2_048
MESSAGES_MAX = 20_000  # each takes time on the event loop
_TOKENS_MAX = 2**31 - 1
# A token of a byte-level BPE has at least one byte, so bytes bound tokens from above. A chat
# template adds a few to each message, and a default system prompt to a conversation without one.
_TEMPLATE_TOKENS = 64
_MESSAGE_TOKENS = 12

_TokenId = Annotated[int, Meta(ge=0)]


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    audio: Any = None


class _Tool(msgspec.Struct):
    type: str | None = None
    function: dict[str, Any] | None = None


class _ResponseFormat(msgspec.Struct):
    type: str


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct, kw_only=True):
    """The known fields of every generation, each with its type and range."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    @property
    def candidates(self) -> int:
        """The number of answers generated for a prompt; `n` of them are returned. Raises
        BadRequest.
        """
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise BadRequest("`best_of` must be at least `n`", param="best_of", code="invalid_value")
        return self.best_of or self.n or 1


class ChatRequest(_Request, kw_only=True):
    """The known fields of a chat completion."""

    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Annotated[int, Meta(ge=1, le=_TOKENS_MAX)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_TOKENS_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None

    def demand(self, raw: bytes, body: dict[str, Any]) -> Demand:
        """The tokens and capabilities that the request demands of a deployment. Raises BadRequest."""
        messages, size = self.messages, len(raw)
        needs = set[str]() if _ASKING.isdisjoint(body) else set(self._asked(body))
        media_count = len(messages) - list(map(_audio_of, messages)).count(None)
        if set(map(type, map(_content_of, messages))) != _TEXTS:
            self.check_contents(body)
            lists = [message.content for message in messages if type(message.content) is list]
            needs.update(kind for parts in lists for kind in _media(parts))
            media_count += sum(part.get("type") not in _TEXT_PARTS for parts in lists for part in parts)
        candidates = self.candidates
        bound = prompt_tokens_max(size, len(messages), media_count)
        told = size if _UNTOLD.isdisjoint(body) else len(msgspec.json.encode([body.get(name) for name in _TOLD]))
        least = 0 if media_count else int(told / BYTES_PER_TOKEN_MAX)
        expected = int(size / BYTES_PER_TOKEN) + _MESSAGE_TOKENS
        # a server may support only one
        output_tokens = max(self.max_completion_tokens or 0, self.max_tokens or 0)
        demand = _demand(expected, (least, bound), output_tokens or None, candidates, needs, raw, body)
        if body.get("reasoning_effort") not in _NO_EFFORT:
            demand = msgspec.structs.replace(demand, prefers=_REASONING)
        has_audio, is_long = "audio" in needs, has_long_writes(raw)
        if not (demand.reserved or has_audio or is_long):
            return demand
        tier = str(body["service_tier"])[:100] if "service_tier" in demand.reserved else ""
        return msgspec.structs.replace(demand, has_audio=has_audio, has_long_writes=is_long, tier=tier)

    def _asked(self, body: dict[str, Any]) -> Iterator[str]:
        """The capabilities that the fields in `_ASKING` need. Raises BadRequest."""
        if self.tools or body.get("functions"):
            self._check_tools(body.get("tools") or [])
            yield "tools"
        if self.response_format is not None and self.response_format.type != "text":
            yield self.response_format.type
        if self.logprobs:
            yield "logprobs"
        if self.candidates > 1:
            yield "n"
        made = body.get("modalities")
        if body.get("audio") or (isinstance(made, list) and "audio" in made):
            yield "audio"

    def check_contents(self, body: dict[str, Any]) -> None:
        """Raise BadRequest for a message without the content that its role requires."""
        for index, message in enumerate(self.messages):
            if message.content is None and message.role in SPEAKERS:
                given, param = body["messages"][index], f"messages[{index}].content"
                if "content" not in given:
                    raise MissingField(param, given)
                words = f"Invalid {param}: Expected `string | array`, got `null`"
                raise BadRequest(words, param=param, code="invalid_type")

    def _check_tools(self, tools: list[dict[str, Any]]) -> None:
        for index, tool in enumerate(tools):
            if tool.get("type") is None and not is_googles(tool):
                raise MissingField(f"tools[{index}].type", tool)


_ASKING = frozenset({"tools", "functions", "response_format", "logprobs", "n", "best_of", "audio", "modalities"})


def prompt_tokens_max(size_bytes: int, messages: int, media: int) -> int:
    """An upper bound of a body's tokens. `media` of its parts may have more tokens than bytes."""
    # the body has at least as many bytes as its texts: an escape is never shorter than its
    # UTF-8 (\uXXXX: 6 bytes for at most 3). So the body's size bounds the tokens from above.
    return size_bytes + _TEMPLATE_TOKENS + _MESSAGE_TOKENS * messages + MEDIA_TOKENS_MAX * media


def has_long_writes(raw: bytes) -> bool:
    """Whether a body may ask a provider to cache its prompt for an hour."""
    return raw.find(b'"1h"') >= 0 or (raw.find(b"\\u00") >= 0 and _LONG.search(raw) is not None)


_LONG = re.compile(rb'"(?:1|\\u0031)(?:h|\\u0068)"')


class CompletionRequest(_Request, kw_only=True):
    """The known fields of a completion. A `prompt` is a text, token ids, or a list of either."""

    prompt: str | list[str | _TokenId | Annotated[list[_TokenId], Meta(min_length=1)]]
    messages: None = None  # keeps a completion's fingerprint apart from a chat's
    suffix: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=_TOKENS_MAX)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    def demand(self, raw: bytes, body: dict[str, Any]) -> Demand:
        """The tokens and capabilities that the request demands of a deployment. Raises BadRequest."""
        if not isinstance(self.prompt, str) and len(set(map(type, self.prompt))) != 1:
            message = "`prompt` must be a text, token ids, or a list of texts or of token ids, and not empty"
            raise BadRequest(message, param="prompt", code="invalid_type" if self.prompt else "invalid_value")
        prompts = prompts_of(body)
        if len(prompts) > PROMPTS_MAX:
            raise BadRequest(f"`prompt` holds more than {PROMPTS_MAX} prompts", param="prompt", code="invalid_value")
        candidates = self.candidates
        needs = {"completions"}
        if self.suffix:
            needs.add("suffix")
        if self.logprobs is not None:
            needs.add("logprobs")
        if candidates > 1:
            needs.add("n")
        expected = [len(one) / (BYTES_PER_TOKEN if isinstance(one, str) else 1) for one in prompts]
        least = [len(one) / (BYTES_PER_TOKEN_MAX if isinstance(one, str) else 1) for one in prompts]
        bounds = int(max(least)), len(raw) + len(prompts)  # each has a context of its own
        output_tokens, choices = self.max_tokens or 1, candidates * len(prompts)
        return _demand(int(sum(expected)) + len(prompts), bounds, output_tokens, choices, needs, raw, body)


SHAPES: dict[str, type[Any]] = {CHAT.name: ChatRequest, COMPLETION.name: CompletionRequest, **PLAIN_SHAPES}
"""The known fields of a request by the name of its kind, with a method `demand`."""


def _demand(
    prompt_tokens: int,
    bounds: tuple[int, int],
    output_tokens: int | None,
    choices: int,
    needs: set[str],
    raw: bytes,
    body: dict[str, Any],
) -> Demand:
    """The demand of a request.

    `bounds` are the fewest and the most tokens of its prompt; `output_tokens` is the longest
    allowed answer, if set.
    """
    reserved = reserved_names(body)
    return Demand(
        prompt_tokens=prompt_tokens,
        prompt_tokens_min=min(bounds[0], prompt_tokens),
        prompt_tokens_max=bounds[1],
        output_tokens_max=OUTPUT_TOKENS_MAX if output_tokens is None else output_tokens,
        output_tokens_expected=OUTPUT_TOKENS_EXPECTED
        if output_tokens is None
        else min(output_tokens, OUTPUT_TOKENS_EXPECTED),
        is_output_asked=output_tokens is not None,
        choices=choices,
        needs=frozenset(needs) if needs else _NO_NEEDS,
        reserved=reserved,
        calls=calls_of(body, reserved),
        may_name_urls=may_name_urls(raw),
    )


# an assistant's message may have tool calls, a refusal or audio instead of content
SPEAKERS = frozenset({"system", "developer", "user", "tool"})


def decode_object(raw: bytes, model: str | None = None) -> dict[str, Any]:
    """The JSON object in `raw`; `model`, if given, replaces its field. Raises BadRequest."""
    try:
        body = msgspec.json.decode(raw.removeprefix(BOM))
    except RecursionError:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # msgspec reports it as an early end
        half = _HALF_A_PAIR.search(raw) if "truncated" in str(error) else None
        why = f"a surrogate without its pair stands for no character (byte {half.start()})" if half else str(error)
        raise BadRequest(f"The body is not valid JSON: {why}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object, not {json_name(body)}", code="invalid_json")
    if model is not None:
        body["model"] = model
    return body


_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def decode_strictly(raw: bytes) -> dict[str, Any]:
    """Decode like `decode_object`, but refuse an object with a duplicate field. Raises BadRequest."""
    body = decode_object(raw)
    try:
        json.loads(raw.removeprefix(BOM), object_pairs_hook=_refuse_twins)
    except RecursionError:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from None
    return body


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    names = set[str]()
    for name, _ in pairs:
        if name in names:
            raise BadRequest(
                f"The body has {name[:100]} twice in one object: send it once", param=name, code="invalid_json"
            )
        names.add(name)


def convert(body: dict[str, Any], shape: type[Any], prefix: str = "", *, is_strict: bool = True) -> Any:
    """`body` as a struct; unless `is_strict`, its numbers may be texts.

    Raises BadRequest with the path of the first invalid field.
    """
    try:
        return msgspec.convert(body, shape, strict=is_strict)
    except msgspec.ValidationError as error:
        if _has_whole_number(body, error):
            return convert(body, shape, prefix, is_strict=is_strict)
        problem, _, path = in_json_words(str(error)).partition(" - at `$")
        param = (prefix + path.rstrip("`")).lstrip(".") or None
        values = ""
        if problem.startswith(_ONE_OF):
            values = ", ".join(_allowed(_type_of(shape), _PATH_PARTS.findall(path)))
        if problem.startswith(_ABOUT_FIELDS):
            param = ".".join(part for part in (param, problem.split("`")[1]) if part)
            if problem.startswith(_MISSING):
                given = () if "[...]" in path else reduce(getitem, steps_of(path), body)
                raise MissingField(param, given) from None
            problem = f"Unknown field: {param}; there is {values}"
            raise BadRequest(problem, param=param, code="unknown_parameter") from None
        code = "invalid_type" if "got" in problem else "invalid_value"
        if values:
            problem = f"expected one of {values}, got {problem[problem.index(_QUOTE) :]}"
        raise BadRequest(f"Invalid {param or 'body'}: {problem}", param=param, code=code) from None


def _has_whole_number(body: Any, failure: msgspec.ValidationError) -> bool:
    """Replace a number such as 8.0, where an integer is expected, by it: to JSON Schema (Core, 4.2.3) it is one."""
    with suppress(LookupError, TypeError, ValueError):
        inside, name, expected = field_of(body, failure)
        if "int" in expected and isinstance(inside[name], float) and inside[name].is_integer():
            inside[name] = int(inside[name])
            return True
    return False


_ABOUT_FIELDS = (_MISSING := "Object missing required field", _UNKNOWN := "Object contains unknown field")
_ONE_OF = (_UNKNOWN, "Invalid enum value '", "Invalid value '")  # the last: of a field that tells structs apart
_QUOTE = "'"
_type_of: Callable[[Any], Any] = cache(msgspec.inspect.type_info)  # of few shapes; each call leaves a cycle
_PATH_PARTS = re.compile(r"\w+|\[\.{3}\]")  # `[...]` is any item


def _allowed(kind: msgspec.inspect.Type, path: Sequence[str]) -> list[str]:
    """What an enum or a literal at a path within a type may be, or the fields there; empty: another type is there."""
    match kind:
        case msgspec.inspect.UnionType(types=kinds):
            return [value for one in kinds for value in _allowed(one, path)]
        case msgspec.inspect.EnumType(cls=enum) if not path:
            return [str(one.value) for one in enum]
        case msgspec.inspect.LiteralType(values=values) if not path:
            return list(map(str, values))
        case msgspec.inspect.ListType(item_type=item) if path:
            return _allowed(item, path[1:])
        case msgspec.inspect.StructType(tag_field=name, tag=tag) if name is not None and path == [name]:
            return [str(tag)]
        case msgspec.inspect.StructType(fields=fields) if not path:
            return [field.encode_name for field in fields]
        case msgspec.inspect.StructType(fields=fields) if path:
            inner = next((field.type for field in fields if field.encode_name == path[0]), None)
            return [] if inner is None else _allowed(inner, path[1:])
    return []


BOM = b"\xef\xbb\xbf"  # .NET sends it; RFC 8259, section 8.1 lets a parser ignore it


def _media(parts: list[dict[str, Any]]) -> list[str]:
    """The capabilities that parts other than text need."""
    return [_PART_NEEDS[kind] for part in parts if isinstance(kind := part.get("type"), str) and kind in _PART_NEEDS]


_NO_NEEDS: frozenset[str] = frozenset()
_TEXTS = {str}
_audio_of, _content_of = attrgetter("audio"), attrgetter("content")
# no part of the prompt, though a body may be long by them; and its parts
_FORMS = ("response_format", "structured_outputs", "guided_choice", "guided_grammar", "guided_json", "guided_regex")
_UNTOLD = frozenset({*_FORMS, "logit_bias", "metadata", "prediction"})
_TOLD = ("messages", "tools", "functions")
_NO_EFFORT = (None, "none", "minimal")
_REASONING = frozenset({"reasoning"})


_TEXT_PARTS = ("text", "refusal", "thinking", "reference")  # their bytes bound their tokens
_PART_NEEDS = {"image_url": "vision", "input_audio": "audio", "file": "files"}


def in_json_words(message: str) -> str:
    """A message of msgspec or pydantic with JSON's type names instead of Python's."""
    named = _QUOTED_TYPES.sub(lambda found: _PYTHON_TYPE.sub(lambda one: _JSON_TYPES[one[0]], found[0]), message)
    return _PYDANTICS.sub(lambda one: _JSON_TYPES[one[0]], named)


_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_JSON_TYPES |= {"valid dictionary": "object", "valid tuple": "array", "valid list": "array", "None": "null"}
_QUOTED_TYPES = re.compile(r"`[a-z]+( \| [a-z]+)*`")  # msgspec's: `str | null`
_PYTHON_TYPE = re.compile(r"\b(str|int|float|bool)\b")
_PYDANTICS = re.compile(r"valid (dictionary|tuple|list)\b|\bNone\b")


def json_name(value: Any) -> str:
    return _JSON_NAMES.get(type(value), "an object")


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
    **dict.fromkeys((int, float), "a number"),
}
