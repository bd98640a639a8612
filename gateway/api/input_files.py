"""Files of a team in the content of requests: each is put in the place of its id.

So a request reads the same at every deployment, and is cached by what the file says. Shapes: OpenAI
API reference, "File inputs"; Anthropic API reference, "Files". Invariants: a request reads only
files of its key's team; an id that the team has no file of stays, for it may be a provider's.
"""

import asyncio
import mimetypes
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from gateway.batches.files import INPUTS, File, Files, key_of, storage_error
from gateway.wire.chunks import UNREADABLE
from gateway.wire.errors import BadRequest, NotFound

NAMES_FILES = b'"file_id"'
_HOLDERS = ("messages", "input", "system")
_FILES_MAX = 50
_UNKNOWN_MEDIA = "application/octet-stream"


async def with_files(raw: bytes, files: Files, team_id: int, bytes_max: int) -> bytes:
    """The body `raw`, with the files that its messages or items name. Raises BadRequest."""
    try:
        body = msgspec.json.decode(raw)
        parts = [part for name in _HOLDERS for part in _parts(body.get(name))]
    except (*UNREADABLE, AttributeError):  # the endpoint says what is wrong
        return raw
    bytes_left, is_changed = bytes_max - len(raw), False
    if len(parts) > _FILES_MAX:
        raise BadRequest(f"The request names more than {_FILES_MAX} files: send fewer", code="invalid_value")
    for part in parts:
        holder = part["file"] if isinstance(part.get("file"), dict) else part
        holder = part["source"] if isinstance(part.get("source"), dict) else holder
        with suppress(NotFound):
            file = await files.get(team_id, holder["file_id"])
            if file.purpose not in INPUTS:
                reason = f"The file {file.id} has the purpose `{file.purpose}`: expected one of {', '.join(INPUTS)}"
                raise BadRequest(reason, param="file_id", code="invalid_value")
            if (bytes_left := bytes_left - file.bytes * 4 // 3) < 0:
                reason = f"The request and its files have more than {bytes_max} bytes: send less"
                raise BadRequest(reason, param="file_id", code="context_length_exceeded")
            try:
                await asyncio.to_thread(_place, part, holder, file, files)
            except OSError as error:
                raise storage_error(error) from None
            is_changed = True
    return await asyncio.to_thread(msgspec.json.encode, body) if is_changed else raw


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """The parts that name a file, in messages or items: by type, as arguments of tools have no part."""
    if isinstance(value, list):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, dict):
        match value:
            case (
                {"type": "input_file" | "input_image", "file_id": str()}
                | {"type": "file", "file": {"file_id": str()}}
                | {"type": "document" | "image", "source": {"type": "file", "file_id": str()}}
            ):
                yield value
        for name in ("content", "output"):
            yield from _parts(value.get(name))


def _place(part: dict[str, Any], holder: dict[str, Any], file: File, files: Files) -> None:
    """Put the content of a file in the place of its id, in the shape of the part that names it.

    Raises OSError. It takes long: a file may have megabytes.
    """
    with files.contents.open(key_of(file.team_id, file.id)) as source:
        content = source.read()
    media = mimetypes.guess_type(file.filename)[0] or _UNKNOWN_MEDIA
    del holder["file_id"]
    if "source" in part and media.startswith("text/"):
        holder |= {"type": "text", "media_type": "text/plain", "data": content.decode("utf-8", "replace")}
        return
    data = b64encode(content).decode()
    if "source" in part:
        holder |= {"type": "base64", "media_type": media, "data": data}
    elif part["type"] == "input_image":
        part["image_url"] = f"data:{media};base64,{data}"
    else:
        holder |= {"file_data": f"data:{media};base64,{data}", "filename": holder.get("filename") or file.filename}
