"""The journey of one request: turn, generation, flight, reply and record.

Must not import `pipeline`, `api`, `admin`, `learning` or `telemetry`: `pipeline` puts these parts
in order. Read `outcomes.py` first, then `flight.py`, `holds.py` and `tries.py`.
"""
