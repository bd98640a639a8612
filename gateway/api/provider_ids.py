"""The ids of a provider's objects in requests and answers, and the teams that own them.

Knows the names of fields with ids, and no other shape. Invariant: a request to a model names no
object that a provider gave to another team, through `/passthrough` or as an answer's container.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from cache.fingerprint import FIELDS
from gateway.accounts.provider_ids import ProviderIds
from gateway.journey.turn import Turn
from gateway.pipeline import Pipeline
from gateway.reserved import OTHER_TOOLS
from gateway.wire.errors import UNSUPPORTED_MEDIA, BadRequest, NotFound, UnsupportedMediaType, shown
from gateway.wire.forms import FormFiles
from gateway.wire.requests import BOM, decode_object, decode_strictly

_ID_KEY = re.compile(
    r"(?!(?:(?:tool_)?call|tool_use|custom|user|request|organization|project|account|model)_id$)"
    r"(?:.*_)?ids?|.*I[dD]s?|after|before|conversation|container|(?:.*_)?file|cached_?[cC]ontent"
)
_OBJECT_KEY = re.compile(r"file_ids?|vector_store_ids?|container(?:_id)?|skill_id")
_OBJECTS = (b"file_id", b"vector_store_id", b"container", b"skill_id")
_ESCAPED = re.compile(rb"\\u00[2-7]")
_MAKE_OBJECTS = frozenset({"container", "code_execution", OTHER_TOOLS})  # Anthropic's, whose answers name containers
IDS_MAX = 500
BLANK = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"  # before JSON, in any encoding


class NamedObjects:
    """Checks the owners of the objects that requests name, and notes those of answers. One per endpoint."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.have_owners = any(
            one.settings.passthrough or not _MAKE_OBJECTS.isdisjoint(one.settings.allow_fields)
            for one in pipeline.fleet.deployments
        )
        self._ids = ProviderIds(pipeline.accounts.database)

    async def own(self, ids: set[str], team_id: int) -> None:
        """Give the objects that an answer named to its team."""
        await self._ids.record("", team_id, ids)

    async def check(self, raw: bytes, team_id: int) -> None:
        """Check that a body names no other team's object. Raises NotFound for another team's,
        BadRequest.
        """
        if self.have_owners:
            await self._check(_named(raw, decode_object), team_id)

    async def check_files(self, files: FormFiles, team_id: int, bytes_max: int) -> None:
        """`check` for files that begin like JSON, each line of at most `bytes_max` bytes.

        Raises NotFound, and UnsupportedMediaType for an unreadable line that may name objects.
        """
        for part in files.files:
            first_bytes, last_line, bytes_left = b"", b"", part.size
            try:
                async for piece in files.parcel.read(part.at, part.size):
                    first_bytes = first_bytes or piece.lstrip(BLANK)[:2]
                    if first_bytes and first_bytes[:1] not in (b"{", b"["):
                        break
                    bytes_left -= len(piece)
                    lines, _, last_line = (last_line + piece + (b"" if bytes_left else b"\n")).rpartition(b"\n")
                    if first_bytes[1:] == b"\0" or len(last_line) > bytes_max:
                        raise BadRequest("Expected UTF-8, and shorter lines")
                    named = sorted(await asyncio.to_thread(_in_lines, lines))  # thousands, one by one
                    for start in range(0, len(named), IDS_MAX):
                        await self._check(set(named[start : start + IDS_MAX]), team_id)
            except BadRequest as error:
                words = f"send a JSON object, or one on each line. {error.message}"
                raise UnsupportedMediaType(
                    f"{shown(part.filename or '')} can't be searched for ids: {words}", code=UNSUPPORTED_MEDIA
                ) from None

    async def _check(self, ids: set[str], team_id: int) -> None:
        if len(ids) > IDS_MAX:
            raise BadRequest(f"The request names more than {IDS_MAX} objects: send fewer", code="invalid_value")
        odd = {one for one in ids if "\0" in one}  # no id, and no database takes it
        if self.have_owners and (others := odd or (ids and await self._ids.of_others(team_id, ids))):
            raise NotFound(f"There is no {shown(min(others))} here", code="not_found")


def _named(raw: bytes, decode: Callable[[bytes], dict[str, Any]]) -> set[str]:
    """The ids of objects in a JSON object; it is decoded only if its bytes may hold one. Raises
    BadRequest.
    """
    if any(map(raw.__contains__, _OBJECTS)) or _ESCAPED.search(raw):
        return set(ids_in(decode(raw), keys=_OBJECT_KEY))
    return set()


def _in_lines(lines: bytes) -> set[str]:
    """The ids of objects in JSON lines, or in one value on several lines.

    Metadata is included: a provider may read each line alone.
    """
    try:
        return set().union(*(_named(line, decode_strictly) for line in lines.split(b"\n")))
    except BadRequest:
        with suppress(BadRequest):
            return set(ids_in(decode_strictly(b'{"":%b}' % lines.removeprefix(BOM)), (), _OBJECT_KEY))
        raise


def ids_in(value: Any, excluded: Sequence[str] = ("metadata",), keys: re.Pattern[str] = _ID_KEY) -> Iterator[str]:
    """The values of fields whose names match `keys`, at any depth, except fields in `excluded`."""
    for name, given in fields_of(value, excluded):
        if keys.fullmatch(name):
            given = given.get("id") if isinstance(given, dict) else given  # Anthropic's container
            for id in given if isinstance(given, list) else [given]:
                # a call of a tool has an id of its answer alone
                if isinstance(id, str) and id and not id.startswith(("call_", "toolu_")):
                    yield id


def apart_from_cache(turn: Turn, fields: Mapping[str, Any]) -> Turn:
    """`turn`, which neither reads nor fills the cache if one of `fields` that is no known field of a
    chat names what a provider keeps: the answer depends on that.
    """
    unknown = fields.keys() - FIELDS
    if not unknown or next(ids_in({name: fields[name] for name in unknown}), None) is None:
        return turn
    return replace(turn, controls=replace(turn.controls, no_cache=True, no_store=True))


def fields_of(value: Any, excluded: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Each field at any depth, except those named in `excluded`."""
    values_left = [value]
    while values_left:
        match values_left.pop():
            case dict() as fields:
                found = [(name, given) for name, given in fields.items() if name not in excluded]
                yield from found
                values_left += [given for _, given in found]
            case list() as items:
                values_left += items
