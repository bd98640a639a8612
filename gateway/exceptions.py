"""Copies of exceptions, for objects that keep an exception until it is raised.

A raised exception references the frames that it passed. An object that keeps it, and is referenced
by one of those frames, is in a reference cycle: all that the frames hold stays in memory until a
collection, which is rare in a worker. Two readers of one exception would also share their frames.
Invariant: an exception that an object keeps is never raised itself.
"""

from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


def fresh(error: Error) -> Error:
    """A new exception of the type and contents of `error`, without traceback, cause and context."""
    copy: Error = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy
