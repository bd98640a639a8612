"""One normal form of a prompt: prompts that differ in spacing, in the case of a first word or in a
final mark, and in nothing that can matter.

Pure functions of a text; no model, no Redis. It folds prose alone, and where in doubt nothing: a
text with code, quotes, lists, lines, marks on letters, or words about words is its own form.
Invariants: names, numbers and everything inside a text keep each character; a prompt about now has
no key.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from cache.decision import words as lists
from cache.decision.text_features import HIDDEN, INVISIBLE
from cache.fingerprint import DIGEST_BYTES

_CHARS_MAX, _FOLDED_CHARS_MAX = 2_000, 400  # a longer text costs more to fold than that can save
_WORD = re.compile(r"[a-z]+")
_NOW_STEMS = tuple(sorted(lists.TIMES))
_NOW = frozenset(stem + ending for stem in lists.TIMES for ending in ("", "e", "s", "es", "ed", "ing", "ly"))

_PLAIN = re.compile(r"[\w ,.?!'’-]*")  # letters, digits, spaces and plain marks; no marks on letters
# an apostrophe or a hyphen that is in no word
_LOOSE_MARK = re.compile(r"(?<![^\W\d_])['’-]|['’-](?![^\W\d_])")
_SPACES, _SPACES_AT_DIGITS = re.compile("  +"), re.compile(r"\d[,.]?  +[,.]?\d")
_PERSONS = r"(?:[Ii]|you|we|he|she|they)"
_QUESTION = re.compile(
    r"(?:[Ww]hat|[Ww]ho|[Ww]here|[Ww]hen|[Ww]hy|[Hh]ow)"
    r"(?:['’]s|(?: (?:is|are|was|were|do|does|did|can|could|should|would|will)))(?= )"
    r"|[Hh]ow (?:many|much|long|old|far|often|big|tall|to)(?= )"
    rf"|(?:[Dd]o|[Cc]an|[Cc]ould|[Ss]hould|[Ww]ould|[Hh]ave) {_PERSONS}(?= )"
    rf"|(?:[Ii]s|[Aa]re|[Ww]as|[Ww]ere|[Dd]oes|[Dd]id) (?:{_PERSONS}|it|there|this|that|the|my|your|our|his|her|their)(?= )"
)
_ORDER = re.compile(
    r"(?:[Tt]ell|[Ss]how|[Gg]ive) me(?= )|(?:[Ee]xplain|[Dd]escribe) (?:how|what|why|when|where|the|a|an)(?= )"
    r"|[Pp]lease (?=[a-z])"
)
_I = re.compile(r"\b(do|did|can|could|should|would|am) I(?= )")
_MARK = re.compile("[,.?!]")  # said in more than one plain sentence
_LAST_WORD = re.compile(r"(?<![^\W_])[^\W\d_]{2,}$")


def words_key(compat: bytes, text: str) -> bytes | None:
    """The name of all prompts of one compat that have this one's normal form; None for a prompt
    that must not be found by its words alone: it asks about now, hides characters, or is long.
    """
    if len(text) > _CHARS_MAX or not (text.isascii() or (HIDDEN.search(text) or INVISIBLE.search(text)) is None):
        return None
    lowered = text.lower()
    if any(map(lowered.__contains__, _NOW_STEMS)) and not _NOW.isdisjoint(_WORD.findall(lowered)):
        return None
    return blake2b(compat + normal_form(text).encode(), digest_size=DIGEST_BYTES, person=b"sw.words").digest()


def normal_form(text: str) -> str:
    """The text with what cannot matter folded; the text itself where that cannot be told."""
    plain = text.strip(" \t\r\n")
    if "  " in plain:
        if _SPACES_AT_DIGITS.search(plain):
            return text
        plain = _SPACES.sub(" ", plain)
    is_question = _QUESTION.match(plain) is not None
    is_sentence = is_question or _ORDER.match(plain) is not None
    if not (is_sentence or plain != text) or not _is_prose(plain):
        return text
    if not is_sentence:
        return plain
    plain = _I.sub(r"\1 i", plain[0].lower() + plain[1:])
    said = plain[:-1].rstrip(" ")
    is_final = plain[-1] == ("?" if is_question else ".")
    return said if is_final and _LAST_WORD.search(said) and not _MARK.search(said) else plain


def _is_prose(text: str) -> bool:
    """Whether a text is words and plain marks, and is not about its own words."""
    if not text or len(text) > _FOLDED_CHARS_MAX or "_" in text or not _PLAIN.fullmatch(text):
        return False
    if ("'" in text or "-" in text or "’" in text) and _LOOSE_MARK.search(text):
        return False
    return lists.ABOUT_WORDS.isdisjoint(_WORD.findall(text.lower()))
