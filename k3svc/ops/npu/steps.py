"""What a step's operations share on Ascend.

Extend runs eagerly: the host knows which sequences are padding or empty, and neither reaches an operator. Decode and
verify may be captured in a graph, so their shapes are fixed: padding is mapped to the dummy slot 0 and the dummy page
0, never to -1, which the device reads as the last slot.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from k3svc.errors import EngineFault
from k3svc.ops.table import CacheSpec, StepMeta

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
    padding: Tensor
    """bool [N]."""

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
        return _hidden(x, self.padding)

    def grown(self, rows: int) -> "DecodeStep | None":
        """The same with padding up to `rows` sequences, and room for as many pages as a power of two; None where it has
        more.
        """
        more = rows - self.slots.shape[0]
        if more < 0:
            return None
        return DecodeStep(
            slots=_longer(self.slots, more),
            cu_seqlens=torch.arange(rows + 1, device=self.slots.device),
            block_tables=_widened(_longer(self.block_tables, more), 1),
            key_lengths=[*self.key_lengths, *[1] * more],
            places=_longer(self.places, more),
            padding=_longer(self.padding, more, True),
        )


class Scratch:
    """What a verify step keeps for its commit, in memory that is taken when it is first needed; the beginning of
    `memory`'s, where there is one."""

    def __init__(
        self, spec: CacheSpec, sequences: int, width: int, device: torch.device, memory: "Scratch | None" = None
    ) -> None:
        self._spec, self.sequences, self.width, self._device = spec, sequences, width, device
        self._memory = memory

    @cached_property
    def snapshots(self) -> Tensor:
        """[KDA layers, B, D, HV, V, K], the state after each row."""
        spec = self._spec
        shape = (self.width, spec.kda_heads, spec.kda_value_dim, spec.kda_key_dim)
        return self._taken(None if self._memory is None else self._memory.snapshots, spec.state_dtype, *shape)

    @cached_property
    def windows(self) -> Tensor:
        """[KDA layers, B, W - 1 + D, channels], the conv state and the rows after it."""
        spec = self._spec
        shape = (spec.conv_width - 1 + self.width, spec.conv_channels)
        return self._taken(None if self._memory is None else self._memory.windows, spec.kv_dtype, *shape)

    def of(self, sequences: int, width: int) -> "Scratch":
        """Memory elsewhere, of another size."""
        return Scratch(self._spec, sequences, width, self._device)

    def within(self, memory: "Scratch") -> "Scratch":
        """As much of `memory`, which is at least as large in both sizes."""
        assert memory.covers(self), "too little memory"
        return Scratch(self._spec, self.sequences, self.width, self._device, memory)

    def covers(self, other: "Scratch") -> bool:
        """Whether this is at least as large in both sizes."""
        return self.sequences >= other.sequences and self.width >= other.width

    def joined(self, other: "Scratch") -> "Scratch":
        """Memory elsewhere, as large as the larger one in both sizes."""
        return self.of(max(self.sequences, other.sequences), max(self.width, other.width))

    def adopt(self, other: "Scratch") -> None:
        """Reads what a captured step has kept."""
        self.snapshots, self.windows = other.snapshots, other.windows

    def _taken(self, memory: Tensor | None, dtype: torch.dtype, *shape: int) -> Tensor:
        shape = (len(self._spec.kda_layers), self.sequences, *shape)
        if memory is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return memory.view(-1)[: math.prod(shape)].view(shape)


@dataclass(frozen=True, kw_only=True)
class VerifyStep:
    """An anchor and drafts of B sequences, padding included; rows past the last one are a sequence of padding more.

    The KDA kernels want D rows of every sequence, the most that any has: a shorter one repeats its last row, and what
    comes of the repetitions is read by nobody.
    """

    width: int
    """D."""
    page_size: int
    slots: Tensor
    """int64 [B], 0 for padding."""
    dense: Tensor
    """int64 [B · D], the packed row of each."""
    packed: Tensor
    """int64 [N], where in those each packed row is."""
    padding: Tensor
    """bool [N]."""
    places: Tensor
    """int64 [N, 1], pool row of each packed row; of padding row 0 of the dummy page."""
    block_tables: Tensor
    """int32 [B, pages]."""
    query_ends: list[int]
    """Cumulative numbers of packed rows."""
    key_lengths: list[int]
    """Cached rows of each sequence, the step's own included; as many rows of the dummy page as padding has."""
    layout: list[tuple[int, int, int]]
    """(slot or -1, start, rows) of each sequence."""
    num_sequences: list[int]
    """[how many of them the step's meta names]."""
    scratch_rows: Tensor
    """int32 [B], counting up: rows of the scratch memory."""
    anchors: Tensor
    """int32 [B], zeros: the number of drafts behind an anchor."""
    scratch: Scratch

    def take(self, x: Tensor) -> Tensor:
        """D rows of every sequence: [N, ...] → [B · D, ...]."""
        return x.index_select(0, self.dense)

    def put(self, x: Tensor) -> Tensor:
        """Back to the step's rows, zeros at padding: [B · D, ...] → [N, ...]."""
        return self.hide_padding(x.index_select(0, self.packed))

    def hide_padding(self, x: Tensor) -> Tensor:
        """Zeros in the rows of padding [N, ...], whatever lies in the dummies."""
        return _hidden(x, self.padding)

    def grown(self, rows: int) -> "VerifyStep | None":
        """The same with padding up to `rows` rows, and to powers of two of sequences, rows a sequence and pages. A
        sequence of padding has a row at least, so None where they do not fit.
        """
        missing = rows - self.padding.shape[0]
        count = len(self.layout) + (missing > 0)
        more = (1 << (count - 1).bit_length()) - len(self.layout)
        if missing < more:
            return None
        added = [*[(-1, 0, 1)] * (more - 1), (-1, 0, missing - more + 1)] if more else []
        width = 1 << (self.width - 1).bit_length()
        layout = [*self.layout, *added]
        return _verify_step(
            layout,
            width,
            places=_longer(self.places, missing),
            block_tables=self.block_tables,
            page_size=self.page_size,
            num_sequences=self.num_sequences,
            scratch=self.scratch.of(len(layout), width),
        )


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
        padding=meta.slot_mapping < 0,
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


def prepare_verify(meta: StepMeta, spec: CacheSpec) -> VerifyStep:
    """Lays D rows of every sequence side by side, and makes room for what `Ops.commit` chooses from."""
    bounds = meta.host_cu_seqlens
    layout = [
        (slot, start if slot >= 0 else 0, end - begin)
        for slot, start, (begin, end) in zip(meta.host_slots, meta.host_starts, pairwise(bounds), strict=True)
    ]
    width = max(rows for _, _, rows in layout)
    if (rest := meta.slot_mapping.shape[0] - bounds[-1]) > 0:
        layout.append((-1, 0, rest))
    return _verify_step(
        layout,
        width,
        places=meta.slot_mapping.clamp_min(0)[:, None],
        block_tables=meta.block_tables.to(torch.int32),
        page_size=meta.page_size,
        num_sequences=[len(meta.host_slots)],
        scratch=Scratch(spec, len(layout), width, meta.slots.device),
    )


def _verify_step(
    layout: list[tuple[int, int, int]],
    width: int,
    *,
    places: Tensor,
    block_tables: Tensor,
    page_size: int,
    num_sequences: list[int],
    scratch: Scratch,
) -> VerifyStep:
    slots, starts, lengths = (list(column) for column in zip(*layout, strict=True))
    ends = list(accumulate(lengths))
    order = np.arange(width)
    dense = [end - length + np.minimum(order, length - 1) for end, length in zip(ends, lengths, strict=True)]
    packed = [b * width + np.minimum(np.arange(length), width - 1) for b, length in enumerate(lengths)]
    key_lengths = [start + length for start, length in zip(starts, lengths, strict=True)]
    device, count = places.device, len(layout)
    tables = _longer(block_tables, count - block_tables.shape[0])
    return VerifyStep(
        width=width,
        page_size=page_size,
        slots=torch.tensor(slots, dtype=torch.int64).clamp_min(0).to(device),
        dense=torch.from_numpy(np.concatenate(dense)).to(device),
        packed=torch.from_numpy(np.concatenate(packed)).to(device),
        padding=torch.from_numpy(np.repeat(np.array(slots) < 0, lengths)).to(device),
        places=places,
        block_tables=_widened(tables, -(-max(key_lengths) // page_size)),
        query_ends=ends,
        key_lengths=key_lengths,
        layout=layout,
        num_sequences=num_sequences,
        scratch_rows=torch.arange(count, dtype=torch.int32, device=device),
        anchors=torch.zeros(count, dtype=torch.int32, device=device),
        scratch=scratch,
    )


def _longer(x: Tensor, more: int, value: bool | int = 0) -> Tensor:
    """x with `more` rows of a value behind it."""
    return torch.cat([x, x.new_full((more, *x.shape[1:]), value)]) if more else x


def _widened(tables: Tensor, pages: int) -> Tensor:
    """Block tables with columns of the dummy page up to a power of two, at least `pages`."""
    columns = 1 << (max(pages, tables.shape[1], 1) - 1).bit_length()
    return torch.nn.functional.pad(tables, (0, columns - tables.shape[1]))


def _hidden(x: Tensor, padding: Tensor) -> Tensor:
    return x.masked_fill(padding.view(-1, *(1,) * (x.dim() - 1)), 0)


def _key_rows(meta: StepMeta, live: list[int], lengths: list[int]) -> Tensor:
    owners = torch.from_numpy(np.repeat(np.array(live, dtype=np.int64), lengths))
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]) if lengths else np.arange(0))
    owners, positions = owners.to(meta.slots.device), positions.to(meta.slots.device)
    pages = meta.block_tables[owners, positions // meta.page_size]
    return pages * meta.page_size + positions % meta.page_size
