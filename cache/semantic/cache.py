"""The semantic cache: find the cached answer of a prompt that means the same. One synchronous
object.

It holds encoder, index and rule, and needs no process around it. `fold` takes in the log's records,
at start-up and afterwards alike. Knows no Redis and no answers: a hit is a pointer, and the caller
fetches the entry. Judges elsewhere compare answers, but for prose, of which
`cache.semantic.sketches` keeps what a judge needs; verdicts come back as records
(`cache.semantic.state`). Invariants: a hit has the query's partition and compat, byte for byte, and
shares a long piece of its context, if that is long (`cache.decision.pieces`): they select the
searched keys; an answer that was dropped, has expired or is out of service is not
served; the same records give the same answers, folded one by one or at a restart. A key is embedded
when a lookup comes beside it: a dialogue that is never repeated costs the encoder nothing.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.decision import pieces
from cache.decision.explain import decide
from cache.decision.features import FEATURES, NEIGHBOURS, Neighbour
from cache.decision.pieces import ANCHORS, Differing, Prompt
from cache.decision.prior import PRIOR
from cache.decision.rule import Rule, VerifiedRule
from cache.decision.texts import read_for, words_of
from cache.encoder.embedder import Memo
from cache.encoder.types import Embedder, EmbedderInfo, Encoded
from cache.events import EntriesDropped
from cache.fingerprint import Partition
from cache.query import LookupResult, Miss, MissReason, Neighbourhood, Query
from cache.semantic.engine import PlacedKey, room_id
from cache.semantic.index import VectorIndex
from cache.semantic.sketches import AnswerSketches
from cache.semantic.state import NamespaceStates
from cache.verdicts.judges import Judgement
from cache.verdicts.prose import Sketch
from cache.verdicts.records import AnswerJudged, VerdictRecord, answer_name
from cache.verdicts.store import Untold

# keys still without a vector that one lookup embeds beside its query; the newest first
_INLINE_MAX, _INLINE_CHARS = 32, 4_000
_SETTLED, _SETTLED_CHARS = 8, 1_000  # at a time: a lookup may have to wait for it
_SENTENCES_MAX = 5_000
_EXPIRIES_SPARE = 1_000
_CHECK_BYTES, _ROOM_BYTES = 8, 16
_ROOMS = 3  # that a lookup searches
SEARCHED = 48  # nearest keys, of which some have another context, or are wordings that one yes alone knows

EntryKey = tuple[Partition, bytes]


@dataclass(frozen=True, slots=True)
class PromptAdded:
    """A cached prompt that can be found semantically. `group` names the answers found equal to its
    own, `vector` is one that `take_unsaved` gave before, here or elsewhere; each may be empty.
    `context` has the texts before the prompt, as a `Fingerprint` has them. `of` names the entry that a
    verifier found right for it, if it has no answer of its own. `is_counted`: its words count among
    those of the namespace; not where it was found because it is near a prompt.
    """

    partition: Partition
    exact: bytes
    compat: bytes
    text: str
    created_at: float
    expires_at: float
    group: bytes = b""
    vector: bytes = b""
    context: str = ""
    of: bytes = b""
    is_counted: bool = True


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
    """One cached prompt. `number` is its key in the index, `asking` are the pieces of a long last
    message that ask, `text` is what is compared by meaning, `rooms` name where it is searched; `of` and
    `is_counted` as in `PromptAdded`.
    """

    number: int
    partition: Partition
    exact: bytes
    compat: bytes
    prompt: Prompt
    rooms: tuple[bytes, ...]
    created_at: float
    expires_at: float
    group: bytes
    asking: tuple[str, ...] = ()
    text: str = ""
    is_embedded: bool = False
    of: bytes = b""
    is_counted: bool = True

    @property
    def namespace(self) -> bytes:
        return self.partition + self.compat

    @property
    def asked(self) -> tuple[Partition, str]:
        return self.partition, self.text

    @property
    def answer(self) -> bytes:
        return answer_name(self.of or self.exact, self.created_at)


@dataclass(slots=True)
class _Room:
    """How many keys it has, the numbers of those without a vector, and of those with a long last
    message; how many of these have each of its pieces.
    """

    keys: int = 0
    pending: dict[int, None] = field(default_factory=dict)
    long: dict[int, None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Namespace:
    """How many keys it has, and how many each group has."""

    keys: int = 0
    groups: Counter[bytes] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Meant:
    """A query's prompt, its pieces that ask, what of it is compared by meaning, and the rooms there
    are for it.
    """

    prompt: Prompt
    asking: tuple[str, ...] = ()
    text: str = ""
    rooms: tuple[bytes, ...] = ()


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
        self._unsaved: list[PlacedKey] = []
        # of the keys of a namespace that are here, where an engine has more of them
        self.shares: dict[bytes, float] = {}
        self._sketches = AnswerSketches()
        # of sentences: those of answers that come again cost the encoder nothing
        self._sentences = Memo(embedder, _SENTENCES_MAX)
        self._unsaved_sketches: list[SketchAdded] = []
        self.rule_name = hashlib.blake2b("\n".join(FEATURES).encode() + embedder.info.key, digest_size=8).digest()
        self._states = NamespaceStates(self._rule, self.rule_name)
        self._untold: dict[bytes, None] = {}  # the namespaces that may have hits to tell

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
        answers = [Neighbourhood(Miss(self._absence(query)), ()) for query in queries]
        meant = [(index, query, self._meant(query)) for index, query in enumerate(queries)]
        comparable = [(index, query, prompt) for index, query, prompt in meant if prompt.text and prompt.rooms]
        encoded = self._encode_with_pending([(query.partition, prompt) for _, query, prompt in comparable])
        for (index, query, prompt), tokens, vector in zip(comparable, encoded.tokens, encoded.vectors, strict=True):
            if tokens > self._encoder.info.tokens_max:
                answers[index] = Neighbourhood(Miss(MissReason.TOO_LONG), ())
            else:
                answers[index] = self._decide(query, prompt, count, vector)
        return answers

    def _absence(self, query: Query) -> MissReason:
        """Why no prompt here may be compared with this one."""
        has_others = query.namespace in self._namespaces
        return MissReason.DOCUMENTS if has_others else MissReason.EMPTY

    def _meant(self, query: Query) -> _Meant:
        prompt = pieces.split(query.partition, query.context, query.text)
        if prompt is None:
            return _Meant(Prompt(""))
        rooms = tuple(name for name in _rooms(query.namespace, prompt, _ROOMS) if name in self._rooms)
        asking = self._asking(prompt, rooms)
        return _Meant(prompt, asking, prompt.text or pieces.text_of(asking), rooms)

    def rooms_of(self, asking: Query | PromptAdded) -> list[bytes]:
        """The rooms that a lookup searches, or in which a key is searched; there may be none of them here."""
        prompt = pieces.split(asking.partition, asking.context, asking.text)
        count = _ROOMS if isinstance(asking, Query) else ANCHORS
        return [] if prompt is None else _rooms(asking.partition + asking.compat, prompt, count)

    def rooms_with(self, partition: Partition, exact: bytes) -> tuple[bytes, ...]:
        """The rooms of a key that is here, else none. Safe beside the thread that uses the cache."""
        key = self._keys.get(self._by_entry.get((partition, exact), -1))
        return () if key is None else key.rooms

    def vector_of(self, query: Query) -> NDArray[np.float32] | None:
        """What a lookup of the query searches with; None where nothing of it is compared. Safe beside the
        thread that uses the cache.
        """
        meant = self._meant(query)
        encoded = self._encoder.encode([(query.partition, meant.text)]) if meant.text else None
        is_read = encoded is not None and encoded.tokens[0] <= self._encoder.info.tokens_max
        return encoded.vectors[0] if encoded is not None and is_read else None

    def placed(self, records: Sequence[PromptAdded]) -> list[PlacedKey]:
        """The keys as a vector engine has them, but those that have no vector."""
        placed, keys = [], []
        for record in records:
            key = self._key_of(record)
            if key is not None and key.prompt.last:
                key.asking = self._asking(
                    key.prompt, key.rooms, known=int((key.partition, key.exact) in self._by_entry)
                )
                key.text = pieces.text_of(key.asking)
            if key is not None and key.text:
                known = self._stored_vector(key, record.vector)
                if known is not None:
                    placed.append(_placed(key, known))
                else:
                    keys.append(key)
        encoded = self._encoder.encode([key.asked for key in keys])
        for key, vector, tokens in zip(keys, encoded.vectors, encoded.tokens, strict=True):
            if tokens <= self._encoder.info.tokens_max:
                placed.append(_placed(key, vector.astype(np.float16)))
        return placed

    def _asking(self, prompt: Prompt, rooms: Sequence[bytes], known: int = 0) -> tuple[str, ...]:
        """The pieces that ask, beside the prompts of the room that leaves the fewest. `known`: how many
        of the prompts there are this one.
        """
        if not prompt.last:
            return ()
        counted = pieces.counted(prompt)
        candidates: list[tuple[str, ...]] = []
        for room in filter(None, map(self._rooms.get, rooms)):
            if len(room.long) > known:
                counts = {piece: room.counts[piece] - known for piece in counted}
                candidates.append(pieces.question_of(prompt, counted, counts, len(room.long) - known))
        candidates = candidates or [pieces.question_of(prompt, counted, {}, 0)]
        return min(filter(None, candidates), key=lambda asking: sum(map(len, asking)), default=())

    def has_neighbours(self, query: Query) -> bool:
        """Whether anything is cached that could answer it. Safe beside the thread that uses the
        cache.
        """
        return query.namespace in self._namespaces

    def prepare(self, queries: Sequence[Query]) -> None:
        """Embed what a lookup of these queries will need, so that it need not. Safe beside the thread
        that uses the cache.
        """
        meant = [(query.partition, self._meant(query)) for query in queries]
        self._encoder.encode(
            [(tenant, one.text) for tenant, one in meant if one is not None and one.text and one.rooms]
        )

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

    def judge_prose(self, namespace: bytes, fresh: Sketch, name: bytes, others: Sequence[bytes]) -> list[Judgement]:
        """The rulings on a fresh answer against others of its namespace, in order; UNKNOWN for one
        without a sketch. `name` is its own (`cache.verdicts.records`).
        """
        return self._sketches.judge(namespace, fresh, name, others)

    def _decide(self, query: Query, meant: _Meant, count: int, vector: NDArray[np.float32]) -> Neighbourhood:
        is_empty = query.namespace not in self._namespaces  # its last key turned out too long for the encoder
        neighbours = [] if is_empty else self._neighbours(query, meant, max(NEIGHBOURS, count), vector)
        if not neighbours:
            return Neighbourhood(Miss(self._absence(query)), ())
        state = self._states.of(query.namespace)
        asked = msgspec.structs.replace(query, text=meant.text)
        with read_for(query.partition):
            near, counters = decide(asked, neighbours, count, state, self._rule, self.rule_name)
        if not query.is_try:
            state.counters = counters
            if counters.served:
                self._untold[query.namespace] = None
        return near

    def untold(self) -> Untold:
        """The hits that no comparison has told yet."""
        counted = {name: self._states.of(name).counters for name in self._untold}
        self._untold = {name: None for name, counters in counted.items() if counters.served}
        return {name: (counted[name].served, counted[name].risked) for name in self._untold}

    def add_untold(self, untold: Untold, sign: int = 1) -> None:
        """Add to the hits that the next comparisons tell, or take from them."""
        for name, (served, risked) in untold.items():
            self._states.of(name).counters = self._states.of(name).counters.plus(sign * served, sign * risked)
            self._untold[name] = None

    def _neighbours(self, query: Query, meant: _Meant, count: int, vector: NDArray[np.float32]) -> list[Neighbour]:
        """The nearest keys whose contexts differ by no more than may be shown."""
        nearest: dict[int, float] = {}
        for name in meant.rooms:
            (found,) = self._index.search(name, vector[None], max(SEARCHED, count))
            nearest |= zip(found.keys.tolist(), found.similarities.tolist(), strict=True)
        now = self._clock()
        namespace = self._namespaces[query.namespace]
        tallies, out = self._states.tallies(query.namespace), self._states.suspended(query.partition)
        neighbours: list[Neighbour] = []
        wordings: dict[bytes, bytes] = {}  # the nearest of each group, where that is none of its prompts
        # equal cosines in an order that no index makes: it decides which are among the `count`
        ranked = sorted(
            (-round(similarity, 6), self._keys[number].exact, number) for number, similarity in nearest.items()
        )
        for farness, _, number in ranked:
            wording = self._keys[number]
            key = self._answered(wording)
            if key is None:  # that answer is gone
                continue
            differing = pieces.difference(meant.prompt, key.prompt, meant.asking, key.asking)
            if differing is None:
                continue
            wordings.setdefault(key.group, wording.exact if wording.of else b"")
            if wording.of and not self._states.knows(query.namespace, wording.exact):
                continue
            right, wrong = tallies.get(key.group, (0.0, 0.0))
            neighbours.append(
                Neighbour(
                    similarity=min(1.0, -farness),
                    text=wording.text,
                    exact=key.exact,
                    age_s=max(0.0, now - key.created_at),
                    group=key.group,
                    keys=math.ceil(namespace.groups[key.group] / self.shares.get(query.namespace, 1.0)),
                    right=right,
                    wrong=wrong,
                    is_suspended=bool(out) and (b"a" + key.answer in out or b"g" + key.group in out),
                    differing=differing,
                    is_context_vouched=not differing or self._is_vouched(query, meant.text, key.text, differing),
                    wording=wordings[key.group],
                    stored=key.text,
                )
            )
            if len(neighbours) == count:
                break
        # equal cosines (the encoder ignores case) in an order that does not depend on when keys
        # came, those of the same context first
        neighbours.sort(key=lambda one: (-one.similarity, bool(one.differing), one.exact, one.text))
        return neighbours

    def _answered(self, key: _Key) -> _Key | None:
        """The key of the prompt whose answer a key finds: itself, but for a wording. None if it is gone."""
        found = self._keys.get(self._by_entry.get((key.partition, key.of), -1)) if key.of else key
        return found if found is not None and found.created_at == key.created_at else None

    def _is_vouched(self, query: Query, text: str, known: str, differing: Differing) -> bool:
        """Whether verdicts say that these pieces do not matter, and neither question names a word of them."""
        if not self._states.vouches(query.namespace, pieces.digests(differing)):
            return False
        with read_for(query.partition):
            named = {*words_of(text).core, *words_of(known).core}
            return all(named.isdisjoint(words_of(piece).core) for pair in differing for piece in pair)

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
        """Move a key to a group of its namespace; None: out of all."""
        groups = self._namespaces[key.namespace].groups
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
        return len(waiting)

    def _pending(self, name: bytes) -> Iterable[int]:
        room = self._rooms.get(name)
        return room.pending if room is not None else ()

    @property
    def is_settled(self) -> bool:
        return not self._settling

    def take_unsaved(self) -> list[PlacedKey]:
        """Keys whose vectors were made here since the last call, for the store."""
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
        if key.number in self._rooms[key.rooms[0]].pending:
            self._put_vectors([key], self._encoder.encode([key.asked]))
        if key.is_embedded:  # its prompt fits the encoder
            (vector,) = self._index.vectors(key.rooms[0], (key.number,))
            self._sketches.add(key.namespace, key.answer, vector, sketch)

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
        added = self._key_of(record)
        if added is None:
            return
        key, prompt = added, added.prompt
        self._keys[key.number] = key
        self._by_entry[entry] = key.number
        heapq.heappush(self._expiries, (key.expires_at, key.number))
        namespace = self._namespaces.setdefault(key.namespace, _Namespace())
        namespace.keys += 1
        namespace.groups[key.group] += 1
        for name in key.rooms:
            room = self._rooms.setdefault(name, _Room())
            room.keys += 1
            if prompt.last:
                room.long[key.number] = None
                room.counts.update(set(pieces.counted(prompt)))
        if prompt.last:
            self._ask_anew((key,))
        self._await_vector(key, record.vector)
        for name in key.rooms if prompt.last else ():
            count = len(self._rooms[name].long)
            if count & (count - 1) == 0:  # at each doubling
                self._ask_anew([self._keys[number] for number in self._rooms[name].long])
        while len(self._keys) > self._keys_max:
            self._drop(next(iter(self._keys)))

    def _key_of(self, record: PromptAdded) -> _Key | None:
        """The key of a prompt; None where nothing of it is compared by meaning."""
        prompt = pieces.split(record.partition, record.context, record.text)
        if prompt is None:
            return None
        return _Key(
            number=next(self._numbers),
            partition=record.partition,
            exact=record.exact,
            compat=record.compat,
            prompt=prompt,
            rooms=tuple(_rooms(record.partition + record.compat, prompt, ANCHORS)),
            created_at=record.created_at,
            expires_at=record.expires_at,
            group=record.group or answer_name(record.of or record.exact, record.created_at),
            text=prompt.text,
            of=record.of,
            is_counted=record.is_counted,
        )

    def _ask_anew(self, keys: Iterable[_Key]) -> None:
        """Find the questions of long messages beside those that have come since."""
        for key in keys:
            asking = self._asking(key.prompt, key.rooms, known=1)
            if asking != key.asking:
                self._take_vector(key)
                key.asking, key.text = asking, pieces.text_of(asking)
                self._await_vector(key)

    def _await_vector(self, key: _Key, vector: bytes = b"") -> None:
        """Give a key its vector where that is at hand, else let it wait for one."""
        if not key.text or key.is_embedded:
            return
        for name in key.rooms:
            self._rooms[name].pending[key.number] = None
        known = self._stored_vector(key, vector)
        if known is not None:
            self._put_vector(key, known.astype(np.float32))
        elif self._encoder.knows(*key.asked):
            self._put_vectors([key], self._encoder.encode([key.asked]))
        else:
            self._settling |= {name: None for name in key.rooms if self._rooms[name].keys > 1}

    def _stored_vector(self, key: _Key, vector: bytes) -> NDArray[np.float16] | None:
        """A vector as it was stored, if it is of what asks in the key's prompt."""
        check = _check(key)
        is_its = len(vector) == 2 * self.dims + len(check) and vector.endswith(check)
        return np.frombuffer(vector, "<f2", self.dims) if is_its else None

    def _take_vector(self, key: _Key) -> None:
        for name in key.rooms:
            self._rooms[name].pending.pop(key.number, None)
            if key.is_embedded:
                self._index.remove(name, key.number)
        if key.is_embedded:
            key.is_embedded = False
            self._count_words(key, -1)

    def _count_words(self, key: _Key, sign: int) -> None:
        if key.is_counted:
            with read_for(key.partition):
                self._states.of(key.namespace).word_counts.add(key.text, sign)

    def _drop(self, number: int | None) -> None:
        key = self._keys.pop(number, None) if number is not None else None
        if key is None:
            return
        del self._by_entry[key.partition, key.exact]
        self._take_vector(key)
        self._regroup(key, None)
        if not key.of:
            self._sketches.drop(key.namespace, key.answer)
        for name in key.rooms:
            room = self._rooms[name]
            room.keys -= 1
            if key.prompt.last:
                del room.long[key.number]
                room.counts -= Counter(set(pieces.counted(key.prompt)))
            if not room.keys:
                del self._rooms[name]
        namespace = self._namespaces[key.namespace]
        namespace.keys -= 1
        if not namespace.keys:
            del self._namespaces[key.namespace]
            self._states.leave(key.namespace)

    def _expire(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, number = heapq.heappop(self._expiries)
            key = self._keys.get(number)
            if key is not None and key.expires_at <= now:
                self._drop(number)
        if len(self._expiries) > 2 * len(self._keys) + _EXPIRIES_SPARE:  # of keys that were dropped, or stored anew
            self._expiries = [(key.expires_at, number) for number, key in self._keys.items()]
            heapq.heapify(self._expiries)

    # --- vectors

    def _encode_with_pending(self, prompts: Sequence[tuple[Partition, _Meant]]) -> Encoded:
        """Encode the prompts, and in the same batch the keys of their rooms that have no vector yet."""
        rooms = dict.fromkeys(name for _, prompt in prompts for name in prompt.rooms)
        numbers = dict.fromkeys(number for name in rooms for number in reversed(self._rooms[name].pending))
        waiting = self._few(numbers, _INLINE_MAX, _INLINE_CHARS)
        encoded = self._encoder.encode(
            [(partition, prompt.text) for partition, prompt in prompts] + [key.asked for key in waiting]
        )
        at = len(prompts)
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
                if key.asking:  # later prompts may show what of it to embed
                    self._take_vector(key)
                else:
                    self._drop(key.number)  # no vector says what it means: not eligible
                continue
            stored = vector.astype(np.float16)
            self._unsaved.append(_placed(key, stored))
            self._put_vector(key, stored.astype(np.float32))

    def _put_vector(self, key: _Key, vector: NDArray[np.float32]) -> None:
        """`vector` has been through float16, as the store keeps it: a rebuilt index holds the same
        numbers.
        """
        pending = [self._rooms[name].pending.pop(key.number, key) is None for name in key.rooms]
        if any(pending):
            key.is_embedded = True
            self._count_words(key, 1)
            for name in key.rooms:
                self._index.add(name, key.number, vector)


def _rooms(namespace: bytes, prompt: Prompt, count: int) -> list[bytes]:
    """The names of the rooms of a prompt: that of all short contexts of its namespace, or of its longest pieces."""
    names = pieces.anchors(prompt, count)
    if not names:
        return [namespace]
    digest = functools.partial(hashlib.blake2b, digest_size=_ROOM_BYTES, person=b"sw.room")
    return [namespace + digest(name.encode("utf-8", "surrogatepass")).digest() for name in names]


def _placed(key: _Key, vector: NDArray[np.float16]) -> PlacedKey:
    rooms = tuple(map(room_id, key.rooms))
    return PlacedKey(key.partition, key.exact, rooms, key.expires_at, vector.astype("<f2").tobytes() + _check(key))


def _check(key: _Key) -> bytes:
    """A digest of the part of a prompt that a stored vector is of; empty for the whole prompt."""
    if not key.asking:
        return b""
    return hashlib.blake2b(key.text.encode("utf-8", "surrogatepass"), digest_size=_CHECK_BYTES).digest()
