"""The places at one deployment: so many requests run at once, the others wait in a queue.

Knows no requests and no deployments. Invariants: never more than `places_max` places are taken;
tickets are called in the order of the queue; a call that was of no use is passed on.
"""

import asyncio
from collections import OrderedDict

Ticket = asyncio.Future["Places"]
"""Its result is the place's, once it is called."""


class Places:
    """At most `places_max` requests at once, and `waiting_max` in the queue. One per worker."""

    __slots__ = ("_queue", "places_max", "taken", "waiting_max")

    def __init__(self, places_max: int, waiting_max: int) -> None:
        self.places_max = places_max
        self.waiting_max = waiting_max
        self.taken = 0
        self._queue: OrderedDict[Ticket, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        return self.taken >= self.places_max

    def take(self) -> bool:
        """Take a place; returns False if there is none."""
        if self.taken >= self.places_max:
            return False
        self.taken += 1
        return True

    def give_back(self) -> None:
        """Give a place back, which calls the first ticket of the queue."""
        self.taken -= 1
        if self._queue:
            self.call()

    def join(self, ticket: Ticket, *, is_first: bool) -> bool:
        """Put `ticket` at the end of the queue, or at its beginning; returns False if it is too
        long.

        `is_first`: it was called before, and came too late.
        """
        if len(self._queue) >= self.waiting_max and not is_first:
            return False
        self._queue[ticket] = None
        if is_first:
            self._queue.move_to_end(ticket, last=False)
        return True

    def leave(self, ticket: Ticket) -> None:
        """Take `ticket` out of the queue, where it is there."""
        self._queue.pop(ticket, None)

    def call(self) -> None:
        """Call the first ticket, if there is a place for it."""
        while self._queue and not self.is_full:
            ticket, _ = self._queue.popitem(last=False)
            if not ticket.done():
                ticket.set_result(self)
                return
