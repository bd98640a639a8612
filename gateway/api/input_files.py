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

_HOLDERS = ("messages", "input", "system")
_FILES_MAX = 50
_UNKNOWN_MEDIA = "application/octet-stream"


async def with_files(raw: bytes, files: Files, team_id: int, bytes_max: int) -> bytes:
    """The body `raw`, with the files that its messages or items name. Raises BadRequest."""
    if b'"file_id"' not in raw:
        return raw
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
                content = await asyncio.to_thread(_content, files, file)
            except OSError as error:
                raise storage_error(error) from None
            _place(part, holder, file, content)
            is_changed = True
    return msgspec.json.encode(body) if is_changed else raw


def _content(files: Files, file: File) -> bytes:
    with files.contents.open(key_of(file.team_id, file.id)) as content:
        return content.read()


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


def _place(part: dict[str, Any], holder: dict[str, Any], file: File, content: bytes) -> None:
    """Put a file's content in the place of its id, in the shape of the part that names it."""
    media = mimetypes.guess_type(file.filename)[0] or _UNKNOWN_MEDIA
    del holder["file_id"]
    url = f"data:{media};base64,{b64encode(content).decode()}"
    if part["type"] == "input_image":
        part["image_url"] = url
    elif "source" not in part:
        holder |= {"file_data": url, "filename": holder.get("filename") or file.filename}
    elif media.startswith("text/"):
        holder |= {"type": "text", "media_type": "text/plain", "data": content.decode("utf-8", "replace")}
    else:
        holder |= {"type": "base64", "media_type": media, "data": b64encode(content).decode()}
