"""The parts that an operator sees: Redis, the database, the cache worker, each deployment."""

from dataclasses import dataclass
from enum import StrEnum


class PartHealth(StrEnum):
    OK = "ok"
    STARTING = "starting"  # loads a model or rebuilds an index; needs no action
    DOWN = "down"
    UNASKED = "unasked"  # a deployment that has no outcome yet; needs no action


@dataclass(frozen=True, slots=True)
class GatewayPart:
    """One part of the gateway."""

    name: str
    health: PartHealth
    detail: str = ""  # progress, sizes, or the error
