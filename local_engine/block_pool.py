"""The pool of KV blocks: allocation, reuse and eviction.

Knows token ids and no tensors. A block is free, held (referenced by sequences), or cached (full,
unreferenced, its KV still valid). Full blocks are found by a chain key, a 256-bit digest of the
parent's key and the block's tokens, so equal keys mean equal content. The chain starts at the
caller's cache salt: sequences of different salts share nothing.

Invariants (`check_integrity`): free + cached + held == total; every registered block's parent is
registered; a sequence that holds a registered block holds its whole chain, hence references never
grow along a chain and the least recently used cached block is always a leaf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(slots=True)
class Block:
    """One block. `key` is set while it is registered for reuse, `parent` unless it begins its
    chain."""

    id: int
    references: int = 0
    key: bytes | None = None
    parent: bytes | None = None


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block from its parent's key (the first parent is `root_key`) and its token
    ids."""
    digest = blake2b(parent, digest_size=32)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.digest()


def root_key(cache_salt: bytes) -> bytes:
    """The key before the first block, which isolates the salts."""
    return blake2b(cache_salt, digest_size=32, person=b"sameway-kv-root").digest()


class BlockPool:
    """Allocation, sharing and eviction over `total` blocks of `block_tokens` tokens."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._blocks = [Block(id) for id in range(total)]
        self._free: deque[int] = deque(range(total))
        self._registered: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """The blocks that could be allocated now: free and cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        """The blocks that can be allocated without an eviction."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """The blocks without a holder that can still be reused."""
        return len(self._cached)

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], cache_salt: bytes, blocks: int) -> None:
        """Extend `keys` in place to the chain keys of the first `blocks` full blocks of `tokens`."""
        size = self.block_tokens
        for index in range(len(keys), blocks):
            parent = keys[-1] if keys else root_key(cache_salt)
            keys.append(chain_key(parent, tokens[index * size : (index + 1) * size]))

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The longest run of registered blocks with these keys, from the start. Changes nothing."""
        blocks = []
        for key in keys:
            id = self._registered.get(key)
            if id is None:
                break
            blocks.append(id)
        return blocks

    def unused(self, blocks: Iterable[int]) -> int:
        """The number of `blocks` without a holder: holding them takes that many from `available`."""
        return sum(self._blocks[id].references == 0 for id in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for id in blocks:
            block = self._blocks[id]
            if block.references == 0:
                del self._cached[id]
            block.references += 1

    def allocate(self) -> int:
        """A private block with one reference; without a free block, evicts the least recently used
        cached leaf.

        Raises IndexError if none is available: check `available` first.
        """
        if self._free:
            id = self._free.popleft()
        elif self._cached:
            id, _ = self._cached.popitem(last=False)
            self._forget(self._blocks[id])
        else:
            raise IndexError("no block is available")
        self._blocks[id].references = 1
        return id

    def register(self, blocks: list[int], index: int, keys: Sequence[bytes], *, is_written: bool) -> bool:
        """Make `blocks[index]`, a sequence's full block, findable. Returns False if it stays
        private.

        If the same content is already registered, `blocks[index]` becomes that block and the
        duplicate is freed, but only if it `is_written`: a shared block is never written again. The
        blocks before it must be registered.
        """
        block, key = self._blocks[blocks[index]], keys[index]
        if block.key is not None:
            return True
        other_id = self._registered.get(key)
        if other_id is None:
            block.key, block.parent = key, keys[index - 1] if index > 0 else None
            self._registered[key] = block.id
            return True
        if not is_written:
            return False
        self.hold([other_id])
        self.release([block.id])
        blocks[index] = other_id
        return True

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block. Pass a sequence's last block first, so that leaves age
        before their parents."""
        for id in blocks:
            block = self._blocks[id]
            block.references -= 1
            if block.references > 0:
                continue
            if block.key is None:
                self._free.append(id)
            else:
                self._cached[id] = None

    def forget_all(self) -> None:
        """Unregister every block: after a failed step any KV may be wrong. No block may be held."""
        for id in self._cached:
            self._forget(self._blocks[id])
            self._free.append(id)
        self._cached.clear()
        assert not self._registered, "blocks are still held"

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Check the pool's invariants. `held`: the blocks of every live sequence. Raises
        AssertionError."""
        references: Counter[int] = Counter(id for blocks in held for id in blocks)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        assert not (free | cached) & references.keys(), "a held block could be given away"
        assert len(free) + len(cached) + len(references) == self.total, "blocks are lost"
        for block in self._blocks:
            assert block.references == references[block.id], f"block {block.id}: references do not match its holders"
            if block.key is None:
                assert block.id not in cached, f"block {block.id} is cached without a key"
                assert block.references <= 1, f"unregistered block {block.id} is shared"
                continue
            assert self._registered.get(block.key) == block.id, f"block {block.id}: its key leads elsewhere"
        position = {id: index for index, id in enumerate(self._cached)}
        for key, id in self._registered.items():
            parent = self._blocks[id].parent
            if parent is None:
                continue
            parent_id = self._registered.get(parent)
            assert parent_id is not None, f"block {id}: its parent was forgotten before it"
            assert self._blocks[parent_id].references >= self._blocks[id].references, f"block {id} outlives its parent"
            if parent_id in position:
                assert position[parent_id] > position[id], f"{key.hex()}: a parent would be evicted before its child"

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            del self._registered[block.key]
        block.key = block.parent = None
