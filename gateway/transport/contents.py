"""Where contents of files lie: a folder that all hosts share, or an object store.

Knows no rows, teams or quotas. A key is `TEAM/ID`, or `TEAM/ID/PART` for a part of a batch's
outcomes; a folder leaves the team out. Every function blocks, and raises OSError. Invariants: an
object is there whole or not at all; a file of the folder is readable by its owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

_BLOCK_BYTES = 1 << 20
# S3 takes parts from 5 MiB and 10,000 of them (Amazon S3 User Guide, "Multipart upload limits")
_PART_BYTES, _PARTS_AT_ONCE = 8 << 20, 2
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}


class Writing(Protocol):
    """A content that is being written: `seal` it whole, or `close` it, which leaves it to `remove`."""

    def write(self, data: bytes | bytearray, /) -> int | None: ...
    def seal(self) -> None: ...
    def close(self) -> None: ...


class Parts(Protocol):
    """Outcomes of one writer: `append` writes one whole, or raises, after which no part of it remains."""

    def append(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class Contents(Protocol):
    """The place of contents."""

    def open(self, key: str) -> BinaryIO: ...
    def create(self, key: str, *, is_replaced: bool = False) -> Writing:
        """Begin a new content; with `is_replaced` one that takes the place of another at `seal`."""
        ...

    def appending(self, key: str) -> Parts: ...

    def keys(self, under: str = "") -> dict[str, float]:
        """The keys that begin with `under`, each with its last change in unix seconds."""
        ...

    def remove(self, keys: Iterable[str]) -> None:
        """Remove contents, each with its parts; those that are gone are no error."""
        ...


class _LocalFile(io.FileIO):
    renamed: tuple[Path, Path] | None = None

    def seal(self) -> None:
        with self:
            os.fsync(self.fileno())
            if self.renamed is not None:
                os.replace(*self.renamed)
                self.renamed = None

    def close(self) -> None:
        super().close()
        if self.renamed is not None:  # not sealed
            self.renamed[0].unlink(missing_ok=True)


def created(path: Path) -> _LocalFile:
    """Create a file that only its owner may read, and its folder if missing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return _LocalFile(os.open(path, flags, 0o600), "w")


class Folder:
    """Contents in a folder, which is made when a content needs it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, key: str) -> Path:
        """The path of a content. `key` is made of ids of rows, never of a request's text."""
        return self.path.joinpath(*[part for part in key.split("/") if not part.isdecimal()])

    def open(self, key: str) -> BinaryIO:
        return self.place(key).open("rb")

    def create(self, key: str, *, is_replaced: bool = False) -> Writing:
        path = self.place(key)
        if not is_replaced:
            return created(path)
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        file = created(hidden)
        file.renamed = hidden, path
        return file

    def appending(self, key: str) -> Parts:
        return _LocalParts(self.place(key))

    def keys(self, under: str = "") -> dict[str, float]:
        above, _, start = under.rpartition("/")
        changes = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.place(above)) as entries:
            for entry in entries:
                if entry.name.startswith(start):
                    with contextlib.suppress(FileNotFoundError):
                        changed_s = entry.stat(follow_symlinks=False).st_mtime
                        changes[f"{above}/{entry.name}" if above else entry.name] = changed_s
        return changes

    def remove(self, keys: Iterable[str]) -> None:
        for path in map(self.place, keys):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


class _LocalParts:
    """One file, of which whole outcomes outlive their writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: _LocalFile | None = None
        self._size = 0

    def append(self, data: bytes) -> None:
        if self._file is None:
            self._file = created(self._path)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "not all of it was written")
        except OSError:
            self._file.truncate(self._size)
            self._file.seek(self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


# decision: obstore-for-objects
class ObjectStore:
    """Contents in a bucket of S3, or of a server that speaks its protocol.

    Its address and credentials are AWS's own: variables of the environment, a role's, or a
    machine's. Raises ValueError for a `url` that it cannot be, and ImportError without obstore.
    """

    def __init__(self, url: str) -> None:
        import obstore
        from obstore.store import S3Store

        self._module = obstore
        options: Any = {"timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=5), "allow_http": True}
        self._store = S3Store.from_url(url, client_options=options, retry_config=_RETRIES)

    @contextlib.contextmanager
    def as_os_errors(self) -> Iterator[None]:
        """Raise the store's errors as OSError."""
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "the store has no such object, or no such bucket") from None
        except self._module.exceptions.BaseError as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}") from None

    def open(self, key: str) -> BinaryIO:
        with self.as_os_errors():
            answer = self._module.get(self._store, key)
            size = answer.meta["size"]
            if size <= _BLOCK_BYTES:
                return io.BytesIO(answer.bytes())
        return io.BufferedReader(_Ranges(self, key, size), _BLOCK_BYTES)

    def read(self, key: str, start: int, length: int) -> memoryview:
        with self.as_os_errors():
            return memoryview(self._module.get_range(self._store, key, start=start, length=length))

    def create(self, key: str, *, is_replaced: bool = False) -> Writing:
        return _Upload(self, key)

    def writer(self, key: str) -> Any:
        """A writer of the library; its parts that are never closed are S3's to remove."""
        return self._module.open_writer(self._store, key, buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def appending(self, key: str) -> Parts:
        return _ObjectParts(self, key)

    def put(self, key: str, data: bytes) -> None:
        with self.as_os_errors():
            self._module.put(self._store, key, data)

    def keys(self, under: str = "") -> dict[str, float]:
        above, _, start = under.rpartition("/")  # the store lists whole steps of a path
        with self.as_os_errors():
            found = [one for page in self._module.list(self._store, above or None) for one in page]
        start = f"{above}/{start}" if above else start
        return {one["path"]: one["last_modified"].timestamp() for one in found if one["path"].startswith(start)}

    def remove(self, keys: Iterable[str]) -> None:
        gone = [one for key in keys for one in (key, *self.keys(f"{key}/"))]
        with self.as_os_errors(), contextlib.suppress(FileNotFoundError):
            if gone:
                self._module.delete(self._store, gone)


class _Ranges(io.RawIOBase):
    """An object, read by ranges."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        length = max(0, min(len(buffer), self._size - self._at))
        if length:
            buffer[:length] = self._store.read(self._key, self._at, length)
        self._at += length
        return length


class _Upload:
    """An object that is written in parts, and appears whole at `seal`."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._writer = store.writer(key)

    def write(self, data: bytes | bytearray, /) -> int:
        with self._store.as_os_errors():
            self._writer.write(bytes(data))
        return len(data)

    def seal(self) -> None:
        with self._store.as_os_errors():
            self._writer.close()

    def close(self) -> None:
        self._writer = None


class _ObjectParts:
    """An object for each outcome, as no object can grow."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        self._count = 0

    def append(self, data: bytes) -> None:
        self._store.put(f"{self._key}.{self._count:06}", data)
        self._count += 1

    def close(self) -> None:
        """Nothing is left to write."""


def contents_at(url: str) -> Contents:
    """The contents at `file:///FOLDER` or `s3://BUCKET/PREFIX`. Raises ValueError, and ImportError."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        return ObjectStore(url)
    return Folder(Path(unquote(parts.path)))
