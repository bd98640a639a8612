"""The parts of a worker as an operator sees them: Redis, the database, the cache worker, each deployment."""

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    OK = "ok"
    STARTING = "starting"  # loading a model, rebuilding an index: on its way, nothing to do
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the gateway: Redis, the database, the cache worker, an engine, the ledger's writer."""

    name: str
    health: Health
    detail: str = ""  # a few words: progress, sizes, or what is wrong
