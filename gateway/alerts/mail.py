"""E-mail by SMTP (RFC 5321; STARTTLS: RFC 3207): one message to all recipients.

Knows no budgets and no queue. Invariants: unless `smtp_tls` is `none`, only a greeting is sent
before the server's certificate is verified; no text of a team or a user ends a header; the event
loop never waits for a server; every delivery ends within `timeout_s`.
"""

import asyncio
import contextlib
import json
import os
import socket
from email.errors import MessageError
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Any

import aiosmtplib

from gateway.alerts.webhook import DeliveryFailed
from gateway.settings import AlertSettings
from policies.durations import duration_s

_TIMEOUT_S = 10.0
_PORTS = {"starttls": 587, "tls": 465, "none": 25}
_SUBJECT_CHARS_MAX = 200


class Mail:
    """Sends alerts through the server in `settings`. A delivery takes at most `timeout_s`."""

    # decision: aiosmtplib-for-mail

    def __init__(self, settings: AlertSettings, timeout_s: float = _TIMEOUT_S) -> None:
        self._settings = settings
        self._timeout_s = timeout_s

    async def deliver(self, message_id: str, at_s: float, body: bytes) -> None:
        """Send the alert in `body`, JSON, dated `at_s`, unix seconds. Raises DeliveryFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                refused = await self._send(message_of(self._settings, message_id, at_s, body))
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {duration_s(self._timeout_s)}") from None
        except (aiosmtplib.SMTPException, MessageError, OSError, ValueError) as error:
            raise DeliveryFailed(f"{type(error).__name__}: {error}"[:200]) from None
        if refused:
            raise DeliveryFailed(f"refused for {', '.join(refused)}; the other recipients have it"[:200], is_final=True)

    async def _send(self, message: EmailMessage) -> list[str]:
        """Send `message` over one connection. Returns the recipients that the server refused;
        raises if it refused all."""
        settings = self._settings
        client = aiosmtplib.SMTP(
            hostname=settings.smtp_host,
            port=settings.smtp_port or _PORTS[settings.smtp_tls],
            use_tls=settings.smtp_tls == "tls",
            start_tls=False,  # not before this host has a name
            local_hostname=socket.gethostname(),  # a full name would be looked up
            timeout=None,
        )
        try:
            await client.connect()
            if "." not in socket.gethostname():  # RFC 5321, 4.1.4
                at = client.get_transport_info("sockname")[0]
                client.local_hostname = f"[IPv6:{at}]" if ":" in at else f"[{at}]"
            if settings.smtp_tls == "starttls":
                await client.starttls()
            if settings.smtp_user is not None:
                await client.login(settings.smtp_user, _password(settings))
            refused, _ = await client.send_message(message)
            with contextlib.suppress(aiosmtplib.SMTPException, OSError):  # the server has it
                await client.quit()
            return list(refused)
        finally:
            client.close()

    def aclose(self) -> None:
        """Nothing stays open between deliveries."""


def _password(settings: AlertSettings) -> str:
    """The password, read at each delivery, so that a new password needs no restart."""
    if settings.smtp_password_file is not None:
        return settings.smtp_password_file.read_text().strip()
    return os.environ.get(settings.smtp_password_env or "", "")


def message_of(settings: AlertSettings, message_id: str, at_s: float, body: bytes) -> EmailMessage:
    """The e-mail of an alert; a retry has the same Message-ID."""
    data: dict[str, Any] = json.loads(body)["data"]
    sender = settings.mail_from or ""
    message = EmailMessage(policy=SMTP)
    message["From"], message["To"] = sender, ", ".join(settings.mail_to)
    message["Date"] = formatdate(at_s)
    message["Message-ID"] = f"<{message_id}@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no answers of absent recipients
    # a control character, as a line's end is one, would begin another header, and so would one in an encoded word
    subject = "".join(c if c.isprintable() else " " for c in data["text"]).replace("=?", "= ?")
    message["Subject"] = f"Sameway: {subject}"[:_SUBJECT_CHARS_MAX]
    lines = [f"{name}: {value}" for name, value in data.items() if name != "text" and value is not None]
    text = "\n".join([data["text"], "", *lines, ""])
    message.set_content(text.encode(errors="replace").decode())  # of a lone surrogate
    return message
