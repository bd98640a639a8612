"""The judges that cost no money: equality, then those of the cache worker.

Knows no models and no verdicts. Invariant: the rulings come in the order of the answers.
"""

from collections.abc import Sequence

from cache import Partition, SemanticClient
from cache.verdicts import Judgement, Ruling, equal
from cache.worker import AnswerText


class OwnJudges:
    """The judges that cost no money: equality, then those of the cache worker."""

    names = "equality, prose"

    def __init__(self, semantic: SemanticClient) -> None:
        self._semantic = semantic

    async def compare(
        self, partition: Partition, compat: bytes, fresh: AnswerText, others: Sequence[AnswerText]
    ) -> list[Judgement]:
        """The rulings on a fresh answer against others of its partition and compat, in order.
        Raises CacheWorkerUnavailable.
        """
        judgements = [equal(fresh.text, other.text) for other in others]
        open_ = [index for index, judgement in enumerate(judgements) if judgement.ruling is Ruling.UNKNOWN]
        rulings = await self._semantic.judge(partition, compat, fresh, [others[index] for index in open_])
        for index, judgement in zip(open_, rulings, strict=True):
            judgements[index] = judgement
        return judgements
