"""`/v1/files`: upload, list, read and delete the files of batches.

Shapes: OpenAI API reference, "Files"; Anthropic API reference, "Files", for a client that sends
`anthropic-version`; multipart/form-data (RFC 7578). Invariants: a file passes through memory a
piece at a time, both ways; an incomplete upload leaves no file.
"""

import asyncio
import mimetypes
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gateway.api.endpoint import Call, ObjectEndpoint, after_of, limit_of, listed, one_of, page_of
from gateway.api.messages import InAnthropicsShape
from gateway.batches.files import PURPOSES, File, Files, check_expiry, check_purpose, kept_s_of, key_of, storage_error
from gateway.pipeline import Pipeline
from gateway.transport.http_server import WHEN_GONE
from gateway.wire.errors import BadRequest, MissingField
from gateway.wire.forms import Form, boundary_of

_PIECE_BYTES = 256 << 10
_FIELD_BYTES_MAX = 4_096
_LIST_MAX = 10_000
_FILE = "file"
_CURSOR = "page_"
_DIGITS = re.compile(r"[0-9]{1,9}")


class FilesEndpoint(ObjectEndpoint):
    """The endpoint for files. One instance per worker."""

    operation = "files"
    path = "/v1/files"
    purpose = ""  # of an upload that names none
    shown = staticmethod(File.as_json)
    deleted: Mapping[str, Any] = {"object": "file", "deleted": True}

    def __init__(self, pipeline: Pipeline, files: Files) -> None:
        super().__init__(pipeline)
        self._files = files

    async def answer(self, call: Call) -> dict[str, Any] | None:
        team_id = call.identity.team.id
        match call.method, call.object_id, call.action:
            case "POST", "", "":
                return self.shown(await self._upload(call))
            case "GET", "", "":
                return await self._list(call)
            case "GET", file_id, "":
                return self.shown(await self._files.get(team_id, file_id))
            case "DELETE", file_id, _:
                await self._files.delete(team_id, file_id)
                return {"id": file_id, **self.deleted}
            case _, file_id, _:  # its content
                found = await self._files.get(team_id, file_id)
                await self._send_content(call, key_of(team_id, found.id), found.bytes)
                return None

    async def _list(self, call: Call) -> dict[str, Any]:
        limit, after = limit_of(call.query, _LIST_MAX, _LIST_MAX), after_of(call.query)
        purpose, order = one_of(call.query, "purpose", PURPOSES), one_of(call.query, "order", ("asc", "desc"))
        page = await self._files.page(call.identity.team.id, after, limit, purpose, is_newest_first=order != "asc")
        return listed([file.as_json() for file in page], limit)

    async def _upload(self, call: Call) -> File:
        """Store the file of a multipart body; the read stops when the client leaves."""
        boundary = boundary_of(call.headers.get("content-type", ""))
        if not boundary:
            raise BadRequest(
                "Expected a multipart/form-data body with `file` and `purpose`", param="file", code="invalid_type"
            )
        announced = call.headers.get("content-length", "")
        # what surrounds the file in the body is no part of it
        is_size = announced.isascii() and announced.isdecimal() and len(announced) < 16
        bytes_max = max(1, int(announced) - 2 * len(boundary)) if is_size else None
        kept_s_of(call.identity.team, self._files.settings)
        upload = await self._files.begin(call.identity.team.id, bytes_max)
        try:
            form, file = Form(boundary, _FIELD_BYTES_MAX), None
            async for data in call.body.pieces(sys.maxsize):  # the upload has a bound of its own
                for part, piece in form.read(data):
                    if part.name != _FILE:
                        raise MissingField(_FILE)
                    if file not in (None, part):
                        raise BadRequest("A form has one file", param=_FILE, code="invalid_value")
                    file = part
                    await upload.write(piece)
                fields = dict(form.fields)
                if "purpose" in fields:  # before the rest arrives
                    check_purpose(fields["purpose"])
            form.check()
            if file is None:
                raise MissingField(_FILE)
            purpose, expires_after_s = check_purpose(fields.get("purpose", self.purpose)), _expires_after(fields)
            kept_s = kept_s_of(call.identity.team, self._files.settings, expires_after_s)
            return await upload.keep(purpose, file.filename or "", kept_s)
        except BaseException:
            await upload.drop()
            raise

    async def _send_content(self, call: Call, key: str, size: int) -> None:
        """Send a file as its client takes it."""
        departures: list[bool] = []
        try:
            file = await asyncio.to_thread(self._files.contents.open, key)
        except OSError as error:
            raise storage_error(error) from None
        with file:
            call.scope.get("extensions", {}).get(WHEN_GONE, departures.clear)(lambda: departures.append(True))
            kind = (b"content-type", b"application/octet-stream")
            headers = [kind, (b"content-length", str(size).encode()), (b"x-content-type-options", b"nosniff")]
            await call.send({"type": "http.response.start", "status": 200, "headers": [*headers, *call.out]})
            bytes_left = 0 if call.scope["method"] == "HEAD" else size
            while bytes_left > 0 and not departures:
                piece = await asyncio.to_thread(file.read, min(bytes_left, _PIECE_BYTES))
                bytes_left -= len(piece)
                if not piece:
                    raise storage_error(OSError(f"{key} is shorter than its row says"))
                await call.send({"type": "http.response.body", "body": piece, "more_body": bytes_left > 0})
            if not size or call.scope["method"] == "HEAD":
                await call.send({"type": "http.response.body", "body": b""})


class AnthropicFiles(InAnthropicsShape, FilesEndpoint):
    """The same files in the shapes of Anthropic's API, which knows no purposes."""

    purpose = "user_data"
    deleted: Mapping[str, Any] = {"type": "file_deleted"}

    @staticmethod
    def shown(file: File) -> dict[str, Any]:
        """Anthropic's file object."""
        kind = mimetypes.guess_type(file.filename)[0] or "application/octet-stream"
        named = {"type": "file", "id": file.id, "filename": file.filename, "mime_type": kind, "size_bytes": file.bytes}
        at = datetime.fromtimestamp(file.created_at_s, UTC).isoformat()
        return {**named, "created_at": at, "downloadable": True}

    async def _list(self, call: Call) -> dict[str, Any]:
        """A page of Anthropic's list, the newest first, by an id before or after it or by the cursor of later versions."""
        limit = limit_of(call.query, 20, 1_000)
        query = {**call.query, "page": call.query.get("page", "").removeprefix(_CURSOR)}
        before, after, cursor = (after_of(query, name) for name in ("before_id", "after_id", "page"))
        after = after or cursor
        is_back = bool(before) and not after
        page = await self._files.page(
            call.identity.team.id, before if is_back else after, limit, is_newest_first=not is_back
        )
        has_more, files = len(page) > limit, list(map(self.shown, page[:limit]))
        following = f"{_CURSOR}{files[-1]['id']}" if has_more and not is_back else None
        return page_of(files[::-1] if is_back else files, has_more) | {"next_page": following}


def _expires_after(fields: dict[str, str]) -> int | None:
    """The seconds that the file is kept; None if the form does not set them. Raises BadRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    return check_expiry(anchor, int(seconds) if seconds and _DIGITS.fullmatch(seconds) else None)
