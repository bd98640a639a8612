"""What of a cached answer a local engine may take for a draft: its text, and nothing where there is none to be read."""

from __future__ import annotations

import msgspec
import pytest

from cache import Recorded
from gateway.journey.semantic import draft_of
from tests.cache.fakes import ask, entry_for

DELTA = b'{"id":"c",%b"choices":[{"index":0,"delta":%b,"finish_reason":null}]}'
CUSTOM = b'{"tool_calls":[{"index":0,"id":"c","type":"custom","custom":{"name":"n","input":"x"}}]}'


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ((Recorded(DELTA % (b"", b'{"content":"Hi"}')), Recorded(DELTA % (b"", b'{"content":" you"}'))), "Hi you"),
        ((Recorded(b"\n".join([DELTA % (b"", b'{"content":"ha "}')] * 2), count=2),), "ha ha "),
        ((Recorded(DELTA % (b"", CUSTOM)),), ""),
        ((Recorded(DELTA % (b'"note":"\xff",', b'{"content":"Hi"}')),), ""),
        ((Recorded(DELTA % (b'"note":1e999,', b'{"content":"Hi"}')),), ""),
        ((Recorded(DELTA % (b"", b'{"content":"%b"}' % (b"x" * 70_000))),), ""),
        ((), ""),
    ],
    ids=["text", "together", "another kind of call", "bytes that are no text", "out of range", "too long", "nothing"],
)
def test_whatever_was_recorded_breaks_no_request(chunks: tuple[Recorded, ...], text: str) -> None:
    """A draft is a guess: an answer that cannot be read is none."""
    assert draft_of(msgspec.structs.replace(entry_for(ask("why"), 1_000.0), chunks=chunks)) == text
