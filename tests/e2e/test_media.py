"""Images and audio of models behind an alias, through the official client and a started gateway."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, BadRequestError, OpenAI, RateLimitError

from tests.e2e.gateway import API_KEY, WITHOUT_EMBEDDER, Gateway, deployment, run_gateway, wait_for
from tests.e2e.test_plain import record
from tests.e2e.upstream import Upstream

HEADERS = {"authorization": f"Bearer {API_KEY}"}
WAVE = bytes(range(256)) * 400  # 102,400 bytes: 103 seconds, as the upstream counts
IMAGE_PRICES = {"image_usd": {"default": 0.02, "1792x1024": 0.08, "hd/1024x1024": 0.05}}


@pytest.fixture(scope="module")
def gateway(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    url = upstream_process.url

    def one(name: str, model: str = "mock", price: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        return {"deployments": [{**deployment(url, name, model, **more), "price": price or {}}]}

    tokens = {"input_usd_per_mtok": 5.0, "image_input_usd_per_mtok": 10.0, "output_usd_per_mtok": 40.0}
    models = {
        "pictures": one("pictures", price=IMAGE_PRICES),
        "counted": one("counted", "gpt-image-1", tokens),
        "speaker": one("speaker", price={"characters_usd_per_m": 15.0}),
        "writer": one("writer", price={"audio_minute_usd": 0.006}),
        "cut": one("cut", "mock?cut=middle", {"characters_usd_per_m": 15.0}),
        "slow": one("slow", "mock?pace_ms=20"),
        "pair": {
            "deployments": [deployment(url, "broken", "mock?status=503", priority=1), deployment(url, "well")],
        },
        "muddled": one("muddled", "gpt-image-1", {"image_usd": {"default": 0.02}, "audio_minute_usd": 0.006}),
        "talks": one("talk", capabilities=["tools"]),
    }
    folder: Path = tmp_path_factory.mktemp("media")
    with run_gateway(folder, {**WITHOUT_EMBEDDER, "models": models, "upload_bytes_max": 3_000_000}) as started:
        started.wait_ready()
        yield started


@pytest.fixture
def client(gateway: Gateway) -> OpenAI:
    return OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=0)


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({}, "0.020000"),
        ({"n": 3}, "0.060000"),
        ({"size": "1792x1024", "quality": "hd"}, "0.080000"),
        ({"size": "1024x1024", "quality": "hd"}, "0.050000"),
        ({"size": "auto"}, "0.080000"),
        ({"size": "hd/1024x1024"}, "0.080000"),
        ({"quality": "256x256"}, "0.080000"),
    ],
)
def test_an_image_costs_its_price_by_size_and_quality(client: OpenAI, options: dict[str, Any], cost: str) -> None:
    """The nearest price of the settings is charged for each image; of a size that the request leaves open the dearest."""
    reply = client.images.with_raw_response.generate(model="pictures", prompt="a red fox", **options)
    assert len(reply.parse().data or []) == options.get("n", 1)
    assert (reply.headers["x-sameway-cost-usd"], reply.headers["x-sameway-cache"]) == (cost, "bypass")


def test_images_are_repeated_only_where_a_request_asks_for_it(client: OpenAI) -> None:
    """Two equal requests get two images; with a time to live they get one."""
    first, second = (client.images.generate(model="pictures", prompt="a bird") for _ in range(2))
    assert first.data != second.data
    kept = {"cache": {"ttl": 600}}
    third, fourth = (client.images.generate(model="pictures", prompt="a bird", extra_body=kept) for _ in range(2))
    assert third.data == fourth.data != second.data


def test_tokens_are_charged_where_the_answer_counts_them(client: OpenAI, gateway: Gateway) -> None:
    """Two images of 1,000 tokens and a prompt of three: no price by image is charged beside them."""
    reply = client.images.with_raw_response.generate(model="counted", prompt="a red fox", n=2)
    assert reply.headers["x-sameway-cost-usd"] == "0.080015"
    found = record(gateway, reply.http_response)
    assert (found["prompt_tokens"], found["completion_tokens"], found.get("usage_estimated")) == (3, 2000, None)
    edited = client.images.with_raw_response.edit(
        model="counted", prompt="bluer", image=[("a.png", b"a" * 50), ("b.png", b"b" * 60)], mask=("m.png", b"m")
    )
    assert edited.headers["x-sameway-cost-usd"] == "0.042005"  # 200 of its tokens are of images, twice as dear
    variation = client.images.create_variation(model="counted", image=("a.png", b"a" * 50))
    assert base64.b64decode((variation.data or [])[0].b64_json or "")


def test_images_come_as_events(client: OpenAI, gateway: Gateway) -> None:
    """Partial images pass as they came, and the last event's tokens are charged."""
    with client.images.with_streaming_response.generate(model="counted", prompt="a red fox", stream=True) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        text = reply.read().decode()
    assert text.count("data: ") == 2
    assert "image_generation.completed" in text
    assert record(gateway, reply.http_response)["cost_microusd"] == 40_015


def test_units_are_charged_where_tokens_have_no_price(client: OpenAI) -> None:
    """An answer that counts tokens is not free beside a price of images."""
    reply = client.images.with_raw_response.generate(model="muddled", prompt="a red fox", n=2)
    assert reply.headers["x-sameway-cost-usd"] == "0.040000"


def test_an_image_stream_that_breaks_off_says_so(gateway: Gateway) -> None:
    """No deployment can go on with it: the stream ends with the deployment's failure, not the gateway's."""
    asked = {"model": "cut", "prompt": "a red fox", "stream": True}
    reply = httpx.post(f"{gateway.base_url}/images/generations", json=asked, headers=HEADERS, timeout=30)
    assert "partial_image" in reply.text
    assert '"upstream_broken"' in reply.text


def test_speech_streams_to_a_file_and_repeats(client: OpenAI, gateway: Gateway, tmp_path: Path) -> None:
    """A text with a voice is bytes of the upstream's type; the same again is an exact hit that costs nothing."""
    asked: dict[str, Any] = {"model": "speaker", "voice": "alloy", "input": "Hello there! " * 200}
    for cache in ("miss", "exact"):
        with client.audio.speech.with_streaming_response.create(**asked) as reply:
            reply.stream_to_file(tmp_path / cache)
        assert (reply.headers["content-type"], reply.headers["x-sameway-cache"]) == ("audio/mpeg", cache)
    assert (tmp_path / "miss").read_bytes() == (tmp_path / "exact").read_bytes()
    assert (tmp_path / "miss").stat().st_size == 100 * 2600
    other = client.audio.speech.with_raw_response.create(**{**asked, "voice": "onyx"})
    assert other.headers["x-sameway-cache"] == "miss"
    assert record(gateway, other.http_response)["cost_microusd"] == 39_000  # 2,600 characters at $15 a million
    faster = client.audio.speech.with_raw_response.create(**{**asked, "speed": 1.25})  # Anthropic's means a price
    assert faster.headers["x-sameway-cache"] == "miss"


def test_speech_that_breaks_off_does_not_look_complete(client: OpenAI) -> None:
    """Bytes have no place for an error: the connection ends without the end of the answer, and nothing is stored."""
    for _ in range(2):
        with pytest.raises(APIConnectionError):
            client.audio.speech.create(model="cut", voice="alloy", input="Half of this is spoken.")
    with pytest.raises(APIConnectionError):  # by the server's other cycle, too
        client.audio.speech.create(model="cut", voice="alloy", input="x" * 9, extra_query={"api-version": "1"})


@pytest.mark.parametrize("form", ["json", "verbose_json", "text", "srt", "vtt"])
@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
def test_what_is_said_in_each_form(client: OpenAI, gateway: Gateway, kind: str, form: Any) -> None:
    """JSON, text and subtitles come back as the upstream wrote them; reported seconds are charged, others by the file's size."""
    ask = getattr(client.audio, kind).with_raw_response.create
    replies = [ask(model="writer", file=("a.wav", WAVE), response_format=form) for _ in range(2)]
    assert [one.headers["x-sameway-cache"] for one in replies] == ["miss", "exact"]
    assert replies[0].content == replies[1].content
    assert b"102400 bytes" in replies[0].content
    assert replies[0].headers["content-type"].startswith("application/json" if "json" in form else "text/plain")
    # both are 103 s here: the upstream's count, and a thousand bytes a second
    assert replies[0].headers["x-sameway-cost-usd"] == "0.010300"
    assert record(gateway, replies[0].http_response).get("usage_estimated", False) is ("json" not in form)


def test_a_form_reaches_the_upstream_as_it_came(client: OpenAI, upstream_process: Upstream) -> None:
    """Fields, lists, the file's bytes and its name pass; the model is the deployment's, and no key of the client goes along."""
    name = 'no "way"\r\nX-Evil: 1.wav'
    client.audio.transcriptions.create(
        model="writer", file=(name, WAVE), timestamp_granularities=["word", "segment"], language="fr", temperature=0.2
    )
    sent = upstream_process.seen().requests[-1]
    assert sent["body"] == {
        "model": "mock", "language": "fr", "temperature": "0.2", "timestamp_granularities[]": ["word", "segment"],
        "filename": "no %22way%22%0D%0AX-Evil: 1.wav",
    }  # fmt: skip
    assert "x-evil" not in sent["headers"]
    assert API_KEY not in str(sent["headers"])


def test_words_come_as_events(client: OpenAI) -> None:
    """A transcription that streams is passed on event by event, and recorded; the same without a stream is no such answer."""
    for _ in range(2):
        events = client.audio.transcriptions.create(model="writer", file=("b.wav", WAVE), stream=True)
        assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
        assert client.audio.transcriptions.create(model="writer", file=("b.wav", WAVE)).text == "102400 bytes"


def test_the_next_deployment_gets_the_same_form(client: OpenAI) -> None:
    """A file that one deployment refused is read again for the next."""
    reply = client.audio.transcriptions.with_raw_response.create(model="pair", file=("c.wav", WAVE))
    assert (reply.headers["x-sameway-backend"], reply.parse().text) == ("well", "102400 bytes")


def test_no_upload_stays_on_the_disk(client: OpenAI, gateway: Gateway) -> None:
    """After answers, refusals, hits and clients that left, no process holds a deleted file and the data directory no new one."""
    before = sorted(path.name for path in gateway.data_dir.iterdir())
    for name in ("writer", "talks", "nowhere", "writer"):
        with contextlib.suppress(Exception):
            client.audio.transcriptions.create(model=name, file=("d.wav", WAVE * 3))
    leaving = socket.create_connection(("127.0.0.1", int(gateway.root.rsplit(":", 1)[1])))
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 900000\r\n\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 300_000
    leaving.sendall(head.encode() + part)
    wait_for(lambda: _held(gateway) > 0)
    leaving.close()
    wait_for(lambda: _held(gateway) == 0)
    assert sorted(path.name for path in gateway.data_dir.iterdir()) == before


def _held(gateway: Gateway) -> int:
    """The deleted files of its data directory that the gateway's processes hold."""
    held = 0
    for process in gateway.children("gateway"):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                held += target.startswith(str(gateway.data_dir.resolve())) and target.endswith("(deleted)")
    return held


@pytest.mark.parametrize(
    ("path", "fields", "status", "code", "param"),
    [
        ("audio/transcriptions", {"model": "talks"}, 400, "unsupported_feature", "model"),
        ("audio/transcriptions", {}, 400, "missing_required_parameter", "model"),
        ("images/edits", {"model": "pictures", "prompt": "x", "n": "many"}, 400, "invalid_type", "n"),
        ("images/edits", {"model": "pictures"}, 400, "missing_required_parameter", "prompt"),
    ],
)
def test_a_wrong_form_names_its_field(
    gateway: Gateway, path: str, fields: dict[str, str], status: int, code: str, param: str
) -> None:
    """Numbers of forms are texts; what is no number, or is missing, is named."""
    files = {"image" if "images" in path else "file": ("a", b"a")}
    reply = httpx.post(f"{gateway.base_url}/{path}", data=fields, files=files, headers=HEADERS, timeout=30)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)


def test_a_form_has_a_limit_of_its_own(client: OpenAI, gateway: Gateway) -> None:
    """A form above `upload_bytes_max` is refused, also where it does not say its size; JSON without a file is, too."""
    big = b"x" * 3_100_000

    def parts() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        yield from (big[at : at + 50_000] for at in range(0, len(big), 50_000))
        yield b"\r\n--b--\r\n"

    typed = {**HEADERS, "content-type": "multipart/form-data; boundary=b"}
    reply = httpx.post(f"{gateway.base_url}/audio/transcriptions", content=parts(), headers=typed, timeout=30)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    with pytest.raises(BadRequestError, match="file"):
        client.post("/audio/transcriptions", cast_to=object, body={"model": "writer", "file": {"bytes": -(10**9)}})


def test_a_budget_holds_the_worst_case(gateway: Gateway, client: OpenAI) -> None:
    """A team with a cent may not ask for an image of two cents, and may for a short text; where no budget is hard, an
    image without a price is free, and its record says that a price is missing.
    """
    team = gateway.admin("POST", "/teams", json={"name": "poor media"})["id"]
    key = gateway.admin("POST", f"/teams/{team}/keys", json={"name": "k"})["plaintext"]
    gateway.admin("POST", f"/teams/{team}/budgets", json={"window": "total", "limit_microusd": 10_000, "is_hard": True})
    poor = client.with_options(api_key=key)
    with pytest.raises(RateLimitError, match="budget"):
        poor.images.generate(model="pictures", prompt="a red fox")
    with pytest.raises(BadRequestError, match="no known price"):  # one for characters alone
        poor.images.generate(model="speaker", prompt="a red fox")
    with pytest.raises(RateLimitError, match="budget"):
        poor.audio.transcriptions.create(model="writer", file=("a.wav", WAVE * 2))
    assert poor.audio.speech.create(model="speaker", voice="alloy", input="Short").content == b"".join(
        letter.encode() * 100 for letter in "Short"
    )
    free = client.images.with_raw_response.generate(model="speaker", prompt="a red fox").headers
    wait_for(lambda: any(one["request_id"] == free["x-request-id"] for one in gateway.records()))
    found = next(one for one in gateway.records() if one["request_id"] == free["x-request-id"])
    assert (free["x-sameway-cost-usd"], found.get("is_baseline_unknown")) == ("0.000000", True)
