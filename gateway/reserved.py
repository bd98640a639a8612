"""The fields and tools of a request that belong to the operator.

Other fields say how a model answers. These choose another model or server, raise a priority, reach
into a server, or let the provider's own tools run. A deployment takes those that its `allow_fields`
names. Knows no deployments. Invariants: a tool is reserved unless it is a function or a custom tool
that the client runs, whatever its name; where a value decides, one of another type is reserved; a
URL that a server would fetch is found in every part of a request, whatever the part's type.

Sources: the request models of vLLM, SGLang, TensorRT-LLM, llama.cpp and litellm; the API references
of OpenAI, Anthropic, Google, OpenRouter, xAI and Alibaba.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

_GROUPS = {
    # who is served first, and at which price
    "priority": "vLLM, SGLang: is computed before the requests of others",
    "service_tier": "another price and priority; `auto`, `default` and `flex` need no permission",
    "use_beam_search num_beams beam_width n_cmpl": "vLLM, TensorRT-LLM, llama.cpp: more answers are computed than `n`",
    "n_predict max_new_tokens": "llama.cpp, TGI: a length beside `max_tokens`, which no budget has held",
    "modalities": "images at the price of text; `text` and `audio`, which needs that capability, need no permission",
    "image_config": "OpenRouter: larger images",
    "deferred": "xAI: an answer that is fetched and billed later",
    # what the provider keeps or shows
    "prompt_cache_retention": "OpenAI: how long the prompt is kept; `in_memory` needs no permission",
    "session_id trace": "OpenRouter: reports to the operator's other services, and requests bound together by a name",
    "debug": "OpenRouter: shows the request that the operator's provider got",
    "return_hidden_states": "SGLang: the inside of the model, a thousand times the answer's size",
    "speed": "Anthropic: faster at a multiple of the price",
    "inference_geo": "Anthropic: another region at another price",
    # which model, at which provider
    "models fallbacks context_window_fallbacks content_policy_fallbacks": "OpenRouter, litellm: other models answer, at "
    "their prices",
    "disable_fallbacks": "litellm: turns off the fallbacks of its operator",
    "route provider providerOptions": "OpenRouter, Vercel: the choice of the provider, at its price",
    "preset": "OpenRouter: a stored model, prompt and settings",
    "plugins": "OpenRouter: web search and file parsing, paid per use",
    "transforms": "OpenRouter: leaves out parts of the prompt",
    "model_list custom_llm_provider deployment_id specific_deployment": "litellm: another model, provider or server",
    "lora lora_path lora_request adapter_id": "SGLang, TensorRT-LLM, TGI, llama.cpp: another adapter",
    # where the request goes, with which credentials
    "api_base base_url": "litellm: another address, which then gets the provider's key",
    "api_key api_version organization azure_ad_token litellm_credential_name": "litellm: other credentials",
    "aws_access_key_id aws_secret_access_key aws_session_token aws_region_name aws_role_name aws_session_name "
    "aws_profile_name aws_web_identity_token aws_sts_endpoint aws_bedrock_runtime_endpoint": "litellm: other "
    "credentials or addresses at AWS",
    "vertex_credentials vertex_project vertex_location region_name": "litellm: other credentials or regions at Google",
    "headers extra_headers extra_query extra_body": "litellm: headers, a query or fields that no check here has read",
    "ssl_verify client http_client": "litellm: another transport",
    # litellm's own controls
    "mock_response mock_tool_calls mock_timeout mock_testing_fallbacks": "litellm: an answer without a model",
    "num_retries max_retries timeout request_timeout stream_timeout": "litellm: its retries and time-outs",
    "guardrails tags user_config router_settings_override": "litellm: its guards and its routing",
    "input_cost_per_token output_cost_per_token": "litellm: the price that it writes down",
    "litellm_params litellm_metadata litellm_session_id litellm_trace_id litellm_call_id litellm_logging_obj "
    "secret_fields proxy_server_request": "litellm: its internal values",
    "caching no-log no_log": "litellm: its cache and its log",
    "drop_params additional_drop_params allowed_openai_params": "litellm: which fields it checks",
    "prompt_id prompt_label prompt_version prompt_variables": "litellm: a prompt stored there",
    # the inside of an inference server
    "cache_salt extra_key": "vLLM, SGLang: the division of its prefix cache, by which one client could learn the prompts "
    "of another",
    "kv_transfer_params disaggregated_params bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key": "vLLM, "
    "SGLang, TensorRT-LLM: the servers and blocks that KV is read from",
    "vllm_xargs custom_params nvext": "vLLM, SGLang, Dynamo: values for the server's plugins",
    "logits_processors custom_logit_processor": "vLLM, SGLang: code that the server runs",
    "chat_template": "vLLM, SGLang: a program that the server runs; also inside `chat_template_kwargs`",
    "data_parallel_rank routed_dp_rank disagg_prefill_dp_rank id_slot slot_id": "vLLM, SGLang, llama.cpp: the rank or "
    "slot that computes it",
    "request_id rid session_params": "vLLM, SGLang: the name of a request or session, which could be another client's",
    # searches that the provider runs
    "web_search_options search_parameters enable_search search_options": "OpenAI, xAI, Alibaba: web searches, paid per "
    "search",
    "mcp_servers": "Anthropic: calls of servers that the client names",
    "container": "Anthropic: a container that runs code, paid by time",
}

FIELDS: Mapping[str, str] = {name: effect for names, effect in _GROUPS.items() for name in names.split()}
"""Each reserved field, with its effect."""

_SEARCH = "searches of the web, paid per search"
_FILES = "searches of stored files, paid per search"
_CODE = "code in the provider's container, paid by time"
_CLIENT = "commands for the client's machine, in the provider's own format"

OTHER_TOOLS = "other_tools"
TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("web_search", "google_search", "google_search_retrieval"), _SEARCH),
    **dict.fromkeys(("enterprise_web_search", "browser_search", "live_search", "google_maps"), _SEARCH),
    **dict.fromkeys(("web_fetch", "url_context", "visit_website"), "pages that the provider fetches"),
    **dict.fromkeys(("file_search", "retrieval"), _FILES),
    **dict.fromkeys(("code_interpreter", "code_execution"), _CODE),
    **dict.fromkeys(("computer", "computer_use", "bash", "shell", "local_shell"), _CLIENT),
    **dict.fromkeys(("text_editor", "apply_patch", "memory"), _CLIENT),
    "mcp": "calls of servers that the client names, with the credentials in the request",
    "image_generation": "images, paid per image",
    OTHER_TOOLS: "tools of any other type",
}
"""Each reserved tool, with its effect. A type's date, `_preview` and capitals are left out."""

SEARCHES = frozenset(name for name, effect in TOOLS.items() if effect == _SEARCH) | {
    "web_search_options", "search_parameters", "enable_search", "search_options",
}  # fmt: skip
"""Those that search the web, at the provider's price of a search."""

_DEARER = (
    "use_beam_search num_beams beam_width n_cmpl n_predict max_new_tokens modalities image_config deferred "
    "service_tier speed inference_geo models fallbacks context_window_fallbacks content_policy_fallbacks route provider "
    "providerOptions preset plugins model_list custom_llm_provider deployment_id specific_deployment mcp_servers container"
)
_ON_CLIENTS = frozenset(name for name, effect in TOOLS.items() if effect == _CLIENT)
PAID = frozenset(_DEARER.split()) | SEARCHES | (frozenset(TOOLS) - _ON_CLIENTS)
"""Those with which a request may cost more than its tokens at the deployment's price."""

CALLS_MAX = 10
"""The most calls of tools that the provider runs in one request, or of one such tool, that a hold foresees."""

_RUN_THERE = PAID - frozenset(_DEARER.split()) | {"plugins", "mcp_servers"}
_LIMITED = re.compile(r"web_(search|fetch)_\d{8}")  # Anthropic's tools that take `max_uses`
_CLIENTS_OWN = frozenset({"function", "custom"})
_RESPONSES_OWN = _CLIENTS_OWN | {"local_shell", "apply_patch", "tool_search"}  # in a request of the Responses API
_FREE = {
    "service_tier": ("auto", "default", "flex"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "modalities": ("text", "audio"),
}
"""The values that need no permission; of `modalities` in a list."""

_NAMES = frozenset(FIELDS) | {"tools", "functions", "chat_template_kwargs"}
_HEADS = _CLIENTS_OWN | {"type", "name"}
_GOOGLES = frozenset(
    {"google_search", "google_search_retrieval", "enterprise_web_search", "google_maps", "url_context"}
)
_GOOGLES |= {"code_execution", "computer_use", "file_search", "web_search", "system_tool"}
# how OpenRouter reads the name of a model (its documentation: "Model Variants", "Presets")
_IN_NAMES = re.compile(r":(?:online|nitro|floor|exacto)(?![\w-])|@preset/", re.IGNORECASE)
_ENDINGS = {":online": "plugins", "@preset/": "preset"}  # the others sort the providers
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_DATE = re.compile(r"(_preview)?(_\d{8}|_\d{4}_\d{2}_\d{2})?$")


class Reserved(msgspec.Struct, frozen=True):
    """One reserved part of a request: its name in `allow_fields`, its path, and its name in a sentence."""

    name: str
    param: str
    subject: str


def reserved_names(body: Mapping[str, Any]) -> frozenset[str]:
    """The names of all reserved fields and tools in a request's `body`."""
    if _NAMES.isdisjoint(body):
        return _NONE
    return frozenset(found.name for found in reserved(body)) or _NONE


_NONE: frozenset[str] = frozenset()


def reserved(body: Mapping[str, Any]) -> list[Reserved]:
    """Each reserved field and tool in a request's `body`, in order. A null counts as absent."""
    parts: list[Reserved] = []
    for name, value in body.items():
        if value is None or name not in _NAMES:
            continue
        if name in ("tools", "functions"):
            parts += _tools(name, value, is_response=_is_response(body))
        elif name == "chat_template_kwargs":
            template = value.get("chat_template") if isinstance(value, dict) else value
            if template is not None:
                place = f"{name}.chat_template" if isinstance(value, dict) else name
                parts.append(Reserved("chat_template", place, f"The field `{place}`"))
        elif name not in _FREE:
            parts.append(Reserved(name, name, f"The field `{name}`"))
        elif isinstance(value, list) != (name == "modalities") or not all(
            one in _FREE[name] for one in (value if isinstance(value, list) else [value])
        ):
            parts.append(Reserved(name, name, f"A `{name}` other than {', '.join(_FREE[name])}"))
    return parts


def may_name_urls(raw: bytes) -> bool:
    """Whether a name in the JSON `raw` may end in `url`, escaped or not."""
    return raw.lower().find(b'url"') >= 0 or raw.find(b"\\u00") >= 0


def foreign_url(body: Mapping[str, Any], hosts: Collection[str]) -> str:
    """The path of the first URL in `body` whose host is not among `hosts`; empty if every host is.

    A host that begins with `*.` stands for all names one level below it.
    """
    left: list[tuple[str, Any, bool]] = [("", body, False)]
    while left:
        path, value, is_url = left.pop()
        if isinstance(value, dict):
            for name, item in value.items():
                if (is_named := name[-3:].lower() == "url") or (type(item) in _HOLDERS and name not in _NOT_FETCHED):
                    left.append((f"{path}.{name}" if path else name, item, is_named))
        elif isinstance(value, list):
            left += [(f"{path}[{n}]", item, is_url) for n, item in enumerate(value) if is_url or type(item) in _HOLDERS]
        elif isinstance(value, str) and not value.startswith("data:"):
            host = found["host"].lower() if (found := _PLAIN_URL.fullmatch(value)) else ""
            if host not in hosts and f"*.{host.partition('.')[2]}" not in hosts:
                return path
    return ""


_HOLDERS = (dict, list)
_NOT_FETCHED = {"tools", "functions", "response_format", "metadata", "tool_calls", "annotations", "citations"}
_NOT_FETCHED |= {"action", "results", "outputs"}  # of calls that the provider made
# no user, backslash or space: whoever reads it, reads the same host
_PLAIN_URL = re.compile(
    r"https?://(?P<host>[a-z0-9-]+(?:\.[a-z0-9-]+)*)(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*)?", re.IGNORECASE
)


def calls_of(body: Mapping[str, Any], names: frozenset[str]) -> int:
    """The most calls of tools that the provider runs for `body`, which has the reserved `names`."""
    if names.isdisjoint(_RUN_THERE):
        return 0
    if _is_response(body):
        return _limited(body.get("max_tool_calls"))
    run, tools = [one for one in reserved(body) if one.name in _RUN_THERE], body.get("tools")
    limited = [tool for tool in tools if _is_limited(tool)] if isinstance(tools, list) else []
    return sum(_limited(tool.get("max_uses")) for tool in limited) + CALLS_MAX * (len(run) - len(limited))


def with_calls_bound(body: dict[str, Any]) -> dict[str, Any]:
    """`body` with limits for the tools that the provider runs, where it takes limits, as `calls_of` counts them."""
    if _is_response(body):
        return {**body, "max_tool_calls": _limited(body.get("max_tool_calls"))}
    tools = body.get("tools")
    if not isinstance(tools, list) or not any(map(_is_limited, tools)):
        return body
    limited = [{**one, "max_uses": _limited(one.get("max_uses"))} if _is_limited(one) else one for one in tools]
    return {**body, "tools": limited}


def _limited(limit: Any) -> int:
    return min(limit, CALLS_MAX) if type(limit) is int and limit > 0 else CALLS_MAX


def _is_limited(tool: Any) -> bool:
    """Whether the provider runs `tool`, and takes a limit of its calls."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind is None or kind in ("function", "custom") or _tool(str(kind), "").name not in _RUN_THERE:
        return False
    return "max_uses" in tool or _LIMITED.fullmatch(str(kind)) is not None


def _is_response(body: Mapping[str, Any]) -> bool:
    """Whether `body` is a request of the Responses API."""
    return "input" in body and body.get("messages") is None


def reserved_in_name(model: str) -> list[Reserved]:
    """Each reserved field that a part of a `model`'s name stands for at OpenRouter."""
    parts = [part.lower() for part in _IN_NAMES.findall(model)]
    return [Reserved(_ENDINGS.get(part, "provider"), "model", f"`{part}` in a model's name") for part in parts]


def canonical(name: str) -> str:
    """The name of a field or of a tool's type as `FIELDS` or `TOOLS` has it; OTHER_TOOLS for an unknown one."""
    if name in FIELDS:
        return name
    snake = _snake(name)
    return snake if snake in TOOLS else OTHER_TOOLS


def is_googles(tool: Mapping[str, Any]) -> bool:
    """Whether `tool` has Google's form: no type, and its only key is its name."""
    return len(tool) == 1 and _HEADS.isdisjoint(tool)


def _tools(field: str, tools: Any, *, is_response: bool) -> list[Reserved]:
    """The reserved tools of `tools` and of its namespaces.

    litellm reads Google's names also in a tool that calls itself a function.
    """
    if not isinstance(tools, list):
        return [Reserved(OTHER_TOOLS, field, f"A `{field}` that is no array")]
    parts: list[Reserved] = []
    client_kinds = _RESPONSES_OWN if is_response else _CLIENTS_OWN
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and is_response:
            parts += _tools(f"{field}[{number}].tools", tool.get("tools") or [], is_response=True)
        elif (
            kind == "shell" and isinstance(tool.get("environment"), dict) and tool["environment"].get("type") != "local"
        ):
            place = f"{field}[{number}].environment"
            parts.append(Reserved("code_execution", place, "An `environment` of a shell other than local"))
        elif kind is not None and not (isinstance(kind, str) and kind in client_kinds):
            parts.append(_tool(str(kind), f"{field}[{number}].type"))
        elif isinstance(tool, dict):
            keys = tool if is_googles(tool) else [key for key in tool if _snake(key) in _GOOGLES]
            parts += [_tool(key, f"{field}[{number}].{key}") for key in keys]
    return parts


def _tool(kind: str, param: str) -> Reserved:
    snake = _snake(kind)
    return Reserved(snake if snake in TOOLS else OTHER_TOOLS, param, f"A tool of type `{kind[:100]}`")


def _snake(name: str) -> str:
    return _DATE.sub("", _CAPITAL.sub("_", name[:100]).lower())
