"""One request on its way: what was asked, what happened, who listens, and its record.

Must not import `pipeline`, `api`, `admin`, `learning` or `telemetry`: `pipeline` puts these parts in
order. Read `flight.py` first, then `generation.py` and `attempt.py`.
"""
