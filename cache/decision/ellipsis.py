"""Short turns of a talk that are one turn in other words: "Why?" and "How come?", "The second one"
and "I'll take number two", "And on Saturdays?" and "What about Saturday?".

Pure; English, by tables. For two turns that follow the same talk, byte for byte: so both refer to
the same. Invariant: a form has room for no word of its own, but for those that two turns must both
have.
"""

from __future__ import annotations

import re

from cache.decision.words import CASED_UNITS, DATES, FORMS, FUNCTION_WORDS, OTHER_NUMBERS, SMALL, UNITS, stem

_ITEM = "(?:one|option|choice)"
_PLACE = rf"(?:the )?(?:(?P<nth>\w+) {_ITEM}|(?:number|{_ITEM}) (?P<number>\w+))"
_ASKS = r"(?:(?:can|could|would) you (?:please )?|please )?"
_ASSENT = (
    r"(?:yes|yeah|yep|yup|sure|of course|certainly|absolutely|definitely|please do|go ahead|go for it|do it|do that"
    r"|sounds good|i(?:'d| would) (?:like|love) (?:that|it)|that(?:'d| would) be (?:great|good|nice|lovely|perfect|helpful))"
)
# of a text in small letters without marks
_FORMS = {
    name: re.compile(f"(?:(?:and|now|then|so|ok|okay|but) )?(?:{form})(?: please| thanks| thank you| then)*")
    for name, form in (
        ("why", r"(?:why|how come)(?: is (?:that|this)(?: so)?)?"),
        ("yes", rf"(?:please )?{_ASSENT}(?: {_ASSENT})*"),
        ("take", rf"(?:(?:i'll|i will|let's|we'll) (?:take|have|pick|choose|go (?:with|for)) |give me )?{_PLACE}"),
        (
            "more",
            rf"{_ASKS}(?:(?:tell me|say) (?:some )?more about|(?:go into|give me) (?:more )?details? (?:on|about)"
            rf"|elaborate on|expand on) {_PLACE}",
        ),
        ("shorter", rf"{_ASKS}(?:shorten (?:it|that|this)|(?:make (?:it|that|this) )?shorter)"),
        ("simpler", rf"{_ASKS}(?:simplify (?:it|that|this)|(?:make (?:it|that|this) )?simpler)"),
    )
}
# how the talk ends where each assent accepts an offer, and where a place in a list is always chosen
_ENDS = {
    "yes": r"(?!.*(?:\b(?:or|not|stop|wait)\b|n't\b)).*\b(?:shall i|would you like|do you want me to|should i|want me to)\b.*\?",
    "take": r"(?!.*(?:\b(?:not|least|already|now)\b|n't\b)).*\bwhich\b.*\b(?:like|prefer|want|choose|pick)\b.*",
}
_TRANSLATES = re.compile(r"\btranslat|\bhow (?:do|would|can) (?:i|you|we|one) say\b", re.IGNORECASE)
_OTHER_THING = re.compile(
    r"(?:(?:(?:and|but),? )?(?:what|how) about |(?:and|but),? |(?P<order>now|then|so|ok|okay),? "
    r"|(?P<worth>(?:what|how much) (?:is|are) (?:that|it|this) (?=in )))(?P<rest>[^.!?;:\n]+?)(?:,? please)?[?.!]?"
)
_NUMBERS = {"first": "1", "last": "-1"} | OTHER_NUMBERS | {word: str(value) for word, value in SMALL.items()}
# dollars may be those of another country, a symbol another unit in another case, a second a place
_UNITS = {word: unit for word, unit in UNITS.items() if unit not in CASED_UNITS | {"$", "s"}}
_WORDS_MAX, _END_CHARS = 4, 300
_NEUTRAL = frozenset(("on", "in", "for", "at"))


def is_same_ellipsis(prompt: str, known: str, talk: str) -> bool | None:
    """Whether two turns after the same `talk` have one form, and are about the same words or the
    same place in a list.

    None where one has no form. A preposition may be missing in one, as far as it says only where
    the rest belongs.
    """
    form = _read(prompt, talk)
    other = None if form is None else _read(known, talk)
    if form is None or other is None:
        return None
    return form[1:] == other[1:] and (form[0] == other[0] or not (form[0] and other[0]))


def _read(text: str, talk: str) -> tuple[str, ...] | None:
    """A preposition or nothing, the name of the form, and what it is about; None for a turn of no form."""
    folded = text.strip().casefold().replace("’", "'")
    plain = " ".join(re.split(r"[\s,.!?]+", folded)).strip()
    for name, form in _FORMS.items():
        found = form.fullmatch(plain)
        if found is not None:
            places = [_NUMBERS.get(stem(word), word) for word in found.groups() if word]
            end = talk.rstrip().rpartition("\n")[2][-_END_CHARS:].casefold().replace("’", "'")
            is_meant = name not in _ENDS or ("?" not in text and re.fullmatch(_ENDS[name], end) is not None)
            return None if any(place.isalpha() for place in places) else ("", name if is_meant else text, *places)
    return _other_thing(folded, talk)


def _other_thing(text: str, talk: str) -> tuple[str, ...] | None:
    match = _OTHER_THING.fullmatch(text)
    rest_words = match["rest"].replace("°", "").split() if match else []
    if match is None or not 0 < len(rest_words) <= _WORDS_MAX:
        return None
    preposition = rest_words.pop(0) if rest_words[0] in _NEUTRAL else ""
    stems = tuple(map(stem, rest_words))
    if not rest_words or not all(word.isalnum() for word in rest_words) or FUNCTION_WORDS & set(rest_words):
        return None
    # "in Greek" is no "Greek", "at 10" no "10"
    if not FORMS.isdisjoint(stems) or not all(word.isalpha() and word not in _NUMBERS for word in rest_words):
        preposition = preposition or "-"
    is_asked = match["order"] is None or _TRANSLATES.search(talk) is not None
    is_asked = is_asked and (match["worth"] is None or UNITS.keys() >= set(stems))
    about = (_UNITS.get(one, one if one in DATES else word) for one, word in zip(stems, rest_words, strict=True))
    return preposition, "of" if is_asked else text, *about
