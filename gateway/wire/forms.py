"""Forms with files (multipart/form-data, RFC 7578): read piece by piece, kept in a file, encoded
again.

Knows no HTTP and no shapes of requests. Invariants: a file passes through memory a piece at a time;
the file on the disk has no name, so that it disappears with the process, even after a kill; a
client's file name cannot end a header or a part of the encoded form.
"""

import asyncio
import errno
import hashlib
import os
import re
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.wire.errors import BadRequest, StorageFull, shown

_PIECE_BYTES = 256 << 10
_FIELDS_MAX, _HEADERS_BYTES_MAX = 64, 4_096
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,60}/[\w.+-]{1,60}")


class FormPart(msgspec.Struct, eq=False):
    """One part of a form. `filename` is None for a field. `at` is the offset of its bytes in the
    parcel.
    """

    name: str = ""
    filename: str | None = None
    media: str = "application/octet-stream"
    at: int = 0
    size: int = 0
    digest: Any = msgspec.field(default_factory=hashlib.sha256)

    @property
    def is_file(self) -> bool:
        return self.filename is not None or self.name == "file"


def boundary_of(content_type: str) -> bytes:
    """The boundary in a form's content type; empty for another type."""
    kind, options = parse_options_header(content_type)
    return options.get(b"boundary", b"") if kind == b"multipart/form-data" else b""


class Form:
    """The parser of an arriving form. Memory holds its fields, `fields_bytes_max` bytes at most."""

    def __init__(self, boundary: bytes, fields_bytes_max: int) -> None:
        self.fields: list[tuple[str, str]] = []
        self._fields_bytes_max = self._bytes_left = fields_bytes_max
        self._is_complete = False
        self._part, self._parts = FormPart(), 0
        self._header, self._value = b"", b""
        self._data = bytearray()
        self._pieces: list[tuple[FormPart, bytes]] = []
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise _bad_form(str(error)) from None

    def read(self, data: bytes) -> list[tuple[FormPart, bytes]]:
        """Parse the next bytes; returns the pieces of files, each with its part. Raises BadRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _bad_form(str(error)) from None
        pieces, self._pieces = self._pieces, []
        return pieces

    def check(self) -> None:
        """Raise BadRequest unless the form is complete."""
        if not self._is_complete:
            raise _bad_form("it ends before its last part does")

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
        self._check_header()

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header) + len(self._value) > _HEADERS_BYTES_MAX:
            raise _bad_form(f"a header of a part is longer than {_HEADERS_BYTES_MAX:,} bytes")

    def _on_header_end(self) -> None:
        match self._header.lower():
            case b"content-disposition":
                _, options = parse_options_header(self._value)
                self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
                if b"filename" in options:
                    self._part.filename = options[b"filename"].decode("utf-8", "replace")
            case b"content-type" if _MEDIA_TYPE.fullmatch(media := self._value.decode("latin-1").strip()):
                self._part.media = media
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        self._parts += 1
        if self._parts > _FIELDS_MAX:
            raise BadRequest(f"A form has at most {_FIELDS_MAX} parts", code="invalid_value")
        if self._part.is_file:
            self._pieces.append((self._part, b""))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._pieces.append((self._part, data[start:end]))
            return
        self._data += data[start:end]
        self._bytes_left -= end - start
        if self._bytes_left < 0:
            words = f"The fields up to {shown(self._part.name)} are longer than {self._fields_bytes_max:,} bytes"
            raise BadRequest(words, param=shown(self._part.name), code="invalid_value")

    def _on_part_end(self) -> None:
        if not self._part.is_file:
            self.fields.append((self._part.name, self._data.decode("utf-8", "replace")))
        self._part, self._data = FormPart(), bytearray()

    def _on_end(self) -> None:
        self._is_complete = True


def _bad_form(why: str) -> BadRequest:
    return BadRequest(f"The body is not valid multipart/form-data: {why}", code="invalid_form")


class Parcel:
    """Bytes on the disk in `folder`, in an unnamed file; closing it frees them."""

    def __init__(self, folder: Path) -> None:
        self.size = 0
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._is_closed = False
        self._using = threading.Lock()  # a descriptor that is closed under a thread may be another file's next

    async def write(self, data: bytes) -> None:
        """Append `data`. Raises StorageFull."""
        try:
            await asyncio.to_thread(self._write, data)
        except OSError as error:
            raise StorageFull(f"The upload could not be kept on the disk: {error.strerror}") from None

    def _write(self, data: bytes) -> None:
        with self._using:
            if self._is_closed:
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - `close` does
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "not all of it was written")
            self.size += len(data)

    async def read(self, start: int, size: int) -> AsyncIterator[bytes]:
        """Yield `size` bytes from `start` on, in pieces. Raises OSError if bytes are missing."""
        while size > 0:
            piece = await asyncio.to_thread(self._read, start, min(size, _PIECE_BYTES))
            start, size = start + len(piece), size - len(piece)
            yield piece

    def _read(self, start: int, size: int) -> bytes:
        with self._using:
            piece = b"" if self._file is None else os.pread(self._file.fileno(), size, start)
        if not piece:
            raise OSError(errno.EIO, "the upload is not on the disk any more")
        return piece

    def close(self) -> None:
        """Free the bytes, after a thread that uses them is done with its piece."""
        with self._using:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
                self._file = None


class FormFiles:
    """The files of a form, stored in a `Parcel`. `add` takes the pieces of `Form.read`.

    `media` is the content type of a body that is a single file without a form.
    """

    def __init__(self, folder: Path, media: str = "") -> None:
        self.parcel = Parcel(folder)
        self._media = media
        self.files: list[FormPart] = []

    def __enter__(self) -> "FormFiles":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Close the files if the block raised."""
        if error is not None:
            self.parcel.close()

    async def add(self, part: FormPart, piece: bytes) -> None:
        if part not in self.files:
            part.at = self.parcel.size
            self.files.append(part)
        if piece:
            part.digest.update(piece)
            part.size += len(piece)
            await self.parcel.write(piece)

    def body(self, form: Form) -> dict[str, Any]:
        """The form as a request's body: repeated fields are lists, files are name, type, size and
        digest.
        """
        body: dict[str, Any] = {}
        for name, value in [*form.fields, *((part.name, _described(part)) for part in self.files)]:
            if name not in body and not name.endswith("[]"):
                body[name] = value
            else:
                given = body.get(name, [])
                body[name] = [*given, value] if isinstance(given, list) else [given, value]
        return body

    def written(self, body: dict[str, Any]) -> "tuple[str, int, AsyncIterator[bytes]]":
        """The content type, size and pieces of a new form with these files and the fields of
        `body`.

        A body that is a single file without a form stays unchanged.
        """
        if self._media:
            return self._media, self.parcel.size, self.parcel.read(0, self.parcel.size)
        boundary = secrets.token_hex(16)
        fields = [
            (name, value)
            for name, given in body.items()
            for value in (given if isinstance(given, list) else [given])
            if not isinstance(value, dict)
        ]
        parts: list[tuple[bytes, int, int]] = []  # each head with what follows it, or the place of its file
        for name, value in fields:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            parts.append((f"--{boundary}\r\n{_disposition(name)}\r\n\r\n{text}\r\n".encode("utf-8", "replace"), 0, 0))
        for part in self.files:
            head = f"{_disposition(part.name, part.filename or '')}\r\nContent-Type: {part.media}"
            parts.append((f"--{boundary}\r\n{head}\r\n\r\n".encode("utf-8", "replace"), part.at, part.size))
            parts.append((b"\r\n", 0, 0))
        parts.append((f"--{boundary}--\r\n".encode(), 0, 0))
        size = sum(len(head) + length for head, _, length in parts)
        return f"multipart/form-data; boundary={boundary}", size, self._pieces(parts)

    async def _pieces(self, parts: list[tuple[bytes, int, int]]) -> AsyncIterator[bytes]:
        for head, at, length in parts:
            yield head
            async for piece in self.parcel.read(at, length):
                yield piece


def _described(part: FormPart) -> dict[str, Any]:
    digest = part.digest.hexdigest()
    return {"filename": part.filename or "", "type": part.media, "bytes": part.size, "sha256": digest}


def _disposition(name: str, filename: str | None = None) -> str:
    """The header of a part, with three characters of names escaped.

    Source: HTML standard, "Multipart form data".
    """
    name, quoted = (one.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A") for one in (name, filename or ""))
    return f'Content-Disposition: form-data; name="{name}"' + ("" if filename is None else f'; filename="{quoted}"')
