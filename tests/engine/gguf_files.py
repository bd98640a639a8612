"""GGUF files of small checkpoints, named and changed as llama.cpp's converter does."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.engine.checkpoints import CHAT_TEMPLATE

GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
}
PERMUTED = ("llama", "smollm3", "granite", "granitehybrid")
POST_NORM_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(folder: Path, path: Path, arch: str, *, quantised: str | None = None, tensors_a_file: int = 0) -> Path:
    """The checkpoint as llama.cpp's converter writes it: renamed, and for llama with q and k permuted; in float32, or
    its matrices quantised; in one file, or split by the number of tensors."""
    config = json.loads((folder / "config.json").read_text())
    state = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    special = {token["id"] for token in state["added_tokens"]}
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=tensors_a_file)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if id in special else 1 for id in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_family_facts(writer, config, arch)
    weights = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, values in _apart(_stack_experts(weights), rope).items():
        to, values = _gguf_tensor(name, values, config, arch)
        if quantised and values.ndim > 1 and not to.endswith("ffn_gate_inp.weight"):
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(to, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(to, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_family_facts(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    if arch == "qwen3moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch.startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_rope_dimension_count(config["head_dim"])
    if "shared_intermediate_size" in config:
        writer.add_head_count_kv([config["num_key_value_heads"]] * config["num_hidden_layers"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_expert_count(0)
        writer.add_ssm_inner_size(96)
    if arch == "phi3":
        rope = config["rope_parameters"]
        writer.add_sliding_window(config["sliding_window"] or 0)
        writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        if "short_factor" in rope:
            trained = config["original_max_position_embeddings"]
            scale = config["max_position_embeddings"] / trained
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(trained)))
    if arch == "olmo2" and "layer_types" in config:
        yarn = config["rope_parameters"]["full_attention"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn["factor"])
        writer.add_rope_scaling_orig_ctx_len(yarn["original_max_position_embeddings"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        if config["attn_logit_softcapping"] is not None:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _apart(weights: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Granite's gate and up as two matrices, and the factors of a scaled rotation as tensors."""
    found = {}
    for name, values in weights.items():
        if "shared_mlp.input_linear" in name:
            layer = name.split(".")[2]
            found[f"blk.{layer}.ffn_gate.weight"], found[f"blk.{layer}.ffn_up.weight"] = np.split(values, 2)
        else:
            found[name] = values
    factors = {f"rope_factors_{kind}.weight": rope.get(f"{kind}_factor") for kind in ("long", "short")}
    return found | {name: np.array(own, np.float32) for name, own in factors.items() if own}


def _stack_experts(weights: dict[str, Any]) -> dict[str, Any]:
    """Each layer's experts as one tensor, under the name GGUF has for it."""
    stacked = {name: values for name, values in weights.items() if ".experts." not in name}
    groups: dict[str, dict[int, Any]] = {}
    for name, values in weights.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found:
            groups.setdefault(f"blk.{found[1]}.ffn_{found[3]}_exps.weight", {})[int(found[2])] = values
    return stacked | {name: np.stack([own[i] for i in range(len(own))]) for name, own in groups.items()}


def _gguf_tensor(name: str, values: Any, config: dict[str, Any], arch: str) -> tuple[str, Any]:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if arch.startswith("gemma") and "norm" in name:
        values = values + 1
    if name in plain or name.startswith(("blk.", "rope_")):
        return plain.get(name, name), values
    _, _, layer, *rest = name.split(".")
    *part, kind = rest
    if arch in PERMUTED and part[-1] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if part[-1] == "q_proj" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    parts = {**GGUF_PARTS, **(POST_NORM_PARTS if arch.startswith(("gemma", "olmo")) else {})}
    return f"blk.{layer}.{parts['.'.join(part)]}.{kind}", values
