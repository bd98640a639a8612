"""Turns a client's request into the engine's requests: one for a chat, one per prompt of a
completion.

Uses the engine's messages; no torch. Images and suffixes, which the engine lacks, are refused, not
ignored; routing should have sent them elsewhere. Shapes: OpenAI API reference, "Create chat
completion" and "Create completion"; extensions have vLLM's names.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.backends.base import BackendRejected, BackendRequest
from gateway.backends.fitting import check
from gateway.backends.refusals import error_body, unfit
from gateway.wire.requests import in_json_words
from gateway.wire.types import CHAT, prompts_of
from local_engine import GenerateRequest, Grammar, SamplingParams
from local_engine.messages import ANY_TOOL as ANY

_PREDICTION_CHARS_MAX = 64 << 10  # the engine splits it into tokens between two steps
_SEED_MASK = (1 << 63) - 1
_PRIORITY_FLEX = 1  # OpenAI's tier for work that can wait
_SAMPLING = SamplingParams.__struct_fields__
_TOP_P_MIN = 1e-6  # OpenAI allows 0, meaning the likeliest token


class _Part(msgspec.Struct):
    text: str = ""


class _Prediction(msgspec.Struct):
    content: str | list[_Part] = ""


class _Parameters(msgspec.Struct):
    """The fields of chats and completions that the engine uses. Extensions have vLLM's names."""

    priority: int | None = None
    cache_salt: str | None = None
    prediction: _Prediction | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None


def engine_requests(request: BackendRequest) -> list[GenerateRequest]:
    """Translate a client's request. Raises BackendRejected for unsupported fields and wrong types."""
    body = request.body
    try:
        parameters = msgspec.convert(body, _Parameters, str_keys=True)
    except msgspec.ValidationError as error:
        what, _, path = in_json_words(str(error)).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        raise rejected(f"Invalid {param or 'request'}: {what}", param, "invalid_type") from None
    shared: dict[str, Any] = {
        "n": parameters.n or 1,
        "best_of": parameters.best_of,
        "salt": request.salt + (parameters.cache_salt or "").encode(),
        "priority": parameters.priority or (_PRIORITY_FLEX if body.get("service_tier") == "flex" else 0),
        "reference": request.draft or _predicted(parameters.prediction),
        "prefix": request.prefix,
        "grammar": _grammar_of(body),
    }
    if request.kind is CHAT:
        return [GenerateRequest(messages=messages_of(body), sampling=_of_chat(parameters), **shared, **_calls_of(body))]
    if body.get("suffix"):
        raise rejected("This model can't be told what follows", "suffix", "unsupported_parameter")
    return [
        GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=prompt if isinstance(prompt, list) else None,
            sampling=_of_text(parameters, body, prompt),
            **shared,
        )
        for prompt in prompts_of(body)
    ]


def _predicted(prediction: _Prediction | None) -> str | None:
    """The text of OpenAI's `prediction` ("Predicted Outputs"), with which the answer may share
    passages.
    """
    content = prediction.content if prediction is not None else ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return text[:_PREDICTION_CHARS_MAX] or None


def _of_chat(parameters: _Parameters) -> SamplingParams:
    length = parameters.max_completion_tokens if parameters.max_completion_tokens is not None else parameters.max_tokens
    logprobs = (parameters.top_logprobs or 0) if parameters.logprobs else None
    return _sampling(parameters, length, logprobs, parameters.prompt_logprobs)


def _of_text(parameters: _Parameters, body: dict[str, Any], prompt: str | list[int]) -> SamplingParams:
    """Return the parameters of a text completion.

    An echo gets log probabilities if the request asks for any. An echo of token ids always gets
    them, since their text comes with them. The engine generates at least one token, also for
    `max_tokens` 0.
    """
    logprobs = None if parameters.logprobs is None else int(parameters.logprobs)
    prompt_logprobs = parameters.prompt_logprobs
    if body.get("echo") and (logprobs is not None or not isinstance(prompt, str)):
        prompt_logprobs = max(prompt_logprobs or 0, logprobs or 0)
    return _sampling(parameters, max(1, parameters.max_tokens or 0), logprobs, prompt_logprobs)


def _sampling(
    parameters: _Parameters, length: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters: the request's values, else the engine's defaults."""
    stop, seed, top_k, top_p = parameters.stop, parameters.seed, parameters.top_k, parameters.top_p
    fields = msgspec.structs.asdict(parameters) | {
        "top_p": max(top_p, _TOP_P_MIN) if top_p is not None else None,
        "top_k": max(top_k, 0) if top_k is not None else None,  # -1 is off in vLLM
        "seed": seed & _SEED_MASK if seed is not None else None,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop or ()),
        "stop_token_ids": tuple(parameters.stop_token_ids or ()),
        "max_tokens": length,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    return SamplingParams(**{name: fields[name] for name in _SAMPLING if fields[name] is not None})


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a chat's messages for the engine. Raises BackendRejected, also for a `verbosity`."""
    check(body, ["verbosity"])
    return [_message(message, i) for i, message in enumerate(body["messages"])]


def _calls_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the tools, the tools that the model must call, and whether it may make several calls.

    Raises BackendRejected.
    """
    for name in ("functions", "function_call"):
        if body.get(name) is not None:
            message = f"`{name}` is not supported here: send `tools` and `tool_choice`"
            raise unfit(message, name)
    choice = body.get("tool_choice") or "auto"
    if choice == "none" or not body.get("tools"):
        return {}
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body["tools"])]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools") or {}
        names = {(tool.get("function") or {}).get("name") for tool in allowed.get("tools") or ()}
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        choice = allowed.get("mode") or "auto"
    if isinstance(choice, dict):
        function = choice.get("function") or {}
        return {"tools": tools, "tool_choice": function.get("name") or ANY, "calls_max": 1}
    calls_max = 1 if body.get("parallel_tool_calls") is False else 0
    return {"tools": tools, "tool_choice": ANY if choice == "required" else "", "calls_max": calls_max}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool's function in the shape that chat templates read. Raises BackendRejected."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        message = "This model calls tools of the type `function`"
        raise unfit(message, f"{where}.type")
    if not isinstance(function.get("parameters"), dict | None):
        param = f"{where}.function.parameters"
        raise rejected(f"`{param}` must be a JSON schema", param, "invalid_type")
    return {"type": "function", "function": {"description": "", "parameters": {}, **function}}


def form_field(body: Mapping[str, Any], why: str) -> str | None:
    """Return the field whose grammar the engine refused; `why` is the engine's reason."""
    form = next(iter(_forms(body)), None)
    return "tools" if body.get("tools") and (form is None or "in the tool " in why) else form and form[0]


def _grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that constrains the answer, or None. Raises BackendRejected."""
    forms = _forms(body)
    if len(forms) > 1:
        fields = ", ".join(field for field, _, _ in forms)
        raise rejected(f"An answer has one form: send one of {fields}", forms[1][0], "invalid_value")
    return _grammar(*forms[0]) if forms else None


def _forms(body: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return each grammar of a request as (field, kind, value): OpenAI's `response_format`, vLLM's
    fields.

    Sources: OpenAI, "Structured model outputs"; vLLM, "Structured Outputs". Raises BackendRejected.
    """
    forms: list[tuple[str, str, Any]] = []
    format = body.get("response_format") or {}
    if format.get("type") == "json_object":
        forms.append(("response_format", "json", _OBJECT))
    elif format.get("type") == "json_schema":
        schema = format["json_schema"].get("schema")
        forms.append(("response_format", "json", _OBJECT if schema is None else schema))
    outputs = body.get("structured_outputs")
    if outputs is not None and not isinstance(outputs, dict):
        raise rejected("`structured_outputs` must be an object", "structured_outputs", "invalid_type")
    for name in outputs or ():
        if name not in _GRAMMARS and name not in _HINTS and (outputs or {})[name] is not None:
            field = f"structured_outputs.{name[:100]}"
            raise rejected(
                f"`{field}` is not supported here: expected {', '.join(_GRAMMARS)}", field, "unsupported_parameter"
            )
    for name, kind in _GRAMMARS.items():
        for field, value in (
            (f"guided_{name}", body.get(f"guided_{name}")),
            (f"structured_outputs.{name}", (outputs or {}).get(name)),
        ):
            if value is not None and value is not False:
                forms.append((field, kind, _OBJECT if name == "json_object" else value))
    return forms


_OBJECT = {"type": "object"}
# how vLLM writes JSON; here it has no spaces to vary
_HINTS = frozenset(
    {"disable_any_whitespace", "disable_fallback", "disable_additional_properties", "whitespace_pattern"}
)
_GRAMMARS = {"json": "json", "json_object": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def _grammar(field: str, kind: Any, value: Any) -> Grammar:
    if kind == "choice":
        is_good = isinstance(value, list) and bool(value) and all(isinstance(choice, str) for choice in value)
        expected = "a list of texts, and not empty"
    elif kind == "json":
        is_good, expected = isinstance(value, dict | str), "a JSON schema"
    else:
        is_good, expected = isinstance(value, str), "a text"
    if not is_good:
        raise rejected(f"`{field}` must be {expected}", field, "invalid_type")
    return Grammar(kind, value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _message(message: dict[str, Any], position: int) -> dict[str, Any]:
    """Return a message in the shape that chat templates read: role, text, and tool calls or call
    id.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                param = f"messages[{position}].content"
                raise rejected("This model reads text only", param, "unsupported_content")
        content = "".join(part["text"] for part in content)
    plain = {"role": role, "content": content or ""}
    return plain | {name: message[name] for name in ("name", "tool_calls", "tool_call_id") if message.get(name)}


def rejected(message: str, param: str | None, code: str | None) -> BackendRejected:
    """Return a client's error in OpenAI's shape."""
    return BackendRejected(message, status=400, body=error_body(message, None, param, code))
