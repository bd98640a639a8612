"""Servers on loopback that write exactly the bytes they are told to, and the proxies before them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

CERTIFICATE = Path(__file__).with_name("tls.pem")
WHOLE = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
)
GOOD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE)


@dataclass
class Wire:
    """One connection that the server accepted, after it has read a request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int  # of the connection
    request: bytes  # head and body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@dataclass
class Served:
    """What a scripted server has seen."""

    port: int
    connections: int = 0
    requests: list[tuple[int, bytes]] = field(default_factory=list)  # the connection's number, and the request
    closed: dict[int, asyncio.Event] = field(default_factory=dict)
    is_resumed: list[bool] = field(default_factory=list)  # TLS: whether a connection needed no new key exchange

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


Script = Callable[[Wire], Awaitable[object]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of the next request. Raises IncompleteReadError where the client leaves instead."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    return head + await reader.readexactly(sum(lengths))


@contextlib.asynccontextmanager
async def serve(
    script: Script, tls: ssl.SSLContext | None = None, socket_path: Path | None = None
) -> AsyncIterator[Served]:
    """A server that runs `script` for each request of each connection; a true result closes the connection."""
    served = Served(0)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = served.connections
        served.connections += 1
        served.closed[number] = asyncio.Event()
        if (secured := writer.get_extra_info("ssl_object")) is not None:
            served.is_resumed.append(bool(secured.session_reused))
        # RuntimeError: uvloop's for a write to a connection that the client has closed
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):
            while True:
                request = await read_request(reader)
                served.requests.append((number, request))
                if await script(Wire(reader, writer, number, request)):
                    break
        writer.close()
        served.closed[number].set()

    if socket_path is None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls, limit=1 << 20)
        served.port = server.sockets[0].getsockname()[1]
    else:
        server = await asyncio.start_unix_server(connected, socket_path)
    try:
        yield served
    finally:
        server.close()


def tls_server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


def proxying_to(served: Served, seen: list[bytes], status: bytes = b"200 Established") -> Script:
    """A proxy's script: it keeps the first line and headers of what it is asked, and then passes bytes on both ways."""

    async def pass_on(wire: Wire) -> bool:
        seen.append(wire.request)
        if not wire.request.startswith(b"CONNECT "):
            await wire.send(GOOD)
            return False
        if not status.startswith(b"200"):
            await wire.send(b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % status)
            return False
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await wire.send(b"HTTP/1.1 %b\r\n\r\n" % status)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(wire.reader, writer), pump(reader, wire.writer))
        return True

    return pass_on
