"""ModelRunner with steps that are asked for before the one before has been read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from k3svc.core.batch import DecodeBatch, DecodeRow, FirstRow
from k3svc.engine import runner as runner_module
from k3svc.engine.observer import Observer
from k3svc.engine.runner import ModelRunner
from k3svc.errors import EngineFault
from k3svc.ops.table import Cache
from tests.unit.engine.test_runner import OPS, VOCAB, FakeCache, FakeModel, drafted, row, spec, tokens_of


class Listener(Observer):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[DecodeBatch] = []

    def step(self, batch: object, compute_s: float) -> None:
        assert isinstance(batch, DecodeBatch) and compute_s >= 0.0
        self.steps.append(batch)


@dataclass
class Rig:
    model: FakeModel
    cache: FakeCache
    runner: ModelRunner
    observer: Listener


@pytest.fixture
def rig() -> Iterator[Rig]:
    model, cache, observer = FakeModel(), FakeCache(), Listener()
    runner = ModelRunner(model, cast(Cache, cache), OPS, observer=observer)
    yield Rig(model, cache, runner, observer)
    runner.close()


def follower(slot: int) -> DecodeRow:
    return replace(row(slot, 0, spec()), token_id=None, position=3)


async def test_a_step_takes_the_tokens_of_the_one_before_where_they_lie(rig: Rig) -> None:
    """In slot s token t is followed by t + s; a replayed row and one that goes no further stand between them."""
    first = DecodeBatch(rows=[row(1, 10, spec()), row(2, 20, None), row(3, 30, spec()), row(5, 0, spec())])
    second = DecodeBatch(rows=[follower(5), follower(1), row(2, 21, spec())])
    third = DecodeBatch(rows=[follower(2), follower(1)])
    readers = [rig.runner.ask(first), rig.runner.ask(second)]
    outputs = [await readers[0]()]
    assert len(rig.model.calls) == 2, "the second was asked for before the first was read"
    readers.append(rig.runner.ask(third))
    outputs += [await reader() for reader in readers[1:]]
    assert [tokens_of(output) for output in outputs] == [
        {"d1": [11], "d3": [33 % VOCAB], "d5": [5]},
        {"d5": [10], "d1": [12], "d2": [23]},
        {"d2": [25], "d1": [13]},
    ]
    assert [call.ids[:3] for call in rig.model.calls[1:]] == [[5, 11, 21], [23, 12, 0]]
    assert all(call.inference and call.thread.startswith("k3svc-engine") for call in rig.model.calls)
    assert rig.observer.steps == [first, second, third]


async def test_first_tokens_are_followed_too(rig: Rig) -> None:
    rig.cache.rows = {7: torch.arange(VOCAB).float(), 8: -torch.arange(VOCAB).float()}
    first = [FirstRow(key=f"d{slot}", slot=slot, sample=spec()) for slot in (7, 8)]
    readers = [rig.runner.ask(DecodeBatch(rows=[row(1, 4, spec())], first=first))]
    readers.append(rig.runner.ask(DecodeBatch(rows=[follower(8), follower(7), follower(1)])))
    outputs = [tokens_of(await reader()) for reader in readers]
    assert outputs == [{"d1": [5], "d7": [VOCAB - 1], "d8": [0]}, {"d8": [8], "d7": [6], "d1": [6]}]


async def test_rows_that_follow_a_failure_are_void_and_harm_nobody(rig: Rig) -> None:
    rig.cache.rows = {7: torch.zeros(VOCAB), 8: torch.full((VOCAB,), float("nan"))}
    rig.cache.broken = {7}
    first = [FirstRow(key=f"d{slot}", slot=slot, sample=spec()) for slot in (7, 8)]
    readers = [rig.runner.ask(DecodeBatch(rows=[row(1, 4, spec())], first=first))]
    readers.append(rig.runner.ask(DecodeBatch(rows=[follower(7), follower(8), follower(1)])))
    failed, after = [await reader() for reader in readers]
    assert tokens_of(failed) == {"d1": [5]} and set(failed.failed) == {"d7", "d8"}
    assert tokens_of(after)["d1"] == [6]
    assert all(0 <= token_id < VOCAB for token_id in rig.model.calls[1].ids)


async def test_a_step_that_raises_is_a_fault_of_its_reader_alone(rig: Rig) -> None:
    def fail(_layer: int) -> None:
        if len(rig.model.calls) == 1:
            raise ValueError("no such kernel")

    rig.model.before_layer = fail
    readers = [rig.runner.ask(DecodeBatch(rows=[row(1, 4, spec())]))]
    readers.append(rig.runner.ask(DecodeBatch(rows=[follower(1)])))
    with pytest.raises(EngineFault, match="ValueError: no such kernel"):
        await readers[0]()
    await readers[1]()
    assert rig.model.calls[1].ids[0] == 0, "not a token of some earlier step"
    assert (await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())]))).sampled["d1"][0].token_id == 5


async def test_a_step_with_drafts_can_be_asked_for(rig: Rig) -> None:
    output = await rig.runner.ask(DecodeBatch(rows=[drafted(1, 10, (11, 12, 20)), row(2, 20, spec())]))()
    assert tokens_of(output) == {"d1": [11, 12, 13], "d2": [22]}


async def test_drafts_after_a_token_that_is_not_known_are_refused(rig: Rig) -> None:
    reader = rig.runner.ask(DecodeBatch(rows=[replace(drafted(1, 0, (5,)), token_id=None)]))
    with pytest.raises(EngineFault, match="drafts after a token that is not known"):
        await reader()


async def test_time_in_which_two_steps_run_counts_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 15.0, 18.0, 30.0, 31.0])  # asked, asked, read, read; asked and read
    monkeypatch.setattr(runner_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    readers = [rig.runner.ask(DecodeBatch(rows=[row(1, 4, spec())])), rig.runner.ask(DecodeBatch(rows=[follower(1)]))]
    assert [(await reader()).compute_s for reader in readers] == [5.0, 3.0]
    assert (await rig.runner.decode(DecodeBatch(rows=[row(1, 4, spec())]))).compute_s == 1.0
