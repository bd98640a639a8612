"""Systems that run in the bench's own process: the engine and transformers; and the seam to those that don't.

All have the same weights. transformers is built from the engine's own checkpoint, dequantised.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engines.files import hf_config
from bench.engines.loads import Request, Run, Scenario
from bench.lab.processes import BenchError
from local_engine.config import EngineConfig, ModelConfig, ModelError
from local_engine.messages import SamplingParams

_TRANSFORMERS_KV_BLOCKS = 512


class Sameway:
    """The engine, inline: what the worker's thread does, without the socket. Speculation is off: random tokens foretell
    nothing, and each step's output is then one token."""

    name = "sameway"

    def __init__(self, config: EngineConfig, weights: str) -> None:
        from local_engine.engine import Engine

        self.weights = weights
        self.engine = Engine(config)

    def lacks(self, scenario: Scenario) -> str | None:
        blocks = -(-(scenario.shared + scenario.own + scenario.answer) // self.engine.config.block_tokens)
        return "its KV memory is too small" if blocks > self.engine.load().kv_blocks_total else None

    def run(self, requests: Sequence[Request]) -> Run:
        engine = self.engine
        times: dict[int, list[float]] = {}
        order: list[int] = []
        marks: list[tuple[float, float]] = []
        cpu_s, start = time.process_time(), time.perf_counter()
        while len(order) < len(requests) or engine.has_work:
            now_s = time.perf_counter() - start
            while len(order) < len(requests) and requests[len(order)].due_s <= now_s:
                request = requests[len(order)]
                params = SamplingParams(temperature=0.0, max_tokens=request.answer, ignore_eos=True)
                order.append(engine.submit(request.tokens, params))
                times[order[-1]] = []
            if not engine.has_work:
                time.sleep(max(0.0, requests[len(order)].due_s - now_s))
                continue
            outputs = engine.step()
            now_s = time.perf_counter() - start
            marks.append((now_s, time.process_time() - cpu_s))
            for output in outputs:
                times[output.id].append(now_s)
        return Run(tuple(tuple(times[id]) for id in order), time.process_time() - cpu_s, tuple(marks))

    def close(self) -> None:
        del self.engine


class Transformers:
    """`generate` on static batches: what waits when it is idle is padded to one length and generated together."""

    name = "transformers"

    def __init__(self, model: Any, weights: str) -> None:
        self.weights = weights
        self._model = model

    def lacks(self, scenario: Scenario) -> str | None:
        return None

    def run(self, requests: Sequence[Request]) -> Run:
        times: list[tuple[float, ...]] = []
        marks: list[tuple[float, float]] = []
        cpu_s, start = time.process_time(), time.perf_counter()
        while len(times) < len(requests):
            now_s = time.perf_counter() - start
            waiting = [request for request in requests[len(times) :] if request.due_s <= now_s]
            if not waiting:
                time.sleep(requests[len(times)].due_s - now_s)
                continue
            steps = [(at - start, spent - cpu_s) for at, spent in self._generate(waiting)]
            marks += steps
            times += [tuple(at for at, _ in steps[: request.answer]) for request in waiting]
        return Run(tuple(times), time.process_time() - cpu_s, tuple(marks))

    def _generate(self, requests: Sequence[Request]) -> list[tuple[float, float]]:
        """When each step of the whole batch was done, and the CPU time until then."""
        import torch

        steps: list[tuple[float, float]] = []

        def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            steps.append((time.perf_counter(), time.process_time()))
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        width = max(len(request.tokens) for request in requests)
        padding = [width - len(request.tokens) for request in requests]
        ids = [[0] * pad + list(request.tokens) for pad, request in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        self._model.generate(
            torch.tensor(ids, device=self._model.device),
            attention_mask=torch.tensor(mask, device=self._model.device),
            max_new_tokens=max(request.answer for request in requests),
            do_sample=False,
            stopping_criteria=[note],
        )
        return steps

    def close(self) -> None:
        del self._model


class TransformersContinuous:
    """transformers' continuous batching, its own scheduler and paged cache with prefix sharing."""

    name = "transformers-cb"

    def __init__(self, model: Any, weights: str) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.weights = weights
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            # on a GPU as many as there is memory for
            ContinuousBatchingConfig(num_blocks=_TRANSFORMERS_KV_BLOCKS if model.device.type == "cpu" else None),
        )
        self._manager.start()

    def lacks(self, scenario: Scenario) -> str | None:
        return None

    def run(self, requests: Sequence[Request]) -> Run:
        manager = self._manager
        times: dict[str, list[float]] = {}
        open_ids: set[str] = set()
        cpu_s, start = time.process_time(), time.perf_counter()
        while len(times) < len(requests) or open_ids:
            now_s = time.perf_counter() - start
            while len(times) < len(requests) and requests[len(times)].due_s <= now_s:
                request = requests[len(times)]
                id = manager.add_request(list(request.tokens), max_new_tokens=request.answer, record_timestamps=True)
                times[id] = []
                open_ids.add(id)
            output = manager.get_result(timeout=0.01)
            if output is None:
                if manager.background_thread_status.fatal_error is not None:
                    raise BenchError(f"transformers-cb: {manager.background_thread_status.fatal_error}")
                continue
            if output.error:
                raise BenchError(f"transformers-cb: {output.error}")
            if output.is_finished():
                times[output.request_id] = [at - start for at in output.timestamps or ()]
                open_ids.discard(output.request_id)
        return Run(tuple(tuple(own) for own in times.values()), time.process_time() - cpu_s)

    def close(self) -> None:
        self._manager.stop(block=True)


def load_transformers(model: str | None, dtype: str, device: str) -> Any:
    """The model in transformers, with the weights that the engine would load. Raises ModelError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from local_engine.checkpoints.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    is_folder = model is not None and Path(model).is_dir()
    config = AutoConfig.from_pretrained(model) if is_folder else AutoConfig.for_model(**_for_model(checkpoint.config))
    loaded: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    weights = {
        piece.name: piece.tensor if isinstance(piece.tensor, torch.Tensor) else piece.tensor.dequantised()
        for piece in checkpoint.weights()
    }
    missing, unexpected = loaded.load_state_dict(weights, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ModelError(f"transformers cannot take these weights: missing {missing}, unexpected {unexpected}")
    loaded.tie_weights()
    loaded.to(torch.device(device))
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded


def _for_model(config: ModelConfig) -> dict[str, Any]:
    return {key: value for key, value in hf_config(config).items() if key not in ("architectures", "dtype")}


class Remote:
    """A system in an environment of its own: a script that reads a load a line and writes its times a line.

    Its first line is an object with its `version`, or with the `error` that keeps it from working. Raises BenchError.
    """

    def __init__(self, name: str, weights: str, command: Sequence[str], environ: dict[str, str], log: Path) -> None:
        self.name, self.weights = name, weights
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=environ, text=True
            )
        self.version = str(self._answer()["version"])

    def lacks(self, scenario: Scenario) -> str | None:
        return None

    def run(self, requests: Sequence[Request]) -> Run:
        assert self._process.stdin is not None
        load = [{"tokens": request.tokens, "answer": request.answer, "due_s": request.due_s} for request in requests]
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        marks = tuple((at, spent) for at, spent in answer["marks"])
        return Run(tuple(tuple(times) for times in answer["times_s"]), answer["cpu_s"], marks)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self.name} ended: {self._log.read_text(errors='replace')[-800:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """It ends with its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
