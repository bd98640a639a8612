"""The metrics' names, kinds, labels and help texts, as a table.

Names are those of OpenTelemetry's GenAI conventions where they exist, with underscores for dots and
the unit last; otherwise `sameway_*`. Units are base units. docs/metrics.md lists the same, and a
test compares. Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
"""

from enum import StrEnum

import msgspec

# the bounds that OpenTelemetry's GenAI conventions recommend; from 1 ms where hits count too
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BOUNDS = tuple(float(4**power) for power in range(11))  # 1 to 1,048,576


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """How a scrape merges the gauges of several workers."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Definition(msgspec.Struct, frozen=True):
    """One metric: its scraped name, its labels and its help text."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram: inclusive upper bounds, without +Inf
    merge: Merge = Merge.SUM

    @property
    def width(self) -> int:
        return len(self.bounds) + 2 if self.kind is MetricKind.HISTOGRAM else 1  # the sum, the buckets and +Inf


# `labels` are names with spaces between them


def _counter(name: str, help: str, labels: str = "") -> Definition:
    return Definition(name, MetricKind.COUNTER, help, tuple(labels.split()))


def _gauge(name: str, merge: Merge, help: str, labels: str = "") -> Definition:
    return Definition(name, MetricKind.GAUGE, help, tuple(labels.split()), merge=merge)


def _histogram(name: str, bounds: tuple[float, ...], help: str, labels: str) -> Definition:
    return Definition(name, MetricKind.HISTOGRAM, help, tuple(labels.split()), bounds)


REQUESTS = _counter(
    "sameway_requests_total",
    "Requests finished, by what answered them and the HTTP status.",
    "route model team cache status",
)
ERRORS = _counter("sameway_errors_total", "Requests that ended in an error, by the error's code.", "route model code")
DISCONNECTS = _counter("sameway_disconnects_total", "Clients that left before their last byte.", "model")
COST = _counter("sameway_cost_usd_total", "Money spent on generations.", "model team deployment")
SAVED_COST = _counter(
    "sameway_saved_usd_total",
    "Cost without Sameway less the cost, by what saved it: exact, semantic, coalesced, prefix_read, cheaper_route, local_engine.",
    "model team mechanism",
)
EXTRA_COST = _counter(
    "sameway_extra_cost_usd_total",
    "Cost that would not have been without Sameway: prefix_write, dearer_route, tries or checks.",
    "model team mechanism",
)
UNCOMPARED = _counter(
    "sameway_unknown_baseline_requests_total",
    "Requests of which the cost without Sameway is not known, as a price is missing.",
    "model team",
)
SAVED_TIME = _counter("sameway_saved_seconds_total", "Time that cached answers did not take.", "model cache")
TOKENS = _counter(
    "sameway_tokens_total",
    "Tokens generated or read by deployments: type is input, cached_input or output.",
    "model team type",
)
ESTIMATED = _counter(
    "sameway_estimated_usages_total",
    "Generations whose tokens the deployment did not report: they are charged by an estimate.",
    "model deployment",
)
CLAIMS = _counter(
    "sameway_usages_above_hold_total",
    "Answers whose deployment reported more than budgets held for them: booked as reported, or cut to what can be true.",
    "deployment outcome",
)
BATCH_LINES = _counter(
    "sameway_batch_lines_total", "Lines of batches that ended: ok, or the code of their error.", "outcome"
)
BATCHES_LEFT = _gauge("sameway_unended_batches", Merge.MAX, "Batches of all hosts that have not ended.")
BATCH_LINES_LEFT = _gauge("sameway_batch_lines_left", Merge.MAX, "Lines of unended batches that have no outcome yet.")
STORES = _counter(
    "sameway_cache_stores_total", "Answers offered to the cache: stored, or the reason why not.", "outcome"
)
SEMANTIC_MISSES = _counter(
    "sameway_semantic_misses_total", "Semantic lookups that found nothing to serve, by reason.", "reason"
)
VERDICTS = _counter(
    "sameway_semantic_verdicts_total",
    "Answers compared, reported or read by a verifier: by source (miss, audit, feedback, verifier), ruling (same, different, "
    "unknown) and judge.",
    "source ruling judge",
)
VERIFIER_QUESTIONS = _counter(
    "sameway_verifier_questions_total",
    "Questions to a verifier about stored answers for a team's requests: answered or failed (no money, no deployment, an error).",
    "team model outcome",
)
VERIFIER_COST = _counter(
    "sameway_verifier_cost_usd_total", "Money spent on a team's questions to verifiers.", "team model"
)
VERIFIER_WORDS = _counter(
    "sameway_verifier_words_total",
    "Requests about which a verifier was asked before an answer was generated, by its word: yes, no, unsure, risky (a yes beyond "
    "the error bound), failed or late; remembered: the same words had a yes before.",
    "model verdict",
)
VERIFIER_TIME = _counter(
    "sameway_verifier_wait_seconds_total", "Seconds that requests waited for a verifier's word.", "model"
)
DRAFTED = _counter(
    "sameway_drafted_tokens_total",
    "Tokens that a local engine guessed: source is text, reference (a near cached answer) or model; or forced: source is grammar.",
    "deployment source",
)
ACCEPTED = _counter(
    "sameway_accepted_tokens_total", "Guessed tokens that were right: as many steps less.", "deployment source"
)
ATTEMPTS = _counter(
    "sameway_attempts_total",
    "Generations tried, per deployment: ok, error, denied (refused for good), refused (the request was at fault) or cancelled.",
    "deployment outcome",
)
MENDED = _counter(
    "sameway_mended_fields_total",
    "Fields of answers that were not what they should be: each was read as that, or left out.",
    "deployment",
)
FAILOVERS = _counter("sameway_failovers_total", "Requests that needed more than one deployment.", "model")
RESCUES = _counter(
    "sameway_rescues_total",
    "Streams that broke off and that another deployment went on with: outcome is ok or error.",
    "model outcome",
)
HEDGES = _counter(
    "sameway_hedges_total",
    "Requests at which a second deployment was asked beside a slow first one: it won, it lost, or both failed.",
    "model outcome",
)
HEDGE_COST = _counter(
    "sameway_hedge_cost_usd_total",
    "Money spent on deployments that did not answer first; it is a part of the cost.",
    "model",
)
FAILURES = _counter(
    "sameway_failures_total",
    "Failures that requests survived, by the part that failed (redis, cache_worker, ...).",
    "part",
)
QUEUED = _counter(
    "sameway_queued_requests_total",
    "Requests that found every deployment full (`concurrency_max`): outcome is waited or refused.",
    "model outcome",
)
QUEUED_TIME = _counter(
    "sameway_queued_seconds_total", "Time that requests waited for a place at a deployment.", "model"
)
AWAITED = _counter(
    "sameway_awaited_requests_total",
    "Requests that waited for another worker or host, which was making the same answer: served with it, made here "
    "after all, or ended by an error.",
    "model outcome",
)
AWAITED_TIME = _counter(
    "sameway_awaited_seconds_total", "Time that requests waited for other workers and hosts.", "model"
)
LOOPS = _counter(
    "sameway_loops_total",
    "Requests of agents that repeat themselves: loop is repeated_tool_calls or repeated_requests, outcome marked or "
    "refused.",
    "model loop outcome",
)
MASKED = _counter("sameway_masked_values_total", "Values that were masked in requests.", "model")
PLACEHOLDERS = _counter(
    "sameway_odd_placeholders_total",
    "Placeholders in answers to masked requests that could not be replaced: changed by the model, or unknown, of no "
    "value of the request.",
    "model outcome",
)
GUARD_CALLS = _counter(
    "sameway_guard_calls_total",
    "Looks of guards at texts: stage is before or after, outcome allowed, replaced, refused or failed.",
    "guard stage outcome",
)
GUARD_TIME = _counter("sameway_guard_seconds_total", "Time that requests waited for guards.", "guard")
WRONG_KEYS = _counter(
    "sameway_wrong_keys_total",
    "Keys refused at login, admin_api, metrics or readyz: wrong, or not_read after too many wrong ones.",
    "endpoint outcome",
)
STORED_RESPONSES = _counter(
    "sameway_stored_responses_total",
    "Responses to be kept, by outcome: stored, or lost because the database failed or was too slow.",
    "outcome",
)
ALERTS = _counter(
    "sameway_alert_messages_total",
    "Alerts of budgets sent by a channel (webhook, email): delivered, delayed (a try failed) or lost (given up).",
    "channel outcome",
)
BACKGROUND_RESPONSES = _counter(
    "sameway_background_responses_total",
    "Responses in the background that ended at their worker: completed, failed or cancelled.",
    "outcome",
)
LOG_DROPPED = _counter("sameway_log_lines_dropped_total", "Log lines given up: a slow reader, or a full disk.")
SERIES_DROPPED = _counter(
    "sameway_metric_series_dropped_total", "Series that found no room: label values without a bound."
)
DURATION = _histogram(
    "gen_ai_server_request_duration_seconds",
    SECONDS,
    "Arrival to the last byte (OpenTelemetry gen_ai.server.request.duration).",
    "gen_ai_operation_name gen_ai_request_model cache error_type",
)
TTFT = _histogram(
    "gen_ai_server_time_to_first_token_seconds",
    SECONDS,
    "Arrival to the first piece of the answer (OpenTelemetry gen_ai.server.time_to_first_token).",
    "gen_ai_operation_name gen_ai_request_model cache",
)
TPOT = _histogram(
    "gen_ai_server_time_per_output_token_seconds",
    TPOT_SECONDS,
    "Time per generated token after the first (OpenTelemetry gen_ai.server.time_per_output_token).",
    "gen_ai_operation_name gen_ai_request_model",
)
TOKEN_USAGE = _histogram(
    "gen_ai_client_token_usage",
    TOKEN_BOUNDS,
    "Tokens of one generation (OpenTelemetry gen_ai.client.token.usage).",
    "gen_ai_operation_name gen_ai_request_model gen_ai_token_type",
)
ATTEMPT_DURATION = _histogram(
    "gen_ai_client_operation_duration_seconds",
    SECONDS,
    "One attempt at one deployment (OpenTelemetry gen_ai.client.operation.duration).",
    "gen_ai_request_model deployment error_type",
)

IN_FLIGHT = _gauge("sameway_in_flight_requests", Merge.SUM, "Requests being answered now.")
LOOP_LAG = _gauge(
    "sameway_event_loop_lag_seconds", Merge.MAX, "How late the worst worker's event loop runs its timers."
)
WORKER_MEMORY = _gauge("sameway_workers_memory_bytes", Merge.SUM, "Resident memory of the gateway workers.")
REDIS_UP = _gauge("sameway_redis_up", Merge.MIN, "1 while every worker reaches Redis.")
DATABASE_UP = _gauge("sameway_database_up", Merge.MIN, "1 while every worker reaches the SQL database.")
LEDGER_BACKLOG = _gauge("sameway_ledger_backlog_rows", Merge.MAX, "Ledger rows in Redis that SQL does not have yet.")
LEDGER_FAILURES = _counter(
    "sameway_ledger_failures_total", "Failures of Redis or SQL that interrupted the ledger's writer; it tries again."
)
LEDGER_SET_ASIDE = _counter(
    "sameway_ledger_rows_set_aside_total",
    "Entries that are no row, or that SQL refuses: they are in no sum of the ledger.",
)
LEDGER_DRIFT = _counter(
    "sameway_ledger_drift_usd_total", "What Redis' counts of spend were wrong by when the ledger corrected them."
)
CACHE_WORKER_UP = _gauge("sameway_cache_worker_up", Merge.MIN, "1 while the cache worker answers.")
INDEX_ENTRIES = _gauge("sameway_semantic_index_entries", Merge.MAX, "Prompts in the semantic index.")
SEMANTIC_ERROR = _gauge(
    "sameway_semantic_error_ratio",
    Merge.MAX,
    "Requests answered wrongly by meaning, of all, since the certificate's start: estimated from checks and reports.",
    "team model",
)
SEMANTIC_ERROR_LOW = _gauge(
    "sameway_semantic_error_low_ratio", Merge.MAX, "The low end of its 95% interval.", "team model"
)
SEMANTIC_ERROR_HIGH = _gauge(
    "sameway_semantic_error_high_ratio", Merge.MAX, "The high end of its 95% interval.", "team model"
)
SEMANTIC_BOUND = _gauge(
    "sameway_semantic_error_bound_ratio", Merge.MIN, "What it should stay under, as configured.", "team model"
)
SEMANTIC_STRICTNESS = _gauge(
    "sameway_semantic_strictness_ratio",
    Merge.MIN,
    "What the bound is multiplied with now: below 1 it has tightened itself.",
    "team model",
)
CONFIG_REFUSED = _gauge(
    "sameway_config_refused",
    Merge.MAX,
    "1 while the host's file of the configuration was refused and none was taken since.",
)
L1_BYTES = _gauge("sameway_l1_bytes", Merge.SUM, "Answers kept in the gateway workers' own memory.")
DEPLOYMENT_AVAILABLE = _gauge(
    "sameway_deployment_available",
    Merge.MIN,
    "1 if what happened last at the deployment was good, 0 if not; absent until it is asked.",
    "deployment",
)
MODEL_UNAVAILABLE = _gauge(
    "sameway_model_unavailable",
    Merge.MAX,
    "1 while every deployment of the model is left alone, by the worst cause: denied, failed, not_ready or disabled.",
    "model cause",
)
DEPLOYMENT_RUNNING = _gauge(
    "sameway_deployment_running_requests", Merge.SUM, "Generations running at the deployment.", "deployment"
)
DEPLOYMENT_WAITING = _gauge(
    "sameway_deployment_waiting_requests", Merge.SUM, "Requests waiting for a place at the deployment.", "deployment"
)
SERVER_RUNNING = _gauge(
    "sameway_replica_running_requests",
    Merge.MAX,
    "Requests that a replica runs, of all its clients, as its own metrics say; absent without them.",
    "deployment",
)
SERVER_WAITING = _gauge(
    "sameway_replica_waiting_requests",
    Merge.MAX,
    "Requests in a replica's own queue, of all its clients, as its own metrics say; absent without them.",
    "deployment",
)
ENGINE_KV_USED = _gauge(
    "sameway_engine_kv_used_ratio",
    Merge.MAX,
    "KV memory that the generations of a local engine or a replica hold, of all of it.",
    "deployment",
)
SPANS = _counter(
    "sameway_trace_spans_total",
    "Spans made; sent, or failed to be. What was made and neither is queued, or dropped by a full queue.",
    "outcome",
)
WORKERS = _gauge("sameway_workers", Merge.SUM, "Gateway workers alive on this host.")
BUILD = _gauge("sameway_build_info", Merge.MAX, "Always 1; the version and the commit are labels.", "version build")

# in the order above, which is that of a scrape
DEFINITIONS = tuple(one for one in list(globals().values()) if isinstance(one, Definition))
BY_NAME = {definition.name: definition for definition in DEFINITIONS}
