"""What a running gateway says of itself: log lines, metrics, statistics, health, the measured error.

Must not import `api`, `admin` or `learning`; it reads records and never requests. Read `metrics.py`
first; the names are in `metric_names.py`.
"""
