"""Builds a Tokenizer from what a checkpoint carries: a folder's tokenizer.json, or a GGUF file's metadata.

The only file that constructs `tokenizers` objects. Invariant: the ids are those of the model's reference tokenizer; a
vocabulary of a kind that cannot be rebuilt exactly is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from local_engine.config import ModelError
from local_engine.tokenizer import Tokenizer, Vocabulary, byte_of_character

# How text is cut before merging, by GGUF's `tokenizer.ggml.pre`. The expressions are the models' own (tokenizer.json).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "smollm": _GPT2,
}
_SINGLE_DIGITS = frozenset({"smollm"})
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """From a Hugging Face checkpoint folder. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ModelError(f"{path} cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    config = _json(folder / "tokenizer_config.json")
    return Tokenizer(
        backend,
        Vocabulary(
            bos_token=_token_text(config.get("bos_token")),
            eos_token=_token_text(config.get("eos_token")),
            chat_template=_chat_template(folder, config),
        ),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _token_text(token: Any) -> str:
    """A special token's spelling: a string, or an object with `content`."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json; of several named ones, the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    return str(template) if template else None


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """From a GGUF file's metadata. Raises ModelError for a kind that cannot be rebuilt."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise ModelError(f"tokenizer {kind!r} in a GGUF file is not supported; supported: gpt2, llama")
    _add_marked_tokens(backend, metadata, tokens, is_byte_level=kind == "gpt2")

    def spelled(name: str) -> str:
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[id] if id is not None and 0 <= id < len(tokens) else ""

    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    return Tokenizer(
        backend,
        Vocabulary(
            bos_token=spelled("bos"),
            eos_token=spelled("eos"),
            chat_template=metadata.get("tokenizer.chat_template"),
            bos_token_id_added=metadata.get("tokenizer.ggml.bos_token_id") if adds_bos else None,
        ),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    split = _SPLITS.get(pre)
    if split is None:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(sorted(_SPLITS))}")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(BPE(vocabulary, merges, ignore_merges=split is _LLAMA3 or split is _TEKKEN))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
    steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment, unused-ignore]
    if split is _QWEN2:
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment, unused-ignore]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    """SentencePiece BPE: the merges are those pairs of tokens whose join is a token, best score first."""
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or [-float(id) for id in range(len(tokens))]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[id], left, right, (token[:cut], token[cut:])))
    found.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Backend(
        BPE(vocabulary, [pair for *_, pair in found], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    scheme = "first" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(  # type: ignore[assignment, unused-ignore]
        replacement="▁", prepend_scheme=scheme, split=False
    )
    backend.decoder = decoders.Sequence(  # type: ignore[assignment, unused-ignore]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _add_marked_tokens(
    backend: Backend, metadata: Mapping[str, Any], tokens: list[str], *, is_byte_level: bool
) -> None:
    """Tokens that the file marks as control or user-defined are matched whole in text, before any merge."""
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    alphabet = byte_of_character()
    special, plain = [], []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL and not (is_byte_level and any(character not in alphabet for character in token)):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
