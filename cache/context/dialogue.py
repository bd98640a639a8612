"""Whether a question stands alone, after a history of other talk.

Pure; English, by tables. A question stands alone if it has the form of a closed question of general
knowledge or of a named thing, refers to nothing outside itself, is related to no word of the
history, and if nothing in the history may last: no instruction, no role, no fact about the user, no
open question. Knows no digests. Invariant: in doubt it does not stand alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cache.context.questions import QUESTION_CHARS_MAX, is_english, words_of
from cache.decision.words import FUNCTION_WORDS, LIGHT_WORDS, word_set

_TURN_CHARS_MAX = 2_000
_TURNS_MAX = 40

# an instruction, a role, a definition, a mode or a fact about the user: it may matter to all that follows
_LASTING = re.compile(
    r"""(?ix)\b(?:
    from\ (?:now|here|this)|as\ of\ now|going\ forward|henceforth|always|never|every\ (?:answer|reply|response|time|message|sentence|word)
    |(?:each|all|any|following|next|other|future|later|remaining)\ (?:of\ )?(?:my\ |your\ |the\ )?(?:answer|repl
    |response|message|question|sentence|prompt|time)\w*
    |(?:answer|reply|respond|speak|talk|write|say|explain|give)\w*\ (?:\w+\ ){0,3}(?:in|as|like|with|using|only
    |everything|briefly|shortly)\b
    |only\ (?:answer|reply|respond|use|say|write|in|with)|must|shall\ not|do\ not
    |don['’]t\ (?!have|need|know|think|see|get|understand)|stop\ \w+ing|avoid|keep\ (?:it|your|the|in|to)
    |pretend|imagine|what\ if|suppose|assume|act\ (?:as|like)|behave|role|play|game|quiz|riddle|simulat\w*|persona|character
    |pirate|let['’]?s|let\ us
    |you\ are|you['’]re|your\ (?:name|job|task|role|answers?|repl\w*|goal|rules?|instructions?)
    |be\ (?:brief|short|concise|rude|nice|a|an|my|more|less|as|very|formal|funny)
    |call\ (?:me|it|yourself)|my\ name|i['’]?m\ called|remember|forget|note\ that|keep\ in\ mind|bear\ in\ mind
    |when(?:ever)?\ i\ (?:say|write|ask|type|mention)|if\ i\ (?:say|write|ask|type)
    |by\ .{1,30}\ i\ mean|i\ mean|means?|refers?\ to|stands?\ for|define\w*|(?:is|are)\ (?:called|defined|now)
    |replace\ (?:every|all|each|any|the\ word)|instead\ of|rename\w*|let\ \w+\ (?:be|denote|equal|stand)|set\ \w+\ to
    |use\ (?:the|only|a|an|my|british|american|metric|imperial)
    |for\ (?:the\ rest|this\ (?:chat|conversation|session)|all)|in\ this\ (?:chat|conversation|session|dialog\w*)
    |throughout|until\ i|unless|rule|rules|instruct\w*|system|prompt|developer|assistant|ignore|disregard|override
    |translat\w*|proofread|correct\w*|rewrite|rephrase|paraphrase|summari[sz]e|classify|categori[sz]e|convert\w*
    |format\w*|json|markdown|bullet|emoji\w*|rhyme|haiku|poem|language|english|french|german|spanish|dutch|italian
    |i\ want\ you|i['’]?d\ like\ you|i\ need\ you|i\ (?:am|was)
    |i['’]m\ (?:a|an|the|from|in|on|not|using|\d+|your|also|only|allergic|vegan|vegetarian|blind|deaf|pregnant|diabetic)
    |as\ an?\ \w+|i\ (?:live|work|study|speak|use|run|prefer|like|love|hate|only|never|always|believe|think)
    |my\ (?:age|version|country|language|job|company|team|system|teacher|boss|students?|kids?|children|son|daughter|level)
    |we\ (?:are|use|live|work|only|speak)|tell\ me\ (?:only|just|everything)|step\ by\ step|repeat\ after
    |say\ the\ opposite|opposite|wrong|lie|lying|joke|sarcas\w*|true\ or\ false|yes\ or\ no|one\ word|eli5
    |(?:short|long|brief|simpl)er|(?:less|more)\ detail|too\ (?:long|short|complicated|technical|detailed)|in\ (?:short|brief|detail)
    )\b|[<>{}|\#`=]|\b(?:system|assistant|user|human|ai|bot|rule|note|instruction|role|task|mode|style|tone
    |language|format|context|setting|glossary)s?\s?:"""
)
_SMALL_TALK = re.compile(
    r"(?i)(?:hi|hello|hey|thanks?|thank you|ok(?:ay)?|great|cool|nice|perfect|good(?: (?:morning|evening|afternoon))?|bye|goodbye"
    r"|cheers|got it|i see|wow|sure|alright|fine|interesting)"
    r"(?:[ ,]+(?:there|so much|a lot|very much|all|again|you|for that|that helps?|thanks|thank you))*[.!]*"
)
# what an assistant has agreed to
_AGREED = re.compile(
    r"(?i)\b(?:from now on|going forward|i(?:['’]ll| will) (?:always|only|answer|reply|respond|speak|call|keep"
    r"|remember|use|be|act|pretend|write|ignore)"
    r"|as you wish|understood|noted|got it|i am now|i['’]m now|let['’]s (?:play|begin|start)|arr+|ahoy"
    r"|correct answer|your turn|next question"
    r"|the (?:user|customer|system))\b"
)
# a prompt under which the talk before the question may matter, whatever the question
_STATEFUL = re.compile(
    r"(?i)\b(?:conversation|earlier|previous|prior|history|so far|turns?|context|last (?:message|answer"
    r"|question)|game|quiz|role-?play|story|remember|memory"
    r"|interview|exercise|lesson|learner|student|tutor|persona|character|counts?|follow[- ]ups?|continue|step)\b"
)
_LEANING = word_set(
    """
    he she it they him them her hers his its their theirs this these those here there ones other others another else
    more again also too
    instead then same different former latter above below both either neither you your yours me my mine myself we us
    our ours still already
    yet anything something someone anyone everything any some next previous before after later earlier now today
    tomorrow yesterday tonight
    currently so and but or because though however therefore meanwhile otherwise yes no ok okay sure thanks please
    such said mentioned that
    following rest remaining further additional even just only really actually better worse cheaper faster slower
    bigger smaller larger
    longer shorter higher lower older newer easier harder should recommend suggest best advice happened happen
    """
)
_ASKS = re.compile(
    r"(?i)^(?:(?:at|in|on|of|for|from|to|by) )?(?:what|which|who|whose|whom|where|when|why|how)\b|^(?:is|are"
    r"|does|do|can|was|were|did|has|have)\b"
    r"|^(?:one|an?|\d+) \w+ (?:is|are|makes?) how (?:many|much)\b"
)
_ARITHMETIC = re.compile(
    r"(?i)\d\s*(?:%|per ?cent|[x×*/+÷^-]|plus|minus|times|divided by|squared)\s*(?:of )?\s*(?:\d|$|\?)|square root of \d"
)
_UNITS = (
    "gram|kilogram|kilo|milligram|ounce|pound|stone|ton|tonne|meter|metre|kilometer|kilometre|centimeter"
    "|centimetre|millimeter|millimetre|mile|yard"
    "|foot|feet|inch|inche|liter|litre|milliliter|millilitre|gallon|pint|quart|cup|tablespoon|teaspoon|second"
    "|minute|hour|day|week|month|year|decade"
    "|century|byte|kilobyte|megabyte|gigabyte|bit|joule|calorie|watt|acre|hectare|knot|fathom|degree|radian|dozen|cent|penny|pence"
)
_CONVERSION = re.compile(
    rf"(?i)\bhow (?:many|much) (?:{_UNITS})s?\b.*\b(?:an?|one|\d[\d.,]*) (?:{_UNITS})s?\b|\b(?:an?|one"
    rf"|\d[\d.,]*) (?:{_UNITS})s?\b.*\bhow (?:many|much) (?:{_UNITS})s?\b"
)
_PROPERTY = re.compile(
    r"(?i)\b(?:(?:boiling|melting|freezing|flash) point|atomic (?:number|weight|mass)|chemical (?:symbol"
    r"|formula)|molar mass|molecular (?:weight|formula)|density"
    r"|half-life) (?:of|for) (?:[a-z]+(?: [a-z]+)?)\W*$|\btemperature (?:does|do"
    r"|will) (?:[a-z]+(?: [a-z]+)?) (?:boil|melt|freeze)\W*$"
)
_LARGE = (
    "planet|country|continent|ocean|river|mountain|desert|lake|animal|mammal|bird|fish|element|metal|gas|star"
    "|organ|bone|language|island|city|capital"
)
_SUPERLATIVE = re.compile(
    rf"(?i)^(?:(?:on|in) )?(?:which|what) (?:{_LARGE})s?\b(?: (?:of|in) the (?:solar system|world|universe"
    rf"|human body))? (?:has|is|have|are)\b.*\b(?:\w{{3,}}est|most \w+|least \w+)\b"
)
_UNIQUE = re.compile(r"(?i)\bthe (?:solar system|world|universe|earth|sun|moon|human body|internet|equator)\b")
_RELATIVE = re.compile(r"(?<=[A-Za-z]) that (?:is|are|was|were|has|have|hangs?|stands?|lies?|flows?|orbits?|lives?)\b")
_OF_A_NAME = re.compile(
    r"(?:[\w'-]+ ){1,4}of (?:(?:the|an?) )?(?:[\w'-]+ ){0,2}[A-Z]|(?:\w{3,}est|most \w+) \w+ in (?:the )?[A-Z]"
    r"|difference between [A-Z]"
)
# two words with capitals: one alone may be anybody's first name, or any place with a branch
_WORK = re.compile(
    r"(?<!\bto )(?<!\bfrom )(?<!\bat )(?<!\bin )(?<!\bfor )(?<!\bnear )(?<!\bon )(?<!\bwith )(?<!\babout )(?<!\bvia )"
    r"(?<=[\w,;)] )(?!I\b)[A-Z][\w'’-]+ (?:(?:of|and|the|de|van|von) )?[A-Z][\w'’-]+"
)
_FACT = re.compile(
    r"\b(?:capital|currency|population|area|president|king|queen|flag|anthem|neighbou?rs|mountain|city|river|lake) (?:of|in) (?:the )?[A-Z]"
    r"|difference between [A-Z]\w+ and [A-Z]"
)
_LANGUAGES = (
    r"(?:Python|Java|JavaScript|TypeScript|C\+\+|C#|Rust|Go|Ruby|PHP|Swift|Kotlin|SQL|Excel|Git|Bash|Perl|Scala|Haskell|Lua|Julia"
    r"|PowerShell|LaTeX|HTML|CSS|NumPy|Pandas|React|Docker|Kubernetes)"
)
_PROGRAM = re.compile(
    rf"^How (?:do|can|would) (?:I|you) \w+ (?:up )?an? (?:[\w-]+ ){{1,3}}(?:\w+ ){{0,3}}in {_LANGUAGES}\b"
    rf"|^How (?:do|can|would) (?:I|you) \w+ an? {_LANGUAGES} \w+"
)

_COMMON = FUNCTION_WORDS | LIGHT_WORDS | {"one"}


def stands_alone(question: str, history: Sequence[tuple[str, str]], system: str) -> bool:
    """Whether a question is answered the same with its history and without.

    `history` are role and text of the turns before it, the last one the assistant's; `system` is
    the text of the system prompt.
    """
    if len(history) > _TURNS_MAX or _STATEFUL.search(system) or not is_closed(question):
        return False
    own = frozenset(word for word in words_of(question) if word not in _COMMON)
    return all(_is_past(role, text, own) for role, text in history) and not _is_asked(history[-1][1])


def _is_past(role: str, text: str, terms: frozenset[str]) -> bool:
    """Whether nothing of a turn matters to a later question with these words."""
    if len(text) > _TURN_CHARS_MAX or not terms.isdisjoint(words_of(text)):
        return False
    if role == "assistant":
        return not _AGREED.search(text)
    sentences = re.split(r"(?<=[.!?])\s+|\n+", text.strip())
    # a statement may set the scene for all that follows: "We count in octal."
    is_asking = all(
        sentence.endswith("?") or _ASKS.match(sentence) or _SMALL_TALK.fullmatch(sentence) for sentence in sentences
    )
    return is_asking and is_english(text) and not _LASTING.search(text)


def _is_asked(text: str) -> bool:
    """Whether an assistant's text asks for an answer that is more than yes."""
    asked = re.split(r"(?<=[.!:\n])\s+", text.strip())[-1]
    return "?" in asked and not re.match(
        r"(?i)(?:shall i|would you like|do you want me to|should i|want me to)\b", asked
    )


def is_closed(question: str) -> bool:
    """Whether a question says all that it is about: by its form, and because each of its definite
    phrases names its thing.
    """
    text = question.strip()
    if len(text) > QUESTION_CHARS_MAX or not is_english(text) or "\n" in text or not _ASKS.match(text):
        return False
    if len(re.findall(r"[?.!](?:\s|$)", text)) > 1:
        return False
    raw = re.findall(r"[^\W_]+(?:['’][^\W_]+)*", text)
    if not 4 <= len(raw) <= 30 or re.search(
        r"(?i)\b(?:which|this|that|the|last|first|second) one\b|\bone of\b|\bthe (?:two|three|first|second|last)\b",
        text,
    ):
        return False
    plain = _UNIQUE.sub("", _RELATIVE.sub("", text))
    folded = [word.casefold().replace("’", "'") for word in re.findall(r"[^\W_]+(?:['’][^\W_]+)*", plain)]
    if not _LEANING.isdisjoint(folded) or any(word.endswith(("'d", "'ll", "'ve", "'re")) for word in folded):
        return False
    if "i" in folded and not re.match(r"(?i)how (?:do|can|would) i\b", text):
        return False
    if re.match(r"(?i)(?:what|how) about\b", text):
        return False
    forms = (_ARITHMETIC, _CONVERSION, _SUPERLATIVE, _PROPERTY)
    return any(form.search(text) for form in forms) or _is_about_a_name(plain)


def _is_about_a_name(text: str) -> bool:
    """Whether a name of several words, a program's or a country's says what the question is about,
    with no definite phrase beside it that is not of that name.
    """
    for article in re.finditer(r"\b[Tt]he (?=[a-z])", text):
        # "the boiling point of X": what is definite is so by the name
        if not _OF_A_NAME.match(text, article.end()):
            return False
    return any(pattern.search(text) for pattern in (_WORK, _FACT, _PROGRAM))
