"""The block pool: sharing by content, eviction leaf first, and books that always add up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from local_engine.block_pool import BlockPool

SIZE = 4


class Holder:
    """A sequence as the pool sees it: tokens, keys, blocks."""

    def __init__(self, pool: BlockPool, tokens: list[int], salt: bytes = b"") -> None:
        self.pool = pool
        self.keys: list[bytes] = []
        full = len(tokens) // SIZE
        pool.extend_keys(self.keys, tokens, salt, full)
        self.blocks = pool.match(self.keys)
        self.reused = len(self.blocks)
        pool.hold(self.blocks)

    def fill(self) -> None:
        """Allocate and register what was not found."""
        self.blocks += [self.pool.allocate() for _ in range(len(self.keys) - len(self.blocks))]
        for index in range(self.reused, len(self.keys)):
            self.pool.register(self.blocks, index, self.keys, is_written=True)

    def release(self) -> None:
        self.pool.release(reversed(self.blocks))
        self.blocks = []


def held(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> Holder:
    holder = Holder(pool, tokens, salt)
    holder.fill()
    return holder


def test_the_longest_known_prefix_is_found() -> None:
    """A prompt finds the blocks it shares with an earlier one, and no more."""
    pool = BlockPool(8, SIZE)
    held(pool, [1] * 12).release()
    assert Holder(pool, [1] * 8 + [2] * 4).reused == 2
    assert Holder(pool, [2] * 4 + [1] * 8).reused == 0


def test_unreferenced_leaves_go_first_and_the_oldest_before_all() -> None:
    """Eviction takes the least recently released chain from its end."""
    pool = BlockPool(4, SIZE)
    held(pool, [1] * 8).release()
    held(pool, [2] * 8).release()
    taken = [pool.allocate()]
    reused = Holder(pool, [1] * 8), Holder(pool, [2] * 8)
    assert [holder.reused for holder in reused] == [1, 2]
    pool.check_integrity([taken, *(holder.blocks for holder in reused)])


def test_salts_never_share() -> None:
    """The same tokens under another salt find nothing."""
    pool = BlockPool(8, SIZE)
    held(pool, [1] * 8, b"a")
    assert Holder(pool, [1] * 8, b"b").reused == 0


def test_a_shared_block_is_replaced_only_once_written() -> None:
    """A duplicate that is being written stays private; written, it gives way to the registered one."""
    pool = BlockPool(4, SIZE)
    first = held(pool, [1] * 4)
    keys, blocks = first.keys, [pool.allocate()]
    assert not pool.register(blocks, 0, keys, is_written=False)
    assert blocks != first.blocks
    assert pool.register(blocks, 0, keys, is_written=True)
    assert blocks == first.blocks


def test_an_empty_pool_says_so() -> None:
    """Nothing free and nothing cached: allocation is refused, what is held stays."""
    pool = BlockPool(2, SIZE)
    held(pool, [1] * 8)
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.allocate()


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go in any order over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.holders: list[Holder] = []

    @rule(tokens=st.lists(st.integers(0, 1), max_size=24), salt=st.sampled_from([b"", b"x"]))
    def come(self, tokens: list[int], salt: bytes) -> None:
        keys: list[bytes] = []
        self.pool.extend_keys(keys, tokens, salt, len(tokens) // SIZE)
        found = self.pool.match(keys)
        if len(keys) - len(found) + self.pool.unused(found) > self.pool.available:
            return
        self.holders.append(held(self.pool, tokens, salt))

    @rule(index=st.integers(0, 30))
    def go(self, index: int) -> None:
        if self.holders:
            self.holders.pop(index % len(self.holders)).release()

    @invariant()
    def books_add_up(self) -> None:
        self.pool.check_integrity([holder.blocks for holder in self.holders])


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestPool = PoolMachine.TestCase
