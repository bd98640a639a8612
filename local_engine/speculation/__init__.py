"""Drafts: tokens guessed cheaply and verified in one step. Imports no checkpoint format; read `speculator` first."""
