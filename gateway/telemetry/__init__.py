"""What a running gateway says of itself: log lines and metrics. Knows records, never requests."""
