"""Which context rows of a sample or a prompt are there, and which still have to be written."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Features of consecutive positions that wait to be written."""

    start: int
    data: memoryview
    row_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.data.nbytes // self.row_bytes

    def part(self, start: int, end: int) -> "Piece | None":
        """What of it lies in [start, end)."""
        start, end = max(start, self.start), min(end, self.end)
        if start >= end:
            return None
        data = self.data[(start - self.start) * self.row_bytes : (end - self.start) * self.row_bytes]
        return Piece(start=start, data=data, row_bytes=self.row_bytes)


class ContextSpan:
    """One run of positions [start, end) of a ring that holds `window` rows before a base and `ahead` rows from it on.

    Rows outside of that range are left out, so the waiting pieces are disjoint, bounded, and no two share a cell.
    """

    def __init__(self, base: int, *, window: int, ahead: int) -> None:
        self.window, self.ahead = window, ahead
        self.base = self.start = self.end = base
        self._waiting: list[Piece] = []

    @property
    def lowest(self) -> int:
        """The oldest row that a block at the base can see."""
        return max(0, self.base - self.window)

    @property
    def reaches_base(self) -> bool:
        """Whether there are rows, up to the base without a gap."""
        return self.start < self.base <= self.end

    @property
    def is_complete(self) -> bool:
        return self.start <= self.lowest and self.reaches_base

    @property
    def num_waiting(self) -> int:
        """Rows that wait to be written."""
        return sum(piece.end - piece.start for piece in self._waiting)

    def advance(self, base: int, *, start: int | None = None) -> None:
        """The base has moved on, by one step that began at `start`, or by nobody knows how many (None).

        Rows from the new base on are void, since they belonged to tokens that may not have stayed; after steps that
        were not heard of, so are those past the first one from the old base on.
        """
        if base <= self.base:
            return
        trusted = base if start == self.base else self.base + 1
        self.base, self.end = base, min(self.end, trusted)
        self.start = min(self.start, self.end)
        self._waiting = [part for old in self._waiting for part in _without(old, trusted, old.end)]

    def restart(self) -> None:
        """There are no rows."""
        self.start = self.end = self.base
        self._waiting.clear()

    def add(self, piece: Piece) -> bool:
        """Takes rows in. False: they do not touch what is there; then only rows that reach past the base are kept.

        Rows from the base on replace all rows from their first one on, since those belonged to other tokens.
        """
        is_history = piece.end <= self.base
        kept = piece.part(self.lowest, self.base + self.ahead)
        if kept is None:
            return True
        touches = self.start == self.end or (kept.start <= self.end and kept.end >= self.start)
        if not touches and is_history:
            return False
        if not touches or self.start == self.end:
            self.start, self.end = kept.start, kept.end
            self._waiting = [kept]
            return touches
        self._waiting = [
            part
            for old in self._waiting
            for part in _without(old, kept.start, kept.end if is_history else max(old.end, kept.start))
        ]
        self._waiting.append(kept)
        self.end = max(self.end, kept.end) if is_history else kept.end
        self.start = min(self.start, kept.start)
        return True

    def join(self, start: int) -> None:
        """Rows from `start` on, up to those that are there, have been written from elsewhere."""
        self.start = min(self.start, start)

    def take(self) -> list[Piece]:
        """The rows to write now, in ascending order."""
        waiting, self._waiting = self._waiting, []
        parts = (piece.part(self.lowest, self.base + self.ahead) for piece in waiting)
        return sorted((part for part in parts if part is not None), key=lambda part: part.start)


def _without(piece: Piece, start: int, end: int) -> list[Piece]:
    """What is left of a piece without [start, end)."""
    parts = (piece.part(piece.start, start), piece.part(end, piece.end))
    return [part for part in parts if part is not None]
