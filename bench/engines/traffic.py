"""Random requests for an engine, and what became of each: the soak's traffic.

Knows what a request may legally end in. Invariant: equal seeds make equal requests.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from local_engine import (
    AsyncEngine,
    EngineError,
    EngineFailed,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
)

_END_TIMEOUT_S = 120.0
_SALTS = (b"", b"a", b"b", b"c")
_REFERENCES = ("one two three four five six seven eight nine ten " * 4, "")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and how its reader behaves: reads all, or leaves after `leaves_after` pieces (0: at once), or goes with
    its whole connection. `is_wrong`: the engine must refuse it."""

    request: GenerateRequest
    leaves_after: int | None = None
    leaves_client: bool = False
    is_wrong: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: answered, left, or an error's name. `wrong`: what must not be, in words."""

    kind: str
    tokens: int = 0
    wrong: str | None = None


class Traffic:
    """An endless stream of requests."""

    def __init__(self, vocabulary: int, context_tokens: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._vocabulary, self._context = vocabulary, context_tokens
        self._prefixes = [self._tokens(self._draw.randint(20, 400)) for _ in range(8)]

    def next(self) -> Ask:
        draw = self._draw
        if draw.random() < 0.03:
            return Ask(self._wrong(), is_wrong=True)
        tokens = list(draw.choice(self._prefixes)) if draw.random() < 0.6 else []
        tokens += self._tokens(round(300 ** draw.random()))
        wants_best = draw.random() < 0.05
        request = GenerateRequest(
            prompt_token_ids=tokens,
            sampling=self._sampling(),
            n=draw.choice((1, 1, 1, 1, 2, 3)),
            best_of=4 if wants_best else None,
            salt=draw.choice(_SALTS),
            priority=draw.choice((0, 0, 1, 2)),
            reference=draw.choice(_REFERENCES) if draw.random() < 0.2 else None,
        )
        chance = draw.random()
        return Ask(
            request,
            leaves_after=draw.choice((0, 0, 1, 3)) if chance < 0.15 else None,
            leaves_client=chance > 0.97,
        )

    def _sampling(self) -> SamplingParams:
        draw = self._draw
        changes: dict[str, Any] = {"max_tokens": round(96 ** draw.random())}
        for chance, own in (
            (0.5, {"temperature": 0.0}),
            (0.2, {"top_k": draw.randint(1, 50), "top_p": draw.uniform(0.2, 1.0)}),
            (0.1, {"min_p": draw.uniform(0.0, 0.3)}),
            (0.1, {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}),
            (0.1, {"logit_bias": {draw.randrange(self._vocabulary): draw.uniform(-5, 5)}}),
            (0.2, {"seed": draw.getrandbits(31)}),
            (0.15, {"logprobs": draw.randint(0, 20)}),
            (0.05, {"prompt_logprobs": draw.randint(0, 3)}),
            (0.15, {"stop": tuple(chr(draw.randint(97, 122)) for _ in range(draw.randint(1, 3)))}),
            (0.1, {"stop_token_ids": (draw.randrange(self._vocabulary),)}),
            (0.1, {"min_tokens": 2}),
            (0.3, {"ignore_eos": True}),
        ):
            if draw.random() < chance:
                changes |= own
        return SamplingParams(**changes)

    def _wrong(self) -> GenerateRequest:
        draw = self._draw
        return draw.choice(
            (
                GenerateRequest(prompt_token_ids=[]),
                GenerateRequest(prompt_token_ids=[self._vocabulary]),
                GenerateRequest(prompt_token_ids=[1] * (self._context + 5)),
                GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(temperature=-1.0)),
                GenerateRequest(prompt_token_ids=[1], prompt="both"),
                GenerateRequest(prompt_token_ids=[1], n=1000),
            )
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(1, self._vocabulary) for _ in range(count)]


async def ask(engine: AsyncEngine, wanted: Ask) -> Outcome:
    """Ask and read as the reader does. What never ends, ends short, or fails without a reason is wrong."""
    request = wanted.request
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            return await _read(engine, wanted)
    except TimeoutError:
        return Outcome("hung", wrong=f"no end within {_END_TIMEOUT_S:.0f} s: {str(request)[:200]}")
    except EngineError as error:
        kind = type(error).__name__
        is_mine = wanted.is_wrong if isinstance(error, InvalidRequest) else True
        if isinstance(error, EngineFailed):
            is_mine = False
        return Outcome(kind, wrong=None if is_mine else f"{kind}: {error}: {str(request)[:200]}")


async def _read(engine: AsyncEngine, wanted: Ask) -> Outcome:
    request, tokens, ended, usage = wanted.request, 0, set(), None
    async with engine.generate(request) as generation:
        pieces = 0
        if wanted.leaves_after == 0:
            return Outcome("left")
        async for output in generation:
            pieces += 1
            tokens += len(output.token_ids)
            usage = output.usage
            if output.finish_reason is not None:
                ended.add(output.index)
            if wanted.leaves_after is not None and pieces >= wanted.leaves_after:
                return Outcome("left", tokens)
    wrong = None
    if wanted.is_wrong:
        wrong = f"a wrong request was answered: {str(request)[:200]}"
    elif usage is None or len(ended) != request.n:
        wrong = f"an answer without its end: {len(ended)} of {request.n} choices: {str(request)[:200]}"
    elif usage.prompt_tokens != len(request.prompt_token_ids or ()):
        wrong = f"usage counts {usage.prompt_tokens} prompt tokens"
    return Outcome("answered", tokens, wrong)
