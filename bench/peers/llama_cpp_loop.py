"""llama.cpp under the bench: a script for its own environment (llama-cpp-python and numpy alone), never imported.

Arguments: model, threads. Answers loads (see `bench.engines.systems.Remote`) through llama.cpp's C interface, without its
Python classes: continuous batching as its server does it (decodes first, then prompts, up to 512 tokens a step), and more
than that server: a prefix that several waiting prompts share is computed once, copied to them (llama_memory_seq_cp), and
kept for the next load. The next token is the likeliest one, found by numpy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import llama_cpp as llama
import numpy as np

STEP_TOKENS = 512
PREFIX_TOKENS_MIN = 64
Load = list[dict[str, Any]]


class Sequence:
    """A request being answered. `done` tokens of it are in llama.cpp's memory."""

    def __init__(self, id: int, request: dict[str, Any], done: int) -> None:
        self.id, self.tokens, self.done = id, list(request["tokens"]), done
        self.end = len(self.tokens) + int(request["answer"])
        self.times_s: list[float] = []


class Loop:
    """A model and the context that its last load needed."""

    def __init__(self, model: str, threads: int) -> None:
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(model.encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {model}")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.threads = threads
        self.batch = llama.llama_batch_init(STEP_TOKENS + 256, 0, 1)
        self.context: Any = None
        self.shape: tuple[int, int, bool] | None = None
        self.prefix: list[int] = []

    def run(self, load: Load) -> dict[str, Any]:
        """When each request's tokens came, the CPU time spent, and how much of it when."""
        common = common_prefix([request["tokens"] for request in load])
        self.reserve(load, is_unified=bool(common or self.is_known(load)))
        memory = llama.llama_get_memory(self.context)
        free = list(range(len(load), 0, -1))  # sequence 0 is the kept prefix
        waiting = [(index, request) for index, request in enumerate(load)]
        running: list[Sequence] = []
        order: dict[int, Sequence] = {}
        marks: list[tuple[float, float]] = []
        start, cpu_s = time.perf_counter(), time.process_time()
        if common:
            self.keep(memory, common)
        while waiting or running:
            now_s = time.perf_counter() - start
            while waiting and free and waiting[0][1]["due_s"] <= now_s:
                index, request = waiting.pop(0)
                reused = min(shared_tokens(self.prefix, request["tokens"]), len(request["tokens"]) - 1)
                reused = reused if reused >= PREFIX_TOKENS_MIN else 0
                sequence = Sequence(free.pop(), request, reused)
                if reused:
                    llama.llama_memory_seq_cp(memory, 0, sequence.id, 0, reused)
                running.append(sequence)
                order[index] = sequence
            if not running:
                time.sleep(waiting[0][1]["due_s"] - now_s)
                continue
            fresh = self.step(running)
            marks.append((time.perf_counter() - start, time.process_time() - cpu_s))
            for sequence in fresh:
                sequence.times_s.append(marks[-1][0])
            for sequence in [s for s in running if len(s.tokens) == s.end]:
                llama.llama_memory_seq_rm(memory, sequence.id, -1, -1)
                free.append(sequence.id)
                running.remove(sequence)
        times_s = [order[index].times_s for index in range(len(load))]
        return {"times_s": times_s, "cpu_s": time.process_time() - cpu_s, "marks": marks}

    def reserve(self, load: Load, *, is_unified: bool) -> None:
        """A context for that many sequences of that length: one memory for all where they share, else one each, which
        is what its own batched bench does."""
        longest = max(len(request["tokens"]) + request["answer"] for request in load)
        if is_unified:
            own = sum(len(request["tokens"]) + request["answer"] for request in load)
            shape = (len(load) + 1, -(-(own + longest) // 256) * 256, True)
        else:
            shape = (len(load) + 1, (len(load) + 1) * -(-longest // 256) * 256, False)
        if self.shape is not None and self.fits(shape):
            if not is_unified:
                llama.llama_memory_clear(llama.llama_get_memory(self.context), False)
                self.prefix = []
            return
        if self.context:
            llama.llama_free(self.context)
        parameters = llama.llama_context_default_params()
        parameters.n_seq_max, parameters.n_ctx, parameters.kv_unified = shape
        parameters.n_batch = STEP_TOKENS + 256
        parameters.n_ubatch = STEP_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.flash_attn_type = int(os.environ.get("BENCH_FLASH_ATTENTION", parameters.flash_attn_type))
        parameters.no_perf = True
        self.context = llama.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {shape}")
        self.shape, self.prefix = shape, []

    def fits(self, shape: tuple[int, int, bool]) -> bool:
        """Whether the context there is serves as well: of memories of their own, the number divides all there is."""
        assert self.shape is not None
        sequences, tokens, is_unified = self.shape
        enough = sequences >= shape[0] and tokens >= shape[1]
        return is_unified == shape[2] and enough and (is_unified or sequences == shape[0])

    def is_known(self, load: Load) -> bool:
        return any(shared_tokens(self.prefix, request["tokens"]) >= PREFIX_TOKENS_MIN for request in load)

    def keep(self, memory: Any, common: list[int]) -> None:
        """Compute what is shared, as sequence 0, unless it is there."""
        if shared_tokens(self.prefix, common) == len(common):
            return
        llama.llama_memory_seq_rm(memory, 0, -1, -1)
        sequence = Sequence(0, {"tokens": common, "answer": 0}, 0)
        while sequence.done < len(common):
            self.step([sequence])
        self.prefix = common

    def step(self, sequences: list[Sequence]) -> list[Sequence]:
        """One token of each that decodes, then prompts' tokens while there is room. Returns those that have a new token."""
        batch, at = self.batch, 0
        ending: list[tuple[int, Sequence]] = []
        for sequence in sorted(sequences, key=lambda s: len(s.tokens) - s.done > 1):
            left = len(sequence.tokens) - sequence.done
            count = min(left, STEP_TOKENS - at) if left > 1 else 1
            if count <= 0:
                break
            for offset in range(count):
                place = sequence.done + offset
                batch.token[at] = sequence.tokens[place]
                batch.pos[at] = place
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence.id
                batch.logits[at] = place == len(sequence.tokens) - 1 and sequence.id > 0
                at += 1
            sequence.done += count
            if sequence.done == len(sequence.tokens) and sequence.id > 0:
                ending.append((at - 1, sequence))
        batch.n_tokens = at
        status = llama.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        for row, sequence in ending:
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, row), (self.vocabulary,))
            sequence.tokens.append(int(logits.argmax()))
        return [sequence for _, sequence in ending]


def shared_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens they have in common from the start."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def common_prefix(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with, where that is worth keeping."""
    if len(prompts) < 2:
        return []
    count = min(shared_tokens(prompts[0], prompt) for prompt in prompts[1:])
    return prompts[0][:count] if count >= PREFIX_TOKENS_MIN else []


def main() -> int:
    out, sys.stdout = sys.stdout, sys.stderr  # whatever is printed below goes to the log
    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    try:
        loop = Loop(sys.argv[1], int(sys.argv[2]))
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return 1
    print(json.dumps({"version": llama.__version__}), file=out, flush=True)
    for line in sys.stdin:
        try:
            answer = loop.run(json.loads(line))
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
