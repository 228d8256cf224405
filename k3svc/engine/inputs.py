"""From a batch to the tensors of a step: packed ids, where their rows live, and whose logits are wanted.

A step is padded to a multiple of `row_tile` rows: token id 0, slot_mapping -1, and in a decode step, where a row is a
sequence, slot -1; in the other steps padding belongs to no sequence. It follows the sequences, so that no kernel ever
sees a row whose owner it could disturb.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3svc.core.batch import DecodeBatch, ExtendBatch
from k3svc.ops.table import StepMeta
from k3svc.ops.upload import to_device

_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tokens of a step that are on the device, read or not."""

    token_ids: Tensor
    """int64 [R]."""
    places: Mapping[str, int]
    """Key → place in them."""


def extend_inputs(
    batch: ExtendBatch, page_size: int, device: torch.device, row_tile: int
) -> tuple[Tensor, StepMeta, Tensor]:
    """Token ids int64 [N], meta, and the rows int64 [L] whose logits end a prompt, in the order of `is_last` rows.

    Every row brings at least one token. Block tables end with the page of a sequence's last token.
    """
    lengths = [len(row.token_ids) for row in batch.rows]
    assert all(lengths), "an extend row without tokens"
    starts = [row.start for row in batch.rows]
    ends = [0, *accumulate(lengths)]
    padded = _padded(ends[-1], row_tile)
    ids = np.zeros(padded, dtype=np.int64)
    slot_mapping = np.full(padded, -1, dtype=np.int64)
    tables = _block_tables(
        [row.block_table for row in batch.rows],
        [start + length for start, length in zip(starts, lengths, strict=True)],
        len(batch.rows),
        page_size,
    )
    for index, row in enumerate(batch.rows):
        own = slice(ends[index], ends[index + 1])
        ids[own] = row.token_ids
        positions = np.arange(row.start, row.start + lengths[index])
        slot_mapping[own] = tables[index, positions // page_size] * page_size + positions % page_size
    return _inputs(
        ids=ids,
        slots=[row.slot for row in batch.rows],
        starts=starts,
        cu_seqlens=ends,
        slot_mapping=slot_mapping,
        block_tables=tables,
        wanted=[ends[index + 1] - 1 for index, row in enumerate(batch.rows) if row.is_last],
        page_size=page_size,
        device=device,
    )


def decode_inputs(
    batch: DecodeBatch, page_size: int, device: torch.device, row_tile: int, before: Chosen | None = None
) -> tuple[Tensor, StepMeta, Tensor]:
    """Token ids int64 [N], meta of N sequences of one row, and the rows int64 [L] with a `sample`, in their order.

    There must be at least one row. One without a token id takes it from `before`, or 0 if nothing was chosen for its
    key there: then the sample has failed.
    """
    rows = batch.rows
    padded = _padded(len(rows), row_tile)
    padding = padded - len(rows)
    starts = [row.position for row in rows]
    tables = _block_tables([row.block_table for row in rows], [start + 1 for start in starts], padded, page_size)
    slot_mapping = [row.block_table[row.position // page_size] * page_size + row.position % page_size for row in rows]
    own_ids, meta, wanted = _inputs(
        ids=[row.token_id or 0 for row in rows] + [0] * padding,
        slots=[row.slot for row in rows] + [-1] * padding,
        starts=starts + [0] * padding,
        cu_seqlens=range(padded + 1),
        slot_mapping=slot_mapping + [-1] * padding,
        block_tables=tables,
        wanted=[index for index, row in enumerate(rows) if row.sample is not None],
        page_size=page_size,
        device=device,
    )
    return own_ids if before is None else _with_chosen(own_ids, batch, before), meta, wanted


def verify_inputs(
    batch: DecodeBatch, page_size: int, device: torch.device, row_tile: int
) -> tuple[Tensor, StepMeta, Tensor]:
    """Token ids int64 [N], meta of one sequence a row of the batch, its anchor and its drafts, and the packed rows
    int64 [L] of those with a `sample`, in their order.

    There must be at least one row.
    """
    lengths = [1 + len(row.drafts) for row in batch.rows]
    ends = [0, *accumulate(lengths)]
    padding = _padded(ends[-1], row_tile) - ends[-1]
    starts = [row.position for row in batch.rows]
    tables = _block_tables(
        [row.block_table for row in batch.rows],
        [start + length for start, length in zip(starts, lengths, strict=True)],
        len(batch.rows),
        page_size,
    )
    slot_mapping = [
        row.block_table[position // page_size] * page_size + position % page_size
        for row, length in zip(batch.rows, lengths, strict=True)
        for position in range(row.position, row.position + length)
    ]
    anchors = [row.token_id for row in batch.rows]
    assert None not in anchors, "drafts after a token that is not known"
    ids = [token_id or 0 for row in batch.rows for token_id in (row.token_id, *row.drafts)] + [0] * padding
    wanted = [
        packed
        for row, end in zip(batch.rows, ends, strict=False)
        if row.sample is not None
        for packed in range(end, end + 1 + len(row.drafts))
    ]
    return _inputs(
        ids=ids,
        slots=[row.slot for row in batch.rows],
        starts=starts,
        cu_seqlens=ends,
        slot_mapping=slot_mapping + [-1] * padding,
        block_tables=tables,
        wanted=wanted,
        page_size=page_size,
        device=device,
    )


def _with_chosen(ids: Tensor, batch: DecodeBatch, before: Chosen) -> Tensor:
    """The ids of a step with those that the step before has chosen."""
    count = ids.shape[0]
    # Where each row's id stands in [ids | chosen ones].
    sources = np.arange(count)
    for index, row in enumerate(batch.rows):
        if row.token_id is None and row.key in before.places:
            sources[index] = count + before.places[row.key]
    if np.array_equal(sources, count + np.arange(before.token_ids.shape[0])):
        # The same samples go on, as in most steps.
        return before.token_ids
    return torch.cat([ids, before.token_ids]).index_select(0, *to_device([sources], ids.device))


def _padded(count: int, row_tile: int) -> int:
    assert count > 0, "a step without tokens"
    return -(-count // row_tile) * row_tile


def _block_tables(tables: Sequence[Sequence[int]], num_tokens: Sequence[int], num_rows: int, page_size: int) -> _Int64:
    """int64 [num_rows, pages]: what holds the first num_tokens of each sequence, 0 past it."""
    num_pages = [-(-tokens // page_size) for tokens in num_tokens]
    width = max(num_pages)
    rows: list[int] = []
    for table, pages in zip(tables, num_pages, strict=True):
        # Else the tokens of the missing pages would go to the dummy page unseen.
        assert len(table) >= pages, f"block table of {len(table)} pages, {pages} needed"
        rows += table[:pages]
        if pages < width:
            rows += [0] * (width - pages)
    return np.array(rows + [0] * (num_rows * width - len(rows)), dtype=np.int64).reshape(num_rows, width)


def _inputs(
    *,
    ids: Sequence[int] | _Int64,
    slots: Sequence[int],
    starts: Sequence[int],
    cu_seqlens: Sequence[int],
    slot_mapping: Sequence[int] | _Int64,
    block_tables: _Int64,
    wanted: Sequence[int],
    page_size: int,
    device: torch.device,
) -> tuple[Tensor, StepMeta, Tensor]:
    host = [
        np.array(part, dtype=np.int64) for part in (ids, slots, starts, cu_seqlens, slot_mapping, block_tables, wanted)
    ]
    own_ids, own_slots, own_starts, own_bounds, own_mapping, own_tables, own_wanted = to_device(host, device)
    meta = StepMeta(
        slots=own_slots,
        starts=own_starts,
        cu_seqlens=own_bounds,
        slot_mapping=own_mapping,
        block_tables=own_tables,
        host_slots=tuple(slots),
        host_starts=tuple(starts),
        host_cu_seqlens=tuple(cu_seqlens),
        page_size=page_size,
    )
    return own_ids, meta, own_wanted
