"""The ledger as Parquet (https://parquet.apache.org/docs/file-format), for the extra `parquet`.

No HTTP. Invariants: a group of rows is in memory at a time, and is encoded in a thread; a file that
broke off has no footer, so no reader takes it for whole.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.accounts.errors import Invalid

GROUP_ROWS = 10_000
VERSION = "1"
"""Of the columns: a column may be added in a version, and none is renamed or removed."""
_TEXTS = {
    "id", "request_id", "day", "team", "key", "alias", "model", "deployment", "mechanism", "line", "user", "tag", "tags",
    "session", "region", "kind", "source",
}  # fmt: skip
_TRUTHS = ("usage_estimated", "is_other")


class ParquetFile:
    """A file of the `columns` of rows, after the moment `at` where they have `at_ms`: texts, whole numbers of 64 bits and
    truths, null where there is no value. Raises Invalid where the extra is not installed.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        try:
            import pyarrow
            from pyarrow.parquet import ParquetWriter
        except ImportError:
            raise Invalid("parquet", "needs the extra: install `sameway[parquet]`, or take the file as CSV") from None
        kinds = {name: pyarrow.string() if name in _TEXTS else pyarrow.int64() for name in columns}
        kinds |= {name: pyarrow.bool_() for name in _TRUTHS if name in kinds}
        if "at_ms" in kinds:
            kinds = {"at": pyarrow.timestamp("ms", tz="UTC"), **kinds}
        self._table = pyarrow.Table
        self._schema = pyarrow.schema(list(kinds.items()), metadata={"sameway.ledger": VERSION})
        self._sink = _Sink()
        self._writer = ParquetWriter(self._sink, self._schema)

    async def stream(self, rows: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """The bytes of the file with all `rows`."""
        group: list[dict[str, Any]] = []
        async for row in rows:
            at = {"at": datetime.fromtimestamp(row["at_ms"] / 1000, UTC)} if "at_ms" in row else {}
            group.append({**row, **at})
            if len(group) == GROUP_ROWS:
                yield await asyncio.to_thread(self._add, group)
                group = []
        yield await asyncio.to_thread(self._add, group)
        self._writer.close()
        yield self._sink.take()

    def _add(self, rows: Sequence[dict[str, Any]]) -> bytes:
        if rows:
            self._writer.write_table(self._table.from_pylist(rows, schema=self._schema))
        return self._sink.take()


class _Sink(io.BytesIO):
    """What pyarrow writes to: a file of which the first part is gone already."""

    _gone = 0

    def tell(self) -> int:
        return self._gone + super().tell()

    def take(self) -> bytes:
        data = self.getvalue()
        self._gone += len(data)
        self.seek(0)
        self.truncate()
        return data
