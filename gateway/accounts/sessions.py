"""The dashboard's sessions: a row for each, so that an ended session is over in all processes.

The cookie has a random token, and the row its SHA-256. Knows no cookies and no keys: a session
belongs to a `mark`, which the caller derives from the admin key. Invariant: a token is valid until
its expiry or `end`, and only under the mark with which it began.
"""

import hashlib
import secrets
from collections.abc import Callable

import sqlalchemy as sa

from gateway.accounts.database import Database, uncancelled
from gateway.accounts.schema import sessions


class Sessions:
    """Stores the sessions. `clock` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    @uncancelled
    async def start(self, mark: bytes, ttl_s: float) -> str:
        """Begin a session of `ttl_s` seconds, and return its token. Removes expired sessions."""
        token = secrets.token_urlsafe(32)
        now_s = self._clock()
        async with self._database.writing() as connection:
            await connection.execute(sa.delete(sessions).where(sessions.c.expires_at_s <= now_s))
            row = {"digest": _digest(token), "mark": mark, "expires_at_s": now_s + ttl_s}
            await connection.execute(sa.insert(sessions).values(row))
        return token

    async def is_open(self, token: str, mark: bytes) -> bool:
        """Whether the session of `token` lasts and began under `mark`."""
        s = sessions.c
        is_it = sa.and_(s.digest == _digest(token), s.mark == mark, s.expires_at_s > self._clock())
        return bool(await self._database.rows(sa.select(s.digest).where(is_it)))

    async def end(self, token: str) -> None:
        """End the session of `token`, if it exists."""
        await self._database.write(sa.delete(sessions).where(sessions.c.digest == _digest(token)))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
