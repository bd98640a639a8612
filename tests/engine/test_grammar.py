"""Answers with a grammar: whatever the model's logits are, what ends by itself matches; what cannot be held is refused."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from bench.structured import draw_schema, faults
from local_engine.apart.process import Apart
from local_engine.engine import Engine
from local_engine.grammar import SIZE_MAX_BYTES, Compiled, GrammarState
from local_engine.messages import FinishReason, Grammar, InvalidRequest, SamplingParams
from local_engine.sampler import ban
from tests.engine.checkpoints import random_prompt
from tests.engine.conftest import at_fixed_prices, greedy, run

Make = Callable[..., Engine]
Ended = dict[int, tuple[str, FinishReason]]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "is_member": {"type": "boolean"}},
    "required": ["name", "is_member"],
    "additionalProperties": False,
}


def compiled(engine: Engine, wanted: Any, kind: Any = "json") -> Compiled:
    """A grammar: a schema as a value, anything else as a text."""
    return engine.grammars.compiled(Grammar(kind, wanted if isinstance(wanted, str) else json.dumps(wanted)), b"")


def drain(engine: Engine) -> Ended:
    """Step until nothing is left; each answer's text and why it ended."""
    texts: dict[int, str] = {}
    ended: Ended = {}
    while engine.has_work:
        for step in engine.step():
            assert step.error is None, step.error
            texts[step.id] = texts.get(step.id, "") + step.output.text
            if step.output.finish_reason is not None:
                ended[step.id] = texts[step.id], step.output.finish_reason
        engine.check_integrity()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 8])
def test_drawn_schemas_hold_whatever_the_logits(make_engine: Make, drafts: int) -> None:
    """A random model under drawn schemas, batched with free text: all that ends by itself is valid, drafts or none, in a
    pool so small that sequences are preempted."""
    engine = at_fixed_prices(make_engine(draft_tokens_max=drafts, kv_blocks=96))
    draw = random.Random(11)
    asked: dict[int, dict[str, Any]] = {}
    refusals: list[str] = []
    for seed in range(40):
        schema = draw_schema(draw)
        try:
            grammar = compiled(engine, schema)
        except InvalidRequest as error:
            refusals.append(str(error))
            continue
        params = SamplingParams(temperature=draw.choice((0.0, 0.7, 3.0)), max_tokens=draw.choice((20, 90)), seed=seed)
        asked[engine.submit(random_prompt(seed, 12), params, grammar=grammar)] = schema
        engine.submit(random_prompt(seed, 9), greedy(15))
    assert all("nsatisfiable" in one for one in refusals), refusals
    ended = drain(engine)
    assert engine.load().preemptions_total > 0
    wrong = {ended[id]: faults(schema, ended[id][0]) for id, schema in asked.items() if ended[id][1] == "stop"}
    assert len(wrong) > 10
    assert not {answer: fault for answer, fault in wrong.items() if fault}


def test_drafts_change_no_answer(make_engine: Make) -> None:
    """What a grammar forces takes no step, with drafts and without; a seed draws the same where log probabilities have every
    token take one."""
    answers = []
    for drafts, logprobs in ((0, None), (8, None), (8, 1)):
        engine = at_fixed_prices(make_engine(draft_tokens_max=drafts))
        params = SamplingParams(temperature=1.5, seed=3, max_tokens=60, logprobs=logprobs)
        for _ in range(2):
            engine.submit(random_prompt(5, 20), params, grammar=compiled(engine, PERSON))
        answers.append(set(drain(engine).values()))
        assert (engine.load().accepted_tokens_total.get("grammar", 0) > 10) == (logprobs is None)
    assert len(answers[0]) == 1
    assert answers[0] == answers[1] == answers[2]


def test_a_grammar_with_which_an_answer_failed_is_compiled_anew(make_engine: Make) -> None:
    """The library keeps the states of all answers together: where they are used up, each later one would fail."""
    engine = make_engine()
    first = compiled(engine, {"type": "string", "maxLength": 300})
    assert compiled(engine, {"type": "string", "maxLength": 300}) is first
    with pytest.raises(InvalidRequest, match="too complex to go on"):
        GrammarState(first, None).take(engine.tokenizer.encode("x")[0])
    assert compiled(engine, {"type": "string", "maxLength": 300}) is not first


def test_masks_leave_what_they_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with masks beside free ones, by the native kernel and by torch alike, the last odd tokens and the sums too."""
    logits = torch.randn(4, 79, generator=torch.manual_seed(1))
    bits = np.random.default_rng(2).integers(-(2**31), 2**31, (3, 3)).astype(np.int32)
    held = [(3, 0), (0, 2)]
    expected = logits.clone()
    for row, at in held:
        for token in range(79):
            if not bits[at, token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr("local_engine.sampler.native_for", lambda *_: None)
        own, total = logits.clone(), torch.full((4, 1), 7.0)
        ban(own, held, lambda: bits, total)
        assert torch.equal(own, expected)
        expected_total = torch.where(expected.isinf().any(-1, keepdim=True), expected.logsumexp(-1, keepdim=True), 7.0)
        torch.testing.assert_close(total, expected_total)


def test_free_answers_are_those_of_an_engine_without_grammars(make_engine: Make) -> None:
    """Free text beside answers with a schema is what it is alone, log probabilities included to the last bit."""
    prompt, alone = random_prompt(8, 30), make_engine(draft_tokens_max=0)
    params = greedy(20, logprobs=3)
    first = alone.submit(prompt, params)
    others = [random_prompt(seed, 10) for seed in range(3)]
    for other in others:
        alone.submit(other, greedy(20, min_tokens=20))
    expected = _outputs(alone)[first]
    beside = make_engine(draft_tokens_max=0)
    second = beside.submit(prompt, params)
    long = {"type": "array", "items": {"type": "integer"}, "minItems": 60}
    for other in others:
        beside.submit(other, greedy(20), grammar=compiled(beside, long))
    assert _outputs(beside)[second] == expected


def _outputs(engine: Engine) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    while engine.has_work:
        for step in engine.step():
            found.setdefault(step.id, []).extend((*step.output.logprobs, step.output.text))
    return found


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-c]{2,4}@x\.com", r"[a-c]{2,4}@x\.com"),
        ("choice", '["yes", "no", "näin \\"on\\"", "\\n"]', 'yes|no|näin "on"|\n'),
        ("choice", '[""]', ""),
        ("regex", "", ""),
        ("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/', "a[0-9]{2}"),
        ("grammar", 'root ::= "a" ("b" | "c") "d"', "a[bc]d"),
        ("json", '{"type": "string", "maxLength": 0}', '""'),
        ("json", '{"const": "\\ud83d\\ude00 \\u0000 é"}', '"😀 \\\\u0000 é"'),
        ("json", '{"const": "a<|im_end|> <|im_start|>"}', r'"a<\|im_end\|> <\|im_start\|>"'),
        ("choice", '["<|im_end|>", "<|endoftext|>b"]', r"<\|im_end\|>|<\|endoftext\|>b"),
        ("regex", r"<\|im_end\|>hello", r"<\|im_end\|>hello"),
        ("regex", r"[{]\{20000}(b{2}|[)]){2}\x{20000}{2,3}", r"\{\{20000}(bb|\)){2}\U00020000{2,3}"),
        (
            "json",
            '{"minimum": 9007199254740990, "maximum": 9007199254740991, "default": 9007199254740993, "type": "integer"}',
            r"900719925474099[01]",
        ),
    ],
)
def test_each_kind_of_grammar_is_matched_whole(make_engine: Make, kind: str, text: str, pattern: str) -> None:
    """Expressions, choices, Lark, GBNF, and answers that are empty, from a model without sense."""
    engine = make_engine()
    grammar = compiled(engine, text, kind)
    for seed in range(4):
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=80, min_tokens=40, logit_bias={2: -100.0})
        engine.submit(random_prompt(seed, 10), params, grammar=grammar)
    for said, reason in drain(engine).values():
        assert reason == "stop"
        assert re.fullmatch(pattern, said), said


def test_nothing_but_the_grammar_ends_a_json_answer(make_engine: Make) -> None:
    """Stop strings and stop tokens inside it do not cut it; `ignore_eos` does not prolong it."""
    engine = make_engine()
    quote = engine.tokenizer.encode('"', is_rendered=True)[0]
    for seed in range(4):
        params = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=80, stop=("name", "}", '"'), stop_token_ids=(quote,), ignore_eos=True
        )
        engine.submit(random_prompt(seed, 10), params, grammar=compiled(engine, PERSON))
    for said, reason in drain(engine).values():
        assert (reason, faults(PERSON, said)) == ("stop", None)


def test_a_cut_answer_says_so(make_engine: Make) -> None:
    """The limit in the middle of a value is `length`; it is a beginning of a valid answer."""
    engine = make_engine()
    id = engine.submit(random_prompt(1, 10), greedy(7), grammar=compiled(engine, PERSON))
    said, reason = drain(engine)[id]
    assert reason == "length"
    assert '{"name": "'.startswith(said[:10])


def test_log_probabilities_are_the_model_s_own(make_engine: Make) -> None:
    """A forced token has the log probability that the model gave it, and the likeliest beside it."""
    engine = make_engine()
    engine.submit(random_prompt(3, 10), greedy(5, logprobs=2), grammar=compiled(engine, ["x"], "choice"))
    ((first, *_),) = _outputs(engine).values()
    assert first.raw == b"x"
    assert first.logprob < first.top[0].logprob


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"items": {"not": {}}}}}, "keyword not (#/properties/a/items/not)"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf (#/oneOf), whose branches may overlap; anyOf is"),
        ({"properties": {"a": {"const": 1e300}}}, "1e+300 exactly: it is over 2^53 - 1 (#/properties/a)"),
        ({"type": "integer", "minimum": 1e19}, "1e+19 exactly"),
        ({"const": [{"a": -9_007_199_254_740_992}]}, "-9007199254740992 exactly"),
        (
            {"anyOf": [{"type": "null"}, {"items": {"pattern": "^[ab](?:a{50}b{50}){400}$"}}]},
            "20,000 times; it holds 16,384 (#/anyOf/1/items)",
        ),
        ({"patternProperties": {"((a{30}){30}){30}": {}}}, "27,000 times"),
        ({"type": "string", "minLength": 20_000}, "20,000 times"),
        ({"type": "object", "not": {}, "x-guidance": {"lenient": True}}, "not"),
        ({"type": "string", "pattern": "^(?=a)"}, "look-ahead"),
        ({"$ref": "file:///etc/passwd"}, "passwd"),
        ({"type": "object", "minProperties": 2, "patternProperties": {"^a": {}}}, "minProperties above"),
        ({"properties": {"a": {"enum": [1, 9_007_199_254_740_993]}}}, "9007199254740993 exactly"),
        ({"$ref": "#"}, "nothing matches it"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "nsatisfiable"),
        ({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]}, "too"),
        (
            {
                "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(7_000)} | {"a7000": {}},
                "$ref": "#/$defs/a0",
            },
            "too deeply",
        ),
        ({"type": "integer", "multipleOf": 123_456_789}, "more than 2 s"),
        ({"const": "x" * SIZE_MAX_BYTES}, "may have"),
        ("[" * 2_000, "recursion|Expecting"),
        ("[]", "must be an object"),
        ('{"type": ', "Expecting"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused(make_engine: Make, schema: Any, words: str) -> None:
    """Keywords by name and place, schemas that nothing matches, and those made to take the process with them: the error says
    why, and the next schema is compiled."""
    engine = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        compiled(engine, schema)
    assert caught.value.param == "grammar"
    assert any(word in str(caught.value) for word in words.split("|")), str(caught.value)
    compiled(engine, {"type": "integer"})


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("grammar", 'start: t "b"\nt[max_tokens=3]: /.*/', "max_tokens="),
        ("grammar", 'start: t\nt[stop="x"]: /.*/', "stop="),
        ("grammar", 'start: ("a"{1000}){1000}', "1,000,000 times"),
        ("json", '{"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}', "Too many items"),
        ("regex", "^[ab]a{1000}{1000}$", "1,000,000 times"),
        ("grammar", "start: A b\nA: /[ab]/\nb: (/c{200}/ | D){200}", "40,000 times"),
        ("grammar", 'start: t "b"\nt[lazy]: /.*/', "the grammar library fails on it"),
        ("grammar", "start: <|im_end|>", "the grammar library fails on it"),
    ],
)
def test_a_grammar_that_would_end_its_answer_is_refused(make_engine: Make, kind: str, text: str, words: str) -> None:
    """Forms with which no answer could go on, or that the library fails on, are refused before a token, in a line."""
    with pytest.raises(InvalidRequest) as caught:
        compiled(make_engine(), text, kind)
    assert any(word in str(caught.value) for word in words.split("|")), str(caught.value)
    assert "backtrace" not in str(caught.value)


def test_a_long_literal_is_forced_by_pieces(make_engine: Make) -> None:
    """However long the rest of a literal is, a step tokenizes a piece of it; the pieces are the literal."""
    engine = make_engine()
    literal = "東é the fox <|im_end|> " * 200
    answer = GrammarState(compiled(engine, json.dumps([literal]), "choice"), None)
    said = b""
    while not answer.is_over:
        forced = answer.forced()
        assert 0 < len(forced) < 600
        for token in forced[: max(1, len(forced) // 2)]:
            answer.take(token)
            said += engine.tokenizer.spell(token)
    assert said.decode() == literal


def test_a_format_that_is_not_known_asserts_nothing(make_engine: Make) -> None:
    """As JSON Schema has it; a property of that name is no format."""
    engine = make_engine()
    schema = {
        "type": "object",
        "properties": {"format": {"const": 1}, "a": {"type": "boolean", "format": "byte"}},
        "required": ["a", "format"],
    }
    engine.submit(random_prompt(1, 10), greedy(60), grammar=compiled(engine, schema | {"additionalProperties": False}))
    ((said, _),) = drain(engine).values()
    assert json.loads(said)["format"] == 1


def test_grammars_are_kept_by_partition_and_bounded(make_engine: Make) -> None:
    """The same schema is compiled once for a partition, and once more for another; old ones go."""
    grammars = make_engine().grammars
    wanted = Grammar("json", '{"type": "integer"}')
    first = grammars.compiled(wanted, b"a")
    assert grammars.compiled(wanted, b"a") is first
    assert grammars.compiled(wanted, b"b") is not first
    for number in range(200):
        grammars.compiled(Grammar("choice", f'["{number}"]'), b"a")
    assert grammars.compiled(wanted, b"a") is not first


def test_a_partition_pushes_out_no_other_s_grammars(make_engine: Make) -> None:
    """Many grammars, large ones, and one too large for any: what another partition asked for lately stays compiled."""
    grammars = make_engine().grammars
    wanted = Grammar("json", '{"type": "integer"}')
    first = grammars.compiled(wanted, b"quiet")
    for number in range(140):
        grammars.compiled(Grammar("choice", f'["{number}"]'), b"loud")
    for letter in "abc":
        large = Grammar("choice", f'["{letter * (SIZE_MAX_BYTES - 100)}"]')
        assert grammars.compiled(large, b"loud") is grammars.kept(large, b"loud")
    with pytest.raises(InvalidRequest, match="may have"):
        grammars.compiled(Grammar("choice", f'["{"x" * 4 * SIZE_MAX_BYTES}"]'), b"loud")
    assert grammars.compiled(wanted, b"quiet") is first
    assert grammars.kept(Grammar("choice", '["139"]'), b"loud") is None


def test_a_costly_grammar_stalls_no_other(make_engine: Make) -> None:
    """While one is compiled, another one is; what was compiled lately needs no turn."""
    grammars = make_engine().grammars
    easy = Grammar("json", '{"type": "integer"}')
    compiled_before = grammars.compiled(easy, b"a")
    costly, quick = threading.Event(), threading.Event()
    ask = Apart.ask

    def slow(self: Apart, values: Any) -> str:
        if values["text"] == "costly":
            costly.set()
            assert quick.wait(60), "the quick one waits for the costly one"
        return ask(self, values)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(Apart, "ask", slow)
        waiting = pool.submit(grammars.compiled, Grammar("regex", "costly"), b"a")
        assert costly.wait(60)
        assert grammars.kept(easy, b"a") is compiled_before
        grammars.compiled(Grammar("regex", "quick"), b"b")
        quick.set()
        waiting.result(60)


def test_an_aborted_answer_leaves_nothing(make_engine: Make) -> None:
    """A cancelled sequence with a grammar frees its blocks, and the others go on."""
    engine = make_engine()
    first, second = (
        engine.submit(random_prompt(seed, 10), greedy(60), grammar=compiled(engine, PERSON)) for seed in (1, 2)
    )
    engine.step()
    engine.step()
    engine.abort(first)
    ended = drain(engine)
    assert set(ended) == {second}
    assert engine.load().kv_blocks_used == 0


def test_text_of_grammars_is_bounded_by_no_white_space(make_engine: Make) -> None:
    """A model that would write spaces for ever cannot: values are written in one way."""
    engine = make_engine()
    space = engine.tokenizer.encode(" ", is_rendered=True)[0]
    params = SamplingParams(temperature=0.0, max_tokens=80, logit_bias={space: 100.0})
    number = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    engine.submit(random_prompt(1, 10), params, grammar=compiled(engine, number))
    ((said, reason),) = drain(engine).values()
    assert reason == "stop"
    assert re.fullmatch(r"\[(true|false), (true|false)\]", said)


def test_choices_of_one_prompt_draw_apart(make_engine: Make) -> None:
    """Two choices of one prompt share its blocks and draw apart."""
    engine = make_engine()
    grammar = compiled(engine, {"type": "integer", "minimum": 100_000, "maximum": 999_999})
    prompt = random_prompt(4, 30)
    for seed in (1, 2):
        engine.submit(prompt, SamplingParams(seed=seed, temperature=5.0), grammar=grammar)
    one, other = run(engine).values()
    assert one != other
