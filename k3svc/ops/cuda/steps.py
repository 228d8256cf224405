"""What the operations of a step share: where its rows live, on the device. Decode and verify wait for nothing there."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3svc.ops.table import Mode, StepMeta
from k3svc.ops.upload import to_device

CHUNK = 32
"""Tokens of a chunk of kda_extend."""
QUERY_TILE = 64
"""Query rows of a program of mla_extend."""

Commit = Callable[[Tensor], None]
"""Advances one state by the first accepted[b] drafts of each sequence; int64 [B]."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Runs of chunks that kda_extend scans by themselves: sequences, or their segments in order."""

    count: int
    is_cut: bool
    """Sequences are cut into segments."""
    sequences: Tensor
    """int64 [count]."""
    bounds: Tensor
    """int64 [count + 1], chunks of each piece."""
    sequence_bounds: Tensor
    """int64 [B + 1], pieces of each sequence."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How the prompts of an extend step are cut."""

    num_chunks: int
    chunk_rows: Tensor
    """int64 [num_chunks], first packed row of each chunk; the chunks of a sequence follow each other."""
    chunk_lengths: Tensor
    """int64 [num_chunks], 1 to CHUNK."""
    chunk_bounds: Tensor
    """int64 [B + 1], chunks of sequence b; none for padding."""
    pieces: Pieces
    num_tiles: int
    tile_sequences: Tensor
    """int64 [num_tiles]."""
    tile_rows: Tensor
    """int64 [num_tiles], first packed row of each tile of queries."""
    key_rows: Tensor
    """int64, pool rows of all tokens of each sequence, one sequence after the other."""
    key_bounds: Tensor
    """int64 [B + 1]."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step in any mode."""

    mode: Mode
    num_rows: int
    """N, padding included."""
    num_sequences: int
    has_padding: bool
    """Some row belongs to no sequence, or to one of slot -1."""
    slots: Tensor
    starts: Tensor
    bounds: Tensor
    """int64 [B + 1], packed rows of each sequence."""
    slot_mapping: Tensor
    block_tables: Tensor
    page_size: int
    row_sequence: Tensor
    """int64 [N], -1 past the last sequence. Not in decode, where a row is a sequence."""
    row_keys: Tensor
    """int64 [N], cached rows that a row attends to, its own included; 0 for padding. Not in decode."""
    max_keys: int
    """At least the largest of them."""
    prompts: Prompts | None
    commits: list[Commit] = field(default_factory=list)
    """One of each state that a verify step has read."""

    @property
    def is_decode(self) -> bool:
        return self.mode == "decode"

    def new_rows(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """[N, *shape] for kernels to write; zeros where there are rows that they do not visit."""
        make = torch.zeros if self.has_padding and not self.is_decode else torch.empty
        return make(self.num_rows, *shape, dtype=dtype, device=self.slots.device)


def prepare(meta: StepMeta, mode: Mode, segment_chunks: int | None) -> Step:
    """`Ops.prepare`. segment_chunks: chunks of a segment, where prompts are to be cut."""
    num_rows, count = meta.slot_mapping.shape[0], len(meta.host_slots)
    prompts = None
    if mode == "decode":
        # Without arrays, since the device waits for it.
        row_sequence, row_keys, max_keys = meta.slots, meta.starts, 1 + max(meta.host_starts, default=0)
    else:
        bounds = np.array(meta.host_cu_seqlens, dtype=np.int64)
        lengths = bounds[1:] - bounds[:-1]
        ends = np.array(meta.host_starts, dtype=np.int64) + lengths
        row_sequence, row_keys = _rows(meta, num_rows, lengths)
        max_keys = int(ends.max(initial=1))
        prompts = _prompts(meta, lengths, ends, segment_chunks) if mode == "extend" else None
    return Step(
        mode=mode,
        num_rows=num_rows,
        num_sequences=count,
        has_padding=num_rows > meta.host_cu_seqlens[-1] or min(meta.host_slots, default=0) < 0,
        slots=meta.slots,
        starts=meta.starts,
        bounds=meta.cu_seqlens,
        slot_mapping=meta.slot_mapping,
        block_tables=meta.block_tables.contiguous(),
        page_size=meta.page_size,
        row_sequence=row_sequence,
        row_keys=row_keys,
        max_keys=max_keys,
        prompts=prompts,
    )


def _rows(meta: StepMeta, num_rows: int, lengths: npt.NDArray[np.int64]) -> list[Tensor]:
    """Sequence and keys of each row."""
    slots, starts = np.array(meta.host_slots, dtype=np.int64), np.array(meta.host_starts, dtype=np.int64)
    firsts, used = np.array(meta.host_cu_seqlens, dtype=np.int64), meta.host_cu_seqlens[-1]
    sequence, keys = np.full(num_rows, -1), np.zeros(num_rows, dtype=np.int64)
    own = np.repeat(np.arange(len(lengths)), lengths)
    sequence[:used] = own
    keys[:used] = np.where(slots[own] >= 0, starts[own] + np.arange(used) - firsts[own] + 1, 0)
    return to_device([sequence, keys], meta.slots.device)


def _prompts(
    meta: StepMeta, lengths: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], segment_chunks: int | None
) -> Prompts:
    device = meta.slots.device
    is_live = np.array(meta.host_slots) >= 0
    firsts = np.array(meta.host_cu_seqlens[:-1], dtype=np.int64)
    lengths = np.where(is_live, lengths, 0)
    chunk_bounds, _, chunk_rows, chunk_lengths = _cut(firsts, lengths, CHUNK)
    tile_bounds, tile_sequences, tile_rows, _ = _cut(firsts, lengths, QUERY_TILE)
    key_bounds = np.concatenate([[0], np.cumsum(np.where(lengths > 0, ends, 0))])
    total = int(key_bounds[-1])

    bounds = _on_device(key_bounds, device)
    positions = torch.arange(total, device=device)
    owners = torch.searchsorted(bounds[1:], positions, right=True)
    positions = positions - bounds[owners]
    pages = meta.block_tables[owners, positions // meta.page_size]
    return Prompts(
        num_chunks=int(chunk_bounds[-1]),
        chunk_rows=_on_device(chunk_rows, device),
        chunk_lengths=_on_device(chunk_lengths, device),
        chunk_bounds=_on_device(chunk_bounds, device),
        pieces=_pieces(chunk_bounds, segment_chunks, device),
        num_tiles=int(tile_bounds[-1]),
        tile_sequences=_on_device(tile_sequences, device),
        tile_rows=_on_device(tile_rows, device),
        key_rows=pages * meta.page_size + positions % meta.page_size,
        key_bounds=bounds,
    )


def _cut(
    firsts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pieces of `size` rows: their bounds by sequence [B + 1]; sequence, first packed row and length of each."""
    counts = -(-lengths // size)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    owners = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(owners)) - bounds[owners]) * size
    return bounds, owners, firsts[owners] + offsets, np.minimum(size, lengths[owners] - offsets)


def _pieces(chunk_bounds: npt.NDArray[np.int64], size: int | None, device: torch.device) -> Pieces:
    """Padding has no chunk, and makes no piece."""
    starts: list[int] = []
    sequences: list[int] = []
    sequence_bounds = [0]
    for sequence, (first, last) in enumerate(zip(chunk_bounds[:-1].tolist(), chunk_bounds[1:].tolist(), strict=True)):
        own = range(first, last, size or max(last - first, 1))
        starts += own
        sequences += [sequence] * len(own)
        sequence_bounds.append(len(starts))
    return Pieces(
        count=len(starts),
        is_cut=size is not None,
        sequences=_on_device(np.array(sequences, dtype=np.int64), device),
        bounds=_on_device(np.array([*starts, chunk_bounds[-1]]), device),
        sequence_bounds=_on_device(np.array(sequence_bounds), device),
    )


def _on_device(values: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device([values], device)[0]
