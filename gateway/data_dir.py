"""Prepares the data directory: creates it, and the installation's secret and admin key.

Knows no processes and no network. Invariant: a secret is created once, readable by its owner only,
and never changes.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from gateway.settings import Settings, SettingsError, refuse_settings, secret_problem

_FILES = {"secret": "secret", "admin_key": "admin.key"}


def prepare(settings: Settings) -> Settings:
    """`settings` with `secret` and `admin_key` from the data directory; creates missing ones.

    Raises SettingsError if the directory cannot be written or holds a secret that can be guessed.
    """
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
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


def weak_files(settings: Settings) -> list[str]:
    """An error for each secret in the data directory that is in use and can be guessed."""
    paths = {name: settings.data_dir / file for name, file in _FILES.items() if not getattr(settings, name)}
    found = []
    for name, path in paths.items():
        with contextlib.suppress(OSError):  # not made yet, or another user's
            problem = secret_problem(name, path.read_text(errors="surrogateescape").strip())
            found += [f"{path}: {problem}"] if problem else []
    return found


def _kept(path: Path, make: Callable[[], str]) -> str:
    """The file's text; `make` creates it if there is none.

    Processes that race read the same text.
    """
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(make() + "\n")
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(draft, path)
        draft.unlink()
    return path.read_text().strip()
