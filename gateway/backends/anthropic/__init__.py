"""Anthropic's API. Builds on `backends.openai`, whose server differs in its shapes alone. Read
`backend.py` first.
"""
