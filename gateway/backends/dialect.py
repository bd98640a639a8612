"""How a deployment's server is spoken to: a `Dialect`, from one table of providers and models.

It says the name of an answer's length, the fields and roles that the server refuses, its limits of
names and ids, how a model of Anthropic's thinks, and what a provider charges beside the table of
prices. Sources, in this order: the kind of backend, `_RULES` by host and model, the operator's
`dialect`, and what the server's own refusals teach (`Lessons`). Knows no requests, keys or money.
Invariants: no other place knows a provider's name; what cannot be told is spoken as OpenAI
documents it, with the older name of the length, which all its successors read.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

ANTHROPIC_URL = "https://api.anthropic.com"
MAX_TOKENS, MAX_COMPLETION_TOKENS = LENGTHS = ("max_tokens", "max_completion_tokens")
ADDED = ("stream_options",)
"""The fields that the gateway adds to a request beside its length, and may leave out: not a salt."""

_LEARNED_S = 3_600.0
_WITNESSES_MAX = 16
_LESSONS_MAX = 256
_CALLERS_ENOUGH = 2


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The dialect of one server. `origins` says where each field that was set came from.

    `unknown` fields of a request and of its messages are refused by the server. `tool_name` and
    `call_id` are patterns of what it takes, empty without a limit. Of Anthropic's models: `efforts`
    are the levels of `output_config.effort`, none where a budget of tokens says it; `thinking` is
    the usual form of `thinking`; `sampling` says which of temperature and top_p it takes.
    """

    provider: str = ""
    statuses: Mapping[str, int] = {}  # that its own codes of errors stand for
    length: str = MAX_TOKENS
    unknown: frozenset[str] = frozenset()
    unknown_in_messages: frozenset[str] = frozenset()
    has_developer_role: bool = False  # else a developer speaks as the system, as all servers know it
    tool_name: str = ""
    call_id: str = ""
    are_call_ids_unique: bool = False
    efforts: tuple[str, ...] = ()
    thinking: str = "budget"  # budget, adaptive, by_itself (unless it is disabled) or always
    sampling: str = "both"  # both, one, or none
    has_prefill: bool = True
    has_json_mode: bool = True  # else a forced tool without a schema takes its place
    can_force_tools: bool = True
    silence_s: int = 0  # that a model may be silent for while it reasons
    speaks_responses: bool = False
    is_openai_like: bool = False  # litellm passes other fields on to it
    reports_cost: bool = False
    cache_write_factors: tuple[float, float] | None = None  # of the input price: usual life, an hour
    origins: Mapping[str, str] = {}

    def without(self, name: str) -> "Dialect | None":
        """This dialect where the server refuses the gateway's own field `name`; None: no other way
        is left.
        """
        if name == self.length:
            other = MAX_TOKENS if name == MAX_COMPLETION_TOKENS else MAX_COMPLETION_TOKENS
            return msgspec.structs.replace(self, length=other)
        return msgspec.structs.replace(self, unknown=self.unknown | {name}) if name in ADDED else None

    def lines(self) -> list[str]:
        """Each field that is not the default, or that the table names, with its origin, for people."""
        lines = []
        for name in self.__struct_fields__[:-1]:
            value, origin = getattr(self, name), self.origins.get(name, "")
            if origin or name == "length":
                shown = ", ".join(map(str, sorted(value))) if isinstance(value, frozenset) else value
                shown = ", ".join(map(str, value)) if isinstance(value, tuple) else shown
                shown = ", ".join(f"{one} is {value[one]}" for one in value) if isinstance(value, dict) else shown
                lines.append(f"{name}: {shown} ({origin or 'the default: servers know the older name'})")
        return lines


class _Rule(msgspec.Struct, frozen=True):
    """What a documentation `says` of the servers at `hosts` (none: all), for models that `model` finds.

    `kinds` are those of the backend; the first part of a litellm model's name may stand for the host.
    """

    says: Mapping[str, Any]
    source: str
    hosts: tuple[str, ...] = ()
    model: str = ""
    kinds: tuple[str, ...] = ("openai", "litellm")


_OPENAIS_NAMES = {"tool_name": r"[a-zA-Z0-9_-]{1,64}", "call_id": r"(?s).{1,40}"}
_NOT_MISTRALS = """
    stream_options cache_salt seed user store logprobs top_logprobs logit_bias service_tier verbosity modalities audio
    safety_identifier prompt_cache_key prompt_cache_retention web_search_options
"""
_NOT_IN_MISTRALS_MESSAGES = frozenset({"reasoning_content", "reasoning", "refusal", "annotations", "audio"})
# fmt: off
_MINIMAXS_CODES = {400: "1026 1027 2013", 401: "1004", 402: "1008", 429: "1002", 500: "1000 1024 1033", 504: "1001"}
_ZHIPUS_CODES = {
    400: "1210 1212 1213 1214 1215 1261 1301", 401: "1000 1001 1002 1003 1004", 402: "1113",
    403: "1110 1111 1112 1121 1220 1309 1311", 404: "1211 1221 1222", 429: "1302 1303 1304 1305 1308 1310 1312 1313",
    500: "1230 1234", 503: "1120",
}
# fmt: on


def _by_code(codes: Mapping[int, str]) -> dict[str, int]:
    return {code: status for status, some in codes.items() for code in some.split()}


_EFFORTS = ("low", "medium", "high")
_CLAUDE = ("anthropic",)
# As of 2026-11-27; a later rule wins. A source is a page of the provider, or a report with its refusal.
# fmt: off
_RULES = (
    _Rule({"length": MAX_COMPLETION_TOKENS, "silence_s": 600},
          "OpenAI API reference, Create chat completion: not max_tokens for reasoning; github.com/mezmo/aura/issues/62",
          model=r"(?:^|/)(?:o[1-9](?:-|$)|gpt-[5-9])"),
    _Rule({"has_developer_role": True}, "OpenAI API reference, Create chat completion: Developer message; the templates of others "
          "refuse or omit it: github.com/ggml-org/llama.cpp/pull/20215, github.com/sgl-project/sglang/issues/40082",
          model=r"(?:^|/)(?:o[1-9](?:-|$)|gpt-)"),
    _Rule(_OPENAIS_NAMES, "OpenAI API reference, Create chat completion; github.com/agno-agi/agno/issues/5382", kinds=("openai",)),
    _Rule({"provider": "OpenAI", "length": MAX_COMPLETION_TOKENS, "speaks_responses": True, "has_developer_role": True},
          "OpenAI API reference, Create chat completion", ("api.openai.com", "openai.azure.com")),
    _Rule({"provider": "Azure", "length": MAX_COMPLETION_TOKENS},
          "learn.microsoft.com: Azure OpenAI reasoning models, API support", ("services.ai.azure.com",)),
    _Rule({"is_openai_like": True, **_OPENAIS_NAMES}, "litellm: their parameters are OpenAI's", ("openai", "azure", "openrouter")),
    _Rule({"reports_cost": True}, "openrouter.ai/docs: Usage Accounting", ("openrouter", "openrouter.ai")),
    _Rule({"provider": "Mistral", "length": MAX_TOKENS, "call_id": r"[a-zA-Z0-9]{9}",
           "unknown": frozenset(_NOT_MISTRALS.split()), "unknown_in_messages": _NOT_IN_MISTRALS_MESSAGES},
          "docs.mistral.ai/api: Chat Completion; github.com/openai/openai-agents-python/issues/442, "
          "github.com/charmbracelet/crush/issues/1590, github.com/anomalyco/opencode/issues/1680", ("api.mistral.ai",)),
    _Rule({"provider": "DeepSeek", "length": MAX_TOKENS},
          "api-docs.deepseek.com; github.com/theopenco/llmgateway/pull/3462", ("api.deepseek.com",)),
    _Rule({"provider": "Groq", "unknown": frozenset({"logprobs", "logit_bias", "top_logprobs"}),
           "unknown_in_messages": frozenset({"name"})},
          "console.groq.com/docs/openai: Currently Unsupported OpenAI Features", ("api.groq.com",)),
    _Rule({"provider": "Gemini", "tool_name": r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}"},
          "its own refusal: github.com/cline/cline/issues/7339", ("generativelanguage.googleapis.com",)),
    _Rule({"provider": "MiniMax", "statuses": _by_code(_MINIMAXS_CODES)}, "platform.minimaxi.com/docs/api-reference/errorcode",
          ("minimax.io", "minimaxi.com"), kinds=("openai", "anthropic")),
    _Rule({"provider": "Zhipu", "statuses": _by_code(_ZHIPUS_CODES)}, "docs.bigmodel.cn/cn/api/api-code; docs.z.ai/api-reference/api-code",
          ("bigmodel.cn", "z.ai"), kinds=("openai", "anthropic")),
    _Rule({"cache_write_factors": (1.25, 2.0)}, "docs.anthropic.com: Prompt caching, Pricing",
          model="claude", kinds=("openai", "litellm", "anthropic")),
    _Rule({"cache_write_factors": (1.25, 1.25)}, "platform.openai.com: Prompt caching", model="gpt-5-6"),
    _Rule({"provider": "Anthropic", "tool_name": r"[a-zA-Z0-9_-]{1,128}", "call_id": r"[a-zA-Z0-9_-]+",
           "are_call_ids_unique": True, "has_json_mode": False},
          "docs.anthropic.com: Messages; github.com/home-assistant/core/issues/147760", kinds=_CLAUDE),
    _Rule({"sampling": "one"}, "its own refusal: github.com/cloud-apim/otoroshi-llm-extension/issues/140",
          model=r"claude-(?:opus-4-1(?:\D|$)|[a-z]+-4-[5-9])", kinds=_CLAUDE),
    _Rule({"efforts": (*_EFFORTS, "max"), "thinking": "adaptive", "has_prefill": False},
          "platform.claude.com: Migration guide, Claude 4.6; Effort", model=r"claude-[a-z]+-4-6", kinds=_CLAUDE),
    _Rule({"efforts": (*_EFFORTS, "xhigh", "max"), "thinking": "adaptive", "has_prefill": False, "sampling": "none"},
          "platform.claude.com: Migrating to Claude Opus 4.7; Effort",
          model=r"claude-(?:[a-z]+-)?(?:[5-9]|4-[7-9])(?:\D|$)", kinds=_CLAUDE),
    _Rule({"thinking": "by_itself"}, "platform.claude.com: Opus 5 and Sonnet 5 think unless thinking is disabled",
          model=r"claude-[a-z]+-[5-9](?:\D|$)", kinds=_CLAUDE),
    _Rule({"thinking": "always", "can_force_tools": False},
          "platform.claude.com: Claude Opus 5.5 and Sonnet 5.5 migration guides",
          model=r"claude-[a-z]+-5-5(?:\D|$)", kinds=_CLAUDE),
)
# fmt: on


def dialect_of(kind: str, base_url: str, model: str, settings: Mapping[str, Any] | None = None) -> Dialect:
    """The dialect of a deployment whose backend is of the `kind`; `settings` are the operator's."""
    host = urlsplit(base_url).hostname or ("" if kind != "litellm" else model.partition("/")[0])
    fields: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for rule in _RULES:
        at_host = not rule.hosts or any(host == one or host.endswith(f".{one}") for one in rule.hosts)
        if kind in rule.kinds and at_host and re.search(rule.model, model.lower().replace(".", "-")):
            fields |= rule.says
            origins |= dict.fromkeys(rule.says, rule.source)
    if settings:
        fields |= settings
        origins |= dict.fromkeys(settings, "the operator's `dialect`")
    return Dialect(**fields, origins=origins)


class Lessons:
    """What a server's typed refusals of the gateway's own fields taught, for an hour.

    A lesson needs two differing requests, of two callers where the deployment has more than one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.callers: set[str] = set()
        self.witnesses: dict[tuple[str, str], dict[tuple[str, bytes], float]] = {}  # by model and field

    def seen(self, caller: str) -> None:
        """Note that `caller` asks the deployment."""
        if len(self.callers) < _CALLERS_ENOUGH:
            self.callers.add(caller)

    def refused(self, model: str, name: str, caller: str, request: bytes) -> None:
        """Note a refusal of the field `name` in a request of `caller`."""
        if len(self.witnesses) >= _LESSONS_MAX:
            self.witnesses.clear()
        witnesses = self.witnesses.setdefault((model, name), {})
        witnesses.pop((caller, request), None)
        witnesses[caller, request] = self._clock()
        if len(witnesses) > _WITNESSES_MAX:
            del witnesses[next(iter(witnesses))]

    def spoken(self, model: str, dialect: Dialect) -> Dialect:
        """`dialect`, as the refusals of the last hour change it."""
        for (of, name), witnesses in self.witnesses.items():
            if of == model and self._are_enough(witnesses) and (other := dialect.without(name)) is not None:
                origins = {**dialect.origins, "length" if name in LENGTHS else "unknown": "the server's own refusals"}
                dialect = msgspec.structs.replace(other, origins=origins)
        return dialect

    def _are_enough(self, witnesses: Mapping[tuple[str, bytes], float]) -> bool:
        fresh = [one for one, at_s in witnesses.items() if self._clock() < at_s + _LEARNED_S]
        callers, requests = {caller for caller, _ in fresh}, {request for _, request in fresh}
        return len(requests) > 1 and len(callers) >= len(self.callers)
