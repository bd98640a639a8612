"""The outcomes of the stages of one generation. Each but `Holds` is frozen, and its stage sets it whole.

    Looked      4, 5, 6    what the cache said, with a verifier's question before an answer found by
                           meaning is served
    Holds       7          `holds.py`: tokens and money, which 9 adds to and 10 settles
    Answered    8, 9       what was tried, and what answered
    Stored      10         the cost, and what the cache kept

They contain no services and never await. Invariant: a frozen outcome never changes; a later one
takes its place in the `Generation`. `Asking` alone is filled beside the journey, until its record.
"""

import msgspec

from cache import Entry, Fingerprint, Trial
from cache.eligibility import CUT
from cache.query import Undecided
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.progress import Progress
from policies import Demand, Route, Usage


class Asking(msgspec.Struct, eq=False):
    """6: a question to a verifier; a task of its own fills it, also after the request went on.

    `verdict` is yes, no, unsure, risky (a yes beyond the error bound), failed, or late until it is known.
    `entry` has the answer that it found right. The request waited `waited_ms` for it.
    """

    verifier: str  # the deployment
    verdict: str = "late"
    cost_microusd: int = 0
    waited_ms: float = 0.0
    entry: Entry | None = None


class SemanticResult(msgspec.Struct, frozen=True):
    """6: the entry that a semantic lookup serves, or the reason why it serves none."""

    entry: Entry | None = None
    similarity: float | None = None  # of the hit, or of the nearest entry that is not served
    error_max: float = 0.0  # the bound of a hit that the cache worker found
    miss_reason: str = ""
    nearest: str = ""  # the nearest entry's text; empty unless prompts may be logged
    question: str = ""  # the request's own text, of a hit or observed one; empty unless prompts may be logged
    trial: Trial | None = None  # the decision's features, for the verdict that may follow
    degraded: tuple[str, ...] = ()  # parts that failed and that the request did without
    undecided: Undecided | None = None  # the answers that a verifier may be asked about
    asking: Asking | None = None
    verified_by: str = ""  # the verifier that found a hit right, for this request or for its words before
    would: Entry | None = None  # the answer of a certain hit that is only observed


class Looked(msgspec.Struct, frozen=True):
    """4, 5 and 6: the recorded answer that is replayed, or why there is none."""

    fingerprint: Fingerprint  # from 5 on, its context is without what an operator's patterns match
    limit_headers: dict[bytes, bytes] = {}  # of the limits on requests
    entry: Entry | None = None  # the recorded answer that is replayed
    semantic: SemanticResult = SemanticResult()
    no_lookup_reason: str = ""  # against a semantic lookup, apart from cache controls
    words_key: bytes | None = None  # by which the words of its prompt find an answer
    warm: dict[str, int] = {}  # the prompt tokens that deployments saw last, by name
    degraded: tuple[str, ...] = ()  # failed parts that the request did without
    loop: str = ""  # that the request is part of (`loops.py`)
    is_stale: bool = False  # a newer answer than `entry` is made beside it
    is_claimed: bool = False  # other workers wait for its entry
    claimed_for_ms: float | None = None  # another worker had been making its entry for so long
    awaited_until: float = 0.0  # by time.perf_counter, where it has waited for that worker
    near: Entry | None = None  # the answer to the nearest prompt, which a local engine may use as a draft

    @property
    def is_from_elsewhere(self) -> bool:
        """Whether another worker made the answer while this request waited for it."""
        return self.entry is not None and self.semantic.entry is None


class Rejection(msgspec.Struct, frozen=True):
    """The reason why a deployment was not used, or an alias could not answer."""

    name: str
    reason: str


class Hedged(msgspec.Struct, frozen=True):
    """A second deployment that was asked beside a slow first one.

    `outcome`: `won` (it answered), `lost`, or `failed` (neither answered). `cost_microusd` is what
    the one that did not answer cost.
    """

    deployment: str
    outcome: str
    cost_microusd: int = 0


class Seam(msgspec.Struct, frozen=True):
    """Where an answer broke off and another deployment went on: after so many characters."""

    broken: str
    deployment: str
    characters: int


class Try(msgspec.Struct, frozen=True):
    """A deployment that was tried, and its answer so far."""

    deployment: Deployment
    progress: Progress


class Answered(msgspec.Struct, frozen=True):
    """8 and 9, up to now: the route, the tries, and the one that answers."""

    serving: Alias  # the alias or the fallback whose deployments are tried
    demand: Demand  # with what deployments said of the prompt's length
    progress: Progress  # of the try that answers, or of the last one; without a try an empty one
    route: Route | None = None  # the first one, with each rejection
    first_choice_model: str = ""
    why: str = ""  # why the deployment that was tried last was chosen
    tries: tuple[Try, ...] = ()
    queued_ms: float = 0.0  # waited for a slot, as every deployment was full
    fallbacks: tuple[Rejection, ...] = ()  # the aliases that could not answer: the next fallback was asked
    seams: tuple[Seam, ...] = ()  # where another deployment went on with the answer
    whole_usage: Usage | None = None  # of an answer with seams, as its clients see it
    hedge: Hedged | None = None  # a second deployment that was asked at the same time
    beside: tuple[Progress, ...] = ()  # the tries of that race which did not answer

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended at a length limit: it is no answer to another request."""
        return CUT in self.progress.finish_reasons


class Claim(msgspec.Struct, frozen=True):
    """What a deployment reported, where it was more than what was held, or none for the prompt.
    `is_cut`: it was beyond the bound, which is booked instead.
    """

    deployment: str
    prompt_tokens: int
    completion_tokens: int
    tool_calls: int
    units: int
    is_cut: bool


class MoneyFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request cost, and what it would have cost without Sameway."""

    usage_estimated: bool = False  # the deployment did not report the tokens of its answer
    claims: tuple[Claim, ...] = ()  # reports of more than was held
    cost_microusd: int = 0
    baseline_microusd: int = 0  # the cost without Sameway
    is_baseline_unknown: bool = False  # as a price is missing
    saved_microusd: int = 0  # the baseline less the cost; below 0 where Sameway cost more
    savings: dict[str, int] | None = None  # the same by mechanism, for generations
    avoided_microusd: int = 0  # by a hit: the cost of the same answer when it was generated


class Spent(msgspec.Struct, frozen=True):
    """The tokens of the answer of a generation that has ended, and the cost of all its tries."""

    usage: Usage = Usage()
    money: MoneyFacts = MoneyFacts()
    answer_microusd: int = 0  # of the cost, for the answer alone
    answer_baseline_microusd: int | None = None  # the answer's cost without Sameway; None: a price is missing
    hedge_microusd: int = 0  # of it, for the tries of a race that did not answer
    charged_tokens: int = 0  # of all tries
    charged_deployment: str = ""  # the last one that costs something


class Stored(msgspec.Struct, frozen=True):
    """10: the cost, and the entry that was to be stored, with `stored` or the reason against it."""

    spent: Spent = Spent()
    entry: Entry | None = None
    outcome: str = ""
