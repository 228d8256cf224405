"""Copies beside steps on a GPU: what leaves is what a slow step wrote, and what lands is not written over by one."""

import threading
from typing import Any

import pytest
import torch

from k3svc.ops.upload import to_host
from tests.conformance.cpu_cases import cache_spec
from tests.conformance.cuda_cases import DEVICE, cuda_ops

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]

CYCLES = 200_000_000
"""About a tenth of a second."""
SLOT = 3


@pytest.fixture
def cache() -> Any:
    made: Any = cuda_ops().new_cache(cache_spec(kda_heads=4, kda_key_dim=64, kda_value_dim=64, kda_layers=(0,)))
    torch.cuda.synchronize()
    return made


def slow_step(cache: Any, value: float) -> None:
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    cache.layer(0).state[SLOT].fill_(value)


def state_of(data: memoryview) -> set[float]:
    return set(torch.frombuffer(bytearray(data), dtype=torch.float32).tolist())


def test_bytes_that_leave_are_those_of_the_step(cache: Any):
    ops, is_done = cuda_ops(), threading.Event()
    view = cache.state_bytes(0, SLOT)
    slow_step(cache, 5.0)
    ops.when_done(is_done.set)
    assert not is_done.is_set()
    assert state_of(cache.staging.fetch(view, 0, view.nbytes).data()) == {0.0}, "copies run beside steps"
    is_done.wait()
    assert state_of(cache.staging.fetch(view, 0, view.nbytes).data()) == {5.0}


def test_calls_come_in_order(cache: Any):
    ops, calls, is_done = cuda_ops(), list[int](), threading.Event()
    for index in range(20):
        slow_step(cache, index) if index == 0 else cache.layer(0).state[SLOT].add_(1)
        ops.when_done(lambda index=index: calls.append(index))  # type: ignore[misc]
    ops.when_done(is_done.set)
    is_done.wait()
    assert calls == list(range(20))


def test_a_state_lands_behind_the_step_that_used_its_slot_before(cache: Any):
    view = cache.state_bytes(0, SLOT)
    landed = torch.full((view.nbytes // 4,), 9.0)
    slow_step(cache, 5.0)
    writer = cache.staging.writer()
    with writer.place(view, 0, view.nbytes) as room:
        room[:] = landed.numpy().data.cast("B")
    writer.settle()
    assert torch.equal(cache.layer(0).state[SLOT].cpu().flatten(), landed)


def test_a_landed_state_is_seen_by_the_next_step(cache: Any):
    view = cache.state_bytes(0, SLOT)
    for round_ in range(20):
        writer = cache.staging.writer()
        with writer.place(view, 0, view.nbytes) as room:
            room[:] = torch.full((view.nbytes // 4,), float(round_)).numpy().data.cast("B")
        writer.settle()
        total = cache.layer(0).state[SLOT].double().sum()
        assert float(total) == round_ * view.nbytes / 4


def test_copies_go_on_while_a_result_is_awaited(cache: Any):
    view, begins, is_read = cache.state_bytes(0, 2), threading.Event(), threading.Event()

    def read() -> None:
        slow_step(cache, 5.0)
        begins.set()
        to_host(cache.layer(0).state[SLOT])
        is_read.set()

    reader = threading.Thread(target=read)
    reader.start()
    begins.wait()
    for _ in range(20):
        assert state_of(cache.staging.fetch(view, 0, view.nbytes).data()) == {0.0}
    assert not is_read.is_set()
    reader.join()
