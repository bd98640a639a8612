"""Reversible masking: what is found in a request's texts, its placeholders, and the answer with the values again.

Must not import `journey` or `api`: `journey/masks.py` applies it to turns and replies. Read `vault.py` first.
"""
