"""Hand-offs over real sockets: GrpcPrefillPeer against a prefill service."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.errors import (
    Incompatible,
    InvalidRequest,
    Superseded,
    TransferError,
    Unavailable,
)
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.frames import decode_event, encode_event
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest
from k3svc.v1 import (
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    types_pb2,
)
from tests.e2e.rpc_stack import (
    FINGERPRINT,
    MIB,
    PROMPT,
    call_of,
    load_of,
    prefill_role,
    served,
    until_idle,
)


@contextlib.asynccontextmanager
async def prefill_peer(
    *, timeout_s: float = 30.0, **options: Any
) -> AsyncIterator[tuple[GrpcPrefillPeer, Any, Any, grpc.aio.Channel]]:
    role, engine, runner, _ = prefill_role(**options)
    async with served(role) as here:
        peer = GrpcPrefillPeer(here.address, timeout_s=timeout_s, max_message_bytes=MIB)
        try:
            yield peer, engine, runner, here.channel
        finally:
            await peer.close()


async def collect(peer: GrpcPrefillPeer, call: PrefillCall) -> list[HandoffEvent]:
    return [event async for event in peer.prefill(call)]


def frames_of(events: Sequence[HandoffEvent]) -> list[Frame]:
    return [frame for event in events if isinstance(event, list) for frame in event]


async def test_a_stream_resumes_at_the_next_sequence():
    async with prefill_peer() as (peer, _, _, channel):
        whole = await collect(peer, call_of("whole"))
        frames = frames_of(whole)
        assert isinstance(whole[0], StateManifest)
        assert isinstance(whole[-1], PrefillDone)
        assert whole[-1].num_frames == len(frames)
        assert sum(frame.data.nbytes for frame in frames) == whole[0].total_bytes

        events = peer.prefill(call_of("cut"))
        head: list[Frame] = []
        async for event in events:
            head += frames_of([event])
            if len(head) > 2:
                break
        await events.aclose()
        resumed = await collect(peer, call_of("cut", next_sequence=len(head)))
        assert isinstance(resumed[0], StateManifest)
        joined = head + frames_of(resumed)
        assert len(head) < len(frames)
        assert joined == frames
        await peer.release("whole", 1)
        await peer.release("cut", 1)
        await until_idle(channel)


async def test_any_protobuf_client_can_read_a_hand_off():
    async with prefill_peer() as (peer, _, _, channel):
        own = await collect(peer, call_of("own"))
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        request = prefill_service_pb2.PrefillRequest(
            request_id="pb",
            attempt=1,
            prompt=types_pb2.TokenIds(ids=PROMPT),
            fingerprint=types_pb2.Fingerprint(
                protocol=1, model="m", tokenizer="t", wire_layout=FINGERPRINT.wire_layout
            ),
        )
        messages = [message async for message in stub.Prefill(request)]
        read = [decode_event(message.SerializeToString()) for message in messages]
        assert [encode_event(event) for event in read] == [message.SerializeToString() for message in messages]
        assert frames_of(read) == frames_of(own)


async def test_closing_the_iterator_cancels_the_call():
    async with prefill_peer(lease_s=0.01) as (peer, _, runner, channel):
        runner.gate.clear()
        opened, calls = peer._open(), []

        def recording(request: Any, **options: Any) -> Any:
            calls.append(opened.prefill(request, **options))
            return calls[-1]

        peer._opened = dataclasses.replace(opened, prefill=recording)
        events = peer.prefill(call_of("r"))
        assert isinstance(await events.__anext__(), StateManifest)
        await events.aclose()
        assert calls[0].cancelled()
        runner.gate.set()
        while dict((await load_of(channel)).outcomes)["expired"] == 0:
            pass
        await until_idle(channel)


async def test_a_call_whose_last_event_was_read_comes_to_its_end():
    """Also when nobody reads on: the service counts it as it ends, and cancelled it would be a failure."""
    ends, outcome = asyncio.Event(), asyncio.get_running_loop().create_future()
    done = PrefillDone(num_frames=0, queue_ms=0.0, compute_ms=0.0, send_tail_ms=0.0, chunks=1, cached_tokens=0)

    async def prefill(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            yield encode_event(done)
            await ends.wait()
            outcome.set_result("ended")
        except asyncio.CancelledError:
            outcome.set_result("cancelled")
            raise

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Prefill": grpc.unary_stream_rpc_method_handler(prefill)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("k3svc.v1.PrefillService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer = GrpcPrefillPeer(f"127.0.0.1:{port}", timeout_s=20.0, max_message_bytes=MIB)
    events = peer.prefill(call_of("r"))
    assert await events.__anext__() == done
    await events.aclose()
    await peer.release("r", 1)  # has come back from the service later than a cancellation would have come there
    ends.set()
    assert await outcome == "ended"
    await peer.close()
    await server.stop(None)


async def test_closing_a_peer_is_an_error_of_its_streams():
    async with prefill_peer() as (peer, _, runner, _channel):
        runner.gate.clear()
        events = peer.prefill(call_of("r"))
        assert isinstance(await events.__anext__(), StateManifest)
        reading = asyncio.ensure_future(events.__anext__())
        await runner.waiting.wait()
        await peer.close()
        with pytest.raises(Unavailable):
            await reading
        runner.gate.set()


async def test_the_errors_of_a_peer_are_those_of_the_service():
    async with prefill_peer() as (peer, _, _, _channel):
        with pytest.raises(InvalidRequest, match="attempt"):
            await collect(peer, call_of("r", attempt=0))
        other = {**vars(FINGERPRINT), "model": "other"}
        with pytest.raises(Incompatible, match="differs in model") as caught:
            await collect(peer, call_of("r", fingerprint=type(FINGERPRINT)(**other)))
        assert (caught.value.metadata["field"], caught.value.metadata["request_id"]) == ("model", "r")
        await collect(peer, call_of("r", attempt=2))
        with pytest.raises(Superseded):
            await collect(peer, call_of("r", attempt=1))


async def test_a_silent_peer_counts_as_broken():
    async with prefill_peer() as (peer, _, runner, _channel):
        runner.gate.clear()
        events = peer.prefill(call_of("r"))
        assert isinstance(await events.__anext__(), StateManifest)
        peer._timeout_s = 0.1
        with pytest.raises(TransferError, match="fell silent") as caught:
            await events.__anext__()
        assert caught.value.reason == "HANDOFF_SILENT"
        runner.gate.set()


async def test_a_peer_that_accepts_and_never_answers():
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    peer = GrpcPrefillPeer(f"127.0.0.1:{port}", timeout_s=0.2, max_message_bytes=MIB)
    with pytest.raises(Unavailable, match="did not answer"):
        await collect(peer, call_of("r"))
    await peer.close()
    for writer in accepted:
        writer.close()
    server.close()


async def test_a_peer_that_is_not_there():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    peer = GrpcPrefillPeer(f"127.0.0.1:{port}", timeout_s=20.0, max_message_bytes=MIB)
    with pytest.raises(Unavailable):
        await collect(peer, call_of("r"))
    await peer.release("r", 1)
    await peer.close()


async def test_a_message_beyond_the_limit_is_a_matter_of_configuration():
    role, *_ = prefill_role(frame_bytes=64 << 10)
    async with served(role) as here:
        peer = GrpcPrefillPeer(here.address, timeout_s=20.0, max_message_bytes=500)
        with pytest.raises(Incompatible, match="larger than max"):
            await collect(peer, call_of("r"))
        await peer.close()
