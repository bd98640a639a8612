"""An OpenID provider in process that signs what a test says, true or not. It listens on a port of its own."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey

CLIENT_ID, AUDIENCE = "sameway-dashboard", "sameway-api"


def _part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@dataclass
class StandInProvider:
    """`claims` are those of its next ID token; `sign` makes it; `answers` replaces what a path answers, which
    it does while `is_open`.
    """

    clock: Callable[[], float]
    issuer: str = ""
    key: Any = None
    claims: dict[str, Any] = field(default_factory=dict)
    sign: Callable[[dict[str, Any]], str] | None = None
    answers: dict[str, Any] = field(default_factory=dict)
    forms: list[dict[str, str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.rotate("first")
        self.is_open.set()

    def rotate(self, kid: str) -> None:
        """Sign with a new key from now on."""
        self.key = ECKey.generate_key("P-256", {"kid": kid, "use": "sig"})

    def token(self, **claims: Any) -> str:
        """A good token of the key of the moment, with `claims`; None removes one."""
        now_s = int(self.clock())
        base = {"iss": self.issuer, "aud": AUDIENCE, "sub": "alice", "iat": now_s, "exp": now_s + 300}
        given = {name: value for name, value in {**base, **claims}.items() if value is not None}
        return self.signed(given)

    def signed(self, claims: dict[str, Any], **header: Any) -> str:
        return jwt.encode({"alg": "ES256", "kid": self.key.kid, **header}, claims, self.key, algorithms=["ES256"])

    def unsigned(self, claims: dict[str, Any]) -> str:
        """The same claims with the algorithm `none`."""
        return f"{_part({'alg': 'none', 'kid': self.key.kid})}.{_part(claims)}."

    def confused(self, claims: dict[str, Any]) -> str:
        """The same claims with HS256 and the public key as its secret (RFC 8725, section 2.1)."""
        signed = f"{_part({'alg': 'HS256', 'kid': self.key.kid})}.{_part(claims)}"
        digest = hmac.new(self.key.as_pem(private=False), signed.encode(), hashlib.sha256).digest()
        return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path, size = line.split()[1].decode(), 0
                while (name := await reader.readline()) not in (b"\r\n", b""):
                    if name.lower().startswith(b"content-length:"):
                        size = int(name.split(b":")[1])
                form = {key: values[0] for key, values in parse_qs((await reader.readexactly(size)).decode()).items()}
                body = json.dumps(self._of(urlsplit(path).path, form)).encode()
                await self.is_open.wait()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
        finally:
            writer.close()

    def _of(self, path: str, form: dict[str, str]) -> Any:
        self.asked.append(path)
        if path in self.answers:
            return self.answers[path]
        if path == "/keys":
            return {"keys": [self.key.as_dict(private=False)]}
        if path == "/token":
            self.forms.append(form)
            return {"access_token": "at", "token_type": "Bearer", "id_token": (self.sign or self.signed)(self.claims)}
        names = {"authorization": "authorize", "token": "token", "end_session": "end"}
        endpoints = {f"{name}_endpoint": f"{self.issuer}/{below}" for name, below in names.items()}
        return {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", **endpoints}


@asynccontextmanager
async def provider_of(clock: Callable[[], float]) -> AsyncIterator[StandInProvider]:
    """A provider that listens."""
    provider = StandInProvider(clock)
    server = await asyncio.start_server(provider.answer, "127.0.0.1", 0)
    provider.issuer = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield provider
    finally:
        server.close()
