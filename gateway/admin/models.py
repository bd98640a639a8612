"""The values of the admin API: its bodies, and its pages and lists.

Money is an integer of µUSD, times are unix seconds, durations are ms; the unit is last in the name.
The docstrings of models are descriptions in the OpenAPI document. No storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, Strict, create_model
from pydantic_core import CoreSchema

from cache.fingerprint import TEXT_CHARS_MAX
from gateway.accounts import Key, LedgerRow, NewKey
from gateway.accounts.audit import AuditRow
from gateway.accounts.checks import AXES, RATE_MAX, ROLLING_S_MAX
from gateway.accounts.ledger import COLUMNS, LedgerTotal
from gateway.accounts.persons import Person
from gateway.accounts.sessions import Session
from gateway.accounts.teams import KeyTemplate
from gateway.batches.batches import Batch
from gateway.deployments.progress import Attempt
from gateway.journey.outcomes import Claim, Hedged, Rejection, Seam
from gateway.journey.record import FIELDS, GuardCall, Record, Stage
from gateway.learning.reports import ReportOutcome
from gateway.telemetry.hosts import Host
from gateway.telemetry.parts import GatewayPart
from gateway.telemetry.summary import Percentiles, StatsWindow
from local_engine import EngineLoad
from policies import WindowKind
from policies.prices import MICROUSD_MAX
from policies.verification import Verify
from policies.windows import Overdraft, Unit


def _whole(value: Any) -> Any:
    """The whole number that a float stands for: JSON does not tell 220.0 from 220."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = BeforeValidator(_whole)
_Id = Annotated[int, Field(ge=0, le=2**31 - 1), _Whole]
_PRINTABLE = {"pattern": r"^[^\p{C}\p{Z}]+( +[^\p{C}\p{Z}]+)*$"}  # the accounts check it, with better words
_Name = Annotated[str, Field(min_length=1, max_length=200, json_schema_extra=_PRINTABLE)]
_Label = Annotated[str, Field(min_length=1, max_length=256)]
_Models = Annotated[tuple[_Name, ...], Strict(False)]  # JSON's arrays are lists
_Networks = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=64)], ...],
    Strict(False),
    Field(description="addresses and networks such as 10.0.0.0/8, from which it is taken; null: from all"),
]
_Rate = Annotated[int, Field(ge=1, le=RATE_MAX, description="null: no limit"), _Whole]
_ErrorMax = Annotated[float, Field(ge=0, le=1, description="null: the gateway's own bound")]
_Verify = Annotated[Verify, Strict(False), Field(description="null: the gateway's own mode")]
_Regions = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")], ...],
    Strict(False),
    Field(min_length=1, max_length=50),
]
_Bound = Annotated[int, Field(ge=0, le=RATE_MAX, description="null: no bound"), _Whole]
_Limit = Annotated[int, Field(ge=0, le=MICROUSD_MAX), _Whole]


class _In(BaseModel):
    """A body from a client; unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def given(self) -> dict[str, Any]:
        """The fields that the client sent, with the defaults of nested objects."""
        found = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: value.model_dump() if isinstance(value, BaseModel) else value for name, value in found.items()}


class _Out(BaseModel):
    model_config = ConfigDict(from_attributes=True, protected_namespaces=())

    @classmethod
    def of(cls, *values: object, **fields: Any) -> Self:
        """A response with `fields`, and with the attributes of `values` that have a field's name.

        The first value with an attribute counts.
        """
        names = cls.model_fields.keys() - fields.keys()
        shown = {name: getattr(value, name) for value in reversed(values) for name in names if hasattr(value, name)}
        return cls.model_validate(shown | fields)


_FLAT: dict[Any, dict[str, Any]] = {
    Record: {name: field.type for name, field in FIELDS.items()},
    LedgerRow: dict(COLUMNS),
}
"""The types of values whose parts a response shows as one level of fields."""


class _Flat:
    """Makes a plain value a response: a schema called `name`, all fields required.

    It has the fields and properties in `only`, in that order; else all fields but those in
    `without`. `changed` has by field another type, or a text that describes the field; fields that
    the value's type does not declare, as those of a dict, need a type there.
    """

    def __init__(
        self, name: str, doc: str | None = None, *, only: str = "", without: tuple[str, ...] = (), **changed: Any
    ) -> None:
        self._name, self._doc, self._only, self._without, self._changed = name, doc, only.split(), without, changed
        # one per schema: OpenAPI would lengthen the names of two
        self._model: type[BaseModel] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if self._model is None:
            hints = _FLAT.get(source) or (get_type_hints(source) if isinstance(source, type) else {})
            fields: dict[str, Any] = {}
            for name in self._only or [*(name for name in hints if name not in self._without), *self._changed]:
                changed = self._changed.get(name)
                if changed is not None and not isinstance(changed, str):
                    fields[name] = (changed, ...)
                    continue
                kind = hints.get(name) or get_type_hints(getattr(source, name).fget)["return"]  # a property's
                fields[name] = (kind, Field(description=changed))
            self._model = create_model(self._name, __base__=_Out, __doc__=self._doc, **fields)
        return handler.generate_schema(self._model)


_Values = dict[str, Any]
"""A response by the names of its fields."""


# -- teams, keys, budgets


class _KeyLimits(_In):
    models: _Models | None = Field(None, description="null: every model")
    requests_per_min: _Rate | None = None
    tokens_per_min: _Rate | None = None
    addresses: _Networks | None = None


class KeyTemplateIn(_KeyLimits):
    """What new keys of the team get where nothing is said of it; a member's own keys have no more than that."""

    expires_in_s: float | None = Field(None, gt=0, le=1e9, description="seconds after they are made; null: never")


class TeamIn(_In):
    name: _Name
    is_active: bool = True
    requests_per_min: _Rate | None = None
    tokens_per_min: _Rate | None = None
    semantic_error_max: _ErrorMax | None = None
    verify: _Verify | None = None
    is_semantic_enabled: bool = True
    is_store_enabled: bool = Field(True, description="responses are kept where a request asks for it")
    time_zone: str = Field("", max_length=64, description="of its budgets' days, weeks and months; empty: UTC")
    new_keys: KeyTemplateIn = KeyTemplateIn()
    regions: _Regions | None = Field(None, description="of deployments that may get its requests; null: all")
    retention_days_max: _Bound | None = None
    store_s_max: _Bound | None = None


class NewTeamIn(TeamIn):
    budget: BudgetIn | None = Field(None, description="its first budget")


class TeamPatch(TeamIn):
    """Only the fields that are sent change."""

    name: _Name = ""


class KeyIn(_KeyLimits):
    name: _Name
    expires_at_s: float | None = Field(None, gt=0, le=1e11)


class RotateIn(_In):
    overlap_s: float = Field(86_400, ge=0, le=90 * 86_400, description="for which the old secret works, too")


class KeyPatch(KeyIn):
    """Only the fields that are sent change."""

    name: _Name = ""
    is_active: bool = True


_LIMITS = ("limit_microusd", "limit_tokens", "limit_requests")


class BudgetIn(_In):
    """A new budget. Exactly one of the three limits is given; it sets the unit."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"properties": {name: {"type": "integer"}}, "required": [name]} for name in _LIMITS]
        }
    )

    window: Annotated[WindowKind, Strict(False)]
    limit_microusd: _Limit | None = Field(None, description="a limit of money, in millionths of a dollar")
    limit_tokens: _Limit | None = Field(None, description="a limit of tokens, read and written")
    limit_requests: _Limit | None = Field(None, description="a limit of requests that are not answered from the cache")
    is_hard: bool = Field(True, description="refuse what could exceed it; a soft budget only warns")
    axis: str = Field("team", max_length=70, description=f"whose use it limits: {AXES}")
    value: str | None = Field(
        None,
        max_length=200,
        description="the one value that it limits (a key's id, a user, ...), empty: requests without one; null: each value",
    )
    rolling_s: int = Field(0, ge=0, le=ROLLING_S_MAX, description="the length of a rolling window, from an hour on")
    overdraft: Annotated[Overdraft, Strict(False)] = Field(
        Overdraft.REFUSE, description="an answer that may be longer than there is room for: refuse, truncate or allow"
    )


class BudgetPatch(_In):
    """Only the fields that are sent change."""

    limit_microusd: _Limit | None = None
    limit_tokens: _Limit | None = None
    limit_requests: _Limit | None = None
    is_hard: bool = True
    overdraft: Annotated[Overdraft, Strict(False)] = Overdraft.REFUSE


class BudgetRaiseIn(_In):
    by: Annotated[
        int, Field(ge=0, le=MICROUSD_MAX, description="added to the limit, in its unit; 0 ends a raise"), _Whole
    ]
    until_s: float = Field(ge=0, le=1e11, description="unix seconds")


_KEY = "id team_id name prefix is_active created_at_s expires_at_s last_used_at_s requests_per_min tokens_per_min models owner "
_KEY += "addresses old_until_s"
KeyOut = Annotated[Key, _Flat("KeyOut", only=_KEY)]
_NEW_KEY = "A key just made. The plaintext is shown this once and kept nowhere."
KeyTemplateOut = Annotated[KeyTemplate, _Flat("KeyTemplateOut")]
NewKeyOut = Annotated[NewKey, _Flat("NewKeyOut", _NEW_KEY, key=KeyOut)]


_OWN = "id team_id team name prefix is_active expires_at_s old_until_s last_used_at_s requests cost_microusd"
_OWN_DOC = "A key of the caller's own, with what it spent in the last 30 days."
_OwnKey = Annotated[Key, _Flat("OwnKeyOut", _OWN_DOC, only=_OWN, team=str, requests=int, cost_microusd=int)]


class MeOut(_Out):
    """Who the caller is: the roles with the names of their teams, those teams by id, and the caller's own keys."""

    actor: str
    roles: dict[str, list[str]]
    teams: dict[int, str]
    keys: list[_OwnKey]
    keys_stop_at_s: float | None = Field(description="when they stop, or stopped, without a sign-in; null: never")


SessionId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


_SESSION = "id actor client groups created_at_s expires_at_s"
_Session = Annotated[Session, _Flat("SessionOut", "A session of the dashboard.", only=_SESSION)]
SessionsOut = Annotated[_Values, _Flat("SessionsOut", sessions=list[_Session])]


class PersonIn(_In):
    name: _Name


_PERSON = "A person that the provider vouched for: here, a sign-in or a new token, exact to a day."
_Stop = Annotated[float | None, Field(description="when the person's keys stop, or stopped; null: never")]
_Count = Annotated[int, Field(description="the person's own keys that are not revoked")]
_Person = Annotated[Person, _Flat("PersonOut", _PERSON, keys_stop_at_s=_Stop, keys=_Count)]
PeopleOut = Annotated[_Values, _Flat("PeopleOut", people=list[_Person])]


class BudgetTerms(_Out):
    id: int
    team_id: int
    window: WindowKind
    rolling_s: int | None = None
    time_zone: str = "UTC"
    axis: str = "team"
    value: str | None = None
    unit: Unit
    limit: int
    limit_now: int = Field(description="with a raise that is in force")
    limit_microusd: int | None
    is_hard: bool
    overdraft: Overdraft
    raised_by: int = 0
    raised_until_s: float | None = None


class BudgetOut(BudgetTerms):
    """A budget, and what counts against it now; the live figures are null while Redis is away.

    Amounts are in `unit`; those in µUSD are null for another unit. Of a budget on each value the
    figures are those of `fullest`, the value with the most use.
    """

    window_id: str | None = None
    fullest: str | None = None
    spent: int | None = None
    held: int | None = None
    remaining: int | None = None
    spent_microusd: int | None = None
    held_microusd: int | None = None
    remaining_microusd: int | None = None
    resets_at_s: float | None = None
    per_day: float | None = Field(
        None, description="the use of a day: of a team's money in longer windows that of the last 24 h, else as so far"
    )
    projected: float | None = Field(None, description="the use at the window's end at that rate")
    per_day_microusd: int | None = None
    projected_microusd: int | None = None
    used_up_at_s: float | None = Field(None, description="when it is used up at that rate; null: not in this window")
    too_small_for: list[str] = Field([], description="models of which a short question without `max_tokens` is refused")

    @property
    def share(self) -> float | None:
        """The share of the limit that is spent or held; None where it is unknown."""
        if self.spent is None or self.held is None:
            return None
        return (self.spent + self.held) / self.limit_now if self.limit_now else 1.0


class BudgetValueOut(_Out):
    value: str | None = Field(description="empty: requests without a value; null: values that share one count")
    spent: int
    held: int


class BudgetValuesOut(_Out):
    """The values of a budget on each value, those with the most use first."""

    values: list[BudgetValueOut]
    values_total: int = Field(description="values that have a count of their own in this window")


class StoredOut(_Out):
    """What /v1/responses and /v1/conversations keep for a team."""

    responses: int
    conversations: int
    size_bytes: int


class TeamOut(_Out):
    id: int
    name: str
    is_active: bool
    created_at_s: float
    requests_per_min: int | None
    tokens_per_min: int | None
    semantic_error_max: float | None
    verify: Verify | None
    is_semantic_enabled: bool
    is_store_enabled: bool
    time_zone: str
    new_keys: KeyTemplateOut
    regions: list[str] | None
    retention_days_max: int | None
    store_s_max: int | None
    keys: list[KeyOut] = []
    budgets: list[BudgetOut] = []
    stored: StoredOut | None = Field(None, description="of one team alone; null in a list")


class HoldOut(_Out):
    """What a short question without `max_tokens` holds of a budget until its answer is there."""

    model: str
    microusd: int
    output_tokens: int


TeamsOut = Annotated[_Values, _Flat("TeamsOut", teams=list[TeamOut], holds=list[HoldOut])]


KeysOut = Annotated[_Values, _Flat("KeysOut", keys=list[KeyOut])]


BudgetsOut = Annotated[_Values, _Flat("BudgetsOut", budgets=list[BudgetOut])]


# -- history


class TallyOut(_Out):
    requests: int
    hits: int
    hit_rate: float | None = Field(description="hits / (hits + misses)")
    by_kind: dict[str, int] = Field(description="exact, semantic, coalesced, miss, bypass, refused, failed")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_microusd: int
    saved_microusd: int = Field(description="the cost without Sameway, less the cost; below 0 where it cost more")
    uncompared: int = Field(description="requests of which the cost without Sameway is not known")
    saved_tokens: int = Field(description="of prompts and answers of hits")
    saved_completion_tokens: int = Field(description="those of the answers: not generated again")
    saved_ms: int


class TeamTally(TallyOut):
    team_id: int
    team: str


class ModelTally(TallyOut):
    model: str


class SurfaceTally(TallyOut):
    surface: str = Field(description="the route of logs and metrics, or `batch_lines`")


class DeploymentTallyOut(_Out):
    deployment: str = ""
    ok: int
    failed: int
    completion_tokens: int
    cost_microusd: int


_Percentiles = Annotated[Percentiles, _Flat("PercentilesOut")]


class PointOut(_Out):
    start_s: int
    length_s: int
    tally: TallyOut
    ttft_hit: _Percentiles
    ttft_miss: _Percentiles


class StatsOut(_Out):
    window: StatsWindow
    start_s: int
    end_s: int
    total: TallyOut
    by_team: list[TeamTally]
    by_model: list[ModelTally]
    by_surface: list[SurfaceTally]
    by_deployment: list[DeploymentTallyOut]
    series: list[PointOut]
    ttft: dict[str, _Percentiles] = Field(description="by what answered; `hit` and `all` are sums")
    duration: dict[str, _Percentiles]


_Rejection = Annotated[Rejection, _Flat("RejectionOut")]
_Attempt = Annotated[Attempt, _Flat("AttemptOut", without=("is_refusal", "is_denial"))]
_Stage = Annotated[Stage, _Flat("StageOut", without=("attempt",))]
_Seam = Annotated[Seam, _Flat("SeamOut")]
_GuardCall = Annotated[GuardCall, _Flat("GuardCallOut")]
_Claim = Annotated[Claim, _Flat("ClaimOut")]
_Hedge = Annotated[Hedged, _Flat("HedgeOut")]
_Route = Annotated[
    Record,
    _Flat(
        "RouteOut",
        """One finished request and why it went where it went. `nearest` is kept only where prompts may be logged.

`kind` is what became of it: what `cache` says, or `refused` (4xx; 504 where the caller ruled out what it would have
taken) or `failed` (any other 5xx, and a 424).""",
        without=("draft", "drafted_tokens", "accepted_tokens", "survived", "question"),
        kind=str,
        asked="the name that was asked for, where it is no alias itself; at most 100 characters",
        refusal="the message that came with `error`; empty where a provider wrote it",
        entry="id of the cached answer that was served or stored",
        rejected=list[_Rejection],
        attempts=list[_Attempt],
        fallbacks=list[_Rejection],
        hedge=_Hedge | None,
        seams=list[_Seam],
        claims=list[_Claim],
        guards=list[_GuardCall],
        stages=list[_Stage],
    ),
]


_Newest = Annotated[str, Field(description="for `after`: later requests than all that are known now")]
RoutesOut = Annotated[_Values, _Flat("RoutesOut", routes=list[_Route], cursor=str | None, newest=_Newest)]


_LedgerRow = Annotated[
    LedgerRow,
    _Flat(
        "LedgerRowOut",
        usage_estimated="the deployment did not report its tokens",
        team=Annotated[str | None, Field(description="its name; None: of a team that was deleted")],
        key=Annotated[str | None, Field(description="its name; None: of a key that was deleted with its team")],
    ),
]


LedgerOut = Annotated[_Values, _Flat("LedgerOut", rows=list[_LedgerRow], cursor=str | None)]


SUM = "team_id team key_id key model deployment user tag region session day is_other requests prompt_tokens cached_tokens "
SUM += "completion_tokens cost_microusd hits saved_microusd checks_microusd"
_LedgerSum = Annotated[
    LedgerTotal,
    _Flat(
        "LedgerSumOut",
        "The rows of one group, summed. A column that is no group is null, but for the team of a key.",
        only=SUM,
        team=Annotated[str | None, Field(description="its name; null: of a team that was deleted")],
        key=Annotated[str | None, Field(description="its name; null: of a key that was deleted with its team")],
        model=str | None,
        user="empty: requests without one",
        tag="a value of the tag that was asked for, else the name of a tag",
        region="what the settings say of the deployments",
        session="empty: requests without one",
        day="an ISO date, in UTC",
        is_other=Annotated[bool, Field(description="the users or tags beyond those that are counted apart")],
        hits="answers that cost nothing: none of the `requests`, and of no deployment",
        saved_microusd="the cost without Sameway, hits included, less the cost; of what is known",
        checks_microusd="of the cost: questions to verifiers, and checks of hits",
    ),
]
_More = Annotated[bool, Field(description="there are groups that cost less, beyond `limit`")]
LedgerSumsOut = Annotated[_Values, _Flat("LedgerSumsOut", sums=list[_LedgerSum], has_more=_More)]


class SavingsStepOut(_Out):
    """One step of a waterfall: what a mechanism saved; below 0, what it cost."""

    mechanism: str
    label: str = Field(serialization_alias="words")
    requests: int
    amount_microusd: int


class SavingsSumOut(_Out):
    """A waterfall: the baseline less its steps is what was spent. Requests without a known baseline are not in it."""

    requests: int = Field(description="with a known baseline")
    baseline_microusd: int = Field(description="the cost without Sameway: at the alias's baseline, uncached")
    spent_microusd: int
    saved_microusd: int
    factor: float | None = Field(description="baseline / spent; null: nothing was spent")
    steps: list[SavingsStepOut]


class TeamSavingsOut(SavingsSumOut):
    team_id: int
    team: str


class DaySavingsOut(SavingsSumOut):
    day: str = Field(description="an ISO date, in UTC")


class SavingsOut(SavingsSumOut):
    """What Sameway saved in whole UTC days, by mechanism, team and day."""

    from_s: int
    until_s: int
    unknown_requests: int = Field(description="generations and hits without a known baseline, as a price is missing")
    unknown_cost_microusd: int = Field(description="what they cost; not in `spent_microusd`")
    running_microusd: int | None = Field(
        description="what running Sameway cost in these days, by `savings.running_usd_per_month`; null: of a team or model"
    )
    net_microusd: int | None = Field(description="saved less running")
    target_microusd: int | None = Field(
        description="of these days, by `savings.target_usd_per_month`; null: none is set, or of a team or model"
    )
    is_target_met: bool | None = Field(description="whether `net_microusd` reaches it")
    by_team: list[TeamSavingsOut]
    days: list[DaySavingsOut]


class AnswerIn(_In):
    id: str = Field(min_length=1, max_length=200, description="a response's x-request-id")


class AnswerOut(_Out):
    """The texts of a response that the cache keeps. Each look at them is in the audit log."""

    request_id: str
    at_s: float
    team_id: int
    team: str
    model: str
    cache: str
    similarity: float | None
    entry: str
    deployment: str
    created_at_s: float
    question: str | None = Field(description="the last user message of the request; None where it is not kept")
    made_for: str | None = Field(description="of a semantic hit: the last user message that the answer was made for")
    answer: str
    why_no_verdict: str = Field(description="why right or wrong can't be told from these texts; empty where it can")


_AuditRow = Annotated[
    AuditRow,
    _Flat("AuditRowOut", team=Annotated[str | None, Field(description="its name; None: it was deleted")]),
]


AuditOut = Annotated[_Values, _Flat("AuditOut", rows=list[_AuditRow], cursor=int | None)]


_BATCH = "id team_id team endpoint status created_at_s expires_at_s ended_at_s total completed failed"
_BATCH_DOC = "A batch of requests; times in unix seconds."
_LINES = "lines; 0 until the input is read"
BatchOut = Annotated[Batch, _Flat("BatchOut", _BATCH_DOC, only=_BATCH, team=str, total=_LINES)]


BatchesOut = Annotated[_Values, _Flat("BatchesOut", batches=list[BatchOut], cursor=str | None)]


# -- the machine


_Part = Annotated[GatewayPart, _Flat("PartOut")]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something an admin should look at, and where."""

    message: str
    href: str
    is_urgent: bool = False


_Problem = Annotated[Problem, _Flat("ProblemOut", Problem.__doc__, only="is_urgent message href")]


_Host = Annotated[
    Host, _Flat("HostOut", Host.__doc__, only="name workers versions configs serves_s silent_s is_here is_away")
]
HostsOut = Annotated[_Values, _Flat("HostsOut", hosts=list[_Host])]


class StatusOut(_Out):
    version: str
    uptime_s: float
    parts: list[_Part]
    problems: list[_Problem]


_ENGINE = """What a local engine tells of itself. What ends in `_total` counts since its start: prompt tokens, those of them that were
found computed already, and guessed tokens with those that were right, by source (text, reference, model)."""
_Engine = Annotated[
    EngineLoad,
    _Flat(
        "EngineOut",
        _ENGINE,
        only="kv_usage kv_blocks_used kv_blocks_cached kv_blocks_total prefill_tokens_per_s prompt_tokens_total"
        " cached_tokens_total answer_tokens_total preemptions_total drafted_tokens_total accepted_tokens_total",
        kv_usage="share of the KV memory that running generations hold, 0 to 1",
    ),
]


class DeploymentErrorOut(_Out):
    """A failed attempt at a deployment."""

    at_s: float
    request_id: str
    message: str = Field(serialization_alias="words")


Act = Literal["drain", "disable", "enable", "reset"]


class ActIn(_In):
    name: str = Field(min_length=1, max_length=200, description="the deployment's; its replicas are meant, too")


class TryDeploymentIn(ActIn):
    model: str = Field("", max_length=200, description="of a deployment that takes every name")


class TriedOut(_Out):
    """What became of one short question to a deployment. No team is charged for it."""

    name: str
    is_ok: bool
    problem: str
    answer: str
    ttft_ms: float | None
    duration_ms: float
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int


class ChangesOut(_Out):
    """What has changed in the configuration, or would, by the setting's path; empty where nothing has."""

    changes: dict[str, str]
    is_in_file: bool = Field(False, description="the file names this alias, too, and the file counts")


_Model = dict[str, Any] | None


class ModelIn(_In):
    """A model's settings, as under an alias in the file; null: none. It has no headers and no keys of its own."""

    alias: str = Field(min_length=1, max_length=200)
    model: _Model
    is_dry_run: bool = False


class RevertIn(_In):
    id: int = Field(ge=1, le=2**31 - 1, description="of the change whose alias gets what it had before")
    is_dry_run: bool = False


class ConfiguredModel(_Out):
    alias: str
    is_in_file: bool
    kept: _Model = Field(description="what the database says of it; null: nothing")


_CHANGE = "id at_ms alias before after client way"
_Change = Annotated[AuditRow, _Flat("ModelChangeOut", only=_CHANGE, alias=str, before=_Model, after=_Model)]


class ConfiguredOut(_Out):
    models: list[ConfiguredModel]
    history: list[_Change] = Field(description="the latest changes, newest first")


class DeploymentFacts(_Out):
    name: str
    group: str = Field("", description="the deployment whose replica it is; else its own name")
    alias: str
    backend: str
    model: str
    policy: str
    is_available: bool | None = Field(description="whether what happened last was good; null: it was never asked")
    reason: str
    use: str = Field("", description="`drained` or `disabled` by an operator; empty: in use")
    denial: str = Field("", description="why it refuses every request until an operator mends it; empty if it does not")
    running: int
    waiting: int
    ttft_ms: float | None
    tpot_ms: float | None
    input_microusd_per_mtok: int
    output_microusd_per_mtok: int
    is_price_known: bool = Field(True, description="false: counted as free")
    can_chat: bool = Field(True, description="false: its model is for something else, as embeddings")
    capabilities: tuple[str, ...]
    are_capabilities_assumed: bool = Field(False, description="those of its kind of backend, as its model is not known")


class DeploymentOut(DeploymentFacts):
    """Predictions are for a prompt of 500 tokens. `running` and `waiting` are those of the worker that answered this."""

    hold_microusd: int = Field(0, description="what a short question without `max_tokens` holds of a budget")
    hold_output_tokens: int = Field(0, description="the answer that this assumes")
    context_tokens_max: int | None
    output_tokens_max: int | None
    last_24h: DeploymentTallyOut | None = None
    ttft_timeout_ms: float = Field(
        0, description="how long such a prompt waits for its first token where others can answer"
    )
    recent_calls: float = Field(0, description="answers behind the predictions; older ones count less")
    last_errors: list[DeploymentErrorOut] = Field([], description="of the latest requests on all hosts, newest first")
    engine: _Engine | None = Field(None, description="of a local engine that is ready")


DeploymentsOut = Annotated[_Values, _Flat("DeploymentsOut", deployments=list[DeploymentOut])]


class OverviewOut(_Out):
    """`stats` is null while Redis is away."""

    status: StatusOut
    stats: StatsOut | None


# -- the cache


class PartitionOut(_Out):
    team_id: int | None = Field(description="null: of a team that was deleted")
    team: str | None
    entries: int
    size_bytes: int
    size_bytes_max: int


class CacheOut(_Out):
    entries: int
    size_bytes: int
    partitions: list[PartitionOut]
    l1_entries: int = Field(description="of the worker that answered")
    l1_bytes: int
    semantic: _Part | None


_CONDITIONS = ("id", "text", "team_id", "namespace", "model", "deployment", "older_than_s", "tag")
_ALL_OR_SOME: Any = {
    "if": {"required": ["all"], "properties": {"all": {"const": True}}},
    "then": {"properties": {name: {"type": "null"} for name in _CONDITIONS}},
    "else": {"anyOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in _CONDITIONS]},
}


class PurgeIn(_In):
    """Every condition that is given must match; at least one must be, or `all`."""

    model_config = ConfigDict(json_schema_extra=_ALL_OR_SOME)

    dry_run: bool = Field(True, description="only count; false removes")
    id: str | None = Field(None, pattern=r"^[0-9a-f]{32}$", description="an entry's id")
    text: str | None = Field(
        None,
        min_length=1,
        max_length=TEXT_CHARS_MAX,
        description="the prompt's last user text, whatever its case and spacing",
    )
    team_id: _Id | None = None
    namespace: _Label | None = Field(None, description="the body's `cache.namespace`")
    model: _Label | None = Field(None, description="the name that was asked for")
    deployment: _Label | None = Field(None, description="the deployment that generated the answer")
    older_than_s: float | None = Field(None, ge=0, le=1e11)
    tag: _Label | None = Field(None, description="one of the body's `cache.tags` of the request that made the answer")
    all: bool = Field(False, description="everything, of every team")


class SampleOut(_Out):
    id: str
    team_id: int | None
    team: str | None
    text: str | None
    created_at_s: float
    size_bytes: int


class CertificateOut(_Out):
    """How many requests of a team for a model were answered wrongly by meaning since its certificate's start: with a probability of
    95% the share is within `low` and `high`, at every moment. It rests on checks drawn by chance, and on the judges' being right (in
    all but `judge_error_max`). A check that no judge could tell is right in `low` and wrong in `high`."""

    team_id: int
    team: str
    model: str
    since_s: float
    why: str = Field(description="why it is not an earlier one; empty of the first")
    error_max: float = Field(description="the bound, for requests that ask for none of their own")
    strictness: float = Field(description="what the bound is multiplied with now; below 1 it has tightened itself")
    estimate: float | None = Field(
        description="null: nothing was checked or reported, or no judge could tell most of it"
    )
    low: float
    high: float = Field(description="1 before the first request")
    requests: int
    hits: int
    checks: int = Field(description="would-be hits that were generated instead, to compare both answers")
    wrong: int = Field(description="checks that found a wrong answer")
    open: int = Field(description="checks that no judge could tell")
    judges: dict[str, int] = Field(description="the other checks by the judge that settled them")
    verified_hits: int = Field(description="hits that a verifier allowed")
    verified_checks: int
    verified_wrong: int = Field(description="checks that found a wrong answer which a verifier had allowed")
    verified_high: float = Field(description="as `high`, of what a verifier allowed alone")
    reported_wrong: int
    judge_error_max: float = Field(description="the share of verdicts that the interval allows to be wrong")
    embedder: str
    rule: str
    judged_by: str


CertificatesOut = Annotated[_Values, _Flat("CertificatesOut", certificates=list[CertificateOut])]


class CertificateIn(_In):
    team_id: _Id
    model: _Label


class PurgeOut(_Out):
    dry_run: bool
    count: int
    size_bytes: int
    samples: list[SampleOut]


class ExportIn(_In):
    """Which answers: all, unless a condition is given."""

    team_id: _Id | None = None
    namespace: _Label | None = None
    model: _Label | None = None
    tag: _Label | None = None
    curated: bool | None = Field(None, description="true: curated answers alone, false: the others alone")


class ImportProblem(_Out):
    line: int
    message: str


class ImportOut(_Out):
    """What became of the lines of an import."""

    lines: int
    stored: int
    unchanged: int = Field(description="were there already, or there is a newer answer")
    refused: int
    problems: list[ImportProblem] = Field(description="of the first lines that were refused")


class TryIn(_In):
    team_id: _Id
    model: _Label
    prompt: str = Field(min_length=1, max_length=20_000)


class NeighbourOut(_Out):
    text: str
    similarity: float
    id: str
    reason: str = Field(description="why it may not be served; empty where it may")
    group: int = Field(description="prompts with an equal answer share a number")
    keys: int = Field(description="how many prompts its group has")
    right: float = Field(description="verdicts on serving this answer")
    wrong: float


class VerifierModelOut(_Out):
    """The verifier of one model, and what came of its word in the last 24 h."""

    model: str
    verify: str = Field(description="before, after, observe or off, by the settings; a team may have another mode")
    deployment: str = Field(description="who is asked, as at the start; empty: no deployment can be")
    question_microusd: int | None = Field(description="the expected cost of a question; null: no price is known")
    lookups: int = Field(description="hits by meaning and misses")
    asked_requests: int = Field(description="requests about which it was asked before, or beside, their generation")
    yes: int = Field(description="of them, those for which it found a stored answer right")
    asked_share: float | None = Field(description="asked_requests / lookups")
    questions: int = Field(description="with second questions, those after misses and exams")
    cost_microusd: int
    hits: int = Field(description="served on its word, given now or before for the same words")
    saved_microusd: int = Field(description="by these hits; the cost of questions is not taken off")
    wait_p50_ms: float | None = Field(description="what requests waited for its word")
    wait_p95_ms: float | None
    would_hits: int = Field(description="`observe`: requests that would be served by meaning")
    would_share: float | None = Field(description="would_hits / lookups: what is possible by asking")
    would_save_microusd_a_day: int = Field(description="what they would save a day, questions taken off")


class VerifierExampleOut(_Out):
    """A request that would be served by meaning. Its texts are kept and shown only where prompts may be logged."""

    request_id: str
    at_s: float
    team: str
    model: str
    verifier: str = Field(description="who was asked; empty where the rule is certain")
    verdict: str = Field(description="`yes`, `remembered`, or `certain`: without a question")
    similarity: float | None
    would_save_microusd: int
    question: str
    made_for: str = Field(description="the cached prompt whose answer would be served")


class VerifierOut(_Out):
    """What verifiers do, by model."""

    models: list[VerifierModelOut] = Field(description="those with a verifier, or with counts of one")
    examples: list[VerifierExampleOut] = Field(description="the latest requests that would be served by meaning")


class MissExampleOut(_Out):
    """A miss. `nearest` is the nearest cached prompt, kept only where prompts may be logged."""

    request_id: str
    at_s: float
    reason: str
    similarity: float | None
    nearest: str


class MissCauseOut(_Out):
    """A cause of misses of an alias."""

    model: str
    cause: str = Field(description="documents, context, new, vetoes, doubt, loading, ...")
    count: int
    share: float = Field(description="of the model's misses that were counted")
    repeats: int = Field(
        description="of them, whose last words the team had asked this model before, among those counted"
    )
    repeats_microusd: int = Field(description="what those cost: the most that mending the cause would have saved")
    advice: str = Field(description="what to do about it")
    example: MissExampleOut = Field(description="the latest one, if possible with a text")


class MissesOut(_Out):
    """Why prompts did not hit."""

    misses: int = Field(description="the latest ones, that were counted")
    causes: list[MissCauseOut]


class TryOut(_Out):
    """What the cache would do with a prompt, and its nearest neighbours."""

    decision: str = Field(description="exact, semantic or miss")
    reason: str
    similarity: float | None
    neighbours: list[NeighbourOut]
    p: float | None = Field(description="a lower bound on the likeliest answer being right, by what was learned")
    p_min: float | None = Field(description="what would be served; null while too few verdicts have come")
    verdicts: int = Field(description="that this team's requests like this one have had")
    error_max: float


class WrongOut(_Out):
    """An answer that is out of service by meaning. `text` is the prompt it was made for, null where that is gone."""

    team_id: int | None
    team: str | None
    name: str = Field(description="what to clear it by")
    is_group: bool = Field(description="with all answers that were found equal to it")
    entry: str
    text: str | None
    source: str
    judge: str
    why: str
    model: str
    request_id: str
    at_s: float


WrongsOut = Annotated[_Values, _Flat("WrongsOut", wrong=list[WrongOut])]


class ClearIn(_In):
    team_id: _Id
    name: str = Field(pattern=r"^[0-9a-f]{50}$")


ClearOut = Annotated[_Values, _Flat("ClearOut", was_out=bool)]


class FeedbackIn(_In):
    id: str = Field(
        min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:-]+$", description="a response's x-request-id"
    )
    verdict: Literal["right", "wrong"]


FeedbackOut = Annotated[ReportOutcome, _Flat("FeedbackOut", effect=str)]
