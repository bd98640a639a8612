"""The lines of a batch, read from its input one at a time, and their outcomes, beside the files.

Knows no SQL, no HTTP and no pipeline. Format: OpenAI API reference, "Batch", request input and
output. Every function blocks. Invariants: a line of any bytes is a request or an error, and takes
bounded memory; of several outcomes of one line the first counts; an incomplete outcome is ignored.
"""

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from gateway.batches.files import Upload
from gateway.transport.contents import Contents
from gateway.wire.errors import shown
from gateway.wire.requests import BOM

_LINES_A_CHUNK = 100
_BYTES_A_CHUNK = 4 << 20
_SKIP_BYTES = 64 << 10
_ID_CHARS_MAX = 512
_PARTS_A_CHUNK = 8
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
LINE_BYTES = 512
"""The bytes of a line's error, without the text that it repeats from the line."""


class LineSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Successive lines of an input: `size` bytes from `offset`, numbered from `first_line`.

    `lines` counts the lines that are not blank; `repeated` are the numbers of lines whose
    `custom_id` an earlier line has.
    """

    number: int
    offset: int
    size: int
    first_line: int
    lines: int
    repeated: list[int]


class LineRequest(msgspec.Struct, frozen=True):
    """The request in one line."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineRefused(Exception):
    """A line is not run, for a reason. `custom_id` is None if the line has no readable one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


class LineOutcome(msgspec.Struct, frozen=True):
    """The end of one line: `data` is its line of the output file, or of the error file."""

    line: int
    is_ok: bool
    data: bytes


class _CustomId(msgspec.Struct):
    custom_id: Any = None


class _Flags(msgspec.Struct):
    stream: Any = None
    background: Any = None
    model: Any = None


_WRONG = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_request = msgspec.json.Decoder(LineRequest).decode
_named = msgspec.json.Decoder(_CustomId).decode
_flags = msgspec.json.Decoder(_Flags).decode


def v1_of(endpoint: str) -> str:
    """An endpoint as OpenAI names it; Azure leaves `/v1` out (Azure OpenAI, "Global batch")."""
    return endpoint if endpoint.startswith("/v1/") else f"/v1{endpoint}"


def parse(raw: bytes | None, endpoint: str, bytes_max: int) -> tuple[LineRequest, str]:
    """The request of a line, and the model that it names, or empty. Raises LineRefused."""
    if raw is None:
        raise LineRefused("line_too_long", f"The line is longer than {bytes_max:,} bytes")
    try:
        line = _request(raw)
    except _WRONG as error:
        raise LineRefused("invalid_line", f"The line is not a request: {error}", id_of(raw)) from None
    if not 1 <= len(line.custom_id) <= _ID_CHARS_MAX:
        message = f"`custom_id` must have 1 to {_ID_CHARS_MAX} characters"
        raise LineRefused("invalid_custom_id", message, line.custom_id[:_ID_CHARS_MAX])
    if line.method != "POST":
        raise LineRefused("invalid_method", f"`method` is {shown(line.method)}: expected POST", line.custom_id)
    line = msgspec.structs.replace(line, url=v1_of(line.url))
    if line.url != v1_of(endpoint):
        message = f"`url` is {shown(line.url)}: expected the batch's endpoint, {endpoint}"
        raise LineRefused("mismatched_endpoint", message, line.custom_id)
    try:
        flags = _flags(bytes(line.body))
    except _WRONG:  # the endpoint says what is wrong
        return line, ""
    if flags.stream or flags.background:
        raise LineRefused("unsupported_parameter", "A line of a batch can't stream or run later", line.custom_id)
    return line, flags.model if isinstance(flags.model, str) else ""


def id_of(raw: bytes) -> str | None:
    """The `custom_id` of a line of any shape; None without a readable one."""
    try:
        custom_id = _named(raw).custom_id
    except _WRONG:
        return None
    return custom_id[:_ID_CHARS_MAX] if isinstance(custom_id, str) else None


def read_lines(file: BinaryIO, size: int, bytes_max: int) -> Iterator[tuple[bytes | None, int]]:
    """The lines of the next `size` bytes, each with its length in the file; a too long line is
    None.
    """
    while size > 0:
        raw = file.readline(bytes_max + 1)
        if not raw:
            return
        length = len(raw)
        if is_long := length > bytes_max and not raw.endswith(b"\n"):
            while (part := file.readline(_SKIP_BYTES)) and not part.endswith(b"\n"):
                length += len(part)
            length += len(part)
        size -= length
        yield None if is_long else raw.removeprefix(BOM).strip(), length


def scan(file: BinaryIO, lines_max: int, bytes_max: int) -> list[LineSpan]:
    """The chunks of an input. Raises OSError, and LineRefused for an empty input or too many lines."""
    custom_ids_seen = set[bytes]()
    chunks, count = list[LineSpan](), 0
    offset = chunk_start = lines = first = 0
    repeated: list[int] = []
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    for number, (raw, length) in enumerate(read_lines(file, size, bytes_max), 1):
        offset += length
        if raw != b"":
            lines += 1
            count += 1
            name = id_of(raw) if raw is not None else None
            if name is not None:
                digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                repeated += [number] if digest in custom_ids_seen else []
                custom_ids_seen.add(digest)
        if count > lines_max:
            raise LineRefused("too_many_lines", f"The file has more than {lines_max:,} lines")
        if lines and (lines >= _LINES_A_CHUNK or offset - chunk_start >= _BYTES_A_CHUNK or offset >= size):
            span = {"offset": chunk_start, "size": offset - chunk_start, "first_line": first + 1}
            chunks.append(LineSpan(number=len(chunks), lines=lines, repeated=repeated, **span))
            chunk_start, first, lines, repeated = offset, number, 0, []
    if not count:
        raise LineRefused("empty_file", "The file has no line")
    return chunks


def written(outcome: LineOutcome) -> bytes:
    """An outcome as it is kept until its batch ends."""
    return b"%d %d %b\n" % (outcome.line, outcome.is_ok, outcome.data)


def outcomes(contents: Contents, batch_key: str, number: int) -> Iterator[LineOutcome]:
    """The outcomes of a chunk that are kept: the first outcome of each ended line. Raises OSError."""
    lines_seen = set[int]()
    for key in sorted(contents.keys(f"{batch_key}/{number}.")):
        with contents.open(key) as file:
            for raw in file:
                line, _, rest = raw.partition(b" ")
                is_ok, _, data = rest.partition(b" ")
                if line.isdigit() and is_ok in (b"0", b"1") and data.endswith(b"}\n") and int(line) not in lines_seen:
                    lines_seen.add(int(line))
                    yield LineOutcome(int(line), is_ok == b"1", data[:-1])


def merge(contents: Contents, batch_key: str, number: int) -> None:
    """Put the outcomes of an ended chunk into one content if they lie in many. Raises OSError."""
    keys, whole = contents.keys(f"{batch_key}/{number}."), f"{batch_key}/{number}.0"  # sorted before its parts
    if len(keys) > _PARTS_A_CHUNK and whole not in keys:
        file = contents.create(whole)
        for outcome in outcomes(contents, batch_key, number):
            file.write(written(outcome))
        file.seal()
        contents.remove(keys)


def assemble(
    contents: Contents, batch_key: str, chunks: Sequence[LineSpan], output: Upload, errors: Upload
) -> dict[int, tuple[int, int]]:
    """Write all outcomes to the two files. Returns each chunk's number of lines in both. Raises OSError."""
    counts = dict[int, tuple[int, int]]()
    for chunk in chunks:
        of_chunk = [0, 0]
        for outcome in outcomes(contents, batch_key, chunk.number):
            of_chunk[outcome.is_ok] += 1
            (output if outcome.is_ok else errors).append(outcome.data + b"\n")
        counts[chunk.number] = of_chunk[True], of_chunk[False]
    return counts


def answered(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The output line for a response; a body that is not JSON becomes a text."""
    text = body.decode("utf-8", "replace")
    shown_body: msgspec.Raw | str = text
    with contextlib.suppress(*_WRONG):
        shown_body = msgspec.Raw(msgspec.json.format(text, indent=-1))  # on one line, as an outcome is a line
    response = {"status_code": status, "request_id": request_id, "body": shown_body}
    return msgspec.json.encode({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def refused(line_id: str, number: int, refusal: LineRefused) -> bytes:
    """The output line for a line without a response."""
    error = {"code": refusal.code, "message": refusal.message, "line": number}
    return msgspec.json.encode({"id": line_id, "custom_id": refusal.custom_id, "response": None, "error": error})
