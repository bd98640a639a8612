"""Prepares the data directory: creates it, and the installation's secret and admin key.

Knows no processes and no network. Invariants: a secret is created once, readable by its owner only,
and never changes; no file with a secret is written through a link or into another one's file; no
socket lies in a folder that another user could have made or can write.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from gateway.settings import Settings, SettingsError, refuse_settings, secret_problem

_FILES = {"secret": "secret", "admin_key": "admin.key"}


def prepare(settings: Settings) -> Settings:
    """`settings` with `secret` and `admin_key` from the data directory; creates missing ones.

    Raises SettingsError if the directory cannot be written or holds a secret that can be guessed,
    or if the sockets' directory is not this user's alone.
    """
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_run_dir(settings.run_dir, is_shared=settings.run_dir.parent != settings.data_dir.absolute())
        refuse_settings([], weak_files(settings))
        return settings.model_copy(
            update={
                "secret": settings.secret or _kept(settings.data_dir / _FILES["secret"], lambda: secrets.token_hex(32)),
                "admin_key": settings.admin_key
                or _kept(settings.data_dir / _FILES["admin_key"], lambda: f"sk-admin-{secrets.token_urlsafe(24)}"),
            }
        )
    except OSError as error:
        raise SettingsError(f"data_dir: {error.filename or settings.data_dir}: {error.strerror}") from None


def _make_run_dir(folder: Path, *, is_shared: bool) -> None:
    """Make the folder of the sockets. `is_shared`: it lies in a directory of all users.

    Raises SettingsError if another user could have made it, or, in a shared directory, can open it.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    owners = {os.getuid()} if is_shared else _owners(folder.parent)
    if stat.S_ISDIR(status.st_mode) and status.st_uid in owners and not (is_shared and status.st_mode & 0o077):
        with contextlib.suppress(PermissionError):  # the directory's owner is another user, whom it trusts
            folder.chmod(0o700)
        return
    why = "its path is too long for unix sockets, and their folder" if is_shared else "the folder of the sockets"
    raise SettingsError(
        f"data_dir: {why} {folder} was made by another user or can be opened by others; expected a folder of this user's "
        "with mode 0700: remove it" + (", set TMPDIR, or take a shorter data_dir" if is_shared else ""),
        os.EX_CONFIG,
    )


def _owners(data_dir: Path) -> set[int]:
    """The users whose files in the data directory are trusted: this one, root, and its owner."""
    return {os.getuid(), 0, data_dir.stat().st_uid}


def write_secret(path: Path, text: str) -> None:
    """Write a new file that only its owner can read, in the place of one that is there."""
    path.unlink(missing_ok=True)
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)


def weak_files(settings: Settings) -> list[str]:
    """An error for each secret in the data directory that is in use and can be guessed."""
    paths = {name: settings.data_dir / file for name, file in _FILES.items() if not getattr(settings, name)}
    problems = []
    for name, path in paths.items():
        with contextlib.suppress(OSError):  # not made yet, or another user's
            problem = secret_problem(name, path.read_text(errors="surrogateescape").strip())
            status = path.stat()
            if status.st_uid not in _owners(settings.data_dir) or status.st_mode & 0o022:
                problem = "another user made it or can write it; expected a file of this user's with mode 0600: check it, or remove it"
            problems += [f"{path}: {problem}"] if problem else []
    return problems


def _kept(path: Path, make: Callable[[], str]) -> str:
    """The file's text; `make` creates it if there is none.

    Processes that race read the same text.
    """
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        write_secret(draft, make() + "\n")
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(draft, path)
        draft.unlink()
    return path.read_text().strip()
