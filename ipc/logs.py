"""The log of a process that the supervisor starts: JSON, one object a line, which it passes on; text
for people where the process runs by itself.
"""

import json
import logging
import os
import sys
import time
from types import TracebackType

JSON_VARIABLE = "SAMEWAY_LOG_AS_JSON"
"""The environment variable that a supervisor sets."""


class JsonFormatter(logging.Formatter):
    """A record as the fields that all lines of the log have, with a stack as one text."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": f"{at}.{int(record.msecs):03d}Z",
            "source": record.name,
        }
        if trace_id := getattr(record, "trace_id", ""):
            fields["trace_id"] = trace_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def log_to_stderr(level: int, text_format: str) -> None:
    """Write this process' log to standard error, and what ends it, too."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = bool(os.environ.get(JSON_VARIABLE))
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(text_format))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("ipc").setLevel(logging.INFO)
    if is_json:
        sys.excepthook = _log_end


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("process").critical("the process ends: %s", error, exc_info=(kind, error, trace))
