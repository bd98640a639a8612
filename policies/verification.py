"""How a verifier takes part in answers found by meaning, and who may say so. Pure.

A verifier is a model that is asked whether a stored answer is right for a new request.
"""

from enum import StrEnum
from typing import NamedTuple


class Verify(StrEnum):
    """The modes, the loosest first."""

    BEFORE = "before"  # asked about an answer that is not certain, before it is served
    AFTER = "after"  # asked after a miss, for the verdicts alone; certain hits are served
    OBSERVE = "observe"  # asked to count what would be served; no answer found by meaning is served
    OFF = "off"  # never asked; certain hits are served


class Verification(NamedTuple):
    """The effective mode of a request. `verifier`: an alias, `auto`, or None where nobody is asked.

    `is_served`: answers found by meaning may be served.
    """

    mode: Verify
    verifier: str | None
    is_served: bool

    @property
    def is_asked_first(self) -> bool:
        """Whether the verifier may be asked before an answer is generated, or beside it."""
        return self.verifier is not None and self.mode is not Verify.AFTER


_MODES = tuple(Verify)


def effective(
    verifier: str | None,
    of_settings: Verify | None,
    of_alias: Verify | None,
    of_team: Verify | None,
    of_request: Verify | None,
) -> Verification:
    """The effective mode, where None says nothing. `verifier` is the alias's.

    Without a word the mode is `before` with a verifier and `off` without one. The alias and the
    team each replace the settings' mode; of the two the stricter one holds, and a request can only
    be stricter still. Under `observe` nothing is served, also where a request says `off`.
    """
    default = of_settings or (Verify.OFF if verifier is None else Verify.BEFORE)
    configured = _strictest(of_alias, of_team) or default
    mode = _strictest(configured, of_request) or configured
    if verifier is None and mode is not Verify.OBSERVE:
        mode = Verify.OFF
    is_served = Verify.OBSERVE not in (configured, of_request)
    return Verification(mode, None if mode is Verify.OFF else verifier, is_served)


def _strictest(*modes: Verify | None) -> Verify | None:
    return max((mode for mode in modes if mode is not None), key=_MODES.index, default=None)
