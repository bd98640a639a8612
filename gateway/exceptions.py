"""Exceptions without what they hold.

A raised exception references the frames that it passed. Where one of these frames references the
exception too, directly or through an object that keeps it, there is a reference cycle: all that the
frames hold stays in memory until a collection, which is rare in a worker. Knows no errors of ours.
Invariant: an exception that an object keeps is never raised itself, but a copy by `fresh`; frames
of a library that keep an exception are cleared by `let_go`, where it is translated.
"""

import traceback
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


def fresh(error: Error) -> Error:
    """A new exception of the type and contents of `error`, without traceback, cause and context."""
    copy: Error = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def let_go(error: BaseException) -> None:
    """Clear the variables of all frames that `error`, its cause and its context passed.

    Frames that still run stay as they are.
    """
    linked: list[BaseException | None] = [error]
    while linked:
        linked_error = linked.pop()
        if linked_error is not None and linked_error.__traceback__ is not None:
            traceback.clear_frames(linked_error.__traceback__)
            linked_error.__traceback__ = None
            linked += [linked_error.__cause__, linked_error.__context__]
