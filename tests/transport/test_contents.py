"""A folder and a bucket are the same place of contents: written whole, read by ranges, listed and removed by keys."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.transport.contents import Contents, Folder, contents_at
from tests.services import S3Server, run_s3


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with run_s3() as server:
        yield server


@pytest.fixture(params=["folder", "bucket"])
def contents(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contents:
    if request.param == "folder":
        return contents_at((tmp_path / "a b%c").as_uri())
    store: S3Server = request.getfixturevalue("store")
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    return contents_at(f"{store.url}/{tmp_path.name}")


def write(contents: Contents, key: str, *pieces: bytes) -> None:
    file = contents.create(key)
    for piece in pieces:
        assert file.write(piece) == len(piece)
    file.seal()


def test_what_was_written_is_read(contents: Contents) -> None:
    """Small, empty and of several parts: whole, by lines, and from any place on."""
    large = [b"%d" % (number % 10) * (1 << 20) + b"\n" for number in range(20)]
    write(contents, "7/file-large", *large)
    write(contents, "7/file-small", b"one\n", b"two")
    write(contents, "7/file-empty")
    with contents.open("7/file-large") as file:
        assert file.seek(0, 2) == 20 * ((1 << 20) + 1)
        file.seek(3 * ((1 << 20) + 1))
        assert file.readline(2_000_000) == large[3]
        assert file.read(5) == b"44444"
        file.seek(0)
        assert file.read() == b"".join(large)
    with contents.open("7/file-small") as file:
        assert list(file) == [b"one\n", b"two"]
    with contents.open("7/file-empty") as file:
        assert (file.seek(0, 2), file.read()) == (0, b"")


def test_what_is_not_there_is_said(contents: Contents) -> None:
    """A missing content raises FileNotFoundError; it can be removed, and its parts are none."""
    with pytest.raises(FileNotFoundError):
        contents.open("7/file-none").close()
    contents.remove(["7/file-none", "7/batch_none"])
    assert contents.keys() == contents.keys("7/batch_none/0.") == {}


def test_outcomes_are_kept_one_by_one(contents: Contents) -> None:
    """What a writer appended is there at once, beside that of another; all of a batch goes with its key."""
    first, second = contents.appending("7/batch_a/0.aa"), contents.appending("7/batch_a/0.bb")
    other = contents.appending("7/batch_a/00.aa")
    for parts, data in ((first, b"1\n"), (second, b"2\n"), (first, b"3\n"), (other, b"4\n")):
        parts.append(data)
    found = []
    for key in sorted(contents.keys("7/batch_a/0.")):
        with contents.open(key) as file:
            found += file.read().split()
    assert sorted(found) == [b"1", b"2", b"3"]
    write(contents, "7/file-a", b"stays")
    for parts in (first, second, other):
        parts.close()
    contents.remove(["7/batch_a"])
    assert [key.rpartition("/")[2] for key in contents.keys("7/")] == ["file-a"]
    assert contents.keys("7/batch_a/") == {}


def test_an_unfinished_object_is_not_there(store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that is left in the middle, after its first parts, leaves nothing that can be read."""
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    bucket = contents_at(f"{store.url}/{tmp_path.name}")
    file = bucket.create("7/file-a")
    for _ in range(20):
        file.write(b"x" * (1 << 20))
    file.close()
    assert bucket.keys() == {}


def test_a_store_that_is_away_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call fails with an OSError that is no missing file, so that nothing takes it for a loss."""
    for name, value in {**S3Server.ENV, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    bucket = contents_at("s3://bucket")
    calls = (
        lambda: bucket.open("7/file-a"),
        bucket.keys,
        lambda: bucket.remove(["7/file-a"]),
        lambda: bucket.appending("7/batch_a/0.aa").append(b"1\n"),
        lambda: write(bucket, "7/file-a", b"1"),
    )
    for call in calls:
        with pytest.raises(OSError, match="Error performing"):
            call()


def test_a_folder_is_its_owners(tmp_path: Path) -> None:
    """Its contents can be read by their owner alone, and none is written through a link or over another."""
    folder = Folder(tmp_path / "files")
    write(folder, "7/file-a", b"1")
    assert stat.S_IMODE((tmp_path / "files" / "file-a").stat().st_mode) == 0o600
    (tmp_path / "files" / "file-b").symlink_to(tmp_path / "elsewhere")
    for key in ("7/file-a", "7/file-b"):
        with pytest.raises(FileExistsError):
            folder.create(key)
