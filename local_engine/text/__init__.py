"""Text to tokens and back. Imports no torch; read `tokenizer` first."""
