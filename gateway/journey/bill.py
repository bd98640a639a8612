"""What the tries of a generation cost: the tokens of each, its row in the ledger, and the sum.

Knows no services and no routes. Invariants: each deployment that generated has a row of its own,
and the last row settles the hold; all sums are those of the rows. A count is booked as it was
reported, up to a bound:

    count              held                                   bound of a report
    prompt tokens      the bytes, and what each call finds    the context for each round and choice
    completion tokens  the length asked for, or sent          the same
    calls of tools     the tools' own limits, else ten each   1,000 times as many
    units              documents, characters, images, bytes   1,000 times as many
"""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.accounts import Identity, LedgerRow, booked, charges_of
from gateway.accounts.row import CHECKING
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import NOT_DEARER
from gateway.journey.needs import booked_labels
from gateway.journey.outcomes import Answered, Claim, MoneyFacts, Spent, Try
from gateway.journey.savings import CHECKS, TRIES, beside, compared, joined
from gateway.journey.turn import Turn
from gateway.wire.plain import counted_in
from gateway.wire.usage import tier_of
from policies import Demand, Hold, Usage
from policies.windows import Unit

_NOTHING = Usage(0, 0)
_TIMES = 1_000  # a count that no context bounds may be so many times the one that was held
CONTEXT_UNKNOWN = 1 << 20
"""The bound of what is read or written in a round where a deployment's context is not known."""
_UNSEEN_ROUNDS_MAX = 100  # of an answer that tells its calls, and not its rounds


def as_answered(demand: Demand, tried: Try) -> Demand:
    """`demand` with the tier that answered, which is the one that the provider charges."""
    tier = tier_of(tried.progress.chunks)
    if not tier or tier == demand.tier:
        return demand
    part = frozenset({"service_tier"})
    reserved = demand.reserved - part if tier in NOT_DEARER else demand.reserved | part
    return msgspec.structs.replace(demand, tier=tier, reserved=reserved)


def charged(tries: Sequence[Try]) -> list[Try]:
    """Those of `tries` that cost something."""
    # decision: abandoned-prompts-are-charged
    return [tried for tried in tries if tried.progress.has_begun or tried.progress.is_abandoned]


def _counted(tried: Try, alias: Alias, demand: Demand, cut_at: int | None) -> tuple[Usage, Claim | None]:
    """The tokens that are booked: those that the backend counted, else an estimate, as a cut answer
    costs money, too. A hold foresees answers of `cut_at` tokens at most.
    """
    progress, deployment = tried.progress, tried.deployment
    output = (alias.output_max(deployment, demand) if cut_at is None else cut_at) * demand.choices
    prompt_max = demand.prompt_tokens_read + progress.prefix_tokens
    output_max = max(output, progress.content_chunks)
    prompt_tokens = demand.prompt_tokens + progress.prefix_tokens
    if (reported := progress.usage) is not None:
        usage, calls, units = reported, max(1, demand.calls), demand.units
        if not usage.prompt_tokens and not demand.measure:  # an answer to no prompt is a wrong count
            usage = msgspec.structs.replace(usage, prompt_tokens=prompt_tokens)
        if usage is reported and usage.within(prompt_max, output_max, calls, units) is usage:
            return usage, None
        times = _TIMES if demand.measure else 1
        rounds = 1 + max(demand.rounds, usage.rounds, min(usage.tool_calls, _UNSEEN_ROUNDS_MAX))
        read = (deployment.context_tokens_max or CONTEXT_UNKNOWN) * rounds * demand.choices
        booked = usage.within(
            max(read, prompt_max * times), max(read, output_max * times), calls * _TIMES, units * _TIMES
        )
        claim = Claim(
            deployment=progress.deployment,
            prompt_tokens=reported.prompt_tokens,
            completion_tokens=reported.completion_tokens,
            tool_calls=reported.tool_calls,
            units=reported.units,
            is_cut=booked is not usage,
        )
        return booked, claim
    if demand.measure:  # as bytes show no tokens
        has_unit = deployment.price.unit(demand.measure) is not None
        return (_NOTHING if has_unit else Usage(demand.prompt_tokens_max, output)), None
    may_reason = progress.has_begun if deployment.may_reason is None else deployment.may_reason
    said = progress.completion_tokens_at_least(deployment.tokens_per_ms if may_reason else 0.0)
    # Anthropic's first event counts the prompt
    native = progress.opening or (progress.chunks[0].native if progress.chunks else b"")
    begun = counted_in(native).usage or Usage(prompt_tokens, 0)
    known_max = max(prompt_max, deployment.context_tokens_max or CONTEXT_UNKNOWN)
    return msgspec.structs.replace(begun, completion_tokens=said).within(known_max, output_max), None


def usage_of(tried: Try, alias: Alias, demand: Demand, cut_at: int | None = None) -> Usage:
    """The tokens of a try that are booked."""
    return _counted(tried, alias, demand, cut_at)[0]


def cost_of(tried: Try, alias: Alias, demand: Demand, cut_at: int | None = None) -> int:
    """The cost of a try that is charged, in µUSD."""
    return tried.deployment.cost(as_answered(demand, tried), usage_of(tried, alias, demand, cut_at))


def book(
    answered: Answered, hold: Hold, turn: Turn, identity: Identity, alias: Alias, cut_at: int | None
) -> tuple[list[LedgerRow], Spent]:
    """The rows to settle, none if nothing is charged, and their sum.

    The last row settles `hold`; rows of earlier tries have ids of their own. No answer has more
    than `cut_at` tokens.
    """
    rows, claims = list[LedgerRow](), list[Claim]()
    costly, whole = charged(answered.tries), answered.whole_usage
    usage, tokens, cost_microusd, hedge_microusd = _NOTHING, 0, 0, 0
    answer_baseline_microusd: int | None = None
    for tried in costly:
        is_last, deployment = tried is costly[-1], tried.deployment
        demand = as_answered(turn.demand, tried)
        usage, claim = _counted(tried, alias, demand, cut_at)
        if claim is not None:
            claims.append(claim)
        row_id = hold.id if is_last else f"{hold.id}.{len(rows) + 1}"
        row = _row(row_id, tried, usage, deployment.cost(demand, usage), hold, turn, identity)
        answer = compared(row, alias.baseline, deployment, demand, usage, whole) if is_last else row
        is_known = alias.baseline.is_price_known and deployment.is_price_known
        is_own, answer_baseline_microusd = row.kind in CHECKING, answer.baseline_microusd
        is_beside = is_own or not is_last
        rows.append(beside(row, CHECKS if is_own else TRIES, is_known=is_known) if is_beside else answer)
        if answered.beside and any(tried.progress is progress for progress in answered.beside):
            hedge_microusd += row.cost_microusd
        cost_microusd += row.cost_microusd
        tokens += usage.prompt_tokens + usage.completion_tokens
    if not rows:
        return rows, Spent()
    baseline_microusd, savings = joined(rows)
    money = MoneyFacts(
        usage_estimated=costly[-1].progress.usage is None,
        claims=tuple(claims),
        cost_microusd=cost_microusd,
        baseline_microusd=baseline_microusd or 0,
        is_baseline_unknown=baseline_microusd is None,
        saved_microusd=baseline_microusd - cost_microusd if baseline_microusd is not None and savings else 0,
        savings=savings or None,
    )
    spent = Spent(
        usage=whole or usage,
        money=money,
        answer_microusd=rows[-1].cost_microusd,
        answer_baseline_microusd=answer_baseline_microusd,
        hedge_microusd=hedge_microusd,
        charged_tokens=tokens,
        charged_deployment=costly[-1].deployment.name,
    )
    return rows, spent


def with_charges(rows: Sequence[LedgerRow], hold: Hold, at_deployments: Mapping[str, Hold]) -> list[LedgerRow]:
    """`rows` with what each adds to the counts of budgets: those of `hold`, and of its
    deployment's.

    A request counts once, with its last row, and once at each deployment.
    """
    charged_rows = []
    for row in rows:
        counts = [taken for taken in hold.more if row is rows[-1] or taken.unit is not Unit.REQUESTS]
        at = at_deployments.get(row.deployment)
        charges = charges_of(row, [*counts, *(at.more if at is not None else ())])
        charged_rows.append(msgspec.structs.replace(row, charges=charges))
    return charged_rows


def _row(
    row_id: str, tried: Try, usage: Usage, cost_microusd: int, hold: Hold, turn: Turn, identity: Identity
) -> LedgerRow:
    """A prompt is charged even if every client leaves before the first token."""
    row = LedgerRow(
        id=row_id,
        # decision: hold-keeps-its-moment
        at_ms=hold.at_ms,
        request_id=turn.arrival.request_id,
        team_id=identity.team.id,
        key_id=identity.key.id,
        alias=turn.alias,
        deployment=tried.deployment.group,
        usage=booked(usage),
        cost_microusd=cost_microusd,
        kind=turn.arrival.operation,
        usage_estimated=tried.progress.usage is None,
        region=tried.deployment.settings.region,
    )
    labels = booked_labels(turn, identity)
    return msgspec.structs.replace(row, **labels) if labels else row
