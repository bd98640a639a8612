"""The thread that owns the engine: loads it, turns commands into sequences and steps into messages.

Knows the messages and no sockets. Requests come from any thread, each under a key that its caller
chose; outputs leave once per step. Invariants: an error of one request is its answer and never ends
the loop; a request holds nothing once all of its choices have ended, failed or been aborted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from local_engine import messages as wire
from local_engine.config import EngineConfig

if TYPE_CHECKING:
    from local_engine.engine import Engine, StepOutput
    from local_engine.grammar import Compiled, Grammars
    from local_engine.text.tokenizer import Tokenizer

CHOICES_MAX = 128
_IDLE_CHECK_S = 0.25
_PROBES_FAILED_MAX = 3

_log = logging.getLogger("local_engine.worker")

Key = TypeVar("Key", bound=Hashable)
Replies = list[tuple[Key, wire.Output | Exception]]
"""Outputs and errors, each with its request's key. A generation's last output has its usage."""


@dataclass(slots=True)
class RunningRequest(Generic[Key]):
    """A request in the engine: its sequences, one per choice, and the usage of the ended ones.

    `held` collects outputs if the engine chooses the `n` best at the end.
    """

    key: Key
    sequences: list[int]
    n: int
    wants_logprobs: bool
    held: dict[int, list[wire.Output]] | None = None
    ended: dict[int, wire.EngineUsage] = field(default_factory=dict)


class EngineThread(threading.Thread, Generic[Key]):
    """Loads the engine, then turns requests into sequences and steps into replies.

    Any thread may use `submit`, `abort`, `stop` and the public attributes; the rest runs in this
    thread.
    """

    def __init__(self, config: EngineConfig, deliver: Callable[[Replies[Key]], object]) -> None:
        super().__init__(name="engine", daemon=True)
        self.load = wire.EngineLoad(stage="starting", queue_max=config.queue_max)
        self.info: wire.ModelInfo | None = None
        self.tokenizer: Tokenizer | None = None  # any thread may use these two
        self.grammars: Grammars | None = None
        self.error: BaseException | None = None
        self.steps_begun = self.steps_ended = 0
        self.step_s_expected = 0.0  # of the longest, 0 where nothing is known
        self._config = config
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._requests: dict[Key, RunningRequest[Key]] = {}
        self._by_sequence: dict[int, RunningRequest[Key]] = {}
        self._probe: int | None = None
        self._probes_failed = 0  # in a row

    def submit(self, key: Key, request: wire.GenerateRequest, grammar: Compiled | None = None) -> None:
        """Start a generation. Its `key` must be unique; `grammar` is its compiled grammar."""
        self._commands.put(lambda engine: self._submit(engine, key, request, grammar))

    def abort(self, key: Key) -> None:
        """End a generation, if it still runs, and free its blocks. No reply follows."""
        self._commands.put(lambda engine: self._abort(engine, key))

    def stop(self) -> None:
        """End the thread after the requests before."""
        self._commands.put(None)

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def _work(self) -> None:
        """Load the engine, and work until `stop`.

        Raises the errors that must end the process: an unloadable model, a broken device, or
        inconsistent blocks.
        """
        from local_engine.engine import Engine
        from local_engine.kernels.cpu import compile_kernels

        if not self._config.device.startswith("cuda"):
            self._show_progress(0.0, "compiling the kernels")
            _log.info(compile_kernels())
        engine = Engine(self._config, progress=self._show_progress)
        engine.tokenizer.start_chat()
        self.info, self.tokenizer, self.grammars = engine.info, engine.tokenizer, engine.grammars
        self.load = engine.load()
        is_checked = False  # since it last worked
        while True:
            is_idle = not engine.has_work
            while is_idle or not self._commands.empty():
                try:
                    command = self._commands.get(timeout=None if is_checked else _IDLE_CHECK_S)
                except queue.Empty:
                    engine.check_integrity()
                    is_checked = True
                    continue
                is_checked = False
                if command is None:
                    return
                command(engine)
                is_idle = not engine.has_work and self._commands.empty()
                if is_idle:
                    self.load = engine.load()
            self.step_s_expected = engine.step_s_expected
            self.steps_begun += 1
            self._step(engine)
            self.steps_ended += 1
            self.load = engine.load()

    def _show_progress(self, fraction: float, stage: str) -> None:
        self.load = wire.EngineLoad(progress=fraction, stage=stage, queue_max=self._config.queue_max)

    def _submit(self, engine: Engine, key: Key, request: wire.GenerateRequest, grammar: Compiled | None) -> None:
        """Begin a request. Its error ends this request alone."""
        try:
            running = self._begun(engine, key, request, grammar)
        except Exception as error:
            self._deliver([(key, error)])
        else:
            self._requests[key] = running
            self._by_sequence.update(dict.fromkeys(running.sequences, running))

    def _begun(
        self, engine: Engine, key: Key, request: wire.GenerateRequest, grammar: Compiled | None
    ) -> RunningRequest[Key]:
        """Put a request's sequences into the engine. Raises EngineError."""
        if not 1 <= request.n <= CHOICES_MAX:
            raise wire.InvalidRequest(f"n must be from 1 to {CHOICES_MAX}, not {request.n}", param="n")
        candidates = request.best_of or request.n
        if not request.n <= candidates <= CHOICES_MAX:
            raise wire.InvalidRequest(f"best_of must be from n to {CHOICES_MAX}, not {candidates}", param="best_of")
        tokens = engine.prompt_tokens(request)
        params = request.sampling
        held: dict[int, list[wire.Output]] | None = {} if candidates > request.n else None
        running = RunningRequest(key, [], request.n, params.logprobs is not None, held)
        if running.held is not None and params.logprobs is None:
            params = msgspec.structs.replace(params, logprobs=0)  # the choice needs them
        reference = engine.tokenizer.encode(request.reference, is_rendered=True) if request.reference else ()
        try:
            # choices share full blocks and compute the last, partial one each: no layout has to
            # copy
            for index in range(candidates):
                if params.seed is not None and index > 0:
                    params = msgspec.structs.replace(params, seed=params.seed + 1)
                id = engine.submit(
                    tokens,
                    params,
                    salt=request.salt,
                    priority=request.priority,
                    reference=reference,
                    is_continued=bool(request.prefix),
                    grammar=grammar,
                    reads=request,
                )
                running.sequences.append(id)
        except wire.EngineError:
            for id in running.sequences:
                engine.abort(id)
            raise
        return running

    def _abort(self, engine: Engine, key: Key) -> None:
        running = self._requests.pop(key, None)
        for id in running.sequences if running is not None else ():
            self._by_sequence.pop(id, None)
            engine.abort(id)

    def _step(self, engine: Engine) -> None:
        try:
            outputs = engine.step()
        # a bug outside the model's own run: end all, so that nothing waits for ever
        except Exception as error:
            _log.exception("the engine's step raised")
            failure = wire.EngineFailed(f"the engine failed: {error}")
            failed: Replies[Key] = [(key, failure) for key in self._requests]
            for key, _ in failed:
                self._abort(engine, key)
            self._deliver(failed)
            if self._probe is not None:
                engine.abort(self._probe)
            self._probe_device(engine, error, has_probe=self._probe is not None, is_alone=not failed)
            return
        replies: Replies[Key] = []
        for output in outputs:
            running = self._by_sequence.get(output.id)
            if running is not None:
                self._report(engine, running, output, replies)
        if replies:
            self._deliver(replies)
        errors = {output.id: output.error for output in outputs if isinstance(output.error, wire.EngineFailed)}
        has_probe = self._probe in errors
        if not has_probe and any(output.id == self._probe for output in outputs):
            self._probe, self._probes_failed = None, 0
        if errors:
            self._probe_device(engine, next(iter(errors.values())), has_probe=has_probe, is_alone=len(errors) == 1)

    def _probe_device(self, engine: Engine, error: Exception, *, has_probe: bool, is_alone: bool) -> None:
        """Submit a probe of one token after a failed step.

        If the probe fails three times, alone in its step, the device is broken or the memory full,
        and no request is the cause. Then this raises the step's error, which ends the process.
        """
        if has_probe:
            self._probe = None
            self._probes_failed += is_alone
        if self._probes_failed == _PROBES_FAILED_MAX:
            raise error
        if self._probe is None:
            with contextlib.suppress(wire.Overloaded):  # the next step that fails will do
                self._probe = engine.submit([0], wire.SamplingParams(temperature=0.0, max_tokens=1))

    def _report(self, engine: Engine, running: RunningRequest[Key], step: StepOutput, replies: Replies[Key]) -> None:
        """Turn a sequence's step into replies to its request, if it has output."""
        if step.error is not None:
            self._abort(engine, running.key)
            replies.append((running.key, step.error))
            return
        output = step.output
        if not (output.text or output.token_ids or output.prompt_logprobs or output.finish_reason):
            return
        usage: wire.EngineUsage | None = None
        if step.usage is not None:
            running.ended[step.id] = step.usage
            if len(running.ended) == len(running.sequences):
                first = running.ended[running.sequences[0]]  # the prompt counts once
                once = {name: getattr(first, name) for name in ("prompt_tokens", "cached_tokens")}
                usage = msgspec.structs.replace(wire.together(running.ended.values()), **once)
                del self._requests[running.key]
                for id in running.sequences:
                    del self._by_sequence[id]
        if running.held is None:
            index = running.sequences.index(step.id)
            replies.append((running.key, msgspec.structs.replace(output, index=index, usage=usage)))
            return
        running.held.setdefault(step.id, []).append(output)
        if usage is not None:
            *pieces, last = _best(running)
            replies += [(running.key, piece) for piece in (*pieces, msgspec.structs.replace(last, usage=usage))]


def _best(running: RunningRequest[Any]) -> list[wire.Output]:
    """Return the outputs of the `n` likeliest candidates, best first, by their mean log
    probability.
    """
    outputs_by_id = running.held or {}

    def likelihood(id: int) -> float:
        said = [token.logprob for output in outputs_by_id.get(id, ()) for token in output.logprobs]
        return sum(said) / len(said) if said else -math.inf

    no_logprobs: dict[str, Any] = {"logprobs": (), "stop_token": None}
    best = sorted(running.sequences, key=likelihood, reverse=True)[: running.n]
    return [
        msgspec.structs.replace(output, index=index, **({} if running.wants_logprobs else no_logprobs))
        for index, id in enumerate(best)
        for output in outputs_by_id.get(id, ())
    ]
