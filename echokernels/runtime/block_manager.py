"""Who holds which page of the KV cache.

The cache is `num_pages` pages of `page_size` token slots. A sequence's *block table* lists its
pages in order: the KV of token i lies in slot `table[i // page_size] * page_size + i % page_size`.
Tables only grow, until `free` gives all their pages back. A page may be in several tables; it is
free again when its last holder lets go (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).
Everything here is host-side bookkeeping; the cache's memory belongs to the model runner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from echokernels.runtime._validation import check_int


class BlockManager:
    """A free list and reference counts. Raises ValueError if a count is not positive.

    Pages are taken in a deterministic order, the one that was freed last first.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        check_int("num_pages", num_pages, low=1)
        check_int("page_size", page_size, low=1)
        self.num_pages = num_pages
        self.page_size = page_size
        # Popped from the end: page 0 goes first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """`num_pages` pages with one holder each, or None (and no change) if too few are free."""
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def append(self, block_table: list[int], num_tokens: int) -> bool:
        """Extend `block_table` in place until it holds `num_tokens` tokens in all.

        Returns False, and changes nothing, if too few pages are free.
        """
        missing = self.blocks_needed(num_tokens) - len(block_table)
        if missing <= 0:
            return True
        pages = self.allocate(missing)
        if pages is None:
            return False
        block_table.extend(pages)
        return True

    def share(self, pages: Sequence[int]) -> list[int]:
        """A new block table that starts with `pages`, which get one more holder each.

        Only full pages are safe to share: a holder that appends would write into a part-filled one.
        Raises ValueError if a page is not in use.
        """
        self._check_used(pages)
        for page in pages:
            self._ref_counts[page] += 1
        return list(pages)

    def free(self, block_table: list[int]) -> None:
        """Let go of every page of `block_table` and empty it.

        Raises ValueError, and changes nothing, if a page is not in use.
        """
        self._check_used(block_table)
        for page in reversed(block_table):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)
        block_table.clear()

    def _check_used(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not (0 <= page < self.num_pages and self._ref_counts[page] > 0):
                raise ValueError(f"page is {page}, must be a page in use")

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that counts are right, given the block tables of all `holders`."""
        held: Counter[int] = Counter()
        for block_table in holders:
            held.update(block_table)
            assert len(set(block_table)) == len(block_table), f"a page twice in {block_table}"
        counted = {page: count for page, count in enumerate(self._ref_counts) if count}
        assert counted == dict(held), f"reference counts {counted} differ from holders {held}"
        free = set(self._free)
        assert len(free) == len(self._free), f"a page twice in the free list {self._free}"
        assert not free & counted.keys(), f"pages {free & counted.keys()} both free and held"
        assert len(free) + len(counted) == self.num_pages, "a page is neither free nor held"
