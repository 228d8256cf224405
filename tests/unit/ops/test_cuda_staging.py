"""Copies beside steps, on a device that does nothing before it must: no order holds but the one that was asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from k3svc.ops.cuda.cache import CudaCache
from k3svc.ops.cuda.staging import PoolBytes, Staging
from k3svc.ops.table import CacheSpec
from k3svc.testing.fakes import fake_spec
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import Frame, build_manifest
from k3svc.transfer.outbox import Outbox

FETCHED, PLACED = 1 << 12, 1 << 13


@dataclass(eq=False)
class Work:
    """Something asked of a queue, with what must be done before."""

    call: Callable[[], object]
    after: "Sequence[Work]"
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        if not self.is_done:
            for work in self.after:
                work.synchronize()
            self.is_done = True
            self.call()


@dataclass
class LazyDevice:
    """Two queues, of copies and of steps. Work is done when its mark is waited for, and what it comes after before."""

    copies: list[Work] = field(default_factory=list)
    asked_steps: list[Work] = field(default_factory=list)
    waits: list[Work] = field(default_factory=list)

    def copy(self, target: Tensor, target_begin: int, source: Tensor, source_begin: int, count: int) -> Work:
        own, given = target[target_begin : target_begin + count], source[source_begin : source_begin + count]
        work = Work(lambda: own.copy_(given), [*self.copies[-1:], *self.waits])
        self.copies.append(work)
        return work

    def step(self, call: Callable[[], object]) -> Work:
        self.asked_steps.append(Work(call, self.asked_steps[-1:]))
        return self.asked_steps[-1]

    def steps(self) -> Work:
        return self.step(lambda: None)

    def wait(self, mark: Any) -> None:
        self.waits.append(mark)

    @property
    def num_pending(self) -> int:
        return sum(not work.is_done for work in self.copies)


class Rig:
    """A cache whose bytes are copied by a lazy device."""

    def __init__(self, spec: CacheSpec, *, fetched: int = FETCHED, placed: int = PLACED) -> None:
        self.device = LazyDevice()
        self.cache = CudaCache(spec, torch.device("cpu"))
        memory = (torch.full((size,), 0xEE, dtype=torch.uint8) for size in (fetched, placed))
        self.staging = Staging(self.device, *memory)
        self.cache.staging = self.staging


SPEC = replace(fake_spec(), conv_width=4)
NUM_TOKENS = 40
PAGES = (4, 5, 9)


def view_of(pool: Tensor) -> PoolBytes:
    return PoolBytes(pool, 0, pool.nbytes)


def random_bytes(count: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def rig() -> Rig:
    return Rig(SPEC)


def test_a_fetch_waits_for_its_copy(rig: Rig):
    pool = random_bytes(1000)
    fetch = rig.staging.fetch(view_of(pool), 100, 700)
    assert fetch is not None and rig.device.num_pending == 1
    assert bytes(fetch.data()) == pool[100:800].numpy().tobytes()


def test_a_fetch_that_was_written_over_is_copied_again(rig: Rig):
    pool = random_bytes(8000)
    fetches = [rig.staging.fetch(view_of(pool), first, 1000) for first in range(0, 8000, 1000)]
    for index, fetch in enumerate(fetches):
        assert fetch is not None
        assert bytes(fetch.data()) == pool[1000 * index :][:1000].numpy().tobytes()
    assert 8 < len(rig.device.copies) <= 16


def test_what_a_ring_holds_is_bounded(rig: Rig):
    pool = random_bytes(4 * PLACED)
    assert rig.staging.fetch(view_of(pool), 0, FETCHED // 4 + 1) is None
    writer = rig.staging.writer()
    assert not writer.takes(view_of(pool), PLACED // 4 + 1) and writer.takes(view_of(pool), PLACED // 4)
    assert rig.staging.fetch(memoryview(bytearray(8)), 0, 8) is None
    assert not writer.takes(memoryview(bytearray(8)), 8)


def test_ring_memory_is_filled_again_only_after_the_copy_from_it(rig: Rig):
    """Twenty times what the ring holds goes through it, and few copies are ever under way."""
    data, pool = random_bytes(20 * PLACED), torch.zeros(20 * PLACED, dtype=torch.uint8)
    writer = rig.staging.writer()
    for begin in range(0, data.nbytes, 1500):
        count = min(1500, data.nbytes - begin)
        with writer.place(view_of(pool), begin, count) as room:
            room[:] = data[begin : begin + count].numpy().data
        assert rig.device.num_pending <= PLACED // 1500
    assert rig.device.num_pending > 1
    writer.settle()
    assert rig.device.num_pending == 0
    assert torch.equal(pool, data)


def test_bytes_that_could_not_be_filled_are_not_copied(rig: Rig):
    pool = random_bytes(64)
    before = pool.clone()
    writer = rig.staging.writer()
    with pytest.raises(KeyError), writer.place(view_of(pool), 0, 64):
        raise KeyError
    writer.settle()
    assert torch.equal(pool, before)


def test_what_lands_comes_after_the_steps_that_used_the_memory_before(rig: Rig):
    """A step of the request that had the memory before is asked for, and done late."""
    pool = torch.zeros(64, dtype=torch.uint8)
    step = rig.device.step(lambda: pool.fill_(7))
    writer = rig.staging.writer()
    later = rig.device.step(lambda: None)
    with writer.place(view_of(pool), 0, 64) as room:
        room[:] = bytes(range(64))
    writer.settle()
    step.synchronize()
    assert pool.tolist() == list(range(64))
    assert not later.is_done


def test_steps_that_have_ended_are_not_waited_for(rig: Rig):
    pool = torch.zeros(64, dtype=torch.uint8)
    writer = rig.staging.writer()
    for work in rig.device.asked_steps:
        work.synchronize()
    with writer.place(view_of(pool), 0, 64) as room:
        room[:] = bytes(range(64))
    assert rig.device.waits == []


def fill(cache: CudaCache) -> None:
    source = torch.Generator().manual_seed(3)
    for layer in (*SPEC.kda_layers, *SPEC.mla_layers):
        pool: Any = cache.layer(layer)
        for tensor in (pool.rows,) if layer in SPEC.mla_layers else (pool.state, pool.conv):
            tensor.copy_(torch.rand(tensor.shape, generator=source))
    cache._logits.copy_(torch.rand(cache._logits.shape, generator=source))


def sent(outbox: Outbox, *, batches: int | None = None) -> list[Frame]:
    """Frames with bytes of their own, from the first on."""
    frames: list[Frame] = []
    while (batches is None or batches > 0) and (batch := outbox.frames(len(frames))):
        frames += [replace(frame, data=memoryview(bytes(frame.data))) for frame in batch]
        batches = None if batches is None else batches - 1
    return frames


def new_outbox(cache: CudaCache) -> Outbox:
    manifest = build_manifest(SPEC, request_id="q", attempt=1, num_tokens=NUM_TOKENS)
    outbox = Outbox(manifest, cache, slot=2, block_table=PAGES, frame_bytes=100)
    for layer in sorted(SPEC.kda_layers + SPEC.mla_layers):
        outbox.add_layer(layer, 0, 32)
        outbox.add_layer(layer, 32, NUM_TOKENS)
    outbox.add_logits()
    return outbox


def test_a_state_passes_from_device_to_device():
    source, target = Rig(SPEC), Rig(SPEC)
    fill(source.cache)
    manifest = build_manifest(SPEC, request_id="q", attempt=1, num_tokens=NUM_TOKENS)
    landing = Landing(manifest, target.cache, slot=3, block_table=(7, 1, 2))
    landing.accept_manifest(manifest)
    outbox = new_outbox(source.cache)
    for frame in sent(outbox):
        landing.accept(frame)
    landing.finish(outbox.num_frames)
    assert target.device.num_pending == 0
    for layer in (*SPEC.kda_layers, *SPEC.mla_layers):
        landed, own = (cast("Any", rig.cache.layer(layer)) for rig in (target, source))
        if layer in SPEC.kda_layers:
            assert torch.equal(landed.state[3], own.state[2])
            assert torch.equal(landed.conv[3], own.conv[2])
        else:
            rows = (pool.rows[list(pages)].flatten(0, 1) for pool, pages in ((landed, (7, 1, 2)), (own, PAGES)))
            assert torch.equal(*(own_rows[:NUM_TOKENS] for own_rows in rows))
    assert torch.equal(target.cache.logits([3]), source.cache.logits([2]))


def test_a_closed_landing_writes_no_more(rig: Rig):
    """Its pages may belong to a step by then, of whose order copies know nothing."""
    source = Rig(SPEC)
    fill(source.cache)
    manifest = build_manifest(SPEC, request_id="q", attempt=1, num_tokens=NUM_TOKENS)
    landing = Landing(manifest, rig.cache, slot=3, block_table=(7, 1, 2))
    landing.accept_manifest(manifest)
    for frame in sent(new_outbox(source.cache), batches=3):
        landing.accept(frame)
    assert rig.device.num_pending > 0
    landing.close()
    assert rig.device.num_pending == 0


def test_frames_are_on_their_way_before_they_are_asked_for():
    rig = Rig(SPEC, fetched=1 << 16)
    fill(rig.cache)
    outbox = new_outbox(rig.cache)
    outbox.frames(0)
    assert len(rig.device.copies) > 4 and rig.device.num_pending > 2


def test_two_readers_that_share_a_ring_too_small_for_both_get_their_own_bytes():
    rig = Rig(SPEC, fetched=600)
    fill(rig.cache)
    expected = sent(new_outbox(rig.cache))
    boxes = new_outbox(rig.cache), new_outbox(rig.cache)
    frames: tuple[list[Frame], list[Frame]] = ([], [])
    while any(len(own) < len(expected) for own in frames):
        for box, own in zip(boxes, frames, strict=True):
            own += [replace(frame, data=memoryview(bytes(frame.data))) for frame in box.frames(len(own))]
    plain = Rig(SPEC)
    fill(plain.cache)
    plain.cache.staging = None
    assert expected == sent(new_outbox(plain.cache)) == frames[0] == frames[1]


def test_a_stream_that_resumes_gets_the_same_frames():
    rig = Rig(SPEC)
    fill(rig.cache)
    outbox = new_outbox(rig.cache)
    frames = sent(outbox)
    again = outbox.frames(2)
    assert [(frame.sequence, bytes(frame.data)) for frame in again] == [
        (frame.sequence, bytes(frame.data)) for frame in frames[2 : 2 + len(again)]
    ]
