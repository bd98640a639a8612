"""Runs a step through the model, one module a way of doing it. Imports nothing of the scheduler's; read `native` first."""
