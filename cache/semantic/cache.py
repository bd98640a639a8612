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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache.decision.explain import decide
from cache.decision.features import FEATURES, NEIGHBOURS, Neighbour
from cache.decision.prior import PRIOR
from cache.decision.rule import Rule, VerifiedRule
from cache.decision.text_features import read_for
from cache.encoder.embedder import Memo
from cache.encoder.types import Embedder, EmbedderInfo, Encoded
from cache.events import EntriesDropped
from cache.fingerprint import Partition
from cache.query import Hit, Miss, MissReason, Neighbourhood, Query
from cache.semantic.index import Found, VectorIndex
from cache.semantic.sketches import AnswerSketches
from cache.semantic.state import NamespaceStates
from cache.verdicts.judges import Judgement
from cache.verdicts.prose import Sketch
from cache.verdicts.records import AnswerJudged, Source, Verdict, VerdictRecord, answer_name

# keys still without a vector that one lookup embeds beside its query; the newest first
_INLINE_MAX, _INLINE_CHARS = 32, 4_000
_SETTLED, _SETTLED_CHARS = 8, 1_000  # at a time: a lookup may have to wait for it
_SENTENCES_MAX = 5_000

EntryKey = tuple[Partition, bytes]


@dataclass(frozen=True, slots=True)
class PromptAdded:
    """A cached prompt that can be found semantically. `group` names the answers found equal to its
    own, or is empty.
    """

    partition: Partition
    exact: bytes
    compat: bytes
    text: str
    created_at: float
    expires_at: float
    group: bytes = b""


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
    """One cached prompt. `number` is its key in the index."""

    number: int
    partition: Partition
    exact: bytes
    compat: bytes
    text: str
    created_at: float
    expires_at: float
    group: bytes

    @property
    def namespace(self) -> bytes:
        return self.partition + self.compat

    @property
    def asked(self) -> tuple[Partition, str]:
        return self.partition, self.text

    @property
    def answer(self) -> bytes:
        return answer_name(self.exact, self.created_at)


@dataclass(slots=True)
class _Namespace:
    """Numbers of the keys with and without a vector, and how many keys each group has."""

    embedded: set[int] = field(default_factory=set)
    pending: dict[int, None] = field(default_factory=dict)
    groups: Counter[bytes] = field(default_factory=Counter)


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
        self._expiries: list[tuple[float, int]] = []
        # namespaces where keys wait for a vector beside others
        self._settling: dict[bytes, None] = {}
        self._unsaved: list[tuple[Partition, bytes, bytes]] = []
        self._sketches = AnswerSketches()
        # of sentences: those of answers that come again cost the encoder nothing
        self._sentences = Memo(embedder, _SENTENCES_MAX)
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

    @property
    def size_bytes(self) -> int:
        return self._index.size_bytes + self._sketches.size_bytes

    # --- asking

    def lookup(self, queries: Sequence[Query]) -> list[Hit | Miss]:
        """A verdict for each query."""
        return [near.decision for near in self.near(queries, 0)]

    def near(self, queries: Sequence[Query], count: int = NEIGHBOURS) -> list[Neighbourhood]:
        """A verdict for each query with its `count` nearest neighbours, and why each of them may
        not be served.
        """
        self._expire()
        asked = [place for place, query in enumerate(queries) if self.has_neighbours(query)]
        encoded = self._encode_with_pending([queries[place] for place in asked])
        answers = [Neighbourhood(Miss(MissReason.EMPTY), ()) for _ in queries]
        by_namespace: dict[bytes, list[tuple[int, NDArray[np.float32]]]] = {}
        for row, place in enumerate(asked):
            if encoded.tokens[row] > self._encoder.info.tokens_max:
                answers[place] = Neighbourhood(Miss(MissReason.TOO_LONG), ())
            else:
                namespace = queries[place].partition + queries[place].compat
                by_namespace.setdefault(namespace, []).append((place, encoded.vectors[row]))
        for namespace, rows in by_namespace.items():
            found = self._index.search(namespace, np.stack([vector for _, vector in rows]), max(NEIGHBOURS, count))
            for (place, _), one in zip(rows, found, strict=True):
                answers[place] = self._decide(queries[place], one, count)
        return answers

    def has_neighbours(self, query: Query) -> bool:
        """Whether anything is cached that could answer it. Safe beside the thread that uses the
        cache.
        """
        return query.partition + query.compat in self._namespaces

    def prepare(self, queries: Sequence[Query]) -> None:
        """Embed what a lookup of these queries will need, so that it need not."""
        self._encode_with_pending([query for query in queries if self.has_neighbours(query)])

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
        """A small part of what the next ruling in a namespace needs. Whether more is left."""
        return self._sketches.settle(namespace)

    def judge_prose(self, namespace: bytes, fresh: Sketch, name: bytes, others: Sequence[bytes]) -> list[Judgement]:
        """The rulings on a fresh answer against others of its namespace, in order; UNKNOWN for one
        without a sketch. `name` is its own (`cache.verdicts.records`).
        """
        return self._sketches.judge(namespace, fresh, name, others)

    def _decide(self, query: Query, found: Found, count: int) -> Neighbourhood:
        neighbours = self._neighbours(query, found)
        if not neighbours:
            return Neighbourhood(Miss(MissReason.EMPTY), ())
        state = self._states.of(query.partition + query.compat)
        with read_for(query.partition):
            near, counters = decide(query, neighbours, count, state, self._rule, self.rule_name)
        if not query.is_try:
            state.counters = counters
        return near

    def _neighbours(self, query: Query, found: Found) -> list[Neighbour]:
        now = self._clock()
        name = query.partition + query.compat
        counts, tallies = self._namespaces[name].groups, self._states.tallies(name)
        out = self._states.suspended(query.partition)
        neighbours = []
        for number, similarity in zip(found.keys.tolist(), found.similarities.tolist(), strict=True):
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

    def judge(
        self, query: Query, answer: Hit | Miss, exact: bytes, same: Callable[[bytes], bool | None]
    ) -> AnswerJudged | None:
        """Compare the fresh answer to `query`, stored as `exact`, with those of its neighbours.

        `answer` is the decision on the query. `same` tells whether the fresh answer equals that of
        another entry, None if that can't be decided. The result is for `fold`; None if there was
        nothing to compare with, or nothing to learn.
        """
        trial = answer.trial
        if trial is None:
            return None
        groups = {
            other: self._keys[self._by_entry[query.partition, other]].group
            for other in (*trial.ranked, exact)
            if (query.partition, other) in self._by_entry
        }
        first = trial.ranked[0]
        if first not in groups or exact not in groups:
            return None
        is_right = same(first)
        if is_right is None and not trial.features:
            return None
        equal = first if is_right else next((o for o in trial.ranked[1:] if o in groups and same(o)), None)
        verdict = Verdict(
            source=Source.AUDIT if trial.chance < 1.0 else Source.MISS,
            compat=query.compat,
            is_right=is_right,
            trial=trial,
            at=self._clock(),
            exact=exact,
            created_at=self._keys[self._by_entry[query.partition, exact]].created_at,
        )
        return AnswerJudged(query.partition, verdict, groups[first], groups[equal] if equal else None)

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
        """Move a key to a group of its namespace; None: out of all."""
        groups = self._namespaces[key.namespace].groups
        groups[key.group] -= 1
        if not groups[key.group]:
            del groups[key.group]
        if name is not None:
            key.group = name
            groups[name] += 1

    # --- following the log

    def fold(self, records: Sequence[Record], vectors: Mapping[EntryKey, NDArray[np.float32]] | None = None) -> None:
        """Take in what was added, dropped and judged, in order. `vectors` are those already known,
        by entry.
        """
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
                self._add(record, (vectors or {}).get((record.partition, record.exact)))

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
        return len(waiting)

    def _pending(self, name: bytes) -> Iterable[int]:
        namespace = self._namespaces.get(name)
        return namespace.pending if namespace is not None else ()

    @property
    def is_settled(self) -> bool:
        return not self._settling

    def knows_vector(self, partition: Partition, text: str) -> bool:
        """Whether a vector for this text of a partition is at hand without the encoder."""
        return self._encoder.knows(partition, text)

    def take_unsaved(self) -> list[tuple[Partition, bytes, bytes]]:
        """Vectors made here since the last call, for the store: partition, exact, float16 bytes."""
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
        if key.number in self._namespaces[key.namespace].pending:
            self._put_vectors([key], self._encoder.encode([key.asked]))
        if key.number in self._keys:  # its prompt fits the encoder
            vector = self._index.vector(key.namespace, key.number)
            self._sketches.add(key.namespace, key.answer, vector, sketch)

    # --- keys

    def _add(self, record: PromptAdded, vector: NDArray[np.float32] | None) -> None:
        entry = (record.partition, record.exact)
        known = self._by_entry.get(entry)
        if known is not None:
            key = self._keys[known]
            # answered anew: the times and the answer change
            if (key.compat, key.text) == (record.compat, record.text):
                is_anew = key.created_at != record.created_at
                if is_anew:
                    self._sketches.drop(key.namespace, key.answer)
                key.created_at, key.expires_at = record.created_at, record.expires_at
                if is_anew or record.group:
                    self._regroup(key, record.group or key.answer)
                heapq.heappush(self._expiries, (key.expires_at, known))
                return
            self._drop(known)
        key = _Key(
            number=next(self._numbers),
            partition=record.partition,
            exact=record.exact,
            compat=record.compat,
            text=record.text,
            created_at=record.created_at,
            expires_at=record.expires_at,
            group=record.group or answer_name(record.exact, record.created_at),
        )
        self._keys[key.number] = key
        self._by_entry[entry] = key.number
        heapq.heappush(self._expiries, (key.expires_at, key.number))
        namespace = self._namespaces.setdefault(key.namespace, _Namespace())
        namespace.pending[key.number] = None
        namespace.groups[key.group] += 1
        if vector is not None:
            self._put_vector(key, vector)
        elif self._encoder.knows(*key.asked):
            self._put_vectors([key], self._encoder.encode([key.asked]))
        elif len(namespace.pending) + len(namespace.embedded) > 1:
            self._settling[key.namespace] = None
        while len(self._keys) > self._keys_max:
            self._drop(next(iter(self._keys)))

    def _drop(self, number: int | None) -> None:
        key = self._keys.pop(number, None) if number is not None else None
        if key is None:
            return
        del self._by_entry[key.partition, key.exact]
        namespace = self._namespaces[key.namespace]
        namespace.pending.pop(key.number, None)
        if key.number in namespace.embedded:
            namespace.embedded.remove(key.number)
            with read_for(key.partition):
                self._states.of(key.namespace).words.add(key.text, -1)
        self._regroup(key, None)
        self._sketches.drop(key.namespace, key.answer)
        self._index.remove(key.namespace, key.number)
        if not namespace.pending and not namespace.embedded:
            del self._namespaces[key.namespace]
            self._states.leave(key.namespace)

    def _expire(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, number = heapq.heappop(self._expiries)
            key = self._keys.get(number)
            if key is not None and key.expires_at <= now:
                self._drop(number)

    # --- vectors

    def _encode_with_pending(self, queries: Sequence[Query]) -> Encoded:
        """Encode the queries and, in the same batch, the keys beside them that have no vector
        yet.
        """
        waiting: list[_Key] = []
        for name in dict.fromkeys(query.partition + query.compat for query in queries):
            waiting += self._few(reversed(self._namespaces[name].pending), _INLINE_MAX, _INLINE_CHARS)
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
                self._drop(key.number)  # no vector says what it means: not eligible
                continue
            stored = vector.astype(np.float16)
            self._unsaved.append((key.partition, key.exact, stored.tobytes()))
            self._put_vector(key, stored.astype(np.float32))

    def _put_vector(self, key: _Key, vector: NDArray[np.float32]) -> None:
        """`vector` has been through float16, as the store keeps it: a rebuilt index holds the same
        numbers.
        """
        namespace = self._namespaces[key.namespace]
        if key.number in namespace.pending:
            del namespace.pending[key.number]
            namespace.embedded.add(key.number)
            with read_for(key.partition):
                self._states.of(key.namespace).words.add(key.text)
            self._index.add(key.namespace, key.number, vector)
