"""Small random checkpoints of each supported family, with a tokenizer trained on the spot, and naive references."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT_TOKENS = 192
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if tools %}{{ 'tools: ' + (tools | tojson) + '\n' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = (
    "the quick brown fox jumps over the lazy dog. what is the capital of france? the capital of france is paris. "
    "naïve café, straße, 東京, 日本語, Привет, 👩‍🚀🎉 0123456789 once upon a time there was an engine."
)
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.3,  # far from the usual 0.02, so that the likeliest token leads by more than rounding
}
# embeddings are scaled by the root of the width and tied: smaller ones leave the soft caps something to bend
GEMMA_SHARP = {"initializer_range": 0.15, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 20.0}
GRANITE = {
    "embedding_multiplier": 7.3, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 3.1,
    "hidden_size": 64,
}  # fmt: skip
GRANITE4 = {
    "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 80, "mamba_n_heads": 8,
    "layer_types": ["full_attention"] * 3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-wide": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "llama-dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 48,
        },
    },
    "llama-longrope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 96,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0] * 8,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 11},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen3-wide": {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32},
    "qwen3-moe-wide": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gemma2": {"model_type": "gemma2", "sliding_window": 10, "query_pre_attn_scalar": 16, **GEMMA_SHARP},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 10,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **GEMMA_SHARP,
    },
    "gemma3-period": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 10,
        "query_pre_attn_scalar": 16,
        **GEMMA_SHARP,
    },
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0, "num_hidden_layers": 5, "tie_word_embeddings": True},
    "smollm3-window": {
        "model_type": "smollm3",
        "pad_token_id": 0,
        "no_rope_layers": [1, 0, 1],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 10,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 11, "tie_word_embeddings": True},
    "phi3-longrope": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "hidden_size": 64,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [2.0] * 6,
        },
    },
    "granite": {"model_type": "granite", **GRANITE},
    "granite4": {"model_type": "granitemoehybrid", "position_embedding_type": "rope", **GRANITE, **GRANITE4},
    "granite4-nope": {"model_type": "granitemoehybrid", "position_embedding_type": "nope", **GRANITE, **GRANITE4},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 5,
        "sliding_window": 10,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 48,
                "attention_factor": 1.1386294361119891,
            },
        },
    },
}


def make_tokenizer(size: int = 320) -> Tokenizer:
    """Byte-level BPE with a few merges: most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def make_checkpoint(folder: Path, family: str, *, shard_size: str = "5GB", seed: int = 7) -> Path:
    """Write a random checkpoint of a family, tokenizer and chat template included. `llama~` is one near that of `llama`:
    mostly it says the same, so it can draft for it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    options = {**SHAPE, **FAMILIES[family.rstrip("~")]}
    config = AutoConfig.for_model(
        options.pop("model_type"), vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=2, **options
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight += 0.3 * torch.randn(weight.shape)
        for weight in model.parameters() if family.endswith("~") else ():
            weight += 0.006 * torch.randn(weight.shape)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}')
    return folder


@cache
def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # the comparisons are by length
    return model


@cache
def naive_greedy(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` greedy tokens by one whole forward pass per token: no cache, no batch, and no stop."""
    model = reference(folder)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tuple(tokens[len(prompt) :])


def random_prompt(seed: int, length: int, vocabulary: int = 300) -> list[int]:
    """Token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    ids: Sequence[int] = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
    return list(ids)
