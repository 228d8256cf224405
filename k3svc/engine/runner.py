"""ModelRunner: steps of a model on the one thread that owns its pools (`ExtendRunner` and `DecodeRunner` of ports).

The event loop hands a batch over and awaits the result; everything that touches tensors happens on the engine thread,
one step after the other. A decode step is asked of the device, then its tokens are read; with `ask` the next one is
asked for in between, and takes its ids from the tokens that lie on the device. A step that has begun runs to its end
even when the task that awaits it is cancelled, so pages and slots of a batch must not be given away before its result
or `close`.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow, Sampled, SampleSpec, StepOutput
from k3svc.core.request import SamplingParams
from k3svc.engine.features import FeatureTap
from k3svc.engine.inputs import Chosen, decode_inputs, extend_inputs, verify_inputs
from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.engine.ports import StepReader
from k3svc.engine.settle import AskedBlocks, Block, VerifyRule, settle
from k3svc.errors import EngineFault
from k3svc.model.kimi import Taps
from k3svc.ops.shortage import step_fault
from k3svc.ops.table import Cache, Mode, Ops, Step, StepMeta
from k3svc.ops.upload import to_host

WARM_UP_TOKENS = (1, 64, 256)
WARM_UP_ROWS = (16, 64)

Given = TypeVar("Given")


class LanguageModel(Protocol):
    """What the runner needs of a model."""

    def forward(
        self,
        ids: Tensor,
        meta: StepMeta,
        cache: Cache,
        mode: Mode,
        on_layer: Callable[[int], None] | None = None,
        *,
        step: Step | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """ids int64 [N] → hidden rows [N, H]; calls on_layer(i) when the caches of layer i are final for the step.
        `step` is what was prepared of meta, mode and the cache's spec, None: nothing was.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] → float32 [R, X]."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A decode step that was asked of the device."""

    batch: DecodeBatch
    started: float
    step: Step | None
    """Of a step with drafts, which ends with a commit."""
    blocks: AskedBlocks | None
    """None: no row asks for a token."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Key → reason, of those that were not asked."""


class ModelRunner:
    """Runs extend and decode steps on its own thread. Not usable after `close`."""

    def __init__(
        self,
        model: LanguageModel,
        cache: Cache,
        ops: Ops,
        *,
        threads: int = 1,
        cpus: Sequence[int] = (),
        observer: Observer = UNOBSERVED,
        features: FeatureTap | None = None,
        rule: VerifyRule = "exact",
    ) -> None:
        """`threads` is the number of compute threads of a step; `cpus` are the cores of the engine thread, none: those
        of its process; `features` makes those of `on_features`; `rule` says how drafts are verified.
        """
        self._observer = observer
        self._features = features
        self._rule: VerifyRule = rule
        self._model = model
        self._cache = cache
        self._ops = ops
        self._thread = ThreadPoolExecutor(1, "k3svc-engine", _start_thread, (threads, tuple(cpus)))
        self._unfinished: threading.Event | None = None
        """Set when the last extend step has been computed; None: there was none."""
        self._chosen: Chosen | None = None
        """By the decode step that was asked for last; None: nothing, or it failed."""
        self._read_at = 0.0
        """When the last decode step was read."""

    async def extend(
        self,
        batch: ExtendBatch,
        on_layer: Callable[[int], None],
        on_features: Callable[[memoryview], None] | None = None,
    ) -> StepOutput:
        """Computes one step of prompt chunks and stores the logits row of each `is_last` row in its slot.

        `on_layer(i)` is called on the event loop when the caches of layer i are final for the step, in the order of
        steps and layers. A step that `ExtendRunner` lets return earlier does so when it has been asked of a device and
        the step before has been computed. `on_features` as `ExtendRunner` says. A prompt whose logits are not finite is
        in `failed`. Raises EngineFault, after all calls.
        """
        step = partial(self._extend, batch, _on_loop(on_layer), self._taps(batch.num_tokens, on_features))
        output = await self._on_thread(step)
        self._observer.step(batch, output.compute_s)
        return output

    async def decode(
        self,
        batch: DecodeBatch,
        on_features: Callable[[memoryview], None] | None = None,
        *,
        features_may_wait: bool = False,
    ) -> StepOutput:
        """Computes one step of decode rows, chooses the tokens asked for and verifies drafts. Raises EngineFault."""
        taps = self._taps(batch.num_tokens, on_features, may_wait=features_may_wait)
        output = await self._on_thread(partial(self._decode, batch, self._ops.row_tile, taps))
        self._observer.step(batch, output.compute_s)
        return output

    def ask(self, batch: DecodeBatch) -> StepReader:
        """`AheadRunner.ask`. The time of a step counts from the end of the one before, where that was later."""
        asked = self._thread.submit(_guarded, partial(self._ask, batch, self._ops.row_tile))

        async def read() -> StepOutput:
            output = await self._on_thread(partial(self._read_asked, asked))
            self._observer.step(batch, output.compute_s)
            return output

        return read

    async def warm_up(self) -> float:
        """Runs small steps of several sizes on the dummy slot and page; returns their seconds. Raises EngineFault."""
        outputs = [await self._on_thread(partial(self._extend, *_warm_up_prompt(size))) for size in WARM_UP_TOKENS]
        batch = _warm_up_decode(WARM_UP_TOKENS[-1], self._cache.spec.page_size)
        outputs += [await self._on_thread(partial(self._decode, batch, rows)) for rows in WARM_UP_ROWS]
        for output in outputs:
            if output.failed:
                raise EngineFault(f"warm-up: {', '.join(output.failed.values())}")
        return sum(output.compute_s for output in outputs)

    async def time_step(self, batch: DecodeBatch, *, with_features: bool) -> float:
        """Seconds of a decode step that nobody is told of, `with_features` with those that drafters get, if there are
        any. Raises EngineFault.
        """
        is_tapped = with_features and self._features is not None
        taps = self._taps(batch.num_tokens, (lambda _features: None) if is_tapped else None)
        return (await self._on_thread(partial(self._decode, batch, self._ops.row_tile, taps))).compute_s

    def close(self) -> None:
        """Drops steps that have not begun, waits for the one that has, and ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _on_thread(self, step: Callable[[], StepOutput]) -> StepOutput:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _guarded, step)

    def _taps(
        self, num_rows: int, on_features: Callable[[memoryview], None] | None, *, may_wait: bool = False
    ) -> Taps | None:
        if on_features is None or num_rows == 0:
            return None
        assert self._features is not None, "features are asked for, and no draft checkpoint makes them"
        return self._features.taps(num_rows, _on_loop(on_features), may_wait=may_wait)

    def _extend(self, batch: ExtendBatch, on_layer: Callable[[int], None], taps: Taps | None = None) -> StepOutput:
        started = time.perf_counter()
        is_final = True
        try:
            output = self._extend_rows(batch, lambda layer: self._ops.when_done(partial(on_layer, layer)), taps)
            is_final = any(row.is_last or row.snapshot_to is not None for row in batch.rows)
        finally:
            self._wait_for_device(for_all=is_final)
        return replace(output, compute_s=time.perf_counter() - started)

    def _wait_for_device(self, *, for_all: bool) -> None:
        """Until the step before has been computed, so that no more than one is ahead of the device, or all have."""
        before, own = self._unfinished, threading.Event()
        self._ops.when_done(own.set)
        if before is not None:
            before.wait()
        if for_all:
            own.wait()
        self._unfinished = own

    def _extend_rows(self, batch: ExtendBatch, on_layer: Callable[[int], None], taps: Taps | None) -> StepOutput:
        ids, meta, logit_rows = extend_inputs(batch, self._cache.spec.page_size, self._ops.device, self._ops.row_tile)
        restored = {row.slot: row.restore_from for row in batch.rows if row.restore_from is not None}
        if restored:
            self._cache.copy_states(list(restored.values()), list(restored))
        hidden = self._model.forward(ids, meta, self._cache, "extend", on_layer, taps=taps)
        snapshots = {row.snapshot_to: row.slot for row in batch.rows if row.snapshot_to is not None}
        if snapshots:
            self._cache.copy_states(list(snapshots.values()), list(snapshots))
        last = [row for row in batch.rows if row.is_last]
        if not last:
            return StepOutput()
        logits = self._model.logits(hidden[logit_rows])
        for row, values in zip(last, logits, strict=True):
            self._cache.set_logits(row.slot, values)
        finite = to_host(logits.isfinite().all(dim=1))[0].tolist()
        return StepOutput(
            failed={
                row.key: "the logits at the end of the prompt are not finite"
                for row, is_finite in zip(last, finite, strict=True)
                if not is_finite
            }
        )

    def _decode(self, batch: DecodeBatch, row_tile: int, taps: Taps | None = None) -> StepOutput:
        return self._read(self._ask(batch, row_tile, taps))

    def _ask(self, batch: DecodeBatch, row_tile: int, taps: Taps | None = None) -> _Asked:
        started = time.perf_counter()
        before, self._chosen = self._chosen, None
        for fork in batch.forks:
            self._cache.copy_slot(fork.source_slot, fork.target_slot)
            if fork.source_page is not None and fork.target_page is not None:
                self._cache.copy_page(fork.source_page, fork.target_page)
        blocks: list[Block] = []
        logits: list[Tensor] = []
        step: Step | None = None
        if batch.rows:
            mode: Mode = "verify" if any(row.drafts for row in batch.rows) else "decode"
            geometry = (self._cache.spec.page_size, self._ops.device, row_tile)
            if mode == "verify":
                ids, meta, logit_rows = verify_inputs(batch, *geometry)
                step = self._ops.prepare(meta, mode, self._cache.spec)
            else:
                builds_on = any(row.token_id is None for row in batch.rows)
                ids, meta, logit_rows = decode_inputs(batch, *geometry, before if builds_on else None)
            hidden = self._model.forward(ids, meta, self._cache, mode, step=step, taps=taps)
            blocks += [
                Block(key=row.key, spec=row.sample, drafts=row.drafts, laws=row.draft_laws)
                for row in batch.rows
                if row.sample is not None
            ]
            if blocks:
                logits.append(self._model.logits(hidden[logit_rows]))
        is_finite = {slot: self._cache.is_finite(slot) for slot in {first.slot for first in batch.first}}
        ready = [first for first in batch.first if is_finite[first.slot]]
        if ready:
            blocks += [Block(key=first.key, spec=first.sample) for first in ready]
            logits.append(self._cache.logits([first.slot for first in ready]))
        asked = AskedBlocks(self._ops, logits[0] if len(logits) == 1 else torch.cat(logits), blocks) if blocks else None
        if asked is not None and step is None:
            places = {block.key: place for place, block in enumerate(blocks)}
            self._chosen = Chosen(token_ids=asked.tokens.chosen, places=places)
        broken = [first.key for first in batch.first if not is_finite[first.slot]]
        failed = dict.fromkeys(broken, "the state handed over by prefill is not finite")
        return _Asked(batch=batch, started=started, step=step, blocks=asked, failed=failed)

    def _read_asked(self, asked: "Future[_Asked]") -> StepOutput:
        return self._read(asked.result())

    def _read(self, asked: _Asked) -> StepOutput:
        sampled, failed = ({}, {}) if asked.blocks is None else settle(self._ops, asked.blocks, self._rule)
        commit_s = 0.0 if asked.step is None else self._commit(asked.batch, asked.step, sampled)
        started, self._read_at = max(asked.started, self._read_at), time.perf_counter()
        return StepOutput(
            sampled=sampled, failed={**failed, **asked.failed}, compute_s=self._read_at - started, commit_s=commit_s
        )

    def _commit(self, batch: DecodeBatch, step: Step, sampled: Mapping[str, Sequence[Sampled]]) -> float:
        """Advances the states by what each row accepted; the seconds that it took."""
        started = time.perf_counter()
        # What stands after the drafts is the next anchor; a row that failed is not used again.
        accepted = [max(0, len(sampled.get(row.key, ())) - 1) for row in batch.rows]
        self._ops.commit(self._cache, step, accepted)
        return time.perf_counter() - started


def _start_thread(threads: int, cpus: tuple[int, ...]) -> None:
    """On the engine thread: the number of OpenMP threads belongs to the thread that starts them, as its cores do."""
    if cpus:
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)


def _on_loop(call: Callable[[Given], None]) -> Callable[[Given], None]:
    """The same call, made on the running loop from any thread. The loop runs these and the callback that ends the step
    in the order in which the thread asked for them.
    """
    loop = asyncio.get_running_loop()

    def ask(given: Given) -> None:
        loop.call_soon_threadsafe(call, given)

    return ask


def _guarded(step: Callable[[], Given]) -> Given:
    try:
        with torch.inference_mode():
            return step()
    except EngineFault:
        raise
    except Exception as error:
        raise step_fault("the step", error) from error


def _warm_up_prompt(num_tokens: int) -> tuple[ExtendBatch, Callable[[int], None]]:
    """A prompt on the dummy slot, all of its pages the dummy page."""
    row = ExtendRow(key="", slot=0, block_table=[0] * num_tokens, token_ids=[0] * num_tokens, start=0, is_last=True)
    return ExtendBatch(rows=[row]), lambda _layer: None


def _warm_up_decode(position: int, page_size: int) -> DecodeBatch:
    """One row on the dummy slot, sampled through every filter; padding makes up the size of the step."""
    params = SamplingParams(top_k=8, top_p=0.9, min_p=0.01)
    spec = SampleSpec(params=params, sample_index=0, position=position + 1, counts=None, logprobs=1)
    pages = [0] * (position // page_size + 1)
    row = DecodeRow(key="", slot=0, block_table=pages, token_id=0, position=position, sample=spec)
    return DecodeBatch(rows=[row])
