"""The semantic cache: find the cached answer of a prompt that means the same. One synchronous
object.

It holds encoder, index and rule, and needs no process around it. `fold` takes in the log's records,
at start-up and afterwards alike. Knows no Redis and no answers: a hit is a pointer, and the caller
fetches the entry. Judges elsewhere compare answers, but for prose, of which
`cache.semantic.sketches` keeps what a judge needs; verdicts come back as records
(`cache.semantic.state`). Invariants: a hit has the query's partition and compat, byte for byte:
they select the searched keys; an answer that was dropped, has expired or is out of service is not
served; the same records give the same answers, folded one by one or at a restart. A key is embedded
when a lookup comes beside it: a dialogue that is never repeated costs the encoder nothing.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.decision.explain import decide
from cache.decision.features import FEATURES, NEIGHBOURS, Neighbour
from cache.decision.parts import TEMPLATE_PROMPTS, Parts, Piece, Split, split
from cache.decision.prior import PRIOR
from cache.decision.rule import Rule, VerifiedRule
from cache.decision.text_features import read
from cache.decision.texts import read_for
from cache.encoder.embedder import Memo
from cache.encoder.types import Embedder, EmbedderInfo, Encoded
from cache.events import EntriesDropped
from cache.fingerprint import Partition
from cache.query import LookupResult, Miss, MissReason, Neighbourhood, Query
from cache.semantic.contexts import Contexts
from cache.semantic.index import Found, VectorIndex
from cache.semantic.sketches import AnswerSketches
from cache.semantic.state import NamespaceStates
from cache.verdicts.judges import Judgement
from cache.verdicts.prose import Sketch
from cache.verdicts.records import AnswerJudged, VerdictRecord, answer_name

# keys still without a vector that one lookup embeds beside its query; the newest first
_INLINE_MAX, _INLINE_CHARS = 32, 4_000
_SETTLED, _SETTLED_CHARS = 8, 1_000  # at a time: a lookup may have to wait for it
_SENTENCES_MAX = 5_000
_CHECK_BYTES = 8

EntryKey = tuple[Partition, bytes]


@dataclass(frozen=True, slots=True)
class PromptAdded:
    """A cached prompt that can be found semantically. `group` names the answers found equal to its
    own, `vector` is one that `take_unsaved` gave before, here or elsewhere; each may be empty.
    """

    partition: Partition
    exact: bytes
    compat: bytes
    text: str
    created_at: float
    expires_at: float
    group: bytes = b""
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class SketchAdded:
    """The answer that entry `exact` had at `created_at` has an encoded sketch. `is_saved`: the store
    has it.
    """

    partition: Partition
    exact: bytes
    created_at: float
    data: bytes
    is_saved: bool = True


Record = PromptAdded | SketchAdded | EntriesDropped | VerdictRecord


@dataclass(slots=True)
class _Key:
    """One cached prompt. `number` is its key in the index, `text` what is compared by meaning in
    prompts of the same `frame`. `spans` are those that a template may share.
    """

    number: int
    partition: Partition
    exact: bytes
    compat: bytes
    frame: bytes
    text: str
    spans: tuple[Piece, ...]
    created_at: float
    expires_at: float
    group: bytes
    is_embedded: bool = False

    @property
    def namespace(self) -> bytes:
        return self.partition + self.compat

    @property
    def room(self) -> bytes:
        """The keys that may answer each other's prompts."""
        return self.namespace + self.frame

    @property
    def asked(self) -> tuple[Partition, str]:
        return self.partition, self.text

    @property
    def answer(self) -> bytes:
        return answer_name(self.exact, self.created_at)


@dataclass(slots=True)
class _Room:
    """How many keys it has, the numbers of those without a vector, and how many each group has."""

    keys: int = 0
    pending: dict[int, None] = field(default_factory=dict)
    groups: Counter[bytes] = field(default_factory=Counter)


@dataclass(slots=True)
class _Line:
    """A line of prompts, each in its own place, and the numbers of the keys that have it: a set
    takes five times the memory of a tuple, and most lines have one key.
    """

    span: Piece | None = None
    keys: tuple[int, ...] | set[int] = ()

    def add(self, number: int) -> None:
        if isinstance(self.keys, set):
            self.keys.add(number)
        elif number not in self.keys:
            self.keys = (*self.keys, number) if len(self.keys) < TEMPLATE_PROMPTS else {*self.keys, number}

    def discard(self, number: int) -> None:
        if isinstance(self.keys, set):
            self.keys.discard(number)
        else:
            self.keys = tuple([one for one in self.keys if one != number])


@dataclass(slots=True)
class _Namespace:
    """How many keys it has, and the lines of those that a template may share."""

    keys: int = 0
    lines: dict[bytes, _Line] = field(default_factory=dict)


class SemanticCache:
    """`clock` gives unix seconds; `keys_max` bounds the keys, the oldest go first; `index` is an
    empty one, on the CPU if not given.
    """

    def __init__(
        self,
        embedder: Embedder,
        rule: Rule | None = None,
        clock: Callable[[], float] = time.time,
        keys_max: int = 1_000_000,
        index: VectorIndex | None = None,
    ) -> None:
        self._embedder = embedder
        self._encoder = Memo(embedder)
        self._rule = rule or VerifiedRule(PRIOR)
        self._clock = clock
        self._keys_max = keys_max
        self._index = index if index is not None else VectorIndex(embedder.info.dims)
        self._numbers = itertools.count()
        self._keys: dict[int, _Key] = {}
        self._by_entry: dict[EntryKey, int] = {}
        self._namespaces: dict[bytes, _Namespace] = {}
        self._rooms: dict[bytes, _Room] = {}
        self._expiries: list[tuple[float, int]] = []
        # rooms where keys wait for a vector beside others
        self._settling: dict[bytes, None] = {}
        self._unsaved: list[tuple[Partition, bytes, bytes]] = []
        self._sketches = AnswerSketches()
        # of sentences: those of answers that come again cost the encoder nothing
        self._sentences = Memo(embedder, _SENTENCES_MAX)
        self._contexts = Contexts(self._sentences)
        self._unsaved_sketches: list[SketchAdded] = []
        self.rule_name = hashlib.blake2b("\n".join(FEATURES).encode() + embedder.info.key, digest_size=8).digest()
        self._states = NamespaceStates(self._rule, self.rule_name)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def embedder(self) -> EmbedderInfo:
        return self._encoder.info

    @property
    def dims(self) -> int:
        return self._encoder.info.dims

    @property
    def namespaces(self) -> int:
        return len(self._namespaces)

    # --- asking

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        """A verdict for each query."""
        return [near.decision for near in self.near(queries, 0)]

    def near(self, queries: Sequence[Query], count: int = NEIGHBOURS) -> list[Neighbourhood]:
        """A verdict for each query with its `count` nearest neighbours, and why each of them may
        not be served.
        """
        self._expire()
        parts = [self._parts_of(query) for query in queries]
        rooms = [query.namespace + hits.frame for query, hits in zip(queries, parts, strict=True)]
        encodable = [index for index, room in enumerate(rooms) if room in self._rooms and parts[index].question]
        meant = [msgspec.structs.replace(query, text=hits.question) for query, hits in zip(queries, parts, strict=True)]
        self._want_contexts([queries[index] for index in encodable], [parts[index] for index in encodable])
        encoded = self._encode_with_pending(
            [meant[index] for index in encodable], [rooms[index] for index in encodable]
        )
        answers = [Neighbourhood(Miss(self._absence(query)), ()) for query in queries]
        by_room: dict[bytes, list[tuple[int, NDArray[np.float32]]]] = {}
        for row, index in enumerate(encodable):
            if encoded.tokens[row] > self._encoder.info.tokens_max:
                answers[index] = Neighbourhood(Miss(MissReason.TOO_LONG), ())
            elif rooms[index] in self._rooms:  # its last key may have turned out too long for the encoder
                by_room.setdefault(rooms[index], []).append((index, encoded.vectors[row]))
        for room, rows in by_room.items():
            found = self._index.search(room, np.stack([vector for _, vector in rows]), max(NEIGHBOURS, count))
            for (index, _), hits in zip(rows, found, strict=True):
                answers[index] = self._decide(meant[index], room, hits, count)
        return answers

    def _absence(self, query: Query) -> MissReason:
        """Why no prompt here may be compared with this one."""
        has_others = query.namespace in self._namespaces
        return MissReason.DOCUMENTS if has_others else MissReason.EMPTY

    def _parts_of(self, query: Query) -> Parts:
        """Split a prompt into what must be equal and what is compared, by the templates of its namespace."""
        with read_for(query.partition):
            made = split(query.text)
        namespace = self._namespaces.get(query.namespace)
        return made.parts if namespace is None or not made.spans else made.slot(_counts(namespace), is_lookup=True)

    def _want_contexts(self, queries: Sequence[Query], parts: Sequence[Parts]) -> None:
        for query, split_parts in zip(queries, parts, strict=True):
            if not query.context and not split_parts.has_documents:
                continue
            documents = query.text.replace(split_parts.question, "\n") if split_parts.has_documents else ""
            room = query.namespace + split_parts.frame
            self._contexts.want(room, query.partition, f"{query.context}\n{documents}")

    def has_neighbours(self, query: Query) -> bool:
        """Whether anything is cached that could answer it. Safe beside the thread that uses the
        cache.
        """
        return query.namespace in self._namespaces

    def prepare(self, queries: Sequence[Query]) -> None:
        """Embed what a lookup of these queries will need, so that it need not. Safe beside the thread
        that uses the cache.
        """
        texts = []
        for query in queries:
            parts = self._parts_of(query)
            if parts.question and query.namespace + parts.frame in self._rooms:
                texts.append((query.partition, parts.question))
        self._encoder.encode(texts)

    def embed(self, texts: Sequence[str]) -> Encoded:
        """Vectors for a caller of its own; none of it is kept, so equal texts cost the same again."""
        return self._embedder.encode(texts)

    # --- answers

    def embed_sentences(self, partition: Partition, texts: Sequence[str]) -> Encoded:
        """Vectors of what an answer of a partition consists of, which the partition may have had
        before.
        """
        return self._sentences.encode([(partition, text) for text in texts])

    def wants_sketch(self, partition: Partition, exact: bytes, created_at: float | None = None) -> bool:
        """Whether the answer of an entry here has no sketch, the one of `created_at` where that is
        given. Safe beside the thread that uses the cache.
        """
        key = self._keys.get(self._by_entry.get((partition, exact), -1))
        if key is None or created_at not in (None, key.created_at):
            return False
        return not self._sketches.has(key.namespace, key.answer)

    def settle_prose(self, namespace: bytes) -> bool:
        """Do a part of the work for the next ruling in a namespace. Returns whether more is left."""
        return self._sketches.settle(namespace)

    def judge_prose(self, namespace: bytes, fresh: Sketch, name: bytes, others: Sequence[bytes]) -> list[Judgement]:
        """The rulings on a fresh answer against others of its namespace, in order; UNKNOWN for one
        without a sketch. `name` is its own (`cache.verdicts.records`).
        """
        return self._sketches.judge(namespace, fresh, name, others)

    def _decide(self, query: Query, room: bytes, nearest: Found, count: int) -> Neighbourhood:
        neighbours = self._neighbours(query, room, nearest)
        if not neighbours:
            return Neighbourhood(Miss(self._absence(query)), ())
        state = self._states.of(query.namespace)
        with read_for(query.partition):
            near, counters = decide(query, neighbours, count, state, self._rule, self.rule_name)
        if not query.is_try:
            state.counters = counters
        return near

    def _neighbours(self, query: Query, room: bytes, nearest: Found) -> list[Neighbour]:
        now = self._clock()
        counts, tallies = self._rooms[room].groups, self._states.tallies(query.namespace)
        out = self._states.suspended(query.partition)
        neighbours = []
        numbers = nearest.keys.tolist()
        for number, similarity in zip(numbers, nearest.similarities.tolist(), strict=True):
            key = self._keys[number]
            group = key.group
            is_out = bool(out) and (b"a" + key.answer in out or b"g" + group in out)
            right, wrong = tallies.get(group, (0.0, 0.0))
            similarity, age_s = min(1.0, round(similarity, 6)), max(0.0, now - key.created_at)
            near = Neighbour(
                similarity=similarity,
                text=key.text,
                exact=key.exact,
                age_s=age_s,
                group=group,
                keys=counts[group],
                right=right,
                wrong=wrong,
                is_suspended=is_out,
            )
            neighbours.append(near)
        # equal cosines (the encoder ignores case) in an order that does not depend on when keys
        # came
        neighbours.sort(key=lambda one: (-one.similarity, one.exact))
        return neighbours

    # --- learning

    def _learn(self, record: VerdictRecord) -> None:
        self._states.learn(record)
        if isinstance(record, AnswerJudged) and record.joined is not None:
            key = self._keys.get(self._by_entry.get((record.partition, record.verdict.exact), -1))
            # not answered anew since
            if key is not None and key.created_at == record.verdict.created_at:
                self._regroup(key, record.joined)

    def forget_verdicts(self) -> None:
        """Forget all verdicts, before they are read anew. The groups that entries carry stay."""
        self._states.clear()

    def _regroup(self, key: _Key, name: bytes | None) -> None:
        """Move a key to a group of its room; None: out of all."""
        groups = self._rooms[key.room].groups
        groups[key.group] -= 1
        if not groups[key.group]:
            del groups[key.group]
        if name is not None:
            key.group = name
            groups[name] += 1

    # --- following the log

    def fold(self, records: Sequence[Record]) -> None:
        """Take in what was added, dropped and judged, in order."""
        self._expire()
        for record in records:
            if isinstance(record, EntriesDropped):
                for exact in record.exacts:
                    self._drop(self._by_entry.get((record.partition, exact)))
            elif isinstance(record, SketchAdded):
                self._add_sketch(record)
            elif not isinstance(record, PromptAdded):
                self._learn(record)
            elif record.expires_at > self._clock():
                self._add(record)

    def retain(self, entries: set[EntryKey]) -> None:
        """Drop every key that is not of these entries: the end of a rebuild into a cache that was
        not empty.
        """
        for number in [number for entry, number in self._by_entry.items() if entry not in entries]:
            self._drop(number)

    def settle(self) -> int:
        """Embed a few of the keys that wait beside others, so that the next lookup there need not.
        How many were.
        """
        pending = itertools.chain.from_iterable(map(self._pending, self._settling))
        waiting = self._few(pending, _SETTLED, _SETTLED_CHARS)
        if waiting:
            self._put_vectors(waiting, self._encoder.encode([key.asked for key in waiting]))
        while self._settling and not self._pending(next(iter(self._settling))):
            del self._settling[next(iter(self._settling))]
        if not waiting:
            self._contexts.settle(_SETTLED_CHARS)
        return len(waiting)

    def _pending(self, name: bytes) -> Iterable[int]:
        room = self._rooms.get(name)
        return room.pending if room is not None else ()

    @property
    def is_settled(self) -> bool:
        return not self._settling and self._contexts.is_settled

    def take_unsaved(self) -> list[tuple[Partition, bytes, bytes]]:
        """Vectors made here since the last call, for the store: partition, exact, float16 bytes and,
        where not all of the prompt was embedded, a digest of what was.
        """
        unsaved, self._unsaved = self._unsaved, []
        return unsaved

    def take_unsaved_sketches(self) -> list[SketchAdded]:
        """Sketches made here since the last call, for the store."""
        unsaved, self._unsaved_sketches = self._unsaved_sketches, []
        return unsaved

    def _add_sketch(self, record: SketchAdded) -> None:
        key = self._keys.get(self._by_entry.get((record.partition, record.exact), -1))
        if key is None or key.created_at != record.created_at:
            return  # the answer is gone
        try:
            sketch = Sketch.decode(record.data)
        except ValueError:
            return  # damaged, or of another version: the judge abstains
        if not record.is_saved:
            self._unsaved_sketches.append(record)
        if key.number in self._rooms[key.room].pending:
            self._put_vectors([key], self._encoder.encode([key.asked]))
        if key.is_embedded:  # its prompt fits the encoder
            (vector,) = self._index.vectors(key.room, (key.number,))
            with read_for(key.partition):
                asked = read(key.text).content_set
            self._sketches.add(key.namespace, key.answer, vector, asked, sketch)

    # --- keys

    def _add(self, record: PromptAdded) -> None:
        entry = (record.partition, record.exact)
        known = self._by_entry.get(entry)
        if known is not None:  # answered anew: the times and the answer change
            key = self._keys[known]
            is_anew = key.created_at != record.created_at
            if is_anew:
                self._sketches.drop(key.namespace, key.answer)
            key.created_at, key.expires_at = record.created_at, record.expires_at
            if is_anew or record.group:
                self._regroup(key, record.group or key.answer)
            heapq.heappush(self._expiries, (key.expires_at, known))
            return
        with read_for(record.partition):
            prompt_split = split(record.text)
        if not prompt_split.parts.question and not prompt_split.spans:
            return  # nothing of it is compared by meaning, nor ever will be
        key = _Key(
            number=next(self._numbers),
            partition=record.partition,
            exact=record.exact,
            compat=record.compat,
            frame=prompt_split.parts.frame,
            text=prompt_split.parts.question,
            spans=prompt_split.spans,
            created_at=record.created_at,
            expires_at=record.expires_at,
            group=record.group or answer_name(record.exact, record.created_at),
        )
        self._keys[key.number] = key
        self._by_entry[entry] = key.number
        heapq.heappush(self._expiries, (key.expires_at, key.number))
        self._namespaces.setdefault(key.namespace, _Namespace()).keys += 1
        self._enter(key)
        if key.spans:
            self._add_lines(key, prompt_split.lines)
        self._vectorise(key, record.vector)
        while len(self._keys) > self._keys_max:
            self._drop(next(iter(self._keys)))

    def _enter(self, key: _Key) -> None:
        room = self._rooms.setdefault(key.room, _Room())
        room.keys += 1
        if key.text:
            room.pending[key.number] = None
        room.groups[key.group] += 1

    def _leave(self, key: _Key) -> None:
        room = self._rooms[key.room]
        room.pending.pop(key.number, None)
        if key.is_embedded:
            key.is_embedded = False
            with read_for(key.partition):
                self._states.of(key.namespace).word_counts.add(key.text, -1)
            self._index.remove(key.room, key.number)
        self._regroup(key, None)
        room.keys -= 1
        if not room.keys:
            del self._rooms[key.room]

    def _vectorise(self, key: _Key, vector: bytes = b"") -> None:
        """Give a key its vector where that is at hand, else let it wait for one."""
        room = self._rooms[key.room]
        if key.number not in room.pending:
            return
        check = _check(key)
        if len(vector) == 2 * self.dims + len(check) and vector.endswith(check):
            self._put_vector(key, np.frombuffer(vector, "<f2", self.dims).astype(np.float32))
        elif self._encoder.knows(*key.asked):
            self._put_vectors([key], self._encoder.encode([key.asked]))
        elif room.keys > 1:
            self._settling[key.room] = None

    def _drop(self, number: int | None) -> None:
        key = self._keys.pop(number, None) if number is not None else None
        if key is None:
            return
        del self._by_entry[key.partition, key.exact]
        self._leave(key)
        self._sketches.drop(key.namespace, key.answer)
        namespace = self._namespaces[key.namespace]
        namespace.keys -= 1
        if key.spans:
            self._drop_lines(key)
        if not namespace.keys:
            del self._namespaces[key.namespace]
            self._states.leave(key.namespace)

    # --- templates

    def _add_lines(self, key: _Key, digests: Sequence[bytes]) -> None:
        """Count the lines of a key, and find its parts and those of others anew where lines have
        become a template's. Prompts that share a line share its text in memory.
        """
        lines = self._namespaces[key.namespace].lines
        changed = {key.number}
        for digest in digests:
            line = lines.setdefault(digest, _Line())
            line.add(key.number)
            if len(line.keys) == TEMPLATE_PROMPTS:
                changed.update(line.keys)
        spans = []
        for span in key.spans:
            line = lines[span.digest]
            line.span = line.span or span
            spans.append(line.span if line.span == span else span)
        key.spans = tuple(spans)
        self._split_anew(key.namespace, changed)

    def _drop_lines(self, key: _Key) -> None:
        lines = self._namespaces[key.namespace].lines
        changed: set[int] = set()
        for digest in Split.of(key.spans).lines:
            line = lines[digest]
            line.discard(key.number)
            if len(line.keys) == TEMPLATE_PROMPTS - 1:
                changed.update(line.keys)
            if not line.keys:
                del lines[digest]
        self._split_anew(key.namespace, changed)

    def _split_anew(self, namespace: bytes, numbers: Iterable[int]) -> None:
        """Move the keys whose parts have changed."""
        count = _counts(self._namespaces[namespace])
        for number in sorted(numbers):
            key = self._keys[number]
            parts = Split.of(key.spans).slot(count)
            if (parts.frame, parts.question) != (key.frame, key.text):
                self._leave(key)
                key.frame, key.text = parts.frame, parts.question
                self._enter(key)
                self._vectorise(key)

    def _expire(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, number = heapq.heappop(self._expiries)
            key = self._keys.get(number)
            if key is not None and key.expires_at <= now:
                self._drop(number)

    # --- vectors

    def _encode_with_pending(self, queries: Sequence[Query], rooms: Sequence[bytes]) -> Encoded:
        """Encode the queries, each of a room, and in the same batch the keys there that have no
        vector yet.
        """
        waiting: list[_Key] = []
        for name in dict.fromkeys(rooms):
            waiting += self._few(reversed(self._rooms[name].pending), _INLINE_MAX, _INLINE_CHARS)
        asked = [(query.partition, query.text) for query in queries]
        encoded = self._encoder.encode(asked + [key.asked for key in waiting])
        at = len(queries)
        self._put_vectors(waiting, Encoded(encoded.vectors[at:], encoded.tokens[at:]))
        return Encoded(encoded.vectors[:at], encoded.tokens[:at])

    def _few(self, numbers: Iterable[int], keys_max: int, chars_max: int) -> list[_Key]:
        """The first of these keys, with that many characters together; one at least."""
        few: list[_Key] = []
        for number in itertools.islice(numbers, keys_max):
            key = self._keys[number]
            chars_max -= len(key.text)
            if few and chars_max < 0:
                break
            few.append(key)
        return few

    def _put_vectors(self, keys: Sequence[_Key], encoded: Encoded) -> None:
        for key, vector, tokens in zip(keys, encoded.vectors, encoded.tokens, strict=True):
            if tokens > self._encoder.info.tokens_max:
                if key.spans:  # a template may show what to embed
                    del self._rooms[key.room].pending[key.number]
                else:
                    self._drop(key.number)  # no vector says what it means: not eligible
                continue
            stored = vector.astype(np.float16)
            self._unsaved.append((key.partition, key.exact, stored.tobytes() + _check(key)))
            self._put_vector(key, stored.astype(np.float32))

    def _put_vector(self, key: _Key, vector: NDArray[np.float32]) -> None:
        """`vector` has been through float16, as the store keeps it: a rebuilt index holds the same
        numbers.
        """
        if self._rooms[key.room].pending.pop(key.number, key) is None:
            key.is_embedded = True
            with read_for(key.partition):
                self._states.of(key.namespace).word_counts.add(key.text)
            self._index.add(key.room, key.number, vector)


def _check(key: _Key) -> bytes:
    """A digest of the part of a prompt that a stored vector is of; empty for the whole prompt."""
    if not key.frame:
        return b""
    return hashlib.blake2b(key.text.encode("utf-8", "surrogatepass"), digest_size=_CHECK_BYTES).digest()


def _counts(namespace: _Namespace) -> Callable[[bytes], int]:
    """How many prompts of the namespace have a line."""
    lines, none = namespace.lines, _Line()
    return lambda digest: len(lines.get(digest, none).keys)
