"""The settings: one YAML file, plus environment variables for secrets and containers.

Each setting is a field with its default and a description; `./run docs` lists them in
docs/configuration.md. Unknown or wrong settings prevent the start: `SettingsError` names each of
them. This module opens and creates nothing.
"""

import base64
import binascii
import difflib
import hashlib
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from cache.decision.pieces import compile_pattern
from cache.query import ERROR_MAX
from gateway.extras import lacks
from gateway.reserved import FIELDS, OTHER_TOOLS, TOOLS, canonical
from policies.verification import Verification, Verify, effective

DEFAULT_ALIAS = "smollm2-135m-instruct"
DEFAULT_EMBEDDER_ALIAS = "all-minilm-l6-v2"
AUTO = "auto"  # the verifier that is the cheapest able deployment of an alias


CAPABILITIES = frozenset(
    {"n", "logprobs", "tools", "json_object", "json_schema", "vision", "audio", "files", "completions", "suffix"}
    | {"reasoning", "prefill", "messages", "cache_control", "embeddings", "rerank", "moderations"}
    | {"responses", "images", "image_edits", "image_variations", "speech", "transcriptions", "translations"}
)


_PASSED = re.compile(r"(GET|POST|DELETE|PUT|PATCH) (/(?!\.{1,2}(/|$))([A-Za-z0-9._~:@=+-]+|\*))+")
_REPORTS_TOKENS = re.compile(r"POST (?:/[^*]*)?/(?:responses|(?:chat/)?completions|embeddings|messages)")
_HEADER = re.compile(r"(?!(?:host|authorization|content-|transfer-|connection))[a-z0-9_-]+", re.I)
_SOURCE = re.compile(r"team|key|user|session|tag:.+")
_URL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def reports_tokens(rule: str) -> bool:
    """Whether answers to a method and path of `passthrough` say what they cost."""
    return _REPORTS_TOKENS.fullmatch(rule) is not None


class SettingsError(Exception):
    """The configuration is invalid; `str()` has one line for each wrong setting.

    `status` is the process's exit status.
    """

    def __init__(self, lines: str, status: int = 2) -> None:
        super().__init__(lines)
        self.status = status


_ADDRESS = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]+@[a-zA-Z0-9.-]+", re.ASCII)
SECRETS = (
    "access_secret",
    "admin_key",
    "alerts_secret",
    "api_key",
    "metrics_key",
    "secret",
)  # only from the environment
_SECRET_CHARS_MIN = 16
_SECRET_VARIETY_MIN = 4


def secret_problem(name: str, value: str) -> str:
    """Why `value` can be guessed or cannot be sent; empty for a good secret. It never shows the value.

    `name` is the setting's. `secret` is never sent: any printable character may be in it.
    """
    is_sendable = value.isascii() and " " not in value
    kind = "printable characters" if name == "secret" else "printable ASCII characters without spaces"
    is_ours = name != "access_secret"
    if is_ours and len(value) < _SECRET_CHARS_MIN:
        trouble = f"{len(value)} character{'' if len(value) == 1 else 's'}"
    elif not value.isprintable() or not (is_sendable or name == "secret"):
        trouble = "another character"
    elif is_ours and len(set(value)) < _SECRET_VARIETY_MIN:
        trouble = f"{len(set(value))} different"
    else:
        return ""
    wanted = f"at least {_SECRET_CHARS_MIN} {kind}, {_SECRET_VARIETY_MIN} of them different"
    if not is_ours:  # of the provider's making: its length is not ours to choose
        return f"found {trouble}, expected printable ASCII characters without spaces, as the provider made it"
    return f"found {trouble}, expected {wanted}; `openssl rand -hex 24` makes some"


def refuse_settings(wrong: list[str], weak: list[str]) -> None:
    """Raise SettingsError if a line is given; with status 78 (EX_CONFIG) for a line of `weak`."""
    if wrong or weak:
        raise SettingsError("\n".join([*wrong, *weak]), os.EX_CONFIG if weak else 2)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ValueError("\n".join(wrong))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about the unknown `name`: it suggests the nearest one of `known`, if one is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = bool((parts.hostname or "").encode("idna"))  # raises for what can't be a name
        return parts.scheme in ("http", "https") and has_host and parts.port != 0
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        return False


def is_loopback(host: str) -> bool:
    """Whether a host's name or address leads to this machine."""
    try:
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _has_good_hosts(url: str) -> bool:
    """Whether each `host:port` of a URL can exist. A URL may list several.

    A password may contain any character but `@`, as SQLAlchemy reads it.
    """
    nodes, *_ = re.split("[/?#]", url.partition("://")[2].rpartition("@")[2], maxsplit=1)
    try:
        return all(urlsplit(f"//{node}").port != 0 for node in nodes.split(","))
    except ValueError:
        return False


def _checked_url(url: str | None, known: tuple[str, ...]) -> str | None:
    """The URL. Raises ValueError if it begins with none of `known`, or has a host that cannot be."""
    if url is not None and not url.startswith(known):
        # the value may hold a password: only its scheme is shown
        raise ValueError(
            f"found {url.partition('://')[0]!r}, expected a URL that begins with one of {', '.join(known)}"
        )
    if url is not None and not _has_good_hosts(url):
        raise ValueError("found a host or port that can't be one, expected host:port, with a port from 1 to 65535")
    return url


def is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


class PriceSettings(_Section):
    input_usd_per_mtok: float = Field(0.0, ge=0)
    """USD for a million prompt tokens"""
    output_usd_per_mtok: float = Field(0.0, ge=0)
    """USD for a million generated tokens"""
    cached_input_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million prompt tokens that the provider had cached; default: the input price"""
    cache_write_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million prompt tokens that the provider wrote to its cache; default: as its table
    or its documentation says by the model's name, else the input price"""
    cache_write_1h_usd_per_mtok: float | None = Field(None, ge=0)
    """the same for a cache that lasts an hour"""
    audio_input_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million prompt tokens of sounds; default: the input price"""
    cached_audio_input_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million prompt tokens of sounds that the provider had cached; default: the dearer
    one of cached tokens and of sounds"""
    image_input_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million prompt tokens of images; default: the input price"""
    reasoning_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million reasoning tokens; default: the output price"""
    audio_output_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million generated tokens of sounds; default: the output price"""
    image_output_usd_per_mtok: float | None = Field(None, ge=0)
    """USD for a million generated tokens of images; default: the output price"""
    tool_call_usd: float | None = Field(None, ge=0)
    """USD for each call of a tool that the provider runs, such as a web search"""
    request_usd: float = Field(0.0, ge=0)
    """USD for each request, in addition to its tokens"""
    image_usd: dict[str, Annotated[float, Field(ge=0)]] = {}
    """USD for an image whose answer reports no priced tokens, by `quality/size`, size or quality,
    such as `hd/1024x1024`; `default`: any other; of a size `auto` the dearest"""
    characters_usd_per_m: float | None = Field(None, ge=0)
    """USD for a million characters of speech, where its answer reports no priced tokens"""
    audio_minute_usd: float | None = Field(None, ge=0)
    """USD for a minute of sound that is written down, where its answer reports no priced tokens"""
    batch_factor: float = Field(1.0, gt=0, le=1)
    """the share of the price that a line of a batch costs here, such as 0.5"""
    factors: dict[str, Annotated[float, Field(ge=1)]] = {}
    """how many times dearer a request is with one of the deployment's `allow_fields`, by its name,
    such as `service_tier: 2`"""


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):  # a key that is put here by mistake is shown nowhere
        raise ValueError("expected the name of an environment variable, such as OPENAI_API_KEY")
    return name


Variable = Annotated[str, AfterValidator(_variable)]

_LIKE_A_NAME = re.compile(r"[A-Z][A-Z0-9]{0,15}(_[A-Z0-9]{1,15})+")


def shown_variable(name: str, environ: Mapping[str, str]) -> str:
    """A variable's name for people. One that is not set may be a key that was put in its place: it is
    shown only where it is made of words in capitals.
    """
    return name if name in environ or _LIKE_A_NAME.fullmatch(name) else "(not shown: it may be a key)"


class ApiKeySettings(_Section):
    env: Variable | None = None
    """the environment variable that holds the key"""
    file: Path | None = None
    """or the file that holds it, read again when it changes"""
    weight: int = Field(1, ge=1, le=1_000)
    """its part of the requests, beside the other keys'"""

    @model_validator(mode="after")
    def _is_somewhere(self) -> "ApiKeySettings":
        if (self.env is None) == (self.file is None):
            raise ValueError("expected one of `env` and `file`")
        return self


class DialectSettings(_Section):
    length: Literal["max_tokens", "max_completion_tokens"] | None = None
    """the field that bounds a chat's answer; default: by the provider and the model, else
    `max_tokens`; a server that refuses the one is asked with the other"""
    unknown: list[str] | None = None
    """fields of a chat that the server refuses: left out where they change no answer, else the
    request goes to another deployment"""
    tool_name: str | None = None
    """a regular expression of the names of tools that it takes; others are replaced, and come back
    as they were"""
    call_id: str | None = None
    """the same for ids of calls"""
    statuses: dict[str, Annotated[int, Field(ge=400, le=599)]] | None = None
    """the HTTP statuses that its own codes of errors stand for, such as `1113: 402`"""
    has_developer_role: bool | None = None
    """whether it knows messages of the role `developer`; else they are sent as `system`; default: OpenAI's servers and
    models know it"""

    @field_validator("tool_name", "call_id")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        """Raises ValueError for a pattern that cannot be used."""
        if pattern is not None:
            compile_pattern(pattern)
        return pattern

    def fields(self) -> dict[str, Any]:
        """The fields that are set, as the dialect has them."""
        named = {name: value for name, value in self if value is not None}
        return named | ({"unknown": frozenset(self.unknown)} if self.unknown is not None else {})


class DeploymentSettings(_Section):
    name: str | None = Field(None, pattern=r"^[ -~]{1,100}$")
    """shown in logs, metrics and routes; default: made of backend and model"""
    backend: Literal["local", "openai", "anthropic", "litellm"]
    """`local`: an engine below; `openai`: any OpenAI-compatible server; `anthropic`: Anthropic's
    API, or a server that speaks it; `litellm`: a managed provider through litellm"""
    engine: str | None = None
    """local: the name of an entry of `engines`"""
    model: str | None = None
    """all but local: the provider's name of the model; `*` in it is the requested name, for an
    alias that ends in `*`"""
    base_url: str | None = None
    """openai: the server's base URL, usually ending in /v1; anthropic: default Anthropic's own; both:
    `http://unix:/run/server.sock:/v1` for a server on a unix socket"""
    replicas: list[str] = []
    """openai, in place of `base_url`: the base URLs of equal servers of one model; a request goes to
    the one with its prefix and with the least to do before it (see [above](#replicas));
    `file:///path` has one in each line, and `dns://name:8000/v1` is one for each address of the name:
    both are read again every 5 s"""
    api_key_env: Variable | None = None
    """the environment variable that holds the provider's key"""
    api_key_file: Path | None = None
    """or the file that holds it, read again when it changes, as Vault's agents and Kubernetes write it"""
    api_keys: list[ApiKeySettings] = Field([], max_length=100)
    """or several keys, which take turns by their weights; one that the provider refuses (401, 403)
    rests alone for a minute, and the request goes on with the next"""
    headers: dict[str, str] = {}
    """openai, anthropic: further headers sent with each request"""
    price: PriceSettings | None = None
    """default: the packaged table by model name; 0 for local engines"""
    capabilities: list[str] | None = None
    """what the model can do (tools, json_object, json_schema, logprobs, n, vision, audio, files,
    completions, suffix, reasoning, embeddings, rerank, moderations, images, image_edits,
    image_variations, speech, transcriptions, translations, prefill, cache_control); default: by
    backend; `reasoning` ranks it first where a request sets `reasoning_effort`, and is needed by
    none; never assumed of a server: `prefill`, it goes on with a last message of the assistant, and
    `cache_control`, it takes marks of a prompt's cache; `messages`, which anthropic has by itself:
    it takes requests as Anthropic's clients write them; and `responses`, which OpenAI's and Azure's
    own addresses have: it is asked at /responses for what no chat completion can say"""
    allow_fields: list[str] = []
    """reserved fields and tools that clients may send to it (see
    [below](#reserved-fields-and-tools))"""
    image_hosts: list[str] | None = None
    """hosts that URLs of images, sounds and files in a request may name, `*.example.com` for those
    one level below it; the server fetches them from inside its network; default: none where
    `base_url` is a private address or a name without a public domain, else all; `data:` URLs always
    pass"""
    passthrough: list[str] = []
    """openai, anthropic: methods and paths below `base_url` that clients may send under
    /passthrough/{name}/, such as `GET /vector_stores/*`, where `*` is an id that the provider gave
    to the team; a path that reports no tokens needs `price.request_usd`; default: none"""
    dialect: DialectSettings | None = None
    """how its server differs from what its provider and its model are known for; `sameway
    check-config --explain` shows what is known"""
    is_traced: bool = True
    """all but local: send it the headers `traceparent`, `tracestate` and `baggage` of a request, so
    that its spans belong to the client's trace"""
    identity_headers: dict[str, str] = {}
    """openai, anthropic: headers that tell an inference gateway in front of the servers whose a request
    is, each with the source of its value: `team` or `key` (an id), `user`, `session`
    (as budgets know it, else a digest of the dialogue's first turn), or `tag:NAME`, a tag of the
    request; such as `x-llm-d-inference-fairness-id: team`"""
    is_salted: bool = False
    """openai: send `cache_salt`, another one for each team, to a server that knows it (vLLM,
    SGLang), so that no team can learn from its prefix cache what another one asked"""
    region: str = Field("", max_length=64)
    """where it computes, such as `eu-west-1`: a column of its rows in the ledger, and of sums; a team's
    `regions` allow or forbid it, see [governance.md](governance.md)"""
    retention_days: int | None = Field(None, ge=0)
    """days for which its provider keeps requests and answers, by your contract; 0: it keeps none;
    default: unknown, which no team's `retention_days_max` allows"""
    context_tokens_max: int | None = Field(None, gt=0)
    """prompt and answer together; default: known for local engines"""
    output_tokens_max: int | None = Field(None, gt=0)
    """the longest answer; used for the worst case that budgets reserve"""
    connect_timeout_ms: int = Field(3_000, gt=0)
    """openai, anthropic: time to connect before the next deployment is tried"""
    ttft_timeout_ms: int | None = Field(None, gt=0)
    """time to the first chunk before the next deployment is tried; default: learned, 5 s to 60 s;
    until then about 10 s where another deployment can answer; of OpenAI's reasoning models, which are
    silent while they reason, 60 s there, and 600 s of a deployment alone"""
    whole_timeout_ms: int = Field(600_000, gt=0)
    """time to an answer that comes in one piece, which has no first chunk, before the next
    deployment is tried: of a request without `stream` to an alias of one deployment, and of
    `embeddings`, `images` and the like"""
    idle_timeout_ms: int = Field(60_000, gt=0)
    """longest silence inside a stream before it counts as broken; default of OpenAI's reasoning
    models: 600 s"""
    concurrency_max: int | None = Field(None, gt=0)
    """requests that run at this deployment, or at each of its replicas, at once, over all workers and
    hosts; default: 1,000 in each worker"""
    queue_max: int = Field(1_000, ge=0)
    """requests that wait, per worker, for one of these places if no other deployment has one;
    further ones get 503 `deployment_full`"""
    priority: int = 0
    """breaks ties in routing; higher is preferred"""

    @model_validator(mode="after")
    def _belongs_together(self) -> "DeploymentSettings":
        wrong: list[str] = []
        if self.backend == "local" and not self.engine:
            wrong.append("a local deployment needs `engine`")
        if self.backend == "openai" and not ((self.base_url or self.replicas) and self.model):
            wrong.append("an openai deployment needs `base_url` and `model`, or `replicas` and `model`")
        if sum(map(bool, (self.api_key_env, self.api_key_file, self.api_keys))) > 1:
            wrong.append("expected one of `api_key_env`, `api_key_file` and `api_keys`")
        wrong += self._wrong_replicas()
        wrong += [
            f"identity_headers: found {name!r} from {source!r}, expected a header's name and `team`, `key`, `user`, `session` or `tag:NAME`"
            for name, source in self.identity_headers.items()
            if not (_HEADER.fullmatch(name) and _SOURCE.fullmatch(source))
        ]
        if self.base_url is not None and not is_http_url(self.base_url):
            wrong.append(f"base_url: found {self.base_url!r}, expected http://... or https://...")
        if self.backend == "litellm" and "//unix:/" in (self.base_url or ""):
            wrong.append("base_url: only openai and anthropic deployments reach a unix socket")
        if self.backend in ("anthropic", "litellm") and not self.model:
            wrong.append(f"{'an' if self.backend == 'anthropic' else 'a'} {self.backend} deployment needs `model`")
        if self.passthrough and (
            self.backend not in ("openai", "anthropic")
            or "*" in (self.model or "")
            or not _URL_NAME.fullmatch(self.name or "")
        ):
            wrong.append(
                "passthrough: it needs `backend: openai` or `anthropic`, one `model`, and a `name` of letters, digits and - . _ alone"
            )
        wrong += [
            f"passthrough: found {rule!r}, expected a method and a path such as `GET /files/*`"
            for rule in self.passthrough
            if not _PASSED.fullmatch(rule) or rule.endswith("/batches")  # the lines of a file can't be checked
        ]
        has_price = self.price is not None and "request_usd" in self.price.model_fields_set
        wrong += [
            f"passthrough: `{rule}` reports no tokens to charge, expected `price.request_usd` (0 where it is free)"
            for rule in self.passthrough
            if not (has_price or rule.startswith(("GET ", "DELETE ")) or reports_tokens(rule))
        ]
        if self.is_salted and self.backend != "openai":
            wrong.append("is_salted: only an openai deployment can send `cache_salt`; for vLLM use `backend: openai`")
        for name in self.allow_fields:
            if canonical(name) == OTHER_TOOLS != name:
                hint = did_you_mean(name, (*FIELDS, *TOOLS)) or f"; `{OTHER_TOOLS}` allows tools of every other type"
                wrong.append(f"allow_fields: found {name!r}, expected a reserved field or tool{hint}")
        _refuse(wrong)
        return self

    def _wrong_replicas(self) -> list[str]:
        wrong = [
            f"replicas: found {url!r}, expected http(s)://host/v1, file:///path, or dns://name:port/v1"
            for url in self.replicas
            if not (is_http_url(url) or re.match(r"file:///.|dns://[^/?#]", url))
        ]
        if self.replicas and (self.backend != "openai" or self.base_url or self.passthrough):
            wrong.append("replicas: only an openai deployment without `base_url` and `passthrough` can have some")
        return wrong


class ModelSettings(_Section):
    deployments: list[DeploymentSettings] = Field(min_length=1)
    """the places that can answer this alias"""
    policy: Literal["cheapest", "fastest", "balanced"] = "balanced"
    """how deployments are ranked"""
    ttft_ms_max: float | None = Field(None, gt=0)
    """never use a deployment expected to take longer to its first chunk"""
    cost_microusd_max: int | None = Field(None, ge=0)
    """never use a deployment expected to cost more for a request"""
    fallbacks: list[str] = []
    """other aliases that answer, in this order, when this one is down, too small or too dear for a
    request"""
    retry_first_ms: int = Field(0, ge=0)
    """the first choice that fails before its answer is asked again, twice at most, if its pauses
    take no longer; default: the next deployment is asked at once"""
    hedge_cost_max: float = Field(0.0, ge=0, le=1)
    """asks a second deployment where the first is slower to its first token than 95% of its calls,
    and takes the quicker answer: the share of the alias's spend that this may cost, such as 0.05;
    0: never"""
    rescue: Literal["continue", "error"] = "continue"
    """a stream that breaks off: another deployment with `prefill` goes on with it, or it ends with
    the error"""
    baseline: str | None = None
    """the deployment whose list price savings are measured against; default: the one with the
    highest `priority`, of equals the first"""
    is_semantic: bool = True
    """semantic hits for this alias"""
    semantic_error_max: float | None = Field(None, ge=0, le=1)
    """tighter than `cache.error_max`, for this alias"""
    ttl_s: int | None = Field(None, gt=0)
    """in place of `cache.ttl_s`, for this alias"""
    stale_s: int | None = Field(None, ge=0)
    """in place of `cache.stale_s`, for this alias"""
    guard: str | None = None
    """the one of `guards` that sees this alias's requests first; its fallbacks need the same"""
    verifier: str | None = None
    """the verifier of this alias's answers; default: `cache.verifier`"""
    verify: Verify | None = None
    """in place of `cache.verify`; of the team's and this the stricter holds"""
    mask: bool = False
    """mask what `mask` names in this alias's requests, and in those of the aliases that have it as a
    fallback; needs the extra `masking`"""
    output_tokens_default: int | None = Field(None, gt=0)
    """answer length budgets assume where a request sets none; default: the deployment's maximum,
    else 4096"""


class EngineSettings(_Section):
    model: str = "default"
    """`default`, a GGUF file, a checkpoint folder or a hub name"""
    draft_model: str | None = None
    """smaller model for speculative decoding, same tokenizer"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model runs"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """the weights' precision"""
    weights: Literal["auto", "int8", "int4", "fp8"] = "auto"
    """as the checkpoint has them; int8, int4 and fp8 (GPU) quantise while loading"""
    threads: int | None = Field(None, gt=0)
    """CPU threads; default: the machine's cores"""
    context_tokens_max: int | None = Field(None, gt=0)
    """default: the model's own"""
    kv_size_mb: int | None = Field(None, gt=0)
    """memory for the KV cache; default: by what is free"""
    output_tokens_default: int = Field(512, gt=0)
    """the answer's length when the request sets none"""
    queue_max: int = Field(256, gt=0)
    """requests waiting before further ones are refused"""


class CacheSettings(_Section):
    is_exact: bool = True
    """the exact cache; without it, answers are found by meaning alone"""
    is_semantic: bool = True
    """the semantic cache; without both, no answer is stored"""
    key_fields: list[Literal["safety_identifier", "user"]] = []
    """`safety_identifier`, `user`: a request with another value never gets the same answer; of a
    person with a token both are the person"""
    ttl_s: int = Field(86_400, gt=0)
    """how long an answer is served; requests may ask for less or more, up to ttl_s_max"""
    ttl_s_max: int = Field(30 * 86_400, gt=0)
    """the longest time to live a request may ask for, and the longest with `stale_s`"""
    stale_s: int = Field(0, ge=0)
    """how long after `ttl_s` the same request still gets the answer while a newer one is made, at the
    expense of its team: once over all workers; 0: it waits for the newer one"""
    moving_ttl_s: int = Field(60, ge=0)
    """the longest time that an answer is served which depends on the moment; 0: it is not stored"""
    size_bytes_max: int = Field(256 << 20, gt=0)
    """cached bytes per team; answers that were worth least lately are evicted"""
    entry_bytes_max: int = Field(4 << 20, gt=0)
    """a longer answer is not cached"""
    l1_bytes_max: int = Field(8 << 20, ge=0)
    """bytes of answers each gateway worker keeps in its own memory"""
    error_max: float = Field(ERROR_MAX, ge=0, le=1)
    """largest share of requests with a wrong semantic hit"""
    check_share: float = Field(0.03, ge=0, le=1)
    """share of semantic hits that are checked: a fresh answer is generated beside the one that is
    served; more of a namespace's first thousand; 0: none"""
    verifier: str | None = None
    """alias of the model that is asked whether a stored answer is right for a request in other
    words; `auto`: the cheapest able deployment of each answer's own alias"""
    verify: Verify | None = None
    """`before`: the verifier is asked before an answer that is not certain is served; `after`:
    after a miss, to learn; `observe`: nothing found by meaning is served, and the dashboard shows
    what would be; `off`: never; default: `before` with a verifier"""
    verify_ms: int = Field(1_500, gt=0)
    """without the verifier's word by then, the answer is generated"""
    verify_share: float = Field(0.05, ge=0, le=1)
    """the most that questions may cost, as a share of what requests would cost uncached"""
    judge_error_max: float = Field(0.0, ge=0, lt=0.5)
    """share of the judges' verdicts that may be wrong; the measured error allows for it"""
    feedback_ttl_s: int = Field(3_600, gt=0)
    """how long a semantic hit can be reported at /v1/feedback"""
    semantic_timeout_ms: int = Field(1_000, gt=0)
    """a semantic lookup that takes longer is a miss"""
    volatile: list[str] = Field([], max_length=20)
    """regular expressions: what they match in a system prompt is left out before prompts are
    compared, like a date"""
    embedder: str = "default"
    """a sentence-transformers model by name or path; `default` is the packaged all-MiniLM-L6-v2"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the embedder and the index run"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the embedder on CPUs; `auto`: bfloat16 where the processor has it; alike on hosts that
    share a Redis"""
    threads: int | None = Field(None, gt=0)
    """CPU threads of the embedder; default: two, or one on one core"""
    index_url: str | None = None
    """a server that keeps the vectors of all hosts: `redis://` with the query engine, or
    `postgresql://` with pgvector 0.8 or newer; default: each host keeps them all itself"""

    @field_validator("index_url")
    @classmethod
    def _is_an_engine(cls, url: str | None) -> str | None:
        return _checked_url(url, _URLS["redis_url"][:5] + _URLS["database_url"][2:])

    @field_validator("volatile")
    @classmethod
    def _is_bounded(cls, patterns: list[str]) -> list[str]:
        """Raises ValueError for a pattern that cannot be used."""
        for pattern in patterns:
            compile_pattern(pattern)
        return patterns


class BudgetSettings(_Section):
    on_redis_failure: Literal["refuse", "allow"] = "refuse"
    """teams with a hard budget while Redis, which holds the budgets, is away"""
    redis_wait_s: float = Field(5, ge=0, le=60)
    """seconds from when Redis went away until such a team is refused: its requests wait, as a
    fail-over ends within it"""
    hold_lease_s: int = Field(60, ge=5)
    """seconds until the reservations of a dead worker are released"""


class LoopSettings(_Section):
    action: Literal["mark", "refuse"] = "mark"
    """what becomes of a request that is part of a loop: `mark` names it in the log, the metrics and
    the dashboard, `refuse` answers 400 as well"""
    tool_calls_max: int = Field(4, ge=0, le=100)
    """more calls in a row than this of the same tools, with the same arguments and results, at a
    request's end are a loop; 0: they are not looked for"""
    requests_per_min_max: int = Field(10, ge=0, le=10_000)
    """more equal requests of one session than this within a minute are a loop, counted by each
    worker; 0: they are not counted"""


_KIND = re.compile(r"[A-Z][A-Z0-9]{0,19}")
_OWN_KINDS = frozenset({"CARD", "EMAIL", "IBAN", "PHONE", "KEY", "ID", "NUMBER", "DIGITS", "LITERAL"})


class MaskSettings(_Section):
    teams: list[str] = []
    """teams, by name, whose requests are masked whatever they ask for; see also `mask` of a model
    (needs the extra `masking`)"""
    kinds: list[Literal["cards", "emails", "ibans", "keys", "phones"]] = ["cards", "emails", "ibans", "keys", "phones"]
    """what is masked: `cards` with a right check digit (Luhn), `emails`, `ibans` with a right check
    (mod 97), `keys` and tokens by their prefixes, `phones` that can exist"""
    regions: list[Annotated[str, Field(pattern=r"^[A-Z]{2}$")]] = Field([], max_length=10)
    """countries, such as DE, whose phone numbers are found without `+` and country code"""
    ids: list[Annotated[str, Field(pattern=r"^[a-z]{2}\.[a-z0-9_]+$")]] = Field([], max_length=20)
    """national ids whose check digits are right, by python-stdnum's names, such as `es.dni`,
    `de.idnr`, `nl.bsn`"""
    patterns: dict[str, Annotated[str, Field(min_length=1, max_length=1_000)]] = {}
    """your own patterns in RE2's syntax, by the kind that their placeholders show, such as
    `ORDER: "ORD-[0-9]{8}"`"""
    lists: dict[str, Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]] = {}
    """lists of words and names, by their kind, such as `CUSTOMER: [Acme, Globex]`; whole words, in any
    case"""

    @model_validator(mode="after")
    def _is_usable(self) -> "MaskSettings":
        """Raises ValueError for a kind, an id or a pattern that cannot be used."""
        names = [*self.patterns, *self.lists]
        wrong = [
            f"found the kind {name!r}, expected up to 20 capitals and digits, and none of {sorted(_OWN_KINDS)}"
            for name in names
            if not _KIND.fullmatch(name) or name in _OWN_KINDS
        ]
        wrong += [f"found {name!r} among `patterns` and among `lists`" for name in self.patterns.keys() & self.lists]
        if self.patterns or self.ids:
            wrong += _unusable(self.patterns, self.ids)
        _refuse(wrong)
        return self


def _unusable(patterns: Mapping[str, str], ids: Iterable[str]) -> list[str]:
    """What is wrong with patterns, by their kinds, and with names of national ids."""
    if remedy := lacks("masking"):
        return [f"found `patterns` or `ids` without their libraries: {remedy}"]
    import re2  # an extra
    import stdnum

    wrong, options = [], re2.Options()
    options.log_errors = False
    for kind, source in patterns.items():
        try:
            if re2.compile(source, options).search("") is not None:
                wrong.append(f"patterns.{kind}: it matches an empty text, expected a pattern of one character or more")
        except re2.error as error:
            wrong.append(f"patterns.{kind}: {error.args[0].decode()}, expected RE2's syntax, which takes linear time")
    wrong += [f"ids: python-stdnum has no {name!r}" for name in ids if stdnum.get_cc_module(*name.split(".")) is None]
    return wrong


class GuardSettings(_Section):
    url: str
    """your service that sees the texts first: http(s)://..., which speaks LiteLLM's generic guardrail
    API; see [governance.md](governance.md)"""
    teams: list[str] = []
    """names of the teams whose requests it sees, `*` for all; an alias names it in `guard`"""
    is_after: bool = False
    """it sees answers, too, also those from the cache; a stream waits for its verdict on the whole"""
    fail: Literal["closed", "open"] = "closed"
    """what becomes of a request or an answer without a verdict: `closed` refuses it with 503, `open`
    lets it pass"""
    timeout_ms: int = Field(2_000, gt=0, le=60_000)
    """time to its verdict"""
    version: str = Field("", max_length=100)
    """another version, as another `url`, divides the cache if the guard `is_after`: no answer that an
    earlier one saw is served"""
    secret_env: str | None = None
    """environment variable with the secret that signs what it is sent (Standard Webhooks)"""
    headers: dict[str, str] = {}
    """further headers that it is sent"""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not is_http_url(url):
            raise ValueError("expected http://... or https://...")
        return url


class AlertSettings(_Section):
    thresholds: list[Annotated[int, Field(ge=1, le=1_000)]] = Field([50, 80, 100], max_length=10)
    """percent of a budget's limit that raise an alert, once a window each"""
    is_projected: bool = True
    """alert, once a window, where a budget is used up before the window's end at its pace"""
    webhook_url: str | None = None
    """where alerts are sent, signed with SAMEWAY_ALERTS_SECRET: https://, or http:// on this host;
    default: the log only"""
    is_http_allowed: bool = False
    """allow a `webhook_url` with http:// on another host"""
    smtp_host: str | None = None
    """the server that takes alerts as e-mail; default: none are sent"""
    smtp_port: int | None = Field(None, ge=1, le=65_535)
    """default: 587, with `tls` 465, with `none` 25"""
    smtp_tls: Literal["starttls", "tls", "none"] = "starttls"
    """how the connection is encrypted; the server's certificate is checked. `none`: not, for relays
    without login"""
    smtp_user: str | None = None
    """the name to log in with; default: no login"""
    smtp_password_env: Variable | None = None
    """the environment variable that holds its password"""
    smtp_password_file: Path | None = None
    """or the file that holds it, read for each e-mail"""
    mail_from: str | None = None
    """the sender's address"""
    mail_to: list[str] = Field([], max_length=20)
    """the recipients' addresses"""

    @model_validator(mode="after")
    def _can_be_sent(self) -> "AlertSettings":
        wrong = [
            f"found the address {one!r}, expected one like ops@example.com"
            for one in (*self.mail_to, *filter(None, [self.mail_from]))
            if not _ADDRESS.fullmatch(one)
        ]
        given = {"smtp_host": self.smtp_host, "mail_from": self.mail_from, "mail_to": self.mail_to}
        if any(given.values()) and not all(given.values()):
            wrong.append(
                f"found no {', '.join(name for name, value in given.items() if not value)}: e-mail needs all three"
            )
        if (self.smtp_user is None) != (self.smtp_password_env is None and self.smtp_password_file is None):
            wrong.append("expected `smtp_user` with one of `smtp_password_env` and `smtp_password_file`")
        if self.smtp_tls == "none" and self.smtp_user is not None and not is_loopback(self.smtp_host or ""):
            wrong.append(
                "found a password for a connection without TLS to another host, expected `smtp_tls` starttls or tls"
            )
        _refuse(wrong)
        return self


def _place(url: str) -> str:
    """Check the URL of a folder or a bucket, and return it. Raises ValueError."""
    parts = urlsplit(url)
    if not (parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")) and not (
        parts.scheme == "s3" and parts.netloc and not parts.username
    ):
        raise ValueError(f"found {url!r}, expected file:///FOLDER or s3://BUCKET/PREFIX")
    if parts.scheme == "s3" and (remedy := lacks("s3")):
        raise ValueError(f"found s3:// without the library for it: {remedy}")
    return url


class BatchSettings(_Section):
    files_url: str | None = None
    """where files are kept, shared by the hosts of one database and by no others:
    file:///FOLDER or s3://BUCKET/PREFIX (needs the extra `s3`); default: `files` in data_dir"""
    file_bytes_max: int = Field(200 << 20, gt=0)
    """a larger file is refused with 413"""
    team_bytes_max: int = Field(5 << 30, gt=0)
    """bytes of all files of a team"""
    team_files_max: int = Field(1_000, gt=0)
    """files of a team"""
    kept_days: int = Field(30, ge=1, le=3_650)
    """days that a file is kept unless its upload says `expires_after`"""
    lines_max: int = Field(50_000, gt=0, le=1_000_000)
    """a batch of more lines fails"""
    line_bytes_max: int = Field(1_000_000, gt=0)
    """a longer line of a batch is an error"""
    active_max: int = Field(100, gt=0)
    """batches of a team that have not ended"""
    concurrency: int = Field(8, ge=0, le=1_000)
    """lines that a worker runs at once, a quarter beside other requests; 0: none"""

    @field_validator("files_url")
    @classmethod
    def _is_a_place(cls, url: str | None) -> str | None:
        return None if url is None else _place(url)


class LedgerSettings(_Section):
    kept_days: int | None = Field(None, ge=32, le=36_500)
    """days that a row of the ledger is kept at least: a month is removed whole once it ended so long
    ago, and its sums stay; absent: for ever"""
    files_url: str | None = None
    """where each hour of the ledger is written as Parquet: file:///FOLDER or s3://BUCKET/PREFIX
    (needs the extra `parquet`, and `s3`); absent: nowhere"""

    @field_validator("files_url")
    @classmethod
    def _is_a_place(cls, url: str | None) -> str | None:
        if url is not None and (remedy := lacks("parquet")):
            raise ValueError(f"found a place without the library for its files: {remedy}")
        return None if url is None else _place(url)


class SavingsSettings(_Section):
    running_usd_per_month: float = Field(0.0, ge=0)
    """USD that running Sameway itself costs in a calendar month: machines, storage, people; the page
    Savings takes it off"""
    target_usd_per_month: float | None = Field(None, gt=0)
    """USD that Sameway is to save in a calendar month, after what running it costs; the page Savings
    says whether it was met; absent: there is no target"""


class TraceSettings(_Section):
    endpoint: str | None = None
    """the URL that takes traces by OTLP over HTTP, such as http://localhost:4318/v1/traces (needs
    the extra `otel`); its headers come from OTEL_EXPORTER_OTLP_HEADERS; absent: none are made"""
    sample: float = Field(1.0, ge=0, le=1)
    """the share of traces that is sent of requests that came without one; a client's `traceparent`
    decides for its own"""
    slow_ms: int = Field(10_000, ge=1)
    """a request that took so long is sent whatever the sample, as is one that failed"""

    @field_validator("endpoint")
    @classmethod
    def _can_be_sent(cls, url: str | None) -> str | None:
        if url is not None and not (is_http_url(url) and urlsplit(url).username is None):
            raise ValueError(f"found {url.partition('://')[0][:20]!r}, expected https://HOST/PATH without credentials")
        if url is not None and (remedy := lacks("otel")):
            raise ValueError(f"found a URL without the library for it: {remedy}")
        return url


class ResponseSettings(_Section):
    store: bool = True
    """keep what /v1/responses answers, with its input, unless the request has `store: false`"""
    retention_s: int = Field(30 * 86_400, ge=1)
    """seconds until a kept response is deleted"""
    team_bytes_max: int = Field(1 << 30, ge=1)
    """of a team's kept responses, and as many of its conversations; the oldest give way to what is
    written"""
    team_stream_bytes_max: int = Field(64 << 20, ge=0)
    """of the streams of a team's responses in the background, in Redis until ten minutes after
    their end"""


class Role(StrEnum):
    """What a person may do; gateway/admin/roles.py has the operations of each."""

    ADMIN = "admin"
    FINANCE = "finance"
    VIEWER = "viewer"
    AUDITOR = "auditor"
    TEAM_ADMIN = "team_admin"
    MEMBER = "member"


class GroupSettings(_Section):
    role: Role
    """what the group's people may do: [access.md](access.md#roles)"""
    teams: list[str] = []
    """the names of the teams where they may, for `team_admin` and `member`"""

    @model_validator(mode="after")
    def _has_its_teams(self) -> "GroupSettings":
        needs_teams = self.role in (Role.TEAM_ADMIN, Role.MEMBER)
        if needs_teams != bool(self.teams):
            expected = "the names of teams" if needs_teams else "none: this role is for all teams"
            raise ValueError(f"teams: found {self.teams} for the role {self.role}, expected {expected}")
        return self


class AccessSettings(_Section):
    issuer: str | None = None
    """the URL of the OpenID provider, as its tokens have it in `iss` (needs the extra `access`);
    absent: there is no sign-in"""
    client_id: str = ""
    """the dashboard's client at the provider; its secret, if it has one, is SAMEWAY_ACCESS_SECRET;
    empty: the dashboard has no sign-in"""
    scopes: list[str] = ["openid"]
    """what the sign-in asks the provider for; many providers send groups with one more"""
    audience: str = ""
    """the `aud` of the tokens that /v1 takes in place of API keys; empty: it takes none"""
    groups_claim: str = "groups"
    """the claim that lists a person's groups; dots lead into objects, as `realm_access.roles`"""
    user_claim: str = "sub"
    """the claim that names a person in the audit log, as the owner of keys and as the user of
    budgets; choose one that people cannot change at the provider; of the forms of Unicode, NFKC is
    taken alone"""
    groups: dict[str, GroupSettings] = {}
    """what the provider's groups may do here, by their names; who is in none of them is refused"""
    algorithms: list[Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]] = [
        "RS256", "PS256", "ES256",
    ]  # fmt: skip
    """the signatures that are taken"""
    required_claims: dict[str, str] = {}
    """what a token at /v1 must say, by claim; of a list, one of its values"""
    leeway_s: int = Field(60, ge=0, le=300)
    """how far the provider's clock may differ from ours"""
    token_s_max: int = Field(3600, ge=60)
    """seconds after its `iat` until which a token at /v1 is taken, if its `exp` is later"""
    leavers_days: int | None = Field(None, ge=1)
    """days without a sign-in or a new token after which a person's own keys stop; absent: never"""
    audit_days: int | None = Field(None, ge=1)
    """days for which rows of the audit log are kept; absent: for ever"""
    public_url: str | None = None
    """the URL at which browsers reach the gateway, with the sub-path if there is one; absent: the
    `Host` of the request"""
    claude_settings: dict[str, Any] = {}
    """what Claude Code applies as managed settings where people signed in by it, as
    `{"env": {"CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1"}}`"""
    is_admin_key_taken: bool = True
    """the admin key opens the dashboard and the admin API; without, only people who sign in do"""

    @model_validator(mode="after")
    def _is_whole(self) -> "AccessSettings":
        wrong, url = [], urlsplit(self.issuer or "")
        if self.issuer is None:
            if self.client_id or self.audience or not self.is_admin_key_taken:
                wrong.append("issuer: found none, expected the provider's URL beside client_id and audience")
        elif not is_http_url(self.issuer) or (url.scheme == "http" and not is_loopback(url.hostname or "")):
            wrong.append(f"issuer: found {self.issuer[:100]!r}, expected https://HOST")
        elif remedy := lacks("access"):
            wrong.append(f"issuer: found a provider without the library for its tokens: {remedy}")
        if self.public_url is not None and not is_http_url(self.public_url):
            wrong.append(f"public_url: found {self.public_url[:100]!r}, expected https://HOST")
        if self.audience and self.audience == self.client_id:
            wrong.append(
                "audience: found the client_id, expected the API's own: ID tokens, which are for the client, would open /v1"
            )
        is_open = self.client_id and any(group.role is Role.ADMIN for group in self.groups.values())
        if not self.is_admin_key_taken and not is_open:
            wrong.append(
                "is_admin_key_taken: found false, expected client_id and a group with the role admin beside it"
            )
        if self.client_id and "openid" not in self.scopes:
            wrong.append(f"scopes: found {self.scopes}, expected openid among them")
        _refuse(wrong)
        return self


class Settings(_Section):
    host: str = "127.0.0.1"
    """the address to listen on"""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8080
    """the port to listen on; 0 takes a free one"""
    workers: int = Field(1, ge=1, le=64)
    """gateway processes that share the port"""
    data_dir: Path = Path(".sameway")
    """where the embedded Redis, SQLite and first-start secrets live"""
    redis_url: str | None = None
    """a Redis server, or some nodes of a Sentinel (redis+sentinel://a,b/service) or of a Cluster
    (redis+cluster://a,b); default: a private one"""
    database_url: str | None = None
    """postgresql://... or sqlite:///...; default: a SQLite file in data_dir"""
    admin_key: str | None = None
    """the admin's key (environment only); default: made at the first start, kept in data_dir"""
    api_key: str | None = None
    """a preset for the first API key (environment only); default: made and shown once"""
    metrics_key: str | None = None
    """a key for /metrics and /readyz alone (environment only); the admin's opens both, too"""
    is_metrics_open: bool = False
    """answer /metrics and all of /readyz without a key"""
    trusted_proxies: list[str] = []
    """addresses and networks of the proxies in front, whose X-Forwarded-For, X-Forwarded-Proto and
    X-Forwarded-Prefix are used; commas between them in the environment"""
    public_path: str = Field("", pattern=r"^((/[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,99}){1,10})?$")
    """the sub-path, such as /sameway, below which a proxy in front shows the dashboard and all else"""
    secret: str | None = None
    """the key of the cache's partitions and of sessions (environment only); hosts that share a
    Redis share it; default: made at the first start, kept in data_dir"""
    access_secret: str | None = None
    """the secret of the client `access.client_id` at the provider (environment only)"""
    alerts_secret: str | None = None
    """signs what is sent to `alerts.webhook_url` (environment only): any text, or base64 after
    `whsec_`"""
    body_bytes_max: int = Field(16 << 20, gt=0)
    """a larger request body is refused with 413"""
    upload_bytes_max: int = Field(64 << 20, gt=0)
    """the same of a form with images or sounds, which is kept in a file of `data_dir` without a
    name meanwhile"""
    client_stall_s: int = Field(300, ge=1)
    """an answer is ended where its client takes no byte for this long"""
    is_pinged_early: bool = False
    """begin a stream whose answer has not begun after 15 s, and send a comment or `ping` every 15 s,
    as inside a stream; such a stream has status 200 whatever comes, and fewer headers"""
    models_dir: Path | None = None
    """where `sameway models get` puts weights that are not installed; default: `sameway/models` in
    the user's cache"""
    log_format: Literal["auto", "json", "pretty"] = "auto"
    """`auto`: pretty on a terminal, else JSON"""
    log_prompts: bool = False
    """write prompts and answers to the log, and keep what semantic hits were asked for the
    dashboard"""
    redis_timeout_ms: int = Field(500, gt=0)
    """timeout of a Redis call"""
    shutdown_grace_s: float = Field(30.0, ge=0)
    """seconds that running answers get when the gateway stops"""
    access: AccessSettings = AccessSettings()
    cache: CacheSettings = CacheSettings()
    budgets: BudgetSettings = BudgetSettings()
    loops: LoopSettings = LoopSettings()
    mask: MaskSettings = MaskSettings()
    guards: dict[str, GuardSettings] = {}
    """services that see texts before anything else does"""
    alerts: AlertSettings = AlertSettings()
    batches: BatchSettings = BatchSettings()
    ledger: LedgerSettings = LedgerSettings()
    responses: ResponseSettings = ResponseSettings()
    savings: SavingsSettings = SavingsSettings()
    traces: TraceSettings = TraceSettings()
    engines: dict[str, EngineSettings] = {"default": EngineSettings()}
    """local engines, one process each"""
    models: dict[str, ModelSettings] = {
        DEFAULT_ALIAS: ModelSettings(deployments=[DeploymentSettings(name="local", backend="local", engine="default")])
    }
    """the names that requests may send as `model`, with their deployments; `*` and `prefix/*` take
    every other name"""
    embedding_alias: str = DEFAULT_EMBEDDER_ALIAS
    """the name under which /v1/embeddings serves the packaged embedder; empty: it does not, as where
    `cache.is_semantic` is off and no name is set"""
    embedding_usd_per_mtok: float = Field(0.0, ge=0)
    """the price of the packaged embedder: USD for a million tokens, charged to the team's
    budgets"""

    @field_validator("redis_url", "database_url")
    @classmethod
    def _is_a_known_url(cls, url: str | None, info: ValidationInfo) -> str | None:
        url = _checked_url(url, _URLS[info.field_name or ""])
        if url is not None and url.startswith(("redis://", "rediss://")) and "," in url.rpartition("@")[2]:
            raise ValueError("found several hosts, expected one, or redis+cluster:// or redis+sentinel:// before them")
        if url is not None and "+sentinel://" in url and not urlsplit(url).path.strip("/"):
            raise ValueError(
                "found no service, expected its name at the end, as in redis+sentinel://host:26379/service"
            )
        return url

    @field_validator("alerts_secret")
    @classmethod
    def _is_a_signing_key(cls, secret: str | None) -> str | None:
        if secret is not None and secret.startswith("whsec_"):
            try:
                base64.b64decode(secret.removeprefix("whsec_"), validate=True)
            except binascii.Error:  # without the value
                raise ValueError("found `whsec_` and no base64, expected base64 after it, or another text") from None
        return secret

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _is_a_list(cls, networks: object) -> object:
        return [part.strip() for part in networks.split(",")] if isinstance(networks, str) else networks

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, networks: list[str]) -> list[str]:
        _refuse(
            [
                f"found {one!r}, expected an address or a network like 10.0.0.0/8"
                for one in networks
                if not is_network(one)
            ]
        )
        return networks

    @model_validator(mode="after")
    def _names_resolve(self) -> "Settings":
        if not self.cache.is_semantic and "embedding_alias" not in self.model_fields_set:
            self.__dict__["embedding_alias"] = ""  # no process of 400 MB for what nobody named
        seen: set[str] = set()
        wrong: list[str] = []
        for name in self.engines:
            if not _ENGINE_NAME.fullmatch(name):
                wrong.append(
                    f"engines.{name}: found {name!r}, expected a name of up to 40 letters, digits, `-`, `_`, `.`"
                )
            elif (size := len(os.fsencode(self.engine_socket(name)))) > _SOCKET_PATH_BYTES_MAX:
                wrong.append(
                    f"engines.{name}: its socket's path has {size} bytes, expected at most {_SOCKET_PATH_BYTES_MAX}; "
                    "give the engine a shorter name"
                )
        for alias, model in self.models.items():
            for index, deployment in enumerate(model.deployments):
                where = f"models.{alias}.deployments.{index}"
                if deployment.engine is not None and deployment.engine not in self.engines:
                    hint = did_you_mean(deployment.engine, self.engines)
                    wrong.append(
                        f"{where}.engine: found {deployment.engine!r}, expected one of {sorted(self.engines)}{hint}"
                    )
                wrong += _wrong_pattern(where, alias, deployment)
                name = deployment_name(alias, deployment)
                if name in seen:
                    wrong.append(f"{where}.name: {name!r} is used twice; give each deployment its own `name`")
                seen.add(name)
            names = [deployment_name(alias, deployment) for deployment in model.deployments]
            if model.baseline is not None and model.baseline not in names:
                hint = did_you_mean(model.baseline, names)
                wrong.append(f"models.{alias}.baseline: found {model.baseline!r}, expected one of {names}{hint}")
        wrong += self._wrong_fallbacks()
        wrong += self._wrong_webhook()
        wrong += self._wrong_verifiers()
        is_any = self.mask.teams or any(model.mask for model in self.models.values())
        if is_any and (remedy := lacks("masking")):
            wrong.append(f"mask: found requests to mask without the libraries: {remedy}")
        _refuse(wrong)
        return self

    def verification(self, alias: str, of_team: Verify | None = None, of_request: Verify | None = None) -> Verification:
        """How a verifier takes part in a request for `alias`, with the team's and the request's own word."""
        model = self.models.get(alias)
        verifier = (model.verifier if model is not None else None) or self.cache.verifier
        of_alias = model.verify if model is not None else None
        return effective(verifier, self.cache.verify, of_alias, of_team, of_request)

    def is_masked(self, alias: str, team: str) -> bool:
        """Whether requests of `team` for `alias`, a configured name or one that a pattern takes, are masked."""
        if team in self.mask.teams:
            return True
        model = self.models.get(alias) or next(
            (one for name, one in self.models.items() if is_pattern(name) and alias.startswith(name[:-1])), None
        )
        return model is not None and (model.mask or any(self.is_masked(name, team) for name in model.fallbacks))

    def _wrong_verifiers(self) -> list[str]:
        """An error for each verifier that is no alias, and for each mode that needs a verifier and has none."""
        wrong, models, default = [], self.models, self.cache.verifier
        has_any = default is not None or any(model.verifier for model in models.values())
        places = [("cache", default, self.cache.verify, has_any)]
        places += [(f"models.{name}", one.verifier, one.verify, default is not None) for name, one in models.items()]
        for where, verifier, verify, has_another in places:
            if verifier not in (None, AUTO) and (verifier not in models or is_pattern(verifier)):
                known, hint = sorted(name for name in models if not is_pattern(name)), did_you_mean(verifier, models)
                wrong.append(f"{where}.verifier: found {verifier!r}, expected `auto` or one of {known}{hint}")
            if verify in (Verify.BEFORE, Verify.AFTER) and verifier is None and not has_another:
                wrong.append(
                    f"{where}.verify: found {verify.value!r} without a verifier, expected `verifier` beside it, or "
                    "`observe` or `off`; `verifier: auto` takes the cheapest able deployment"
                )
        return wrong

    def _wrong_fallbacks(self) -> list[str]:
        """An error for each fallback of an alias that is unknown, repeated or part of a cycle."""
        wrong = []
        patterns = [name[:-1] for name in self.models if is_pattern(name)]
        for alias, model in self.models.items():
            where = f"models.{alias}.fallbacks"
            for name in model.fallbacks:
                is_there = name in self.models and not is_pattern(name)
                if not is_there and not any(name.startswith(prefix) for prefix in patterns):
                    hint = did_you_mean(name, self.models)
                    wrong.append(f"{where}: found {name!r}, expected an alias of `models`{hint}")
                elif is_there and self.models[name].guard not in (None, model.guard):
                    wrong.append(f"{where}: {name!r} has another `guard`, expected that of {alias!r}")
            if model.guard is not None and model.guard not in self.guards:
                hint = did_you_mean(model.guard, self.guards)
                wrong.append(
                    f"models.{alias}.guard: found {model.guard!r}, expected one of {sorted(self.guards)}{hint}"
                )
            if len(set(model.fallbacks)) < len(model.fallbacks):
                wrong.append(f"{where}: a name stands twice; name each fallback once")
            seen, ahead = set[str](), list(model.fallbacks)
            while ahead:
                name = ahead.pop()
                if name == alias:
                    wrong.append(f"{where}: they lead back to {alias!r}; fallbacks must not form a cycle")
                    break
                if name not in seen:
                    seen.add(name)
                    ahead += self.models[name].fallbacks if name in self.models else []
        return wrong

    def _wrong_webhook(self) -> list[str]:
        """An error for a webhook's URL that cannot be reached or that others could read, and for a missing secret.

        A URL's path may hold a token: only its scheme is shown.
        """
        url, where = self.alerts.webhook_url, "alerts.webhook_url"
        if url is None:
            return []
        wrong = []
        is_written = url.isascii() and url.isprintable() and " " not in url
        if not is_written or not is_http_url(url) or urlsplit(url).username is not None:
            scheme = url.partition("://")[0][:20]
            wrong.append(f"{where}: found a URL of {scheme!r}, expected https://host/... without credentials")
        elif urlsplit(url).scheme == "http" and not (
            self.alerts.is_http_allowed or is_loopback(urlsplit(url).hostname or "")
        ):
            wrong.append(f"{where}: found http:// to another host, expected https://, or `is_http_allowed`")
        if not self.alerts_secret:
            wrong.append(f"{where}: found without a secret, expected SAMEWAY_ALERTS_SECRET in the environment")
        return wrong

    def adopt(self, settings: "Settings") -> None:
        """Take the values of `settings`, in this object and in its sections.

        Whoever holds this object or a section of it sees all of them at once. Only for an object of
        one's own: the sections of others may be shared.
        """
        # decision: settings-in-place
        for name in Settings.model_fields:
            mine, value = getattr(self, name), getattr(settings, name)
            if isinstance(mine, _Section):
                mine.__dict__.update(value.__dict__)
            else:
                self.__dict__[name] = value

    @property
    def engines_used(self) -> list[str]:
        """The engines that a deployment uses."""
        return sorted({d.engine for model in self.models.values() for d in model.deployments if d.engine})

    @property
    def names(self) -> list[str]:
        """The names that requests may use as `model`."""
        return [*self.models, *filter(None, [self.embedding_alias])]

    @property
    def needs_cache_worker(self) -> bool:
        """Whether anything asks for embeddings."""
        return self.cache.is_semantic or bool(self.embedding_alias)

    @property
    def weights_dir(self) -> Path:
        """Where the packaged models' weights are fetched to."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return self.models_dir or cache / "sameway" / "models"

    @property
    def sql_url(self) -> str:
        """The database's URL; by default, a file in the data directory."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'sameway.db'}"

    @property
    def files_url(self) -> str:
        """The place of files; by default, in the data directory."""
        return self.batches.files_url or (self.data_dir.absolute() / "files").as_uri()

    @property
    def redis_target(self) -> str:
        """The Redis URL; by default, the embedded server's unix socket."""
        return self.redis_url or f"unix://{quote(str(self.run_dir / 'redis.sock'))}"

    @property
    def run_dir(self) -> Path:
        """The directory of the processes' unix sockets.

        A socket's path has at most about 100 bytes, so a deep `data_dir` gets a short directory
        elsewhere.
        """
        path = self.data_dir.absolute() / "run"
        if len(str(path)) <= 80:
            return path
        digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
        return Path(tempfile.gettempdir()) / f"sameway-{os.getuid()}-{digest}"

    def worker_socket(self, index: int) -> Path:
        """The socket of a gateway worker's heartbeat."""
        return self.run_dir / f"gateway-{index}.sock"

    def engine_socket(self, name: str) -> Path:
        """The socket of an engine worker."""
        return self.run_dir / f"engine-{name}.sock"

    @property
    def prices_path(self) -> Path:
        """A table of prices that is laid over the packaged one, where there is one."""
        return self.data_dir / "prices.json"

    @property
    def control_socket(self) -> Path:
        """The socket of the supervisor."""
        return self.run_dir / "control.sock"

    @property
    def cache_socket(self) -> Path:
        """The socket of the cache worker."""
        return self.run_dir / "cache.sock"


def is_pattern(alias: str) -> bool:
    """Whether an alias takes every name: `*`, or each name after a prefix, as `openai/*`."""
    return alias == "*" or alias.endswith("/*")


def keys_of(deployment: DeploymentSettings) -> list[ApiKeySettings]:
    """Where the provider's keys are."""
    if deployment.api_key_env or deployment.api_key_file:
        return [ApiKeySettings(env=deployment.api_key_env, file=deployment.api_key_file)]
    return deployment.api_keys


def _wrong_pattern(where: str, alias: str, deployment: DeploymentSettings) -> list[str]:
    """An error for a misplaced `*` in an alias or in its deployment's model."""
    model = deployment.model or ""
    if not is_pattern(alias):
        needed = f"only an alias `*` or `prefix/*` passes names on; here the alias is {alias!r}"
        return [f"{where}.model: found {model!r}: {needed}"] if "*" in model else []
    if "*" in alias[:-1]:
        return [f"models.{alias}: found more than one `*`, expected `*` or `prefix/*`"]
    if deployment.engine is not None or model.count("*") != 1 or not model.endswith("*"):
        return [f"{where}.model: found {deployment.model!r}, expected `*` or `prefix/*`, as the alias passes names on"]
    if deployment.backend == "litellm" and not model.endswith("/*"):
        return [f"{where}.model: found {model!r}, expected `provider/*`: a request must not choose where the key goes"]
    return []


def deployment_name(alias: str, deployment: DeploymentSettings) -> str:
    """The deployment's name in headers, logs and metrics, unique over all aliases.

    A name made from a URL has only its host: the rest may contain credentials.
    """
    if deployment.name:
        return deployment.name
    url = urlsplit(deployment.base_url or "")
    host = f"{url.hostname}:{url.port}" if url.port else url.hostname
    return f"{alias}@{deployment.engine or host or deployment.backend}"


_ENGINE_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")  # part of a file's name
_SOCKET_PATH_BYTES_MAX = 107  # Linux, unix(7)
_URLS = {
    "redis_url": (
        "redis://",
        "rediss://",
        "unix://",
        "redis+sentinel://",
        "rediss+sentinel://",
        "redis+cluster://",
        "rediss+cluster://",
    ),
    "database_url": ("sqlite://", "sqlite+aiosqlite://", "postgresql://", "postgresql+asyncpg://", "postgres://"),
}


SECTIONS: tuple[type[BaseModel], ...] = tuple(reversed(_Section.__subclasses__()))


FIXED = frozenset(
    {"host", "port", "workers", "data_dir", "redis_url", "database_url", *SECRETS, "client_stall_s"}
    | {"log_format", "redis_timeout_ms", "batches.files_url", "cache.is_semantic", "models_dir"}
    | {f"traces.{name}" for name in TraceSettings.model_fields}
)
"""The settings that change by a restart alone; so do those of an engine that is kept."""


def differences(before: Settings, after: Settings) -> dict[str, str]:
    """What changes from one configuration to another: by the setting's path, in words. No value of a
    model's is shown, as a header may hold a key.
    """
    changes: dict[str, str] = {}
    for name in Settings.model_fields:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, dict):
            for key in (*old, *(key for key in new if key not in old)):
                if old.get(key) != new.get(key):
                    changes[f"{name}.{key}"] = "added" if key not in old else "removed" if key not in new else "changed"
        elif isinstance(old, _Section):
            for inner in type(old).model_fields:
                if getattr(old, inner) != getattr(new, inner):
                    changes[f"{name}.{inner}"] = _from_to(inner, getattr(old, inner), getattr(new, inner))
        elif old != new:
            changes[name] = "changed" if name in SECRETS else _from_to(name, old, new)
    return changes


def _from_to(name: str, old: object, new: object) -> str:
    return "changed" if name.endswith(("_url", "_env")) else f"from {old!r} to {new!r}"


def refuse_fixed(changes: Mapping[str, str]) -> None:
    """Raise SettingsError if one of `changes` needs a restart; it names each."""
    wrong = [f"{name}: it changes by a restart alone" for name in changes if name in FIXED]
    wrong += [
        f"{name}: the settings of an engine change by a restart alone; give the new one a name of its own, "
        "and the old one ends with its last request"
        for name, how in changes.items()
        if name.startswith("engines.") and how == "changed"
    ]
    refuse_settings(wrong, [])


NEAR_SIMILARITY_MIN = 0.6  # below, the nearest cached prompt is about something else
