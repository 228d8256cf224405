"""What a step's operations share in the reference backend, derived once from StepMeta.

Every cut below is a free choice of scheduling: the arithmetic of a chunk, a tile or a block of keys is the same in
whatever company it runs. What is *not* free, because it decides bits, are the grids: chunks and query tiles of 64
tokens and key blocks of 64 rows from position 0, and segments of 64 key blocks in decode.
Rows with slot -1, empty sequences and rows past the last sequence appear in none of these tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3svc.ops.reference_cache import KdaPool
from k3svc.ops.table import KdaGate, StepMeta

GRID = 64
"""Tokens of a KDA chunk, of a query tile and of a block of keys."""
SEGMENT = 64
"""Key blocks of a decode row that are combined by a tree; segments are combined one after the other."""
MAX_CHUNKS = 16
"""Chunks that kda_extend works on at once, so that its intermediates stay in the caches of the processor."""
MAX_TILES = 16
"""Query tiles that mla_extend works on at once."""
MAX_BLOCKS = 256
"""Key blocks that mla_decode works on at once."""

_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some of the packed rows of a step."""

    count: int
    index: Tensor | None
    """int64 [count]; None: the first rows."""

    def take(self, x: Tensor) -> Tensor:
        """These rows of x [N, ..]; may be a view."""
        return x[: self.count] if self.index is None else x.index_select(0, self.index)

    def put(self, y: Tensor, num_rows: int) -> Tensor:
        """[num_rows, ..] with the rows of y [count, ..] in their places and zeros elsewhere; may be y."""
        if self.index is None and self.count == num_rows:
            return y
        out = y.new_zeros(num_rows, *y.shape[1:])
        if self.index is None:
            out[: self.count] = y
            return out
        return out.index_copy_(0, self.index, y)


@dataclass(frozen=True, kw_only=True)
class ConvPlan:
    """Windows of the convolution over [state rows, own rows] of each sequence, laid one after the other."""

    gather: Tensor | None
    """int64, rows of [the states of all sequences, the live rows]; None: as they are."""
    windows: Tensor | None
    """int64 [live rows], where the window of each row begins; None: one after the other."""
    tails: Tensor
    """int64 [B·(W-1)], the rows that are the next states."""


@dataclass(frozen=True, kw_only=True)
class ChunkSlice:
    """Some chunks of several sequences, ordered by time, then by sequence in the order of `ExtendStep.slots`."""

    rows: Tensor
    """int64 [n·64], packed row of each token; of padding any live row."""
    padding: Tensor
    """int64, which of the n·64 are padding."""
    targets: Tensor
    """int64 [n·64], like rows, but N for padding."""
    scan: tuple[tuple[int, int], ...]
    """First chunk and number of chunks (sequences) of each step of the state scan."""


@dataclass(frozen=True, kw_only=True)
class KeyBlock:
    """Block j of the keys, for the tiles of one group that see it."""

    num_sequences: int
    rows: Tensor
    """int64 [num_sequences·64], pool rows."""
    unwritten: Tensor | None
    """int64, which of them lie past the end of the sequence."""
    num_tiles: int
    first_diagonal: int
    """Tiles from here to num_tiles have their own positions in this block."""


@dataclass(frozen=True, kw_only=True)
class TileGroup:
    """Query tiles in descending order of absolute index, and the key blocks they walk."""

    rows: Tensor
    """int64 [T·64], packed row of each query; of padding any live row."""
    targets: Tensor
    """int64 [T·64], like rows, but N for padding."""
    sequence: Tensor
    """int64 [T], which of the group's sequences a tile belongs to."""
    blocks: tuple[KeyBlock, ...]


@dataclass(frozen=True, kw_only=True)
class ExtendStep:
    """Prompt chunks of live sequences, longest first."""

    num_rows: int
    """N, padding included."""
    slots: Tensor
    """int64 [B]."""
    fresh: Tensor
    """int64, which of them start from nothing."""
    written: Rows
    """Those with a place in the MLA pool."""
    places: Tensor
    """int64, their rows in the MLA pool."""
    live: Rows
    """Rows of the sequences, in the order of the sequences."""
    conv: ConvPlan
    chunks: tuple[ChunkSlice, ...]
    tiles: tuple[TileGroup, ...]


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """Key blocks of one segment of some decode rows."""

    members: Tensor
    """int64 [M], which live rows."""
    is_first: bool
    """Whether this is their first segment."""
    owner: Tensor
    """int64 [T], which member each block belongs to."""
    cells: Tensor
    """int64 [T], the block's place in [M, width]."""
    width: int
    rows: Tensor
    """int64 [T·64], pool rows."""
    hidden: Tensor
    """bool [T, 1, 64], keys past the row's own position."""
    unwritten: Tensor
    """int64, the same as indices into T·64."""


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One row per live sequence."""

    num_rows: int
    """N, padding included."""
    live: Rows
    slots: Tensor
    """int64 [B]."""
    written: Rows
    """Those with a place in the MLA pool."""
    places: Tensor
    """int64, their rows in the MLA pool."""
    blocks: tuple[BlockGroup, ...]


@dataclass(frozen=True, kw_only=True)
class ConvRecord:
    """Rows that a convolution has seen in a verify step."""

    pool: KdaPool
    u: Tensor


@dataclass(frozen=True, kw_only=True)
class KdaRecord:
    """Arguments of `kda_verify`."""

    pool: KdaPool
    qkv: Tensor
    f: Tensor
    b: Tensor
    gate: KdaGate


@dataclass(frozen=True, kw_only=True)
class VerifyStep:
    """An anchor and drafts of each live sequence, the sequences with the most rows first."""

    num_rows: int
    """N, padding included."""
    host_lengths: tuple[int, ...]
    """Rows of each sequence of the step's meta, 0 for padding."""
    order: tuple[int, ...]
    """Sequences of the meta that are live."""
    slots: Tensor
    """int64 [B], of those."""
    rounds: tuple[Tensor, ...]
    """Round j: int64, the packed rows j of the first sequences, which have that many."""
    attention: DecodeStep
    """Each live row as a sequence of its own."""
    written: Rows
    """Those with a place in the MLA pool."""
    places: Tensor
    """int64, their rows in the MLA pool."""
    conv_records: list[ConvRecord] = field(default_factory=list)
    kda_records: list[KdaRecord] = field(default_factory=list)


def prepare_extend(meta: StepMeta, conv_width: int) -> ExtendStep:
    """Plans an extend step. Every start must be a multiple of the grid."""
    lengths = np.diff(np.array(meta.host_cu_seqlens, dtype=np.int64))
    live = [b for b, slot in enumerate(meta.host_slots) if slot >= 0 and lengths[b] > 0]
    live.sort(key=lambda b: (-(-lengths[b] // GRID), lengths[b]), reverse=True)
    offsets = np.array([meta.host_cu_seqlens[b] for b in live], dtype=np.int64)
    own = np.array([lengths[b] for b in live], dtype=np.int64)
    starts = np.array([meta.host_starts[b] for b in live], dtype=np.int64)
    assert not (starts % GRID).any(), f"starts off the grid of {GRID}: {starts}"
    num_rows = meta.slot_mapping.shape[0]
    mapping = meta.slot_mapping.numpy()
    written = np.flatnonzero(mapping >= 0)
    return ExtendStep(
        num_rows=num_rows,
        slots=_tensor([meta.host_slots[b] for b in live]),
        fresh=_tensor(np.flatnonzero(starts == 0)),
        written=_rows(written),
        places=_tensor(mapping[written]),
        live=_rows(_ranges(offsets, own)),
        conv=_conv_plan(own, conv_width - 1),
        chunks=_chunk_slices(offsets, own, num_rows),
        tiles=_tile_groups(meta, live, offsets, own, starts),
    )


def prepare_decode(meta: StepMeta) -> DecodeStep:
    """Plans a decode step."""
    live = [row for row, slot in enumerate(meta.host_slots) if slot >= 0]
    return _decode_step(meta, live, live, [meta.host_starts[row] for row in live])


def prepare_verify(meta: StepMeta) -> VerifyStep:
    """Plans a verify step."""
    bounds = zip(meta.host_cu_seqlens, meta.host_cu_seqlens[1:], strict=False)
    lengths = [end - begin if slot >= 0 else 0 for slot, (begin, end) in zip(meta.host_slots, bounds, strict=True)]
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    rounds = [
        _tensor([meta.host_cu_seqlens[index] + place for index in order if lengths[index] > place])
        for place in range(max(lengths, default=0))
    ]
    owners = [index for index, length in enumerate(lengths) for _ in range(length)]
    places = [place for length in lengths for place in range(length)]
    attention = _decode_step(
        meta,
        [meta.host_cu_seqlens[owner] + place for owner, place in zip(owners, places, strict=True)],
        owners,
        [meta.host_starts[owner] + place for owner, place in zip(owners, places, strict=True)],
    )
    return VerifyStep(
        num_rows=attention.num_rows,
        host_lengths=tuple(lengths),
        order=tuple(order),
        slots=_tensor([meta.host_slots[index] for index in order]),
        rounds=tuple(rounds),
        attention=attention,
        written=attention.written,
        places=attention.places,
    )


def _decode_step(meta: StepMeta, rows: list[int], owners: list[int], positions: list[int]) -> DecodeStep:
    """A step of packed rows, each of a sequence of the meta and at a position of its own."""
    mapping = meta.slot_mapping.numpy()
    written = np.flatnonzero(mapping >= 0)
    return DecodeStep(
        num_rows=meta.slot_mapping.shape[0],
        live=_rows(np.array(rows, dtype=np.int64)),
        slots=_tensor([meta.host_slots[owner] for owner in owners]),
        written=_rows(written),
        places=_tensor(mapping[written]),
        blocks=_block_groups(meta, owners, [position + 1 for position in positions]),
    )


def _tensor(values: Sequence[int] | Sequence[_Int64] | _Int64) -> Tensor:
    if isinstance(values, list) and values and isinstance(values[0], np.ndarray):
        values = np.concatenate(values)
    return torch.from_numpy(np.asarray(values, dtype=np.int64))


def _rows(index: _Int64) -> Rows:
    is_prefix = bool((index == np.arange(len(index))).all())
    return Rows(count=len(index), index=None if is_prefix else _tensor(index))


def _ranges(begins: _Int64, lengths: _Int64) -> _Int64:
    """begins[i], begins[i] + 1, .. of lengths[i] numbers each, one range after the other."""
    return np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def _conv_plan(lengths: _Int64, tail: int) -> ConvPlan:
    count = len(lengths)
    begins = np.cumsum(lengths) - lengths
    tails = _tensor(_ranges(begins + lengths + np.arange(count) * tail, np.full(count, tail)))
    if count == 1:
        return ConvPlan(gather=None, windows=None, tails=tails)
    order = [
        part
        for index, (begin, length) in enumerate(zip(begins + count * tail, lengths, strict=True))
        for part in (np.arange(index * tail, (index + 1) * tail), np.arange(begin, begin + length))
    ]
    windows = _ranges(begins + np.arange(count) * tail, lengths)
    return ConvPlan(gather=_tensor(order), windows=_tensor(windows), tails=tails)


def _chunk_slices(offsets: _Int64, lengths: _Int64, num_rows: int) -> tuple[ChunkSlice, ...]:
    """Cuts sequences, in descending order of their number of chunks, into slices of about MAX_CHUNKS chunks."""
    counts = -(-lengths // GRID)
    slices: list[ChunkSlice] = []
    first = 0
    while len(counts) and first < counts[0]:
        width = max(1, MAX_CHUNKS // int((counts > first).sum()))
        scan: list[tuple[int, int]] = []
        begins: list[_Int64] = []
        ends: list[_Int64] = []
        total = 0
        for chunk in range(first, min(first + width, int(counts[0]))):
            active = int((counts > chunk).sum())
            scan.append((total, active))
            begins.append(offsets[:active] + chunk * GRID)
            ends.append(offsets[:active] + lengths[:active])
            total += active
        rows = np.concatenate(begins)[:, None] + np.arange(GRID)
        is_padding = rows >= np.concatenate(ends)[:, None]
        slices.append(
            ChunkSlice(
                rows=_tensor(np.where(is_padding, offsets[0], rows).reshape(-1)),
                padding=_tensor(np.flatnonzero(is_padding)),
                targets=_tensor(np.where(is_padding, num_rows, rows).reshape(-1)),
                scan=tuple(scan),
            )
        )
        first += width
    return tuple(slices)


def _pool_rows(table: Tensor, num_tokens: int, page_size: int) -> _Int64:
    """Pool rows of positions 0 to num_tokens, rounded up to the grid; past num_tokens row 0."""
    positions = np.arange(-(-num_tokens // GRID) * GRID)
    pages = table.numpy()
    rows = pages[np.minimum(positions // page_size, len(pages) - 1)] * page_size + positions % page_size
    rows[num_tokens:] = 0
    return rows


def _tile_groups(
    meta: StepMeta, live: list[int], offsets: _Int64, lengths: _Int64, starts: _Int64
) -> tuple[TileGroup, ...]:
    tiles = [
        (int(starts[index]) // GRID + tile, index, tile)
        for index in range(len(live))
        for tile in range(-(-int(lengths[index]) // GRID))
    ]
    tiles.sort(reverse=True)
    pool_rows: dict[int, _Int64] = {}
    groups: list[TileGroup] = []
    for first in range(0, len(tiles), MAX_TILES):
        group = tiles[first : first + MAX_TILES]
        sequences = list(dict.fromkeys(index for _, index, _ in group))
        for index in sequences:
            if index not in pool_rows:
                end = int(starts[index] + lengths[index])
                pool_rows[index] = _pool_rows(meta.block_tables[live[index]], end, meta.page_size)
        begins = np.array([offsets[index] + tile * GRID for _, index, tile in group], dtype=np.int64)
        ends = np.array([offsets[index] + lengths[index] for _, index, _ in group], dtype=np.int64)
        rows = begins[:, None] + np.arange(GRID)
        is_padding = rows >= ends[:, None]
        groups.append(
            TileGroup(
                rows=_tensor(np.where(is_padding, offsets[group[0][1]], rows).reshape(-1)),
                targets=_tensor(np.where(is_padding, meta.slot_mapping.shape[0], rows).reshape(-1)),
                sequence=_tensor([sequences.index(index) for _, index, _ in group]),
                blocks=_key_blocks(
                    [tile for tile, _, _ in group],
                    [max(tile for tile, owner, _ in group if owner == index) for index in sequences],
                    [pool_rows[index] for index in sequences],
                    [int(starts[index] + lengths[index]) for index in sequences],
                ),
            )
        )
    return tuple(groups)


def _key_blocks(
    tiles: list[int], last_tiles: list[int], pool_rows: list[_Int64], ends: list[int]
) -> tuple[KeyBlock, ...]:
    """Blocks 0 to the first tile. `tiles` and `last_tiles` (of each sequence) are in descending order."""
    blocks: list[KeyBlock] = []
    for block in range(tiles[0] + 1):
        num_sequences = sum(last >= block for last in last_tiles)
        num_tiles = sum(tile >= block for tile in tiles)
        own = slice(block * GRID, (block + 1) * GRID)
        unwritten = [
            np.arange(index * GRID + max(0, ends[index] - block * GRID), (index + 1) * GRID)
            for index in range(num_sequences)
            if ends[index] < (block + 1) * GRID
        ]
        blocks.append(
            KeyBlock(
                num_sequences=num_sequences,
                rows=_tensor([rows[own] for rows in pool_rows[:num_sequences]]),
                unwritten=_tensor(unwritten) if unwritten else None,
                num_tiles=num_tiles,
                first_diagonal=sum(tile > block for tile in tiles),
            )
        )
    return tuple(blocks)


def _block_groups(meta: StepMeta, owners: list[int], ends: list[int]) -> tuple[BlockGroup, ...]:
    """Blocks of rows that see the first ends[i] tokens of the sequence owners[i]."""
    counts = [-(-end // GRID) for end in ends]
    groups: list[BlockGroup] = []
    for segment in range(-(-max(counts, default=0) // SEGMENT)):
        first = segment * SEGMENT
        members: list[int] = []
        blocks = 0
        for index, count in enumerate(counts):
            own = min(SEGMENT, count - first)
            if own <= 0:
                continue
            if members and blocks + own > MAX_BLOCKS:
                groups.append(_block_group(meta, owners, ends, members, first))
                members, blocks = [], 0
            members.append(index)
            blocks += own
        groups.append(_block_group(meta, owners, ends, members, first))
    return tuple(groups)


def _block_group(meta: StepMeta, owners: list[int], ends: list[int], members: list[int], first: int) -> BlockGroup:
    counts = np.array([min(SEGMENT, -(-ends[index] // GRID) - first) for index in members], dtype=np.int64)
    width = int(counts.max())
    owner = np.repeat(np.arange(len(members)), counts)
    block = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = (first + block)[:, None] * GRID + np.arange(GRID)
    end = np.array([ends[index] for index in members], dtype=np.int64)[owner][:, None]
    tables = meta.block_tables.numpy()[[owners[index] for index in members]]
    pages = np.minimum(positions // meta.page_size, tables.shape[1] - 1)
    rows = tables[owner[:, None], pages] * meta.page_size + positions % meta.page_size
    is_hidden = positions >= end
    return BlockGroup(
        members=_tensor(members),
        is_first=first == 0,
        owner=_tensor(owner),
        cells=_tensor(owner * width + block),
        width=width,
        rows=_tensor(np.where(is_hidden, 0, rows).reshape(-1)),
        hidden=torch.from_numpy(is_hidden[:, None, :]),
        unwritten=_tensor(np.flatnonzero(is_hidden)),
    )
