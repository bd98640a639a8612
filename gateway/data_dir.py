"""Prepares the data directory: creates it, and the installation's secret and admin key.

Knows no processes and no network. Invariant: a secret is created once, readable by its owner only,
and never changes.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from gateway.settings import Settings, SettingsError


def prepare(settings: Settings) -> Settings:
    """`settings` with `secret` and `admin_key` from the data directory; creates missing ones.

    Raises SettingsError if the directory cannot be written.
    """
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return settings.model_copy(
            update={
                "secret": settings.secret or _kept(settings.data_dir / "secret", lambda: secrets.token_hex(32)),
                "admin_key": settings.admin_key
                or _kept(settings.data_dir / "admin.key", lambda: f"sk-admin-{secrets.token_urlsafe(24)}"),
            }
        )
    except OSError as error:
        raise SettingsError(f"data_dir: {error.filename or settings.data_dir}: {error.strerror}") from None


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
