"""DraftRunner: context rows and proposals of a draft model on the one thread that owns its pool.

The event loop hands over one piece of work and awaits the result; what a piece of work contains happens in its order,
and one piece after the other, so a slot may change hands as soon as no later work of its old owner is handed over.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from k3svc.core.batch import SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.draft_protocol import FEATURE_BYTES
from k3svc.engine.sampler import sample_rows
from k3svc.model.draft import Blocks, DraftModel, Proposal
from k3svc.model.draft_context import ContextPool
from k3svc.ops.shortage import step_fault
from k3svc.ops.table import Ops, SampleRows

OWN_NOISE = 1 << 62
"""Added to the sample index where drafts must not share the target's noise (chain rejection)."""


@dataclass(frozen=True, kw_only=True)
class WriteRows:
    """Write features of consecutive positions into a slot's context."""

    slot: int
    start: int
    num_rows: int
    data: memoryview
    dtype: str


@dataclass(frozen=True, kw_only=True)
class CopyRows:
    """Copy context rows [start, end) from one slot to another."""

    source: int
    target: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One block to propose for. Context rows [start, base_len) of the slot are there."""

    slot: int
    start: int
    base_len: int
    anchor: int
    params: SamplingParams
    sample_index: int
    with_probs: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A proposal of num_proposals tokens at most, cut before the first token that could not be one."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    probs: Sequence[bytes] = ()
    """float32 [X] a token."""


@dataclass(frozen=True, kw_only=True)
class DraftWork:
    """Rows first, then proposals."""

    rows: Sequence[WriteRows | CopyRows]
    asks: Sequence[Ask]


@dataclass(frozen=True, kw_only=True)
class DraftResult:
    """Answers in the order of the asks."""

    answers: Sequence[Answer]
    compute_s: float


class Runner(Protocol):
    """What the draft engine needs of a runner."""

    async def run(self, work: DraftWork) -> DraftResult:
        """Raises EngineFault; rows may be half written then."""
        ...


class DraftRunner:
    """Runs a draft model on its own thread. Not usable after `close`."""

    def __init__(self, model: DraftModel, context: ContextPool, ops: Ops, *, threads: int = 1) -> None:
        self._model, self._context, self._ops = model, context, ops
        # The number of OpenMP threads belongs to the thread that starts them, hence the initializer.
        self._thread = ThreadPoolExecutor(1, "k3svc-draft", torch.set_num_threads, (threads,))

    async def run(self, work: DraftWork) -> DraftResult:
        """Raises EngineFault."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, work)

    async def warm_up(self) -> float:
        """Runs blocks of one and of two requests on the dummy slot; returns their seconds. Raises EngineFault."""
        config = self._model.config
        data = memoryview(bytes(4 * config.hidden_size))
        row = WriteRows(slot=0, start=0, num_rows=1, data=data, dtype="float32")
        asks = [
            Ask(
                slot=0,
                start=0,
                base_len=1,
                anchor=0,
                params=SamplingParams(temperature=temperature),
                sample_index=0,
                with_probs=False,
            )
            for temperature in (0.0, 1.0)
        ]
        results = [await self.run(DraftWork(rows=[row], asks=part)) for part in (asks[:1], asks)]
        return sum(result.compute_s for result in results)

    def close(self) -> None:
        """Drops work that has not begun, waits for what has, and ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _timed(self, work: DraftWork) -> DraftResult:
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                answers = self._run(work)
        except Exception as error:
            raise step_fault("the draft step", error) from error
        return DraftResult(answers=answers, compute_s=time.perf_counter() - started)

    def _run(self, work: DraftWork) -> list[Answer]:
        for kind, group in groupby(work.rows, key=lambda row: (type(row), getattr(row, "dtype", ""))):
            rows = list(group)
            if kind[0] is WriteRows:
                self._write([row for row in rows if isinstance(row, WriteRows)])
            else:
                for row in rows:
                    assert isinstance(row, CopyRows)
                    self._copy(row)
        answers: dict[int, Answer] = {}
        for with_probs in (False, True):
            chosen = [index for index, ask in enumerate(work.asks) if ask.with_probs is with_probs]
            if chosen:
                made = self._propose([work.asks[index] for index in chosen], with_probs=with_probs)
                answers.update(zip(chosen, made, strict=True))
        return [answers[index] for index in range(len(work.asks))]

    def _write(self, rows: Sequence[WriteRows]) -> None:
        device, ops = self._ops.device, self._ops
        data = bytearray().join(row.data for row in rows)
        features = torch.frombuffer(data, dtype=getattr(torch, rows[0].dtype)).view(-1, self._model.config.hidden_size)
        positions = torch.cat([torch.arange(row.start, row.start + row.num_rows) for row in rows])
        slots = torch.tensor([row.slot for row in rows]).repeat_interleave(torch.tensor([row.num_rows for row in rows]))
        features = features.to(device=device, dtype=ops.activation_dtype)
        self._model.inject(features, positions.to(device), slots.to(device), self._context)

    def _copy(self, row: CopyRows) -> None:
        cells = torch.arange(row.start, row.end, device=self._ops.device) % self._context.capacity
        for pool in (self._context.keys, self._context.values):
            pool[:, row.target, cells] = pool[:, row.source, cells]

    def _propose(self, asks: Sequence[Ask], *, with_probs: bool) -> list[Answer]:
        device = self._ops.device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        blocks = Blocks(
            anchors=column([ask.anchor for ask in asks]),
            base_lens=column([ask.base_len for ask in asks]),
            starts=column([ask.start for ask in asks]),
            slots=column([ask.slot for ask in asks]),
        )
        sampling = _sampling(asks, device, with_probs=with_probs)
        return self._read(self._model.propose(blocks, self._context, sampling, with_probs=with_probs))

    def _read(self, proposal: Proposal) -> list[Answer]:
        config = self._model.config
        tokens = proposal.tokens.tolist()
        confidences: list[list[float]] = [[] for _ in tokens]
        if proposal.confidences is not None:
            confidences = proposal.confidences.float().nan_to_num(0.0).clamp(0.0, 1.0).tolist()
        laws = None if proposal.probs is None else proposal.probs.float().cpu()
        answers = []
        for index, row in enumerate(tokens):
            bad = (k for k, token in enumerate(row) if not 0 <= token < config.vocab_size)
            count = next(bad, len(row))
            answers.append(
                Answer(
                    tokens=tuple(row[:count]),
                    confidences=tuple(confidences[index][:count]),
                    probs=() if laws is None else [law.numpy().tobytes() for law in laws[index, :count]],
                )
            )
        return answers


def feature_dtype(ops: Ops) -> str:
    """Name of the dtype in which a backend's features travel."""
    name = str(ops.activation_dtype).removeprefix("torch.")
    assert name in FEATURE_BYTES, f"features of dtype {name}"
    return name


def _sampling(asks: Sequence[Ask], device: torch.device, *, with_probs: bool) -> SampleRows | None:
    """Parameters of the rows, None when all are greedy. The law of a draft has no filters and its own noise."""
    if all(ask.params.temperature == 0 for ask in asks):
        return None
    specs = [
        SampleSpec(
            params=SamplingParams(temperature=ask.params.temperature, seed=ask.params.seed)
            if with_probs
            else ask.params,
            sample_index=ask.sample_index + OWN_NOISE * with_probs,
            position=0,
            counts=None,
        )
        for ask in asks
    ]
    return sample_rows(specs, device)
