"""`python -m local_engine [--model M] "prompt"`: stream one answer, then TTFT, TPOT and
tokens/s."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from ipc import add_options, options_from
from local_engine.config import EngineConfig, ModelError
from local_engine.messages import InvalidRequest, SamplingParams
from local_engine.process import prepare_environment

if TYPE_CHECKING:
    from local_engine.engine import Engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="local_engine", description=__doc__)
    add_options(parser, EngineConfig)
    parser.add_argument("prompt", help="what to say to the model; - reads standard input")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt itself, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    prepare_environment()
    from local_engine.engine import Engine

    try:
        engine = Engine(options_from(EngineConfig, options), progress=_show_progress)
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
        system = [{"role": "system", "content": options.system}] if options.system else []
        chat = [*system, {"role": "user", "content": text}]
        tokens = engine.tokenizer.encode(text) if options.raw else engine.tokenizer.encode_chat(chat, None)
        params = SamplingParams(
            temperature=options.temperature, top_p=options.top_p, seed=options.seed, max_tokens=options.max_tokens
        )
        start = time.perf_counter()
        engine.submit(tokens, params)
    except (ModelError, ValueError, InvalidRequest) as error:
        print(f"local_engine: {error}", file=sys.stderr)
        return os.EX_CONFIG
    return _stream(engine, start)


def _show_progress(fraction: float, stage: str) -> None:
    """Rewrite one line of progress, and erase it when the model is ready. Writes nothing unless
    standard error is a terminal."""
    if sys.stderr.isatty():
        line = "" if fraction == 1.0 else f"{stage} {fraction:.0%}"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _stream(engine: Engine, start: float) -> int:
    """Print the answer as it arrives, then the figures."""
    first_s = 0.0
    while engine.has_work:
        for step in engine.step():
            first_s = first_s or time.perf_counter() - start
            print(step.output.text, end="", flush=True)
            if step.error is not None:
                print(f"\nlocal_engine: {step.error}", file=sys.stderr)
                return 1
            if step.usage is not None:
                total_s = time.perf_counter() - start
                answer = step.usage.completion_tokens
                tpot_ms = 1000 * (total_s - first_s) / max(1, answer - 1)
                print(
                    f"\n\n{step.usage.prompt_tokens} prompt tokens, {answer} answer tokens · TTFT {1000 * first_s:.0f} ms"
                    f" · TPOT {tpot_ms:.1f} ms · {answer / total_s:.1f} tokens/s",
                    file=sys.stderr,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
