"""The provider's keys: read again from files, by turns, and each refused alone; never told to anyone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.backends.anthropic.backend import AnthropicBackend
from gateway.backends.base import Backend, BackendDenied, BackendUnavailable
from gateway.backends.keys import Keys
from gateway.backends.managed import ManagedBackend
from gateway.backends.openai.backend import OpenAIBackend
from gateway.settings import ApiKeySettings, Settings
from tests.backends.conftest import ask, collect
from tests.e2e.gateway import ADMIN_KEY, API_KEY
from tests.e2e.worker import open_worker
from tests.services import RedisServer
from tests.transport.servers import GOOD, Script, Wire, serve

_KEY = re.compile(rb"(?:authorization: bearer|x-api-key:) *(\S+)", re.I)
_MESSAGE = (
    b'{"id":"m","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"hi"}],'
    b'"stop_reason":"end_turn","usage":{"input_tokens":1,"output_tokens":1}}'
)


class Provider:
    """A server that takes some keys, and repeats in its refusal what it was sent."""

    def __init__(self, *good: str) -> None:
        self.good = set(good)
        self.seen: list[str] = []

    async def script(self, wire: Wire) -> None:
        key = (_KEY.search(wire.request) or [b"", b""])[1].decode()
        self.seen.append(key)
        if key not in self.good:
            body = b'{"error":{"message":"Incorrect API key provided: %b","code":"invalid_api_key"}}' % key.encode()
            head = b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            await wire.send(head % len(body) + body)
        elif b"/messages" in wire.request:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            await wire.send(head % len(_MESSAGE) + _MESSAGE)
        else:
            await wire.send(GOOD)


def of(*names: str, **weights: int) -> list[ApiKeySettings]:
    return [ApiKeySettings(env=name, weight=weights.get(name, 1)) for name in names]


ENVIRON = {"A": "sk-the-first-secret", "B": "sk-the-other-secret", "C": "sk-a-third-secret"}


def made(kind: type[Any], url: str, keys: Keys) -> Any:
    if kind is ManagedBackend:
        return ManagedBackend("d", base_url=url, model="openai/mock", capabilities=frozenset(), keys=keys)
    base_url = url.removesuffix("/v1") if kind is AnthropicBackend else url
    return kind("d", base_url=base_url, model="mock", capabilities=frozenset(), keys=keys)


async def _asked(backend: Backend) -> None:
    await collect(backend.stream(ask(is_stream=False, max_tokens=5)))


@pytest.mark.parametrize("kind", [OpenAIBackend, AnthropicBackend, ManagedBackend])
async def test_a_key_that_is_refused_rests_alone(kind: type[Any]) -> None:
    """The request goes on with another key, at once; the refused one is not asked again, and the last one's refusal is told."""
    provider = Provider(ENVIRON["B"])
    script: Script = provider.script
    async with serve(script) as served:
        backend = made(kind, served.url, Keys(of("A", "B"), ENVIRON))
        await backend.start()
        for _ in range(4):
            await _asked(backend)
        assert provider.seen == [ENVIRON["A"], *[ENVIRON["B"]] * 4]
        provider.good.clear()
        with pytest.raises(BackendDenied) as refused:
            await _asked(backend)
        assert backend.running == 0
        await backend.aclose()
    told = f"{refused.value.message} {refused.value.detail}"
    assert not any(value in told for value in ENVIRON.values())


async def test_keys_take_turns_by_their_weights() -> None:
    """Of keys with the weights 3 and 1, three of four requests have the first, and they alternate."""
    keys = Keys(of("A", "B", A=3), ENVIRON)
    taken = [keys.take() for _ in range(8)]
    assert Counter(taken) == {ENVIRON["A"]: 6, ENVIRON["B"]: 2}
    assert ENVIRON["B"] in taken[:4]


async def test_a_file_s_key_is_read_again(tmp_path: Path) -> None:
    """Another file in the place of the first one has the next key; a missing or empty one makes the deployment unready."""
    now, file = [0.0], tmp_path / "key"
    keys = Keys([ApiKeySettings(file=file)], {}, lambda: now[0])
    backend = made(OpenAIBackend, "http://127.0.0.1:9/v1", keys)
    assert backend.load(1).reason == "the file of its key can't be read: No such file or directory"
    for value in ("sk-first", "sk-second"):
        fresh = tmp_path / "fresh"
        fresh.write_text(f"{value}\n")
        fresh.replace(file)
        now[0] += 2
        assert (keys.take(), backend.load(1).is_ready) == (value, True)
    file.unlink()  # while it is being replaced
    now[0] += 2
    assert keys.take() == "sk-second"
    file.write_text("\n")
    now[0] += 2
    assert "is empty" in backend.load(1).reason
    with pytest.raises(BackendUnavailable, match="is empty"):
        await _asked(backend)


async def test_a_refused_key_wakes_when_its_file_has_another(tmp_path: Path) -> None:
    """The rest is the key's, and not the file's."""
    now, file = [0.0], tmp_path / "key"
    file.write_text("sk-old")
    keys = Keys([ApiKeySettings(file=file), *of("B")], ENVIRON, lambda: now[0])
    provider = Provider(ENVIRON["B"], "sk-new")
    async with serve(provider.script) as served:
        backend = made(OpenAIBackend, served.url, keys)
        await backend.start()
        for _ in range(3):
            await _asked(backend)
        file.write_text("sk-newer")
        file.write_text("sk-new")
        now[0] += 2
        for _ in range(2):
            await _asked(backend)
        await backend.aclose()
    assert provider.seen.count("sk-old") == 1
    assert provider.seen.count("sk-new") == 1


@pytest.mark.parametrize("kind", [OpenAIBackend, ManagedBackend])
async def test_a_key_that_was_just_replaced_fails_no_request(kind: type[Any], tmp_path: Path) -> None:
    """A provider that refuses the old key before its file was looked at is asked with the new one; a wrong one is asked once."""
    file = tmp_path / "key"
    file.write_text("sk-old")
    keys = Keys([ApiKeySettings(file=file)], {}, lambda: 0.0)
    provider = Provider("sk-new")
    async with serve(provider.script) as served:
        backend = made(kind, served.url, keys)
        await backend.start()
        file.write_text("sk-new")
        await _asked(backend)
        assert provider.seen == ["sk-old", "sk-new"]
        provider.good.clear()
        with pytest.raises(BackendDenied):
            await _asked(backend)
        await backend.aclose()
    assert provider.seen == ["sk-old", "sk-new", "sk-new"]


async def test_no_one_is_told_a_key(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A provider that repeats the key in its refusal: it is in no answer, page, metric or line of the log."""
    file = tmp_path / "key"
    file.write_text(ENVIRON["C"])
    monkeypatch.setenv("PLANTED", ENVIRON["A"])
    provider = Provider()
    async with serve(provider.script) as served:
        at: dict[str, Any] = {"backend": "openai", "base_url": served.url, "model": "m", "price": {}}
        keys = [{"env": "PLANTED"}, {"file": str(file)}]
        models: Any = {"planted": {"deployments": [{"name": "planted", **at, "api_keys": keys}]}}
        settings = Settings(
            data_dir=tmp_path,
            redis_url=redis_server.url,
            engines={},
            models=models,
            admin_key=ADMIN_KEY,
            api_key=API_KEY,
        )
        async with open_worker(settings, monkeypatch) as worker, httpx.AsyncClient(timeout=30) as client:
            root, told = f"http://127.0.0.1:{worker.port}", ""
            body = {"model": "planted", "messages": [{"role": "user", "content": "Hi"}]}
            for path in ("/v1/chat/completions",) * 2:
                told += (await client.post(root + path, json=body, headers={"authorization": f"Bearer {API_KEY}"})).text
            paths = ("/metrics", "/readyz", "/admin/api/status", "/admin/api/deployments", "/admin/api/overview")
            for path in paths:
                reply = await client.get(root + path, headers={"authorization": f"Bearer {ADMIN_KEY}"})
                assert reply.status_code in (200, 503)
                told += reply.text
    assert set(provider.seen) == {ENVIRON["A"], ENVIRON["C"]}
    told += "".join(capfd.readouterr())
    assert "planted" in told
    assert not any(value[:12] in told for value in ENVIRON.values())
