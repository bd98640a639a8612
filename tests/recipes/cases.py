"""One small change for each recipe of CONTRIBUTING.md, as data: what a maintainer writes into the files that it names.

Knows no test. `edits` has pairs for each file: a text that is there, and what stands there after; of a new file, its text alone.
"""

from __future__ import annotations

from dataclasses import dataclass

Edits = tuple[tuple[str, str], ...] | str


@dataclass(frozen=True)
class Case:
    """`spared` are files that the recipe names for other cases than this one; `beyond` those that it describes and cannot name.
    `tests` are what notices a fault besides the tests of the whole tree."""

    edits: dict[str, Edits]
    spared: frozenset[str] = frozenset()
    beyond: frozenset[str] = frozenset()
    tests: tuple[str, ...] = ()


def before(anchor: str, text: str) -> tuple[str, str]:
    return anchor, text + anchor


def after(anchor: str, text: str) -> tuple[str, str]:
    return anchor, anchor + text


ECHO = '''"""A backend that says its prompt back, for rehearsals."""

from collections.abc import AsyncGenerator

import msgspec

from gateway.backends.base import BackendRequest, Load
from gateway.wire.plain import chunk_of
from gateway.wire.types import Chunk


class EchoBackend:
    """One deployment that needs no server."""

    def __init__(self, name: str, capabilities: frozenset[str]) -> None:
        self.name = name
        self.capabilities = capabilities

    async def start(self) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing."""

    def load(self, prompt_tokens: int) -> Load:
        return Load()

    async def stream(self, request: BackendRequest) -> AsyncGenerator[list[Chunk], None]:
        """The request as its own answer."""
        yield [chunk_of(msgspec.json.encode(request.body))]
'''
ECHO_TEST = '''"""The backend that says its prompt back."""

from gateway.backends.echo import EchoBackend


def test_it_is_ready_at_once() -> None:
    """There is no server to wait for."""
    assert EchoBackend("echo", frozenset()).load(0).is_ready
'''
HELLO_PAGE = """{% extends "base.html" %}
{% block title %}Hello{% endblock %}
{% block twin %}<a href="/admin/api/hello">This page as JSON</a>{% endblock %}
{% block content %}
<header class="head"><h1>Hello</h1><p class="muted">Version {{ version }}</p></header>
{% endblock %}
"""
CLASSIFY = '''class ClassifyRequest(_PlainRequest, kw_only=True):
    """The known fields of a request to classify texts by a model's own labels."""

    stream: Literal[False] | None = None
    input: str | Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]

    def extent(self) -> Extent:
        return Extent([*map(_size, [self.input] if isinstance(self.input, str) else self.input)])


'''

CASES: dict[str, Case] = {
    "Add a provider": Case(
        {
            "gateway/backends/echo.py": ECHO,
            "gateway/settings.py": (
                (
                    'Literal["local", "openai", "anthropic", "litellm"]',
                    'Literal["local", "openai", "anthropic", "litellm", "echo"]',
                ),
                (
                    'a managed provider through litellm"""',
                    'a managed provider through litellm;\n    `echo`: no server"""',
                ),
            ),
            "gateway/deployments/build.py": (
                before("from gateway.backends.keys import Keys\n", "from gateway.backends.echo import EchoBackend\n"),
                after('"litellm": frozenset({"tools", "reasoning"}),\n', '    "echo": frozenset({"n"}),\n'),
                before(
                    '    assert deployment.model is not None, "the settings see to it"\n',
                    '    if deployment.backend == "echo":\n        return EchoBackend(name, facts.capabilities)\n',
                ),
            ),
            "gateway/admin/templates/parts.html": (before(', "litellm": "managed', ', "echo": "a rehearsal"'),),
            "tests/backends/test_echo.py": ECHO_TEST,
        },
        spared=frozenset({"gateway/backends/refusals.py", "tests/backends/test_openai.py"}),
        tests=("tests/backends/test_echo.py", "tests/deployments/test_build.py"),
    ),
    "Add a setting": Case(
        {
            "gateway/settings.py": (
                before(
                    "    log_prompts: bool = False\n",
                    '    log_level: Literal["info", "warning"] = "info"\n    """the least level of a line that is written"""\n',
                ),
            ),
            "gateway/telemetry/logs.py": (
                (
                    "filtering_bound_logger(logging.INFO)",
                    "filtering_bound_logger(getattr(logging, settings.log_level.upper()))",
                ),
            ),
        },
        spared=frozenset({"local_engine/config.py", "cache/worker/options.py", "tests/processes/test_supervisor.py"}),
        beyond=frozenset({"gateway/telemetry/logs.py"}),
        tests=("tests/telemetry/test_logs.py",),
    ),
    "Change the default error bound": Case(
        {
            "cache/query.py": (("ERROR_MAX = 0.01\n", "ERROR_MAX = 0.008\n"),),
            "README.md": (("under a bound, 1% by default", "under a bound, 0.8% by default"),),
            "docs/semantic-cache.md": (
                ("at most `error_max` (1%) get", "at most `error_max` (0.8%) get"),
                ("`cache.error_max`, 1% by default", "`cache.error_max`, 0.8% by default"),
            ),
        },
        tests=(
            "tests/cache/test_rule.py",
            "tests/cache/test_semantic.py",
            "tests/cache/test_cold.py",
            "tests/journey/test_semantic.py",
        ),
    ),
    "Add a response header": Case(
        {
            "gateway/api/headers.py": (
                before(
                    "    limit_headers = reply.looked.limit_headers\n",
                    '    headers.append((b"x-sameway-surface", turn.kind.name.encode()))\n',
                ),
            ),
            "docs/api.md": (before("| `x-sameway-verified` |", "| `x-sameway-surface` | the kind of the request |\n"),),
        },
        tests=("tests/api/test_answers_agree.py",),
    ),
    "Add a metric": Case(
        {
            "gateway/telemetry/metric_names.py": (
                before(
                    "COST = _counter(",
                    'STREAMS = _counter("sameway_streams_total", "Requests for a stream.", "model")\n',
                ),
            ),
            "gateway/telemetry/metrics.py": (
                before(
                    "        if ended.is_disconnected:\n",
                    "        if request.is_stream:\n            self.add(names.STREAMS, 1, request.alias)\n",
                ),
            ),
        },
        spared=frozenset({"gateway/telemetry/health.py"}),
        tests=("tests/telemetry/test_metrics.py",),
    ),
    "Add a surface": Case(
        {
            "gateway/wire/types.py": (
                before("IMAGE = Kind(", 'CLASSIFY = Kind("classify", "/classify", "input", is_plain=True)\n\n\n'),
                ("RERANK, MODERATION, *MEDIA", "RERANK, MODERATION, CLASSIFY, *MEDIA"),
            ),
            "gateway/wire/plain.py": (
                before("    EMBEDDING,\n    IMAGE,\n", "    CLASSIFY,\n"),
                before("class ImageRequest(_PlainRequest", CLASSIFY),
                after("    ModerationRequest: MODERATION,\n", "    ClassifyRequest: CLASSIFY,\n"),
            ),
            "gateway/settings.py": (
                ('"rerank", "moderations"}', '"rerank", "moderations", "classify"}'),
                ("rerank, moderations, images,", "rerank, moderations, classify, images,"),
            ),
            "gateway/api/openapi.py": (
                after("provider's policy\",\n", '    "classify": "Classify texts by a model\'s labels",\n'),
            ),
            "gateway/api/front.py": (after('    "/moderations",\n', '    "/classify",\n'),),
            "docs/api.md": (
                before("| `POST /v1/images/generations` |", "| `POST /v1/classify` | texts by a model's labels |\n"),
            ),
        },
        tests=("tests/api", "tests/deployments/test_build.py", "tests/journey/test_capabilities.py", "tests/wire"),
    ),
    "Add a page to the dashboard": Case(
        {
            "gateway/admin/views.py": (
                before(
                    "async def batches(parts: WorkerParts",
                    'async def hello(parts: WorkerParts) -> dict[str, Any]:\n    """The version, to greet with."""\n'
                    '    return {"version": parts.version}\n\n\n',
                ),
            ),
            "gateway/admin/routes.py": (
                before('    api.get("/batches")(views.batches)\n', '    api.get("/hello")(views.hello)\n'),
            ),
            "gateway/admin/roles.py": (("status deployments hosts batches", "status hello deployments hosts batches"),),
            "gateway/admin/pages.py": (
                before(
                    '    @router.get("/batches")\n',
                    '    @router.get("/hello")\n    async def hello(request: Request) -> Response:\n'
                    '        return pages.render(request, "hello.html", **(await views.hello(parts)))\n\n',
                ),
            ),
            "gateway/admin/templates/hello.html": HELLO_PAGE,
            "gateway/admin/html.py": (
                before('    ("/admin/batches", "Batches"', '    ("/admin/hello", "Hello", "hello"),\n'),
            ),
            "tests/admin/world.py": (before('    "/batches",\n', '    "/hello",\n'),),
            "docs/admin.md": (before("| Batches |", "| Hello | the version |\n"),),
            "tests/admin/test_access.py": (after('_MACHINE = "', "hello "),),
        },
        tests=("tests/admin/test_pages.py", "tests/admin/test_access.py", "tests/admin/test_api.py"),
    ),
    "Add a reason why a semantic lookup misses": Case(
        {
            "cache/query.py": (
                before('    WORDS = "words"', '    HIDDEN = "hidden"  # near, but hidden characters differ\n'),
            ),
            "cache/decision/exact_marks.py": (
                ("mine.signs != theirs.signs or mine.hidden != theirs.hidden:", "mine.signs != theirs.signs:"),
                before(
                    "    if any(map(_is_other_case",
                    "    if mine.hidden != theirs.hidden:\n        return MissReason.HIDDEN\n",
                ),
            ),
            "gateway/admin/templates/parts.html": (
                before('  "words": "a word', '  "hidden": "hidden characters differ",\n'),
            ),
            "gateway/admin/misses.py": (('"numbers marks words"', '"numbers marks hidden words"'),),
            "docs/reasons.md": (before("| `marks` |", "| `hidden` | hidden characters differ |\n"),),
        },
        spared=frozenset({"cache/decision/rule.py"}),
        tests=("tests/admin/test_misses.py",),
    ),
    "Add a reason why an answer is not stored": Case(
        {
            "cache/eligibility.py": (
                before('    CURATED = "curated"', '    TINY = "tiny"\n'),
                before("    if outcome.moves:\n", "    if outcome.size_bytes == 0:\n        return Refusal.TINY\n"),
            ),
            "tests/cache/test_eligibility.py": (
                before('        ({"size_bytes": 101}', '        ({"size_bytes": 0}, Refusal.TINY),\n'),
            ),
            "docs/reasons.md": (before("| `ttl` |", "| `tiny` | the answer has no byte |\n"),),
        },
        spared=frozenset({"gateway/journey/recorded_answers.py"}),
        tests=("tests/cache/test_eligibility.py", "tests/journey/test_storing.py"),
    ),
    "Add a Redis script": Case(
        {
            "cache/exact/scripts.py": (
                before(
                    "# KEYS: the known partitions. ARGV: one",
                    "# KEYS: entries. Returns their number.\nCOUNT = \"return redis.call('HLEN', KEYS[1])\"\n\n",
                ),
            ),
            "cache/exact/store.py": (
                ("import DROP, FORGET", "import COUNT, DROP, FORGET"),
                before(
                    "    async def purge(self, partition",
                    '    async def count(self, partition: Partition) -> int:\n        """The number of entries."""\n'
                    "        return int(await self._redis.eval(COUNT, 1, _keys(partition)[0]))\n\n",
                ),
            ),
            "tests/cache/test_cluster.py": (
                before(
                    "        assert max(one.size_bytes", "        assert await EntryStore(cluster).count(ACME) > 0\n"
                ),
            ),
        },
        spared=frozenset({"policies/scripts.py", "tests/e2e/test_cost.py"}),
        beyond=frozenset({"cache/exact/store.py"}),
        tests=("tests/cache/test_cluster.py",),
    ),
}
