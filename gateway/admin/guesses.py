"""Wrong keys of late, by the client's network: after a few, the next try must wait.

Five wrong keys are free. After each further one the network's next key is not read for a pause, of
1 s at first and twice as long each time, up to a minute. An hour without a wrong key forgets all.
Knows no keys and no HTTP. Invariant: a network's pauses hold for itself alone, and for one endpoint
alone, so that a scraper with an old key does not shut out an admin at the same address; at most
4,096 of both are kept, and the one that has been quiet longest makes room.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

_FREE = 5
_PAUSE_S_MAX = 60.0
_FORGOTTEN_AFTER_S = 3_600.0
_KEPT_MAX = 4_096
_IPV6_PREFIX = 56  # a customer's usual share (RFC 6177)


@dataclass(slots=True)
class _Tries:
    wrong: int
    last_s: float
    pause_s: float


class Guesses:
    """Wrong keys by endpoint and network, the longest quiet first. `clock` gives steady seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.tries: dict[tuple[str, str], _Tries] = {}

    def wait_s(self, endpoint: str, client: str) -> float:
        """The seconds until a key of `client`, an IP address, is read; 0 if it is read now."""
        tries = self.tries.get((endpoint, network_of(client)))
        return 0.0 if tries is None else max(0.0, tries.last_s + tries.pause_s - self._clock())

    def add(self, endpoint: str, client: str) -> float:
        """Count a wrong key; returns the seconds until the network's next key is read."""
        key, now_s = (endpoint, network_of(client)), self._clock()
        tries = self.tries.pop(key, None)
        wrong = 1 if tries is None or now_s - tries.last_s > _FORGOTTEN_AFTER_S else tries.wrong + 1
        pause_s = min(2.0 ** min(wrong - _FREE - 1, 10), _PAUSE_S_MAX) if wrong > _FREE else 0.0
        if len(self.tries) >= _KEPT_MAX:
            del self.tries[next(iter(self.tries))]
        self.tries[key] = _Tries(wrong, now_s, pause_s)
        return pause_s

    def forget(self, endpoint: str, client: str) -> None:
        """Forget the wrong keys of a client that has the right one."""
        self.tries.pop((endpoint, network_of(client)), None)


def network_of(client: str) -> str:
    """The addresses that count as one client: an IPv4 address, or a /56 of IPv6 addresses."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:  # a unix socket has none
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))
