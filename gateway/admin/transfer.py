"""Answers into the cache and out of it, as JSON lines: an operator's own, and those of another Redis.

A line has a `request` with its `answer` or its whole `response`: a curated answer, which never
expires unless the request's `cache` has a `ttl`. Or it has an `entry`, as an export wrote it, for
the same team of a gateway with the same secret: the digests of its request depend on both.
Invariant: the same line again changes nothing.
"""

import base64
import time
from collections.abc import AsyncIterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse

from cache import Entry, Partition, Purge, Recorded, fingerprint
from cache.decision.normal_form import words_key
from cache.decision.pieces import compile_pattern, without
from cache.entry import ASKED, CURATED, CURATED_TTL_S, REQUEST, TAGS, digest_of, pack_context
from gateway.accounts import Team
from gateway.accounts.audit import CACHE_EXPORTED, CACHE_IMPORTED
from gateway.admin import models
from gateway.admin.guard import Acting
from gateway.admin.parts import AdminParts, WorkerParts
from gateway.admin.queries import Id
from gateway.journey.guards import apart_of
from gateway.journey.turn import arrive, read_turn
from gateway.loggers import get_logger
from gateway.wire.chunks import unfold
from gateway.wire.errors import ApiError, NotFound
from gateway.wire.types import CHAT

NDJSON = "application/x-ndjson"
_TOGETHER = 200  # lines
_PROBLEMS_MAX = 20
_log = get_logger()


class _ImportLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of an import."""

    request: dict[str, Any] | None = None
    answer: str | None = None
    response: dict[str, Any] | None = None
    team_id: int | None = None
    entry: str | None = None  # base64
    # what an export says of an entry, for people
    text: str | None = None
    model: str | None = None
    created_at_s: float | None = None
    expires_at_s: float | None = None
    tags: list[str] = []


_read_line = msgspec.json.Decoder(_ImportLine).decode
_read_entry = msgspec.msgpack.Decoder(Entry).decode


async def import_answers(
    parts: WorkerParts, request: Request, operator: Acting, team_id: Id | None = None
) -> models.ImportOut:
    """Puts answers into the cache, a JSON line each: `request` with `answer` or `response`, or an exported `entry`.
    `team_id` is that of lines without one. A line that is there already changes nothing. It is in the audit log."""
    teams = {team.id: team for team in await parts.accounts.list_teams()}
    if team_id is not None and team_id not in teams:
        raise NotFound(f"There is no team {team_id}", param="team_id", code="not_found")
    # first: a client that leaves, or a worker that is killed, has stored a part
    await parts.audit.add(parts.audit_row(CACHE_IMPORTED, "answers", operator, team_id or 0))
    importing = _Import(parts, teams, team_id)
    async for lines in _lines(request):
        await importing.take(lines)
    _log.info("cache_imported", lines=importing.read, **importing.counts)
    return models.ImportOut(lines=importing.read, **importing.counts, problems=importing.problems)


async def _lines(request: Request) -> AsyncIterator[list[bytes]]:
    rest, lines = b"", list[bytes]()
    async for piece in request.stream():
        *whole, rest = (rest + piece).split(b"\n")
        lines += whole
        while len(lines) >= _TOGETHER:
            yield lines[:_TOGETHER]
            lines = lines[_TOGETHER:]
    yield [*lines, rest] if rest.strip() else lines


class _Import:
    """One import: what became of its lines so far."""

    def __init__(self, parts: AdminParts, teams: Mapping[int, Team], team_id: int | None) -> None:
        self._parts = parts
        self._teams = teams
        self._team_id = team_id
        self._owners = {parts.partition_of(id): id for id in teams}
        self._volatile = tuple(map(compile_pattern, parts.settings.cache.volatile))
        self.read = 0
        self.counts = {"stored": 0, "unchanged": 0, "refused": 0}
        self.problems: list[models.ImportProblem] = []

    async def take(self, lines: list[bytes]) -> None:
        """Store the answers of some lines. Raises CacheUnavailable: then a part may be stored."""
        entries: dict[int, tuple[Entry, bytes | None]] = {}
        for line in lines:
            self.read += 1
            if not line.strip():
                continue
            try:
                entries[self.read] = self._entry_of(_read_line(line))
            except (ApiError, ValueError, RecursionError) as error:  # msgspec raises ValueErrors
                self._refuse(error.message if isinstance(error, ApiError) else str(error), self.read)
        outcomes = await self._parts.exact.take_in(list(entries.values()))
        for number, outcome in zip(entries, outcomes, strict=True):
            if outcome in self.counts:
                self.counts[outcome] += 1
            else:
                self._refuse(f"not stored: {outcome}", number)

    def _refuse(self, message: str, number: int) -> None:
        self.counts["refused"] += 1
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(models.ImportProblem(line=number, message=message[:300]))

    def _entry_of(self, line: _ImportLine) -> tuple[Entry, bytes | None]:
        """The entry of a line, and the key of its words. Raises ApiError, ValueError."""
        if line.entry is not None:
            entry = _read_entry(base64.b64decode(line.entry, validate=True))
            if (owner := self._owners.get(entry.partition)) is None:
                raise ValueError("made with another secret, or for a team that is not here: its digests fit no request")
            return _kept(entry, self._teams[owner]), None
        team = self._teams.get(self._team_id if line.team_id is None else line.team_id)  # type: ignore[arg-type]
        if team is None:
            raise ValueError("no such team: expected `team_id` in the line or the query")
        if line.request is None or (line.answer is None) == (line.response is None):
            raise ValueError("expected `entry`, or `request` with one of `answer` and `response`")
        return self._curated(team, line)

    def _curated(self, team: Team, line: _ImportLine) -> tuple[Entry, bytes | None]:
        settings, given = self._parts.settings, msgspec.json.encode(line.request, order="sorted")
        turn = read_turn(given, {}, arrive(CHAT.name))
        alias = self._parts.fleet.alias(turn.alias)
        alias.check(turn.body, turn.demand, turn.kind)
        partition, controls = self._parts.partition_of(team.id), turn.controls
        apart = apart_of(settings, alias, team)
        print_ = fingerprint(turn.body, partition, controls.namespace, settings.cache.key_fields, apart)
        whole = _whole(line, alias.name, print_.id)
        said = blake2b(msgspec.json.encode(line.answer or line.response, order="sorted"), digest_size=16).hexdigest()
        labels: dict[str, str | int] = {"model": alias.name, CURATED: said, REQUEST: given.decode()}
        if controls.tags:
            labels[TAGS] = "\n".join(controls.tags)
        is_findable = settings.cache.is_semantic and alias.settings.is_semantic and team.is_semantic_enabled
        if print_.text is not None and not is_findable:
            labels[ASKED] = digest_of(print_.text)
        text = print_.text if is_findable else None
        context = without(print_.context, self._volatile) if self._volatile and print_.context else print_.context
        entry = Entry(
            partition=partition,
            exact=print_.exact,
            compat=print_.compat,
            text=text,
            context=pack_context(context) if text is not None else b"",
            chunks=(Recorded(whole, is_whole=True),),
            created_at=self._parts.clock(),
            ttl_s=CURATED_TTL_S if controls.ttl_s is None else float(controls.ttl_s),
            namespace=controls.namespace,
            labels=labels,
        )
        return _kept(entry, team), None if text is None else words_key(print_.words, text)


def _kept(entry: Entry, team: Team) -> Entry:
    """`entry` for as long as its team keeps answers. Raises ValueError for one that keeps none, or of no time."""
    if team.store_s_max == 0:
        raise ValueError("nothing of this team's is kept here, by its `store_s_max` of 0")
    if not entry.ttl_s > 0:  # as NaN is not
        raise ValueError(f"it has no time to live: expected seconds, found {entry.ttl_s}")
    most_s = entry.ttl_s if team.store_s_max is None else float(team.store_s_max)
    return msgspec.structs.replace(entry, ttl_s=min(entry.ttl_s, most_s))


def _whole(line: _ImportLine, model: str, id: str) -> bytes:
    """The `chat.completion` of a curated answer. Raises ValueError where it is none."""
    if line.response is None:
        message = {"role": "assistant", "content": line.answer}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        head = {"id": f"chatcmpl-{id}", "object": "chat.completion", "created": int(time.time()), "model": model}
        return msgspec.json.encode({**head, "choices": [choice], "usage": usage})
    whole, choices = msgspec.json.encode(line.response), line.response.get("choices")
    if line.response.get("object") != "chat.completion" or not isinstance(choices, list) or not choices:
        raise ValueError("response: expected a chat.completion with choices")
    if not all(isinstance(one, dict) and isinstance(one.get("message"), dict) for one in choices):
        raise ValueError("response: expected a message in each choice")
    try:
        unfold(whole)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"response: expected a chat.completion ({error})") from None
    return whole


async def export_answers(parts: WorkerParts, body: models.ExportIn, operator: Acting) -> StreamingResponse:
    """Writes the cached answers of a team or of all, as lines for an import; curated ones with their requests. It is in
    the audit log."""
    owners = {parts.partition_of(team.id): team.id for team in await parts.accounts.list_teams()}
    chosen = await parts.entries_of(body.model_dump(exclude={"curated"}))
    # first: what cannot be audited is not shown
    await parts.audit.add(parts.audit_row(CACHE_EXPORTED, "answers", operator, body.team_id or 0))
    lines = _exported(parts, chosen, owners, is_curated=body.curated)
    return StreamingResponse(lines, media_type=NDJSON)


async def _exported(
    parts: AdminParts, chosen: Purge, owners: Mapping[Partition, int], *, is_curated: bool | None
) -> AsyncIterator[bytes]:
    async for entries in parts.exact.entries(chosen):
        some = [one for one in entries if one.partition in owners and is_curated in (None, one.is_curated)]
        yield b"".join(msgspec.json.encode(_line_of(one, owners[one.partition])) + b"\n" for one in some)


def _line_of(entry: Entry, team_id: int) -> dict[str, Any]:
    if entry.is_curated:
        asked, response = str(entry.labels[REQUEST]).encode(), entry.chunks[0].data
        return {"team_id": team_id, "request": msgspec.Raw(asked), "response": msgspec.Raw(response)}
    return {
        "team_id": team_id,
        "text": entry.text,
        "model": entry.labels.get("model"),
        "created_at_s": entry.created_at,
        "expires_at_s": entry.expires_at,
        "tags": str(entry.labels[TAGS]).split("\n") if TAGS in entry.labels else [],
        "entry": base64.b64encode(msgspec.msgpack.encode(entry)).decode(),
    }
