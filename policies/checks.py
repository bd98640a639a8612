"""Which share of the would-be hits of a namespace is checked: generated instead of served, so that
the fresh answer can be compared with the one that would have been served.

Pure. The gateway draws by it, and `./run bench` does. Invariant: the share depends on the number of
hits alone, never on the request or the answer, so that the checks are a sample of all hits.
"""

_STEPS = ((3, 0.0), (300, 0.3), (1_000, 0.1))  # up to so many hits, at least such a share


def check_share(hits: int, share: float) -> float:
    """The share of the next would-be hit, after `hits` of its namespace: none of the first three, 30%
    up to 300, 10% up to 1,000, then `share`. No share of a step is less than `share`; at a `share` of 0
    nothing is checked.
    """
    step = next((of_step for most, of_step in _STEPS if hits < most), share)
    return max(step, share) if share and step else 0.0
