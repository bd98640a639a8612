"""Agents that people sign in: the device authorization grant, and tokens of the gateway's own.

Sources: RFC 8628 (device grant), RFC 9700 section 4.14.2 (rotation of refresh tokens), RFC 7009
(revocation). No HTTP. A sign-in is a session under the mark `agent`, and its tokens are JWTs that name
the session. Codes that wait are in Redis:

    sameway:{device}:asked:CODE      string    who asks, until the person decides
    sameway:{device}:decided:DIGEST  string    the session, or empty, until the client asks; of the device code
    sameway:{device}:polled:CODE     string    while another question comes too soon
    sameway:{device}:from:NETWORK    counter   codes that a network asked for in a minute

Invariants: the device code alone, all of it, gives tokens, and once; the session begins with the decision,
so that what ends the person's sessions ends one whose client has not come yet; a refresh token is exchanged once, and ends the sign-in if
it comes again after `_RACE_S`; who ends the session ends its tokens within `CHECK_S`.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.accounts.sessions import Session, Sessions
from gateway.loggers import get_logger

CODE_S, INTERVAL_S = 600, 5
ACCESS_S, SIGN_IN_S = 3_600, 7 * 86_400
CHECK_S = 60.0
"""How long a session that was looked up is believed to last."""
_RACE_S = 60.0  # processes of one client refresh at once: the later one reads what the first was given
_BEGUN_MAX = 100  # codes a minute of one network
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"  # RFC 8628 section 6.1
_USER_CODE_CHARS = 8
_log = get_logger()

# KEYS codes asked for, by the network; answers how many. ARGV seconds.
_COUNT = """
local count = redis.call('INCR', KEYS[1])
if count == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return count
"""
# KEYS asked, decided. ARGV the decision, seconds. Answers 1; 0 where the code does not wait any more.
_DECIDE = """
if redis.call('DEL', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
return 1
"""


class CodeRequest(msgspec.Struct, frozen=True):
    """A code that waits: the SHA-256 of its device code, the address that asked, and when (unix seconds)."""

    device: str
    client: str
    at_s: float


class GrantRefused(Exception):
    """An error response of RFC 6749 section 5.2 or RFC 8628 section 3.5: `error`, and `str()` as its description."""

    def __init__(self, error: str, description: str = "", status: int = 400) -> None:
        super().__init__(description or error.replace("_", " "))
        self.error, self.status = error, status


def plain(user_code: str) -> str:
    """A user code as it is stored, from what a person types."""
    return "".join(char for char in user_code.upper() if char in _LETTERS)


@dataclass(eq=False)
class Agents:
    """Codes and tokens. `mark` gives the keys of kinds (`Guard.mark`); `clock` gives unix seconds."""

    _sessions: Sessions
    _mark: Callable[[str], bytes]
    _redis: Any
    _clock: Callable[[], float] = time.time

    # -- the device authorization grant

    async def begin(self, client: str, network: str) -> tuple[str, str]:
        """A device code and its user code for a `client`, an address. Raises GrantRefused after too many of its
        network; RedisError.
        """
        if await self._redis.eval(_COUNT, 1, _key("from", network), 60) > _BEGUN_MAX:
            raise GrantRefused("slow_down", "too many sign-ins began at your network: wait a minute", 429)
        code = secrets.token_urlsafe(32)
        user_code = self._user_code(code)
        request = msgspec.json.encode(CodeRequest(_digest(code), client, self._clock()))
        await self._redis.execute_command("SET", _key("asked", user_code), request, "EX", CODE_S)
        return code, f"{user_code[:4]}-{user_code[4:]}"

    async def find(self, user_code: str) -> CodeRequest | None:
        """Who waits with a code; None where none does. Raises RedisError."""
        found = await self._redis.execute_command("GET", _key("asked", plain(user_code)))
        return None if found is None else msgspec.json.decode(found, type=CodeRequest)

    async def decide(self, user_code: str, person: Mapping[str, Any] | None) -> bool:
        """Let the client of a code in as `person`, facts of a `Session`, or deny it; False where none waits.

        Raises RedisError.
        """
        if (request := await self.find(user_code)) is None:
            return False
        sign_in = ""
        if person is not None:
            sign_in = await self._sessions.start(self._mark("agent"), SIGN_IN_S, client=request.client, **person)
        keys = _key("asked", plain(user_code)), _key("decided", request.device)
        is_first = bool(await self._redis.eval(_DECIDE, 2, *keys, sign_in, CODE_S))
        if not is_first:
            await self._sessions.end(sign_in)
        return is_first

    async def poll(self, device_code: str) -> dict[str, Any]:
        """The first tokens of a code that a person allowed. Raises GrantRefused, RedisError."""
        device = _digest(device_code)
        decided = await self._redis.execute_command("GETDEL", _key("decided", device))
        if decided is None:
            code = self._user_code(device_code)
            request = await self.find(code)
            if request is None or request.device != device:
                raise GrantRefused("expired_token", "the code is unknown, was used, or is over ten minutes old")
            pause_ms = (INTERVAL_S - 1) * 1000  # of less than the interval, since clocks and networks vary
            if not await self._redis.execute_command("SET", _key("polled", code), 1, "PX", pause_ms, "NX"):
                raise GrantRefused("slow_down", f"ask every {INTERVAL_S} seconds")
            raise GrantRefused("authorization_pending")
        if not decided:
            raise GrantRefused("access_denied", "the person denied the sign-in")
        sign_in = decided.decode()
        if await self._sessions.find(sign_in, [self._mark("agent")]) is None:
            raise GrantRefused("access_denied", "the sign-in has ended: sign in again")
        return self._tokens(sign_in)

    def _user_code(self, device_code: str) -> str:
        digest = hmac.new(self._mark("device"), device_code.encode(errors="replace"), hashlib.sha256).digest()
        number = int.from_bytes(digest)
        return "".join(_LETTERS[number // 20**place % 20] for place in range(_USER_CODE_CHARS))

    # -- tokens

    async def refresh(self, token: str) -> dict[str, Any]:
        """New tokens for a refresh token. Raises GrantRefused."""
        sign_in, _ = self._read(token, "refresh")
        if not sign_in or await self._sessions.find(sign_in, [self._mark("agent")]) is None:
            raise GrantRefused("invalid_grant", "the sign-in has ended: sign in again")
        used = self._mark("used")
        if not await self._sessions.use_once(token, used, SIGN_IN_S):
            first = await self._sessions.find(token, [used])
            if first is None or self._clock() - first.created_at_s > _RACE_S:
                await self._sessions.end(sign_in)
                _log.warning("refresh_token_reused", consequence="its sign-in has ended")
            raise GrantRefused("invalid_grant", "the refresh token was used before")
        return self._tokens(sign_in)

    async def revoke(self, token: str) -> None:
        """End the sign-in of an access or refresh token, if it is one."""
        for use in ("refresh", "access"):
            if sign_in := self._read(token, use)[0]:
                await self._sessions.end(sign_in)

    def is_own(self, token: str) -> bool:
        """Whether it is an access token of the gateway that lasts, by its signature."""
        return bool(self._read(token, "access")[0])

    async def session(self, token: str) -> tuple[Session, float] | None:
        """The session of an access token, and until when (unix seconds) that may be believed; None of another token."""
        sign_in, until_s = self._read(token, "access")
        session = await self._sessions.find(sign_in, [self._mark("agent")]) if sign_in else None
        return None if session is None else (session, min(until_s, self._clock() + CHECK_S))

    def _tokens(self, sign_in: str) -> dict[str, Any]:
        access, refresh = self._signed(sign_in, "access", ACCESS_S), self._signed(sign_in, "refresh", SIGN_IN_S)
        return {"access_token": access, "token_type": "Bearer", "expires_in": ACCESS_S, "refresh_token": refresh}

    def _signed(self, sign_in: str, use: str, ttl_s: int) -> str:
        from joserfc import jwt
        from joserfc.jwk import OctKey

        claims = {"sid": sign_in, "use": use, "exp": int(self._clock()) + ttl_s, "jti": secrets.token_urlsafe(12)}
        return jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(self._mark("token")))

    def _read(self, token: str, use: str) -> tuple[str, float]:
        """The session's token and the end in unix seconds; empty and 0 where it is none of ours for this use."""
        from joserfc import jwt
        from joserfc.errors import JoseError
        from joserfc.jwk import OctKey

        try:
            claims = jwt.decode(token, OctKey.import_key(self._mark("token")), algorithms=["HS256"]).claims
        except (JoseError, ValueError, TypeError):  # TypeError: of a `crit` that is no list
            return "", 0.0
        lasts = claims["use"] == use and claims["exp"] > self._clock()
        return (claims["sid"], claims["exp"]) if lasts else ("", 0.0)


def _digest(device_code: str) -> str:
    return hashlib.sha256(device_code.encode(errors="replace")).hexdigest()


def _key(kind: str, name: str) -> str:
    return f"sameway:{{device}}:{kind}:{name}"
