"""Goes on at another deployment with a streamed answer that broke off.

A stream that has begun cannot begin again. Another deployment that continues a given beginning can
go on with it; `joint.py` joins the texts. Invariant: what more than text was said, or what no
deployment may go on with, is left as it is: the stream then ends with an error.
"""

import msgspec

from gateway.deployments.deployment import Deployment
from gateway.journey.attempt import TRIES_MAX, UpstreamCall, begin
from gateway.journey.flight import Flight
from gateway.journey.joint import Joint, Said, ended_by_length, is_used_up, said_in
from gateway.journey.outcomes import Seam
from gateway.journey.queue import routed
from gateway.wire.errors import DeploymentFull
from gateway.wire.types import Chunk

_PREFILL = frozenset({"prefill"})
_WITHIN_S = 10.0  # a client in the middle of an answer does not wait for a slot as long as one before it


class Rescue:
    """The rest of an answer, from other deployments than those in `done_with`."""

    def __init__(self, flight: Flight, done_with: frozenset[str]) -> None:
        self._flight = flight
        self._generation = flight.generation
        self.done_with = done_with

    async def run(self, broken: Deployment) -> bool:
        """Go on with the answer that broke off at `broken`; returns False if no deployment
        brought it to its end.
        """
        generation, turn = self._generation, self._generation.turn
        if generation.answered.serving.settings.rescue != "continue":
            return False
        while len(generation.answered.tries) < TRIES_MAX:
            said = await said_in(turn, self._flight.chunks)
            if said is None:
                return False
            self.done_with |= {broken.name}
            if is_used_up(turn.body, said):
                seam = Seam(broken.name, broken.name, len(said.text))
                self._flight.extend([ended_by_length(said, seam)])
                self._note(seam)
                return True
            try:
                route = await routed(self._flight, self.done_with, _PREFILL, _WITHIN_S)
            except DeploymentFull:
                return False
            if not route.ranked:
                return False
            best = route.ranked[0]
            deployment = generation.answered.serving.deployments[best.name]
            is_covered = await generation.holds.cover(generation.answered, deployment)
            if is_covered and deployment.slots.is_full:  # since the route was made
                await deployment.slots.ask()
                continue
            call = None
            if is_covered:
                call = await begin(self._flight, deployment, best.why, is_alone=len(route.ranked) == 1, said=said)
            if call is None:
                self.done_with |= {best.name}
                continue
            seam = Seam(broken.name, deployment.name, len(said.text))
            if await self._continue(call, said, seam):
                return True
            broken = deployment
        return False

    async def _continue(self, call: UpstreamCall, said: Said, seam: Seam) -> bool:
        """Let a call go on after `said`; returns False if it failed."""
        flight, generation = self._flight, self._generation
        is_exact = call.deployment.settings.engine is not None
        joint = Joint(said, seam, generation.turn.body, is_exact=is_exact)

        def deliver(chunks: list[Chunk]) -> bool:
            joined, is_over = joint.take(chunks)
            if joined:
                flight.extend(joined)
            return is_over

        self._note(seam)
        if await call.run(deliver) is not None:
            return False
        generation.answered = msgspec.structs.replace(generation.answered, whole_usage=joint.usage)
        return True

    def _note(self, seam: Seam) -> None:
        answered = self._generation.answered
        self._generation.answered = msgspec.structs.replace(answered, seams=(*answered.seams, seam))
