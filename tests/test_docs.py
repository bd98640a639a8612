"""What the documents promise is what there is: settings, headers and routes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from gateway.api.openapi import PATHS
from gateway.app import create_app
from gateway.settings import SECTIONS, Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_setting_is_documented() -> None:
    """README has a row for each setting of each section, with its sentence, and none for a setting that is gone."""
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| .* \| (.*) \|$", README, re.MULTILINE)
    expected = [(n, (f.description or "").replace("|", "/")) for s in SECTIONS for n, f in s.model_fields.items()]
    assert sorted(rows) == sorted(expected)
    assert all(description for _, description in expected if _ not in ("cache", "budgets"))


def test_every_header_is_documented() -> None:
    """README names every response header that the code sends."""
    sent: set[str] = set()
    for path in (
        "gateway/api/headers.py",
        "gateway/wire/errors.py",
        "gateway/journey/rate_limits.py",
        "gateway/api/chat.py",
    ):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes | str):
                text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
                if re.fullmatch(r"(x-[a-z-]+[a-z]|age|cache-status|server-timing|retry-after(-ms)?)", text):
                    sent.add(text)
    assert {"x-sameway-cache", "x-should-retry", "age"} <= sent
    assert [name for name in sorted(sent) if f"`{name}`" not in README] == []


def test_every_route_is_documented() -> None:
    """README and the OpenAPI description name the routes under /v1; README names every admin route."""
    routes = (ROOT / "gateway/app.py").read_text()
    served = set(re.findall(r'"(/v1/[a-z/*]+)": \{', routes))
    assert {path.replace("{model}", "*") for path in PATHS} == served
    assert all(path in README for path in PATHS)
    assert set(PATHS) <= set(create_app(Settings()).openapi()["paths"])
    admin = re.findall(r'@api\.(get|post|patch|delete)\("([^"]+)"', (ROOT / "gateway/admin/routes.py").read_text())
    assert len(admin) > 20
    missing = [f"{m.upper()} /admin/api{p}" for m, p in admin if f"`{m.upper()} /admin/api{p}`" not in README]
    assert missing == []
