"""Guards and teams' rules by the official client: batches, files, a provider's own paths, and changes by the admin API."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.gateway import deployment
from tests.e2e.test_batches import begin, line, results, run
from tests.e2e.upstream import Upstream
from tests.e2e.worker import NewHost
from tests.guard import guard_of


async def test_lines_of_batches_and_other_paths(new_host: NewHost, upstream: Upstream) -> None:
    """A guard sees each line and each body under /passthrough/; a rule refuses both elsewhere, and then keeps no file."""
    models = {
        "mock": [deployment(upstream.url, "plain", passthrough=["POST /chat/completions"], region="us-east-1")],
        "far": [deployment(upstream.url, "far", region="eu-west-1")],
    }
    async with guard_of() as guard:
        host = await new_host(models, guards={"dlp": {"url": guard.url, "teams": ["*"]}})
        assert await host.parts.writer.step()
        team_id, client = await host.team()
        batch = await begin(client, line("a", "a secret"), line("b", "forbidden"), line("c", "fine"))
        await run(host)
        _, output, errors = await results(client, batch.id)
        assert sorted(one["custom_id"] for one in output) == ["a", "c"]
        assert [one["response"]["body"]["error"]["code"] for one in errors] == ["guard_refused"]
        passed = client.with_options(base_url=host.url.removesuffix("/v1") + "/passthrough/plain")
        asked: Any = {"model": "mock", "messages": [{"role": "user", "content": "forbidden"}]}
        with pytest.raises(openai.BadRequestError, match="policy 7"):
            await passed.chat.completions.create(**asked)
        asked["messages"][0]["content"] = "fine"
        assert (await passed.chat.completions.create(**asked)).choices

        headers = {"authorization": f"Bearer {host.parts.settings.admin_key}"}
        async with httpx.AsyncClient(base_url=host.url.removesuffix("/v1"), headers=headers) as admin:
            rules = {"regions": ["eu"], "store_s_max": 7_200}
            changed = await admin.patch(f"/admin/api/teams/{team_id}", json=rules)
            assert (changed.status_code, changed.json()["regions"], changed.json()["store_s_max"]) == (
                200,
                ["eu"],
                7_200,
            )
            for wrong in ({"regions": []}, {"regions": ["EU west"]}, {"store_s_max": -1}, {"retention_days_max": 0.5}):
                assert (await admin.patch(f"/admin/api/teams/{team_id}", json=wrong)).status_code == 400
            batch = await begin(client, line("a"), line("b", model="far"))
            file = await client.files.retrieve(batch.input_file_id)
            assert file.expires_at == file.created_at + 7_200
            await run(host)
            batch, output, errors = await results(client, batch.id)
            assert [one["custom_id"] for one in output] == ["b"]
            assert [one["response"]["body"]["error"]["code"] for one in errors] == ["residency_not_allowed"]
            made = await client.files.retrieve(batch.output_file_id)
            assert made.expires_at == made.created_at + 7_200
            with pytest.raises(openai.PermissionDeniedError, match="`regions` are eu"):
                await passed.chat.completions.create(**asked)
            batch = await begin(client, line("c", model="far"))
            await admin.patch(f"/admin/api/teams/{team_id}", json={"store_s_max": 0})
            await run(host)
            ended = await client.batches.retrieve(batch.id)
            assert (ended.status, ended.output_file_id) == ("completed", None)
            with pytest.raises(openai.PermissionDeniedError, match="store_s_max"):
                await begin(client, line("a"))
            log = (await admin.get("/admin/api/audit")).json()["rows"]
    changes = [json.loads(row["change"]) if isinstance(row["change"], str) else row["change"] for row in log]
    assert {"store_s_max": [7_200, 0]} in changes
    assert {"regions": [None, ["eu"]], "store_s_max": [None, 7_200]} in changes
