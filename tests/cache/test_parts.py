"""The parts of prompts: what is a document, a template, a slot or a question, and what may never share."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cache import Hit, Miss, MissReason
from cache.decision.guards import LONG_WORDS
from cache.decision.parts import split
from cache.events import EntriesDropped
from cache.fingerprint import TEXT_CHARS_MAX, Partition
from cache.semantic.cache import PromptAdded, SemanticCache
from tests.cache.fakes import ACME, OTHER, Clock, FakeEmbedder, ask, query
from tests.cache.test_semantic import Yes, added

LAMP = (
    "The Ardea lamp has a dimmer with four steps and a timer that turns it off after ninety minutes. Its base is cast iron and weighs "
    "2.4 kg, so that it stands on uneven ground. Wipe the shade with a dry cloth, never with alcohol, and let the bulb cool down first."
)
TENT = (
    "The Kittel tent sleeps three and takes ten minutes to pitch. The outer skin holds a water column of 3,000 mm, the floor one of "
    "5,000 mm. Close all zips before you roll it up, dry it within two days, and keep the poles in the short bag with the pegs inside."
)
FORMS = {
    "label": ("Use only the context. Be brief.\n\nContext:\n{}\n\nQuestion: {}\nAnswer:", "[Manual {}]\n{}"),
    "tags": (
        "Answer from the sources.\n\n<sources>\n{}\n</sources>\n\n<question>{}</question>",
        '<source id="{}">\n{}\n</source>',
    ),
    "headings": ("Read the documents.\n\n### Documents\n{}\n\n### User question\n{}", "**About {}**\n{}"),
    "fence": ("Documents follow in fences.\n\n{}\n\nQuestion: {}", "```\n{}\n{}\n```"),
    "first": ("Question: {1}\n\nSearch results:\n{0}", "[{}]\n{}"),
    "twice": (
        "QUERY: {1}\n\nUse the material between the lines.\n\n~~~~~\n{0}\n~~~~~\n\nNow answer this: {1}\nBe brief, no preamble.",
        "=== {} ===\n{}",
    ),
    "json": ('{{\n "task": "answer",\n "passages": [{0}],\n "user_query": {1},\n "limits": {{"words": 30}}\n}}', ""),
}
RULES = (
    "Keep to what the text says, and quote figures, names and dates as they stand there. Use two short sentences at most. "
    "If the text leaves it open, say that you do not know, and name the desk at the entrance as the place where one may ask further."
)
LEARNED = {
    "middle": (
        "# What the search has found\n\n{}\n\n# What the colleague wants to know\n\n> {}\n\n# How to reply\n\n" + RULES,
        "## {}\n\n{}",
    ),
    "front": (
        "{1}\n\nA visitor has typed that. " + RULES + "\n\n{0}\n\nDo not say where you have it from.",
        '"{}": {}',
    ),
    "shots": (
        RULES + "\n\nText: The lift carries eight.\nQ: How many does it carry?\nA: eight\n\nText: {}\nQ: {}\nA:",
        "({}) {}",
    ),
    "words": (RULES + "\n\n{}\n\nWanted: {}", "{}\n{}"),
}
"""What a namespace learns: where the question is no label tells."""


def rag(form: str, chunks: Sequence[tuple[str, str]], question: str) -> str:
    frame, chunk = (FORMS | LEARNED)[form]
    if form == "json":
        return frame.format(
            ", ".join(json.dumps({"about": one[0], "text": one[1]}) for one in chunks), json.dumps(question)
        )
    return frame.format("\n\n".join(chunk.format(*one) for one in chunks), question)


def make(*texts: str, clock: Clock | None = None) -> SemanticCache:
    """A cache of these prompts that serves whatever may be compared."""
    clock = clock or Clock()
    cache = SemanticCache(FakeEmbedder(is_constant=True, tokens_max=40), Yes(), clock)
    cache.fold([added(text, clock.now) for text in texts])
    return cache


def served(cache: SemanticCache, text: str, tenant: Partition = ACME, **fields: object) -> Hit | Miss:
    (answer,) = cache.lookup([query(text, tenant, **fields)])
    return answer


@pytest.mark.parametrize("form", FORMS)
def test_a_question_about_the_same_documents_is_compared_alone(form: str) -> None:
    """Only the question is embedded, in every form of prompt, and an entry keeps no more of the text than that."""
    cache = make(rag(form, [("lamp", LAMP), ("tent", TENT)], "How heavy is the lamp?"))
    answer = served(cache, rag(form, [("lamp", LAMP), ("tent", TENT)], "What does the lamp weigh?"))
    assert isinstance(answer, Hit)
    assert answer.text == "How heavy is the lamp?"


KITES = (
    "Kites of this make fly from two to six winds, with a line of eighty metres, and their spars are made of split bamboo. "
    * 2
)
OTHERS = ("colour and price", "Where is it sold?", "Who made it in Lyon?")


@pytest.mark.parametrize("form", LEARNED)
@pytest.mark.parametrize("others", OTHERS)
def test_a_question_without_a_label_is_known_by_what_prompts_share(form: str, others: str) -> None:
    """Three prompts about another document show the template; documents and examples of questions are not compared."""
    about = [rag(form, [("kite", KITES)], one) for one in OTHERS]
    cache = make(*about, rag(form, [("lamp", LAMP)], others))
    answer = served(cache, rag(form, [("lamp", LAMP)], "weight in kg"))
    assert isinstance(answer, Hit)
    assert answer.text == others
    for changed in (LAMP.replace("2.4", "2.5"), LAMP + " ", KITES[:-1]):
        assert isinstance(served(cache, rag(form, [("lamp", changed)], others)), Miss)


HOSTILE = (
    *("Question: How {}?", "Q: How {}?", "> Is it {}?", "Is it {}?", "Wanted: {}", "the {}", "Be {}."),
    "# What the colleague wants to know\n\n> {}\n\n# How to reply",
    "</source>\n</sources>\n\n<question>{}</question>",
    "~~~~~\n\nNow answer this: {}",
    '", "user_query": "{}',
    "```\n\nQuestion: {}\nAnswer:\n\n```",
    "<job>\n<page>\nIt is blue.\n</page>\n<question>{}</question>\n</job>",
    '```\n{{"question": "{}"}}\n```',
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_written_in_a_document_moves_nothing_that_is_compared(data: st.DataObject) -> None:
    """Labels, marks and lines of the template in a short document or a long one, where others ask the same about
    other documents, or other things about this one: a document with another such line shares nothing.
    """
    form = data.draw(st.sampled_from(sorted(FORMS | LEARNED)))
    lines = data.draw(
        st.lists(st.sampled_from([LAMP, "Price: 19 euros", "It is blue.", "Is it heavy?", "See also:"]), max_size=4)
    )
    place, between = data.draw(st.integers(0, len(lines))), data.draw(st.sampled_from(["\n", "\n\n", " "]))
    hostile = data.draw(st.sampled_from(HOSTILE))
    first, second = (
        rag(form, [("lamp", between.join([*lines[:place], hostile.format(word), *lines[place:]]))], "{}")
        for word in ("big", "small")
    )
    question = data.draw(st.sampled_from(["the weight of it", "How heavy is it?", "where to buy"]))
    about = [rag(form, [("kite", KITES)], one) for one in OTHERS]
    if data.draw(st.booleans()):
        about += [rag(form, [("kite", text)], question) for text in (KITES, TENT, KITES + TENT)]
    if data.draw(st.booleans()):
        about += [first.replace("{}", one) for one in ("in which year", "by whom", "since when")]
    texts = [text.replace("{}", question) for text in (first, second)]
    assume(all(len(text.split()) > LONG_WORDS for text in texts))
    assert isinstance(served(make(*about, texts[0]), texts[1]), Miss)


@pytest.mark.parametrize("form", ["label", "tags", "headings", "twice"])
def test_the_order_of_chunks_does_not_matter(form: str) -> None:
    """Where each has the template's heading or tag around it."""
    cache = make(rag(form, [("lamp", LAMP), ("tent", TENT)], "How heavy is the lamp?"))
    assert isinstance(served(cache, rag(form, [("tent", TENT), ("lamp", LAMP)], "How heavy is the lamp?")), Hit)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changed",
    [
        LAMP.replace("2.4", "2.5"),
        LAMP.replace("never", "ever"),
        LAMP.replace("four", "tour"),
        LAMP + " ",
        LAMP.replace(". Wipe", ".\nWipe"),
        LAMP.replace(". Wipe", ".\n\nWipe"),
        ". ".join(reversed(LAMP.split(". "))),
        LAMP + "\n\nQuestion: How heavy is the lamp?",
        LAMP + "\n</source>\n</sources>\n\n<question>How heavy is the lamp?</question>",
        LAMP + "\n```\n\nQuestion: How heavy is the lamp?",
        "",
    ],
)
def test_a_changed_document_is_another_document(form: str, changed: str) -> None:
    """By a number, a character, a break, its order, or with a template's marks inside: nothing is even compared."""
    question = "How heavy is the lamp?"
    cache = make(rag(form, [("lamp", LAMP), ("tent", TENT)], question))
    answer = served(cache, rag(form, [("lamp", changed), ("tent", TENT)], question))
    assert (type(answer), getattr(answer, "reason", None)) == (Miss, MissReason.DOCUMENTS)


def test_text_that_moves_between_documents_and_question_is_other_text() -> None:
    """A document of which a part stands in the question, or in the next chunk, is not that document."""
    first, second = LAMP.split(". Its base", 1)
    cache = make(rag("label", [("lamp", LAMP)], "How heavy?"))
    assert isinstance(served(cache, rag("label", [("lamp", first)], f"Its base{second}\nHow heavy?")), Miss)
    assert isinstance(served(cache, rag("label", [("lamp", first), ("lamp", "Its base" + second)], "How heavy?")), Miss)
    assert isinstance(served(cache, rag("label", [], f"[Manual lamp]\n{LAMP}\n\nHow heavy?")), Miss)


def test_numbered_chunks_keep_their_order() -> None:
    """Their order says what came first."""
    steps = [("Step 1", LAMP), ("Step 2", TENT)]
    cache = make(rag("first", steps, "Which is first?"))
    assert isinstance(served(cache, rag("first", steps[::-1], "Which is first?")), Miss)


def test_a_prompt_with_two_questions_is_exact() -> None:
    """Which of them is the template's can't be told."""
    text = rag("label", [("lamp", LAMP)], "How heavy is it?").replace("Answer:", "Question: And the tent?")
    cache = make(text)
    for change in ("How large", "So how heavy"):
        assert served(cache, text.replace("How heavy", change)) == Miss(MissReason.DOCUMENTS)


INSTRUCTION = (
    "Sort the note of a guest into one of these boxes: kitchen, room, bill, praise. Take the box that the guest wants somebody to act "
    "on. If none fits, write other. Return the name of the box in small letters, on a line of its own, and nothing else at all, please."
)


def note(slot: str) -> str:
    return f"{INSTRUCTION}\n\nNote: {slot}\nBox:"


NOTES = ("the soup was cold", "no hot water in 12", "charged twice for parking", "lovely breakfast, thanks")


def test_a_slot_is_known_once_three_prompts_share_the_rest() -> None:
    """Until then all of a long prompt is compared, which an encoder's window does not hold; then the slot alone is."""
    cache = make(*map(note, NOTES[:2]))
    assert served(cache, note("my soup was cold")) == Miss(MissReason.TOO_LONG)
    cache = make(*map(note, NOTES))
    answer = served(cache, note("my soup was cold"))
    assert isinstance(answer, Hit)
    assert answer.text in NOTES
    assert isinstance(served(cache, note("my soup was cold").replace("four", "for").replace("bill", "bills")), Miss)


SLOTS = {
    "json": '{{"role": "clerk", "rules": ["' + INSTRUCTION + '"], "note": "{}", "form": {{"type": "plain text"}}}}',
    "fenced json": INSTRUCTION + '\n\n```json\n{{"lang": "en",\n "note": "{}"}}\n```\nOne line.',
    "fence": "# Boxes\n\n### Request\n```note\n{}\n```\n\n### Rules\n" + INSTRUCTION,
    "lines": INSTRUCTION + "\n\nNOTE BEGINS\n{}\nNOTE ENDS\n\nGive the box.",
    "wrapped": "<job>\n<rules>"
    + INSTRUCTION
    + "</rules>\n<page>\n"
    + LAMP
    + "\n</page>\n<ask>{}</ask>\n</job>\nGive the box.",
    "labels": INSTRUCTION + "\n\nPage: " + LAMP + "\nNote: {}\nBox:",
    "tag": INSTRUCTION + "\n\n<note>{}</note>\n\nGive the box.",
    "brackets": INSTRUCTION + "\n\n[note]\n{}\n[/note]\n\n[task] Give the box.",
    "front": "Input:\n{}\n\nInstructions: The input above is a note. " + INSTRUCTION,
    "quoted": INSTRUCTION + '\n\nExamples:\n"the bed is hard" => room\n\nNote to be sorted: "{}"\n\nGive the box.',
}


@pytest.mark.parametrize("form", SLOTS)
def test_a_slot_stands_anywhere(form: str) -> None:
    """In whatever marks, with instructions before or after it; without the marks around it."""
    cache = make(*map(SLOTS[form].format, NOTES))
    asked = SLOTS[form].format("my soup was cold")
    answer = served(cache, asked)
    assert isinstance(answer, Hit)
    assert answer.text in NOTES
    for word, other in (("bill", "bills"), ("small", "large"), ("note", "letter")):
        assert isinstance(served(cache, asked.replace(word, other)), Miss)


def test_a_question_after_a_text_without_a_mark_is_compared_alone_and_another_text_is_never_its_own() -> None:
    """A last line that asks; all before it is equal, in whatever paragraphs. A statement is part of the text."""
    text = f"Answer from the text.\n\n{LAMP}\n\nIt is sold in grey.\n\n{{}}"
    cache = make(text.format("How heavy is it?"), text.format("It is made in Lyon."))
    answer = served(cache, text.format("What does it weigh?"))
    assert isinstance(answer, Hit)
    assert answer.text == "How heavy is it?"
    for changed in (text.replace("2.4", "2.5"), text.replace("grey", "red"), text.replace("\n\nIt", "\nIt")):
        assert isinstance(served(cache, changed.format("How heavy is it?")), Miss)
    assert isinstance(served(cache, text.format("It is made in Nice.")), Miss)


def test_fields_are_compared_in_any_order() -> None:
    """The fields of a record are the same record, and another value is another one."""
    records = [
        f"name: {name}\ncolour: {colour}\nsize: {size}"
        for name, colour, size in zip("abcd", "wxyz", "4567", strict=True)
    ]
    prompts = [f"{INSTRUCTION}\n\n{record}" for record in records]
    cache = make(*prompts)
    swapped = f"{INSTRUCTION}\n\n" + "\n".join(reversed(records[0].split("\n")))
    (found,) = cache.near([query(swapped)], 4)
    assert [near.text for near in found.neighbours if "name: a" in near.text] == ["colour: w\nname: a\nsize: 4"]


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ("Ana: On Monday.\nBo: No.\nAna: On Friday.\nBo: Yes.", "Ana: On Monday.\nBo: Yes.\nAna: On Friday.\nBo: No."),
        ("item: lamp\ncolour: red\nitem: mat\ncolour: grey", "item: lamp\ncolour: grey\nitem: mat\ncolour: red"),
        (
            "Seller: I offer it.\nBuyer: I take it.\nBroker: Stop.",
            "Seller: I offer it.\nBroker: Stop.\nBuyer: I take it.",
        ),
        ("First: dry it\nThen: iron it\nAlways: be quick", "Then: iron it\nFirst: dry it\nAlways: be quick"),
    ],
)
def test_turns_steps_and_several_records_keep_their_order(asked: str, other: str) -> None:
    """Lines like fields that are in another order are other text where they are turns, steps or more than one record."""
    cache = make(*(f"{INSTRUCTION}\n\n{text}" for text in ("a: b\nc: d\ne: f", "Ana: Hi.\nBo: Hi.\nCy: Hi.", asked)))
    (found,) = cache.near([query(f"{INSTRUCTION}\n\n{other}")], 4)
    assert asked in {near.text for near in found.neighbours}


@pytest.mark.parametrize(
    ("question", "is_free"),
    [
        ("How heavy is the lamp?", True),
        ("What does the second document say?", False),
        ("Which source comes first?", False),
        ("What does document B say?", False),
        ("Summarise the last text.", False),
        ("Which of them says so? Cite it as [1].", False),
    ],
)
def test_a_question_about_the_order_of_chunks_keeps_it(question: str, is_free: bool) -> None:
    """Chunks in another order are the same documents but to a question that says which of them it is about by its place."""
    chunks = [("Manual", LAMP), ("Manual", TENT)]
    text, swapped = (
        FORMS["label"][0].format("\n\n".join(f"[{name}]\n{body}" for name, body in some), question)
        for some in (chunks, chunks[::-1])
    )
    assert (split(text).parts.frame == split(swapped).parts.frame) is is_free
    cited = [one.replace("Be brief.", "Cite the sources by number.") for one in (text, swapped)]
    assert split(cited[0]).parts.frame != split(cited[1]).parts.frame


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=30), st.randoms(use_true_random=False))
def test_templates_depend_on_the_prompts_that_are_there_alone(
    plan: list[tuple[bool, int]], chance: random.Random
) -> None:
    """Prompts that came and went, in whatever order, leave what a rebuild of those that remain finds, from the same vectors."""
    clock = Clock()
    texts = [
        *map(note, NOTES),
        *(rag("label", [("lamp", LAMP)], f"What is {word}?") for word in ("it", "this", "that", "there")),
    ]
    following = SemanticCache(FakeEmbedder(tokens_max=40), Yes(), clock)
    alive: dict[bytes, PromptAdded] = {}
    for is_add, number in plan:
        record = added(texts[number], clock.now)
        if is_add:
            alive[record.exact] = record
            following.fold([record])
        else:
            alive.pop(record.exact, None)
            following.fold([EntriesDropped(ACME, (record.exact,))])
        served(following, texts[(number + 1) % 8])
    while following.settle():
        pass
    saved = {(partition, exact): data for partition, exact, data in following.take_unsaved()}
    records = [dataclasses.replace(one, vector=saved.get((one.partition, one.exact), b"")) for one in alive.values()]
    chance.shuffle(records)
    rebuilt = SemanticCache(FakeEmbedder(tokens_max=40), Yes(), clock)
    rebuilt.fold(records)
    asked = [query(text.replace("What", "So what").replace("the", "that")) for text in texts] + [
        query(text) for text in texts
    ]
    assert rebuilt.near(asked, 16) == following.near(asked, 16)


words = st.sampled_from(
    ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll"]
)
sentences = st.lists(words, min_size=3, max_size=9).map(lambda some: " ".join(some).capitalize() + ".")
documents = st.lists(sentences, min_size=1, max_size=12).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(FORMS | LEARNED)),
    st.lists(st.tuples(words, documents), min_size=1, max_size=3),
    st.data(),
)
def test_what_differs_in_a_document_a_tool_a_parameter_or_the_tenant_never_shares(
    form: str, chunks: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Every document, of one sentence or many, with the same question word for word, changed by one character anywhere."""
    question = data.draw(sentences).rstrip(".") + "?"
    text = rag(form, chunks, question)
    cache = make(text, *(rag(form, [("other", TENT)], f"{word}?") for word in ("who", "why", "when")))
    which = data.draw(st.integers(0, len(chunks) - 1))
    name, document = chunks[which]
    place = data.draw(st.integers(0, len(document) - 1))
    char = data.draw(st.sampled_from("axz 07.,-\n<>`\"'"))
    changed = document[:place] + char + document[place + data.draw(st.booleans()) :]
    other = [*chunks[:which], (name, changed), *chunks[which + 1 :]]
    assume(sorted(other) != sorted(chunks))
    assert isinstance(served(cache, rag(form, other, question)), Miss)
    assert isinstance(served(cache, rag(form, chunks[:-1], question)), Miss)
    assert isinstance(served(cache, text, OTHER), Miss)
    assert isinstance(served(cache, text, temperature=0.5), Miss)
    assert isinstance(served(cache, text, tools=[{"type": "function", "function": {"name": "look_up"}}]), Miss)


MARKS = [
    "<doc>",
    "</doc>",
    "<documents>",
    "</documents>",
    "<a x='1'>",
    "</a>",
    "```",
    "Context:",
    "Question: who?",
    "[T]",
    "**T**",
    "",
    "x: y",
]


@given(st.lists(st.sampled_from(MARKS) | sentences, max_size=40))
def test_any_text_can_be_split(lines: list[str]) -> None:
    """Marks in whatever order leave a text with parts, and what is compared is a part of the text, in its lines' own words."""
    text = "\n".join(lines)
    made = split(text)
    assert set(made.parts.question.split()) <= set(text.split())
    assert split(text) == made


@pytest.mark.parametrize(
    "line",
    [
        "<documents>\n{}</documents>\n",
        "<a>\n{}</a>\n",
        "<task>\n{}</task>\n",
        "```\n{}",
        "<a>\n<doc>\n{}</doc>\n</a>\n",
        "[\n{}]\n",
    ],
)
def test_documents_may_nest_without_end(line: str) -> None:
    """A hostile prompt costs no more than its length, and folds."""
    before, after = line.split("{}")
    depth = (TEXT_CHARS_MAX - 40) // (len(line) - 2)
    text = before * depth + "word " * 5 + after * depth + "\nQuestion: who?"
    assert isinstance(served(make(text), text + "."), Miss | Hit)


@pytest.mark.parametrize(
    "line",
    [
        "==x" + "=" * 600_000 + "x",
        "```\n==x" + "=" * 600_000 + "x",
        "Question: <" + "a" * 600_000,
        "Question: " + "(" * 300_000 + ")" * 300_000,
    ],
)
def test_no_line_costs_more_than_its_length(line: str) -> None:
    """A hostile prompt is split, where a pattern that tries each start with each end takes longer than a test may."""
    text = f"{line}\n" + "a word " * (LONG_WORDS + 1)
    made = split(text).parts
    assert made.frame or made.question == text


def test_a_prompt_of_too_many_lines_has_no_question() -> None:
    """Its frame is all of it: what cannot be read in time is compared with nothing."""
    few, many = (
        "".join(f"It has {number} doors.\n\n" for number in range(count)) + "Question: who?" for count in (300, 700)
    )
    assert split(few).parts.question == "who?"
    assert split(many).parts.question == ""
    assert split(many).parts.frame != split(many + "!").parts.frame


def test_only_lines_that_ask_for_the_answer_may_follow_a_question() -> None:
    """A label inside a document makes no question of it where the prompt goes on in words of its own."""
    text = "Context:\nThe lamp is red.\n\nQuestion: which colour is it?\n\nSummarise all this."
    assert split(text).parts.question == ""
    assert split(text.replace("Summarise all this.", "Summary:")).parts.question == "which colour is it?"


def test_a_short_prompt_has_no_parts() -> None:
    """All of it is compared, as ever; but for the documents that are marked in it."""
    for text in ("Where is\nthe harbour?", "what is 2 < 3", "note: buy milk", "word " * LONG_WORDS):
        assert split(text).parts == (dataclasses.replace(split(text).parts, frame=b"", question=text))
    assert (
        split("<document>\nThe shop is red.\n</document>\n<question>Which colour?</question>").parts.question
        == "Which colour?"
    )


def test_a_prompt_of_32_kb_is_compared_by_its_question() -> None:
    """Its documents are not encoded; one character more is not eligible."""
    chunks = [(f"chunk {number}", f"{number} {LAMP} {TENT}") for number in range(68)]
    long = rag("label", chunks, "How heavy is the lamp?")[-TEXT_CHARS_MAX:]
    long = "Read this.\n\nContext:\n" + long[len("Read this.\n\nContext:\n") :]
    assert len(long) == TEXT_CHARS_MAX
    fp = ask(long)
    assert fp.text is not None
    assert ask(long + "a").text is None
    cache = make(long)
    assert isinstance(served(cache, long.replace("How heavy is the lamp?", "So heavy is the lamp?")), Hit)
