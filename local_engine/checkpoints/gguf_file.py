"""Reading a GGUF file: metadata, tensor table and dequantised tensors.

The format is ggml-org/ggml docs/gguf.md, version 2 and 3, little endian. The header is parsed here
because the `gguf` package's reader makes numpy views of every string of the vocabulary (2 s for
49,152 tokens; this takes 0.1 s); block formats that `weights.quantised` does not support are
dequantised by `gguf.quants`. Invariant: a truncated file or another format is refused with a
ModelError, never half read.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from local_engine.config import ModelError
from local_engine.weights.quantised import Quantised, from_gguf

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ROWS_AT_ONCE = 1024
_ARRAYS_DEPTH_MAX = 4


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in the file: `shape` row-major (rows first), `kind` a GGMLQuantizationType,
    `start` from the file's beginning."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    size_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` and `tensors`; `read` dequantises. Close it when done.

    It is mapped, not read: `forget` releases the pages of a tensor from this process's memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        self._at = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, LookupError, OverflowError) as error:
            raise ModelError(f"{path} is not a whole GGUF file: {error}") from None

    def close(self) -> None:
        # something read in place is still in use: the mapping ends with it
        with contextlib.suppress(BufferError):
            self._map.close()

    def forget(self, name: str) -> None:
        """Release the pages of a tensor, once its mapped bytes are unused."""
        entry = self.tensors[name]
        end = entry.start + entry.size_bytes
        first, last = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def kinds(self) -> frozenset[str]:
        """The names of the quantised formats in the file."""
        return frozenset(entry.kind.name for entry in self.tensors.values() if len(entry.shape) > 1)

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor as float32 in its own shape. Raises ModelError for a missing tensor or an
        unsupported block format."""
        from gguf.quants import dequantize

        raw, entry = self._raw(name)
        values = np.empty((len(raw), entry.shape[-1]), np.float32)
        try:
            # what stands between is several times as large
            for start in range(0, len(raw), _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                values[rows] = dequantize(raw[rows], entry.kind)
        except NotImplementedError:
            raise ModelError(f"{self.path}: tensor {name!r} has the unsupported format {entry.kind.name}") from None
        return values.reshape(entry.shape)

    def read_quantised(self, name: str) -> Quantised | None:
        """The tensor without dequantisation; None if its format is not supported. Raises ModelError
        like `read`."""
        raw, entry = self._raw(name)
        return from_gguf(raw, entry.kind.name, entry.shape)

    def _raw(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], TensorEntry]:
        """A tensor's bytes, row by row."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelError(f"{self.path} has no tensor {name!r}")
        raw = np.frombuffer(self._map, np.uint8, entry.size_bytes, entry.start)
        return raw.reshape(math.prod(entry.shape[:-1]), -1), entry

    def _entry(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> TensorEntry:
        """A tensor of the format `number`, at `offset` from the data's start. Raises ModelError for
        an unknown format, and for a tensor beyond the file's end."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown format {number}") from None
        block_size, block_size_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block_size:
            raise ModelError(f"{self.path}: tensor {name!r} of shape {shape} is not whole blocks of {block_size}")
        entry = TensorEntry(shape, kind, self._data_start + offset, math.prod(shape) // block_size * block_size_bytes)
        if entry.start + entry.size_bytes > len(self._map):
            raise ModelError(f"{self.path} is cut short: tensor {name!r} lies past its end")
        return entry

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        _, version, tensors, entries = self._take("<4sIQQ")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {version}; supported: 2, 3")
        for _ in range(entries):
            key = self._string()
            (kind,) = self._take("<I")
            self.metadata[key] = self._value(kind)
        described = [self._description() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {str(alignment)[:40]!r}, expected a number above 0")
        self._data_start = -(-self._at // alignment) * alignment
        self.tensors = {description[0]: self._entry(*description) for description in described}

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, format and offset."""
        name = self._string()
        (dimensions,) = self._take("<I")
        shape = self._take(f"<{dimensions}Q")
        return name, shape[::-1], *self._take("<IQ")

    def _take(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self._map, self._at)
        self._at += struct.calcsize(format)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._map):
            raise IndexError("a string lies past its end")
        return self._map[start : self._at].decode("utf-8", errors="surrogateescape")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            (value,) = self._take("<" + _SCALARS[kind])
            return value
        if depth == _ARRAYS_DEPTH_MAX:
            raise ModelError(f"{self.path} has arrays in arrays more than {_ARRAYS_DEPTH_MAX} deep")
        item, count = self._take("<IQ")
        if count > len(self._map):
            raise IndexError("an array lies past its end")
        if item in _SCALARS:
            return list(self._take(f"<{count}{_SCALARS[item]}"))
        return self._strings(count) if item == _STRING else [self._value(item, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Read a vocabulary. Most of a header's time goes into this loop, so it is kept tight."""
        length_of, at, file, strings = struct.Struct("<Q").unpack_from, self._at, self._map, []
        for _ in range(count):
            start = at + 8
            at = start + length_of(file, at)[0]
            strings.append(file[start:at])
        if at > len(file):
            raise IndexError("a string lies past its end")
        self._at = at
        return [text.decode("utf-8", "surrogateescape") for text in strings]
