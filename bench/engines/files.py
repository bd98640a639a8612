"""Model files for the bench: random weights in the shapes of real models, and any GGUF file in another number format.

What a step costs depends on shapes, not on what the weights say. All systems of a run read the very same file, or where
one can't read GGUF a folder of the same weights dequantised to bfloat16. Files are made once, in a folder that is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from local_engine.checkpoints.families import FAMILIES
from local_engine.config import ModelError

Array = np.ndarray[Any, Any]
Change = Callable[[str, Array, dict[str, Any]], Array]


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder of Qwen3's kind with tied embeddings."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int


SHAPES = {
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936),  # Qwen3-0.6B
    "100m": Shape(640, 1920, 16, 10, 5, 64, 32_768),
    "tiny": Shape(128, 256, 4, 4, 2, 32, 1024),  # for the soak: nearly all of its time is the engine's own
}
FORMATS = ("bf16", "q8_0", "q4_1", "q4_0")  # what `convert` writes
_CONTEXT_TOKENS = 8192


def shape_file(folder: Path, name: str) -> Path:
    """The GGUF file of random bfloat16 weights in that shape, with a vocabulary that holds the 256 bytes."""
    path = folder / f"{name}-bf16.gguf"
    if not path.is_file():
        _write(path, lambda part: _write_random(part, SHAPES[name]))
    return path


def in_format(source: Path, format: str, folder: Path) -> Path:
    """`source` with all of its matrices in that format. Raises ModelError where a matrix has no such form."""
    stem = source.name.removesuffix(".gguf").removesuffix("-bf16")
    path = folder / f"{stem}-{format}.gguf"
    if path != source:
        copy_file(source, path, format)
    return path


def copy_file(source: Path, target: Path, format: str, change: Change = lambda name, values, metadata: values) -> None:
    """Write `source` anew, its matrices in that format, unless `target` is there. `change` is given each tensor's name,
    its values in float32 and the file's metadata."""
    if not target.is_file():
        _write(target, lambda part: _convert(source, part, format, change))


def float_folder(source: Path, folder: Path) -> Path:
    """A Hugging Face folder (config.json and model.safetensors, no tokenizer) of the file's weights in bfloat16."""
    path = folder / f"{source.name.removesuffix('.gguf')}-folder"
    if not (path / "config.json").is_file():
        import torch
        from safetensors.torch import save_file

        from local_engine.checkpoints.open import open_checkpoint

        path.mkdir(parents=True, exist_ok=True)
        checkpoint = open_checkpoint(str(source))
        config = hf_config(checkpoint.config)
        weights: dict[str, torch.Tensor] = {}
        for piece in checkpoint.weights():
            whole = piece.tensor if isinstance(piece.tensor, torch.Tensor) else piece.tensor.dequantised()
            weights[piece.name] = whole.to(torch.bfloat16).contiguous()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def hf_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint that has none, of the families without extras. `config`: a ModelConfig."""
    types = {family.hf: family.gguf for family in FAMILIES}  # of the plain ones, GGUF's name is the model type
    return {
        "architectures": [config.architecture],
        "model_type": types[config.architecture],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocabulary_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_epsilon,
        "rope_theta": config.ropes[0].theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.ropes[0].theta},
        "attention_bias": config.has_qkv_bias,
        "tie_word_embeddings": config.has_tied_embeddings,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }


def _write(path: Path, make: Any) -> None:
    """Whole or not at all: a file that was cut short would be taken for a good one the next time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    make(part)
    part.rename(path)


def _write_random(path: Path, shape: Shape) -> None:
    import gguf
    import torch
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(_CONTEXT_TOKENS)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    fillers = [f"<{index}>" for index in range(shape.vocabulary_size - len(letters) - 1)]
    writer.add_token_list([*letters, "ab", *fillers])
    writer.add_token_types([1] * shape.vocabulary_size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)

    generator = torch.Generator().manual_seed(0)

    def add(name: str, *size: int) -> None:
        if len(size) == 1:
            writer.add_tensor(name, torch.ones(size).numpy())
            return
        values = torch.randn(size, generator=generator).mul_(0.02).to(torch.bfloat16)
        raw = values.view(torch.uint8).view(size[0], -1).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", shape.vocabulary_size, shape.hidden_size)
    for layer in range(shape.layers):
        hidden, inner = shape.hidden_size, shape.heads * shape.head_dim
        for part, *size in (
            ("attn_norm", hidden),
            ("attn_q", inner, hidden),
            ("attn_k", shape.kv_heads * shape.head_dim, hidden),
            ("attn_v", shape.kv_heads * shape.head_dim, hidden),
            ("attn_q_norm", shape.head_dim),
            ("attn_k_norm", shape.head_dim),
            ("attn_output", hidden, inner),
            ("ffn_norm", hidden),
            ("ffn_gate", shape.intermediate_size, hidden),
            ("ffn_up", shape.intermediate_size, hidden),
            ("ffn_down", hidden, shape.intermediate_size),
        ):
            add(f"blk.{layer}.{part}.weight", *size)
    add("output_norm.weight", shape.hidden_size)
    _finish(writer)


def _convert(source: Path, target: Path, format: str, change: Change) -> None:
    """The same metadata, vectors in float32, matrices dequantised and quantised anew."""
    import gguf
    from gguf.quants import dequantize, quantize

    kind = gguf.GGMLQuantizationType[format.upper()]
    reader = gguf.GGUFReader(source)
    metadata = {field.name: field.contents() for field in reader.fields.values()}
    writer = gguf.GGUFWriter(target, metadata["general.architecture"])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, metadata[field.name], field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        values = change(tensor.name, dequantize(tensor.data, tensor.tensor_type), metadata)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
            continue
        try:
            raw = quantize(np.ascontiguousarray(values), kind)
        except (NotImplementedError, gguf.quants.QuantError) as error:
            raise ModelError(f"{source}: {tensor.name} can't be written as {format}: {error}") from None
        writer.add_tensor(tensor.name, raw, raw_dtype=kind)
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
