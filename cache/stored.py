"""Decodes values from Redis or a socket.

Another version, another process or a fault of the medium may have written the bytes. Invariant:
bytes of any other type raise only msgspec.DecodeError; msgspec itself raises another error for a
text that is not UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


def reader(decoder: msgspec.msgpack.Decoder[T]) -> Callable[[bytes], T]:
    """A function that decodes values with `decoder`. It raises msgspec.DecodeError."""
    decode = decoder.decode

    def read(data: bytes) -> T:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from None

    return read
