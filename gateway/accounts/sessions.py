"""The dashboard's sessions: a row for each, so that an ended session is over in all processes.

The cookie has a random token, and the row its SHA-256. Knows no cookies and no keys: a session
belongs to a `mark`, which the caller derives from the admin key or the identity provider. Invariant:
a token is valid until its expiry or an `end`, and only under the mark with which it began.
"""

import hashlib
import secrets
from collections.abc import Callable, Collection

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from gateway.accounts.database import Database, uncancelled
from gateway.accounts.schema import sessions


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session. Times are unix seconds; `client` is the address at which it began.

    `subject`, `sid` and `groups` are the claims of a person who signed in at the identity provider.
    """

    digest: bytes
    created_at_s: float
    expires_at_s: float
    client: str = ""
    actor: str = ""
    subject: str = ""
    sid: str = ""
    groups: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Its name in lists, of which the token cannot be made."""
        return self.digest[:8].hex()


class Sessions:
    """Stores the sessions. `clock` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    @uncancelled
    async def start(self, mark: bytes, ttl_s: float, **facts: object) -> str:
        """Begin a session of `ttl_s` seconds with `facts` of a `Session`, and return its token. Removes
        expired sessions.
        """
        token = secrets.token_urlsafe(32)
        now_s = self._clock()
        async with self._database.writing() as connection:
            await connection.execute(sa.delete(sessions).where(sessions.c.expires_at_s <= now_s))
            row = {"digest": _digest(token), "mark": mark, "created_at_s": now_s, "expires_at_s": now_s + ttl_s}
            await connection.execute(sa.insert(sessions).values(row | facts))
        return token

    async def use_once(self, token: str, mark: bytes, ttl_s: float) -> bool:
        """Whether `token` was not used in the last `ttl_s` seconds; from now on it was."""
        now_s = self._clock()
        row = {"digest": _digest(token), "mark": mark, "created_at_s": now_s, "expires_at_s": now_s + ttl_s}
        try:
            await self._database.write(sa.insert(sessions).values(row))
        except IntegrityError:
            return False
        return True

    async def find(self, token: str, marks: Collection[bytes]) -> Session | None:
        """The session of `token` if it lasts and began under one of `marks`."""
        found = await self._listed(sessions.c.digest == _digest(token), sessions.c.mark.in_(marks))
        return found[0] if found else None

    async def open_ones(self, marks: Collection[bytes]) -> tuple[Session, ...]:
        """All that last and began under one of `marks`, the latest first."""
        return await self._listed(sessions.c.mark.in_(marks))

    async def _listed(self, *conditions: sa.ColumnElement[bool]) -> tuple[Session, ...]:
        columns = [sessions.c[name] for name in Session.__struct_fields__]
        lasts = sessions.c.expires_at_s > self._clock()
        statement = sa.select(*columns).where(lasts, *conditions).order_by(sessions.c.created_at_s.desc())
        rows = await self._database.rows(statement)
        return tuple([Session(**{**row._asdict(), "groups": tuple(row.groups)}) for row in rows])

    async def end(self, token: str) -> None:
        """End the session of `token`, if it exists."""
        await self._database.write(sa.delete(sessions).where(sessions.c.digest == _digest(token)))

    async def end_all(self, marks: Collection[bytes], **claims: object) -> int:
        """End the sessions under `marks` whose columns have the values of `claims`; how many."""
        equal = [sessions.c[name] == value for name, value in claims.items()]
        return await self._database.write(sa.delete(sessions).where(sessions.c.mark.in_(marks), *equal))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
