"""The splitter against the standard's own line-by-line reading, under every way of cutting the bytes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.wire.sse import PAYLOAD_BYTES_MAX, PayloadTooLarge, Splitter, frame, frames


def by_the_standard(stream: bytes) -> list[bytes]:
    """WHATWG HTML 9.2.6, read slowly: complete events only."""
    found: list[bytes] = []
    lines: list[bytes] = []
    for line in re.split(b"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        if line == b"":
            if lines:
                found.append(b"\n".join(lines))
            lines = []
        elif not line.startswith(b":"):
            name, _, value = line.partition(b":")
            if name == b"data":
                lines.append(value[1:] if value.startswith(b" ") else value)
    return found


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    splitter = Splitter()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [payload for start, end in pairwise(edges) for payload in splitter.feed(stream[start:end])]


line = st.one_of(
    st.builds(lambda text: b"data: " + text.encode(), st.text(max_size=12).filter(lambda t: not set("\r\n") & set(t))),
    st.sampled_from(
        [
            b"",
            b"",
            b":",
            b": hi",
            b"data",
            b"data:",
            b"data:x",
            b"data:  x",
            b"event: error",
            b"id: 1",
            b"datax: 1",
            b"junk",
        ]
    ),
)
streams = st.builds(
    lambda bom, lines: bom + b"".join(text + end for text, end in lines),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(line, st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])), max_size=30),
)


@given(streams, st.lists(st.integers(0, 400), max_size=20))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10, 11])
@example("data: é😀\n\n".encode(), list(range(20)))
def test_any_cut_gives_what_the_standard_says(stream: bytes, cuts: list[int]) -> None:
    """Wherever the bytes are cut, also inside a character or between CR and LF, the events are the standard's."""
    assert split(stream, cuts) == by_the_standard(stream)


@given(streams)
def test_a_stream_is_split_the_same_byte_by_byte(stream: bytes) -> None:
    """One byte at a time is just another way of cutting."""
    assert split(stream, list(range(len(stream)))) == by_the_standard(stream)


@given(st.lists(st.binary(min_size=1, max_size=40).filter(lambda b: b"\r" not in b), max_size=8), st.integers(1, 50))
def test_frames_read_back(payloads: list[bytes], step: int) -> None:
    """What `frame` wrote, one by one or all at once, the splitter reads, line feeds included."""
    stream = b"".join(frame(payload) for payload in payloads)
    assert frames(payloads) == stream
    assert split(stream, list(range(0, len(stream), step))) == payloads


def test_end_gives_the_event_whose_blank_line_never_came() -> None:
    """A server that closes right after its last line has said that line."""
    splitter = Splitter()
    assert splitter.feed(b"data: a\n\ndata: [DONE]") == [b"a"]
    assert splitter.end() == b"[DONE]"
    assert splitter.end() is None


def test_an_endless_event_is_refused() -> None:
    """A server that never ends its line costs bounded memory."""
    part = b"x" * (PAYLOAD_BYTES_MAX // 64)
    splitter = Splitter()
    assert [splitter.feed(part) for _ in range(64)] == [[]] * 64
    with pytest.raises(PayloadTooLarge):
        splitter.feed(b"x")


def test_an_event_of_many_lines_is_joined_once() -> None:
    """Lines that come one by one take a time that grows with their number, not with its square."""
    splitter, line = Splitter(), b"data: " + b"x" * 100 + b"\n"
    assert [splitter.feed(line) for _ in range(50_000)] == [[]] * 50_000
    (payload,) = splitter.feed(b"\n")
    assert payload.count(b"\n") == 49_999
