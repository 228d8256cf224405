"""Hand-offs by the state port: GrpcPrefillPeer against a prefill service, and both ends against those of grpcio."""

import asyncio
import dataclasses
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from k3svc.config import AuthSection, ServerSection, TlsSection
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import ConfigError, K3svcError, Superseded, TransferError
from k3svc.rpc import clients, codec, state_port, state_reader
from k3svc.rpc.access import Access
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.credentials import HTTP2, CallerCredentials, server_context
from k3svc.rpc.shm_ring import KeptRings
from k3svc.rpc.state_port import StatePort
from k3svc.rpc.state_reader import StateReader
from k3svc.transfer.manifest import StateManifest
from k3svc.v1 import prefill_service_pb2 as pb
from k3svc.v1 import prefill_service_pb2_grpc
from services.prefill.service import SERVICE, PrefillServicer
from tests.e2e.landed import Target, call, manifest_of
from tests.e2e.pki import Pki, new_pki
from tests.e2e.rpc_stack import MIB, GatedRunner, prefill_role, served, until_idle

TOKEN = "token-of-decode-00000000000"


@dataclass(kw_only=True)
class Here:
    """A prefill service with a state port, and a peer of it."""

    peer: GrpcPrefillPeer
    port: StatePort
    channel: grpc.aio.Channel
    engine: PrefillEngine
    runner: GatedRunner
    address: str


@asynccontextmanager
async def prefill_peer(
    *,
    tls: TlsSection | None = None,
    auth: AuthSection | None = None,
    credentials: CallerCredentials | None = None,
    max_connections: int = 64,
    timeout_s: float = 30.0,
    uses_shm: bool = False,
    **options: Any,
) -> AsyncIterator[Here]:
    role, engine, runner, _ = prefill_role(frame_bytes=512)
    port = StatePort(
        access=Access(ServerSection(), Path(auth.keys) if auth else None),
        max_connections=max_connections,
        tls=server_context(tls, HTTP2).get if tls else None,
    )
    port.open("127.0.0.1", 0)
    servicer = PrefillServicer(engine, max_context_tokens=1025, uses_shm=uses_shm, state_port=port)
    role = dataclasses.replace(role, services={SERVICE: servicer.register})
    try:
        async with served(role, tls=tls, auth=auth, credentials=credentials) as here:
            peer = GrpcPrefillPeer(
                here.address, timeout_s=timeout_s, max_message_bytes=MIB, credentials=credentials, **options
            )
            try:
                yield Here(
                    peer=peer, port=port, channel=here.channel, engine=engine, runner=runner, address=here.address
                )
            finally:
                await peer.close()
    finally:
        await port.close()


async def land(peer: GrpcPrefillPeer, request_id: str) -> bytes:
    """The bytes of one hand-off, which is given back."""
    target = Target(request_id)
    try:
        async for event in peer.prefill(call(request_id)):
            target.take(event)
    finally:
        await peer.release(request_id, 1)
    return target.bytes()


class Carried:
    """What came by state ports."""

    messages = 0
    reader: StateReader
    """That of the last message."""


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Carried:
    seen, came = Carried(), StateReader.message_came

    def counted(reader: StateReader, message: memoryview) -> None:
        seen.messages, seen.reader = seen.messages + 1, reader
        came(reader, message)

    monkeypatch.setattr(StateReader, "message_came", counted)
    return seen


async def until(is_so: Callable[[], bool]) -> None:
    """Lets everything else run until it is so; the test's timeout ends it otherwise."""
    while not is_so():
        await asyncio.sleep(0.001)


async def a_reader_waits(here: Here) -> None:
    await until(lambda: any(r.is_waiting for r in here.peer._readers._unused))


async def test_the_second_hand_off_comes_by_the_state_port_with_the_same_bytes(carried: Carried):
    async with prefill_peer() as here:
        before = carried.messages
        first = await land(here.peer, "first")
        assert carried.messages == before
        await a_reader_waits(here)
        second = await land(here.peer, "second")
        by_port = carried.messages - before
        assert by_port > manifest_of("second").total_bytes // 512
        await a_reader_waits(here)
        third = await land(here.peer, "third")
        assert carried.messages > before + by_port
        await until_idle(here.channel)
    assert first == second == third
    assert len(set(first)) > 16


async def test_hand_offs_at_once_have_a_reader_each_or_come_in_their_streams(carried: Carried):
    async with prefill_peer() as here:
        whole = await land(here.peer, "first")
        await a_reader_waits(here)
        for turn in range(3):
            landed = await asyncio.gather(*(land(here.peer, f"{turn}-{n}") for n in range(4)))
            assert set(landed) == {whole}
        await until_idle(here.channel)
    assert carried.messages > 0


async def test_services_that_share_no_memory_use_the_port_and_offer_no_ring_again(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
):
    """As in containers, with the default `transfer.transport`."""
    offered = [0]
    take = KeptRings.take

    async def counted(rings: KeptRings, num_bytes: int) -> Any:
        offered[0] += 1
        return await take(rings, num_bytes)

    monkeypatch.setattr(KeptRings, "take", counted)
    async with prefill_peer(transport="auto", uses_shm=False) as here:
        whole = await land(here.peer, "first")
        await a_reader_waits(here)
        assert await land(here.peer, "second") == whole
        by_port = carried.messages
        assert (offered[0], by_port > 0) == (1, True)
        # After a while it may have moved to this host.
        monkeypatch.setattr(clients, "APART_S", 0.0)
        here.peer._ring_at = 0.0
        assert await land(here.peer, "third") == whole
        assert (offered[0], carried.messages) == (2, by_port)


async def test_services_that_share_memory_use_it_alone(carried: Carried):
    async with prefill_peer(transport="auto", uses_shm=True) as here:
        assert len({await land(here.peer, name) for name in ("a", "b", "c")}) == 1
        assert not here.port._connections
        assert not here.peer._readers._opening
    assert carried.messages == 0


async def test_a_service_without_a_state_port_and_a_decode_that_wants_none_use_the_stream(carried: Carried):
    async with prefill_peer(uses_state_port=False) as here:
        whole = [await land(here.peer, name) for name in ("a", "b", "c")]
    role, engine, _, _ = prefill_role(frame_bytes=512)
    async with served(role) as without:
        peer = GrpcPrefillPeer(without.address, timeout_s=30.0, max_message_bytes=MIB)
        whole += [await land(peer, name) for name in ("a", "b", "c")]
        await peer.close()
    assert carried.messages == 0
    assert len(set(whole)) == 1
    assert engine.load().running == 0


async def test_a_port_that_cannot_be_reached_costs_nothing_but_a_line_in_the_log(
    carried: Carried, caplog: pytest.LogCaptureFixture
):
    async with prefill_peer() as here:
        with socket.create_server(("127.0.0.1", 0)) as free:
            nobody = free.getsockname()[1]
        here.port.number = nobody
        whole = await land(here.peer, "a")
        await until(lambda: not here.peer._readers._opening)
        assert await land(here.peer, "b") == whole
    assert carried.messages == 0
    lines = [record for record in caplog.records if getattr(record, "reason", "") == "STATE_PORT_UNUSABLE"]
    assert len(lines) == 1, "it is left alone for a while"
    assert "Connect call failed" in lines[0].getMessage() or "refused" in lines[0].getMessage()


async def test_a_connection_that_breaks_is_a_hand_off_that_can_be_resumed(carried: Carried):
    async with prefill_peer() as here:
        whole = await land(here.peer, "first")
        await a_reader_waits(here)
        target, events = Target("cut"), here.peer.prefill(call("cut"))
        while target.landing.next_sequence < 3:
            target.take(await anext(events))
        carried.reader.abort()
        # The service may have sent everything by then, and so have ended its call well.
        with suppress(K3svcError):
            async for event in events:
                target.take(event)
        assert target.landing.missing
        async for event in here.peer.prefill(call("cut", next_sequence=target.landing.next_sequence)):
            target.take(event)
        assert target.bytes() == whole
        await here.peer.release("cut", 1)
        await until_idle(here.channel)


async def test_an_error_of_the_service_is_that_of_its_call(carried: Carried):
    async with prefill_peer() as here:
        await land(here.peer, "first")
        await a_reader_waits(here)
        here.runner.gate.clear()
        events = here.peer.prefill(call("ended"))
        assert isinstance(await anext(events), StateManifest)
        await here.runner.waiting.wait()
        here.engine.release("ended", 1)
        here.runner.gate.set()
        with pytest.raises(Superseded, match="released"):
            [event async for event in events]
        await until_idle(here.channel)
        # The connection was between messages, so the next hand-off may use one again.
        await land(here.peer, "next")


async def test_a_reader_that_goes_away_leaves_nothing_behind(carried: Carried):
    async with prefill_peer() as here:
        await land(here.peer, "first")
        await a_reader_waits(here)
        events, before = here.peer.prefill(call("left")), carried.messages
        while carried.messages < before + 2:
            await anext(events)
        await events.aclose()
        await here.peer.release("left", 1)
        await until_idle(here.channel)
        await until(lambda: not any(connection.stream for connection in here.port._connections))


async def test_a_stuck_reader_holds_its_hand_off_up_and_no_memory(carried: Carried, monkeypatch: pytest.MonkeyPatch):
    async with prefill_peer(timeout_s=0.3) as here:
        await land(here.peer, "first")
        await a_reader_waits(here)
        monkeypatch.setattr(StateReader, "resume", lambda _self: None)
        with pytest.raises(TransferError, match="fell silent"):
            async for _ in here.peer.prefill(call("stuck")):
                pass
        await here.peer.release("stuck", 1)
        await until_idle(here.channel)


async def test_a_service_that_ends_takes_its_readers_along(carried: Carried):
    async with prefill_peer() as here:
        await land(here.peer, "first")
        await a_reader_waits(here)
        await here.port.close()
        await until(lambda: not here.peer._readers._unused)
        await land(here.peer, "next")
        assert carried.messages == 0


async def test_unused_readers_and_unused_connections_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state_reader, "KEPT_S", 0.02)
    async with prefill_peer() as here:
        await land(here.peer, "first")
        await until(lambda: not here.peer._readers._opening)
        await until(lambda: not here.peer._readers._unused and not here.port._connections)
    monkeypatch.setattr(state_port, "UNUSED_S", 0.02)
    async with prefill_peer() as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port.number)
        assert await reader.read() != b"", "settings come, then the end"
        writer.close()
        await until(lambda: not here.port._connections)


async def test_no_more_connections_than_allowed():
    async with prefill_peer(max_connections=2) as here:
        kept = [await asyncio.open_connection("127.0.0.1", here.port.number) for _ in range(2)]
        await until(lambda: len(here.port._connections) == 2)
        kept.append(await asyncio.open_connection("127.0.0.1", here.port.number))
        with suppress(ConnectionResetError):
            await kept[-1][0].read()
        assert len(here.port._connections) == 2
        for _, writer in kept:
            writer.close()
        await until(lambda: not here.port._connections)


async def test_what_the_kernel_takes_in_parts_arrives_whole(monkeypatch: pytest.MonkeyPatch):
    """Whatever becomes of the memory that it came from once it was handed over."""
    partial, writev = [0], os.writev

    def counted(file: int, pieces: Sequence[bytes | memoryview]) -> int:
        sent = writev(file, pieces)
        partial[0] += sent < sum(map(len, pieces))
        return sent

    monkeypatch.setattr(os, "writev", counted)
    port = StatePort(access=Access(ServerSection(), None), max_connections=1)
    port.open("127.0.0.1", 0)
    reader = StateReader(
        authority="here", context=None, metadata=tuple, max_message_bytes=MIB, on_change=lambda _reader: None
    )
    await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port.number)
    await until(lambda: reader.is_waiting)
    connection = port.take(reader.ticket)
    assert connection is not None
    assert connection._transport is not None
    connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    drawn = random.Random(0)
    for _ in range(20):
        memory = bytearray(drawn.randbytes(drawn.randint(1, 300_000)))
        expected, view = bytes(memory), memoryview(memory)
        cuts = [0, *sorted(drawn.randint(0, len(memory)) for _ in range(drawn.randint(0, 9))), len(memory)]
        sending = asyncio.ensure_future(connection.send([view[a:b] for a, b in pairwise(cuts)]))
        await asyncio.sleep(0)
        memory[:] = bytes(len(memory))
        message = await reader.read()
        assert message is not None
        assert message == expected
        await sending
    assert partial[0] > 10
    reader.abort()
    await port.close()


async def test_an_address_in_use_is_told():
    async with prefill_peer() as here:
        port = StatePort(access=Access(ServerSection(), None), max_connections=1)
        with pytest.raises(ConfigError, match=f"transfer.state_port: cannot bind 127.0.0.1:{here.port.number}"):
            port.open("127.0.0.1", here.port.number)


@asynccontextmanager
async def grpcio_reader(target: str, ticket: bytes, **options: Any) -> AsyncIterator[Any]:
    """A call of StateService.Read by grpcio, which waits."""
    # Otherwise channels to one address share a connection, which takes one call at a time.
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", MIB)]
    async with grpc.aio.insecure_channel(target, options=own) as channel:
        stub: Any = prefill_service_pb2_grpc.StateServiceStub(channel)
        stream = stub.Read(pb.ReadRequest(ticket=ticket), **options)
        await stream.initial_metadata()
        yield stream


@pytest.mark.parametrize("frame_bytes", [512, 1 << 17])
async def test_any_grpc_client_reads_a_hand_off(frame_bytes: int):
    """With the windows and frame sizes of grpcio, which are smaller than a message here can be."""
    role, engine, _, cache = prefill_role(frame_bytes=frame_bytes)
    port = StatePort(access=Access(ServerSection(), None), max_connections=4)
    port.open("127.0.0.1", 0)
    servicer = PrefillServicer(engine, max_context_tokens=1025, state_port=port)
    async with served(dataclasses.replace(role, services={SERVICE: servicer.register})) as here:
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(here.channel)
        plain = [event async for event in stub.Prefill(codec.prefill_call_to_pb(call("plain")))]
        assert plain[0].manifest.state_port == port.number
        assert not plain[0].manifest.uses_read
        for turn in range(3):
            ticket = secrets.token_bytes(16)
            request = codec.prefill_call_to_pb(call(f"read-{turn}"))
            request.read_ticket = ticket
            async with grpcio_reader(f"127.0.0.1:{port.number}", ticket) as reading:
                own = [event async for event in stub.Prefill(request)]
                read = [event async for event in reading]
                assert await reading.code() is grpc.StatusCode.OK
            assert len(own) == 1
            assert own[0].manifest.uses_read
            frames = [f for event in read[:-1] for f in event.frames.frames]
            assert frames == [f for event in plain[1:-1] for f in event.frames.frames]
            assert read[-1].done.num_frames == len(frames)
        assert cache is not None
    await port.close()


@pytest.mark.parametrize(
    ("ticket", "code", "message"),
    [
        (b"short", grpc.StatusCode.INVALID_ARGUMENT, "ticket: got '5 bytes'; allowed: 16 random bytes"),
        (b"", grpc.StatusCode.INVALID_ARGUMENT, "ticket: got '0 bytes'; allowed: 16 random bytes"),
        (b"t" * 16, grpc.StatusCode.ALREADY_EXISTS, "a call with this ticket waits already"),
    ],
)
async def test_what_a_call_must_have(ticket: bytes, code: grpc.StatusCode, message: str):
    async with prefill_peer() as here:
        target = f"127.0.0.1:{here.port.number}"
        async with grpcio_reader(target, b"t" * 16):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async with grpcio_reader(target, ticket) as stream:
                    await stream.read()
        assert raised.value.code() is code
        assert raised.value.details() == message
        await until(lambda: not here.port._waiting)


async def test_other_methods_are_refused():
    async with prefill_peer() as here, grpc.aio.insecure_channel(f"127.0.0.1:{here.port.number}") as channel:
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Release(pb.ReleaseRequest(request_id="x"))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "allowed: POST /k3svc.v1.StateService/Read" in (raised.value.details() or "")


class GrpcioService(prefill_service_pb2_grpc.StateServiceServicer):
    """What a service of grpcio gives a reader."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages
        self.tickets: list[bytes] = []

    async def read(self, request: bytes, context: Any) -> Any:
        self.tickets.append(pb.ReadRequest.FromString(request).ticket)
        await context.send_initial_metadata(())
        for message in self._messages:
            yield message
        if len(self.tickets) == 3:
            await context.abort(grpc.StatusCode.NOT_FOUND, "naïve, 100 %")


@pytest.mark.parametrize("size", [0, 1, 16_384, 3_000_000])
async def test_our_reader_reads_what_grpcio_sends(size: int):
    messages = [bytes([n]) * (size + n) for n in range(5)]
    service = GrpcioService(messages)
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handler: Any = grpc.unary_stream_rpc_method_handler(service.read)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("k3svc.v1.StateService", {"Read": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader = StateReader(
        authority=f"127.0.0.1:{port}",
        context=None,
        metadata=lambda: (("x-request-id", "a"),),
        max_message_bytes=4_000_000,
        on_change=lambda _reader: None,
    )
    await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
    for turn in range(3):
        received = []
        while (message := await reader.read()) is not None:
            received.append(bytes(message))
        assert received == messages
        assert service.tickets[turn] == reader.ticket
        reader.go_on()
    assert reader.error is not None
    assert reader.error.message == "naïve, 100 %"
    await server.stop(None)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return new_pki(tmp_path / "pki")


async def test_the_port_keeps_the_rules_of_the_service(pki: Pki, tmp_path: Path, carried: Carried):
    """Mutual TLS and keys."""
    tls = pki.tls("role", "127.0.0.1", mutual=True)
    (tmp_path / "keys.toml").write_text(f'[decode]\ntoken = "{TOKEN}"\n')
    (tmp_path / "token").write_text(TOKEN)
    own = pki.caller("client")
    credentials = dataclasses.replace(own, token_file=tmp_path / "token")
    auth = AuthSection(keys=str(tmp_path / "keys.toml"))
    async with prefill_peer(tls=tls, auth=auth, credentials=credentials) as here:
        whole = await land(here.peer, "first")
        await a_reader_waits(here)
        assert await land(here.peer, "second") == whole
        assert carried.messages > 0
        await a_reader_waits(here)
        # Certificates that are renewed end what was made with the former ones.
        old, messages = carried.reader, carried.messages
        pki.issue("client", "caller.example")
        pki.issue("role", "127.0.0.1")
        assert await land(here.peer, "third") == whole
        assert carried.messages == messages
        await a_reader_waits(here)
        assert await land(here.peer, "fourth") == whole
        assert carried.messages > messages
        assert carried.reader is not old
        target = f"127.0.0.1:{here.port.number}"
        stranger = new_pki(tmp_path / "other")
        for caller, code in (
            (credentials, None),
            (own, grpc.StatusCode.UNAUTHENTICATED),
            (pki.caller(), grpc.StatusCode.UNAVAILABLE),
            (
                CallerCredentials(
                    ca=pki.ca_file, certificate=stranger.issue("x", "y")[0], key=stranger.folder / "x.key"
                ),
                grpc.StatusCode.UNAVAILABLE,
            ),
            (stranger.caller("x"), grpc.StatusCode.UNAVAILABLE),
            (CallerCredentials(), grpc.StatusCode.UNAVAILABLE),
        ):
            async with caller.open_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                stub: Any = prefill_service_pb2_grpc.StateServiceStub(channel)
                stream = stub.Read(pb.ReadRequest(ticket=secrets.token_bytes(16)), metadata=caller.metadata())
                if code is None:
                    await stream.initial_metadata()
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stream.read()
                assert raised.value.code() is code


async def test_a_reader_checks_the_name_of_the_service(pki: Pki, carried: Carried, caplog: pytest.LogCaptureFixture):
    async with prefill_peer(tls=pki.tls("role", "127.0.0.1"), credentials=pki.caller()) as here:
        here.peer._readers._server_name = "other.example"
        for name in ("a", "b"):
            await land(here.peer, name)
            await until(lambda: not here.peer._readers._opening)
    assert carried.messages == 0
    assert "certificate verify failed" in caplog.text


def test_the_loop_of_the_services_does_the_same(pki: Pki, tmp_path: Path, carried: Carried):
    """Its transports differ from those of asyncio in when they write and when they pause."""
    uvloop.run(test_the_second_hand_off_comes_by_the_state_port_with_the_same_bytes(carried))
    uvloop.run(test_hand_offs_at_once_have_a_reader_each_or_come_in_their_streams(carried))
    uvloop.run(test_a_reader_that_goes_away_leaves_nothing_behind(carried))
    with pytest.MonkeyPatch.context() as patch:
        uvloop.run(test_what_the_kernel_takes_in_parts_arrives_whole(patch))
    uvloop.run(test_the_port_keeps_the_rules_of_the_service(pki, tmp_path, carried))
    for frame_bytes in (512, 1 << 17):
        uvloop.run(test_any_grpc_client_reads_a_hand_off(frame_bytes))
    for size in (0, 1, 16_384, 3_000_000):
        uvloop.run(test_our_reader_reads_what_grpcio_sends(size))
