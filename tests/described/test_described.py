"""The served OpenAPI document against a served gateway: no request of schemathesis finds them differ.

Runs where `SCHEMATHESIS_VARIABLE` names the program, as `./run test long --only openapi` does.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gateway.wire.types import KINDS
from tests.described.upstream import run_answering
from tests.e2e.gateway import API_KEY, deployment, run_gateway
from tests.services import SCHEMATHESIS_VARIABLE

_EXAMPLES = 40  # requests of each operation and phase


@pytest.mark.skipif(SCHEMATHESIS_VARIABLE not in os.environ, reason="`./run test long --only openapi` fetches it")
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", [1, 7])
def test_no_request_shows_that_the_document_is_wrong(tmp_path: Path, seed: int) -> None:
    """Valid requests of all of /v1 are taken and others are not, with the statuses and types that it states."""
    price = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 1.0, "request_usd": 0.0, "tool_call_usd": 0.01}
    price |= {"image_usd": {"*": 0.01}, "characters_usd_per_m": 1.0, "audio_minute_usd": 0.01}  # type: ignore[dict-item]
    price["factors"] = {"service_tier": 2, "other_tools": 1}  # type: ignore[assignment]
    able = ["tools", "json_object", "json_schema", "vision", "logprobs", "n", "audio", "files", "completions", "suffix"]
    able += [kind.name for kind in KINDS[2:-1]]
    folder = Path(__file__).parent
    with run_answering() as url:
        one = deployment(url, "one", price=price, capabilities=able)
        config = {"models": {"m": {"deployments": [one | {"allow_fields": ["service_tier", "other_tools"]}]}}}
        with run_gateway(tmp_path, config) as gateway:
            argv = [os.environ[SCHEMATHESIS_VARIABLE], "--config-file", str(folder / "schemathesis.toml"), "run"]
            argv += [f"{gateway.root}/openapi.json", "--checks", "all"]
            argv += ["--include-path-regex", "^/(v1/|(de)?tokenize)", "-H", f"Authorization: Bearer {API_KEY}"]
            argv += ["--seed", str(seed), "--max-examples", str(_EXAMPLES), "--generation-database", "none"]
            asked = {"DESCRIBED_URL": f"{gateway.base_url}/responses", "DESCRIBED_KEY": f"Bearer {API_KEY}"}
            env = {**os.environ, **asked, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(folder)}
            run = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=850, check=False)
    assert run.returncode == 0, run.stdout[-20_000:]
