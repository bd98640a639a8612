"""Calls of tools and thinking in an answer's text: recorded texts of each format, cut anywhere; forced calls; rendering."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from local_engine.engine import Engine
from local_engine.grammar import Grammars, GrammarState
from local_engine.messages import ANY_TOOL, GenerateRequest, Grammar, InvalidRequest, SamplingParams
from local_engine.text.calls import FORMATS, THINKING, AnswerReader, Format, format_of
from local_engine.text.chat import ChatTemplate
from local_engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import CHAT_TEMPLATE, make_tokenizer

Folded = tuple[str, str, list[tuple[str, str]]]
TAGGED, NAMED, LISTED, PHI, OLMO, LLAMA, PYTHONIC = FORMATS
HI, LATER = '{"city": "Zürich \\"}\\""}', '{"a": {"b": [1, null]}}'
RECORDED: list[tuple[Format, str, Folded]] = [
    # Qwen, "Function Calling"; the same for Hermes, SmolLM3's xml_tools and Granite 4
    (
        TAGGED,
        f'<tool_call>\n{{"name": "f", "arguments": {HI}}}\n</tool_call>\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>',
        ("", "", [("f", HI), ("g", "{}")]),
    ),
    (
        TAGGED,
        f'I look.\n\n<tool_call>{{"arguments": {LATER}, "name": "f"}}</tool_call>\nDone.',
        ("I look.Done.", "", [("f", LATER)]),
    ),
    (
        TAGGED,
        '<think>\nShould I <tool_call>?\n</think>\n\n<tool_call>\n{"name": "g", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
        ("", "Should I <tool_call>?", [("g", '{"a": 1}')]),
    ),
    # Mistral, "Function calling", tokenizers v3 and v11
    (
        LISTED,
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {HI}}}, {{"name": "g", "arguments": {{}}}}]',
        ("", "", [("f", HI), ("g", "{}")]),
    ),
    (
        NAMED,
        f"Well.[TOOL_CALLS]f[ARGS]{LATER}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{{}}",
        ("Well.", "", [("f", LATER), ("g", "{}")]),
    ),
    # Meta, "Llama 3.1: JSON based tool calling", "Llama 3.2: zero-shot function calling", "Llama 4"
    (LLAMA, f'{{"name": "f", "parameters": {HI}}}', ("", "", [("f", HI)])),
    (LLAMA, f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {LATER}}}', ("", "", [("f", LATER)])),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ("", "", [("f", "{}"), ("g", "{}")])),
    (
        PYTHONIC,
        "[f(city='San Francisco', on=True, off=false, none=null, n=-1.5, l=[1, {'k': \"it's\"}]), g()]",
        (
            "",
            "",
            [
                (
                    "f",
                    '{"city": "San Francisco", "on": true, "off": false, "none": null, "n": -1.5, "l": [1, {"k": "it\'s"}]}',
                ),
                ("g", "{}"),
            ],
        ),
    ),
    (OLMO, "<function_calls>\nf(a='x')\ng()\n</function_calls>", ("", "", [("f", '{"a": "x"}'), ("g", "{}")])),
    (PHI, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', ("", "", [("f", '{"a": 1}')])),
    # what only looks like a call
    *(
        (form, text, (text, "", list[tuple[str, str]]()))
        for form, text in (
            (TAGGED, 'Write <tool_call>{"name": "unknown", "arguments": {}}</tool_call> so.'),
            (TAGGED, '<tool_call>\n{"name": "f", "arguments": {"a": tru}}\n</tool_call>'),
            (TAGGED, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
            (TAGGED, '<tool_call>\n{"name": "f", "argu'),
            (TAGGED, "a < b, <tool"),
            (LISTED, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "unknown", "arguments": {}}]'),
            (NAMED, "[TOOL_CALLS]unknown[ARGS]{}"),
            (LLAMA, '{"name": "Ada", "parameters": 3} is JSON.'),
            (LLAMA, ' See {"name": "f", "parameters": {}}'),
            (PYTHONIC, "[f(1)] [link](url) [f(a=open('x'))]"),
            (PYTHONIC, "[f(a=1, a=2)]"),
            (OLMO, "<function_calls>\nf(a=x)\n</function_calls>"),
        )
    ),
    (
        TAGGED,
        '<tool_call>{"name": "f", "arguments": {</tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": {</tool_call>', "", [("g", "{}")]),
    ),
]


def folded(reader: AnswerReader, pieces: Sequence[str]) -> Folded:
    """All that an answer says; the name of a call comes before its arguments."""
    text, reasoning, calls = "", "", list[list[str]]()
    for number, piece in enumerate([*pieces, ""]):
        said = reader.read(piece, is_last=number == len(pieces))
        text, reasoning = text + said.text, reasoning + said.reasoning
        for part in said.calls:
            if part.name:
                assert part.index == len(calls)
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
    return text, reasoning, [(name, arguments) for name, arguments in calls]


def reader_of(form: Format, **more: Any) -> AnswerReader:
    return AnswerReader(THINKING[0], format=form, names={"f", "g"}, **more)


@pytest.mark.parametrize(("form", "text", "expected"), RECORDED)
def test_recorded_answers_are_read_however_they_are_cut(form: Format, text: str, expected: Folded) -> None:
    """Each vendor's texts, whole, cut in two at every character, and character by character."""
    assert folded(reader_of(form), [text]) == expected
    assert folded(reader_of(form), list(text)) == expected
    for cut in range(len(text)):
        assert folded(reader_of(form), [text[:cut], text[cut:]]) == expected


def test_half_a_surrogate_pair_makes_no_call() -> None:
    """Python's escapes can spell what is no text: such a call stays text."""
    text = '<tool_call>f(city="\\ud800")</tool_call>'
    assert folded(reader_of(TAGGED), list(text)) == (text, "", [])


def test_beside_a_form_calls_stand_alone() -> None:
    """Where any other text has a form of its own, marks inside it are text; a call begins the answer."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text in (f"Sure {call}", '{"a": "<tool_call>f(b=1)</tool_call>"}', f" {call}"):
        assert folded(reader_of(TAGGED, is_alone=True), list(text)) == (text, "", [])
    assert folded(reader_of(TAGGED, is_alone=True), list(f"{call}\n{call}")) == ("", "", [("f", "{}"), ("f", "{}")])


@pytest.mark.parametrize("form", FORMATS)
def test_a_forced_frame_is_read_as_it_comes(form: Format) -> None:
    """The text that a grammar writes: its arguments leave before they are complete, and an unforced reader finds the same."""
    first, second = (form.head.replace("NAME", name) + given + form.tail for name, given in (("f", HI), ("g", "{}")))
    text = form.opens + form.lead + first + form.between + second + form.last
    expected = ("", "", [("f", HI), ("g", "{}")])
    assert folded(reader_of(form), list(text)) == expected
    for cut in range(len(text)):
        assert folded(reader_of(form, is_held=True), [text[:cut], text[cut:]]) == expected
    reader = reader_of(form, is_held=True)
    said = reader.read(text[: text.index("Z") + 1])
    assert "".join(part.arguments for part in said.calls) == '{"city": "Z'


_PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{", "}", "[",
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', "[f(a=1), g()]", 'g(b="x")', "f", "]", "(", '"', "'",
    "\\", " ", "\n", "; ", ", ", " hello", "<tool", "<function_calls>", "</function_calls>", "<|tool_call|>", '{"a": "\\"}"}', "é",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(_PARTS), max_size=10),
    form=st.sampled_from(FORMATS),
    thinks=st.booleans(),
    is_held=st.booleans(),
    cut=st.integers(0, 99),
)
def test_any_cut_gives_the_same_and_nothing_is_lost(
    pieces: list[str], form: Format, thinks: bool, is_held: bool, cut: int
) -> None:
    """Parts do not depend on how the text came; without a call they are the text but for the thinking block's marks."""
    text = "".join(pieces)
    whole, *others = (
        folded(reader_of(form, thinks=thinks, is_held=is_held), ways)
        for ways in ([text], list(text), [text[:cut], text[cut:]])
    )
    assert all(other == whole for other in others)
    if not whole[2]:
        marks = THINKING[0]
        if not thinks and (begun := text.lstrip()).startswith(marks[0]):
            text, thinks = begun.removeprefix(marks[0]), True
        text = text.replace(marks[1], "", 1) if thinks else text
        assert "".join((whole[1] + whole[0]).split()) == "".join(text.split())


def test_a_format_is_known_by_its_template() -> None:
    """Each mark finds its row, a template without one none, and XML inside of tags is another format."""
    assert [format_of(f"x{form.mark}y") for form in FORMATS] == list(FORMATS)
    assert format_of(CHAT_TEMPLATE) is None
    assert format_of("<tool_call>\n<function=") is None


# -- rendering

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {}, "strict": True}}
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "é"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "sun"},
]
PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"


def test_a_template_without_tools_gets_a_default_rendering() -> None:
    """The tools stand in the system's message, which is there or is added; calls and results in messages of all templates."""
    chat = ChatTemplate(PLAIN, "", "", ())
    (text,) = chat.render(HISTORY, [WEATHER])
    assert text.startswith("[system|# Tools")
    assert json.dumps(WEATHER) in text
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "é"}}\n</tool_call>'
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert text.endswith(f"[user|hi][assistant|{call}\n{call}][user|{results}]")
    assert chat.render([{"role": "system", "content": "Be brief."}], [WEATHER])[0].startswith(
        "[system|Be brief.\n\n# Tools"
    )
    assert chat.render(HISTORY, None)[0].startswith("[user|hi][assistant|<tool_call>")
    assert chat.format is TAGGED


def test_a_template_with_tools_lays_them_out_itself() -> None:
    """Tools, calls with arguments as objects, and ids of nine characters, as Mistral's templates want them."""
    template = (
        "[TOOL_CALLS]{% for t in tools %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}{{ m.role }}"
        "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments.city }}{% endfor %}{{ m.tool_call_id }};{% endfor %}"
    )
    chat = ChatTemplate(template, "", "", ())
    (text,) = chat.render(HISTORY, [WEATHER])
    id = text.partition("assistant")[2][:9]
    assert text == f"[TOOL_CALLS]<get_weather>user;assistant{id}é{id}é;tool{id};tool{id};"
    assert id.isalnum()
    assert chat.format is LISTED


PHI4 = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)  # Phi-4-mini's


def test_a_template_that_reads_tools_in_the_system_s_message_gets_them_there() -> None:
    """As JSON, with the calls of before in the model's own frame, and results as messages of their role."""
    chat = ChatTemplate(PHI4, "", "", ())
    (text,) = chat.render(HISTORY, [WEATHER])
    tools = json.dumps([WEATHER["function"]])
    call = '{"name": "get_weather", "arguments": {"city": "\\u00e9"}}'
    assert text == (
        f"<|system|>You are a helpful assistant with some tools.<|tool|>{tools}<|/tool|><|end|><|user|>hi<|end|>"
        f"<|assistant|><|tool_call|>[{call}, {call}]<|/tool_call|><|end|><|tool|>rain<|end|><|tool|>sun<|end|><|assistant|>"
    )
    assert chat.format is PHI
    (text,) = chat.render([{"role": "system", "content": "Be brief."}, HISTORY[0]], [WEATHER])
    assert text.startswith(f"<|system|>Be brief.<|tool|>{tools}<|/tool|><|end|>")
    assert chat.render(HISTORY[:1], None)[0] == "<|user|>hi<|end|><|assistant|>"


def test_a_template_may_name_the_tools_xml_tools() -> None:
    """As SmolLM3's does, which writes calls as Hermes."""
    template = "{% if xml_tools %}{% for t in xml_tools[:] %}{{ t | string }}{% endfor %}<tool_call>{% endif %}{{ messages[0].content }}"
    chat = ChatTemplate(template + "{% for c in messages[0].tool_calls %}{% endfor %}", "", "", ())
    (text,) = chat.render([{"role": "user", "content": "hi"}], [WEATHER])
    assert "get_weather" in text
    assert text.endswith("<tool_call>hi")
    assert chat.format is TAGGED


# -- in the engine


class Model:
    """An engine on a random model whose tokenizer and template are of a family."""

    def __init__(self, engine: Engine, template: str, *tokens: str, special: bool = False) -> None:
        backend = make_tokenizer(320 - len(tokens))
        backend.add_tokens([AddedToken(token, special=special) for token in tokens])
        engine.tokenizer = Tokenizer(backend, bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=template)
        engine.grammars = Grammars(engine.tokenizer, engine.info.vocabulary_size, frozenset({2}))
        self.engine = engine

    def submit(self, params: SamplingParams, **asked: Any) -> int:
        """Ask for an answer; the tools are not in the prompt, which has to be short."""
        messages = [{"role": "user", "content": "hi"}]
        request = GenerateRequest(messages=messages, sampling=params, **asked)
        wanted = self.engine.tokenizer.grammar_of(request)
        grammar = self.engine.grammars.compiled(wanted, b"") if wanted is not None else None
        prompt = self.engine.tokenizer.encode_chat(messages, None)
        return self.engine.submit(prompt, params, grammar=grammar, reads=request)

    def answers(self) -> dict[int, tuple[Folded, str | None]]:
        found: dict[int, Any] = {}
        while self.engine.has_work:
            for step in self.engine.step():
                assert step.error is None, step.error
                said, calls, _ = found.setdefault(step.id, (["", ""], [], None))
                said[0] += step.output.text
                said[1] += step.output.reasoning
                for part in step.output.calls:
                    if part.name:
                        calls.append([part.name, ""])
                    calls[part.index][1] += part.arguments
                found[step.id] = (said, calls, step.output.finish_reason)
            self.engine.check_integrity()
        return {
            id: ((said[0], said[1], [(name, given) for name, given in calls]), reason)
            for id, (said, calls, reason) in found.items()
        }


def drawn(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "seed": seed, "max_tokens": 150, **more})


TEMPLATES = [CHAT_TEMPLATE, *(f"{CHAT_TEMPLATE}{{# {form.mark} #}}" for form in FORMATS)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_forced_call_is_made_in_every_format(make_engine: Any, template: str) -> None:
    """Required or named, a random model calls a tool of the request with arguments of its schema, and says nothing else."""
    model = Model(make_engine("llama-wide"), template, "[TOOL_CALLS]", "[ARGS]", special=True)
    asked = {
        model.submit(drawn(seed), tools=[WEATHER, CLOCK], tool_choice=choice, calls_max=most): (choice, most)
        for seed, (choice, most) in enumerate([(ANY_TOOL, 0), (ANY_TOOL, 1), ("clock", 1), ("get_weather", 1)] * 2)
    }
    ended = 0
    for id, ((text, reasoning, calls), reason) in model.answers().items():
        choice, most = asked[id]
        assert reasoning == ""
        assert {name for name, _ in calls} <= ({"get_weather", "clock"} if choice == ANY_TOOL else {choice})
        if reason == "stop":
            ended += 1
            assert text == ""
            assert len(calls) >= 1
            assert not most or len(calls) == most
            for name, given in calls:
                arguments = json.loads(given)
                assert (
                    arguments == {} if name == "clock" else (set(arguments) == {"city"} and len(arguments["city"]) <= 4)
                )
    assert ended > 3


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_forced_call_that_is_cut_leaves_no_text(make_engine: Any, template: str) -> None:
    """After any number of tokens: the beginning of a frame is no text of the answer."""
    model = Model(make_engine("llama-wide"), template, "[TOOL_CALLS]", "[ARGS]", special=True)
    for tokens in range(1, 30, 4):
        model.submit(drawn(tokens, max_tokens=tokens), tools=[WEATHER], tool_choice=ANY_TOOL)
    assert {text for (text, _, _), _ in model.answers().values()} == {""}


def test_a_strict_tool_is_held_where_the_model_begins_a_call(make_engine: Any) -> None:
    """In auto, text is free; what follows the mark is a call that fits the schema; an answer's own form is the other way."""
    model = Model(make_engine(), f"{CHAT_TEMPLATE}{{# <tool_call> #}}", "<tool_call>")
    wanted = model.engine.tokenizer.grammar_of(GenerateRequest(messages=[], tools=[WEATHER, CLOCK]))
    assert wanted is not None
    assert model.engine.tokenizer.grammar_of(GenerateRequest(messages=[], tools=[WEATHER])) is None
    answer = GrammarState(model.engine.grammars.compiled(wanted, b""), None)
    spell = model.engine.tokenizer.encode
    for token in spell("hi <tool_call", is_rendered=True):
        answer.take(token)
    for token in spell('> <tool_call>\n{"name": "clock", "arguments": ', is_rendered=True)[2:]:
        answer.take(token)
    assert model.engine.tokenizer.decode(answer.forced()).startswith("{}}\n</tool_call>")
    form = Grammar("choice", '["yes"]')
    ids = [model.submit(drawn(seed), tools=[WEATHER], grammar=form) for seed in range(6)]
    answers = model.answers()
    for id in ids:
        (text, _, calls), reason = answers[id]
        assert reason == "length" or (text == "yes") != bool(calls)


def test_other_tokens_may_not_spell_a_mark(make_engine: Any) -> None:
    """A mark that is a token of its own begins a call that is held; spelled by others it would begin one that is not."""
    model = Model(make_engine(), f"{CHAT_TEMPLATE}{{# <tool_call> #}}", "<tool_call>", special=True)
    wanted = model.engine.tokenizer.grammar_of(GenerateRequest(messages=[], tools=[CLOCK]))
    assert wanted is not None
    answer = GrammarState(model.engine.grammars.compiled(wanted, b""), None)
    for token in model.engine.tokenizer.encode("hi <tool_call", is_rendered=True):
        answer.take(token)
    (end,) = model.engine.tokenizer.encode(">", is_rendered=True)[-1:]
    assert answer.part((end,)) == ()


def test_an_unknown_schema_of_a_tool_is_refused_by_name(make_engine: Any) -> None:
    """The refusal has the tool and the keyword."""
    model = Model(make_engine(), CHAT_TEMPLATE)
    tool = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"not": {}}}}}}
    with pytest.raises(InvalidRequest, match=r"in the tool odd: .*keyword not \(#/properties/a/not\)"):
        model.submit(drawn(1), tools=[tool], tool_choice="odd")


@pytest.mark.parametrize(
    ("parameters", "is_taken"),
    [
        ({"type": "array", "items": {"const": 1}}, False),
        ({"type": ["array", "null"]}, False),
        ({"type": ["object", "null"], "properties": {"a": {"const": 1}}, "required": ["a"]}, True),
        ({"properties": {"a": {"const": 1}}, "allOf": [{"properties": {"b": {"const": 2}}, "required": ["b"]}]}, True),
        ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"]}, True),
    ],
)
def test_arguments_are_an_object(make_engine: Any, parameters: dict[str, Any], is_taken: bool) -> None:
    """Parameters of another type are refused; properties that a schema names elsewhere are not shut out."""
    model = Model(make_engine("llama-wide"), CHAT_TEMPLATE)
    tool = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    if not is_taken:
        with pytest.raises(InvalidRequest, match="the parameters of the tool odd must be an object"):
            model.submit(drawn(1), tools=[tool], tool_choice="odd")
        return
    model.submit(drawn(1), tools=[tool], tool_choice="odd")
    ((_, _, calls), reason) = next(iter(model.answers().values()))
    assert reason != "stop" or isinstance(json.loads(calls[0][1]), dict)


THINKER = CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, THINKER])
def test_a_form_holds_after_the_thinking_block(make_engine: Any, template: str) -> None:
    """A random model thinks freely, also where its template opens the block; then the schema or the forced call holds."""
    model = Model(make_engine("llama-wide"), template, "<think>", "</think>")
    opens, closes = (model.engine.tokenizer.encode(mark, is_rendered=True)[0] for mark in THINKING[0])
    bias = {opens: 12.0 if template is CHAT_TEMPLATE else 0.0, closes: 7.0}
    asked: dict[int, str] = {}
    for seed in range(8):
        kind = ("free", "form", "call")[seed % 3]
        more: dict[str, Any] = {"free": {}, "form": {"grammar": Grammar("choice", '["yes", "no"]')}}.get(kind, {})
        more |= {"tools": [CLOCK], "tool_choice": "clock", "calls_max": 1} if kind == "call" else {}
        asked[model.submit(drawn(seed, logit_bias=bias), **more)] = kind
    answers = model.answers()
    assert sum(bool(reasoning) for (_, reasoning, _), _ in answers.values()) > 2
    held = 0
    for id, ((text, _, calls), reason) in answers.items():
        if reason == "stop" and asked[id] != "free":
            held += 1
            assert (text in ("yes", "no")) if asked[id] == "form" else (text, calls) == ("", [("clock", "{}")])
    assert held > 1


def test_a_user_cannot_open_the_thinking_block(make_engine: Any) -> None:
    """A message that ends with the mark leaves the answer outside of the block, so that its form holds from the start."""
    tokenizer = Model(make_engine(), CHAT_TEMPLATE, "<think>", "</think>").engine.tokenizer
    for content in ("x <think>", "x <think>\n", "x </think>"):
        found = tokenizer.thinking(tokenizer.encode_chat([{"role": "user", "content": content}], None))
        assert found is not None
        assert (found.is_open, found.may_open) == (False, True)
    thinker = Model(make_engine(), THINKER, "<think>", "</think>").engine.tokenizer
    for prefix, is_open in (("", True), ("so far", False)):
        prompt = thinker.encode_chat([{"role": "user", "content": "x"}], None, prefix=prefix)
        found = thinker.thinking(prompt, is_continued=bool(prefix))
        assert found is not None
        assert (found.is_open, found.may_open) == (is_open, False)


def test_stop_strings_leave_calls_and_thinking_whole(make_engine: Any) -> None:
    """A stop string ends the text, and no part of a call or of a thinking block, nor a choice that a grammar holds."""
    model = Model(make_engine(), CHAT_TEMPLATE)
    params = drawn(3, stop=(",", "city", '"'))
    model.submit(params, tools=[WEATHER], tool_choice=ANY_TOOL, calls_max=1)
    model.submit(params, grammar=Grammar("choice", '["a, b"]'))
    (call, _), (choice, reason) = model.answers().values()
    assert set(json.loads(call[2][0][1])) == {"city"}
    assert (choice[0], reason) == ("a, b", "stop")
