"""Outbox: the sending side of one hand-off. It records which bytes are final and hands them out in order.

A record names bytes of a tensor; the bytes stay in pool memory until they are sent, so a broken stream can resume at
any sequence number for as long as the pages and the slot are held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from crc32c import crc32c

from k3svc.ops.table import Cache, Fetch, WireBytes
from k3svc.transfer.manifest import DTYPE_BYTES, Frame, Placed, StateManifest, TensorKind
from k3svc.transfer.narrow import NarrowState

ELEMENT_BYTES = 4
"""Frames end at multiples of it, so that none cuts an element."""
AHEAD_BYTES = 4 << 20
"""Of pools of a device, so much is copied to the host before it is asked for."""
RUN_BYTES = 8 << 20
"""Most that is copied from a device at once: to ask for a copy takes as long as to copy a mebibyte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Bytes that lie side by side in pool memory, of one tensor."""

    tensor: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """Bytes of a frame."""

    run: int
    begin: int
    """Where in the run they begin."""
    nbytes: int


class FrameSink(Protocol):
    """Where the bytes of frames go on a way of their own."""

    batch_bytes: int
    """Most bytes that go into one message."""

    def put(self, data: memoryview) -> Placed | None:
        """Copies data; None: it must travel in its frame."""
        ...


class Outbox:
    """Final bytes of one prompt's state, in the order in which they became final."""

    def __init__(
        self, manifest: StateManifest, cache: Cache, *, slot: int, block_table: Sequence[int], frame_bytes: int
    ) -> None:
        self.manifest = manifest
        self._cache = cache
        self._slot = slot
        self._block_table = tuple(block_table)
        self._frame_bytes = frame_bytes // ELEMENT_BYTES * ELEMENT_BYTES
        self._runs: list[_Run] = []
        self._records: list[_Record] = []
        self._by_layer: dict[int, list[int]] = {}
        for index, spec in enumerate(manifest.tensors):
            if spec.kind is not TensorKind.LOGITS:
                self._by_layer.setdefault(spec.layer, []).append(index)
        self._recorded_bytes = 0
        self._fetches: dict[int, Fetch | None] = {}
        """Runs that are on their way to the host, by index; None: one that is read by slices."""

    @property
    def num_frames(self) -> int:
        return len(self._records)

    @property
    def is_complete(self) -> bool:
        """Whether every byte of the manifest has been recorded."""
        return self._recorded_bytes == self.manifest.total_bytes

    def add_layer(self, layer: int, start: int, end: int) -> None:
        """Records what layer has final after prompt tokens [start, end) ran: MLA rows now, KDA and conv at the end."""
        for index in self._by_layer[layer]:
            spec = self.manifest.tensors[index]
            if spec.kind is TensorKind.MLA_ROWS:
                row_bytes = spec.shape[1] * DTYPE_BYTES[spec.dtype]
                for first, last in self._side_by_side(start, end):
                    self._add(index, first * row_bytes, (last - first) * row_bytes)
            elif end == self.manifest.num_tokens:
                self._add(index, 0, spec.nbytes)

    def add_logits(self) -> None:
        """Records the logits row, which is final last."""
        index = len(self.manifest.tensors) - 1
        self._add(index, 0, self.manifest.tensors[index].nbytes)

    def frames(self, next_sequence: int, sink: FrameSink | None = None) -> list[Frame]:
        """Frames from next_sequence on, at most frame_bytes in all, or as many as a sink takes at once; empty when
        nothing more is final yet.

        The data views pool memory, or memory on its way from a device: encode or copy it before anything else runs.
        """
        batch: list[Frame] = []
        size, limit = 0, self._frame_bytes if sink is None else sink.batch_bytes
        if self._cache.staging is not None:
            self._fetch_ahead(next_sequence, limit + AHEAD_BYTES)
        for sequence in range(next_sequence, len(self._records)):
            record = self._records[sequence]
            if batch and size + record.nbytes > limit:
                break
            run, data = self._runs[record.run], self._view(record)
            placed = None if sink is None else sink.put(data)
            batch.append(
                Frame(
                    sequence=sequence,
                    tensor=run.tensor,
                    offset=run.offset + record.begin,
                    crc32c=crc32c(data) if placed is None else placed.crc32c,
                    data=data,
                    position=None if placed is None else placed.position,
                )
            )
            size += record.nbytes
        return batch

    def _add(self, tensor: int, offset: int, nbytes: int) -> None:
        most = max(1, RUN_BYTES // self._frame_bytes) * self._frame_bytes
        for first in range(0, nbytes, most):
            size = min(most, nbytes - first)
            for begin in range(0, size, self._frame_bytes):
                count = min(self._frame_bytes, size - begin)
                self._records.append(_Record(run=len(self._runs), begin=begin, nbytes=count))
            self._runs.append(_Run(tensor=tensor, offset=offset + first, nbytes=size))
        self._recorded_bytes += nbytes

    def _side_by_side(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cuts tokens [start, end) where the next page does not follow in pool memory."""
        size = self._cache.spec.page_size
        for page in range(start // size + 1, -(-end // size)):
            if self._block_table[page] != self._block_table[page - 1] + 1:
                yield start, page * size
                start = page * size
        yield start, end

    def _fetch_ahead(self, first: int, most: int) -> None:
        """Begins to copy the runs of the frames from `first` on, as far as there are and up to `most` bytes, to the
        host; those before are done with.
        """
        assert self._cache.staging is not None
        if first >= len(self._records):
            return
        done = self._records[first].run
        self._fetches = {index: fetch for index, fetch in self._fetches.items() if index >= done}
        size = 0
        for sequence in range(first, len(self._records)):
            record = self._records[sequence]
            size += record.nbytes
            if size > most:
                break
            if record.run not in self._fetches:
                run = self._runs[record.run]
                self._fetches[record.run] = self._cache.staging.fetch(*self._place(run), run.nbytes)

    def _view(self, record: _Record) -> memoryview:
        begin, end = record.begin, record.begin + record.nbytes
        if (fetch := self._fetches.get(record.run)) is not None:
            return fetch.data()[begin:end]
        view, first = self._place(self._runs[record.run])
        return view[first + begin : first + end]

    def _place(self, run: _Run) -> tuple[WireBytes, int]:
        """Pool memory with the bytes of a run, and the first of them in it."""
        spec = self.manifest.tensors[run.tensor]
        if spec.kind is TensorKind.MLA_ROWS:
            page_bytes = self._cache.spec.page_size * spec.shape[1] * DTYPE_BYTES[spec.dtype]
            first, skip = divmod(run.offset, page_bytes)
            count = -(-(skip + run.nbytes) // page_bytes)
            return self._cache.rows_bytes(spec.layer, self._block_table[first], count), skip
        return tensor_bytes(self._cache, spec.kind, spec.layer, self._slot), run.offset


def tensor_bytes(cache: Cache, kind: TensorKind, layer: int, slot: int) -> WireBytes:
    """Pool memory of a tensor that lives in a slot, as it travels."""
    if kind is TensorKind.KDA_STATE:
        state = cache.state_bytes(layer, slot)
        spec = cache.spec
        is_narrow = (spec.state_dtype, spec.wire_state_dtype) == (torch.float32, torch.bfloat16)
        return NarrowState(state) if is_narrow else state
    if kind is TensorKind.CONV_STATE:
        return cache.conv_bytes(layer, slot)
    assert kind is TensorKind.LOGITS, kind
    return cache.logits_bytes(slot)


def page_spans(
    block_table: Sequence[int], page_bytes: int, offset: int, nbytes: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Cuts bytes [offset, offset + nbytes) of a request's rows where the next page does not follow in pool memory:
    (first page, number of pages, first byte in them, first byte in data, number of bytes).
    """
    done = 0
    while done < nbytes:
        index, begin = divmod(offset + done, page_bytes)
        first, pages, left = block_table[index], 1, begin + nbytes - done
        while pages * page_bytes < left and block_table[index + pages] == first + pages:
            pages += 1
        size = min(pages * page_bytes, left) - begin
        yield first, pages, begin, done, size
        done += size
