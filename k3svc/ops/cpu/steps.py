"""What the operations of a step share in the cpu backend: its live sequences as the C library takes them."""

from array import array
from collections.abc import Hashable, Sequence
from ctypes import byref, memmove, sizeof
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from k3svc.ops.cpu.library import Step
from k3svc.ops.table import Mode, StepMeta


class Run(NamedTuple):
    """Consecutive rows of one sequence, as the C structure has them."""

    slot: int
    row: int
    """First packed row."""
    length: int
    start: int
    """Tokens before them."""
    is_fresh: int
    """Begins with zero states."""
    table: int
    """Row of the block tables, which is the sequence's place in the meta."""


@dataclass(frozen=True, kw_only=True)
class CpuStep:
    """A step of an extend or decode batch, or some rows of a verify step."""

    MOST: ClassVar[int] = 64
    """Rows of a step that is replayed. In a larger one the kernels take so long that what is between them does not
    matter.
    """

    num_rows: int
    num_live: int
    """Rows that are not padding."""
    pads_at_end: bool
    """Padding follows all live rows."""
    owned: tuple[Any, ...]
    """Memory that `argument` points to."""
    argument: Any
    """Reference to the C structure, as the library takes it."""

    @property
    def is_full(self) -> bool:
        """No row is padding."""
        return self.num_live == self.num_rows

    @property
    def kind(self) -> Hashable:
        """What two steps must share to run the same operations."""
        return type(self).__name__

    def alike(self, num_rows: int) -> "CpuStep":
        """A full step of this kind with a structure of its own, for `take` to fill in."""
        return CpuStep(num_rows=num_rows, num_live=num_rows, pads_at_end=True, owned=(), argument=byref(Step()))

    def take(self, given: Any) -> None:
        """Makes this step's structures say what those of a step of the same kind say, which must stay alive."""
        memmove(self.argument, given.argument, sizeof(Step))

    def keep(self, run: Any) -> None:
        """Keeps what the operations of this step left in `run`, which took it: good until `run` takes another one."""

    def new_rows(self, *shape: int) -> Tensor:
        """float32 [N, *shape]; rows of padding, which no kernel writes, are 0."""
        make = torch.empty if self.is_full else torch.zeros
        return make(self.num_rows, *shape)


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """What a kernel of a KDA layer takes beside a step and the place of its results."""

    argument: Any
    """Reference to the C structure of the layer."""
    rows: tuple[int, ...]
    """Addresses and strides of the rows."""
    owned: tuple[Tensor, ...]
    """Memory of the rows."""


@dataclass(frozen=True, kw_only=True)
class VerifyStep(CpuStep):
    """All rows of a verify step, for the operations that treat an anchor and its drafts alike; for the others apart."""

    meta: StepMeta
    runs: tuple[Run, ...]
    anchors: CpuStep
    drafts: CpuStep | None
    """The rows after the anchors, which leave the states alone; None where there are none."""
    convolutions: list[LayerRows] = field(default_factory=list)
    recurrences: list[LayerRows] = field(default_factory=list)

    @property
    def kind(self) -> Hashable:
        """`CpuStep.kind`."""
        return VerifyStep, self.drafts is not None

    def alike(self, num_rows: int) -> "VerifyStep":
        """`CpuStep.alike`."""
        return VerifyStep(
            num_rows=num_rows,
            num_live=num_rows,
            pads_at_end=True,
            owned=(),
            argument=byref(Step()),
            meta=self.meta,
            runs=(),
            anchors=self.anchors.alike(num_rows),
            drafts=None if self.drafts is None else self.drafts.alike(num_rows),
        )

    def take(self, given: Any) -> None:
        """`CpuStep.take`."""
        super().take(given)
        self.anchors.take(given.anchors)
        if self.drafts is not None:
            self.drafts.take(given.drafts)

    def keep(self, run: Any) -> None:
        """`CpuStep.keep`."""
        self.convolutions[:] = run.convolutions
        self.recurrences[:] = run.recurrences

    def accepted_drafts(self, accepted: Sequence[int]) -> CpuStep | None:
        """The first accepted[b] drafts of each sequence b of the meta; None when there are none."""
        limits = [1] * len(self.meta.host_slots)
        for run in self.runs:
            limits[run.table] = run.length
        assert len(accepted) == len(limits), f"{len(accepted)} numbers for {len(limits)} sequences"
        for number, limit in zip(accepted, limits, strict=True):
            assert 0 <= number < limit, f"{number} accepted drafts of a sequence of {limit} rows"
        drafts = _drafts(self.runs, [accepted[run.table] for run in self.runs])
        return _step(self.meta, drafts) if drafts else None


def prepare(meta: StepMeta, mode: Mode) -> CpuStep:
    """`Ops.prepare`."""
    if mode == "decode":
        # A row is a sequence: the fields of its `Run`, without the time that one takes to make.
        starts = enumerate(zip(meta.host_slots, meta.host_starts, strict=True))
        return _step(meta, [(slot, row, 1, start, 0, row) for row, (slot, start) in starts if slot >= 0])
    bounds = meta.host_cu_seqlens
    runs = [
        Run(slot, begin, end - begin, start, int(mode == "extend" and start == 0), table)
        for table, (slot, start, begin, end) in enumerate(
            zip(meta.host_slots, meta.host_starts, bounds[:-1], bounds[1:], strict=True)
        )
        if slot >= 0 and end > begin
    ]
    step = _step(meta, runs)
    if mode != "verify":
        return step
    drafts = _drafts(runs, [run.length - 1 for run in runs])
    return VerifyStep(
        num_rows=step.num_rows,
        num_live=step.num_live,
        pads_at_end=step.pads_at_end,
        owned=step.owned,
        argument=step.argument,
        meta=meta,
        runs=tuple(runs),
        anchors=_step(meta, [run._replace(length=1) for run in runs]),
        drafts=_step(meta, drafts, keeps_states=True) if drafts else None,
    )


def _drafts(runs: Sequence[Run], counts: Sequence[int]) -> list[Run]:
    """The first counts[i] rows after the anchor of each sequence."""
    return [
        run._replace(row=run.row + 1, length=count, start=run.start + 1)
        for run, count in zip(runs, counts, strict=True)
        if count
    ]


def _step(meta: StepMeta, runs: Sequence[tuple[int, ...]], *, keeps_states: bool = False) -> CpuStep:
    """`runs`: fields of `Run`s in the order of their rows."""
    num_rows = meta.slot_mapping.shape[0]
    sequences = array("q", chain.from_iterable(runs))
    slot_mapping, tables = meta.slot_mapping.contiguous(), meta.block_tables.contiguous()
    structure = Step(
        sequences.buffer_info()[0],
        len(runs),
        num_rows,
        slot_mapping.data_ptr(),
        tables.data_ptr(),
        tables.shape[1],
        meta.page_size,
        keeps_states,
    )
    num_live = sum(sequences[2 :: len(Run._fields)])
    _, row, length, *_ = runs[-1] if runs else (0, 0, 0)
    return CpuStep(
        num_rows=num_rows,
        num_live=num_live,
        pads_at_end=row + length == num_live,
        owned=(sequences, slot_mapping, tables),
        argument=byref(structure),
    )
