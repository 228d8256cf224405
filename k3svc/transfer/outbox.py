"""Outbox: the sending side of one hand-off. It records which bytes are final and hands them out in order.

A record names bytes of a tensor; the bytes stay in pool memory until they are sent, so a broken stream can resume at
any sequence number for as long as the pages and the slot are held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from crc32c import crc32c

from k3svc.ops.table import Cache, WireBytes
from k3svc.transfer.manifest import DTYPE_BYTES, Frame, Placed, StateManifest, TensorKind
from k3svc.transfer.narrow import NarrowState

ELEMENT_BYTES = 4
"""Frames end at multiples of it, so that none cuts an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    tensor: int
    offset: int
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
        self._records: list[_Record] = []
        self._by_layer: dict[int, list[int]] = {}
        for index, spec in enumerate(manifest.tensors):
            if spec.kind is not TensorKind.LOGITS:
                self._by_layer.setdefault(spec.layer, []).append(index)
        self._recorded_bytes = 0

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
                for first, last in self._runs(start, end):
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

        The data views pool memory: encode or copy it before anything else runs.
        """
        batch: list[Frame] = []
        size, limit = 0, self._frame_bytes if sink is None else sink.batch_bytes
        for sequence in range(next_sequence, len(self._records)):
            record = self._records[sequence]
            if batch and size + record.nbytes > limit:
                break
            data = self._view(record)
            placed = None if sink is None else sink.put(data)
            batch.append(
                Frame(
                    sequence=sequence,
                    tensor=record.tensor,
                    offset=record.offset,
                    crc32c=crc32c(data) if placed is None else placed.crc32c,
                    data=data,
                    position=None if placed is None else placed.position,
                )
            )
            size += record.nbytes
        return batch

    def _add(self, tensor: int, offset: int, nbytes: int) -> None:
        for begin in range(0, nbytes, self._frame_bytes):
            size = min(self._frame_bytes, nbytes - begin)
            self._records.append(_Record(tensor=tensor, offset=offset + begin, nbytes=size))
        self._recorded_bytes += nbytes

    def _runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cuts tokens [start, end) where the next page does not follow in pool memory."""
        size = self._cache.spec.page_size
        for page in range(start // size + 1, -(-end // size)):
            if self._block_table[page] != self._block_table[page - 1] + 1:
                yield start, page * size
                start = page * size
        yield start, end

    def _view(self, record: _Record) -> memoryview:
        spec = self.manifest.tensors[record.tensor]
        if spec.kind is TensorKind.MLA_ROWS:
            page_bytes = self._cache.spec.page_size * spec.shape[1] * DTYPE_BYTES[spec.dtype]
            first, skip = divmod(record.offset, page_bytes)
            count = -(-(skip + record.nbytes) // page_bytes)
            view = self._cache.rows_bytes(spec.layer, self._block_table[first], count)
            return view[skip : skip + record.nbytes]
        view = tensor_bytes(self._cache, spec.kind, spec.layer, self._slot)
        return view[record.offset : record.offset + record.nbytes]


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
