"""What the operations of a step share in the cpu backend: its live sequences as the C library takes them."""

from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.cpu.library import Step
from k3svc.ops.table import Mode, StepMeta


@dataclass(frozen=True, kw_only=True)
class CpuStep:
    """A step of an extend or decode batch."""

    num_rows: int
    is_full: bool
    """No row is padding."""
    owned: tuple[Tensor, ...]
    """Memory that `argument` points to."""
    argument: Any
    """Reference to the C structure, as the library takes it."""

    def new_rows(self, *shape: int) -> Tensor:
        """float32 [N, *shape]; rows of padding, which no kernel writes, are 0."""
        make = torch.empty if self.is_full else torch.zeros
        return make(self.num_rows, *shape)


def prepare(meta: StepMeta, mode: Mode) -> CpuStep:
    """`Ops.prepare`."""
    lengths = [end - begin for begin, end in zip(meta.host_cu_seqlens, meta.host_cu_seqlens[1:], strict=False)]
    live = [
        (slot, meta.host_cu_seqlens[index], lengths[index], start, int(mode == "extend" and start == 0), index)
        for index, (slot, start) in enumerate(zip(meta.host_slots, meta.host_starts, strict=True))
        if slot >= 0 and lengths[index] > 0
    ]
    num_rows = meta.slot_mapping.shape[0]
    sequences = torch.tensor(live, dtype=torch.int64)
    slot_mapping, tables = meta.slot_mapping.contiguous(), meta.block_tables.contiguous()
    structure = Step(
        sequences.data_ptr(),
        len(live),
        num_rows,
        slot_mapping.data_ptr(),
        tables.data_ptr(),
        tables.shape[1],
        meta.page_size,
    )
    return CpuStep(
        num_rows=num_rows,
        is_full=sum(row[2] for row in live) == num_rows,
        owned=(sequences, slot_mapping, tables),
        argument=byref(structure),
    )
