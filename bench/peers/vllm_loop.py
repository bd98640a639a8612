"""vLLM under the bench: a script for its own environment, never imported. Argument: the model's folder.

Answers loads (see `bench.engines.systems.Remote`) by stepping its engine in this process.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams


def answer(engine: Any, ids: Any, load: list[dict[str, Any]]) -> dict[str, Any]:
    """When each token of each request came, the CPU time spent, and how much of it when."""
    times: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    marks: list[tuple[float, float]] = []
    start, cpu_s = time.perf_counter(), time.process_time()
    while len(times) < len(load) or engine.has_unfinished_requests():
        now_s = time.perf_counter() - start
        while len(times) < len(load) and load[len(times)]["due_s"] <= now_s:
            request = load[len(times)]
            sampling = SamplingParams(temperature=0.0, max_tokens=request["answer"], ignore_eos=True, detokenize=False)
            id = str(next(ids))
            engine.add_request(id, {"prompt_token_ids": request["tokens"]}, sampling)
            times[id], counts[id] = [], 0
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, load[len(times)]["due_s"] - now_s))
            continue
        outputs = engine.step()
        marks.append((time.perf_counter() - start, time.process_time() - cpu_s))
        for output in outputs:
            found = len(output.outputs[0].token_ids)
            times[output.request_id] += [marks[-1][0]] * (found - counts[output.request_id])
            counts[output.request_id] = found
    return {"times_s": list(times.values()), "cpu_s": time.process_time() - cpu_s, "marks": marks}


def main() -> int:
    out, sys.stdout = sys.stdout, sys.stderr
    import vllm

    engine = LLMEngine.from_engine_args(
        EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192, max_num_seqs=64)
    )
    ids = itertools.count()
    print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, ids, json.loads(line))), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
