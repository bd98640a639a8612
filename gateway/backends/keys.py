"""The provider's keys of one deployment: read from the environment or from files, taken by turns.

A file is read again when it is another one or has other contents, as Vault's agents and Kubernetes
write them. The next key is the one that is owed most by its weight (smooth weighted round-robin, as
nginx's upstreams have it). A key that the provider refuses rests alone, until its file has another
one or its rest is over. Knows no requests. Invariant: no text of this module has a key's value.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from gateway.backends.base import BackendDenied, BackendError, Mark
from gateway.settings import ApiKeySettings, shown_variable

_LOOK_EVERY_S = 1.0
_REST_S = 60.0
_BYTES_MAX = 16 << 10


class HasKey(Protocol):
    """A request, with the value of its key."""

    api_key: str


class ProviderKey(msgspec.Struct, eq=False):
    """One key. `value` is empty while it cannot be read; then `problem` says why, to clients, too."""

    settings: ApiKeySettings
    value: str = ""
    problem: str = ""
    version: tuple[int, int, int] | None = None  # of its file
    rests_until: float = 0.0
    owed: int = 0

    def read(self, environ: Mapping[str, str]) -> None:
        """Read the key, if its file is another one than before."""
        if self.settings.env is not None:
            self._take(environ.get(self.settings.env, ""), "the variable of its key is not set")
            return
        path = self.settings.file or Path()
        try:
            status = path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version != self.version:
                with path.open("rb") as file:
                    self._take(file.read(_BYTES_MAX).decode("utf-8", "replace").strip(), "the file of its key is empty")
                self.version = version
        except OSError as error:  # it is being replaced: a key that was read stays good
            self.problem = "" if self.value else f"the file of its key can't be read: {error.strerror}"

    def _take(self, value: str, absence: str) -> None:
        if value and not (value.isascii() and value.isprintable()):
            value, absence = "", "the API key holds characters that no header can carry"
        if value != self.value:
            self.rests_until = 0.0
        self.value, self.problem = value, "" if value else absence


class Keys:
    """The keys of one deployment. `clock` gives seconds that never decrease."""

    def __init__(
        self,
        keys: Sequence[ApiKeySettings] = (),
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = [ProviderKey(one) for one in keys]
        self._environ = environ
        self._clock = clock
        self._looks_at = 0.0
        self._look()

    @classmethod
    def fixed(cls, value: str) -> "Keys":
        """One key of this value, or none."""
        return cls([ApiKeySettings(env="KEY")], {"KEY": value}) if value else cls()

    def _look(self) -> None:
        if (now := self._clock()) >= self._looks_at:
            self._looks_at = now + _LOOK_EVERY_S
            for key in self._keys:
                key.read(self._environ)

    @property
    def values(self) -> tuple[str, ...]:
        """The keys in use, each empty while it cannot be read."""
        self._look()
        return tuple(key.value for key in self._keys)

    @property
    def problem(self) -> str:
        """Why there is no key; empty if there is one, or none is needed."""
        self._look()
        return "; ".join(key.problem for key in self._keys) if all(key.problem for key in self._keys) else ""

    @property
    def names(self) -> str:
        """The variables and files of the keys, for operators, while there is no key."""
        if not self.problem:
            return ""
        places = [key.settings for key in self._keys]
        return ", ".join(shown_variable(one.env, self._environ) if one.env else str(one.file) for one in places)

    def take(self) -> str:
        """The key of the next request; empty if none is needed. If all rest, the first to be ready."""
        if not self._keys:
            return ""
        self._look()
        if len(self._keys) == 1:
            return self._keys[0].value
        now, good = self._clock(), [key for key in self._keys if key.value]
        awake = [key for key in good if key.rests_until <= now]
        if not awake:
            return min(good or self._keys, key=lambda key: key.rests_until).value
        for key in awake:
            key.owed += key.settings.weight
        chosen = max(awake, key=lambda key: key.owed)
        chosen.owed -= sum(key.settings.weight for key in awake)
        return chosen.value

    def refused(self, request: HasKey, error: BackendError) -> bool:
        """Let the key of a request rest if the provider refused it by `error`. Returns whether another is
        to be asked, as one that has come into its file meanwhile: the deployment itself is well then.
        """
        is_of_key = isinstance(error, BackendDenied) and (error.status in (401, 403) or error.mark in _OF_KEY)
        if not is_of_key or not self._keys:
            return False
        self._looks_at = 0.0
        if request.api_key not in (values := self.values):
            return any(values)
        if len(values) < 2:
            return False
        now = self._clock()
        for key in self._keys:
            if key.value == request.api_key:
                key.rests_until = now + _REST_S
        return any(other.value and other.rests_until <= now for other in self._keys)


_OF_KEY = (Mark.KEY, Mark.CREDIT)
