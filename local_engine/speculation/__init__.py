"""Drafts the next tokens, and decides whether drafts are worth their time.

Knows token ids and timings; imports nothing of the package outside this room. Read `speculator`
first.
"""
