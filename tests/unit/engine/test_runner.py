import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from k3svc.core.batch import (
    DecodeBatch,
    DecodeRow,
    ExtendBatch,
    ExtendRow,
    FirstRow,
    Fork,
    Sampled,
    SampleSpec,
    StepOutput,
)
from k3svc.core.request import SamplingParams
from k3svc.engine import runner as runner_module
from k3svc.engine.features import FeatureTap
from k3svc.engine.runner import ModelRunner
from k3svc.errors import EngineFault
from k3svc.model.kimi import Model, Taps, cache_spec
from k3svc.ops import load, reference_sampling
from k3svc.ops.table import Cache, Ops, Step, StepMeta

VOCAB = 32
PAGE = 4
VERIFIED: list[tuple[str, tuple[int, ...]]] = []
COMMITTED: list[list[int]] = []


def prepare(meta: StepMeta, mode: str, _spec: object) -> str:
    VERIFIED.append((mode, meta.host_slots))
    return "the step"


def commit(_cache: object, step: str, accepted: list[int]) -> None:
    assert step == "the step"
    COMMITTED.append(accepted)


OPS = cast(
    Ops,
    SimpleNamespace(
        device=torch.device("cpu"),
        row_tile=16,
        sample=reference_sampling.sample,
        log_softmax=reference_sampling.log_softmax,
        prepare=prepare,
        commit=commit,
        when_done=lambda call: call(),
    ),
)


@dataclass
class Call:
    ids: list[int]
    meta: StepMeta
    mode: str
    thread: str
    threads: int
    inference: bool


@dataclass
class FakeModel:
    """Three layers; the largest logit after token t in slot s is that of (t + s) mod VOCAB."""

    calls: list[Call] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    before_layer: Callable[[int], None] = lambda layer: None
    value: float = 1.0

    def forward(
        self,
        ids: Tensor,
        meta: StepMeta,
        cache: Cache,
        mode: str,
        on_layer: Callable[[int], None] | None = None,
        *,
        step: Step | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        thread = threading.current_thread().name
        call = Call(ids.tolist(), meta, mode, thread, torch.get_num_threads(), torch.is_inference_mode_enabled())
        self.calls.append(call)
        for layer in range(3):
            self.before_layer(layer)
            if on_layer is not None:
                on_layer(layer)
            if taps is not None and layer in taps.layers:
                taps.sink(ids[:, None])
        slots = torch.zeros_like(ids)
        for slot, begin, end in zip(meta.host_slots, meta.host_cu_seqlens, meta.host_cu_seqlens[1:], strict=False):
            slots[begin:end] = slot
        return torch.nn.functional.one_hot((ids + slots) % VOCAB, VOCAB).float() * self.value

    def logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(hidden.shape[0])
        return hidden


@dataclass
class FakeCache:
    rows: dict[int, Tensor] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    checked: list[int] = field(default_factory=list)
    copied: list[tuple[str, int, int, str]] = field(default_factory=list)
    spec: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(page_size=PAGE))

    def set_logits(self, slot: int, row: Tensor) -> None:
        self.rows[slot] = row.clone()

    def logits(self, slots: Sequence[int]) -> Tensor:
        return torch.stack([self.rows[slot] for slot in slots])

    def copy_slot(self, source: int, target: int) -> None:
        self.copied.append(("slot", source, target, threading.current_thread().name))
        self.rows[target] = self.rows[source].clone()

    def copy_page(self, source: int, target: int) -> None:
        self.copied.append(("page", source, target, threading.current_thread().name))

    def is_finite(self, slot: int) -> bool:
        self.checked.append(slot)
        return slot not in self.broken


@dataclass
class Rig:
    model: FakeModel
    cache: FakeCache
    runner: ModelRunner


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    model, cache = FakeModel(), FakeCache()
    VERIFIED.clear()
    COMMITTED.clear()
    runner = ModelRunner(model, cast(Cache, cache), OPS, threads=1)
    yield Rig(model, cache, runner)
    runner.close()


def spec(*, banned: frozenset[int] = frozenset(), logprobs: int | None = None) -> SampleSpec:
    params = SamplingParams(temperature=0.0)
    return SampleSpec(params=params, sample_index=0, position=0, counts=None, banned=banned, logprobs=logprobs)


def prompt(slot: int, tokens: list[int], *, is_last: bool) -> ExtendRow:
    return ExtendRow(key=f"p{slot}", slot=slot, block_table=[slot], token_ids=tokens, start=0, is_last=is_last)


def row(slot: int, token_id: int, sample: SampleSpec | None) -> DecodeRow:
    return DecodeRow(key=f"d{slot}", slot=slot, block_table=[slot], token_id=token_id, position=2, sample=sample)


def drafted(slot: int, token_id: int, drafts: tuple[int, ...]) -> DecodeRow:
    return replace(row(slot, token_id, spec()), drafts=drafts, block_table=[slot, slot + 10])


def ignore(layer: int) -> None:
    pass


def tokens_of(output: StepOutput) -> dict[str, list[int]]:
    return {key: [sampled.token_id for sampled in tokens] for key, tokens in output.sampled.items()}


async def test_extend_stores_the_logits_of_prompts_that_end(rig: Rig):
    batch = ExtendBatch(
        rows=[prompt(3, [1, 2], is_last=True), prompt(4, [5], is_last=False), prompt(5, [6, 7], is_last=True)]
    )
    output = await rig.runner.extend(batch, ignore)
    assert output.sampled == {} and output.failed == {}
    assert {slot: int(values.argmax()) for slot, values in rig.cache.rows.items()} == {3: 2 + 3, 5: 7 + 5}
    (call,) = rig.model.calls
    assert call.ids == [1, 2, 5, 6, 7] + [0] * 11
    assert call.mode == "extend"
    assert rig.model.logit_rows == [2]


async def test_forks_are_copied_on_the_engine_thread_before_their_tokens_are_chosen(rig: Rig):
    rig.cache.set_logits(1, torch.nn.functional.one_hot(torch.tensor(9), VOCAB).float())
    forks = [
        Fork(source_slot=1, target_slot=2, source_page=4, target_page=6),
        Fork(source_slot=1, target_slot=3, source_page=None, target_page=None),
    ]
    first = [FirstRow(key=f"f{slot}", slot=slot, sample=spec()) for slot in (1, 2, 3)]
    output = await rig.runner.decode(DecodeBatch(rows=[], first=first, forks=forks))
    assert tokens_of(output) == {"f1": [9], "f2": [9], "f3": [9]}
    assert [copy[:3] for copy in rig.cache.copied] == [("slot", 1, 2), ("page", 4, 6), ("slot", 1, 3)]
    assert {copy[3] for copy in rig.cache.copied} == {"k3svc-engine_0"}


class LateDevice:
    """Computes nothing before it is told to; what `when_done` was asked for waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: list[Callable[[], None]] = []
        self.is_awaited = asyncio.Event()
        """The engine thread waits for the device."""

    def when_done(self, call: Callable[[], None]) -> None:
        self._asked.append(call)

    def new_event(self) -> threading.Event:
        event, loop, is_awaited = threading.Event(), self._loop, self.is_awaited

        def wait() -> None:
            loop.call_soon_threadsafe(is_awaited.set)
            threading.Event.wait(event)

        event.wait = wait  # type: ignore[method-assign, assignment]
        return event

    def compute(self, count: int) -> None:
        for call in self._asked[:count]:
            call()
        del self._asked[:count]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], LateDevice]:
    def make() -> LateDevice:
        device = LateDevice()
        monkeypatch.setattr(OPS, "when_done", device.when_done)
        monkeypatch.setattr(runner_module, "threading", SimpleNamespace(Event=device.new_event))
        return device

    return make


STEP_ASKS = 4
"""Three layers and the end of the step."""


async def test_layers_are_told_of_when_the_device_has_computed_them(rig: Rig, late: Callable[[], LateDevice]):
    device, layers = late(), list[int]()
    batch = ExtendBatch(rows=[prompt(3, [1, 2], is_last=True)])
    step = asyncio.ensure_future(rig.runner.extend(batch, layers.append))
    await device.is_awaited.wait()
    assert layers == [] and not step.done()
    device.compute(STEP_ASKS)
    await step
    assert layers == [0, 1, 2]


async def test_a_middle_chunk_runs_ahead_of_the_device_by_one_step(rig: Rig, late: Callable[[], LateDevice]):
    device, layers = late(), list[tuple[int, int]]()
    batch = ExtendBatch(rows=[prompt(3, [1, 2], is_last=False)])
    await rig.runner.extend(batch, lambda layer: layers.append((1, layer)))
    second = asyncio.ensure_future(rig.runner.extend(batch, lambda layer: layers.append((2, layer))))
    await device.is_awaited.wait()
    assert layers == [] and not second.done()
    device.compute(STEP_ASKS)
    await second
    assert layers == [(1, 0), (1, 1), (1, 2)]
    device.compute(STEP_ASKS)


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "failed"])
async def test_who_could_use_the_states_of_a_step_waits_for_it(
    rig: Rig, late: Callable[[], LateDevice], *, is_kept: bool
):
    """States that another prompt goes on from, and a step that fails when half of it has been asked for."""
    device, layers = late(), list[int]()
    row = prompt(3, [1, 2], is_last=False)
    asks = STEP_ASKS
    if is_kept:
        row = replace(row, snapshot_to=5)
        rig.cache.copy_states = lambda _sources, _targets: None  # type: ignore[attr-defined]
    else:
        rig.model.before_layer = lambda layer: 1 // (1 - layer)  # type: ignore[assignment]
        asks = 2
    step = asyncio.ensure_future(rig.runner.extend(ExtendBatch(rows=[row]), layers.append))
    await device.is_awaited.wait()
    assert not step.done()
    device.compute(asks)
    if is_kept:
        await step
        assert layers == [0, 1, 2]
    else:
        with pytest.raises(EngineFault):
            await step
        assert layers == [0]


async def test_extend_of_a_middle_chunk_computes_no_logits(rig: Rig):
    await rig.runner.extend(ExtendBatch(rows=[prompt(3, [1, 2], is_last=False)]), ignore)
    assert rig.model.logit_rows == [] and rig.cache.rows == {}


async def test_extend_names_prompts_whose_logits_are_not_finite(rig: Rig):
    rig.model.value = float("inf")  # one_hot · inf: NaN beside inf
    output = await rig.runner.extend(
        ExtendBatch(rows=[prompt(3, [1], is_last=True), prompt(4, [1], is_last=False)]), ignore
    )
    assert list(output.failed) == ["p3"] and "not finite" in output.failed["p3"]


async def test_layers_are_announced_on_the_loop_while_the_step_runs(rig: Rig):
    loop_thread = threading.get_ident()
    announced = threading.Event()
    seen: list[tuple[int, bool]] = []

    def before_layer(layer: int) -> None:
        if layer == 1:  # goes on only when the loop has heard of layer 0
            assert announced.wait(30)

    def on_layer(layer: int) -> None:
        seen.append((layer, threading.get_ident() == loop_thread))
        announced.set()

    rig.model.before_layer = before_layer
    await rig.runner.extend(ExtendBatch(rows=[prompt(3, [1], is_last=True)]), on_layer)
    assert seen == [(0, True), (1, True), (2, True)]


async def test_every_layer_is_announced_before_the_result(rig: Rig):
    for count in range(1, 200):
        seen: list[int] = []
        await rig.runner.extend(ExtendBatch(rows=[prompt(3, [count % 7], is_last=False)]), seen.append)
        assert seen == [0, 1, 2]


async def test_decode_samples_the_rows_that_ask(rig: Rig):
    batch = DecodeBatch(rows=[row(1, 10, spec()), row(2, 20, None), row(3, 30, spec(logprobs=1))])
    output = await rig.runner.decode(batch)
    assert output.failed == {}
    assert output.sampled["d1"] == [Sampled(token_id=11)]
    (third,) = output.sampled["d3"]
    assert third.token_id == (30 + 3) % VOCAB and third.logprob is not None
    assert set(output.sampled) == {"d1", "d3"}
    (call,) = rig.model.calls
    assert call.mode == "decode" and call.ids == [10, 20, 30] + [0] * 13
    assert call.meta.host_slots == (1, 2, 3) + (-1,) * 13
    assert rig.model.logit_rows == [2]


async def test_decode_that_only_replays_computes_no_logits(rig: Rig):
    output = await rig.runner.decode(DecodeBatch(rows=[row(1, 10, None)]))
    assert output.sampled == {} and output.failed == {}
    assert len(rig.model.calls) == 1 and rig.model.logit_rows == []


async def test_first_tokens_come_from_handed_over_logits(rig: Rig):
    rig.cache.rows = {7: torch.arange(VOCAB).float(), 8: -torch.arange(VOCAB).float()}
    first = [
        FirstRow(key="a", slot=7, sample=spec()),
        FirstRow(key="b", slot=8, sample=spec()),
        FirstRow(key="c", slot=7, sample=spec(banned=frozenset({VOCAB - 1}))),
    ]
    output = await rig.runner.decode(DecodeBatch(rows=[], first=first))
    assert tokens_of(output) == {"a": [VOCAB - 1], "b": [0], "c": [VOCAB - 2]}
    assert rig.model.calls == []
    output = await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())], first=first[:1]))
    assert tokens_of(output) == {"d1": [5], "a": [VOCAB - 1]}


async def test_drafts_are_verified_and_committed_in_one_step(rig: Rig):
    """Rows with drafts, plain ones, replayed ones and first ones in one step."""
    rig.cache.rows = {7: torch.arange(VOCAB).float()}
    rows = [
        drafted(1, 10, (11, 12, 20)),
        row(2, 20, spec()),
        row(3, 30, None),
        drafted(4, 5, (6,)),
        drafted(5, 0, (5, 10)),
    ]
    batch = DecodeBatch(rows=rows, first=[FirstRow(key="a", slot=7, sample=spec())])
    output = await rig.runner.decode(batch)
    # In slot s token t is followed by t + s: 11, 12, then 13 for the wrong 20; 6 is wrong after 5 in slot 4.
    assert tokens_of(output) == {"d1": [11, 12, 13], "d2": [22], "d4": [9], "d5": [5, 10, 15], "a": [VOCAB - 1]}
    (call,) = rig.model.calls
    assert call.mode == "verify" and call.ids[:11] == [10, 11, 12, 20, 20, 30, 5, 6, 0, 5, 10]
    assert VERIFIED == [("verify", (1, 2, 3, 4, 5))] and COMMITTED == [[2, 0, 0, 0, 2]]
    assert rig.model.logit_rows == [10], "the replayed row has none"


async def test_features_leave_before_the_step_ends(rig: Rig):
    seen: list[tuple[bytes, int]] = []

    def sink(data: memoryview) -> None:
        seen.append((bytes(data), len(rig.model.logit_rows)))

    class Tap:
        def taps(self, num_rows: int, call: Callable[[memoryview], None], *, may_wait: bool) -> Taps:
            assert not may_wait
            return Taps(layers=(0,), sink=lambda rows: call(memoryview(bytes(rows[:num_rows, 0].int().tolist()))))

    runner = ModelRunner(rig.model, cast(Cache, rig.cache), OPS, features=cast(FeatureTap, Tap()))
    await runner.decode(DecodeBatch(rows=[drafted(1, 10, (11, 12)), row(2, 20, None)]), sink)
    await runner.extend(ExtendBatch(rows=[prompt(3, [1, 2, 3], is_last=True)]), ignore, sink)
    await runner.decode(DecodeBatch(rows=[row(1, 4, spec())]))
    runner.close()
    assert [data for data, _ in seen] == [bytes([10, 11, 12, 20]), bytes([1, 2, 3])]


async def test_features_without_a_draft_checkpoint_are_a_mistake(rig: Rig):
    with pytest.raises(AssertionError, match="no draft checkpoint"):
        await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())]), lambda _data: None)


async def test_a_state_that_is_not_finite_fails_its_rows_alone(rig: Rig):
    rig.cache.rows = {7: torch.zeros(VOCAB), 8: torch.zeros(VOCAB)}
    rig.cache.broken = {8}
    first = [FirstRow(key=key, slot=slot, sample=spec()) for key, slot in (("a", 7), ("b", 8), ("c", 8))]
    output = await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())], first=first))
    assert set(output.sampled) == {"d1", "a"}
    assert output.failed.keys() == {"b", "c"} and "not finite" in output.failed["b"]
    assert sorted(rig.cache.checked) == [7, 8]
    rig.cache.broken = {7, 8}
    output = await rig.runner.decode(DecodeBatch(rows=[], first=first))
    assert output.sampled == {} and output.failed.keys() == {"a", "b", "c"}


async def test_a_decode_row_without_finite_logits_fails_alone(rig: Rig):
    rig.cache.rows = {7: torch.zeros(VOCAB)}
    rig.model.value = float("nan")
    output = await rig.runner.decode(
        DecodeBatch(rows=[row(1, 4, spec())], first=[FirstRow(key="a", slot=7, sample=spec())])
    )
    assert set(output.sampled) == {"a"} and set(output.failed) == {"d1"}


async def test_steps_run_in_inference_mode_on_the_engine_thread(rig: Rig):
    await rig.runner.extend(ExtendBatch(rows=[prompt(3, [1], is_last=True)]), ignore)
    await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())]))
    assert [call.inference for call in rig.model.calls] == [True, True]
    names = {call.thread for call in rig.model.calls}
    assert len(names) == 1 and names.pop().startswith("k3svc-engine")
    assert not torch.is_inference_mode_enabled()


async def test_the_number_of_compute_threads_is_set_where_steps_run():
    before, model = torch.get_num_threads(), FakeModel()
    for threads in (before + 1, before):  # the last one leaves the process as it was
        runner = ModelRunner(model, cast(Cache, FakeCache()), OPS, threads=threads)
        await runner.decode(DecodeBatch(rows=[row(1, 4, None)]))
        runner.close()
        assert model.calls[-1].threads == threads


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell cores")
async def test_the_engine_thread_has_its_cores_alone(rig: Rig):
    """Where steps run, and nothing else of the process."""
    before, seen = os.sched_getaffinity(0), []
    core = min(before)
    rig.model.before_layer = lambda _: seen.append(os.sched_getaffinity(0))
    runner = ModelRunner(rig.model, cast(Cache, rig.cache), OPS, cpus=(core,))
    await runner.decode(DecodeBatch(rows=[row(1, 4, spec())]))
    runner.close()
    assert {*map(frozenset, seen)} == {frozenset({core})}
    assert os.sched_getaffinity(0) == before


async def test_the_time_of_a_step_is_measured(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    times = iter([10.0, 12.5])
    monkeypatch.setattr(runner_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert (await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())]))).compute_s == 2.5


async def test_a_failing_model_is_an_engine_fault_and_the_next_step_runs(rig: Rig):
    def fail(layer: int) -> None:
        raise ValueError("no such kernel")

    rig.model.before_layer = fail
    batch = DecodeBatch(rows=[row(1, 4, spec())])
    with pytest.raises(EngineFault, match="ValueError: no such kernel") as caught:
        await rig.runner.decode(batch)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(EngineFault):
        await rig.runner.extend(ExtendBatch(rows=[prompt(3, [1], is_last=True)]), ignore)
    rig.model.before_layer = lambda layer: None
    assert (await rig.runner.decode(batch)).sampled["d1"][0].token_id == 5


async def test_a_step_without_memory_says_what_to_change_and_the_next_step_runs(rig: Rig):
    def fail(layer: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    rig.model.before_layer = fail
    batch = DecodeBatch(rows=[row(1, 4, spec())])
    with pytest.raises(EngineFault, match=r"found no memory on the device: CUDA .* 2\.00 MiB.*cache\.num_pages"):
        await rig.runner.decode(batch)
    rig.model.before_layer = lambda layer: None
    assert (await rig.runner.decode(batch)).sampled["d1"][0].token_id == 5


async def test_a_cancelled_step_runs_to_its_end_before_the_next(rig: Rig):
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    order: list[str] = []

    def before_layer(layer: int) -> None:
        if len(rig.model.calls) == 1:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(30)
        order.append(f"call {len(rig.model.calls)} layer {layer}")

    rig.model.before_layer = before_layer
    step = asyncio.create_task(rig.runner.extend(ExtendBatch(rows=[prompt(3, [1], is_last=True)]), ignore))
    await begun.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    second = asyncio.create_task(rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())])))
    go_on.set()
    await second
    assert order == [f"call {call} layer {layer}" for call in (1, 2) for layer in range(3)]
    assert list(rig.cache.rows) == [3]


async def test_close_waits_for_the_running_step_and_drops_the_others(rig: Rig):
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def before_layer(layer: int) -> None:
        if layer == 0:
            loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(30)

    rig.model.before_layer = before_layer
    first = asyncio.create_task(rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())])))
    await begun.wait()
    second = asyncio.create_task(rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())])))
    await asyncio.sleep(0)
    closing = loop.run_in_executor(None, rig.runner.close)
    with pytest.raises(asyncio.CancelledError):
        await second
    done, _ = await asyncio.wait({closing}, timeout=0.05)
    assert not done and not first.done()
    go_on.set()
    await closing
    assert (await first).sampled["d1"][0].token_id == 5
    assert len(rig.model.calls) == 1
    assert not [t for t in threading.enumerate() if t.name == rig.model.calls[0].thread]
    with pytest.raises(RuntimeError, match="shutdown"):
        await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())]))


async def test_warm_up_stays_on_the_dummies(rig: Rig):
    assert await rig.runner.warm_up() > 0.0
    assert {slot for call in rig.model.calls for slot in call.meta.host_slots} == {0, -1}
    assert all(call.meta.slot_mapping.max() < PAGE for call in rig.model.calls)
    assert all((call.meta.block_tables == 0).all() for call in rig.model.calls)
    assert set(rig.cache.rows) == {0}
    assert {call.mode for call in rig.model.calls} == {"extend", "decode"}
    assert {len(call.ids) for call in rig.model.calls if call.mode == "decode"} == {16, 64}


async def test_warm_up_reports_a_model_that_gives_no_numbers(rig: Rig):
    rig.model.value = float("nan")
    with pytest.raises(EngineFault, match=r"warm-up: .*not finite"):
        await rig.runner.warm_up()


# The real model


NANO = Path(__file__).parents[3] / "models" / "k3-nano"
NANO_PAGE = 64


@dataclass(kw_only=True)
class Nano:
    runner: ModelRunner
    cache: Cache

    async def prefill(self, slot: int, tokens: list[int], chunk: int) -> None:
        for start in range(0, len(tokens), chunk):
            part = ExtendRow(
                key="",
                slot=slot,
                block_table=pages_of(slot),
                token_ids=tokens[start : start + chunk],
                start=start,
                is_last=start + chunk >= len(tokens),
            )
            assert (await self.runner.extend(ExtendBatch(rows=[part]), ignore)).failed == {}

    async def generate(self, prompts: dict[int, list[int]], params: SamplingParams, count: int) -> dict[int, list[int]]:
        """Tokens by slot: the first from the logits row in the slot, the others in one batch of all slots."""

        def spec_of(slot: int) -> SampleSpec:
            known = len(prompts[slot]) + len(output[slot])
            return SampleSpec(params=params, sample_index=slot, position=known, counts=None)

        output: dict[int, list[int]] = {slot: [] for slot in prompts}
        first = [FirstRow(key=str(slot), slot=slot, sample=spec_of(slot)) for slot in prompts]
        batch = DecodeBatch(rows=[], first=first)
        for _ in range(count):
            result = await self.runner.decode(batch)
            assert result.failed == {}
            for key, token_ids in tokens_of(result).items():
                output[int(key)] += token_ids
            rows = [
                DecodeRow(
                    key=str(slot),
                    slot=slot,
                    block_table=pages_of(slot),
                    token_id=tokens[-1],
                    position=len(prompts[slot]) + len(tokens) - 1,
                    sample=spec_of(slot),
                )
                for slot, tokens in output.items()
            ]
            batch = DecodeBatch(rows=rows)
        return output


def pages_of(slot: int) -> list[int]:
    return list(range(4 * slot - 3, 4 * slot + 1))


@pytest.fixture(scope="module")
def nano() -> Iterator[Nano]:
    ops = load(device="reference", dtype="float32", threads=1)
    model = Model.load(NANO, ops)
    cache = ops.new_cache(cache_spec(model.config, num_slots=8, num_pages=32, page_size=NANO_PAGE))
    runner = ModelRunner(model, cache, ops, threads=1)
    yield Nano(runner=runner, cache=cache)
    runner.close()


def slot_bytes(cache: Cache, slot: int) -> list[bytes]:
    views = [view(layer, slot) for layer in cache.spec.kda_layers for view in (cache.state_bytes, cache.conv_bytes)]
    views += [cache.rows_bytes(layer, page) for layer in cache.spec.mla_layers for page in pages_of(slot)]
    return [bytes(view[:]) for view in (*views, cache.logits_bytes(slot))]


async def test_nano_continues_its_golden_prompts(nano: Nano):
    golden = json.loads((NANO / "golden.json").read_text())["prompts"]
    prompts = {slot: case["ids"] for slot, case in enumerate(golden, start=1)}
    for slot, tokens in prompts.items():
        await nano.prefill(slot, tokens, chunk=64)
    output = await nano.generate(prompts, SamplingParams(temperature=0.0), len(golden[0]["continuation_ids"]))
    assert output == {slot: case["continuation_ids"] for slot, case in enumerate(golden, start=1)}


async def test_nano_samples_the_same_tokens_alone_and_in_a_batch(nano: Nano):
    generator = torch.Generator().manual_seed(6)
    prompts = {
        slot: torch.randint(0, 4000, (length,), generator=generator).tolist()
        for slot, length in ((1, 3), (2, 64), (3, 150), (4, 65))
    }
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=2**63 + 5)
    for slot, tokens in prompts.items():
        await nano.prefill(slot, tokens, chunk=128)
    together = await nano.generate(prompts, params, 6)
    for slot, tokens in prompts.items():
        await nano.prefill(slot, tokens, chunk=64)
        assert await nano.generate({slot: tokens}, params, 6) == {slot: together[slot]}
    assert len({tuple(tokens) for tokens in together.values()}) == 4


async def test_nano_warm_up_leaves_the_pools_alone(nano: Nano):
    await nano.prefill(2, list(range(100)), chunk=64)
    before = [slot_bytes(nano.cache, slot) for slot in range(1, 9)]
    await nano.runner.warm_up()
    assert [slot_bytes(nano.cache, slot) for slot in range(1, 9)] == before
