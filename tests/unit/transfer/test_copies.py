"""How often the bytes of a hand-off are copied: in a stream once on each side, beyond what the transport does by
itself; by the state port once by the receiver.

Copies into memory that is new show in what Python allocates; copies into the pools go through one function.
"""

import asyncio
import tracemalloc
from collections.abc import Iterator

import pytest

from benchmarks.transfer import ANYONE, PoolEngine, filled_cache, new_cache
from k3svc.config import PrefillSection, ServerSection
from k3svc.engine.ports import PrefillCall
from k3svc.rpc.access import Access
from k3svc.rpc.frames import decode_event, encode_event, event_pieces
from k3svc.rpc.state_port import StatePort
from k3svc.rpc.state_reader import StateReader
from k3svc.transfer import landing as landing_module
from k3svc.transfer.checked_copy import copy_in
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import PrefillDone, StateManifest, build_manifest

MIB = 8


class Allocated:
    """The most bytes that were allocated at once since the last look."""

    def __init__(self) -> None:
        self._before = 0
        self.look()

    def look(self) -> int:
        current, peak = tracemalloc.get_traced_memory()
        grown, self._before = peak - self._before, current
        tracemalloc.reset_peak()
        return grown


@pytest.fixture
def allocated() -> Iterator[Allocated]:
    tracemalloc.start()
    yield Allocated()
    tracemalloc.stop()


async def test_bytes_are_copied_once_on_each_side(allocated: Allocated, monkeypatch: pytest.MonkeyPatch):
    source, target = filled_cache(MIB), new_cache(MIB)
    manifest = build_manifest(target.spec, request_id="b", attempt=1, num_tokens=1)
    landing = Landing(manifest, target, slot=1, block_table=[1])
    call = PrefillCall(request_id="b", attempt=1, prompt=(0,), fingerprint=ANYONE, state_bytes=manifest.total_bytes)
    copied = [0]

    def counted(data: memoryview, room: memoryview, checksum: int = 0) -> int:
        copied[0] += data.nbytes
        return copy_in(data, room, checksum)

    monkeypatch.setattr(landing_module, "copy_in", counted)
    sent = [0]
    allocated.look()
    async for event in PoolEngine(source).open(call):
        size = sum(frame.nbytes for frame in event) if isinstance(event, list) else 0
        slack = 1 << 16
        assert allocated.look() < slack, "frames are views of the pools"
        message = encode_event(event)
        assert size <= allocated.look() < size + slack, "one copy into the message"
        received = decode_event(message)
        assert allocated.look() < slack, "what was received is views of the message"
        if isinstance(received, StateManifest):
            landing.accept_manifest(received)
        elif isinstance(received, PrefillDone):
            landing.finish(received.num_frames)
        else:
            for frame in received:
                landing.accept(frame)
            sent[0] += size
        assert allocated.look() < slack, "bytes land in the pools"
        del message, received
        allocated.look()
    assert copied[0] == sent[0] == manifest.total_bytes


async def test_by_the_state_port_bytes_are_copied_once_by_the_receiver(allocated: Allocated):
    source = filled_cache(MIB)
    manifest = build_manifest(source.spec, request_id="b", attempt=1, num_tokens=1)
    port = StatePort(access=Access(ServerSection(), None), max_connections=1)
    port.open("127.0.0.1", 0)
    reader = StateReader(
        authority="here", context=None, metadata=tuple, max_message_bytes=1 << 24, on_change=lambda _reader: None
    )
    await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port.number)
    while not reader.is_waiting:
        await asyncio.sleep(0)
    connection = port.take(reader.ticket)
    assert connection is not None
    slack, buffer, num_bytes = 1 << 16, PrefillSection.frame_bytes, 0
    memories: list[object] = []
    call = PrefillCall(request_id="b", attempt=1, prompt=(0,), fingerprint=ANYONE, state_bytes=1)
    async for event in PoolEngine(source).open(call):
        if isinstance(event, StateManifest):
            continue
        allocated.look()
        pieces = event_pieces(event)
        assert allocated.look() < slack, "pieces are views of the pools"
        sending = asyncio.ensure_future(connection.send(pieces))
        message = await reader.read()
        await sending
        # What the kernel does not take at once is copied by the sender: less than the message.
        grown = allocated.look()
        first = num_bytes == 0
        assert grown < slack + (buffer if first else 0) + buffer, "the reader's memory is made once"
        assert message is not None
        if len(message) > slack:
            memories.append(message.obj)
        received = decode_event(message)
        assert allocated.look() < slack, "what was received is views of the reader's memory"
        if not isinstance(received, StateManifest | PrefillDone):
            assert not isinstance(event, PrefillDone)
            assert [bytes(frame.data) for frame in received] == [bytes(frame.data) for frame in event]
            num_bytes += sum(frame.nbytes for frame in received)
            del received
        allocated.look()
    assert num_bytes == manifest.total_bytes
    # Headers make some a few bytes longer than all before, for which memory is made anew.
    assert len({id(memory) for memory in memories}) < len(memories), "the reader's memory is used again"
    reader.abort()
    await port.close()
