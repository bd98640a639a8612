"""Files in the content of requests, by the official clients: what they say goes to the deployment in place of their ids."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.e2e.gateway import API_KEY, deployment
from tests.e2e.upstream import Upstream
from tests.e2e.worker import Host, NewHost

_PDF, _PNG = b"%PDF-1.4 of a test", b"\x89PNG\r\n\x1a\n of a test"


@pytest.fixture
async def host(new_host: NewHost, upstream: Upstream) -> Host:
    """A worker with a deployment that reads files and images."""
    able = deployment(upstream.url, "able", capabilities=["files", "vision"])
    host = await new_host({"mock": [able]})
    assert await host.parts.writer.step()
    return host


async def upload(host: Host, name: str, content: bytes, purpose: Any = "user_data") -> str:
    return (await host.client.files.create(file=(name, content), purpose=purpose)).id


def said(upstream: Upstream) -> str:
    """The messages that the deployment was sent last."""
    return json.dumps(upstream.seen().requests[-1]["body"]["messages"])


def url(media: str, content: bytes) -> str:
    return f"data:{media};base64,{b64encode(content).decode()}"


async def test_a_files_content_takes_the_place_of_its_id(host: Host, upstream: Upstream) -> None:
    """On each surface, as a document, as an image and as a text; equal requests share an answer."""
    pdf, png = await upload(host, "a.pdf", _PDF), await upload(host, "b.png", _PNG, "vision")
    chat: Any = [{"role": "user", "content": [{"type": "file", "file": {"file_id": pdf}}]}]
    await host.client.chat.completions.create(model="mock", messages=chat)
    assert json.loads(said(upstream))[0]["content"] == [
        {"type": "file", "file": {"file_data": url("application/pdf", _PDF), "filename": "a.pdf"}}
    ]
    parts: Any = [{"type": "input_file", "file_id": pdf}, {"type": "input_image", "file_id": png, "detail": "low"}]
    await host.client.responses.create(model="mock", input=[{"role": "user", "content": parts}])
    assert url("application/pdf", _PDF) in said(upstream)
    assert url("image/png", _PNG) in said(upstream)
    async with AsyncAnthropic(base_url=host.url.removesuffix("/v1"), api_key=API_KEY, max_retries=0) as claude:
        image: Any = [{"type": "image", "source": {"type": "file", "file_id": png}}]
        await claude.messages.create(model="mock", max_tokens=9, messages=[{"role": "user", "content": image}])
    assert b64encode(_PNG).decode() in said(upstream)
    again = await upload(host, "a.pdf", _PDF, "assistants")
    chat[0]["content"][0]["file"]["file_id"] = again
    raw = await host.client.chat.completions.with_raw_response.create(model="mock", messages=chat)
    assert raw.headers["x-sameway-cache"] == "exact"


async def test_only_the_teams_own_input_files_are_read(host: Host, upstream: Upstream) -> None:
    """Another team's id goes out as it came, as an unknown one; a batch's file, and one that is too large, are refused."""
    _, other = await host.team()
    theirs = (await other.files.create(file=("a.pdf", _PDF), purpose="user_data")).id
    for id in (theirs, "file-abc"):
        content: Any = [{"role": "user", "content": [{"type": "file", "file": {"file_id": id}}]}]
        await host.client.chat.completions.create(model="mock", messages=content)
        assert (id in said(upstream), b64encode(_PDF).decode() in said(upstream)) == (True, False)
    batch = await upload(host, "a.jsonl", b"{}", "batch")
    large = await upload(host, "a.pdf", bytes(13 << 20))
    for id, words in ((batch, "has the purpose `batch`"), (large, "have more than")):
        content = [{"role": "user", "content": [{"type": "file", "file": {"file_id": id}}]}]
        with pytest.raises(openai.BadRequestError, match=words):
            await host.client.chat.completions.create(model="mock", messages=content)


async def test_anthropics_clients_have_files_in_their_own_shape(host: Host, upstream: Upstream) -> None:
    """Uploaded without a purpose, named in a message, listed in pages both ways, read and deleted; errors are Anthropic's."""
    async with AsyncAnthropic(base_url=host.url.removesuffix("/v1"), api_key=API_KEY, max_retries=0) as claude:
        made = [await claude.beta.files.upload(file=(f"{name}.pdf", _PDF)) for name in "abc"]
        assert [(one.type, one.mime_type, one.size_bytes) for one in made] == [("file", "application/pdf", 18)] * 3
        part: Any = {"type": "document", "source": {"type": "file", "file_id": made[0].id}}
        await claude.messages.create(model="mock", max_tokens=9, messages=[{"role": "user", "content": [part]}])
        assert b64encode(_PDF).decode() in said(upstream)
        ids = [one.id for one in made][::-1]
        assert [one.id async for one in claude.beta.files.list(limit=1)] == ids
        for place, told in (("before_id", (ids[1:2], True)), ("after_id", (ids[1:2], True)), ("page", ([], False))):
            of = ids[0] if place == "after_id" else f"page_{ids[2]}" if place == "page" else ids[2]
            page: Any = await claude.beta.files.list(
                limit=1, extra_query={place: of}
            )  # the first two: earlier versions'
            assert ([one.id for one in page.data], page.has_more) == told
        assert await claude.beta.files.retrieve_metadata(ids[0]) == made[2]
        assert await (await claude.beta.files.download(ids[0])).read() == _PDF
        assert (await claude.beta.files.delete(ids[0])).type == "file_deleted"
        with pytest.raises(anthropic.NotFoundError) as refused:
            await claude.beta.files.retrieve_metadata(ids[0])
        assert refused.value.request_id
        assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    assert (await host.client.files.retrieve(ids[1])).purpose == "user_data"
