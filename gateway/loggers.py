"""Loggers for the lines between requests. `telemetry.logs` configures where they write.

Knows no format and no stream.
"""

from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger


def get_logger(source: str | None = None) -> FilteringBoundLogger:
    """A logger, as in `get_logger().info("model_loaded", seconds=3.1)`.

    Each of its lines has the field `source`, if given.
    """
    fields = {} if source is None else {"source": source}
    return cast(FilteringBoundLogger, structlog.get_logger(**fields))
