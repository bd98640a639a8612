"""The slots of one deployment: `slots_max` requests run at once, the others wait in a queue.

A slot goes to the team that holds the fewest; of several, to the team whose last call is longest
ago: a slot's duration is not known before, and a team whose requests take long waits for itself
(max-min fairness). A team's requests are served in order of arrival. A team with fewer tickets in a
full queue pushes out the last ticket of the team with the most (Suter et al., INFOCOM 1998). Knows
no requests and no deployments; a team is a number. Of slots that several workers share, a worker
takes no more than it was granted. Invariants: never more than `slots_max` slots are taken; an unused
call passes to the next ticket.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

_ASK_WITHIN_S = 1.0


class Ticket(msgspec.Struct, eq=False):
    """A team's request that waits in several queues at once.

    `called` gets the queue with a free slot, or None if the last queue pushed the ticket out.
    """

    team: int
    called: "asyncio.Future[Slots | None]"
    queues: int = 0


class Slots:
    """At most `slots_max` requests at once, and `waiting_max` in the queue. One per worker."""

    __slots__ = (
        *("_asking", "_held", "_least", "_queues", "_wake", "granted", "is_refused", "slots_max", "taken"),
        "waiting_max",
    )

    def __init__(self, slots_max: int, waiting_max: int) -> None:
        self.slots_max = slots_max
        self.waiting_max = waiting_max
        self.taken = 0
        self.granted = self._least = slots_max  # what this worker may take, and need not give back
        self.is_refused = False  # no more are to be had, as of late
        self._asking: list[asyncio.Future[None]] = []
        self._wake: Callable[[], None] | None = None  # asks for more slots than were granted
        self._held: Counter[int] = Counter()  # by team
        # by team, whose last call is longest ago first
        self._queues: OrderedDict[int, OrderedDict[Ticket, None]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def is_full(self) -> bool:
        return self.taken >= self.granted

    def share(self, wake: Callable[[], None]) -> None:
        """Take only what is granted from now on; `wake` is called where that is too little."""
        if self._wake is None:
            self._wake, self.granted = wake, 0

    def resize(self, slots_max: int, waiting_max: int, *, is_shared: bool) -> None:
        """Have so many from now on; requests in slots beyond them end in their own time."""
        if is_shared:
            self.granted, self._least = min(self.granted, slots_max), min(self._least, slots_max)
        else:
            self._wake, self.is_refused = None, False
            self.granted = self._least = slots_max
        self.slots_max, self.waiting_max = slots_max, waiting_max
        for _ in range(min(self.waiting, self.granted - self.taken)):
            self.call()

    @property
    def wanted(self) -> int:
        """The slots that run, and that requests wait for."""
        return self.taken + self.waiting + len(self._asking)

    @property
    def is_short(self) -> bool:
        """Whether all that were granted are taken, and more may be had."""
        return self._wake is not None and self.is_full and not self.is_refused

    async def ask(self) -> None:
        """Where it is short, ask for more, and wait for what comes of it."""
        if self._wake is None or not self.is_short:
            return
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking.append(answered)
        self._wake()
        try:
            await asyncio.wait([answered], timeout=_ASK_WITHIN_S)
            self.is_refused = self.is_refused or not answered.done()
        finally:
            if answered in self._asking:
                self._asking.remove(answered)

    def grant(self, granted: int, least: int, *, is_refused: bool) -> None:
        """May take so many; those beyond `least` are others' once they are free."""
        self.granted, self._least, self.is_refused = granted, least, is_refused
        for answered in self._asking:
            if not answered.done():
                answered.set_result(None)
        self._asking = []
        for _ in range(min(self.waiting, granted - self.taken)):
            self.call()

    def take(self, team: int) -> bool:
        """Take a slot; returns False if all are taken."""
        if self.is_full:
            return False
        self.taken += 1
        self._held[team] += 1
        if self._wake is not None and self.taken >= self.granted:
            self._wake()
        return True

    def give_back(self, team: int) -> None:
        """Give a slot back, and call the next ticket of the queue."""
        self.taken -= 1
        self._held[team] -= 1
        if not self._held[team]:
            del self._held[team]
        if self._wake is not None and self.granted > self._least:
            self.granted -= 1
            self._wake()
        if self._queues:
            self.call()

    def join(self, ticket: Ticket, *, is_first: bool) -> bool:
        """Put `ticket` at the end of its team's queue.

        If the queues are full, the last ticket of the longest team's queue gives way; returns False if
        this team's queue would then be as long. `is_first` puts it first, also in full queues: it was
        called before, but too late.
        """
        if self._wake is not None:
            self._wake()
        queue_of_team = self._queues.get(ticket.team, ())
        if self.waiting >= self.waiting_max and not is_first:
            longest_team = max(self._queues, key=lambda team: len(self._queues[team]), default=ticket.team)
            if len(self._queues.get(longest_team, ())) <= len(queue_of_team) + 1:
                return False
            self._push_out(next(reversed(self._queues[longest_team])))
        queue = self._queues.setdefault(ticket.team, OrderedDict())
        queue[ticket] = None
        ticket.queues += 1
        if is_first:
            queue.move_to_end(ticket, last=False)
            self._queues.move_to_end(ticket.team, last=False)
        return True

    def leave(self, ticket: Ticket) -> None:
        """Remove `ticket` from the queue, if it waits here."""
        queue = self._queues.get(ticket.team)
        if queue is not None and ticket in queue:
            del queue[ticket]
            ticket.queues -= 1
            if not queue:
                del self._queues[ticket.team]

    def call(self) -> None:
        """Call the next ticket of the queue, if a slot is free."""
        while self._queues and not self.is_full:
            team = min(self._queues, key=self._held.__getitem__)
            ticket = next(iter(self._queues[team]))
            self._queues.move_to_end(team)
            self.leave(ticket)
            if not ticket.called.done():
                ticket.called.set_result(self)
                return

    def _push_out(self, ticket: Ticket) -> None:
        self.leave(ticket)
        if not ticket.queues and not ticket.called.done():
            ticket.called.set_result(None)
