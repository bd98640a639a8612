"""The data directory: what it holds, which folder has the sockets where its path is long, and that no other user can read either."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.data_dir import prepare, write_secret
from gateway.settings import Settings, SettingsError

NOBODY = 65_534


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings whose data directory is too deep for sockets, with a temporary directory of the test's own."""
    with tempfile.TemporaryDirectory(prefix="sw-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Settings(data_dir=tmp_path / "/".join(["deep"] * 20))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_deep_data_dir_has_its_sockets_in_a_folder_of_this_user(deep: Settings) -> None:
    """The folder of the sockets is short, is this user's alone, and is taken again at the next start; no secret lies in it."""
    prepared = prepare(deep)
    assert prepare(deep).secret == prepared.secret
    assert deep.run_dir.parent == Path(tempfile.gettempdir())
    assert mode_of(deep.run_dir) == 0o700
    assert list(deep.run_dir.iterdir()) == []


def _open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _readable_by_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def _a_link(folder: Path) -> None:
    (folder.parent / "mine").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "mine")


def _a_file(folder: Path) -> None:
    folder.touch(mode=0o700)


def _of_another_user(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)


@pytest.mark.parametrize("plant", [_open_to_all, _readable_by_a_group, _a_link, _a_file, _of_another_user])
def test_a_folder_that_another_user_may_have_made_stops_the_start(
    deep: Settings, plant: Callable[[Path], None]
) -> None:
    """Sockets in such a folder would be another user's to replace: the start is refused, with the folder and the ways out."""
    plant(deep.run_dir)
    with pytest.raises(SettingsError) as refusal:
        prepare(deep)
    assert str(deep.run_dir) in str(refusal.value)
    assert refusal.value.status == os.EX_CONFIG


@pytest.mark.parametrize("name", ["run", "admin.key"])
def test_what_another_user_put_into_an_open_data_dir_stops_the_start(tmp_path: Path, name: str) -> None:
    """A data directory that all can write: a folder of sockets or a key that is another user's is not used."""
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    tmp_path.chmod(0o777)
    planted = tmp_path / name
    if name == "run":
        planted.mkdir(mode=0o700)
    else:
        planted.write_text("sk-admin-0123456789abcdef")
    os.chown(planted, NOBODY, NOBODY)
    with pytest.raises(SettingsError) as refusal:
        prepare(Settings(data_dir=tmp_path))
    assert str(planted) in str(refusal.value)
    assert refusal.value.status == os.EX_CONFIG
    os.chown(tmp_path, NOBODY, NOBODY)  # the directory's owner may put there what it likes
    assert prepare(Settings(data_dir=tmp_path)).admin_key


def test_a_key_that_others_can_write_stops_the_start(tmp_path: Path) -> None:
    """The key in such a file may be another user's."""
    key = tmp_path / "admin.key"
    key.write_text("sk-admin-0123456789abcdef")
    key.chmod(0o666)
    with pytest.raises(SettingsError, match=r"admin\.key"):
        prepare(Settings(data_dir=tmp_path))


def test_the_folder_of_sockets_is_closed(tmp_path: Path) -> None:
    """A folder that this user left open becomes its own."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    prepare(Settings(data_dir=tmp_path))
    assert mode_of(tmp_path / "run") == 0o700


def test_a_secret_is_written_into_a_new_file(tmp_path: Path) -> None:
    """A link in the file's place is replaced and not followed; a file that all can read becomes one for its owner."""
    elsewhere, link, loose = tmp_path / "elsewhere", tmp_path / "link", tmp_path / "loose"
    elsewhere.write_text("another's")
    link.symlink_to(elsewhere)
    loose.write_text("old")
    loose.chmod(0o666)
    for path in (link, loose):
        write_secret(path, "new")
        assert (path.is_symlink(), path.read_text(), mode_of(path)) == (False, "new", 0o600)
    assert elsewhere.read_text() == "another's"
