"""The semantic cache as a process, and the gateway's end of its socket.

`python -m cache.worker` serves the semantic cache to all gateway workers of a host. Read
`worker.py` first. No room of the package imports this one; `client`, `messages` and `queue` import
nothing heavy.
"""

from cache.worker.client import SemanticClient
from cache.worker.messages import AnswerText, TextTooLong, WorkerState, WorkerStatus

__all__ = [
    "AnswerText",
    "SemanticClient",
    "TextTooLong",
    "WorkerState",
    "WorkerStatus",
]
