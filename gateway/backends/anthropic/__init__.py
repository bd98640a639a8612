"""Anthropic's API. Builds on `backends.openai`; only the shapes and headers differ. Read
`backend.py` first.
"""
