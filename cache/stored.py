"""Bytes from Redis or a socket, read as values.

Another version, another process or a fault of the medium may have written them. Invariant: what is
no value of the expected type raises msgspec.DecodeError and nothing else, so that a reader has one
error to expect: msgspec itself raises another one for a text that is no UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


def reader(decoder: msgspec.msgpack.Decoder[T]) -> Callable[[bytes], T]:
    """A function that reads values by `decoder`. It raises msgspec.DecodeError."""
    decode = decoder.decode

    def read(data: bytes) -> T:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from None

    return read
