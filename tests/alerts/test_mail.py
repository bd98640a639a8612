"""Alerts by e-mail, to SMTP servers that run beside the tests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import email
import email.policy
import json
import random
import ssl
import subprocess
from dataclasses import dataclass, field
from email.message import EmailMessage
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from gateway.alerts.mail import Mail, message_of
from gateway.alerts.watch import DELAYED, DELIVERED, LOST
from gateway.alerts.webhook import DeliveryFailed
from gateway.settings import AlertSettings
from policies import WindowKind
from tests.alerts.test_watch import DAY_S, QUEUE, Place, Receiver, place, receiver

__all__ = ["place", "receiver"]

MAIL = "sameway:{alerts}:mail"
BODY = json.dumps({"type": "t", "data": {"text": "The budget of team acme", "limit": 7, "percent": None}}).encode()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of localhost, with its key, that no list of authorities has."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = subprocess.run([*request, *names, "-keyout", "-", "-out", "-"], check=True, capture_output=True)
    path.write_bytes(made.stdout)
    return path


@dataclass
class Server:
    """An SMTP server that keeps what it took. `refusals` answer RCPT; `mode` is one of `smtp_tls`, `silent`, `flood` or `drip`."""

    tls: ssl.SSLContext
    mode: str = "none"
    refusals: dict[str, bytes] = field(default_factory=dict)
    port: int = 0
    seen: list[bytes] = field(default_factory=list)
    mails: list[EmailMessage] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Server:
        tls = self.tls if self.mode == "tls" else None
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._talk(reader, writer)
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            return  # the client left
        finally:
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "silent":
            await reader.read()
            return
        writer.write(b"220 here\r\n")
        with contextlib.suppress(ConnectionError):
            while self.mode == "flood":
                writer.write((b"250-" + b"x" * 4000 + b"\r\n") * 20)
                await writer.drain()
        while line := await reader.readline():
            self.seen.append(line)
            word = line.split()[0].upper()
            if word == b"EHLO":
                more = b"250-STARTTLS\r\n" if self.mode in ("starttls", "drip") else b""
                writer.write(b"250-here\r\n" + more + b"250 AUTH PLAIN\r\n")
            elif word == b"STARTTLS":
                if self.mode == "drip":
                    await self._drip(writer)
                    return
                writer.write(b"220 go\r\n")
                await writer.start_tls(self.tls)
            elif word == b"AUTH":
                self.logins.append(base64.b64decode(line.split()[2]).decode())
                writer.write(b"235 yes\r\n")
            elif word == b"RCPT":
                writer.write(next((a for name, a in self.refusals.items() if name.encode() in line), b"250 ok\r\n"))
            elif word == b"DATA":
                writer.write(b"354 go\r\n")
                raw = (await reader.readuntil(b"\r\n.\r\n"))[:-3]
                self.mails.append(email.message_from_bytes(raw, policy=email.policy.default))  # type: ignore[arg-type]
                writer.write(b"250 mine\r\n")
            elif word == b"QUIT":
                writer.write(b"221 bye\r\n")
                return
            else:
                writer.write(b"250 ok\r\n")

    async def _drip(self, writer: asyncio.StreamWriter) -> None:
        """A handshake over the client's time-out of 0.5 s, each step within it, and then an endless reply."""
        try:
            await asyncio.sleep(0.3)
            cast(asyncio.ReadTransport, writer.transport).pause_reading()  # TLS gets the client's part
            writer.write(b"220 go\r\n")
            await asyncio.sleep(0.4)
            await writer.start_tls(self.tls)
            while True:
                writer.write(b"2")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            self.left.set()


@pytest.fixture
def server(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Without TLS; its certificate is among the known ones."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return Server(context)


def settings(server: Server, **more: Any) -> dict[str, Any]:
    given = {"smtp_host": "127.0.0.1", "smtp_port": server.port, "smtp_tls": server.mode}
    return {**given, "mail_from": "sameway@here.example", "mail_to": ["ops@here.example"], **more}


def mail(server: Server, timeout_s: float = 20.0, **more: Any) -> Mail:
    return Mail(AlertSettings(**settings(server, **more)), timeout_s)


@pytest.mark.parametrize("mode", ["starttls", "tls"])
async def test_a_password_goes_to_the_server_of_the_certificate(server: Server, mode: str, tmp_path: Path) -> None:
    """By STARTTLS and by TLS from the start; the file's password is read for each e-mail."""
    server.mode = mode
    (tmp_path / "password").write_text("first\n")
    async with server:
        one = mail(server, smtp_host="localhost", smtp_user="u", smtp_password_file=tmp_path / "password")
        await one.deliver("msg_1", 0, BODY)
        (tmp_path / "password").write_text("second\n")
        await one.deliver("msg_2", 0, BODY)
    assert server.logins == ["\0u\0first", "\0u\0second"]
    assert [found["message-id"] for found in server.mails] == ["<msg_1@here.example>", "<msg_2@here.example>"]


@pytest.mark.parametrize("mode", ["starttls", "tls"])
@pytest.mark.parametrize("wrong", ["name", "authority"])
async def test_another_certificate_gets_nothing(
    server: Server, mode: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one of another name nor one that no authority signed sees a login or an alert."""
    server.mode = mode
    monkeypatch.setenv("P", "password")
    if wrong == "authority":
        monkeypatch.delenv("SSL_CERT_FILE")
    host = "127.0.0.1" if wrong == "name" else "localhost"
    async with server:
        with pytest.raises(DeliveryFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await mail(server, smtp_host=host, smtp_user="u", smtp_password_env="P").deliver("m", 0, BODY)
    assert server.mails == server.logins == []


async def test_a_server_that_drops_starttls_gets_nothing(server: Server) -> None:
    """An attacker between the two can take the word out of the server's offer."""
    async with server:
        with pytest.raises(DeliveryFailed, match="STARTTLS"):
            await mail(server, smtp_tls="starttls", smtp_host="localhost").deliver("m", 0, BODY)
    assert not any(line.startswith(b"mail") for line in server.seen)


async def test_no_text_begins_a_header(server: Server) -> None:
    """Line ends of a team's or a user's name are spaces in the subject, and the body is one text."""
    text = "of team a\r\nBcc: evil@there.example\r\n\r\nx\u2028y\x00z for é😀"
    async with server:
        await mail(server).deliver("m", 0, json.dumps({"data": {"text": text, "team": text}}).encode())
    (found,) = server.mails
    assert " ".join(found["subject"].split()) == "Sameway: of team a Bcc: evil@there.example x y z for é😀"
    assert (found["bcc"], found["to"], found.get_content_type()) == (None, "ops@here.example", "text/plain")
    rcpt = [line.lower() for line in server.seen if line[:4].lower() == b"rcpt"]
    assert rcpt == [b"rcpt to:<ops@here.example>\r\n"]


def test_any_text_leaves_the_headers_as_they_are() -> None:
    """Encoded words (RFC 2047), controls and lone surrogates add no header, and the body has the text as given."""
    given = AlertSettings(smtp_host="h.example", mail_from="a@b.example", mail_to=["c@d.example"])
    chance, evil = random.Random(1), "=?utf-8?q?x=0D=0AReply-To:_evil@x.example=0D=0A=0D=0Ay?="
    words = [
        "=?",
        "utf-8",
        "?q?",
        "?b?",
        "?=",
        "=0A",
        "=",
        "?",
        " ",
        "\n",
        "é",
        "😀",
        "\ud800",
        "\0",
        '"',
        "(",
        "x" * 90,
        ":",
        "DQo=",
    ]
    texts = [evil, f"={evil}", f"of team {evil} and", *("".join(chance.choices(words, k=20)) for _ in range(100))]
    for text in texts:
        message = message_of(given, "msg_1", 0, json.dumps({"data": {"text": text, "user": text}}).encode())
        head, _, _ = message.as_bytes().partition(b"\r\n\r\n")
        names = [line.partition(b":")[0] for line in head.split(b"\r\n") if not line.startswith((b" ", b"\t"))]
        assert sorted(names) == sorted(name.encode() for name in message)
        assert len(names) == len(set(names)) == 9
        read = email.message_from_bytes(message.as_bytes(), policy=email.policy.default)
        shown = text.replace("\ud800", "?")
        assert read.get_content().replace("\r\n", "\n") == f"{shown}\n\nuser: {shown}\n"  # type: ignore[attr-defined]
        assert read["subject"].startswith("Sameway:")


async def test_a_silent_server_delays_neither_the_loop_nor_the_webhook(
    server: Server, place: Place, receiver: Receiver
) -> None:
    """The delivery ends by its time-out, its thread too, and the other channel has its message."""
    server.mode, ticks = "silent", 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    await place.budget(1_000_000, WindowKind.TOTAL)
    await place.spend(500_000)
    async with server:
        ticking = asyncio.create_task(tick())
        worker = place.worker(receiver.url, **settings(server, smtp_tls="none"))
        await worker.step()
        ticking.cancel()
        assert ticks > 10
        assert receiver.marks == [("budget.threshold_reached", 50)]
        assert place.outcomes == [("webhook", DELIVERED), ("email", DELAYED)]
        assert (await place.redis.zcard(QUEUE), await place.redis.zcard(MAIL)) == (0, 1)
        server.mode = "none"
        for _ in range(5):  # a busy machine may need more than a delivery's second
            place.now_s += 60
            await worker.step()
    assert place.outcomes[-1] == ("email", DELIVERED)
    assert await place.redis.zcard(MAIL) == 0


async def test_nothing_goes_on_after_the_time_out(server: Server) -> None:
    """A server that is slow in the handshake loses its connection, and the thread is free for the next e-mail."""
    server.mode = "drip"
    async with server:
        one = mail(server, 0.5, smtp_tls="starttls", smtp_host="localhost")
        with pytest.raises(DeliveryFailed, match="no answer"):
            await one.deliver("msg_1", 0, BODY)
        await asyncio.wait_for(server.left.wait(), 20)
        server.mode = "starttls"
        await mail(server, smtp_host="localhost").deliver("msg_2", 0, BODY)
    assert [found["message-id"] for found in server.mails] == ["<msg_2@here.example>"]


async def test_a_reply_without_an_end_is_refused(server: Server) -> None:
    """Before it fills the memory, and before the time-out."""
    server.mode = "flood"
    async with server:
        with pytest.raises(DeliveryFailed, match="Response too long"):
            await mail(server, smtp_tls="none").deliver("m", 0, BODY)


async def test_an_email_is_tried_again_for_a_day_and_is_counted(server: Server, place: Place, redis: Redis) -> None:
    """A busy server has it at the next try, with the same id; one that stays away loses it, once."""
    await place.budget(1_000_000, WindowKind.TOTAL)
    await place.spend(500_000)
    server.refusals = {"ops": b"451 later\r\n"}
    async with server:
        worker = place.worker(**settings(server))
        for _ in range(2):
            await worker.step()
            place.now_s += 5
            server.refusals = {}
        await place.spend(300_000)
    assert [found["subject"] for found in server.mails] == [
        "Sameway: The total budget of team acme has reached 50%: $0.5 of $1"
    ]
    assert place.outcomes == [("email", DELAYED), ("email", DELIVERED)]
    await worker.step()
    with capture_logs() as lines:
        place.now_s += DAY_S
        await redis.delete("sameway:{alerts}:lock")
        await worker.step()
    assert place.outcomes[-1] == ("email", LOST)
    assert [line["channel"] for line in lines if line["event"] == "alert_not_delivered"] == ["email"]
    assert await redis.zcard(MAIL) == 0


async def test_a_recipient_that_is_refused_costs_the_others_nothing(server: Server, place: Place) -> None:
    """The others get it once, and the refusal is counted and named."""
    server.refusals = {"gone": b"550 none\r\n"}
    await place.budget(1_000_000, WindowKind.TOTAL)
    await place.spend(500_000)
    async with server:
        worker = place.worker(**settings(server, mail_to=["gone@here.example", "ops@here.example"]))
        with capture_logs() as lines:
            for _ in range(3):
                await worker.step()
                place.now_s += 60
    assert len(server.mails) == 1
    assert place.outcomes == [("email", LOST)]
    assert "refused for gone@here.example" in str(lines)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"mail_to": ["a@b\r\nBcc: c@d"]}, "the address"),
        ({"mail_to": ["a@b, c@d"]}, "the address"),
        ({"mail_from": "a@b>"}, "the address"),
        ({"mail_to": []}, "found no mail_to"),
        ({"smtp_user": "u"}, "smtp_password_env"),
        ({"smtp_user": "u", "smtp_password_env": "P", "smtp_host": "there.example", "smtp_tls": "none"}, "without TLS"),
    ],
)
def test_settings_that_cannot_send_are_refused(given: dict[str, Any], wrong: str) -> None:
    """At the start, by name."""
    good = {"smtp_host": "127.0.0.1", "mail_from": "a@b.example", "mail_to": ["c@d.example"]}
    AlertSettings(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=wrong):
        AlertSettings(**{**good, **given})
