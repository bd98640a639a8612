"""Random checkpoints in the shapes of real models: what a step costs depends on shapes, not on what the weights say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {  # Qwen3-0.6B
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "100m": {
        "hidden_size": 640,
        "intermediate_size": 1920,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": 32_768,
    },
}


def make_checkpoint(folder: Path, shape: str) -> Path:
    """Write a random bfloat16 Qwen3 checkpoint of that shape, with a tokenizer of the 256 bytes, unless it is there."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "model.safetensors").is_file():
        return folder
    config = AutoConfig.for_model(
        "qwen3", max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=0, **SHAPES[shape]
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
