"""What may an answer depend on? The parts of a request that its last question does not rely on.

Pure functions of one request: no Redis, no index, no verdicts. Must not import `worker`, `semantic`
or `verdicts`. Read `relax.py` first.
"""
