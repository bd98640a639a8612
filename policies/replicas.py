"""One of several equal servers: the work ahead of a new request, and the prefixes that it holds.

Knows digests and counts, no texts, clients or clocks. `Backlog` gives the time to the first token
that `routing` compares: the server's line of TTFT by tokens (`estimate`), over the prompt and all
that the server reads before it, as Mooncake's scheduler estimates it (arXiv 2407.00079, algorithm
1). `Prefixes` remembers which server has read which blocks, as the prefix scorer of the Gateway API
Inference Extension does (docs/proposals/0602-prefix-cache). Invariant: where a server holds a block,
it holds all blocks before it: a chain is touched from its end, so that its beginning leaves last.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

import msgspec

from policies.estimate import Figures

BLOCKS_KEPT = 4_096
"""Blocks remembered of a server whose memory is not known: half a million tokens."""
TOKENS_PER_BLOCK = 128
_KV_FULL = 0.9
_USUAL_S = 20.0
_TAKEN = 1 / 16  # of an answer by each other one under way
_SLOWER = 1.5
_CALLS_BEFORE_SLOW = 5.0
_USUAL_PROMPT, _USUAL_ANSWER = 500, 100
_FIGURES = ("base_ms", "prefill_ms_per_token", "tpot_ms")
_KEEP = 0.9
_NEWS_MAX = 1_000


class Work(msgspec.Struct, array_like=True):
    """Requests in flight at a server; `waiting` of them, with `tokens` to read, have no first token."""

    tokens: int = 0
    waiting: int = 0
    running: int = 0


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """What a server's own metrics said: requests, the share of its KV memory in use and all of it in
    tokens (0: not told), the prompt tokens since its start, and those of them in its prefix cache.
    """

    running: float = 0.0
    waiting: float = 0.0
    kv_used: float = 0.0
    kv_tokens: float = 0.0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0


class Backlog:
    """The work ahead of a new request: this worker's, what others told of theirs, and strangers'."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.reading_since_s = 0.0  # the latest of its prompts
        self.sent = Work()
        self.others = Work()  # as last told
        self.reading: Reading | None = None
        self.siblings: Figures | None = None  # of equal servers together
        self.has_restarted = False  # since its prefixes were last forgotten
        self._strangers = 0.0  # waiting there, and sent by no worker
        self._usual_running, self._usual_at_s = 0.0, clock()
        self._mean_tokens = 0.0  # to read, of a request
        self._answer_ms = 0.0  # from first to last token

    def enter(self, tokens: int) -> Queued:
        """Count a request with `tokens` to read, until its `Queued` is left."""
        self._mean_tokens = tokens if not self._mean_tokens else _KEEP * self._mean_tokens + (1 - _KEEP) * tokens
        sent = self.sent
        if not sent.waiting:
            self.reading_since_s = self.clock()
        sent.tokens, sent.waiting, sent.running = sent.tokens + tokens, sent.waiting + 1, sent.running + 1
        return Queued(self, tokens)

    def answered(self, answer_ms: float) -> None:
        """Learn how long a request runs after its first token."""
        self._answer_ms = answer_ms if not self._answer_ms else _KEEP * self._answer_ms + (1 - _KEEP) * answer_ms

    def take(self, reading: Reading | None) -> None:
        """Take what its metrics say now; None: nothing of late. Fewer prompt tokens than before are
        those of another process.
        """
        now_s = self.clock()
        self._usual_running += (self._running - self._usual_running) * (
            1.0 - math.exp((self._usual_at_s - now_s) / _USUAL_S)
        )
        self._usual_at_s = now_s
        before, self.reading = self.reading, reading
        self._strangers = 0.0
        if reading is None:
            return
        self.has_restarted |= before is not None and reading.prompt_tokens < before.prompt_tokens
        unknown = reading.running + reading.waiting - self.sent.running - self.others.running
        self._strangers = max(0.0, min(unknown, reading.waiting))

    def ahead_tokens(self, prefill_ms_per_token: float = 0.0) -> int:
        """The tokens that the server reads before those of a new request: without those that it has
        read of the first one since, at this rate.
        """
        tokens = self.sent.tokens
        if tokens and prefill_ms_per_token:
            tokens -= min(
                tokens // self.sent.waiting, int((self.clock() - self.reading_since_s) * 1000.0 / prefill_ms_per_token)
            )
        return tokens + self.others.tokens + int(self._strangers * self._mean_tokens)

    def judged(self, figures: Figures) -> Figures:
        """The figures to choose by: those of all equal servers, whose noise is less, unless this one is
        clearly slower.
        """
        siblings = self.siblings
        if siblings is None or (
            figures.weight >= _CALLS_BEFORE_SLOW and _usual_ms(figures) > _SLOWER * _usual_ms(siblings)
        ):
            return figures
        return siblings

    @property
    def _running(self) -> float:
        running = self.sent.running + self.others.running
        return running if self.reading is None else max(running, self.reading.running + self.reading.waiting)

    def load_ms(self) -> float:
        """What the answers under way there, now and as a rule, take from one more, in ms."""
        return (self._running + self._usual_running) * self._answer_ms * _TAKEN

    def ttft_ms(self, figures: Figures, prompt_tokens: int) -> float:
        """The predicted TTFT in ms of a prompt without warm tokens, behind all that is ahead of it.

        Where memory is what requests wait for, each waits for the end of an answer.
        """
        ttft_ms = figures.ttft_ms(prompt_tokens + self.ahead_tokens(figures.prefill_ms_per_token))
        reading = self.reading
        if reading is None or reading.kv_used < _KV_FULL or not reading.waiting:
            return ttft_ms
        return ttft_ms + reading.waiting * self._answer_ms / max(1.0, reading.running)


def pooled(figures: Sequence[Figures]) -> Figures | None:
    """The figures of equal servers together: the median of each, of those that have answered."""
    known = [each for each in figures if each.weight > 0]
    if not known:
        return None
    middle = {name: median([getattr(each, name) for each in known]) for name in _FIGURES}
    return Figures(weight=sum(each.weight for each in known), **middle)


def _usual_ms(figures: Figures) -> float:
    """The time in ms of a usual answer."""
    return figures.ttft_ms(_USUAL_PROMPT) + figures.tpot_ms * _USUAL_ANSWER


class Queued(msgspec.Struct, eq=False):
    """A request's place in a backlog."""

    backlog: Backlog
    tokens: int
    is_waiting: bool = True

    def begun(self) -> None:
        """Its first token has come."""
        if self.is_waiting:
            self.is_waiting = False
            sent, self.backlog.reading_since_s = self.backlog.sent, self.backlog.clock()
            sent.tokens, sent.waiting = sent.tokens - self.tokens, sent.waiting - 1

    def leave(self) -> None:
        """The request has ended. To be called once."""
        self.begun()
        self.backlog.sent.running -= 1


class Prefixes:
    """The blocks that each server has read of late, by its name. A block is a digest of all before it."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[bytes, int]] = {}  # how often each was read
        self._rooms: dict[str, int] = {}
        self.news: deque[tuple[str, Sequence[bytes]]] = deque(maxlen=_NEWS_MAX)  # for other processes

    def read(self, name: str, chain: Sequence[bytes]) -> None:
        """The server reads these blocks now; other processes are to know it."""
        self.note(name, chain)
        self.news.append((name, chain))

    def note(self, name: str, chain: Sequence[bytes]) -> None:
        """The server has read these blocks, and forgets those that it has not used for longest."""
        known = self._known.setdefault(name, OrderedDict())
        for block in reversed(chain):
            known[block] = known.get(block, 0) + 1
            known.move_to_end(block)
        room = self._rooms.get(name, BLOCKS_KEPT)
        while len(known) > room:
            known.popitem(last=False)

    def resize(self, name: str, tokens: float) -> None:
        """The server's memory holds so many tokens."""
        self._rooms[name] = max(1, int(tokens) // TOKENS_PER_BLOCK)

    def forget(self, name: str) -> None:
        """The server holds nothing any more: it began anew, or is gone."""
        self._known.pop(name, None)

    def shared(
        self, chain: Sequence[bytes], prompt_tokens: int, warm: Mapping[str, int], names: Collection[str]
    ) -> dict[str, int]:
        """Of the tokens that each server of `names` does not hold, those that later prompts will find
        there: a block that was read r times by n servers is read r / n times more by each that holds
        it, so that this prompt answers for one of 1 + r / n readings, and not for r / (r + n) of it.
        """
        gains, sums = [0.0], 0.0
        for block in chain:
            reads = sum(known.get(block, 0) for known in self._known.values())
            if reads < 2:
                break
            sums += reads / (reads + len(names))
            gains.append(sums)
        each = prompt_tokens / max(1, len(chain))
        held = {name: round(warm.get(name, 0) / each) for name in names}
        return {name: int((sums - gains[min(held[name], len(gains) - 1)]) * each) for name in names}

    def warm(self, chain: Sequence[bytes], prompt_tokens: int) -> dict[str, int]:
        """The tokens of a prompt with these blocks that each server holds, without those that hold none."""
        warm = {}
        for name, known in self._known.items():
            least, most = 0, len(chain)
            while least < most:
                middle = (least + most + 1) // 2
                least, most = (middle, most) if chain[middle - 1] in known else (least, middle - 1)
            if least:
                warm[name] = prompt_tokens * least // len(chain)
        return warm
