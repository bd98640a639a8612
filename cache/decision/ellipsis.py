"""Short turns of a talk that are one turn in other words: "Why?" and "How come?", "The second one" and
"I'll take number two", "And on Saturdays?" and "What about Saturday?".

Pure; English, by tables. For two turns that follow the same talk, byte for byte: so both refer to the
same. Invariant: a form has room for no word of its own, but for those that two turns must both have.
"""

from __future__ import annotations

import re

from cache.decision.words import FORMS, FUNCTION_WORDS, OTHER_NUMBERS, SMALL, UNITS, stem

_OPENING = r"(?:(?:and|now|then|so|ok|okay|but),? )?"
_ITEM = "(?:one|option|choice|item|point|idea|suggestion)"
_PLACE = rf"(?:the )?(?:(?P<nth>\w+) {_ITEM}|(?:number|{_ITEM}) (?P<number>\w+))"
_ASKS = r"(?:(?:can|could|would) you (?:please )?|please )?"
_ASSENT = (
    r"(?:yes|yeah|yep|yup|sure|of course|certainly|absolutely|definitely|please do|go ahead|go for it|do it|do that"
    r"|sounds good|i(?:'d| would) (?:like|love) (?:that|it)|that(?:'d| would) be (?:great|good|nice|lovely|perfect|helpful))"
)
# of a text in small letters without marks
_FORMS = {
    name: re.compile(f"{_OPENING}(?:{form})(?: please| thanks| thank you| then)*")
    for name, form in (
        ("why", r"(?:why|how come)(?: (?:is|was) (?:that|this|it)(?: so)?)?"),
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
_OTHER_THING = re.compile(
    rf"{_OPENING}(?:(?P<about>(?:what|how) about )|(?P<worth>(?:what|how much) (?:is|are|was) (?:that|it|this) (?=in )))?"
    r"(?P<rest>[^.!?;:\n]+?)(?:,? please)?[?.!]?"
)
_NUMBERS = {"first": "1", "last": "-1"} | OTHER_NUMBERS | {word: str(value) for word, value in SMALL.items()}
_WORDS_MAX = 4
_NEUTRAL = frozenset(("on", "in", "for", "at"))


def is_same_ellipsis(asked: str, known: str) -> bool:
    """Whether two turns after the same talk have one form, and are about the same words or the same place in a list.

    A preposition of one may be missing in the other, as far as it says only where the rest belongs.
    """
    one, other = _read(asked), _read(known)
    if one is None or other is None or one[1:] != other[1:]:
        return False
    return one[0] == other[0] or not (one[0] and other[0])


def _read(text: str) -> tuple[str, ...] | None:
    """A preposition or nothing, the name of the form, and what it is about; None for a turn of no form."""
    folded = text.strip().casefold().replace("’", "'")
    plain = " ".join(re.split(r"[\s,.!?]+", folded)).strip()
    for name, form in _FORMS.items():
        found = form.fullmatch(plain)
        if found is not None:
            places = [_NUMBERS.get(stem(word), word) for word in found.groups() if word]
            return None if any(place.isalpha() for place in places) else ("", name, *places)
    return _other_thing(folded)


def _other_thing(text: str) -> tuple[str, ...] | None:
    found = _OTHER_THING.fullmatch(text)
    words = found["rest"].replace("°", "").split() if found else []
    if found is None or not 0 < len(words) <= _WORDS_MAX or found.start("rest") == 0:
        return None
    preposition = words.pop(0) if words[0] in _NEUTRAL else ""
    stems = tuple(map(stem, words))
    if not words or not all(word.isalnum() for word in words) or FUNCTION_WORDS & set(words):
        return None
    if found["worth"] and not all(word in UNITS or word in FORMS for word in stems):
        return None
    return preposition, "of", *(UNITS.get(word, word) for word in stems)
