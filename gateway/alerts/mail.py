"""E-mail by SMTP (RFC 5321; STARTTLS: RFC 3207): one message to all recipients.

Knows no budgets and no queue. Invariants: unless `smtp_tls` is `none`, only a greeting is sent
before the server's certificate is verified; no text of a team or a user ends a header; the event
loop never waits for a server; every delivery ends within `timeout_s`.
"""

import asyncio
import contextlib
import json
import os
import smtplib
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from email.errors import MessageError
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Any

from gateway.alerts.webhook import DeliveryFailed
from gateway.settings import AlertSettings
from policies.durations import duration_s

_TIMEOUT_S = 10.0
_PORTS = {"starttls": 587, "tls": 465, "none": 25}
_SUBJECT_CHARS_MAX = 200
_REPLY_BYTES_MAX = 65_536


class Mail:
    """Sends alerts through the server in `settings`. A delivery takes at most `timeout_s`."""

    def __init__(self, settings: AlertSettings, timeout_s: float = _TIMEOUT_S) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "mail")  # a slow server takes no thread from others

    async def deliver(self, message_id: str, at_s: float, body: bytes) -> None:
        """Send the alert in `body`, JSON, dated `at_s`, unix seconds. Raises DeliveryFailed."""
        settings, loop = self._settings, asyncio.get_running_loop()
        delivery = _Delivery(settings, self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                message = message_of(settings, message_id, at_s, body)
                port = settings.smtp_port or _PORTS[settings.smtp_tls]
                delivery.addresses = await loop.getaddrinfo(settings.smtp_host, port, type=socket.SOCK_STREAM)
                refused = await loop.run_in_executor(self._thread, delivery.run, message)
        except TimeoutError:
            raise DeliveryFailed(f"no answer within {duration_s(self._timeout_s)}") from None
        except (smtplib.SMTPException, MessageError, OSError, ValueError) as error:
            raise DeliveryFailed(f"{type(error).__name__}: {error}"[:200]) from None
        finally:
            delivery.end()
        if refused:
            raise DeliveryFailed(f"refused for {', '.join(refused)}; the other recipients have it"[:200], is_final=True)

    def aclose(self) -> None:
        """Shut the thread down without waiting."""
        self._thread.shutdown(wait=False)


class _Delivery(smtplib.SMTP):
    """One delivery over one connection, in a thread; `end` makes the thread return. Bounds replies."""

    def __init__(self, settings: AlertSettings, timeout_s: float) -> None:
        super().__init__(timeout=timeout_s, local_hostname=socket.gethostname())  # a full name would be looked up
        self._settings = settings
        self._host = settings.smtp_host or ""  # of the certificate; the base would connect at once
        self._tls: ssl.SSLContext | None = None
        self.addresses: list[Any] = []  # of the server, as the event loop resolved them
        self._line: socket.socket | None = None
        self._is_over = threading.Event()

    def run(self, message: EmailMessage) -> list[str]:
        """Send `message`. Returns the recipients that the server refused; raises if it refused all."""
        settings = self._settings
        self._tls = None if settings.smtp_tls == "none" else ssl.create_default_context()
        try:
            self.connect(self._host)
            if settings.smtp_tls == "starttls":
                self.starttls(context=self._tls)
            if settings.smtp_user is not None:
                self.login(settings.smtp_user, _password(settings))
            refused = self.send_message(message)
            with contextlib.suppress(smtplib.SMTPException, OSError):  # the server has it
                self.quit()
            return list(refused)
        finally:
            self.close()

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        """Connect to the first address that accepts. Raises OSError; TimeoutError after `end`."""
        connection = self._connected(timeout)
        if "." not in self.local_hostname:  # RFC 5321, 4.1.4
            at = connection.getsockname()[0]
            self.local_hostname = f"[IPv6:{at}]" if ":" in at else f"[{at}]"
        if self._tls is None or self._settings.smtp_tls == "starttls":
            return connection
        return self._tls.wrap_socket(connection, server_hostname=host)

    def _connected(self, timeout_s: float) -> socket.socket:
        failed = OSError("the server has no address")
        for *_, at in self.addresses:
            try:
                connection = socket.create_connection(at[:2], timeout_s)
            except OSError as error:
                failed = error
                continue
            self._line = connection.dup()  # TLS detaches the socket itself
            if self._is_over.is_set():
                raise TimeoutError
            return connection
        raise failed

    def end(self) -> None:
        """Make every further wait or send of the thread fail."""
        self._is_over.set()
        if self._line is not None:
            with contextlib.suppress(OSError), self._line:
                self._line.shutdown(socket.SHUT_RDWR)

    def getreply(self) -> tuple[int, bytes]:
        """Read a reply (RFC 5321, 4.2.1): its code, or -1, and its text. Raises
        SMTPServerDisconnected.
        """
        if self.file is None and self.sock is not None:
            self.file = self.sock.makefile("rb")
        texts, bytes_left = list[bytes](), _REPLY_BYTES_MAX
        while self.file is not None and (line := self.file.readline(bytes_left)).endswith(b"\n"):
            bytes_left -= len(line)
            texts.append(line[4:].strip())
            if line[3:4] != b"-" or not line[:3].isdigit():
                return int(line[:3]) if line[:3].isdigit() else -1, b"\n".join(texts)
        self.close()
        raise smtplib.SMTPServerDisconnected(f"The connection ended within a reply, or it has {_REPLY_BYTES_MAX} bytes")


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
