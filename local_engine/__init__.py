"""local_engine: tokens in, tokens out.

A small inference engine (continuous batching, paged KV with prefix reuse, chunked prefill) behind
two interfaces: `Engine`, synchronous and inline, and `AsyncEngine`, the same engine in a separate
process over a unix socket. Knows no HTTP, teams, money or caches. Importing this package loads no
torch: `Engine` is imported on first use. Read `engine.py` first.

    from local_engine import Engine, EngineConfig, SamplingParams

    engine = Engine(EngineConfig())  # the embedded model; or model="a GGUF file, a checkpoint folder or a hub name"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    engine.submit(engine.tokenizer.encode_chat(question, None), SamplingParams(temperature=0.0, max_tokens=32))
    while engine.has_work:
        for step in engine.step():
            print(step.output.text, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from local_engine.config import EngineConfig
from local_engine.messages import (
    EngineError,
    EngineFailed,
    EngineLoad,
    EngineLoading,
    EngineUnavailable,
    EngineUsage,
    FinishReason,
    GenerateRequest,
    Grammar,
    InvalidRequest,
    ModelInfo,
    Output,
    Overloaded,
    PromptTooLong,
    SamplingParams,
    TokenLogprob,
)
from local_engine.process.client import AsyncEngine

if TYPE_CHECKING:
    from local_engine.engine import Engine

__all__ = [
    "AsyncEngine", "Engine", "EngineConfig", "EngineError", "EngineFailed", "EngineLoad",
    "EngineLoading", "EngineUnavailable", "EngineUsage", "FinishReason", "GenerateRequest", "Grammar",
    "InvalidRequest", "ModelInfo", "Output", "Overloaded", "PromptTooLong", "SamplingParams", "TokenLogprob",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from local_engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
