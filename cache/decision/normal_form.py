"""One normal form of a prompt: prompts that differ in spacing alone.

Pure functions of a text, for every language alike. It folds one line of prose, and where in doubt
nothing: a text with code, quotes, lists or lines is its own form. Invariant: names, numbers and
everything inside a text keep each character.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from cache.decision.texts import HIDDEN, INVISIBLE
from cache.fingerprint import DIGEST_BYTES

_CHARS_MAX, _FOLDED_CHARS_MAX = 2_000, 400  # a longer text costs more to fold than that can save
_PROSE = re.compile(r"[\w ,.?!'’-]+")  # words and plain marks alone, in one line
_LOOSE = re.compile(r"(?<!\w)[-'’]|[-'’](?!\w)|_")
_SPACES, _SPACES_AT_DIGITS = re.compile("  +"), re.compile(r"\d[,.]?  +[,.]?\d")


def words_key(compat: bytes, text: str) -> bytes | None:
    """The name of all prompts of one compat that have this one's normal form; None for a prompt
    that must not be found by its words alone: it hides characters, or is long.
    """
    if len(text) > _CHARS_MAX or not (text.isascii() or (HIDDEN.search(text) or INVISIBLE.search(text)) is None):
        return None
    return blake2b(compat + normal_form(text).encode(), digest_size=DIGEST_BYTES, person=b"sw.words").digest()


def normal_form(text: str) -> str:
    """The text with what cannot matter folded; the text itself where that cannot be told."""
    plain = text.strip(" \t\r\n")
    is_prose = len(plain) <= _FOLDED_CHARS_MAX and _PROSE.fullmatch(plain) and not _LOOSE.search(plain)
    return _SPACES.sub(" ", plain) if is_prose and not _SPACES_AT_DIGITS.search(plain) else text
