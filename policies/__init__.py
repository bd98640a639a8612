"""Decides whether a request may run and where: prices, routing, breakers, budgets and rate limits.

Must not import the gateway, the cache, the engine, an HTTP library or torch; never sees a prompt's
text. Clients, clocks and randomness are arguments. Read `routing` first, then `budgets`; `prices`
has the price of every kind of token.
"""

from policies.breaker import Health
from policies.budgets import Budgets, NotReady, Refused
from policies.estimate import Estimate
from policies.holds import Hold
from policies.leased_limits import LeasedRateLimits, LocalRateLimits
from policies.prices import Price
from policies.rate_limits import RateLimit, RateLimits
from policies.routing import Candidate, Cause, Demand, Route, RoutingPolicy, route
from policies.usage import Usage
from policies.windows import Budget, WindowKind

__all__ = [
    "Budget",
    "Budgets",
    "Candidate",
    "Cause",
    "Demand",
    "Estimate",
    "Health",
    "Hold",
    "LeasedRateLimits",
    "LocalRateLimits",
    "NotReady",
    "Price",
    "RateLimit",
    "RateLimits",
    "Refused",
    "Route",
    "RoutingPolicy",
    "Usage",
    "WindowKind",
    "route",
]
