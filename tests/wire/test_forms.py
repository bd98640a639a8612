"""The bytes of an upload on the disk."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.wire.errors import BadRequest
from gateway.wire.forms import Form, FormFiles, Parcel

_OVER_THE_LIMIT = """
import asyncio, resource, sys
from pathlib import Path
from gateway.wire.errors import StorageFull
from gateway.wire.forms import Parcel
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    asyncio.run(Parcel(Path(sys.argv[1])).write(b"x" * 1500))
except StorageFull:
    print("refused")
"""


def test_an_upload_that_is_written_in_part_is_refused(tmp_path: Path) -> None:
    """The disk takes the beginning of a piece, and no more: the upload is no shorter one."""
    command = [sys.executable, "-W", "ignore", "-c", _OVER_THE_LIMIT, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "refused\n"


async def test_bytes_that_are_gone_end_a_read(tmp_path: Path) -> None:
    """A read of what is not on the disk raises, cut or closed, and what comes after a close makes no file."""
    parcel = Parcel(tmp_path)
    await parcel.write(b"abc")
    assert [piece async for piece in parcel.read(0, 3)] == [b"abc"]
    async with asyncio.timeout(20):
        with pytest.raises(OSError, match="not on the disk"):
            assert [piece async for piece in parcel.read(0, 10)] == []
    parcel.close()
    parcel.close()
    await parcel.write(b"late")
    with pytest.raises(OSError, match="not on the disk"):
        assert [piece async for piece in parcel.read(0, 4)] == []


def test_the_fields_of_a_form_are_bounded_together() -> None:
    """Memory holds all fields of a form: many below the bound are refused as one above it."""
    form = Form(b"b", 100)
    part = b'--b\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n%b\r\n'
    parts = b"".join(part % (number, b"x" * 30) for number in range(4))
    with pytest.raises(BadRequest, match="up to f3 are longer than 100 bytes"):
        form.read(parts)


def test_a_field_that_stands_twice_is_a_list(tmp_path: Path) -> None:
    """Under its own name, or one that says so; nothing of it is left out."""
    form = Form(b"b", 100)
    part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    form.read(
        b"".join(part % one for one in ((b"a", b"1"), (b"a", b"2"), (b"a", b"3"), (b"b[]", b"4"), (b"c", b"5")))
        + b"--b--"
    )
    assert FormFiles(tmp_path).body(form) == {"a": ["1", "2", "3"], "b[]": ["4"], "c": "5"}
