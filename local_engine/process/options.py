"""The command line's options of an engine, the same for the worker process and for `python -m
local_engine`.

Imports no torch: `prepare_environment` runs before torch is loaded.
"""

from __future__ import annotations

import argparse
import os

from local_engine.config import EngineConfig

EX_CONFIG = 78  # sysexits.h: a wrong configuration, where starting again would not help


def arguments() -> argparse.ArgumentParser:
    """The options an engine is started with; the same for the worker and for `python -m
    local_engine`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", help="a GGUF file, a checkpoint folder or a hub name; default: the embedded model")
    parser.add_argument("--draft-model", help="a smaller model with the same tokenizer, which guesses for it")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    parser.add_argument("--weights", default="auto", help="auto (as the checkpoint has them), int8, int4, fp8")
    for name, text in (
        ("threads", "CPU threads; default: the cores there are"),
        ("kv-size-mb", "memory for KV; default: by what is free"),
        ("kv-blocks", "the same, counted in blocks"),
        ("context-tokens-max", "a shorter context than the model's"),
        ("step-tokens-max", "tokens of one step, prefill and decode together"),
        ("sequences-max", "sequences that run at once"),
    ):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of one KV block")
    parser.add_argument("--queue-max", type=int, default=256, help="requests that may wait")
    parser.add_argument("--draft-tokens-max", type=int, default=8, help="tokens guessed per sequence and step; 0: none")
    parser.add_argument("--answer-tokens-default", type=int, default=512, help="max_tokens where a request has none")
    parser.add_argument(
        "--batch-invariant",
        dest="is_batch_invariant",
        action=argparse.BooleanOptionalAction,
        help="the same logits to the last bit in any batch: by default wherever the native kernels do all the work; "
        "with --no- long prompts are a tenth faster",
    )
    return parser


def config_from(options: argparse.Namespace) -> EngineConfig:
    """The EngineConfig these options describe. Raises ValueError."""
    return EngineConfig(**{name: getattr(options, name) for name in EngineConfig.__dataclass_fields__})


def prepare_environment() -> None:
    """Before torch is loaded: idle threads must sleep. Spinning ones cost 20 times the speed where
    cores are shared."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
