"""What schemathesis puts into a request of its own making, because no schema says it.

Loaded by schemathesis, in an environment of its own: knows no other test.
"""

import json
import os
import urllib.request
from typing import Any

import schemathesis  # type: ignore[import-not-found]  # not installed here

there: dict[str, str] = {"model": "m"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Name a model and a response that are there, make ids unique, and `best_of` no less than `n`."""
    body = case.body
    if not isinstance(body, dict):
        return
    if "previous_response_id" not in there:
        there["previous_response_id"] = _kept_response()
    for name, one in there.items():
        if body.get(name) and isinstance(body[name], str):
            body[name] = one
    requests = body.get("requests")
    for number, one in enumerate(requests if isinstance(requests, list) else ()):
        if isinstance(one, dict) and isinstance(id := one.get("custom_id"), str) and 0 < len(id) < 50:
            one["custom_id"] = f"{id}-{number}"
    if isinstance(n := body.get("n"), int) and isinstance(best_of := body.get("best_of"), int) and 0 < best_of < n:
        body["best_of"] = n


def _kept_response() -> str:
    headers = {"authorization": os.environ["DESCRIBED_KEY"], "content-type": "application/json"}
    body = json.dumps({"model": there["model"], "input": "Hello"}).encode()
    with urllib.request.urlopen(urllib.request.Request(os.environ["DESCRIBED_URL"], body, headers)) as reply:
        return str(json.load(reply)["id"])
