"""Speculation: draft the next tokens, and verify them all in one step (arXiv:2211.17192).

Drafts have four sources. `TEXT` and `REFERENCE` are looked up: if the last few tokens occurred
before, in the prompt and the answer or in the request's reference text, the tokens that followed
them are proposed (prompt lookup decoding). `MODEL` is a smaller model (see `draft_model`).
`GRAMMAR` counts the tokens that an answer's grammar forces, which need no verification. Knows token
ids and timings, no model.

Drafting is decided for a whole step: tokens join it, the likeliest first, while they raise the
expected tokens per second of the step (arXiv:2406.14066). The acceptance rate is learned for all
sequences together, by source and by the number of matching tokens before the draft, and corrected
by each sequence's own results.

Invariants: a draft never changes an answer, only its number of steps, because each position's token
is drawn from the model's own distribution and a draft only decides how far one step may go. A
source never spends more time than its drafts have saved plus an allowance of half a percent,
however wrong the predictions are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from enum import StrEnum

from local_engine.speculation.timing import StepTiming

MATCH_MAX = 17
_CHAIN_MAX = 8  # earlier places that are compared, the latest first
_RATE_MAX = 0.98
_ALLOWANCE = 0.005  # of the time of all steps
_CREDIT_AT_FIRST, _CREDIT_MAX = 2.0, 50.0  # in plain steps
_PLAIN_EVERY = 64  # steps: the time of a plain one has to be measured, too
_MODEL_STEPS = 32  # at most, among which the price of catching up is divided


class DraftSource(StrEnum):
    """The origin of a draft."""

    TEXT = "text"
    REFERENCE = "reference"
    MODEL = "model"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class DraftKind:
    """A class of drafts with about the same acceptance rate: of one source, after a similar number
    of matching tokens."""

    source: DraftSource
    match: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to verify; for the draft model only the number `wanted`."""

    kind: DraftKind
    tokens: tuple[int, ...] = ()
    wanted: int = 0

    def part(self, count: int) -> Draft | None:
        """The first `count` tokens of the draft, or None."""
        return replace(self, tokens=self.tokens[:count], wanted=min(self.wanted, count)) if count > 0 else None


@dataclass(slots=True)
class PromptLookup:
    """The last position of each pair of tokens, over `reference` and then the sequence; it grows
    with the sequence. `_before[end]` is the previous end of the pair that ends there (LZ77's hash
    chains)."""

    reference: list[int] = field(default_factory=list)
    _text: list[int] = field(default_factory=list)
    _last: dict[tuple[int, int], int] = field(default_factory=dict)
    _before: list[int] = field(default_factory=lambda: [0, 0])

    def find(self, tokens: list[int]) -> tuple[int, int] | None:
        """The place in the reference and `tokens` where the proposed continuation begins, and how
        many tokens before it match the last of `tokens`: the longest match among the latest few
        places. None if the last two tokens never occurred together."""
        text, previous_ends = self._text, self._before
        if not text:
            text.extend(self.reference)
        text.extend(tokens[len(text) - len(self.reference) :])
        while len(previous_ends) < len(text):  # the pair that ends the text has no continuation yet
            end = len(previous_ends)
            pair = (text[end - 2], text[end - 1])
            previous_ends.append(self._last.get(pair, 0))
            self._last[pair] = end
        position = self._last.get((text[-2], text[-1]), 0) if len(text) > 2 else 0
        best, match = 0, 0
        for _ in range(_CHAIN_MAX):
            if not position or match == MATCH_MAX:
                break
            alike = self._alike(position)
            if alike > match:
                best, match = position, alike
            position = previous_ends[position]
        return (best, match) if best else None

    def follow(self, position: int, count: int) -> tuple[int, ...]:
        """The `count` tokens from `position` on."""
        text = self._text
        period = len(text) - position  # a loop is assumed to go on
        return tuple(text[position + index % period] for index in range(count))

    def _alike(self, position: int) -> int:
        text, size = self._text, len(self._text)
        for back in range(2, min(MATCH_MAX, position)):
            if text[position - 1 - back] != text[size - 1 - back]:
                return back
        return min(MATCH_MAX, position)


@dataclass(slots=True)
class GuessRate:
    """The acceptance rate of one kind of draft, counted at tokens whose predecessors were accepted.
    Counts fade to an optimistic prior, so that a losing kind is retried, at growing intervals."""

    _right: float = 0.0
    _tried: float = 0.0
    _at: int = 0

    def rate(self, now: int) -> float:
        faded = 0.999 ** (now - self._at)
        return (1.8 + faded * self._right) / (2.0 + faded * self._tried)

    def add(self, accepted: int, drafted: int, now: int) -> None:
        faded = 0.999 ** (now - self._at) * 0.98**drafted
        self._right, self._tried, self._at = accepted + faded * self._right, drafted + faded * self._tried, now


@dataclass(slots=True)
class RateCorrection:
    """The ratio of one source's accepted tokens in one sequence to those expected from all
    sequences."""

    _right: float = 3.0
    _expected: float = 3.0

    @property
    def factor(self) -> float:
        return self._right / self._expected

    def add(self, accepted: int, expected: float) -> None:
        self._right = 3.0 + accepted + 0.9 * (self._right - 3.0)
        self._expected = 3.0 + expected + 0.9 * (self._expected - 3.0)


@dataclass(slots=True)
class Speculation:
    """The state of speculation for one sequence."""

    lookup: PromptLookup
    corrections: dict[DraftSource, RateCorrection] = field(
        default_factory=lambda: {s: RateCorrection() for s in DraftSource}
    )


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that decodes in the coming step: its `tokens`, with `room` for further ones; the
    draft model has computed the first `draft_computed`. `in_flight` (0 or 1) counts a token in
    flight, which a draft must guess as well."""

    id: int
    speculation: Speculation
    tokens: list[int]
    room: int
    in_flight: int = 0
    draft_computed: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A possible draft for `request`: at most `room` tokens, each accepted with probability `rate`
    if its predecessors are; `position` is where they are looked up."""

    request: DraftRequest
    kind: DraftKind
    rate: float
    room: int
    position: int = 0

    def draft(self, count: int) -> Draft:
        """The first `count` tokens of the offer."""
        if self.kind.source is DraftSource.MODEL:
            return Draft(self.kind, wanted=count)
        ahead = self.request.in_flight
        return Draft(self.kind, self.request.speculation.lookup.follow(self.position, ahead + count)[ahead:])


@dataclass(slots=True)
class DraftPlan:
    """A step: the expected `tokens`, the expected `ms`, how many tokens are drafted from each
    offer, and each source's share of the time."""

    tokens: float
    ms: float
    counts: list[tuple[Offer, int]] = field(default_factory=list)
    spent_ms: dict[DraftSource, float] = field(default_factory=lambda: dict.fromkeys(DraftSource, 0.0))

    @property
    def speed(self) -> float:
        return self.tokens / self.ms


class Speculator:
    """Decides the drafts of a step's sequences, and learns from their results. `tokens_max` bounds
    one draft; `model_context_tokens` is the draft model's context, 0 without a draft model."""

    def __init__(self, timing: StepTiming, tokens_max: int, model_context_tokens: int = 0) -> None:
        self.timing = timing
        self._tokens_max = tokens_max
        self._model_context_tokens = model_context_tokens
        self._tallies: dict[DraftKind, GuessRate] = {}
        self._credit_ms: dict[DraftSource, float] = {}
        self._token_ms = 0.0  # milliseconds of a token without drafts
        self._now = self._plain_at = 0

    def plan(self, rows: int, requests: Many[DraftRequest]) -> dict[int, Draft]:
        """The drafts of a step that decodes `rows` sequences, by the ids of `requests`."""
        plain_ms = self.timing.steps.at(rows)
        self._now += 1
        if plain_ms is None or self._now - self._plain_at > _PLAIN_EVERY:
            self._plain_at = self._now
            return {}
        self._token_ms = plain_ms / rows
        for source in DraftSource:
            credit_ms = self._credit_ms.get(source, _CREDIT_AT_FIRST * plain_ms) + _ALLOWANCE * plain_ms
            self._credit_ms[source] = min(credit_ms, _CREDIT_MAX * plain_ms)
        looked_up = [offer for request in requests if (offer := self._of_lookup(request)) is not None]
        plan = self._extended(DraftPlan(rows, plain_ms), looked_up)
        if self._model_context_tokens:
            rates = {offer.request.id: offer.rate for offer in looked_up}
            likelier = [
                offer for request in requests if (offer := self._of_model(request)).rate > rates.get(request.id, 0.0)
            ]
            modelled = self._modelled(DraftPlan(rows, plain_ms), likelier)
            theirs = {offer.request.id for offer, _ in modelled.counts}
            rest = [offer for offer in looked_up if offer.request.id not in theirs]
            plan = max(plan, self._extended(modelled, rest), key=lambda one: one.speed)
        if not plan.counts:
            self._plain_at = self._now
        for source, ms in plan.spent_ms.items():
            self._credit_ms[source] -= ms
        return {offer.request.id: offer.draft(count) for offer, count in plan.counts}

    def observe(self, speculation: Speculation, kind: DraftKind, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        tried_tokens = min(accepted + 1, drafted)
        tally = self._tallies.setdefault(kind, GuessRate())
        speculation.corrections[kind.source].add(accepted, tried_tokens * tally.rate(self._now))
        tally.add(accepted, tried_tokens, self._now)
        self._credit_ms[kind.source] = self._credit_ms.get(kind.source, 0.0) + accepted * self._token_ms

    def forget(self) -> None:
        """Discard all measurements: the steps so far were not typical."""
        self._tallies.clear()
        self._credit_ms.clear()

    def _rate(self, request: DraftRequest, kind: DraftKind) -> float:
        tally = self._tallies.get(kind) or GuessRate()
        return min(_RATE_MAX, request.speculation.corrections[kind.source].factor * tally.rate(self._now))

    def _of_lookup(self, request: DraftRequest) -> Offer | None:
        match_at = request.speculation.lookup.find(request.tokens)
        if match_at is None:
            return None
        position, match = match_at
        source = DraftSource.REFERENCE if position < len(request.speculation.lookup.reference) else DraftSource.TEXT
        kind = DraftKind(source, (match - 1).bit_length())
        return Offer(request, kind, self._rate(request, kind), min(request.room, self._tokens_max), position)

    def _of_model(self, request: DraftRequest) -> Offer:
        kind = DraftKind(DraftSource.MODEL)
        room = min(request.room, self._tokens_max, self._model_context_tokens - len(request.tokens))
        return Offer(request, kind, self._rate(request, kind), room)

    def _extended(self, plan: DraftPlan, offers: Many[Offer]) -> DraftPlan:
        """The plan with as many looked-up tokens as make it faster, the likeliest first."""
        row_ms = self.timing.steps.row_ms
        guesses = []
        for index, offer in enumerate(offers):
            likelihood = offer.rate**offer.request.in_flight
            for _ in range(offer.room):
                likelihood *= offer.rate
                if likelihood <= row_ms * plan.speed:
                    break
                guesses.append((likelihood, index))
        counts: Counter[int] = Counter()
        for likelihood, index in sorted(guesses, reverse=True):
            source = offers[index].kind.source
            if likelihood <= row_ms * plan.speed:
                break
            if plan.spent_ms[source] + row_ms <= self._credit_ms[source]:
                plan.tokens += likelihood
                plan.ms += row_ms
                plan.spent_ms[source] += row_ms
                counts[index] += 1
        plan.counts += [(offers[index], count) for index, count in counts.items()]
        return plan

    def _modelled(self, plan: DraftPlan, offers: Many[Offer]) -> DraftPlan:
        """The plan with drafts of the model, each as deep as its tokens are worth their rows, and
        all as deep as is worth the model's steps."""
        timing, credit_ms = self.timing, self._credit_ms[DraftSource.MODEL]
        best, spent_ms = plan, 0.0
        tokens, ms = plan.tokens, plan.ms
        open_offers = []
        for offer in sorted(offers, key=lambda one: len(one.request.tokens) - one.request.draft_computed):
            behind_ms = timing.draft_steps.row_ms * (len(offer.request.tokens) - offer.request.draft_computed - 1)
            if offer.room > 0 and spent_ms + behind_ms <= credit_ms:
                open_offers.append(offer)
                spent_ms += behind_ms
                ms += behind_ms / min(_MODEL_STEPS, offer.room)
        depths: dict[int, int] = {}
        for depth in range(1, self._tokens_max + 1):
            least = timing.steps.row_ms * tokens / ms
            open_offers = [offer for offer in open_offers if offer.room >= depth and offer.rate**depth > least]
            if not open_offers:
                break
            more_ms = (timing.draft_steps.at(len(open_offers)) or 0.0) + len(open_offers) * timing.steps.row_ms
            tokens += sum(offer.rate**depth for offer in open_offers)
            ms += more_ms
            spent_ms += more_ms
            if spent_ms > credit_ms:
                break
            depths |= dict.fromkeys(map(id, open_offers), depth)
            if tokens / ms > best.speed:
                counts = [(offer, depths[id(offer)]) for offer in offers if id(offer) in depths]
                best = DraftPlan(tokens, ms, counts, plan.spent_ms | {DraftSource.MODEL: spent_ms})
        return best
