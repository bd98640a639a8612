"""Guesses at the next tokens, and whether they are worth their time.

Knows token ids and timings; imports nothing of the package outside this room. Read `speculator`
first.
"""
