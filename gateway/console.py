"""The commands over the admin API: `sameway teams`, `keys`, `budgets`, `spend`, `savings`, `ledger`, `requests`, `cache`
and the rest, for a gateway that runs.

Knows no operation by name: the gateway's own OpenAPI document says which there are and what they
take. A path's first part is the noun; the verb is its last part, or by the method `list`, `create`,
`show`, `update`, `delete`. `cache import` and `cache warm` alone read a file, in portions and at a
bounded rate. Invariant: an import that breaks off goes on before what could have been lost.
"""

import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from gateway.wire.errors import shown

NOUNS = ("teams", "keys", "budgets", "spend", "savings", "ledger", "requests", "cache", "deployments", "hosts", "batches",
         "people", "audit")  # fmt: skip
USAGE = "[VERB] [ID] [--FIELD VALUE ...] [--json] [--url URL] [--help]"
_OTHERS = {"spend": ("ledger", "sums"), "requests": ("routes", "list")}
_VERBS = {"GET": "show", "PATCH": "update", "DELETE": "delete", "POST": "act"}
_VERBS_OF_ALL = {"GET": "list", "POST": "create"}
_PORTION_LINES, _PORTION_BYTES = 500, 4 << 20
_LOST_S = 5.0  # what a killed Redis may forget of what it had acknowledged
_TRIED_FOR_S = 120.0
_CELL_CHARS_MAX = 60
UNREACHABLE = (OSError, ValueError, HTTPException)  # what `opened` raises


class CommandError(Exception):
    """A command that cannot be done: `str()` is for people."""


class Operation(NamedTuple):
    """One operation of the admin API, as its document has it."""

    method: str
    path: str
    facts: dict[str, Any]


def opened(
    url: str, headers: dict[str, str], method: str = "GET", body: bytes | None = None, within_s: float = 60
) -> Any:
    """The open response to a request. Raises urllib.error.HTTPError, OSError, HTTPException, ValueError."""
    request = urllib.request.Request(url, body, headers, method=method)
    is_here = urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    handlers = [urllib.request.ProxyHandler({})] if is_here else []  # no proxy leads to this machine
    return urllib.request.build_opener(*handlers).open(request, timeout=within_s)


def here() -> str:
    """The address of this host's gateway."""
    return f"http://127.0.0.1:{os.environ.get('SAMEWAY_PORT') or 8080}"


def address(url: str) -> str:
    """A gateway's address without the path of its API."""
    return url.rstrip("/").removesuffix("/v1")


def command(noun: str, arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0, 1 where the gateway refused it, 2 where it is none."""
    places, options = _parsed(arguments)
    url = address(str(options.pop("url", here())))
    is_json = bool(options.pop("json", False))
    try:
        if options.pop("help", False):
            print("\n".join(_help(noun)))
            return 0
        if noun == "cache" and places[:1] == ["warm"]:
            return _warm(url, places[1:], options)
        with opened(f"{url}/openapi.json", {}) as reply:
            document = json.load(reply)
        if noun == "cache" and places[:1] == ["import"]:
            return _import(url, places[1:], options)
        operation, path = _chosen(noun, places, document)
        query, body = _given(operation, document, options)
        headers = {**admin_headers(), **({"content-type": "application/json"} if body is not None else {})}
        target = f"{url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        with opened(target, headers, operation.method, None if body is None else json.dumps(body).encode()) as reply:
            if reply.headers.get_content_type() == "application/json":
                value = json.load(reply)
                shown = json.dumps(value, indent=2) if is_json else "\n".join(_shown(value))
                print(shown.lstrip("\n") or "nothing")
            else:
                shutil.copyfileobj(reply, sys.stdout.buffer)
                sys.stdout.buffer.flush()
    except CommandError as error:
        print(f"sameway: {error}", file=sys.stderr)
        return 2
    except urllib.error.HTTPError as error:
        print(f"sameway: {_refusal(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads the output has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    except UNREACHABLE as error:
        why = getattr(error, "reason", error)
        print(f"sameway: {url} cannot be reached ({why}): name a running gateway with --url", file=sys.stderr)
        return 1
    return 0


def admin_headers(folder: Path | None = None) -> dict[str, str]:
    """The header with the admin's key, of the environment or of a data directory. Raises CommandError."""
    key = os.environ.get("SAMEWAY_ADMIN_KEY", "")
    file = (folder or Path(os.environ.get("SAMEWAY_DATA_DIR", ".sameway"))) / "admin.key"
    try:
        return {"authorization": f"Bearer {key or file.read_text().strip()}"}
    except OSError as error:
        why = f"set SAMEWAY_ADMIN_KEY, or SAMEWAY_DATA_DIR ({file}: {error.strerror})"
        raise CommandError(f"no admin key: {why}") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return f"{error.code}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


def _parsed(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The places and the options of a command; an option without a value is true."""
    places, options, rest = list[str](), dict[str, Any](), deque(arguments)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            places.append(word)
            continue
        name, has_value, value = word[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            value, has_value = rest.popleft(), "="
        options[name.replace("-", "_")] = value if has_value else True
    return places, options


# -- operations


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, Operation]]:
    """Each operation with its noun and its verb."""
    paths = {path.removeprefix("/admin/api/"): path for path in document["paths"] if path.startswith("/admin/api/")}
    nouns = {path.split("/")[0] for path in paths}
    for short, path in paths.items():
        parts = [part for part in short.split("/") if not part.startswith("{")]
        for method, facts in document["paths"][path].items():
            operation, (noun, _, end) = Operation(method.upper(), path, facts), parts[0].partition(".")
            verb = end or parts[-1]  # a file of the noun's list
            enums = (given["schema"].get("enum", ()) for given in facts.get("parameters", ()) if given["in"] == "path")
            if acts := [act for enum in enums for act in enum]:  # of `deployments/{act}`: each is a verb
                stem = path.rpartition("/")[0]
                yield from ((verb, act, operation._replace(path=f"{stem}/{act}")) for act in acts)
                continue
            if verb in nouns:
                noun, verb = verb, (_VERBS if short.endswith("}") else _VERBS_OF_ALL)[operation.method]
            elif method == "post" and "get" in document["paths"][path]:
                verb = f"create-{verb}"
            yield noun, verb, operation


def _chosen(noun: str, places: list[str], document: dict[str, Any]) -> tuple[Operation, str]:
    """The operation that the places name, and its path. Raises CommandError."""
    noun, verb = _OTHERS.get(noun, (noun, "list"))
    known = [(its_verb, operation) for its_noun, its_verb, operation in _operations(document) if its_noun == noun]
    verbs = {its_verb for its_verb, _ in known}
    if is_named := bool(places) and places[0] in verbs:
        verb, *places = places
    elif "list" not in verbs and verb == "list":
        verb = "show" if "show" in verbs else verb
    for its_verb, operation in known:
        if its_verb == verb and operation.path.count("{") == len(places):
            ids = [urllib.parse.quote(place, safe="") for place in places]
            return operation, re.sub("{.*?}", "{}", operation.path).format(*ids)
    for its_verb, operation in known:
        if is_named and its_verb == verb:
            raise CommandError(f"{noun} {' '.join([verb, *places])}: expected {noun} {verb} {_ids(operation)}".rstrip())
    known_verbs = ", ".join(sorted(verbs))
    raise CommandError(f"{noun} {' '.join([verb, *places])}: expected one of {known_verbs}, with the ids of --help")


def _ids(operation: Operation) -> str:
    """The ids that an operation takes, as `--help` shows them."""
    return " ".join(part[1:-1].upper() for part in operation.path.split("/") if part.startswith("{"))


def _fields(operation: Operation, document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """The schemas of an operation's query and of its body, and whether it has a body."""
    query = {one["name"]: one["schema"] for one in operation.facts.get("parameters", []) if one["in"] == "query"}
    content = operation.facts.get("requestBody", {}).get("content", {}).get("application/json")
    return query, _resolved((content or {}).get("schema", {}), document).get("properties", {}), content is not None


def _given(operation: Operation, document: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The query and the body of a request with these options. Raises CommandError."""
    query, fields, has_body = _fields(operation, document)
    if unknown := options.keys() - query.keys() - fields.keys():
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in (*query, *fields)) or "none"
        raise CommandError(f"unknown option --{min(unknown).replace('_', '-')}: expected {listed}")
    body = {name: _value(value, fields[name], document) for name, value in options.items() if name in fields}
    return {name: value for name, value in options.items() if name in query}, body if has_body else None


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return dict(document["components"]["schemas"][name]) if name else schema


def _kinds(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    schema = _resolved(schema, document)
    return {schema.get("type", "string" if "enum" in schema else "")}.union(
        *(_kinds(one, document) for one in schema.get("anyOf", ()))
    ) - {""}


def _value(text: Any, schema: dict[str, Any], document: dict[str, Any]) -> Any:
    """What an option's text means, by the field's types: JSON where it is some, else a text or a list of texts."""
    kinds = _kinds(schema, document)
    if not isinstance(text, str) or (kinds <= {"string", "null"} and text != "null"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text.split(",") if "array" in kinds else text


def _help(noun: str) -> Iterator[str]:
    from fastapi import FastAPI  # it takes a second, and a command without --help asks the gateway

    from gateway.admin.routes import api_routes

    document = FastAPI(routes=api_routes()).openapi()
    noun, only = _OTHERS.get(noun, (noun, ""))
    if noun == "cache":
        yield "sameway cache import FILE [--team-id N]\n    Puts answers into the cache, a JSON line each, with progress."
        yield "sameway cache warm FILE [--per-second 2] [--cost-max-usd 1] [--concurrency 4]"
        yield "    Sends the requests of a file of JSON lines with the key in SAMEWAY_API_KEY, so that their answers are cached."
    for its_noun, verb, operation in _operations(document):
        if its_noun == noun and only in ("", verb) and (noun, verb) != ("cache", "import"):
            query, fields, _ = _fields(operation, document)
            taken = " ".join(f"[--{name.replace('_', '-')}]" for name in (*query, *fields))
            yield " ".join(part for part in ("sameway", noun, verb, _ids(operation), taken) if part)
            yield f"    {' '.join(operation.facts.get('description', '').split())}"


# -- tables


def _shown(value: Any) -> Iterator[str]:
    """A reply for people: its lists as tables, and its other fields by their names."""
    fields = value if isinstance(value, dict) else {"": value}
    tables = {name: one for name, one in fields.items() if isinstance(one, list) and one and isinstance(one[0], dict)}
    for name, cell in _cells(fields).items():
        if name not in tables and (cell or fields.get(name) == []):
            yield f"{name}  {cell or 'none'}"
    for name, rows in tables.items():
        yield from _table([_cells(row) for row in rows], f"\n{name}\n" if len(fields) > len(tables) else "")


def _cells(fields: dict[str, Any], before: str = "") -> dict[str, str]:
    """Fields as people read them, by their names: money in USD, times as dates, and one level alone."""
    cells: dict[str, str] = {}
    for name, value in fields.items():
        name = f"{before}{name}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, dict):
            cells |= _cells(value, f"{name}.")
        elif is_number and name.endswith("microusd"):
            cells[f"{name.removesuffix('microusd')}usd"] = f"{value / 1e6:.6f}".rstrip("0").rstrip(".")
        elif is_number and name.endswith(("at_s", "at_ms", "until_s")):
            at, _, unit = name.rpartition("_")
            cells[at] = f"{datetime.fromtimestamp(value / (1000 if unit == 'ms' else 1), UTC):%Y-%m-%d %H:%M:%S}"
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            cells[name] = f"{len(value)} of them"
        else:
            value = (round(value, 3) or value) if isinstance(value, float) else value
            text = value if isinstance(value, str) else json.dumps(value) if value not in (None, []) else ""
            cells[name] = shown(text, _CELL_CHARS_MAX)  # what a client sent must not steer the terminal
    return cells


def _table(rows: list[dict[str, str]], title: str) -> Iterator[str]:
    """The columns that fit the terminal, in the order of the API; those that say nothing are left out, and
    those that say the same of all rows yield to others. A single row that does not fit is listed.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) for name in names}
    left, taken = shutil.get_terminal_size((160, 24)).columns, set[str]()
    if len(rows) == 1 and sum(widths.values()) + 2 * len(names) > left + 2:
        yield title + "\n".join(f"{name}  {rows[0][name]}" for name in names if rows[0].get(name))
        return
    for name in sorted(names, key=lambda name: len({row.get(name) for row in rows}) == 1):
        left -= widths[name] + 2
        taken |= {name} if left >= 0 or not taken else set()
    shown = [name for name in names if name in taken]
    for row in [dict(zip(shown, shown, strict=True)), *rows]:
        yield title + "  ".join(row.get(name, "").ljust(widths[name]) for name in shown).rstrip()
        title = ""
    if len(shown) < len(names):
        yield f"({len(names) - len(shown)} more columns: a wider terminal, or --json)"


# -- files


def _import(url: str, places: list[str], options: dict[str, Any]) -> int:
    """Send a file's lines in portions, show the progress, and go on where the gateway comes back."""
    file = _file("import", places, options, ("team_id",))
    target = f"{url}/admin/api/cache/import?{urllib.parse.urlencode(options)}"
    lines, line, broken_at = file.read_bytes().splitlines(), 0, None
    replies: dict[int, tuple[float, dict[str, Any]]] = {}  # when and what, by a portion's first line
    while line < len(lines):
        portion = _portion(lines, line)
        try:
            with opened(target, admin_headers(), "POST", b"\n".join(portion), 300) as reply:
                replies[line] = time.monotonic(), json.load(reply)
        except UNREACHABLE as error:
            now, broken_at = time.monotonic(), broken_at or time.monotonic()
            if (isinstance(error, urllib.error.HTTPError) and error.code < 500) or now - broken_at > _TRIED_FOR_S:
                raise
            # a Redis that was killed may have lost what it took last
            line = min([line, *(start for start, (at, _) in replies.items() if broken_at - at < _LOST_S)])
            print(f"\n{error}: goes on at line {line + 1:,} once the gateway is back", file=sys.stderr)
            time.sleep(1.0)
            continue
        line, broken_at = line + len(portion), None
        print(f"\r{line:,} of {len(lines):,} lines", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    problems = [(start, one) for start, (_, came) in replies.items() for one in came["problems"]]
    for start, one in problems[:20]:
        print(f"line {start + one['line']}: {one['message']}", file=sys.stderr)
    sums = {name: sum(came[name] for _, came in replies.values()) for name in ("stored", "unchanged", "refused")}
    print(", ".join(f"{count:,} {name}" for name, count in sums.items()))
    return 1 if sums["refused"] else 0


def _portion(lines: list[bytes], start: int) -> list[bytes]:
    """The next lines: at least one, and no more than the gateway takes in a moment."""
    portion = lines[start : start + _PORTION_LINES]
    fit = sum(size < _PORTION_BYTES for size in accumulate(map(len, portion)))
    return portion[: max(1, fit)]


def _file(verb: str, places: list[str], options: dict[str, Any], known: Sequence[str]) -> Path:
    """The one file of a command. Raises CommandError."""
    if len(places) != 1 or options.keys() - set(known):
        listed = ", ".join(f"--{one.replace('_', '-')}" for one in known) or "none"
        raise CommandError(f"cache {verb}: expected one file, and of options {listed} alone")
    if not (os.path.isfile(places[0]) and os.access(places[0], os.R_OK)):
        raise CommandError(f"cache {verb}: {places[0]} cannot be read")
    return Path(places[0])


def _warm(url: str, places: list[str], options: dict[str, Any]) -> int:
    """Send a file's requests at a bounded rate, until they might cost more than is allowed."""
    file = _file("warm", places, options, ("per_second", "cost_max_usd", "concurrency"))
    try:
        pause_s, cost_max = 1 / float(options.get("per_second", 2)), float(options.get("cost_max_usd", 1))
        at_once = int(options.get("concurrency", 4))
        if not (pause_s > 0 and cost_max >= 0 and at_once > 0):
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise CommandError("cache warm: expected numbers above 0") from None
    if not (key := os.environ.get("SAMEWAY_API_KEY")):
        raise CommandError("SAMEWAY_API_KEY is not set: set it to a key of the team whose cache is to be filled")
    came, spent, dearest = Counter[str](), 0.0, 0.0
    lines = [line for line in file.read_bytes().splitlines() if line.strip()]
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        while (done := came.total()) < len(lines):
            # the first one alone: it says what a request costs
            many = at_once if done else 1
            many = min(many, int((cost_max - spent) / dearest)) if dearest else many
            if many < 1:
                came["left out, as they might cost more"] = len(lines) - done
                break
            ends_at, asked = time.monotonic() + many * pause_s, lines[done : done + many]
            for how, cost in pool.map(partial(_asked, url, key), asked):
                came[how], spent, dearest = came[how] + 1, spent + cost, max(dearest, cost)
            print(
                f"\r{came.total():,} of {len(lines):,} requests, {spent:.4f} USD", end="", file=sys.stderr, flush=True
            )
            time.sleep(max(0.0, ends_at - time.monotonic()))
    print(file=sys.stderr)
    print(", ".join(f"{count:,} {how}" for how, count in sorted(came.items())) + f"; {spent:.6f} USD")
    return 0 if came.keys() <= {"exact", "semantic", "coalesced", "miss"} else 1


def _asked(url: str, key: str, line: bytes) -> tuple[str, float]:
    """What came of one request, and its cost in USD."""
    try:
        body = json.loads(line)
        body = body.get("request") or body.get("body") or body  # a line of an import, of a batch, or a request itself
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        sent = json.dumps({**body, "stream": False}).encode()
        with opened(f"{url}/v1/chat/completions", headers, "POST", sent, 900) as reply:
            reply.read()
            return reply.headers["x-sameway-cache"], float(reply.headers.get("x-sameway-cost-usd", 0))
    except urllib.error.HTTPError as error:
        return f"refused ({_refusal(error)[:100]})", 0.0
    except (AttributeError, TypeError):
        return "failed (expected a JSON object with a request)", 0.0
    except UNREACHABLE as error:
        return f"failed ({str(error)[:100]})", 0.0
