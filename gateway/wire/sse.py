"""Server-sent events: frames for clients, and a splitter for upstream streams.

Format: WHATWG HTML, section 9.2.6 "Interpreting an event stream". Knows no JSON and no OpenAI. The
splitter keeps only `data`, and beside it what is no field of an event. Invariant: the
payloads do not depend on where the bytes are split.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import contains

import msgspec

DONE = b"data: [DONE]\n\n"
PAYLOAD_BYTES_MAX = 64 << 20

_LF, _CR = b"\n\r"  # as numbers: a search for a byte costs a fifth of one for bytes
_BOM = b"\xef\xbb\xbf"
_FIELDS = frozenset({b"", b"event", b"id", b"retry"})  # beside `data`; without a name: a comment
_STRAY_BYTES_MAX = 64 << 10


class PayloadTooLarge(Exception):
    """One event grew beyond `PAYLOAD_BYTES_MAX`."""


def frame(data: bytes) -> bytes:
    """One event that carries `data` (JSON: no bare carriage returns)."""
    if _LF in data:
        data = data.replace(b"\n", b"\ndata: ")
    return b"data: " + data + b"\n\n"


def frames(payloads: Sequence[bytes]) -> bytes:
    """One event for each payload, in one piece."""
    if not payloads:
        return b""
    if _have_lines(payloads):
        return b"".join([frame(payload) for payload in payloads])
    return b"data: " + b"\n\ndata: ".join(payloads) + b"\n\n"


def _have_lines(payloads: Sequence[bytes]) -> bool:
    """Whether any payload has several lines, which is rare."""
    return True in map(contains, payloads, repeat(_LF))


def events_in(body: bytes) -> list[bytes]:
    """The data of events in a body of another type: of an event stream, or one JSON a line; else nothing."""
    if body.lstrip().startswith((b"data:", b"event:", b":")):
        splitter = Splitter()
        return [*splitter.feed(body), *filter(None, [splitter.end()])]
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    return lines if len(lines) > 1 and all(line.startswith(b"{") for line in lines) else []


class Splitter(msgspec.Struct):
    """Cuts a stream of bytes into the `data` payloads of its events.

        splitter = Splitter()
        for data in reader:
            for payload in splitter.feed(data): ...
        last = splitter.end()

    The lines of one event are joined by LF. Line ends are LF, CRLF or CR; the buffer is bounded.
    """

    stray: bytes = b""  # the beginning of what is no field of an event, such as a server's own error
    _parts: list[bytes] = []
    _buffered_bytes: int = 0
    _ends_in_cr: bool = False
    _is_at_start: bool = True

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order. Raises PayloadTooLarge."""
        if self._ends_in_cr or _CR in data:
            data = self._with_line_feeds(data)
        if not data:
            return []
        ends_line = bool(self._parts) and self._parts[-1].endswith(b"\n")
        if b"\n\n" not in data and not (ends_line and data.startswith(b"\n")):
            self._keep(data)
            return []
        if self._parts:
            data = b"".join((*self._parts, data))
            self._parts.clear()
            self._buffered_bytes = 0
        end = data.rfind(b"\n\n") + 2
        if end < len(data):
            self._keep(data[end:])
            data = data[:end]
        if data.startswith(b"data: "):
            payloads = data[6:-2].split(b"\n\ndata: ")
            if not _have_lines(payloads):  # nearly always: events of one line
                self._is_at_start = False
                return payloads
        return [payload for event in data[:-2].split(b"\n\n") if (payload := self._payload(event)) is not None]

    def end(self) -> bytes | None:
        """The payload of a last event without its blank line, or None.

        The standard drops such an event, but some servers end their streams with one.
        """
        event = b"".join(self._parts)
        self._parts.clear()
        self._buffered_bytes = 0
        return self._payload(event.removesuffix(b"\n"))

    def _keep(self, data: bytes) -> None:
        self._parts.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > PAYLOAD_BYTES_MAX:
            raise PayloadTooLarge(f"one event is longer than {PAYLOAD_BYTES_MAX} bytes")

    def _with_line_feeds(self, data: bytes) -> bytes:
        if self._ends_in_cr and data[:1] == b"\n":
            data = data[1:]
            self._ends_in_cr = False
            if not data:
                return data
        if data:
            self._ends_in_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _payload(self, event: bytes) -> bytes | None:
        if self._is_at_start:
            self._is_at_start = False
            event = event.removeprefix(_BOM)
        if event.startswith(b"data: ") and _LF not in event:  # nearly every event
            return event[6:]
        lines = []
        for line in event.split(b"\n"):
            name, _, value = line.partition(b":")
            if name == b"data":
                lines.append(value.removeprefix(b" "))
            elif name not in _FIELDS:
                self.stray += (line + b"\n")[: _STRAY_BYTES_MAX - len(self.stray)]
        return b"\n".join(lines) if lines else None
