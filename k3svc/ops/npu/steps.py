"""What a step's operations share on Ascend.

Extend runs eagerly: the host knows which sequences are padding or empty, and neither reaches an operator. Decode may be
captured in a graph, so its shapes are fixed: padding is mapped to the dummy slot 0 and the dummy page 0, never to -1,
which the device reads as the last slot.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from k3svc.errors import EngineFault
from k3svc.ops.table import StepMeta

MAX_SEQUENCES = 1024
"""Sequences of one chunk_kda_fwd call."""


@dataclass(frozen=True, kw_only=True)
class ExtendStep:
    """Prompt chunks of the B live sequences, T rows in all, in the order of the step."""

    num_rows: int
    """N, padding included."""
    rows: Tensor | None
    """int64 [T], packed rows of the sequences; None: the first T."""
    num_live: int
    """T."""
    slots: Tensor
    """int64 [B], unique, none negative."""
    fresh: Tensor
    """int64, which sequences start from nothing."""
    has_state: Tensor
    """bool [B], the others."""
    cu_seqlens: Tensor
    """int64 [B + 1]."""
    query_ends: list[int]
    """cu_seqlens without the leading zero."""
    key_ends: list[int]
    """Cumulative numbers of cached rows, those of this step included."""
    key_rows: Tensor
    """int64 [key_ends[-1]], pool rows of every position of every sequence."""
    places: Tensor
    """int64 [N, 1], pool row of each packed row; of padding row 0 of the dummy page."""

    def take(self, x: Tensor) -> Tensor:
        """Rows of the sequences: [N, ...] → [T, ...]."""
        return x[: self.num_live] if self.rows is None else x.index_select(0, self.rows)

    def put(self, x: Tensor) -> Tensor:
        """Back to the step's rows, zeros at padding: [T, ...] → [N, ...]."""
        if self.num_live == self.num_rows:
            return x
        out = x.new_zeros(self.num_rows, *x.shape[1:])
        if self.rows is not None:
            return out.index_copy_(0, self.rows, x)
        out[: self.num_live] = x
        return out


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One row a sequence, padding included."""

    slots: Tensor
    """int64 [B], 0 for padding."""
    cu_seqlens: Tensor
    """int64 [B + 1], counting up."""
    block_tables: Tensor
    """int32 [B, pages]."""
    key_lengths: list[int]
    """Cached rows of each sequence, the step's own included; 1 (of the dummy page) for padding."""
    places: Tensor
    """int64 [B, 1]."""
    padding: Tensor
    """bool [B]."""

    def hide_padding(self, x: Tensor) -> Tensor:
        """Zeros in the rows of padding [B, ...], whatever lies in the dummies; a selection, so nothing syncs."""
        return x.masked_fill(self.padding.view(-1, *(1,) * (x.dim() - 1)), 0)


def prepare_extend(meta: StepMeta) -> ExtendStep:
    """Raises EngineFault past MAX_SEQUENCES sequences."""
    bounds = meta.host_cu_seqlens
    lengths = [end - begin for begin, end in pairwise(bounds)]
    live = [b for b, slot in enumerate(meta.host_slots) if slot >= 0 and lengths[b] > 0]
    if len(live) > MAX_SEQUENCES:
        raise EngineFault(f"an extend step of {len(live)} prompts; the Ascend backend takes at most {MAX_SEQUENCES}")
    device = meta.slots.device
    query_ends = list(accumulate(lengths[b] for b in live))
    key_lengths = [meta.host_starts[b] + lengths[b] for b in live]
    num_live = query_ends[-1] if live else 0
    rows = np.concatenate([np.arange(bounds[b], bounds[b + 1]) for b in live]) if live else np.arange(0)
    is_prefix = bool((rows == np.arange(num_live)).all())
    starts = torch.tensor([meta.host_starts[b] for b in live], dtype=torch.int64)
    return ExtendStep(
        num_rows=meta.slot_mapping.shape[0],
        rows=None if is_prefix else torch.from_numpy(rows).to(device),
        num_live=num_live,
        slots=torch.tensor([meta.host_slots[b] for b in live], dtype=torch.int64).to(device),
        fresh=(starts == 0).nonzero()[:, 0].to(device),
        has_state=(starts > 0).to(device),
        cu_seqlens=torch.tensor([0, *query_ends], dtype=torch.int64).to(device),
        query_ends=query_ends,
        key_ends=list(accumulate(key_lengths)),
        key_rows=_key_rows(meta, live, key_lengths),
        places=meta.slot_mapping.clamp_min(0)[:, None],
    )


def prepare_decode(meta: StepMeta) -> DecodeStep:
    """Lengths come from the host's copies: the attention operator wants Python integers."""
    count = meta.slots.shape[0]
    is_padding = [slot < 0 for slot in meta.host_slots]
    return DecodeStep(
        slots=meta.slots.clamp_min(0),
        cu_seqlens=torch.arange(count + 1, device=meta.slots.device),
        block_tables=meta.block_tables.to(torch.int32),
        key_lengths=[1 if padding else start + 1 for padding, start in zip(is_padding, meta.host_starts, strict=True)],
        places=meta.slot_mapping.clamp_min(0)[:, None],
        padding=meta.slots < 0,
    )


def _key_rows(meta: StepMeta, live: list[int], lengths: list[int]) -> Tensor:
    owners = torch.from_numpy(np.repeat(np.array(live, dtype=np.int64), lengths))
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]) if lengths else np.arange(0))
    owners, positions = owners.to(meta.slots.device), positions.to(meta.slots.device)
    pages = meta.block_tables[owners, positions // meta.page_size]
    return pages * meta.page_size + positions % meta.page_size
