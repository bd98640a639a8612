"""The effective mode of a verifier: of settings, alias, team and request."""

from typing import Any

import pytest

from gateway.settings import Settings
from policies.verification import Verification, Verify

_OFF, _HIDDEN = Verification(Verify.OFF, None, is_served=True), Verification(Verify.OFF, None, is_served=False)


def _by(mode: str, verifier: str | None = "small") -> Verification:
    return Verification(Verify(mode), verifier, is_served=mode != "observe")


@pytest.mark.parametrize(
    ("cache", "alias", "team", "request_", "expected"),
    [
        ({}, {}, None, None, _OFF),
        ({"verifier": "small"}, {}, None, None, _by("before")),
        ({}, {"verifier": "small"}, None, None, _by("before")),
        ({"verifier": "small"}, {"verifier": "auto"}, None, None, _by("before", "auto")),
        ({"verifier": "small", "verify": "after"}, {}, None, None, _by("after")),
        ({"verifier": "small", "verify": "off"}, {"verify": "before"}, None, None, _by("before")),  # an alias replaces
        ({"verifier": "small", "verify": "observe"}, {}, "before", None, _by("before")),  # and so does a team
        ({"verifier": "small"}, {"verify": "off"}, "before", None, _OFF),  # of both, the stricter
        ({"verifier": "small"}, {"verify": "before"}, "after", None, _by("after")),
        ({"verifier": "small"}, {}, None, "after", _by("after")),
        ({"verifier": "small"}, {}, None, "observe", _by("observe")),
        ({"verifier": "small"}, {}, "off", "before", _OFF),  # a request never loosens
        ({"verifier": "small"}, {}, "after", "before", _by("after")),
        ({"verifier": "small", "verify": "observe"}, {}, None, "before", _by("observe")),
        ({"verifier": "small", "verify": "observe"}, {}, None, "off", _HIDDEN),  # nobody is asked, nothing served
        ({"verify": "observe"}, {}, None, None, _by("observe", None)),  # counts certain hits alone
        ({}, {}, "before", None, _OFF),  # a mode without a verifier asks nobody
    ],
)
def test_the_mode_is_of_the_alias_and_the_team_and_a_request_only_tightens_it(
    cache: dict[str, Any], alias: dict[str, Any], team: str | None, request_: str | None, expected: Verification
) -> None:
    """Each level's word, and what remains of it where another one speaks."""
    local = {"backend": "local", "engine": "default"}
    models = {name: {"deployments": [{**local, "name": name}]} for name in ("large", "small")}
    models["large"] |= alias
    settings = Settings.model_validate({"cache": cache, "models": models})
    modes = [None if mode is None else Verify(mode) for mode in (team, request_)]
    assert settings.verification("large", *modes) == expected
