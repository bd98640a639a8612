"""Digests that tell which requests are equal, and which differ only in the last user text.

Pure functions from a request's JSON to digests. Knows no Redis, no HTTP and no model. Invariants:
an unknown field changes the key (`FIELDS` is a deny-list); the encoding is canonical (the order of
a map other than a schema's, 1 or 1.0, null or absent do not matter) and prefix-free (two different
requests never encode to the same bytes); the partition is part of every digest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import Any, NewType

import msgspec

Partition = NewType("Partition", bytes)
"""The 16 bytes that decide who may see an entry. `partition` derives it from the caller's
authenticated tenancy, never from a request.
"""

DIGEST_BYTES = 16
TEXT_CHARS_MAX = 32_768
"""A longer last user text is not eligible for meaning. Only a part of a long text is encoded."""

CONTEXT_CHARS_MAX = 32_768
"""A longer context is compared as bytes."""

# up to here every reader takes a float and an int of the same value for the same JSON number
_EXACT_INT_MAX = 2**53


class FieldKind(StrEnum):
    """The effect of a request's field on the answer."""

    # another value may mean another answer: part of the key; null is the same as absent
    MEANING = "meaning"
    # how the answer is sent, billed, stored or attributed: not part of the key
    DELIVERY = "delivery"
    TURNS = "turns"  # the dialogue: one link of the chain for each turn


_MEANINGS = """
    audio best_of echo frequency_penalty function_call functions ignore_eos include input instructions logit_bias
    logprobs max_completion_tokens max_output_tokens max_tokens max_tool_calls min_p min_tokens modalities model
    moderation n parallel_tool_calls prediction presence_penalty previous_response_id prompt prompt_logprobs reasoning
    reasoning_effort repetition_penalty response_format seed stop stop_token_ids suffix temperature text thinking
    tool_choice tools top_k top_logprobs top_p truncation verbosity web_search_options
"""

FIELDS: Mapping[str, FieldKind] = {
    "messages": FieldKind.TURNS,
    "cache": FieldKind.DELIVERY,
    "metadata": FieldKind.DELIVERY,
    "prompt_cache_key": FieldKind.DELIVERY,
    "prompt_cache_retention": FieldKind.DELIVERY,
    "safety_identifier": FieldKind.DELIVERY,
    "service_tier": FieldKind.DELIVERY,
    "store": FieldKind.DELIVERY,
    "stream": FieldKind.DELIVERY,
    "stream_options": FieldKind.DELIVERY,
    "user": FieldKind.DELIVERY,
    **dict.fromkeys(_MEANINGS.split(), FieldKind.MEANING),
}
"""Every field known from OpenAI's chat completions, completions and responses, and from the engines
that extend them.
"""

_DELIVERY = frozenset(name for name, kind in FIELDS.items() if kind is FieldKind.DELIVERY)

_TURNS = frozenset({"messages"})
_TURN_MEANINGS = """
    annotations audio content function_call name reasoning reasoning_content refusal role tool_call_id tool_calls
"""

TURN_FIELDS = frozenset(_TURN_MEANINGS.split())
"""Known fields of one message. All have meaning; null is the same as absent (SDKs echo an answer
with its nulls).
"""


class Fingerprint(msgspec.Struct, frozen=True):
    """The digests of a request, 16 bytes each.

    `chain` has one digest for each turn; the last is `exact`, and the chain of a dialogue is a
    prefix of the chain of its continuation. Two requests have an equal `compat` if they differ in
    nothing but the texts of their turns. `text` is the last user's text, or None unless the last
    turn is a user's with exactly one text; then `compat` is of the whole request. `context` has the
    texts before it, each as its role, a line feed and the text, with a NUL between turns. It is
    empty where `compat` has these texts, because they are too long.
    """

    partition: Partition
    exact: bytes
    compat: bytes
    chain: tuple[bytes, ...]
    text: str | None
    namespace: str = ""
    context: str = ""

    @property
    def words(self) -> bytes:
        """The digest of all that a prompt with the same words must have: every byte before them."""
        return self.compat + (self.chain[-2] if len(self.chain) > 1 else b"")

    @property
    def id(self) -> str:
        """The id of the entry that would answer this request."""
        return self.exact.hex()


def partition(secret: bytes, scope: str) -> Partition:
    """The partition of an authenticated scope such as `team:17`, keyed so that digests reveal no
    scope.

    Raises ValueError for an empty secret.
    """
    if not secret:
        raise ValueError("a partition needs a secret")
    key = secret if len(secret) <= blake2b.MAX_KEY_SIZE else blake2b(secret).digest()
    return Partition(blake2b(scope.encode(), digest_size=DIGEST_BYTES, key=key, person=b"sw.partition").digest())


def fingerprint(
    body: Mapping[str, Any], partition: Partition, namespace: str = "", keyed: Collection[str] = (), apart: Any = None
) -> Fingerprint:
    """Fingerprint the JSON of a request.

    `namespace` is the caller's own division of its partition; `keyed` names delivery fields that
    are nevertheless part of the key; `apart` is further JSON that is. Raises ValueError for values
    that JSON lacks (a NaN, bytes, a key that is not a string, a lone surrogate).
    """
    messages = body.get("messages")
    # a completion has no turns: it goes on with the very words of its `prompt`, not with their
    # meaning
    turns_field, turns = ("messages", messages) if isinstance(messages, list) else (None, [])
    left_out = _DELIVERY.difference(keyed) if keyed else _DELIVERY
    if turns_field is not None:
        left_out |= _TURNS
    try:
        head = {
            name: value if type(value) in _PLAIN else _canonical(value)
            for name in body.keys() - left_out
            if (value := body[name]) is not None or name not in FIELDS
        }
        # a JSON array is self-delimiting, so namespace, field name and head can't run into each
        # other
        link = before = head_link = _head_digest(
            partition + _encode([namespace, turns_field, head, *(() if apart is None else (_canonical(apart),))])
        ).digest()
        chain = []
        canonical = list(map(_canonical_turn, turns))
        for turn in canonical:
            before, link = link, _turn_digest(link + _encode(turn)).digest()
            chain.append(link)
        text, rest = _split_text(canonical[-1]) if turns else (None, None)
        context = ""
        if text is None:
            compat = _whole_digest(link).digest()
        else:
            blanked, context = _split_context(canonical[:-1]) if len(canonical) > 1 else ([], "")
            compat = _compat_digest((head_link if context else before) + _encode([*blanked, rest])).digest()
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"not a JSON request: {why}") from error
    return Fingerprint(
        partition=partition,
        exact=link,
        compat=compat,
        chain=tuple(chain) or (link,),
        text=text,
        namespace=namespace,
        context=context,
    )


def _split_text(turn: Any) -> tuple[str | None, Any]:
    """The user's text in a turn, and the turn with 0, which no text equals, in its place.

    Returns (None, None) for any other turn.
    """
    if not isinstance(turn, dict) or turn.get("role") != "user":
        return None, None
    content = turn.get("content")
    if isinstance(content, str):
        return (content, {**turn, "content": 0}) if _is_eligible(content) else (None, None)
    if not isinstance(content, list):
        return None, None
    places = [i for i, part in enumerate(content) if isinstance(part, dict) and part.get("type") == "text"]
    if len(places) != 1 or not _is_eligible(content[places[0]].get("text")):
        return None, None
    part = content[places[0]]
    blanked = [*content[: places[0]], {**part, "text": 0}, *content[places[0] + 1 :]]
    return part["text"], {**turn, "content": blanked}


def _split_context(turns: list[Any]) -> tuple[list[Any], str]:
    """The turns with 0 for each text and the place of each tool call for its id, and their texts;
    neither where these are too long.
    """
    blanked, texts, places = [], [], dict[Any, int]()
    for turn in turns:
        if type(turn) is dict and turn.keys() == _PLAIN_TURN and set(map(type, turn.values())) == _TEXTS:  # as most
            texts.append(f"{turn['role']}\n{turn['content']}")
            blanked.append({"role": turn["role"], "content": 0})
            continue
        content = turn.get("content") if isinstance(turn, dict) else None
        parts = [content] if isinstance(content, str) else []
        if isinstance(content, list):
            parts = [part["text"] for part in content if _is_text(part)]
            turn = {**turn, "content": [{**part, "text": 0} if _is_text(part) else part for part in content]}
        elif parts:
            turn = {**turn, "content": 0}
        if parts and isinstance(turn.get("role"), str):
            texts.append(f"{turn['role']}\n" + "\n".join(parts))
        elif parts:
            return [], ""
        if not isinstance(turn, dict) or turn.keys() <= _PLAIN_TURN:
            blanked.append(turn)
            continue
        calls = turn.get("tool_calls")
        if isinstance(calls, list) and all(
            isinstance(call, dict) and isinstance(call.get("id"), str) for call in calls
        ):
            turn = {
                **turn,
                "tool_calls": [{**call, "id": places.setdefault(call["id"], len(places))} for call in calls],
            }
        if isinstance(turn.get("tool_call_id"), str):
            turn = {**turn, "tool_call_id": places.get(turn["tool_call_id"], turn["tool_call_id"])}
        blanked.append(turn)
    context = "\0".join(texts)
    is_fit = len(context) <= CONTEXT_CHARS_MAX and context.count("\0") == max(0, len(texts) - 1)
    return (blanked, context) if is_fit else ([], "")


_PLAIN_TURN = {"role", "content"}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_eligible(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= TEXT_CHARS_MAX and not text.isspace() and text != ""


# BLAKE2b (RFC 7693), personalised by purpose. What is digested has parts of fixed length but for
# the last: none runs into the next.
_head_digest, _turn_digest, _compat_digest, _whole_digest = (
    partial(blake2b, digest_size=DIGEST_BYTES, person=purpose)
    for purpose in (b"sw.head", b"sw.turn", b"sw.compat", b"sw.compat.whole")
)


# raises TypeError for a key that is no string
_encode = msgspec.json.Encoder(order="sorted").encode
_PLAIN = frozenset({str, int, bool, type(None)})  # in their one form as they are


def _canonical_turn(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return _canonical(turn)
    if set(map(type, turn.values())) == _TEXTS:
        return turn
    return _canonical({name: value for name, value in turn.items() if value is not None or name not in TURN_FIELDS})


_TEXTS = {str}


def _in_order(value: Any) -> Any:
    """A map as a list, which keeps its order; a list as a map, so that both stay distinct."""
    if isinstance(value, dict):
        return [[name, item] for name, item in value.items()]
    return {"": value} if isinstance(value, list) else value


def _canonical(value: Any) -> Any:
    """The value with every number in its one form. Raises TypeError for values outside JSON."""
    kind = type(value)
    if kind is float and value - value == 0 and not value.is_integer():
        return value
    if kind is dict:
        if "properties" in value:  # of a schema: an answer has them in their order
            value = {**value, "properties": _in_order(value["properties"])}
        return {name: item if type(item) in _PLAIN else _canonical(item) for name, item in value.items()}
    if kind is list or kind is tuple:
        return [item if type(item) in _PLAIN else _canonical(item) for item in value]
    if kind in _PLAIN:
        return value
    if kind is not float:
        raise TypeError(f"{kind.__name__} is not JSON")
    if value.is_integer() and abs(value) <= _EXACT_INT_MAX:
        return int(value)
    if value - value != 0:
        raise TypeError("a number is not finite")
    return value
