"""SlotPool: the allocator of KDA and conv state slots. Slot 0 is a dummy and never handed out."""


class SlotPool:
    """num_slots slots from number `first` on, one holder each."""

    def __init__(self, num_slots: int, *, first: int = 1) -> None:
        assert first >= 1, "slot 0 is nobody's"
        self.num_slots = num_slots
        self._free = list(range(first + num_slots - 1, first - 1, -1))
        self._held = [False] * (first + num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, or None (and no change) when there are not enough."""
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._held[slot] = True
        return slots

    def free(self, slot: int) -> None:
        assert self._held[slot], f"slot {slot} freed twice"
        self._held[slot] = False
        self._free.append(slot)

    def check(self) -> None:
        """Raises AssertionError unless each slot is either free or held, and none both."""
        assert len(set(self._free)) == len(self._free), "free list broken"
        assert not any(self._held[slot] for slot in self._free), "a free slot is held"
        assert sum(self._held) + len(self._free) == self.num_slots, "slots lost"

    def __repr__(self) -> str:
        return f"<SlotPool {self.num_free}/{self.num_slots} free>"
