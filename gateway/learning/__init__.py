"""What makes the semantic cache learn: judging what was answered, hearing who reports, measuring how often it was wrong.

Read `judging.py` first; `parts.py` puts everything together.
"""
