"""PagePool: the allocator of MLA cache pages. Numbers only; the memory belongs to the backend.

Page 0 is a dummy and never handed out. A page may be shared (samples of one prompt); it returns to the pool when its
last holder frees it.
"""

import bisect
from collections.abc import Sequence


class PagePool:
    """Pages 1..num_pages, handed out lowest first so that fresh requests get consecutive ones."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        """Descending, so that the lowest page is popped from the end."""
        self._holders = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages in ascending order, or None (and no change) when there are not enough."""
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        pages.reverse()
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds one holder to each page; the pages must be held."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is not held"
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Takes one holder from each page; a page without holders returns to the pool."""
        returned = []
        for page in pages:
            assert self._holders[page] > 0, f"page {page} freed twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                returned.append(page)
        if not returned:
            return
        if len(returned) > 8:
            self._free = sorted(self._free + returned, reverse=True)
        else:
            for page in returned:
                bisect.insort(self._free, page, key=lambda number: -number)

    def holders(self) -> dict[int, int]:
        """The number of holders of each page that has some."""
        return {page: count for page, count in enumerate(self._holders) if count}

    def check(self) -> None:
        """Raises AssertionError unless each page is either free or held, and none both."""
        assert self._free == sorted(set(self._free), reverse=True), "free list broken"
        assert all(self._holders[page] == 0 for page in self._free), "a free page has holders"
        held = sum(1 for holders in self._holders[1:] if holders)
        assert held + len(self._free) == self.num_pages, "pages lost"

    def __repr__(self) -> str:
        return f"<PagePool {self.num_free}/{self.num_pages} free>"
