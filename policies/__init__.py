"""May we, and where? Prices, routing, health, budgets and rate limits.

Knows no HTTP, no torch, no prompts' text. What is pure (`route`, `Price.cost`, `window_at`) awaits nothing; what
keeps state in Redis takes an injected client; time and randomness are injected everywhere.
"""

from policies.breaker import Breaker, BreakerLimits
from policies.budgets import (
    Budgets,
    BudgetState,
    DrainedSpend,
    Hold,
    HoldClosed,
    LockLost,
    NotReady,
    Refused,
    Restated,
)
from policies.estimate import Estimate, EstimatePrior
from policies.leased_limits import BorrowedRateLimits, Limited
from policies.local_limits import LocalRateLimits
from policies.prices import FREE, MICROUSD_MAX, MicroUSD, Price, Tokens
from policies.rate_limits import LimitState, RateLimit, RateLimits, Verdict
from policies.redis import Redis
from policies.routing import (
    Candidate,
    Cause,
    Demand,
    PolicyKind,
    Ranked,
    Rejected,
    Route,
    RoutingPolicy,
    route,
)
from policies.windows import Budget, Window, WindowKind, window_at, windows_at

__all__ = [
    "FREE",
    "MICROUSD_MAX",
    "BorrowedRateLimits",
    "Breaker",
    "BreakerLimits",
    "Budget",
    "BudgetState",
    "Budgets",
    "Candidate",
    "Cause",
    "Demand",
    "DrainedSpend",
    "Estimate",
    "EstimatePrior",
    "Hold",
    "HoldClosed",
    "LimitState",
    "Limited",
    "LocalRateLimits",
    "LockLost",
    "MicroUSD",
    "NotReady",
    "PolicyKind",
    "Price",
    "Ranked",
    "RateLimit",
    "RateLimits",
    "Redis",
    "Refused",
    "Rejected",
    "Restated",
    "Route",
    "RoutingPolicy",
    "Tokens",
    "Verdict",
    "Window",
    "WindowKind",
    "route",
    "window_at",
    "windows_at",
]
