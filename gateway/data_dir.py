"""What a data directory must hold before anything else starts: the directory itself, the installation's secret and the admin's key.

Knows no processes and no network. Invariant: a secret is made once, is readable by its owner alone, and never changes.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from gateway.settings import Settings, SettingsError


def prepare(settings: Settings) -> Settings:
    """`settings` with `secret` and `admin_key` filled in, from the data directory or new. Raises SettingsError where it can't
    be written."""
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
    """The file's text; written first if there is none. Two processes that race end up with the same text."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(make() + "\n")
        with contextlib.suppress(FileExistsError):  # another process was first: its text counts
            os.link(draft, path)
        draft.unlink()
    return path.read_text().strip()
