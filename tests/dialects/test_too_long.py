"""How servers say that a request is longer than their context, line by line, each with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.backends import base
from gateway.backends.refusals import UpstreamRefusal, refusal

LINES = json.loads(Path(__file__).with_name("too_long.json").read_text())


def refused(line: dict[str, Any]) -> base.BackendError:
    body = json.dumps({"error": {"message": line["words"], "code": None, "type": "invalid_request_error"}})
    return refusal(UpstreamRefusal(line.get("status", 400), body.encode()))


@pytest.mark.parametrize("line", LINES["too_long"], ids=lambda line: f"{line['server']}: {line['words'][:40]}")
def test_too_long_is_understood(line: dict[str, Any]) -> None:
    """Whatever the words, the request goes to a deployment with a longer context; a size is read from a known beginning."""
    error = refused(line)
    assert isinstance(error, base.BackendTooLong)
    assert error.context_tokens == line.get("size")


@pytest.mark.parametrize("line", LINES["others"], ids=lambda line: f"{line['server']}: {line['words'][:40]}")
def test_other_limits_are_not_too_long(line: dict[str, Any]) -> None:
    """A quota of a minute goes to the next deployment, and a field's own limit is the client's to mend."""
    error = refused(line)
    assert type(error).__name__ == line["kind"]
