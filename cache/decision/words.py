"""English, by tables: function words, antonyms, numbers, units, and the words that say how an
answer should be. Data only, and the light stemmer that all of them went through.
"""

from __future__ import annotations

import re


def stem(word: str) -> str:
    """A light stemmer: plural, possessive, -ing, -ed, -ly. (The plural rules are Harman's S
    stemmer, 1991.)
    """
    if len(word) <= 3 or not word.isalpha():
        return word
    if word.endswith("ies") and word[-4] not in "ae":
        word = word[:-3] + "y"
    elif (word.endswith("es") and word[-3] not in "aeo") or (word.endswith("s") and word[-2] not in "us"):
        word = word[:-1]
    for suffix in ("ing", "ed", "ly"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3 and word not in _WHOLE:
            word = word[: -len(suffix)]
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lse":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def word_set(text: str) -> frozenset[str]:
    """The words of a table."""
    return frozenset(text.split())


def stems(text: str) -> frozenset[str]:
    """The words of a table, stemmed."""
    return frozenset(stem(word) for word in text.split())


_WHOLE = word_set(
    """
    nothing something anything everything during morning evening king ring spring string thing bring family reply apply supply
    only early daily monthly weekly hardly barely need speed feed seed italy july hundred
    """
)
CONTRACTIONS = {
    "can't": "can not",
    "cannot": "can not",
    "won't": "will not",
    "shan't": "shall not",
    "ain't": "is not",
    "let's": "let us",
    "i'm": "i am",
    "what's": "what is",
    "it's": "it is",
}
NEGATIONS = stems("not no never without neither nor none nobody nothing nowhere except unless hardly barely avoid lack")
REVERSING = ("un", "dis", "in", "im", "ir", "il", "non", "de", "mis", "anti")
GREETINGS = stems("hello hi hey dear greetings ok okay please thanks sorry so well also")
_PAIRS = """
on off|enable disable|activate deactivate|increase decrease|raise lower|add remove|add subtract|buy sell|start stop|start end
begin end|open close|up down|before after|more less|more fewer|most least|maximum minimum|max min|best worst|better worse
cheap expensive|hot cold|warm cold|left right|import export|encrypt decrypt|encode decode|lock unlock|install uninstall
allow deny|allow block|allow forbid|allow ban|accept reject|accept decline|approve reject|first last|former latter|highest lowest|high low
largest smallest|large small|big small|biggest smallest|long short|longest shortest|fast slow|fastest slowest|upgrade downgrade
upload download|push pull|win lose|love hate|like dislike|like hate|true false|positive negative|include exclude|with without
ascend descend|ascending descending|inside outside|above below|over under|oldest newest|old new|old young|oldest youngest
early late|earliest latest|first latest|earliest last|send receive|borrow lend|give take|pass fail|public private|mute unmute|pause resume
create delete|insert delete|join leave|login logout|connect disconnect|attach detach|compress decompress|pro con
advantage disadvantage|benefit drawback|benefit risk|cause effect|deposit withdraw|gain lose|profit loss|hire fire|rise fall
success failure|valid invalid|safe dangerous|safe unsafe|legal illegal|possible impossible|visible hidden|show hide|same different
male female|man woman|men women|boy girl|husband wife|mother father|brother sister|north south|east west|day night
input output|read write|serialize deserialize|subscribe unsubscribe|follow unfollow|mount unmount|parent child|buyer seller
indoor outdoor|propose oppose|front rear|front back|brighter dimmer|bright dim|louder quieter|loud quiet|arrive depart|arrival departure
internal external|employer employee
"""
POLES: dict[str, list[tuple[int, int]]] = {}
for _index, _pair in enumerate(re.split(r"[|\n]", _PAIRS.strip())):
    for _side, _word in enumerate(_pair.split()):
        POLES.setdefault(stem(_word), []).append((_index, _side))

FUNCTION_WORDS = stems(
    """
    a an the this that these those there here it its i me we us you he she they them him his her their our my your mine yours
    is are was were be been being am do does did done doing have has had having can could will would shall should may might must
    of in on at to for from by with about as into onto than then and or but if so because while what which who whom whose when
    where why how please tell show give let get got want need like know say explain describe find help make just also really very
    much many some any would could s t d ll re ve m
    """
)
LIGHT_WORDS = stems("city place thing way method kind type sort name person people process step steps")
"""Words that say what kind of answer is meant and may be left out: "which city is the capital" asks
for the capital.
"""

FRAMING_WORDS = (
    LIGHT_WORDS
    | GREETINGS
    | stems(
        """
    write function describe return provide display present state calculate compute determine understand mean meaning
    translate translation order during expect visit best recommend suggest command code look search
    """
    )
)
"""Words in which one question is put in several ways, inside one sentence."""

ASKED_WORDS = (FRAMING_WORDS - stems("translate translated translation")) | stems(
    """
    pay cost price charge fee amount number rate temperature size weight length time date day hour start begin end finish open
    close last happen need use buy bring take keep put send arrive leave reach pick collect store clean wash eat drink live
    work run hold carry include contain cover apply count fit come go get become find rule reason limit deadline
    allow permit possible customer guest person member child adult total maximum minimum latest earliest often still
    vs versus differ difference percent
    """
)
"""Everyday words of questions about a text, which order nothing: the text itself may lack them."""

EVERYDAY = ASKED_WORDS - stems(
    """
    adult child member customer guest person total maximum minimum latest earliest limit rate reason rule deadline leave arrive
    come go bring open close begin start end finish send collect eat drink buy reach amount number
    """
)
"""Of these the ones in which questions are put; the others are things that a text tells apart."""

APART = [stems(pair) for pair in ("during before", "during after", "take bring", "come leave", "go come", "next last")]
"""Words that tell two questions about one text apart, though elsewhere they may mean little."""

TURNING = stems(
    """
    wrong wrongly incorrect incorrectly false falsely fake untrue opposite contrary reverse reversed backward backwards lie lying
    mislead misleading pretend pretended invent invented imaginary fictional absurd nonsense joke funny ironic ironically sarcastic
    sarcastically mocking evil rude rudely rhyme contradict deny ignore instead except truth
    """
)
"""Words that turn an answer, and so are no other name of anything."""

INSTRUCTING = stems("say make let just tell show give explain describe")
"""Function words that give an order where they follow the question."""

_ASKING_WORDS = stems("help know tell show give explain find thank thanks there i we me us it to how") | GREETINGS
POLITE = re.compile(
    r"(?:(?>(?:(?:can|could|would|will|do|thank) you|for me|(?:i|we) (?:want|need|lik|would lik)(?: to)?|if (?:i|you) can|who do i"
    r"|what (?:can|should|must|do) (?:i|we)(?: need to)? do|{})(?: |$)))++".format("|".join(sorted(_ASKING_WORDS)))
)
"""A clause that only asks for an answer, stemmed."""

PREPOSITIONS = {
    "from": "from", "out": "from", "to": "to", "into": "to", "onto": "to", "than": "than", "before": "before", "after": "after",
    "over": "over", "under": "under", "by": "by", "if": "if", "against": "against", "minus": "minus", "divided": "divided", "per": "per",
}  # fmt: skip
AMOUNTS = stems("many much long far old often big tall high deep wide heavy fast late soon quick hot warm cold large")
ASKING_WHETHER = stems("is are was were am do does did has have had")
# each line by its first word: that a thing can, must, should, may not, will or did happen, and what is asked of it
MOODS = {
    stem(word): line.split()[0]
    for line in (
        "can could may might possible able allow permit",
        "must shall need require necessary mandatory obligatory compulsory oblige",
        "should ought recommend advisable advise",
        "forbid forbidden prohibit ban",
        "will",
        "did was were been had",
        "where place location address",
        "when date time day hour minute week month year long until early late deadline",
        "who whom whose",
        "how",
        "why reason cause",
        "often frequency interval",
        "many number",
        "much amount",
        "cost price fee expensive cheap euro dollar",
        "hot warm cold temperature",
    )
    for word in line.split()
}
# "?" is yes or no; "much" is many or cost
ASKED_FOR = frozenset(("?", "where", "when", "who", "how", "why", "often", "many", "much", "cost", "hot"))
PERSONS = frozenset(("i", "me", "you"))
FORMS = stems(
    """
    json yaml xml csv html markdown latex table list bullet bullets numbered prose poem haiku essay email code regex sql python
    java javascript typescript rust golang kotlin swift ruby php bash powershell c++ c#
    english french spanish german italian portuguese russian chinese mandarin japanese korean arabic hindi dutch polish turkish
    greek latin swedish norwegian danish finnish hebrew vietnamese thai czech ukrainian
    brief briefly short shorter long longer concise detailed detail depth summary summarize summarise tldr step sentence sentences
    paragraph paragraphs word words formal informal casual polite child kid beginner expert layman five-year-old example examples
    """
)
SCOPES = stems(
    "all every each any some few several most least only except both either half whole entire total average always"
)
NARROWING = SCOPES & stems("total average whole entire only except both half")
OWNERS = stems(
    "my mine our ours your yours his her hers their theirs wife husband mother father brother sister son daughter boss"
)
TIMES = stems(
    """
    today tonight tomorrow yesterday now currently current latest recent recently newest upcoming nowadays
    """
)
CALENDAR = stems(
    """
    monday tuesday wednesday thursday friday saturday sunday january february march april june july august september october
    november december
    """
)
DATES = CALENDAR | stems("weekday weekend spring summer autumn winter morning noon afternoon evening night midnight")
ABOUT_WORDS = word_set(
    """
    punctuation punctuate punctuated period periods comma commas mark marks sentence sentences question questions statement
    statements capitalize capitalise capitalized capitalised capitals uppercase lowercase upper lower case cases titlecase
    spell spelled spelling word words letter letters character characters char chars space spaces spacing whitespace blank
    blanks indent indented quote quotes quoted grammar grammatical typo typos proofread rewrite rephrase paraphrase translate
    translated translation repeat echo verbatim exact exactly literal literally string strings text texts token tokens regex
    copy correct corrected edit edited count counts length lengths format formatted line lines hash hashed
    encode decode encoded base md reverse reversed backwards palindrome anagram rhyme rhymes continue complete finish say says
    said title titles transcribe type typed
    """
)
"""Words of a text about its own words, letters or marks, which then matter."""

BEFORE_PRONOUN_ONE = word_set(
    "which this that the any no every some another each only good best right other first second third fourth fifth last"
)
AFTER_WHEN = word_set("i you he she it we they the my your his her our their this that these those")
"""Words after "once" where it means "when"."""

_UP_TO_NINETEEN = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
SMALL = {stem(word): value for value, word in enumerate(_UP_TO_NINETEEN.split())}
SMALL |= {stem(word): 10 * value for value, word in enumerate(_TENS.split(), 2)}
ONE, ONCE, HUNDRED = stem("one"), stem("once"), stem("hundred")
LARGE = {stem("thousand"): 10**3, stem("million"): 10**6, stem("billion"): 10**9, stem("trillion"): 10**12}
OTHER_NUMBERS = {
    stem(word): value
    for word, value in (
        ("half", "1/2"), ("quarter", "1/4"), ("dozen", "12"), ("once", "1x"), ("twice", "2x"), ("double", "2x"), ("triple", "3x"),
        ("second", "2"), ("third", "3"), ("fourth", "4"), ("fifth", "5"), ("sixth", "6"), ("seventh", "7"), ("eighth", "8"),
        ("ninth", "9"), ("tenth", "10"), ("hundred", "100"), ("thousand", "1000"), ("million", "1000000"),
    )
}  # fmt: skip
UNITS = {
    stem(word): names.split()[0]
    for names in (
        "km kilometer kilometre", "mi mile", "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre", "ft foot feet",
        "inch inches", "yd yard", "kg kilogram kilo", "g gram", "mg milligram", "lb lbs pound", "oz ounce", "l liter litre",
        "ml milliliter millilitre", "gal gallon", "% percent percentage", "$ dollar usd", "€ euro eur", "£ gbp quid", "¥ yen",
        "s sec second seconds", "min minute mins", "h hour hr hrs", "day", "week", "month", "year", "am", "pm", "c celsius",
        "f fahrenheit", "kb kilobyte", "mb megabyte", "gb gigabyte", "tb terabyte", "mph", "kph", "people", "time",
    )
    for word in names.split()
}  # fmt: skip

# units and symbols that mean another thing in another case
_UNITS = """
    kb mb gb tb pb kw mw gw nw mm nm ma na mg ng mv kv nv ms ns ps pa mpa hpa mhz ev mev gev mj nj mf nf mol
    co cs no hf pb sn sc
"""
CASED_UNITS = frozenset(_UNITS.split())
# names and abbreviations that are other words in small letters
_NAMES_OF_WORDS = """
    us who it aids may march august will mark bill rose grace hope faith joy turkey china polish finnish job nice reading
    mobile lima apple amazon windows shell orange target gap subway visa oracle meta slack word excel access teams act sat
    gre or in am as me so hi oh ok id ram rest pin nasdaq dos cat dog
"""
CASED_WORDS = frozenset(_NAMES_OF_WORDS.split())
