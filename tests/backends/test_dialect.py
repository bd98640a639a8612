"""What a server gets of a chat, in its dialect: left out, said otherwise, or refused by its name."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from gateway.backends.base import BackendDenied, BackendOverloaded, BackendRejected, BackendUnfit, Mark
from gateway.backends.dialect import dialect_of
from gateway.backends.fitting import fitted, said
from gateway.backends.openai.backend import OpenAIBackend
from gateway.backends.refusals import UpstreamRefusal, in_band, refusal
from gateway.wire.types import COMPLETION
from tests.backends.conftest import ask

_USER = {"role": "user", "content": "hello"}


def _sent(base_url: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
    """The body that a server at `base_url` gets."""
    backend = OpenAIBackend("one", base_url=base_url, model="m", capabilities=frozenset(), **how)
    request = msgspec.structs.replace(ask(**body), dialect=dialect_of("openai", base_url, "m"))
    sent: dict[str, Any] = json.loads(backend.payload(request))
    return sent


def test_a_field_that_changes_nothing_is_left_out() -> None:
    """Where a server refuses what it does not know, an SDK's defaults cost no answer."""
    idle = {"seed": 1, "user": "u", "store": False, "logprobs": False, "service_tier": "auto", "logit_bias": {}}
    body = {"messages": [_USER], "temperature": 0.5, **idle}
    assert _sent("https://api.mistral.ai/v1", body) == {
        "messages": [_USER],
        "temperature": 0.5,
        "model": "m",
        "stream": True,
    }
    assert _sent("http://127.0.0.1/v1", body)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logit_bias": {"5": 1}}, {"verbosity": "low"}])
def test_a_field_that_changes_the_answer_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    """Another deployment may honour it."""
    with pytest.raises(BackendUnfit) as refused:
        _sent("https://api.mistral.ai/v1", {"messages": [_USER], **fields})
    assert refused.value.param == next(iter(fields))


def test_a_salt_is_never_left_out() -> None:
    """It keeps teams apart: a server that refuses it gets nothing."""
    with pytest.raises(BackendUnfit):
        _sent("https://api.mistral.ai/v1", {"messages": [_USER]}, is_salted=True)


def test_roles_and_what_other_servers_left_in_messages_are_said_otherwise() -> None:
    """A developer is the system, and the thoughts of another server's answer are for that server alone."""
    thought = {"role": "assistant", "content": "hi", "reasoning_content": "hm", "refusal": None}
    messages = [{"role": "developer", "content": "Be brief."}, _USER, thought]
    sent = _sent("https://api.mistral.ai/v1", {"messages": messages})["messages"]
    assert sent == [{"role": "system", "content": "Be brief."}, _USER, {"role": "assistant", "content": "hi"}]
    assert _sent("https://api.openai.com/v1", {"messages": messages})["messages"] == messages


@pytest.mark.parametrize("of_others", [None, "a", [1], [{}]])
def test_messages_of_another_kind_of_request_are_its_own(of_others: Any) -> None:
    """A completion may have a field of that name, as it may have any: no rule of chats reads it."""
    body = {"prompt": "a", "messages": of_others}
    for base_url in ("http://127.0.0.1/v1", "https://api.mistral.ai/v1"):
        dialect = dialect_of("openai", base_url, "m")
        assert said(dict(body), dialect, COMPLETION)["messages"] == of_others


@pytest.mark.parametrize("content", ["Use tools.", [{"type": "text", "text": "Use tools."}]])
def test_a_developer_who_begins_a_chat_is_of_its_one_system_message(content: Any) -> None:
    """Templates of open models know neither the role nor a second message of the system; a later one keeps its place."""
    begun = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": content}, _USER]
    sent = _sent("http://127.0.0.1/v1", {"messages": [*begun, {"role": "developer", "content": "Now."}]})["messages"]
    joined = (
        "Be brief.\n\nUse tools." if isinstance(content, str) else [{"type": "text", "text": "Be brief."}, *content]
    )
    assert sent == [{"role": "system", "content": joined}, _USER, {"role": "system", "content": "Now."}]
    plain = [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, _USER]
    assert _sent("http://127.0.0.1/v1", {"messages": plain})["messages"] == plain  # what the client said, as it said it


def test_what_is_known_is_told_with_its_source() -> None:
    """Each line of `check-config --explain` says where it comes from."""
    lines = dialect_of("openai", "https://api.mistral.ai/v1", "m", {"length": "max_completion_tokens"}).lines()
    assert "length: max_completion_tokens (the operator's `dialect`)" in lines
    assert any(line.startswith("call_id: ") and "docs.mistral.ai" in line for line in lines)
    assert (
        "length: max_tokens (the default: servers know the older name)"
        in dialect_of("openai", "http://x/v1", "m").lines()
    )


@pytest.mark.parametrize(
    ("base_url", "status", "body", "kind", "mark"),
    [
        ("https://api.z.ai/api/paas/v4", 429, {"error": {"code": "1113", "message": "x"}}, BackendDenied, Mark.CREDIT),
        ("https://open.bigmodel.cn/v4", 200, {"error": {"code": "1002", "message": "x"}}, BackendDenied, Mark.KEY),
        ("https://open.bigmodel.cn/v4", 200, {"error": {"code": 1305, "message": "x"}}, BackendOverloaded, None),
        (
            "https://api.minimax.io/v1",
            200,
            {"base_resp": {"status_code": 1002, "status_msg": "x"}},
            BackendOverloaded,
            None,
        ),
        (
            "https://api.minimax.io/v1",
            200,
            {"base_resp": {"status_code": 1008, "status_msg": "x"}},
            BackendDenied,
            Mark.CREDIT,
        ),
        (
            "https://api.minimax.io/v1",
            200,
            {"base_resp": {"status_code": 1026, "status_msg": "x"}},
            BackendRejected,
            None,
        ),
        ("http://127.0.0.1/v1", 429, {"error": {"code": "1113", "message": "x"}}, BackendOverloaded, None),
    ],
)
def test_a_servers_own_codes_have_statuses(
    base_url: str, status: int, body: dict[str, Any], kind: type, mark: Mark | None
) -> None:
    """The same number is another error at each provider, and comes with its own HTTP status, or inside a 200."""
    statuses, raw = dialect_of("openai", base_url, "m").statuses, msgspec.json.encode(body)
    error = refusal(UpstreamRefusal(status, raw, statuses=statuses)) if status != 200 else in_band(raw, "", statuses)
    assert type(error) is kind
    assert getattr(error, "mark", None) == mark


def test_a_name_fits_a_server_that_takes_no_digits() -> None:
    """Two long names stay two."""
    names = ["read_file" * 9, "read_file" * 8]
    body = {"messages": [_USER], "tools": [{"type": "function", "function": {"name": name}} for name in names]}
    _, given = fitted(body, dialect_of("openai", "http://127.0.0.1/v1", "m", {"tool_name": "[a-z_]{1,64}"}))
    assert sorted(given.values()) == sorted(names)
    assert all(re.fullmatch("[a-z_]{1,64}", short) for short in given)
