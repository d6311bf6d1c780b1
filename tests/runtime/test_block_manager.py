import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from echokernels.runtime.block_manager import BlockManager


@pytest.mark.parametrize(
    ("num_tokens", "pages"),
    # Around multiples of the page: 8 tokens fill exactly 2 pages of 4.
    [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)],
)
def test_a08_blocks_needed(num_tokens, pages):
    assert BlockManager(8, page_size=4).blocks_needed(num_tokens) == pages


def test_a08_an_exact_multiple_needs_no_further_page():
    manager = BlockManager(8, page_size=4)
    table: list[int] = []
    assert manager.append(table, 8)
    assert len(table) == 2
    assert manager.append(table, 9)
    assert len(table) == 3


def test_allocation_is_all_or_nothing():
    manager = BlockManager(3, page_size=2)
    table: list[int] = []
    assert manager.append(table, 3)
    before = list(table)
    assert not manager.append(table, 8)  # 2 more pages, 1 is free
    assert manager.allocate(2) is None
    assert table == before
    assert (manager.num_free, manager.num_used) == (1, 2)
    manager.check([table])
    assert manager.append(table, 6)
    assert (manager.num_free, manager.num_used) == (0, 3)


def test_append_keeps_a_table_that_is_long_enough():
    manager = BlockManager(3, page_size=2)
    table: list[int] = []
    assert manager.append(table, 0)
    assert table == []
    assert manager.append(table, 4)
    before = list(table)
    assert manager.append(table, 1)
    assert table == before


def test_pages_come_in_a_deterministic_order():
    manager = BlockManager(4, page_size=1)
    first, second = manager.allocate(2), manager.allocate(1)
    assert (first, second) == ([0, 1], [2])
    manager.free(first)
    assert manager.allocate(3) == [0, 1, 3]


def test_shared_pages_are_freed_by_their_last_holder():
    manager = BlockManager(4, page_size=2)
    first: list[int] = []
    assert manager.append(first, 4)
    second = manager.share(first[:1])
    assert manager.append(second, 4)
    assert second[0] == first[0]
    assert second[1] != first[1]
    manager.check([first, second])
    manager.free(first)
    assert first == []
    assert manager.num_free == 2
    manager.check([second])
    manager.free(second)
    assert manager.num_free == 4
    manager.check([])


@pytest.mark.parametrize("page", [0, -1, 4])  # free, and outside on either side
def test_pages_not_in_use_are_refused(page):
    manager = BlockManager(4, page_size=2)
    table = manager.allocate(4)
    manager.free(table[:1])  # a copy: page 0 is free again and still in `table`
    for refuse in (manager.free, manager.share):
        with pytest.raises(ValueError, match=f"page is {page}, must be a page in use"):
            refuse([1, page])
    manager.check([table[1:]])  # nothing changed, page 1 included


@pytest.mark.parametrize(
    ("args", "error"),
    [((0, 16), ValueError), ((4, 0), ValueError), ((4.0, 16), TypeError), ((4, True), TypeError)],
)
def test_sizes_are_checked(args, error):
    with pytest.raises(error, match=r"num_pages|page_size"):
        BlockManager(*args)


def _drop_a_reference(manager, _table):
    manager._ref_counts[0] -= 1


def _add_a_reference(manager, _table):
    manager._ref_counts[0] += 1


def _lose_a_free_page(manager, _table):
    manager._free.pop()


def _free_a_held_page(manager, _table):
    manager._free.append(0)


def _free_a_page_twice(manager, _table):
    manager._free.append(manager._free[0])


def _own_a_page_twice(manager, table):
    table.append(table[0])
    manager._ref_counts[table[0]] += 1


@pytest.mark.parametrize(
    "damage",
    [
        _drop_a_reference,
        _add_a_reference,
        _lose_a_free_page,
        _free_a_held_page,
        _free_a_page_twice,
        _own_a_page_twice,
    ],
)
def test_check_finds(damage):
    manager = BlockManager(4, page_size=2)
    table = manager.allocate(2)
    manager.check([table])
    damage(manager, table)
    with pytest.raises(AssertionError):
        manager.check([table])


def test_check_needs_every_holder():
    manager = BlockManager(4, page_size=2)
    table, other = manager.allocate(2), manager.allocate(1)
    for holders in ([], [table], [table, other, other]):
        with pytest.raises(AssertionError, match="holders"):
            manager.check(holders)


class Blocks(RuleBasedStateMachine):
    """Tables that grow, share full pages and go; `held` counts holders in the plainest way."""

    tables = Bundle("tables")

    @initialize(num_pages=st.integers(1, 6), page_size=st.integers(1, 3))
    def build(self, num_pages, page_size):
        self.manager = BlockManager(num_pages, page_size)
        self.live: list[list[int]] = []

    @rule(target=tables)
    def start(self):
        self.live.append([])
        return self.live[-1]

    @rule(table=tables, num_tokens=st.integers(0, 20))
    def append(self, table, num_tokens):
        before, free = list(table), self.manager.num_free
        wanted = -(-num_tokens // self.manager.page_size)
        fits = wanted - len(before) <= free
        assert self.manager.append(table, num_tokens) == fits
        assert table[: len(before)] == before
        assert len(table) == (max(wanted, len(before)) if fits else len(before))

    @rule(target=tables, table=tables, num_shared=st.integers(0, 3))
    def share(self, table, num_shared):
        free = self.manager.num_free
        shared = self.manager.share(table[:num_shared])
        assert shared == table[:num_shared]
        assert self.manager.num_free == free
        self.live.append(shared)
        return shared

    @rule(table=consumes(tables))
    def free(self, table):
        pages = list(table)
        self.live = [other for other in self.live if other is not table]
        held_elsewhere = {page for other in self.live for page in other}
        free = self.manager.num_free
        self.manager.free(table)
        assert table == []
        assert self.manager.num_free == free + len(set(pages) - held_elsewhere)

    @invariant()
    def counts_are_right(self):
        if not hasattr(self, "manager"):  # before `build`
            return
        self.manager.check(self.live)
        assert self.manager.num_used == len({page for table in self.live for page in table})


TestBlocks = Blocks.TestCase
