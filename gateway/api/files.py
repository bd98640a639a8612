"""`/v1/files`: upload, list, read and delete the files of batches.

Shapes: OpenAI API reference, "Files"; multipart/form-data (RFC 7578). Invariants: a file passes
through memory a piece at a time, both ways; an upload that does not end leaves nothing.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.api import asgi
from gateway.api.stored import Call, StoredEndpoint, listed, no_such_action, one_of, paging
from gateway.batches.files import PURPOSES, Files, check_expiry, check_purpose, storage_error
from gateway.pipeline import Pipeline
from gateway.transport.http_server import WHEN_GONE
from gateway.wire.errors import BadRequest, UnsupportedMediaType, shown

_PIECE_BYTES = 256 << 10
_FIELDS_MAX, _FIELD_BYTES_MAX = 16, 4_096
_LIST_MAX = 10_000
_FILE = "file"
_DIGITS = re.compile(r"[0-9]{1,9}")


class FilesEndpoint(StoredEndpoint):
    """The endpoint for files. One instance per worker."""

    operation = "files"
    path = "/v1/files"

    def __init__(self, pipeline: Pipeline, files: Files) -> None:
        super().__init__(pipeline)
        self._files = files

    async def answer(self, call: Call) -> dict[str, Any] | None:
        team_id = call.identity.team.id
        match call.method, call.object_id, call.action:
            case "POST", "", "":
                return await self._upload(call)
            case "GET", "", "":
                return await self._list(call)
            case "GET", file_id, "":
                return (await self._files.get(team_id, file_id)).as_json()
            case "DELETE", file_id, "" if file_id:
                await self._files.delete(team_id, file_id)
                return {"id": file_id, "object": "file", "deleted": True}
            case "GET", file_id, "content":
                found = await self._files.get(team_id, file_id)
                await self._send_content(call, self._files.path(found.id), found.bytes)
                return None
        raise no_such_action(self.path, call)

    async def _list(self, call: Call) -> dict[str, Any]:
        asked = paging(call.query, _LIST_MAX, _LIST_MAX)
        purpose, order = one_of(call.query, "purpose", PURPOSES), one_of(call.query, "order", ("asc", "desc"))
        found = await self._files.page(
            call.identity.team.id, asked.after, asked.limit, purpose, is_newest_first=order != "asc"
        )
        return listed([file.as_json() for file in found], asked.limit)

    async def _upload(self, call: Call) -> dict[str, Any]:
        """The file of a multipart body, which is read until the client leaves or it is complete."""
        kind, options = parse_options_header(call.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise BadRequest(
                "Expected a multipart/form-data body with `file` and `purpose`", param="file", code="invalid_type"
            )
        if call.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise UnsupportedMediaType("A file can't be sent with a Content-Encoding: send it as it is")
        announced = call.headers.get("content-length", "")
        # what surrounds the file in the body is no part of it
        bytes_max = max(1, int(announced) - 2 * len(options[b"boundary"])) if _is_size(announced) else None
        upload = await self._files.begin(call.identity.team.id, bytes_max)
        try:
            form = _Form(options[b"boundary"])
            while True:
                message = await call.receive()
                if message["type"] != "http.request":
                    raise asgi.ClientGone
                for piece in form.read(message.get("body", b"")):
                    await upload.write(piece)
                if "purpose" in form.fields:  # before the rest arrives
                    check_purpose(form.fields["purpose"])
                if not message.get("more_body"):
                    break
            form.check()
            purpose, expires_after_s = check_purpose(form.fields.get("purpose", "")), _expires_after(form.fields)
            return (await upload.keep(purpose, form.filename, expires_after_s)).as_json()
        except BaseException:
            await upload.drop()
            raise

    async def _send_content(self, call: Call, path: Path, size: int) -> None:
        """Send a file as its client takes it."""
        gone: list[bool] = []
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except OSError as error:
            raise storage_error(error) from None
        with file:
            call.scope.get("extensions", {}).get(WHEN_GONE, gone.clear)(lambda: gone.append(True))
            kind = (b"content-type", b"application/octet-stream")
            headers = [kind, (b"content-length", str(size).encode()), (b"x-content-type-options", b"nosniff")]
            await call.send({"type": "http.response.start", "status": 200, "headers": [*headers, *call.out]})
            left = 0 if call.scope["method"] == "HEAD" else size
            while left > 0 and not gone:
                piece = await asyncio.to_thread(file.read, min(left, _PIECE_BYTES))
                left -= len(piece)
                if not piece:
                    raise storage_error(OSError(f"{path.name} is shorter than its row says"))
                await call.send({"type": "http.response.body", "body": piece, "more_body": left > 0})
            if not size or call.scope["method"] == "HEAD":
                await call.send({"type": "http.response.body", "body": b""})


def _is_size(announced: str) -> bool:
    return announced.isascii() and announced.isdecimal() and len(announced) < 16


def _expires_after(fields: dict[str, str]) -> int | None:
    """The seconds that the file is kept; None where the form does not say. Raises BadRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    return check_expiry(anchor, int(seconds) if seconds and _DIGITS.fullmatch(seconds) else None)


class _Form:
    """A multipart form that arrives: its small fields, its file's name, and its file in pieces."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._is_complete = False
        self._files = 0
        self._name, self._header, self._value = "", b"", b""
        self._data = bytearray()
        self._pieces: list[bytes] = []
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise _bad_form(str(error)) from None

    def read(self, data: bytes) -> list[bytes]:
        """The pieces of the file in the next bytes of the body. Raises BadRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _bad_form(str(error)) from None
        pieces, self._pieces = self._pieces, []
        return pieces

    def check(self) -> None:
        """Raises BadRequest if the form is not complete, or has not one file with content."""
        if not self._is_complete:
            raise _bad_form("it ends before its last part does")
        if not self._files:
            raise BadRequest("Missing required field: file", param=_FILE, code="missing_required_parameter")

    def _callbacks(self) -> Any:
        return {
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == _FILE:
                self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        self._files += self._name == _FILE
        if self._files > 1 or len(self.fields) > _FIELDS_MAX:
            raise BadRequest(f"A form has one file and at most {_FIELDS_MAX} fields", param=_FILE, code="invalid_value")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._pieces.append(data[start:end])
            return
        self._data += data[start:end]
        if len(self._data) > _FIELD_BYTES_MAX:
            raise BadRequest(
                f"The field {shown(self._name)} is longer than {_FIELD_BYTES_MAX:,} bytes", code="invalid_value"
            )

    def _on_part_end(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._data.decode("utf-8", "replace")
        self._name, self._data = "", bytearray()

    def _on_end(self) -> None:
        self._is_complete = True


def _bad_form(why: str) -> BadRequest:
    return BadRequest(f"The body is not valid multipart/form-data: {why}", code="invalid_form")
