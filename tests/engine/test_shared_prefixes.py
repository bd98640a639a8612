"""Which sequences share a beginning, as their block tables tell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from local_engine.kernels.shared_prefixes import Prefix, shared_prefixes

prompts = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


@given(prompts, st.integers(0, 6))
def test_groups_are_disjoint_and_begin_alike(contents: list[list[int]], saved_blocks_min: int) -> None:
    """Every member's table begins with its group's blocks, none is in two groups, and each group saves enough."""
    ids: dict[tuple[int, ...], int] = {}  # a block's id stands for its content and all before it
    tables = [
        [ids.setdefault(tuple(content[: end + 1]), len(ids)) for end in range(len(content))] for content in contents
    ]
    groups = shared_prefixes(tables, saved_blocks_min)
    members = [member for group in groups for member in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        assert len({tuple(tables[member][: group.blocks]) for member in group.members}) == 1
        assert len(tables[group.members[0]]) >= group.blocks
        assert group.blocks * (len(group.members) - 1) >= max(1, saved_blocks_min)


def test_a_longer_prefix_of_fewer_wins_where_it_saves_more() -> None:
    """Two families of long prompts after one short greeting are two groups; four after a long one are one group."""
    families = [[0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 4, 5, 6, 12], [0, 4, 5, 6, 13]]
    assert shared_prefixes(families, 1) == [Prefix((0, 1), 4), Prefix((2, 3), 4)]
    assert shared_prefixes([[0, 1, 2, 3, own] for own in (4, 5, 6, 7)], 1) == [Prefix((0, 1, 2, 3), 4)]
    assert shared_prefixes(families, 5) == []
