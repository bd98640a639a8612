"""Text to tokens and back, and conversations as text.

Imports `messages` and `config` alone; no torch. Read `tokenizer` first. `calls` parses an
answer's tool calls and thinking; `chat` renders conversations.
"""
