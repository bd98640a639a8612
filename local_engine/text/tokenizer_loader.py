"""Builds a checkpoint's Tokenizer, from a folder's tokenizer.json or a GGUF file's metadata.

The only file that constructs `tokenizers` objects. Invariant: the ids equal those of the model's
reference tokenizer; a vocabulary that cannot be rebuilt exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from local_engine.config import ModelError, read_json, require_among
from local_engine.text.tokenizer import Tokenizer, byte_of_character

# How text is cut before merging, by GGUF's `tokenizer.ggml.pre`. The expressions are the models'
# own (tokenizer.json).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_TEKKEN_REST = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join((*_TEKKEN_WORDS, _TEKKEN_REST))
_GPT4O = "|".join((*(f"{word}{_SHORT}?" for word in _TEKKEN_WORDS), _TEKKEN_REST.replace(r"\p{N}", r"\p{N}{1,3}", 1)))
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # as DeepSeek has it
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
# what llama.cpp has for it
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_SPLITS: dict[str, tuple[str, ...]] = {
    name: splits
    for names, splits in (
        ("gpt-2 phi-2 mpt olmo jais gigachat roberta-bpe mellum a.x-4.0 granite-docling", (_GPT2,)),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b", (r"\p{N}", _GPT2)),
        ("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 smaug-bpe dbrx chatglm-bpe", (_LLAMA3,)),
        ("qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan", (_QWEN2,)),
        ("tekken", (_TEKKEN,)),
        ("gpt-4o llama4", (_GPT4O,)),
        ("deepseek-coder", _DEEPSEEK_CODER),
        ("deepseek-v3", _DEEPSEEK_V3),
        ("falcon", _FALCON),
        ("default", _UNNAMED),
    )
    for name in names.split()
}
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer of a Hugging Face checkpoint folder. Raises ModelError."""
    config = read_json(folder / "tokenizer_config.json", is_needed=False)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one"
        )
    try:
        backend = Backend.from_file(str(path))
    # the library raises bare Exception for whatever is wrong with the file
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        backend,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        chat_template=_chat_template(folder, config),
    )


def _token_text(token: Any) -> str:
    """A special token's spelling: a string, or an object with `content`."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template in chat_template.jinja, chat_template.json or tokenizer_config.json; if several
    are named, the default one and the one for tools."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = read_json(folder / "chat_template.json", is_needed=False).get("chat_template") or config.get(
        "chat_template"
    )
    if isinstance(template, list):
        template_by_name = {str(entry.get("name")): str(entry.get("template")) for entry in template}
        template = template_by_name.get("default") or next(iter(template_by_name.values()), None)
        if "tool_use" in template_by_name:
            template = f"{{% if tools %}}{template_by_name['tool_use']}{{% else %}}{template}{{% endif %}}"
    return str(template) if template else None


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of a GGUF file's metadata. Raises ModelError for a kind that cannot be
    rebuilt."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata["tokenizer.ggml.tokens"]
    require_among(kind, ("gpt2", "llama"), "a GGUF file's tokenizer")
    is_byte_level = kind == "gpt2"
    backend = _byte_level(metadata, tokens) if is_byte_level else _sentencepiece(metadata, tokens)
    _add_marked_tokens(backend, metadata, tokens, is_byte_level=is_byte_level)
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ModelError(f"tokenizer.chat_template is of type {type(template).__name__}, expected a text")

    def spelled(name: str) -> str:
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[id] if id is not None and 0 <= id < len(tokens) else ""

    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    return Tokenizer(
        backend,
        bos_token=spelled("bos"),
        eos_token=spelled("eos"),
        chat_template=template,
        bos_token_id_added=metadata.get("tokenizer.ggml.bos_token_id") if adds_bos else None,
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    require_among(pre, sorted(_SPLITS), "pre-tokenizer")
    splits = _SPLITS[pre]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(BPE(vocabulary, merges, ignore_merges=splits in ((_LLAMA3,), (_TEKKEN,))))
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment, unused-ignore]
    if splits == (_QWEN2,):
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment, unused-ignore]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or [-float(id) for id in range(len(tokens))]
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    backend = Backend(_merging(tokens, scores, tokens[unknown]))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(  # type: ignore[assignment, unused-ignore]
        replacement="▁", prepend_scheme="first" if has_prefix else "never", split=False
    )
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoding += [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(decoding)  # type: ignore[assignment, unused-ignore]
    return backend


def _merging(tokens: list[str], scores: list[float], unknown: str) -> BPE:
    """BPE by scores: the merges are all pairs of tokens that join to a token, best score first."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[id], left, right, (token[:cut], token[cut:])))
    merges.sort()
    return BPE(vocabulary, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _add_marked_tokens(
    backend: Backend, metadata: Mapping[str, Any], tokens: list[str], *, is_byte_level: bool
) -> None:
    """Add the tokens that the file marks as control or user-defined, which are matched whole,
    before any merge."""
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
