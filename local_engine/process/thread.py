"""The thread that owns the engine: loads it, turns commands into sequences and steps into messages.

Knows the wire's messages and no sockets. Commands come through a queue, from any thread; outputs
leave once per step. Invariants: an error that one request raises is its own answer and never ends
the loop; a request leaves nothing behind once all of its choices have ended, failed or been
aborted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True)
class Key:
    """A request of one connection: clients choose their ids freely."""

    client: int
    id: int


@dataclass(slots=True)
class Work:
    """A request in the engine: its sequences, one per choice, and the usage of those that ended.
    `held` are the outputs so far where the `n` best are chosen at the end."""

    key: Key
    sequences: list[int]
    n: int
    wants_logprobs: bool
    held: dict[int, list[wire.Output]] | None = None
    ended: dict[int, wire.Usage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """A submission, whose grammar is compiled where it has one."""

    request: wire.GenerateRequest
    grammar: Compiled | None = None


Command = tuple[Key, Ready | wire.Abort] | None


class EngineThread(threading.Thread):
    """Loads the engine, then turns commands into sequences and steps into messages. Everything here
    but `send` and the public attributes runs in the thread."""

    def __init__(self, config: EngineConfig, deliver: Callable[[list[tuple[Key, wire.ToClient]]], object]) -> None:
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
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._works: dict[Key, Work] = {}
        self._by_sequence: dict[int, Work] = {}
        self._probe: int | None = None
        self._probes_failed = 0  # in a row

    def send(self, command: Command) -> None:
        """Hand over a command; None ends the thread."""
        self._commands.put(command)

    def run(self) -> None:
        try:
            from local_engine.engine import Engine

            engine = Engine(self._config, progress=self._show_progress)
        except BaseException as error:
            self.error = error
            return
        engine.tokenizer.start_chat()
        self.info, self.tokenizer, self.grammars = engine.info, engine.tokenizer, engine.grammars
        self.load = engine.load()
        is_checked = False  # since it last worked
        while True:
            block = not engine.has_work
            while True:
                try:
                    command = self._commands.get(block=block, timeout=None if is_checked else _IDLE_CHECK_S)
                except queue.Empty:
                    if not block:
                        break
                    try:
                        engine.check_integrity()
                    except AssertionError as error:  # where invariants don't hold, the process must end
                        self.error = error
                        return
                    is_checked = True
                    continue
                is_checked = False
                if command is None:
                    return
                self._handle(engine, *command)
                block = not engine.has_work and self._commands.empty()
                if block:
                    self.load = engine.load()
            self.step_s_expected = engine.step_s_expected
            self.steps_begun += 1
            self._step(engine)
            if self.error is not None:
                return
            self.steps_ended += 1
            self.load = engine.load()

    def _show_progress(self, fraction: float, stage: str) -> None:
        self.load = wire.EngineLoad(progress=fraction, stage=stage, queue_max=self._config.queue_max)

    def _handle(self, engine: Engine, key: Key, command: Ready | wire.Abort) -> None:
        """One bad request must never end the loop: its error is its own answer."""
        try:
            if isinstance(command, Ready):
                self._submit(engine, key, command.request, command.grammar)
            else:
                self._abort(engine, key)
        except Exception as error:
            self._deliver([(key, wire.error_to_wire(key.id, error))])

    def _submit(self, engine: Engine, key: Key, request: wire.GenerateRequest, grammar: Compiled | None) -> None:
        if not 1 <= request.n <= CHOICES_MAX:
            raise wire.InvalidRequest(f"n must be from 1 to {CHOICES_MAX}, not {request.n}", param="n")
        candidates = request.best_of or request.n
        if not request.n <= candidates <= CHOICES_MAX:
            raise wire.InvalidRequest(f"best_of must be from n to {CHOICES_MAX}, not {candidates}", param="best_of")
        if key in self._works:
            raise wire.InvalidRequest(f"request id {key.id} is in use")
        tokens = engine.prompt_tokens(request)
        params = request.sampling
        held: dict[int, list[wire.Output]] | None = {} if candidates > request.n else None
        work = Work(key, [], request.n, params.logprobs is not None, held)
        if work.held is not None and params.logprobs is None:
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
                work.sequences.append(id)
        except wire.EngineError:
            for id in work.sequences:
                engine.abort(id)
            raise
        self._works[key] = work
        self._by_sequence.update(dict.fromkeys(work.sequences, work))

    def _abort(self, engine: Engine, key: Key) -> None:
        work = self._works.pop(key, None)
        for id in work.sequences if work is not None else ():
            self._by_sequence.pop(id, None)
            engine.abort(id)

    def _step(self, engine: Engine) -> None:
        try:
            outputs = engine.step()
        # a bug outside the model's own run: end all, so that nothing waits for ever
        except Exception as error:
            _log.exception("the engine's step raised")
            failure = wire.EngineFailed(f"the engine failed: {error}")
            failed = [(key, wire.error_to_wire(key.id, failure)) for key in self._works]
            for key in list(self._works):
                self._abort(engine, key)
            self._deliver(list(failed))
            if self._probe is not None:
                engine.abort(self._probe)
            self._probe_device(engine, error, has_probe=self._probe is not None, is_alone=not failed)
            return
        messages: list[tuple[Key, wire.ToClient]] = []
        for output in outputs:
            work = self._by_sequence.get(output.id)
            if work is not None:
                self._report(engine, work, output, messages)
        if messages:
            self._deliver(messages)
        errors = {output.id: output.error for output in outputs if isinstance(output.error, wire.EngineFailed)}
        has_probe = self._probe in errors
        if not has_probe and any(output.id == self._probe for output in outputs):
            self._probe, self._probes_failed = None, 0
        if errors:
            self._probe_device(engine, next(iter(errors.values())), has_probe=has_probe, is_alone=len(errors) == 1)

    def _probe_device(self, engine: Engine, error: Exception, *, has_probe: bool, is_alone: bool) -> None:
        """After a failed step, submit a probe of one token. Where that fails too, several times and
        alone in its step, no request is the cause but a broken device, or no memory left. Then the
        process ends, and is started again."""
        if has_probe:
            self._probe = None
            self._probes_failed += is_alone
        if self._probes_failed == _PROBES_FAILED_MAX:
            self.error = error
        elif self._probe is None:
            with contextlib.suppress(wire.Overloaded):  # the next step that fails will do
                self._probe = engine.submit([0], wire.SamplingParams(temperature=0.0, max_tokens=1))

    def _report(self, engine: Engine, work: Work, step: StepOutput, messages: list[tuple[Key, wire.ToClient]]) -> None:
        """Turn one sequence's step into its request's message, where it has any output."""
        if step.error is not None:
            self._abort(engine, work.key)
            messages.append((work.key, wire.error_to_wire(work.key.id, step.error)))
            return
        output = step.output
        if not (output.text or output.token_ids or output.prompt_logprobs or output.finish_reason):
            return
        usage: wire.Usage | None = None
        if step.usage is not None:
            work.ended[step.id] = step.usage
            if len(work.ended) == len(work.sequences):
                first = work.ended[work.sequences[0]]  # the prompt counts once
                once = {name: getattr(first, name) for name in ("prompt_tokens", "cached_tokens")}
                usage = msgspec.structs.replace(wire.together(work.ended.values()), **once)
                del self._works[work.key]
                for id in work.sequences:
                    del self._by_sequence[id]
        if work.held is not None:
            work.held.setdefault(step.id, []).append(output)
            if usage is not None:
                messages.append((work.key, wire.Outputs(work.key.id, _best(work), usage)))
            return
        index = work.sequences.index(step.id)
        messages.append((work.key, wire.Outputs(work.key.id, (msgspec.structs.replace(output, index=index),), usage)))


def _best(work: Work) -> tuple[wire.Output, ...]:
    """The outputs of the `n` likeliest candidates, best first: by the mean log probability of their
    tokens."""
    held = work.held or {}

    def likelihood(id: int) -> float:
        said = [token.logprob for output in held.get(id, ()) for token in output.logprobs]
        return sum(said) / len(said) if said else -math.inf

    no_logprobs: dict[str, Any] = {"logprobs": (), "stop_token": None}
    best = sorted(work.sequences, key=likelihood, reverse=True)[: work.n]
    return tuple(
        msgspec.structs.replace(output, index=index, **({} if work.wants_logprobs else no_logprobs))
        for index, id in enumerate(best)
        for output in held.get(id, ())
    )
