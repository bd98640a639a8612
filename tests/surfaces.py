"""The features of requests as the three surfaces write them, and what each kind of deployment makes of them.

docs/api.md has this table; tests/journey/test_surfaces.py tries each of its cells. Knows no product code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BACKENDS = ("openai", "litellm", "anthropic", "local")
_ALL = "yes yes yes yes"


@dataclass(frozen=True)
class Refused:
    """Fields that a surface refuses by a name in the message."""

    fields: Mapping[str, Any]
    param: str


@dataclass(frozen=True)
class Own:
    """Fields whose request has an answer of its own in the cache: another surface cannot say the same."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Idle:
    """Fields that a surface takes, and that leave a plain request as it is."""

    fields: Mapping[str, Any]


Said = Mapping[str, Any] | Refused | Own | Idle | None


@dataclass(frozen=True)
class Feature:
    """`chat`, `responses` and `messages` say the same; None: that API has no word for it.

    `backends` has a word for each of `BACKENDS`: yes, none (no effect), 400. `passed` is that of an `openai`
    deployment with the capability `responses` for a response, where it is not the word for a chat: own, as the
    request goes to its `/responses`, or 400.
    """

    name: str
    chat: Said
    responses: Said
    messages: Said
    backends: str = _ALL
    passed: str = ""

    @property
    def passing(self) -> str:
        """The word of a deployment with the capability `responses`."""
        match self.responses:
            case None:
                usual = "–"
            case Refused():
                usual = "400"
            case Idle():
                usual = "none"
            case _:
                usual = "yes"
        return self.passed or usual


QUESTION = "Which way is north?"
_ASK = {"role": "user", "content": QUESTION}
_URL, _DATA = "https://example.com/a.png", "data:image/png;base64,aGk="
_PDF = "data:application/pdf;base64,aGk="
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
_FIELDS = {"name": "look", "description": "Looks.", "parameters": _SCHEMA}
_FUNCTION, _FLAT = {"type": "function", "function": _FIELDS}, {"type": "function", **_FIELDS}
_TOOL = {"name": "look", "description": "Looks.", "input_schema": _SCHEMA}
_TOOLS = {"tools": [_FUNCTION]}, {"tools": [_FLAT]}, {"tools": [_TOOL]}
_TWO = [_FUNCTION, {"type": "function", "function": {**_FIELDS, "name": "see"}}], [_FLAT, {**_FLAT, "name": "see"}]
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":"x"}'}}
_ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":"x"}'}
_USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": "x"}}
_MARK = {"cache_control": {"type": "ephemeral"}}


def _asked(chat: Any, responses: Any, messages: Any) -> tuple[Said, Said, Said]:
    """One content of the user in three shapes; None where a surface has none."""
    return (
        chat and {"messages": [{"role": "user", "content": chat}]},
        responses and {"input": [{"role": "user", "content": responses}]},
        messages and {"messages": [{"role": "user", "content": messages}]},
    )


def _with(more: tuple[Any, Any, Any]) -> tuple[Said, Said, Said]:
    """Tools, and what goes with them."""
    return tuple(own if own is None else {**own, **extra} for own, extra in zip(_TOOLS, more, strict=True))  # type: ignore[return-value]


def _results(text: str, is_error: bool) -> tuple[Said, Said, Said]:
    said = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": text, **({"is_error": True} if is_error else {})}
    told = f"Error: {text}" if is_error else text
    return (
        {"messages": [_ASK, said, {"role": "tool", "tool_call_id": "c1", "content": told}], **_TOOLS[0]},
        {"input": [_ASK, _ITEM, {"type": "function_call_output", "call_id": "c1", "output": told}], **_TOOLS[1]},
        {
            "messages": [_ASK, {"role": "assistant", "content": [_USE]}, {"role": "user", "content": [result]}],
            **_TOOLS[2],
        },
    )


def _same(backends: str = _ALL, **fields: Any) -> tuple[Any, ...]:
    return fields, fields, fields, backends


_SEARCH = {"tools": [{"type": "web_search"}]}, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
_MCP = {"tools": [{"type": "mcp", "server_url": "https://example.com"}]}
_COMPUTER = {"tools": [{"type": "computer_20250124", "name": "computer"}]}
_FORMAT = {"name": "output", "schema": _SCHEMA, "strict": True}
_AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
_SOUND = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
_TEXT = {"type": "text", "text": QUESTION}
_DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
_CITED = {**_DOCUMENT, "citations": {"enabled": True}}
_PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
_SPACE = {"type": "namespace", "name": "mcp__docs__", "description": "Docs.", "tools": [_FLAT]}
_NO_CHAT = "– – – –"
_FILE, _INPUT_FILE = {"filename": "a.pdf", "file_data": _PDF}, {"type": "input_file", "filename": "a.pdf"}

FEATURES = (
    Feature(
        "a system prompt",
        {"messages": [{"role": "system", "content": "Be brief."}, _ASK]},
        {"instructions": "Be brief."},
        {"system": "Be brief."},
    ),
    Feature(
        "system messages in between",
        {"messages": [_ASK, {"role": "system", "content": "Be brief."}, _ASK]},
        {"input": [_ASK, {"role": "system", "content": "Be brief."}, _ASK]},
        {"messages": [_ASK, {"role": "system", "content": "Be brief."}, _ASK]},
    ),
    Feature(
        "a developer's message",
        {"messages": [{"role": "developer", "content": "Be brief."}, _ASK]},
        {"input": [{"role": "developer", "content": "Be brief."}, _ASK]},
        None,
    ),
    Feature(
        "several texts",
        *_asked([_TEXT, _TEXT], [{"type": "input_text", "text": QUESTION}] * 2, [_TEXT, _TEXT]),
    ),
    Feature(
        "an image by its address",
        *_asked(
            [{"type": "image_url", "image_url": {"url": _URL}}],
            [{"type": "input_image", "image_url": _URL}],
            [{"type": "image", "source": {"type": "url", "url": _URL}}],
        ),
        "yes yes yes 400",
    ),
    Feature(
        "an image by its bytes",
        *_asked(
            [{"type": "image_url", "image_url": {"url": _DATA}}],
            [{"type": "input_image", "image_url": _DATA}],
            [_PICTURE],
        ),
        "yes yes yes 400",
    ),
    Feature(
        "a file by its bytes",
        *_asked(
            [{"type": "file", "file": _FILE}],
            [{**_INPUT_FILE, "file_data": _PDF}],
            [{**_DOCUMENT, "title": "a.pdf"}],
        ),
        "yes yes yes 400",
    ),
    Feature(
        "a file by its id",
        _asked([{"type": "file", "file": {"file_id": "f1"}}], None, None)[0],
        Refused(
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f1"}]}]}, "input[0].content[0]"
        ),
        Refused(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f1"}}]}
                ]
            },
            "messages[0].content[0]",
        ),
        "yes yes 400 400",
        passed="own",
    ),
    Feature(
        "citations of documents",
        None,
        None,
        Refused({"messages": [{"role": "user", "content": [_CITED]}]}, "messages[0].content[0].citations"),
        "– – – –",
    ),
    Feature("sounds in the prompt", *_asked([_SOUND], [_SOUND], None), "yes 400 400 400"),
    Feature("tools of the client", *_TOOLS),
    Feature(
        "a tool that must be called", *_with((*[{"tool_choice": "required"}] * 2, {"tool_choice": {"type": "any"}}))
    ),
    Feature("no call of a tool", *_with((*[{"tool_choice": "none"}] * 2, {"tool_choice": {"type": "none"}}))),
    Feature(
        "one named tool",
        *_with(
            (
                {"tool_choice": {"type": "function", "function": {"name": "look"}}},
                {"tool_choice": {"type": "function", "name": "look"}},
                {"tool_choice": {"type": "tool", "name": "look"}},
            )
        ),
    ),
    Feature(
        "some of the tools",
        {
            "tools": _TWO[0],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]},
            },
        },
        {
            "tools": _TWO[1],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
        },
        None,
        "yes yes 400 yes",
    ),
    Feature(
        "one call at a time",
        *_with(
            (
                *[{"parallel_tool_calls": False}] * 2,
                {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            )
        ),
    ),
    Feature(
        "strict tools",
        {"tools": [{"type": "function", "function": {**_FIELDS, "strict": True}}]},
        {"tools": [{**_FLAT, "strict": True}]},
        {"tools": [{**_TOOL, "strict": True}]},
    ),
    Feature(
        "examples of a tool's input",
        None,
        None,
        Refused({"tools": [{**_TOOL, "input_examples": [{"a": "x"}]}]}, "tools[0].input_examples"),
        "– – – –",
    ),
    Feature(
        "custom tools",
        {"tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        {"tools": [{"type": "custom", "name": "patch"}]},
        None,
        "yes yes 400 400",
    ),
    Feature("results of tools", *_results("north", is_error=False)),
    Feature("failed results of tools", *_results("no compass", is_error=True)),
    Feature("stop sequences", {"stop": ["END"]}, {"stop": ["END"]}, {"stop_sequences": ["END"]}),
    Feature("`temperature`", *_same(temperature=0.5)),
    Feature("`top_p`", *_same(top_p=0.5)),
    Feature("`top_k`", *_same(top_k=5)),
    Feature("the longest answer", {"max_completion_tokens": 9}, {"max_output_tokens": 9}, {"max_tokens": 9}),
    Feature("penalties", *_same("yes yes 400 yes", frequency_penalty=0.5)),
    Feature("`logit_bias`", *_same("yes yes 400 yes", logit_bias={"5": 1})),
    Feature("`seed`", *_same("yes yes none yes", seed=1)),
    Feature(
        "the end user",
        {"user": "u1"},
        {"user": "u1"},
        {"metadata": {"user_id": "u1"}},
        "yes yes yes none",
    ),
    Feature("`metadata`", {"metadata": {"a": "b"}}, {"metadata": {"a": "b"}}, None, "yes none none none"),
    Feature(
        "effort of reasoning",
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        {"output_config": {"effort": "low"}},
        "yes yes yes none",
    ),
    Feature(
        "a budget of thinking",
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        "yes yes yes none",
    ),
    Feature(
        "`verbosity`", {"verbosity": "low"}, {"text": {"verbosity": "low"}}, {"verbosity": "low"}, "yes yes 400 400"
    ),
    Feature(
        "a JSON schema",
        {"response_format": {"type": "json_schema", "json_schema": _FORMAT}},
        {"text": {"format": {"type": "json_schema", **_FORMAT}}},
        {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ),
    Feature(
        "any JSON",
        {"response_format": {"type": "json_object"}},
        {"text": {"format": {"type": "json_object"}}},
        None,
        "yes yes yes yes",
    ),
    Feature("a usual tier", *_same("yes yes yes none", service_tier="default")),
    Feature("a cheaper tier", *_same("yes yes yes yes", service_tier="flex")),
    Feature("a dearer tier", *[Refused({"service_tier": "priority"}, "service_tier")] * 3, "– – – –"),
    Feature("a stream", *_same(stream=True)),
    Feature(
        "log probabilities",
        {"logprobs": True, "top_logprobs": 2},
        {"top_logprobs": 2},
        Refused({"logprobs": True}, "logprobs"),
        "yes yes 400 yes",
    ),
    Feature("several answers", {"n": 2}, Refused({"n": 2}, "n"), Refused({"n": 2}, "n"), "yes yes 400 yes"),
    Feature(
        "a predicted answer",
        *_same("yes yes 400 yes", prediction={"type": "content", "content": "North."}),
    ),
    Feature("a spoken answer", _AUDIO, Refused(_AUDIO, "audio"), Refused(_AUDIO, "audio"), "yes 400 400 400"),
    Feature(
        "a beginning of the answer",
        {"messages": [_ASK, {"role": "assistant", "content": "It is", "prefix": True}]},
        None,
        {"messages": [_ASK, {"role": "assistant", "content": "It is"}]},
    ),
    Feature(
        "marks of a provider's prompt cache",
        Own({"messages": [{"role": "user", "content": [{**_TEXT, **_MARK}]}]}),
        None,
        {"messages": [{"role": "user", "content": [{**_TEXT, **_MARK}]}]},
        "yes yes yes none",
    ),
    Feature(
        "searches of the web",
        *[Refused(one, "tools[0].type") for one in (_SEARCH[0], _SEARCH[0], _SEARCH[1])],
        "– – – –",
    ),
    Feature(
        "calls of MCP servers",
        Refused(_MCP, "tools[0].type"),
        Refused(_MCP, "tools[0].type"),
        Refused({"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "x"}]}, "mcp_servers"),
        "– – – –",
    ),
    Feature("the use of a computer", *[Refused(_COMPUTER, "tools[0].type")] * 3, "– – – –"),
    Feature("namespaces of tools", None, {"tools": [_SPACE]}, None, _NO_CHAT, passed="own"),
    Feature(
        "a shell on the client's machine", None, {"tools": [{"type": "local_shell"}]}, None, _NO_CHAT, passed="own"
    ),
    Feature(
        "encrypted reasoning", None, Idle({"include": ["reasoning.encrypted_content"]}), None, _NO_CHAT, passed="own"
    ),
    Feature("`max_tool_calls`", None, Idle({"max_tool_calls": 3}), None, _NO_CHAT),
    Feature("`truncation`", None, Idle({"truncation": "auto"}), None, _NO_CHAT),
    Feature(
        "a summary of reasoning",
        None,
        Idle({"reasoning": {"summary": "auto", "context": "auto", "mode": "standard"}}),
        None,
        _NO_CHAT,
    ),
    Feature("edits of the context", None, None, Idle({"context_management": {"edits": []}}), _NO_CHAT),
    Feature("thinking as the model sees fit", None, None, Idle({"thinking": {"type": "adaptive"}}), _NO_CHAT),
)
"""The corpus. Each row of the table."""

_CELLS = {"yes": "yes", "none": "no effect", "400": "400", "–": "–", "own": "as it came"}


def table() -> Iterable[str]:
    """The rows of docs/api.md."""
    backends = [*(f"`{name}`" for name in BACKENDS), "with `/responses`"]
    yield f"| feature | chat | responses | messages | {' | '.join(backends)} |"
    yield f"| --- {'| --- ' * (3 + len(backends))}|"
    for one in FEATURES:
        words = [*one.backends.split(), one.passing]
        cells = [*map(_cell, (one.chat, one.responses, one.messages)), *(_CELLS[word] for word in words)]
        yield f"| {one.name} | {' | '.join(cells)} |"


def _cell(said: Said) -> str:
    match said:
        case None:
            return "–"
        case Refused():
            return f"400 `{said.param}`"
        case Own():
            return "yes, apart"
        case Idle():
            return "no effect"
    return "yes"
