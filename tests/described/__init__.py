"""Checks that /openapi.json says what a gateway takes, by requests that schemathesis makes of it."""
