"""PagePool and SlotPool against a dict-sized model, and their complaints about misuse."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from k3svc.core.pages import PagePool
from k3svc.core.slots import SlotPool

SIZE = 12


class PagePoolMachine(RuleBasedStateMachine):
    """Every page has as many holders as the model says; what is handed out was free."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(SIZE)
        self.holders: dict[int, int] = {}

    @rule(target=held, count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> list[int]:
        free = self.pool.num_free
        pages = self.pool.allocate(count)
        if pages is None:
            assert count > free
            return []
        assert len(pages) == count
        assert pages == sorted(pages)
        assert all(1 <= page <= SIZE and page not in self.holders for page in pages)
        self.holders.update(dict.fromkeys(pages, 1))
        return pages

    @rule(target=held, pages=held)
    def share(self, pages: list[int]) -> list[int]:
        live = [page for page in pages if page in self.holders]
        if len(live) != len(pages):
            return []
        self.pool.share(pages)
        for page in pages:
            self.holders[page] += 1
        return list(pages)

    @rule(pages=consumes(held))
    def free(self, pages: list[int]) -> None:
        if any(page not in self.holders for page in pages):
            with pytest.raises(AssertionError):
                self.pool.free([page for page in pages if page not in self.holders])
            return
        self.pool.free(pages)
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]

    @invariant()
    def whole(self) -> None:
        self.pool.check()
        assert self.pool.num_free == SIZE - len(self.holders)


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=40)


def test_fresh_pages_are_consecutive() -> None:
    pool = PagePool(6)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    pool.free([2, 1])
    assert pool.allocate(3) == [1, 2, 6]
    assert pool.allocate(1) is None


def test_slots_are_handed_out_once() -> None:
    pool = SlotPool(3)
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    assert pool.allocate(1) is None
    pool.free(2)
    pool.check()
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(2)
    assert pool.allocate(1) == [2]
