"""Which requests share a key, which only a compat, and which nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cache import Fingerprint, fingerprint, partition
from cache.fingerprint import CONTEXT_CHARS_MAX, FIELDS, FieldKind

ACME = partition(b"secret", "team:1")
BODY: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}],
}
# Every field of OpenAI's chat completion reference, written out here so that the table can't shrink unseen: a value it may have.
CHAT_FIELDS: dict[str, Any] = {
    "audio": {"voice": "ash", "format": "mp3"},
    "frequency_penalty": 0.5,
    "function_call": "none",
    "functions": [{"name": "f", "parameters": {}}],
    "logit_bias": {"50256": -100},
    "logprobs": True,
    "max_completion_tokens": 7,
    "max_tokens": 7,
    "metadata": {"run": "1"},
    "modalities": ["text"],
    "model": "large",
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "u",
    "seed": 1,
    "service_tier": "flex",
    "stop": ["\n"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 3,
    "top_p": 0.5,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
}
NOT_IN_KEY = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "user",
}


def fp(body: dict[str, Any], namespace: str = "") -> Fingerprint:
    return fingerprint(body, ACME, namespace)


def with_text(text: str) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    body["messages"][-1]["content"] = text
    return body


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS))
def test_each_known_field_changes_the_key_or_does_not(name: str) -> None:
    """A field with meaning changes exact and compat; one about delivery changes neither; null is the same as absent."""
    assert name in FIELDS
    changed = fp({**BODY, name: CHAT_FIELDS[name]})
    assert (changed.exact == fp(BODY).exact) is (name in NOT_IN_KEY)
    assert (changed.compat == fp(BODY).compat) is (name in NOT_IN_KEY)
    if name != "model":
        assert fp({**BODY, name: None}) == fp(BODY)


def test_the_table_has_no_delivery_field_that_this_file_does_not_name() -> None:
    """A field leaves the key only on purpose."""
    assert {name for name, kind in FIELDS.items() if kind is FieldKind.DELIVERY} == NOT_IN_KEY | {"cache"}


@given(st.text(min_size=1).filter(lambda name: name not in FIELDS), st.none() | st.integers() | st.text())
def test_an_unknown_field_changes_the_key(name: str, value: Any) -> None:
    """The table is a deny-list: what is not in it counts, whatever its value."""
    try:
        changed = fp({**BODY, name: value})
    except ValueError:
        assume(False)
    assert changed.exact != fp(BODY).exact
    assert changed.compat != fp(BODY).compat


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    # characters that JSON escapes, to look for collisions where encodings differ from texts
    | st.text(alphabet='ab"\\,:[]{}\x00é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='ab"\\,', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def canonical(value: Any) -> Any:
    """The meaning of a JSON value as plain equality sees it; True is not 1."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, dict):
        return ("map", tuple(sorted((key, canonical(item)) for key, item in value.items())))
    if isinstance(value, list):
        return ("list", tuple(canonical(item) for item in value))
    return (type(value).__name__ if not isinstance(value, int | float) else "number", value)


@settings(max_examples=400)
@given(json_values, json_values)
def test_two_values_have_one_key_only_if_they_are_equal(one: Any, other: Any) -> None:
    """No two different requests collide: the encoding is injective (up to how JSON numbers are equal)."""
    if fp({**BODY, "tools": one or [1]}).exact == fp({**BODY, "tools": other or [1]}).exact:
        assert canonical(one or [1]) == canonical(other or [1])


@given(json_values, st.randoms())
def test_the_order_of_a_map_does_not_matter(value: Any, rng: random.Random) -> None:
    """Shuffling every map, and the body itself, changes nothing."""

    def shuffled(item: Any) -> Any:
        if isinstance(item, dict):
            pairs = list(item.items())
            rng.shuffle(pairs)
            return {key: shuffled(inner) for key, inner in pairs}
        return [shuffled(inner) for inner in item] if isinstance(item, list) else item

    body = {**BODY, "tools": value}
    assert fp(shuffled(body)) == fp(body)


@pytest.mark.parametrize("place", ["response_format", "tools"])
def test_the_order_of_a_schemas_properties_matters(place: str) -> None:
    """A model writes them in it: an answer before its reasons is another one. No list stands for them."""
    pairs = [["reasons", {"type": "string"}], ["answer", {"type": "string"}]]
    forms = [dict(pairs), dict(reversed(pairs)), pairs, {"": pairs}, [*reversed(pairs)], None, {}, [], {"": []}]
    keys = {fp({**BODY, place: [{"schema": {"type": "object", "properties": form}}]}).exact for form in forms}
    assert len(keys) == len(forms)


@given(st.integers(-(2**53), 2**53))
def test_a_whole_float_is_the_integer(number: int) -> None:
    """1 and 1.0 are one JSON number, wherever they stand."""
    assert fp({**BODY, "seed": float(number)}) == fp({**BODY, "seed": number})
    assert fp({**BODY, "tools": [{"x": [float(number)]}]}) == fp({**BODY, "tools": [{"x": [number]}]})


def test_true_is_not_one_and_text_is_not_a_number() -> None:
    """Types count."""
    keys = {fp({**BODY, "seed": value}).exact for value in (1, True, "1", [1], {"1": 1}, 0, False, "", [], {})}
    assert len(keys) == 10


def test_large_integers_are_told_apart() -> None:
    """Beyond what a double holds, integers are compared digit by digit."""
    assert fp({**BODY, "seed": 2**70}).exact != fp({**BODY, "seed": 2**70 + 1}).exact


turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=8)},
    optional={"name": st.none() | st.text(max_size=3)},
)


@given(st.lists(turns, min_size=1, max_size=5), st.lists(turns, min_size=1, max_size=5))
def test_the_chain_of_a_dialogue_is_a_prefix_of_its_continuations(start: list[Any], more: list[Any]) -> None:
    """One digest a turn, the last is the exact key, and going on appends."""
    short, long = fp({**BODY, "messages": start}), fp({**BODY, "messages": start + more})
    assert len(short.chain) == len(start)
    assert short.chain[-1] == short.exact
    assert long.chain[: len(start)] == short.chain
    assert len(set(long.chain)) == len(long.chain)


@given(st.lists(turns, min_size=1, max_size=4), st.lists(turns, min_size=1, max_size=4))
def test_different_dialogues_have_different_chains(one: list[Any], other: list[Any]) -> None:
    """Moving text across turns, or a boundary within them, makes another key."""

    def meaning(dialogue: list[Any]) -> list[Any]:
        return [{name: value for name, value in turn.items() if value is not None} for turn in dialogue]

    assert (fp({**BODY, "messages": one}).exact == fp({**BODY, "messages": other}).exact) is (
        meaning(one) == meaning(other)
    )


@given(st.text(min_size=1), st.text(min_size=1))
def test_compat_ignores_the_last_user_text_and_nothing_else(one: str, other: str) -> None:
    """Two requests that differ in their last words share the compat; exact keys differ iff the words do."""
    try:
        first, second = fp(with_text(one)), fp(with_text(other))
    except ValueError:
        assume(False)
    assume(first.text is not None and second.text is not None)
    assert first.compat == second.compat
    assert (first.exact == second.exact) is (one == other)
    assert first.compat not in (first.exact, *first.chain)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "large"},
        {"temperature": 0.1},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "developer", "content": "Be brief."}, BODY["messages"][1]]},
        {"messages": [BODY["messages"][1]]},
        {"messages": [*BODY["messages"], {"role": "assistant", "content": "2"}, BODY["messages"][1]]},
        {"messages": [BODY["messages"][0], {**BODY["messages"][1], "name": "bob"}]},
        {"messages": [BODY["messages"][0], {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]}]},
    ],
)
def test_compat_changes_with_everything_else(change: dict[str, Any]) -> None:
    """Model, parameters, tools, the roles of earlier turns and the shape of the last one are byte for byte."""
    assert fp({**BODY, **change}).compat != fp(BODY).compat


def test_the_texts_of_earlier_turns_are_apart_from_compat() -> None:
    """They are the context, in order; what a prompt with the same words must have has them byte for byte."""
    one, other = (
        fp({**BODY, "messages": [{"role": "system", "content": text}, BODY["messages"][1]]})
        for text in ("Be brief.", "Be long.")
    )
    assert one.compat == other.compat
    assert one.words != other.words
    assert (one.context, other.context) == ("system\nBe brief.", "system\nBe long.")


@pytest.mark.parametrize("text", ["x" * CONTEXT_CHARS_MAX, "a\0user\nb"])
def test_a_context_that_cannot_be_compared_is_in_compat(text: str) -> None:
    """One that is too long, or has the mark between turns, is compared as bytes."""
    one, other = (
        fp({**BODY, "messages": [{"role": "system", "content": text + end}, BODY["messages"][1]]}) for end in "ab"
    )
    assert one.context == other.context == ""
    assert one.compat != other.compat


def test_the_ids_of_tool_calls_are_their_places_in_compat() -> None:
    """Two dialogues with the same calls share a compat whatever their ids; another call's result does not."""

    def called(first: str, second: str, answered: str) -> Fingerprint:
        calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in (first, second)]
        turns = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": answered, "content": "1"}]
        return fp({**BODY, "messages": [BODY["messages"][0], *turns, BODY["messages"][1]]})

    assert called("a", "b", "a").compat == called("c", "d", "c").compat != called("c", "d", "d").compat


def test_an_image_beside_the_text_is_in_compat() -> None:
    """One text among parts is the text; the other parts must be equal."""

    def ask(text: str, url: str) -> Fingerprint:
        parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
        return fp({**BODY, "messages": [{"role": "user", "content": parts}]})

    assert ask("What is this?", "a").text == "What is this?"
    assert ask("What is this?", "a").compat == ask("What's that?", "a").compat
    assert ask("What is this?", "a").compat != ask("What is this?", "b").compat


def test_a_placeholder_in_the_text_fools_nobody() -> None:
    """A text that looks like the blanked one is still a text."""
    assert fp(with_text("0")).compat == fp(BODY).compat
    blanked = {**BODY, "messages": [BODY["messages"][0], {"role": "user", "content": 0}]}
    assert fp(blanked).text is None
    assert fp(blanked).compat not in (fp(BODY).compat, fp(blanked).exact)


@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": "hello"},
        {"role": "tool", "content": "hello", "tool_call_id": "1"},
        {"role": "user", "content": ""},
        {"role": "user", "content": " \n"},
        {"role": "user", "content": None},
        {"role": "user", "content": "x" * 32_769},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
    ],
)
def test_what_has_no_one_user_text_is_not_eligible_for_meaning(last: Any) -> None:
    """No text, and a compat that nothing else has."""
    got = fp({**BODY, "messages": [last]})
    assert got.text is None
    assert got.compat != fp(BODY).compat


def test_partition_and_namespace_are_in_every_digest() -> None:
    """Nothing of one tenant's, or one namespace's, equals anything of another's."""
    mine, other = fp(BODY), fingerprint(BODY, partition(b"secret", "team:2"))
    named = fp(BODY, "n")
    for one, two in ((mine, other), (mine, named), (other, named)):
        assert not {one.exact, one.compat, *one.chain} & {two.exact, two.compat, *two.chain}
    assert (
        fp({**BODY, "cache": {"namespace": "n"}}) == mine
    )  # the gateway hands the namespace over, it is not read here


def test_a_namespace_can_not_run_into_the_request() -> None:
    """Concatenation tricks: a namespace that ends like the head begins is another key."""
    assert fp({"model": "b", "messages": []}, "a").exact != fp({"model": "ab", "messages": []}, "").exact
    assert fp({"messages": []}, '","messages').exact != fp({"messages": []}, "").exact


def test_partitions_are_keyed() -> None:
    """Another secret or scope is another partition; there is none without a secret."""
    partitions = {partition(secret, scope) for secret in (b"a", b"b", b"c" * 100) for scope in ("1", "2", "")}
    assert len(partitions) == 9
    assert all(len(one) == 16 for one in partitions)
    with pytest.raises(ValueError, match="secret"):
        partition(b"", "team:1")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1: 2}, {"a", "b"}, "\ud800", object()])
def test_what_json_can_not_say_is_refused(value: Any) -> None:
    """A ValueError, never a silent collision."""
    with pytest.raises(ValueError, match="not a JSON request"):
        fp({**BODY, "tools": [value]})


def test_a_completion_is_found_by_its_very_words_only() -> None:
    """However its prompt is given, and whatever else the body holds."""
    prompts = ["Why?", ["Why?"], ["Why?", "How?"], [87, 63], [[87, 63]], [[87], [63]], "[87,63]"]
    bodies: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    bodies += [{"prompt": "Why?", **more} for more in ({"": 1}, {"input": "Why?"}, {"messages": "Why?"})]
    asked = [fp({"model": "m", **body}) for body in bodies]
    assert len({one.exact for one in asked}) == len({one.compat for one in asked}) == len(asked)
    assert [one.text for one in asked] == [None] * len(asked)
