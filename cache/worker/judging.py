"""Fresh answers compared with cached ones in the cache worker, by the judge of prose.

Knows the cache, no socket and no Redis. All work goes in small pieces through a function that does
each between lookups. A sketch is made of the fresh answer, and of at most one other that
has none. Invariants: an answer is compared with those of its own partition and compat alone; what
can be remembered of its text is remembered for its partition alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from cache.encoder.types import Encoded
from cache.fingerprint import Partition
from cache.semantic.cache import SemanticCache, SketchAdded
from cache.semantic.follower import BetweenLookups
from cache.verdicts.prose import Sketch, pieces, sketch
from cache.verdicts.records import answer_name
from cache.worker.messages import AnswerText, AskJudge, Judged
from cache.worker.queue import EMBED_CHARS, EMBED_TEXTS, fitting

_OTHERS_SKETCHED_MAX = 1


class AnswerJudging:
    """Compares answers by the sketches that `cache` keeps."""

    def __init__(self, cache: SemanticCache) -> None:
        self._cache = cache

    async def judge(self, ask: AskJudge, between_lookups: BetweenLookups) -> Judged:
        """Return the rulings on the others of `ask`. Raises what `between_lookups` raises."""
        fresh = await self._sketched(ask.partition, ask.fresh, between_lookups)
        # the first of a namespace has none, nor has one of an earlier version
        without = (other for other in ask.others if self._is_wanted(ask.partition, other))
        for other in itertools.islice(without, _OTHERS_SKETCHED_MAX):
            await self._sketched(ask.partition, other, between_lookups)
        name, *names = (answer_name(answer.exact, answer.created_at) for answer in (ask.fresh, *ask.others))
        judging = partial(self._cache.judge_prose, ask.partition + ask.compat, fresh, name, names)
        return Judged(tuple(await between_lookups(judging)))

    def _is_wanted(self, partition: Partition, answer: AnswerText) -> bool:
        return self._cache.wants_sketch(partition, answer.exact, answer.created_at)

    async def _sketched(self, partition: Partition, answer: AnswerText, between_lookups: BetweenLookups) -> Sketch:
        """Return the sketch of an answer. It is kept with the answer's entry, if that is still
        stored.
        """
        texts = await between_lookups(partial(pieces, answer.text))
        while texts:
            count = fitting(map(len, texts), EMBED_TEXTS, EMBED_CHARS)
            await between_lookups(partial(self._embed, partition, texts[:count]))
            texts = texts[count:]
        return await between_lookups(partial(self._sketch, partition, answer))

    # --- in the cache's thread

    def _embed(self, partition: Partition, texts: Sequence[str]) -> Encoded:
        return self._cache.embed_sentences(partition, texts)

    def _sketch(self, partition: Partition, answer: AnswerText) -> Sketch:
        fresh = sketch(answer.text, partial(self._embed, partition))
        if self._is_wanted(partition, answer):
            added = SketchAdded(partition, answer.exact, answer.created_at, fresh.encode(), is_saved=False)
            self._cache.fold([added])
        return fresh
