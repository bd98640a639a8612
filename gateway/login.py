"""`sameway login` and `logout`: a person's sign-in at a gateway, for `sameway run` and other programs.

Source: RFC 8628, section 3. The tokens lie in one file of the user, by the gateway's address, readable
by its owner alone. Invariant: one process at a time exchanges a refresh token, since the gateway ends a
sign-in whose refresh token comes twice.
"""

import fcntl
import json
import os
import sys
import time
import urllib.error
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway import console
from gateway.data_dir import write_secret

_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_REFRESHED_S = 300.0  # before a token ends


def login(url: str) -> None:
    """Sign in by a browser, on this computer or another. Raises CommandError, and what `console.opened` raises."""
    try:
        with console.opened(f"{url}/.well-known/oauth-authorization-server", {}) as reply:
            endpoints = json.load(reply)
    except urllib.error.HTTPError as error:
        why = f"{url} answered {error.code}: expected a gateway where people sign in (`access.client_id`)"
        raise console.CommandError(why) from None
    begun = _posted(endpoints["device_authorization_endpoint"], {"client_id": "sameway"})
    print(f"Open {begun['verification_uri_complete']}\nand allow the code {begun['user_code']}", file=sys.stderr)
    pause_s, form = begun["interval"], {"grant_type": _GRANT, "device_code": begun["device_code"]}
    while True:
        time.sleep(pause_s)
        answer = _posted(endpoints["token_endpoint"], form)
        if "access_token" in answer:
            break
        if answer.get("error") == "slow_down":
            pause_s += 5
        elif answer.get("error") != "authorization_pending":
            raise console.CommandError(f"not signed in: {answer.get('error_description') or answer.get('error')}")
    with _stored() as stored:
        stored[url] = _kept(answer)


def logout(url: str) -> bool:
    """End the sign-in here and at the gateway; False where there is none. Raises CommandError, and what
    `console.opened` raises.
    """
    with _stored() as stored:
        if (kept := stored.get(url)) is None:
            return False
        answer = _posted(f"{url}/oauth/revoke", {"token": kept["refresh_token"]})
        if "error" in answer:  # the tokens stay, so that another try can end them
            raise console.CommandError(f"not signed out: {answer.get('error_description') or answer['error']}")
        del stored[url]
    return True


def credential(url: str) -> str:
    """An access token that lasts for some minutes; empty where nobody signed in. Raises CommandError, and what
    `console.opened` raises.
    """
    if not _file().exists():
        return ""
    with _stored() as stored:
        if (kept := stored.get(url)) is None:
            return ""
        if kept["expires_at_s"] - time.time() < _REFRESHED_S:
            form = {"grant_type": "refresh_token", "refresh_token": kept["refresh_token"]}
            answer = _posted(f"{url}/oauth/token", form)
            if "access_token" not in answer:
                raise console.CommandError(f"{answer.get('error_description')}: `sameway login --url {url}`")
            kept = stored[url] = _kept(answer)
        return str(kept["access_token"])


def _kept(answer: dict[str, Any]) -> dict[str, Any]:
    tokens = {name: answer[name] for name in ("access_token", "refresh_token")}
    return {**tokens, "expires_at_s": time.time() + answer["expires_in"]}


def _posted(url: str, form: dict[str, str]) -> dict[str, Any]:
    """The answer to a form, also to one that OAuth refuses. Raises what `console.opened` raises."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    try:
        with console.opened(url, headers, "POST", urllib.parse.urlencode(form).encode(), 30) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        if error.headers.get_content_type() != "application/json":
            raise
        answer = json.load(error)
    if not isinstance(answer, dict):
        raise ValueError(f"{url} answered no object")
    return answer


def _file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sameway" / "credentials.json"


@contextmanager
def _stored() -> Iterator[dict[str, Any]]:
    """The tokens by the gateway's address; changes are written at the end, unless there was an error."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = file.read_text() if file.exists() else "{}"
        stored = json.loads(before)
        yield stored
        if (after := json.dumps(stored)) != before:
            write_secret(file, after)
