"""Hand-offs through shared memory: GrpcPrefillPeer against a prefill service on the same host."""

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3svc.errors import TransferError, Unavailable
from k3svc.rpc import shm, shm_ring
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.transfer.manifest import Frame
from services.prefill.service import SERVICE, PrefillServicer
from tests.e2e.landed import Target, call, manifest_of
from tests.e2e.rpc_stack import MIB, prefill_role, served, until_idle


@contextlib.asynccontextmanager
async def prefill_peer(transport: str = "auto", *, uses_shm: bool = True) -> AsyncIterator[tuple[GrpcPrefillPeer, Any]]:
    role, engine, _, _ = prefill_role(frame_bytes=512)
    servicer = PrefillServicer(engine, max_context_tokens=1025, uses_shm=uses_shm)
    role = dataclasses.replace(role, services={SERVICE: servicer.register})
    async with served(role) as here:
        peer = GrpcPrefillPeer(here.address, timeout_s=30.0, max_message_bytes=MIB, transport=transport)
        try:
            yield peer, here.channel
        finally:
            await peer.close()


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own in shared memory, so that objects of other processes neither come nor go in it."""
    with tempfile.TemporaryDirectory(dir=shm.FOLDER) as made:
        for module in (shm, shm_ring):
            monkeypatch.setattr(module, "FOLDER", Path(made))
        yield Path(made)


async def land(peer: GrpcPrefillPeer, request_id: str) -> Target:
    target = Target(request_id)
    try:
        async for event in peer.prefill(call(request_id)):
            target.take(event)
    finally:
        await peer.release(request_id, 1)
    return target


def names() -> set[str]:
    return {path.name for path in shm.FOLDER.iterdir()}


async def test_both_ways_land_the_same_bytes_and_leave_no_name():
    before = names()
    async with prefill_peer("shm") as (peer, channel):
        shared = await land(peer, "shared")
        await until_idle(channel)
    async with prefill_peer("grpc") as (peer, _):
        streamed = await land(peer, "streamed")
    assert set(shared.through_shm) == {True}
    assert set(streamed.through_shm) == {False}
    assert shared.bytes() == streamed.bytes()
    assert shared.landing.landed_bytes == manifest_of("shared").total_bytes
    assert names() == before


async def test_a_hand_off_larger_than_its_ring_goes_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shm_ring, "RING_BYTES", 2048)
    monkeypatch.setattr(shm_ring.RingWriter, "batch_bytes", 700)
    async with prefill_peer("shm") as (peer, _):
        target = await land(peer, "r")
    assert manifest_of("r").total_bytes > 2 * 2048
    assert set(target.through_shm) == {True}
    async with prefill_peer("grpc") as (peer, _):
        assert target.bytes() == (await land(peer, "s")).bytes()


async def test_a_ring_is_used_again(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    make = shm_ring.RingReader.__init__

    def counted(ring: shm_ring.RingReader, size: int) -> None:
        make(ring, size)
        made.append(ring.name)

    monkeypatch.setattr(shm_ring.RingReader, "__init__", counted)
    before = names()
    async with prefill_peer("shm") as (peer, _):
        targets = [await land(peer, f"r{number}") for number in range(4)]
        assert len(made) == 1
        assert names() == before
    assert all(set(target.through_shm) == {True} for target in targets)
    assert all(target.bytes() == targets[0].bytes() for target in targets)


async def test_a_service_that_has_forgotten_a_ring_gets_another(monkeypatch: pytest.MonkeyPatch):
    """As one that was restarted."""
    monkeypatch.setattr(shm_ring, "REMEMBERED_RINGS", 0)
    async with prefill_peer("auto") as (peer, _):
        targets = [await land(peer, f"r{number}") for number in range(3)]
    assert [target.through_shm[0] for target in targets] == [True, False, True]
    assert all(target.bytes() == targets[0].bytes() for target in targets)


async def test_one_forgotten_ring_is_reason_to_keep_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shm_ring, "REMEMBERED_RINGS", 0)
    async with prefill_peer("shm") as (peer, _):
        await asyncio.gather(land(peer, "a"), land(peer, "b"))
        with pytest.raises(Unavailable, match="does not see the shared memory"):
            await land(peer, "c")
        assert set((await land(peer, "d")).through_shm) == {True}


async def test_a_service_that_sees_other_memory_sends_frames_by_stream():
    async with prefill_peer("auto", uses_shm=False) as (peer, _):
        assert set((await land(peer, "r")).through_shm) == {False}
    async with prefill_peer("shm", uses_shm=False) as (peer, _):
        with pytest.raises(Unavailable, match="does not see the shared memory") as caught:
            await land(peer, "r")
        assert caught.value.reason == "NO_SHM"


async def test_without_shared_memory_auto_goes_by_stream(monkeypatch: pytest.MonkeyPatch):
    async def refuse(_rings: shm_ring.KeptRings, _num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm_ring.KeptRings, "take", refuse)
    async with prefill_peer("auto") as (peer, _):
        assert set((await land(peer, "r")).through_shm) == {False}
    async with prefill_peer("shm") as (peer, _):
        with pytest.raises(Unavailable, match="No space left"):
            await land(peer, "r")


async def test_a_broken_stream_goes_on_in_a_new_ring(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shm_ring.RingWriter, "batch_bytes", 700)
    before = names()
    async with prefill_peer("shm") as (peer, _):
        target = Target("r")
        events = peer.prefill(call("r"))
        while target.landing.next_sequence == 0:
            target.take(await events.__anext__())
        await events.aclose()
        landed = target.landing.next_sequence
        async for event in peer.prefill(call("r", next_sequence=landed)):
            target.take(event)
        await peer.release("r", 1)
        whole = await land(peer, "whole")
    assert 0 < landed < target.landing.next_sequence
    assert target.bytes() == whole.bytes()
    assert names() == before


async def test_bytes_that_change_in_shared_memory_are_noticed():
    async with prefill_peer("shm") as (peer, _):
        target = Target("r")
        events = peer.prefill(call("r"))
        target.take(await events.__anext__())
        while not isinstance(event := await events.__anext__(), list) or not event:
            pass
        frame = event[0]
        assert isinstance(frame, Frame) and frame.position is not None
        frame.data[0] ^= 1
        with pytest.raises(TransferError, match="CRC32C"):
            target.take(event)
        assert target.landing.next_sequence == 0
        frame.data[0] ^= 1
        target.take(event)
        assert target.landing.next_sequence == len(event)
        await events.aclose()
        await peer.release("r", 1)
