"""What may an answer depend on? The parts of a request that its last question does not rely on.

Functions of one request, pure but for `learned.py`, which has seen those before: no Redis, no
index, no verdicts. Must not import `worker`, `semantic` or `verdicts`. Read `relax.py` first.
"""
