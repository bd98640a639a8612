"""A cached answer, its facts and its purges: plain values, encoded as msgpack.

Knows no Redis, no HTTP and no meaning of a chunk: `Recorded.data` is opaque bytes, `labels` are the
caller's. Invariant: an entry carries its partition and compat, so that they can be checked again
before it is served.
"""

from __future__ import annotations

import hashlib
import zlib
from operator import attrgetter

import msgspec

from cache.fingerprint import CONTEXT_CHARS_MAX, Partition
from cache.stored import reader

_DATA = attrgetter("data")
_ABOUT_BYTES = 500  # an entry without its chunks, about
_CONTEXT_BYTES_MAX = 4 * CONTEXT_CHARS_MAX  # of UTF-8
ASKED = "asked"  # the label with the digest of a prompt whose text is not kept
CURATED = "curated"  # the label of an answer that an operator wrote
REQUEST = "request"  # the label with the JSON of the request that a curated answer is for
FRESH_S = "fresh_s"  # the label with the seconds after which an answer is served while a newer one is made
TAGS = "tags"  # the label with the tags by which a purge finds it, one a line
CURATED_TTL_S = 100 * 365 * 86_400.0
"""The time to live of a curated answer, which stands for no expiry."""


class CacheError(Exception):
    """The cache could not do its work. Lookups never raise it: for them a failure is a miss."""


class CacheUnavailable(CacheError):
    """Redis did not answer while entries were stored, purged or counted."""


class CacheWorkerUnavailable(CacheError):
    """The cache worker is away, still loading, or did not answer in time."""


class Recorded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One piece of a generation, as received.

    `is_whole`: the data is a whole reply, else `count` deltas of a stream.
    """

    data: bytes
    is_whole: bool = False
    count: int = 1


class Entry(msgspec.Struct, frozen=True, array_like=True, tag="e1"):
    """One complete answer. `created_at` is unix seconds.

    `text` is None if the prompt is not eligible for meaning. `saves` is the saving of a hit, in the
    caller's units; one is added, so that an answer that saved nothing is worth keeping, too.
    `context` has the texts before the prompt, packed (`pack_context`); only its `About` keeps them.
    `of` is empty, or names the entry whose answer a verifier found right for `text`, under which a
    lookup by meaning finds that one: such a wording has no chunks.
    """

    partition: Partition
    exact: bytes
    compat: bytes
    text: str | None
    chunks: tuple[Recorded, ...]
    created_at: float
    ttl_s: float
    labels: dict[str, str | int] = {}
    namespace: str = ""
    saves: int = 0
    context: bytes = b""
    of: bytes = b""

    @property
    def id(self) -> str:
        return self.exact.hex()

    @property
    def expires_at(self) -> float:
        """The expiry in unix seconds, which a hit does not change."""
        return self.created_at + self.ttl_s

    @property
    def worth(self) -> float:
        """The saving of one hit for each byte that Redis keeps."""
        return (1 + self.saves) / (_ABOUT_BYTES + self.chunks_bytes)

    @property
    def chunks_bytes(self) -> int:
        """The bytes of its chunks' data."""
        return sum(map(len, map(_DATA, self.chunks)))

    @property
    def is_curated(self) -> bool:
        """Whether an operator wrote it: no generated answer takes its place, and none evicts it."""
        return CURATED in self.labels

    @property
    def fresh_until(self) -> float:
        """The moment in unix seconds from which on a newer answer is made while this one is served to its
        own request; no other request gets it then.
        """
        return self.created_at + min(self.ttl_s, float(self.labels.get(FRESH_S, self.ttl_s)))

    def age_s(self, now: float) -> float:
        return max(0.0, now - self.created_at)

    def encode(self) -> bytes:
        return _ENCODER.encode(msgspec.structs.replace(self, context=b"") if self.context else self)

    @staticmethod
    def decode(data: bytes) -> Entry:
        """Decode an entry. Raises msgspec.DecodeError (or ValidationError) for any other value or
        version.
        """
        return _read(data)

    def about(self) -> About:
        """The entry without its chunks, for admins, purges and the semantic index."""
        return About(
            compat=self.compat,
            text=self.text,
            namespace=self.namespace,
            created_at=self.created_at,
            expires_at=self.expires_at,
            labels=self.labels,
            context=self.context,
            of=self.of,
        )

    def worded(self, exact: bytes, text: str, context: str) -> Entry:
        """Another prompt that this entry answers: a wording, which lives as long."""
        return msgspec.structs.replace(
            self,
            exact=wording_id(exact),
            text=text,
            chunks=(),
            saves=0,
            context=pack_context(context),
            of=self.exact,
            labels={name: value for name, value in self.labels.items() if name not in (CURATED, REQUEST)},
        )


class About(msgspec.Struct, frozen=True, array_like=True, tag="a1"):
    """An entry without its chunks, stored beside them in Redis."""

    compat: bytes
    text: str | None
    namespace: str
    created_at: float
    expires_at: float
    labels: dict[str, str | int] = {}
    context: bytes = b""
    of: bytes = b""


def wording_id(exact: bytes) -> bytes:
    """The id of the wording that the request `exact` is, beside an entry of its own."""
    return hashlib.blake2b(exact, digest_size=len(exact), person=b"sw.wording").digest()


def pack_context(context: str) -> bytes:
    """The texts before a prompt as an entry keeps them."""
    return zlib.compress(context.encode(), 1) if context else b""


def unpack_context(packed: bytes) -> str | None:
    """The texts before a prompt; None where they are damaged."""
    try:
        return zlib.decompressobj().decompress(packed, _CONTEXT_BYTES_MAX).decode() if packed else ""
    except (zlib.error, UnicodeDecodeError):
        return None


_ENCODER = msgspec.msgpack.Encoder()
_read = reader(msgspec.msgpack.Decoder(Entry))


class Purge(msgspec.Struct, frozen=True, array_like=True):
    """Selects the entries to remove: those that match every given condition.

    Without a condition it matches everything. `text` matches whatever its case and spacing;
    `labels` are keys and their values; `older_than_s` counts from creation; `tag` is one of the
    tags of the request that made the answer.
    """

    partition: Partition | None = None
    id: str | None = None
    text: str | None = None
    namespace: str | None = None
    labels: tuple[tuple[str, str | int], ...] = ()
    older_than_s: float | None = None
    tag: str | None = None

    def matches(self, partition: Partition, exact: bytes, about: About, now: float) -> bool:
        return (
            (self.partition is None or self.partition == partition)
            and (self.id is None or self.id == exact.hex())
            and (self.text is None or self._asks(self.text, about))
            and (self.namespace is None or self.namespace == about.namespace)
            and all(about.labels.get(name) == value for name, value in self.labels)
            and (self.older_than_s is None or now - about.created_at > self.older_than_s)
            and (self.tag is None or self.tag in str(about.labels.get(TAGS, "")).split("\n"))
        )

    @staticmethod
    def _asks(text: str, about: About) -> bool:
        if about.text is None:
            return about.labels.get(ASKED) == digest_of(text)
        return _loose(text) == _loose(about.text)


def digest_of(text: str) -> str:
    """The digest by which a purge finds an entry without its text, whatever the text's case and
    spacing.
    """
    return hashlib.blake2b(_loose(text).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _loose(text: str) -> str:
    return " ".join(text.casefold().split())
