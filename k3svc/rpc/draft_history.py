"""The newest features of each sample, kept by decode for a draft service that has lost or never had them."""

from collections import OrderedDict

import numpy as np

MIN_ROWS = 16
"""A history that would hold fewer is not worth keeping."""


class _Ring:
    """Rows at position modulo capacity; [start, end) are there."""

    def __init__(self, capacity: int, row_bytes: int) -> None:
        self._capacity, self._row_bytes = capacity, row_bytes
        # Not cleared: many samples begin in one step, and a row is written before it is read.
        self._rows = np.empty(capacity * row_bytes, np.uint8).data
        self.start = self.end = 0

    def write(self, start: int, data: memoryview) -> None:
        num_rows = data.nbytes // self._row_bytes
        if num_rows > self._capacity:
            skipped = num_rows - self._capacity
            start, data, num_rows = start + skipped, data[skipped * self._row_bytes :], self._capacity
        if not self.start <= start <= self.end:
            self.start = start
        self.end = start + num_rows
        self.start = max(self.start, self.end - self._capacity)
        for position, first, last in self._parts(start, self.end):
            size = (last - first) * self._row_bytes
            offset = (position - start) * self._row_bytes
            self._rows[first * self._row_bytes : last * self._row_bytes] = data[offset : offset + size]

    def crop(self, base: int) -> None:
        self.end = min(self.end, base)
        self.start = min(self.start, self.end)

    def read(self, start: int, end: int) -> bytes:
        return b"".join(
            self._rows[first * self._row_bytes : last * self._row_bytes] for _, first, last in self._parts(start, end)
        )

    def _parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(position, first cell, cell after the last) of the one or two runs of cells of [start, end)."""
        if start == end:
            return []
        first = start % self._capacity
        whole = min(end - start, self._capacity - first)
        parts = [(start, first, first + whole)]
        if whole < end - start:
            parts.append((start + whole, 0, end - start - whole))
        return parts


class FeatureHistory:
    """Up to `window` committed rows a sample, and `max_bytes` over all samples: the one written least recently
    gives way.
    """

    def __init__(self, *, window: int, ahead: int, row_bytes: int, max_bytes: int) -> None:
        """`ahead`: rows past the committed ones that a step writes."""
        self._capacity, self._row_bytes = window + ahead, row_bytes
        self._max_rings = max_bytes // (self._capacity * row_bytes) if window >= MIN_ROWS else 0
        self._rings: OrderedDict[str, _Ring] = OrderedDict()

    def write(self, key: str, start: int, data: memoryview) -> None:
        """Rows from position `start` on; they replace all from there on."""
        if not self._max_rings:
            return
        ring = self._rings.pop(key, None)
        if ring is None:
            while len(self._rings) >= self._max_rings:
                self._rings.popitem(last=False)
            ring = _Ring(self._capacity, self._row_bytes)
        self._rings[key] = ring
        ring.write(start, data)

    def crop(self, key: str, base: int) -> None:
        """Rows from `base` on were not committed."""
        if (ring := self._rings.get(key)) is not None:
            ring.crop(base)

    def span(self, key: str) -> tuple[int, int]:
        """The rows that are there, [start, end)."""
        ring = self._rings.get(key)
        return (0, 0) if ring is None else (ring.start, ring.end)

    def read(self, key: str, start: int, end: int) -> bytes:
        """Rows of a part of `span`."""
        ring = self._rings[key]
        assert ring.start <= start <= end <= ring.end, f"rows {start}..{end} of {ring.start}..{ring.end}"
        return ring.read(start, end)

    def drop(self, key: str) -> None:
        self._rings.pop(key, None)
