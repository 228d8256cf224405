"""Hand-offs by the state port while everything goes wrong: what is between the services, who calls, and who leaves."""

import asyncio
import dataclasses
import gc
import random
import secrets
import socket
import ssl
import struct
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
import hpack
import pytest
import uvloop
from hyperframe.frame import GoAwayFrame

from k3svc.config import ServerSection, TlsSection
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import K3svcError, Superseded, TransferError, Unavailable
from k3svc.rpc import codec, state_port, state_reader
from k3svc.rpc.access import Access
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.credentials import HTTP2, CallerCredentials, server_context
from k3svc.rpc.http2 import MAX_WINDOW, PREFACE
from k3svc.rpc.state_port import StateConnection, StatePort
from k3svc.rpc.state_reader import StateReader
from k3svc.testing.fakes import FakeCache, fake_spec
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import PrefillDone, StateManifest, build_manifest
from k3svc.v1 import prefill_service_pb2 as pb
from k3svc.v1 import prefill_service_pb2_grpc
from services.prefill.service import SERVICE, PrefillServicer
from tests.e2e.pki import Pki, new_pki
from tests.e2e.rpc_stack import MIB, GatedRunner, call_of, prefill_role, served, until_idle
from tests.unit.rpc.wire import OK, REQUEST, data, frames, headers, message, raw, settings

SPEC = fake_spec(num_slots=8, num_pages=64)
PROMPT = tuple(3 + n % 50 for n in range(240))
NUM_PAGES = -(-len(PROMPT) // SPEC.page_size)
TABLE = tuple(range(20, 20 + NUM_PAGES))
POISON = 0xDB


class Between:
    """What is between two services: passes bytes on, as long as it wants to."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.cut_after: Callable[[], int | None] = lambda: None
        """Bytes from the service after which a connection is reset; None: never."""
        self.piece: Callable[[], int] = lambda: 1 << 16
        self.rest_s: Callable[[], float] = lambda: 0.0
        """After each piece."""
        self.is_silent = False
        """Passes nothing on, and tells nobody."""
        self.gate = asyncio.Event()
        """Reads nothing while it is closed."""
        self.closes_after: int | None = None
        """Bytes from the service after which it closes by itself."""
        self.gate.set()
        self.has_small_buffers = False
        self.num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # asyncio closes what it has aborted in the next turn.
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        there: asyncio.StreamWriter | None = None
        try:
            away, there = await self._connect()
            await asyncio.gather(
                self._pass(reader, there), self._pass(away, writer, self.cut_after(), is_from_service=True)
            )
        except (OSError, RuntimeError, asyncio.CancelledError):
            pass
        finally:
            for connected in (writer, there):
                if connected is not None:
                    reset(connected)
            self._tasks.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        end = socket.socket()
        try:
            if self.has_small_buffers:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            end.setblocking(False)
            await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", self._target))
            return await asyncio.open_connection(sock=end, limit=1 << 11)
        except (OSError, asyncio.CancelledError):
            end.close()
            raise

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: int | None = None,
        *,
        is_from_service: bool = False,
    ) -> None:
        while True:
            size = self.piece() if left is None else min(self.piece(), left)
            await self.gate.wait()
            part = await reader.read(size)
            if left is not None:
                left -= len(part)
            if not part or left == 0:
                raise ConnectionResetError
            if self.is_silent:
                continue
            if is_from_service and self.closes_after is not None:
                self.closes_after -= len(part)
                if self.closes_after <= 0:
                    self.closes_after = None
                    self.gate.clear()
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(self.rest_s())


def reset(writer: asyncio.StreamWriter) -> None:
    """As if the process behind had been killed."""
    with suppress(OSError, AttributeError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclasses.dataclass(kw_only=True)
class Here:
    peer: GrpcPrefillPeer
    port: StatePort
    between: Between
    channel: grpc.aio.Channel
    engine: PrefillEngine
    runner: GatedRunner


@asynccontextmanager
async def attacked(
    *,
    tls: TlsSection | None = None,
    credentials: CallerCredentials | None = None,
    timeout_s: float = 20.0,
    lease_s: float = 30.0,
    max_connections: int = 64,
) -> AsyncIterator[Here]:
    """A prefill service whose memory is overwritten as soon as it is given back, and a peer of it."""
    role, engine, runner, cache = prefill_role(frame_bytes=512, lease_s=lease_s)
    poison_what_is_free(engine, cache)
    port = StatePort(
        access=Access(ServerSection(), None),
        max_connections=max_connections,
        tls=server_context(tls, HTTP2).get if tls else None,
    )
    port.open("127.0.0.1", 0)
    between = Between(port.number)
    await between.open()
    servicer = PrefillServicer(engine, max_context_tokens=1025, state_port=port)
    role = dataclasses.replace(role, services={SERVICE: servicer.register})
    try:
        async with served(role, tls=tls, credentials=credentials) as here:
            port.number = between.port
            peer = GrpcPrefillPeer(here.address, timeout_s=timeout_s, max_message_bytes=MIB, credentials=credentials)
            try:
                yield Here(peer=peer, port=port, between=between, channel=here.channel, engine=engine, runner=runner)
            finally:
                await peer.close()
    finally:
        await port.close()
        await between.close()
        await asyncio.sleep(0.01)


def poison_what_is_free(engine: PrefillEngine, cache: FakeCache) -> None:
    scheduler, spec = engine.scheduler, cache.spec
    free_pages, free_slot = scheduler.pages.free, scheduler.slots.free

    def pages(given: Any) -> None:
        for layer in spec.mla_layers:
            for page in given:
                view = cache.rows_bytes(layer, page)
                view[:] = bytes([POISON]) * view.nbytes
        free_pages(given)

    def slot(given: int) -> None:
        views = [view(layer, given) for layer in spec.kda_layers for view in (cache.state_bytes, cache.conv_bytes)]
        for view in [*views, cache.logits_bytes(given)]:
            view[:] = bytes([POISON]) * view.nbytes
        free_slot(given)

    scheduler.pages.free = pages  # type: ignore[method-assign, assignment]
    scheduler.slots.free = slot  # type: ignore[method-assign, assignment]


def manifest_of(request_id: str, attempt: int) -> StateManifest:
    return build_manifest(SPEC, request_id=request_id, attempt=attempt, num_tokens=len(PROMPT))


async def land(here: Here, request_id: str, *, attempt: int = 1, attempts: int = 40) -> bytes:
    """The bytes of one hand-off, which is resumed as often as it breaks, and given back."""
    manifest = manifest_of(request_id, attempt)
    cache = FakeCache(SPEC)
    landing = Landing(manifest, cache, slot=3, block_table=TABLE)
    try:
        for _ in range(attempts):
            call = call_of(
                request_id,
                prompt=PROMPT,
                attempt=attempt,
                state_bytes=manifest.total_bytes,
                next_sequence=landing.next_sequence,
            )
            with suppress(TransferError, Unavailable):
                async for event in here.peer.prefill(call):
                    if isinstance(event, StateManifest):
                        landing.accept_manifest(event)
                    elif isinstance(event, PrefillDone):
                        landing.finish(event.num_frames)
                    else:
                        for frame in event:
                            landing.accept(frame)
                    await asyncio.sleep(0)
            if not landing.missing:
                break
        assert not landing.missing
    finally:
        # A hand-off that is not given back would stay until its lease ends.
        await asyncio.shield(here.peer.release(request_id, attempt))
    views = [view for n in SPEC.kda_layers for view in (cache.state_bytes(n, 3), cache.conv_bytes(n, 3))]
    views += [cache.rows_bytes(layer, page) for layer in SPEC.mla_layers for page in TABLE]
    return b"".join([*map(bytes, views), bytes(cache.logits_bytes(3))])


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


async def a_reader_waits(here: Here) -> None:
    await until(lambda: any(reader.is_waiting for reader in here.peer._readers._unused))


def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few KiB are under way at most, so that a hand-off of 20 KiB has to wait for its reader."""
    opened = StateConnection.opened

    def narrow(connection: StateConnection) -> None:
        assert connection._transport is not None
        connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        opened(connection)

    monkeypatch.setattr(StateConnection, "opened", narrow)


async def _storm(seed: int, tls: TlsSection | None, credentials: CallerCredentials | None) -> int:
    source = random.Random(seed)
    async with attacked(tls=tls, credentials=credentials) as here:
        here.peer._readers._leave_alone = lambda error: None  # type: ignore[method-assign]
        whole = await land(here, "first")
        here.between.cut_after = lambda: source.choice([None, None, source.randrange(1, 60_000), source.randrange(300)])
        here.between.piece = lambda: source.choice([1 << 16, source.randrange(1, 2000)])
        here.between.rest_s = lambda: source.choice([0.0, 0.0, 0.0, 0.001])

        async def one(name: str) -> None:
            assert await land(here, name) == whole

        async def cancelled(name: str) -> None:
            task = asyncio.ensure_future(land(here, name))
            await asyncio.sleep(source.random() * 0.03)
            task.cancel()
            with suppress(asyncio.CancelledError, K3svcError):
                await task

        for turn in range(6):
            kinds = [source.choice([one, one, cancelled]) for _ in range(3)]
            await asyncio.gather(*(kind(f"{turn}-{n}") for n, kind in enumerate(kinds)))
            if source.random() < 0.3:
                for reader in [*here.peer._readers._unused]:
                    reader.abort()
        await until_idle(here.channel)
        here.engine.scheduler.slots.check()
        await until(lambda: not any(connection._is_carrying for connection in here.port._connections))
        here.peer._readers.close()
        await until(lambda: not here.port._connections and not here.port._waiting)
        return here.between.num_connections


def without_leaks(work: Callable[[], Any], run: Any) -> Any:
    """Fails for a socket, a transport or a task that is left."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)

        async def watched() -> Any:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _loop, context: found.append(str(context)))
            try:
                return await work()
            finally:
                await asyncio.sleep(0.05)
                others = asyncio.all_tasks() - {asyncio.current_task()}
                found.extend(str(task) for task in others if "k3svc" in str(task))

        result = run(watched())
        gc.collect()
    found += [str(entry.message) for entry in caught if "grpc" not in str(entry.message)]
    assert found == [], found
    return result


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return new_pki(tmp_path_factory.mktemp("pki") / "pki")


LOOPS: dict[str, Any] = {"asyncio": asyncio.run, "uvloop": uvloop.run}


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", LOOPS)
def test_connections_that_break_anywhere_change_no_byte_and_keep_nothing(
    loop: str, is_secure: bool, pki: Pki, monkeypatch: pytest.MonkeyPatch
):
    small_buffers(monkeypatch)
    tls, credentials = (pki.tls("role", "127.0.0.1"), pki.caller()) if is_secure else (None, None)
    for seed in range(2):
        assert without_leaks(partial(_storm, seed, tls, credentials), LOOPS[loop]) > 2


async def _given_back_in_the_middle(how: str, tls: TlsSection | None, credentials: CallerCredentials | None) -> None:
    """A reader takes its time, and meanwhile the state is no longer its own."""
    async with attacked(tls=tls, credentials=credentials, lease_s=0.2 if how == "lease" else 30.0) as here:
        here.between.has_small_buffers = True
        whole = await land(here, "first")
        await a_reader_waits(here)
        here.between.piece, here.between.closes_after = (lambda: 500), 3000
        manifest = manifest_of("slow", 1)
        landing = Landing(manifest, FakeCache(SPEC), slot=3, block_table=TABLE)
        events = here.peer.prefill(call_of("slow", prompt=PROMPT, state_bytes=manifest.total_bytes))
        frames = 0
        # With TLS all of it may be on its way by then.
        with pytest.raises(Superseded) if tls is None else suppress(Superseded):
            async for event in events:
                if isinstance(event, StateManifest):
                    landing.accept_manifest(event)
                    continue
                if isinstance(event, PrefillDone):
                    landing.finish(event.num_frames)
                    continue
                for frame in event:
                    # It compares checksums.
                    landing.accept(frame)
                    assert bytes(frame.data).count(POISON) < 100
                frames += 1
                if frames != 2:
                    continue
                await until(lambda: not here.between.gate.is_set())
                # With TLS, some 64 KiB are kept before there is no room.
                await (
                    asyncio.sleep(0.05) if tls else until(lambda: not all(c._can_write for c in here.port._connections))
                )
                if how == "release":
                    here.engine.release("slow", 1)
                else:
                    await until(lambda: here.engine.load().free_slots == 8)
                here.between.gate.set()
        await here.peer.release("slow", 1)
        await until_idle(here.channel)
        assert await land(here, "next") == whole


@pytest.mark.parametrize("how", ["release", "lease"])
@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", LOOPS)
def test_memory_that_was_given_back_is_not_sent(
    loop: str, is_secure: bool, how: str, pki: Pki, monkeypatch: pytest.MonkeyPatch
):
    small_buffers(monkeypatch)
    tls, credentials = (pki.tls("role", "127.0.0.1"), pki.caller()) if is_secure else (None, None)
    without_leaks(lambda: _given_back_in_the_middle(how, tls, credentials), LOOPS[loop])


async def _proxied(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + settings(INITIAL_WINDOW_SIZE=MAX_WINDOW) + raw(0x8, 0, (1 << 30).to_bytes(4, "big")))
    return reader, writer


def request(stream: int, ticket: bytes) -> bytes:
    body = pb.ReadRequest(ticket=ticket).SerializeToString()
    return headers(hpack.Encoder().encode(REQUEST), stream, "END_HEADERS") + data(message(body), stream, is_last=True)


async def test_a_proxy_that_gives_a_connection_to_the_next_reader_gives_it_no_hand_off_of_another():
    """A reader goes in the middle of its hand-off; the proxy resets its call, and makes another on the connection."""
    async with attacked() as here:
        reader, writer = await _proxied(here.between._target)
        tickets = [secrets.token_bytes(16) for _ in range(2)]
        writer.write(request(1, tickets[0]))
        await until(lambda: tickets[0] in here.port._waiting)
        here.runner.close_after = 1
        asked = codec.prefill_call_to_pb(call_of("a", prompt=PROMPT))
        asked.read_ticket = tickets[0]
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(here.channel)
        calling = stub.Prefill(asked)
        assert (await calling.read()).manifest.uses_read
        await here.runner.waiting.wait()
        writer.write(raw(0x3, 1, b"\0\0\0\x08") + request(3, tickets[1]))
        await asyncio.sleep(0.05)
        here.runner.gate.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await calling.read()
        said = b""
        with suppress(ConnectionResetError):
            while part := await reader.read(1 << 16):
                said += part
        assert not [frame for frame in frames(said) if frame.stream_id == 3]
        writer.close()
        here.engine.release("a", 1)
        await until_idle(here.channel)
        assert not here.port._waiting


async def test_a_ticket_serves_one_hand_off_at_a_time_and_one_reader():
    async with attacked() as here:
        ticket = secrets.token_bytes(16)
        ends = [await _proxied(here.between._target) for _ in range(2)]
        for _, writer in ends:
            writer.write(request(1, ticket))
        await until(lambda: sum(not connection.stream for connection in here.port._connections) == 1)
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(here.channel)
        calls = []
        for name in ("a", "b", "c"):
            asked = codec.prefill_call_to_pb(call_of(name, prompt=PROMPT))
            asked.read_ticket = ticket
            calls.append(stub.Prefill(asked))
        taken = [(await calling.read()).manifest.uses_read for calling in calls]
        assert sorted(taken) == [False, False, True]
        for calling in calls:
            while await calling.read() is not grpc.aio.EOF:
                pass
            assert await calling.code() is grpc.StatusCode.OK
        for _, writer in ends:
            writer.close()
        for name in ("a", "b", "c"):
            here.engine.release(name, 1)
        await until_idle(here.channel)


async def _cancelled_on_one_channel() -> None:
    async with attacked() as here:
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{here.between._target}", options=own) as channel:
            service: Any = prefill_service_pb2_grpc.PrefillServiceStub(here.channel)
            stub: Any = prefill_service_pb2_grpc.StateServiceStub(channel)
            landed = []
            for turn in range(6):
                ticket = secrets.token_bytes(16)
                reading = stub.Read(pb.ReadRequest(ticket=ticket))
                await reading.initial_metadata()
                asked = codec.prefill_call_to_pb(call_of(f"{turn}", prompt=PROMPT))
                asked.read_ticket = ticket
                calling = service.Prefill(asked)
                assert (await calling.read()).manifest.uses_read
                came: list[Any] = []
                while (event := await reading.read()) is not grpc.aio.EOF:
                    came += [frame.data for frame in event.frames.frames]
                    if turn % 2 and len(came) == 2:
                        reading.cancel()
                        break
                if not turn % 2:
                    assert await reading.code() is grpc.StatusCode.OK
                    landed.append(came)
                here.engine.release(f"{turn}", 1)
            assert landed[0] == landed[1] == landed[2]
        await until_idle(here.channel)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_of_grpcio_that_cancels_reads_the_next_hand_off_whole(loop: str):
    """Its calls share a connection, which it makes anew when it is told that it ends."""
    without_leaks(_cancelled_on_one_channel, LOOPS[loop])


async def _garbage(seed: int, tls: ssl.SSLContext | None, context: ssl.SSLContext | None) -> None:
    """Real sockets, each of which says something wrong at some time and reads or does not."""
    source = random.Random(seed)
    port = StatePort(access=Access(ServerSection(), None), max_connections=20, tls=None if tls is None else lambda: tls)
    port.open("127.0.0.1", 0)

    def wrong() -> bytes:
        good = [settings(), PREFACE, request(1, secrets.token_bytes(16)), raw(0x6, 0, b"12345678") * 50]
        bad = [raw(0x6, 1, b"12345678"), raw(0x0, 5, b"x"), source.randbytes(50), raw(0x4, 0, b"12345")]
        return b"".join(source.choice(good + bad) for _ in range(6)) + source.choice(bad)

    async def caller() -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port.number, ssl=context, server_hostname="127.0.0.1" if context else None
        )
        with suppress(OSError, RuntimeError):
            writer.write(
                source.choice([b"", PREFACE + settings(), PREFACE + settings() + request(1, bytes(16))]) + wrong()
            )
            if source.random() < 0.5:
                await asyncio.wait_for(reader.read(), 5.0)
        reset(writer)

    async def answerer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, RuntimeError):
            answer = settings() + headers(hpack.Encoder().encode(OK), 1, "END_HEADERS")
            writer.write(source.choice([b"", answer, answer + data(message(bytes(20)))]) + wrong())
            if source.random() < 0.5:
                await asyncio.wait_for(reader.read(), 5.0)
        reset(writer)

    async def asker(number: int) -> None:
        end = StateReader(
            authority="a", context=context, metadata=tuple, max_message_bytes=MIB, on_change=lambda _reader: None
        )
        with suppress(OSError):
            await asyncio.get_running_loop().create_connection(
                lambda: end, "127.0.0.1", number, ssl=context, server_hostname="127.0.0.1" if context else None
            )
            while await asyncio.wait_for(end.read(), 5.0) is not None:
                pass
            end.go_on()
            assert end.is_over
        end.abort()

    server = await asyncio.start_server(answerer, "127.0.0.1", 0, ssl=tls)
    for _ in range(10):
        await asyncio.gather(
            *(caller() for _ in range(4)), *(asker(server.sockets[0].getsockname()[1]) for _ in range(4))
        )
    await until(lambda: not port._connections)
    assert not port._waiting
    server.close()
    await port.close()


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", LOOPS)
def test_garbage_on_real_sockets_ends_their_connections_alone(loop: str, is_secure: bool, pki: Pki):
    tls = server_context(pki.tls("role", "127.0.0.1"), HTTP2).get() if is_secure else None
    without_leaks(partial(_garbage, 5, tls, pki.caller().tls_context() if is_secure else None), LOOPS[loop])


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if getattr(entry, "reason", "") == "STATE_PORT_UNUSABLE"]


class Impostor:
    """Something else at the address of a state port."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self._answer is not None:
            writer.write(self._answer)
        elif self._answer is None:
            await reader.read()
        writer.close()


GREETINGS = {
    "closes at once": b"",
    "says nothing": None,
    "HTTP/1": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "TLS alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "leaves": settings() + GoAwayFrame(error_code=11).serialize(),
    "refuses the call": settings() + raw(0x3, 1, b"\0\0\0\x07"),
    "an error of a proxy": settings()
    + headers(hpack.Encoder().encode([(":status", "503")]), 1, "END_HEADERS", "END_STREAM"),
    "no window": settings(INITIAL_WINDOW_SIZE=0) + headers(hpack.Encoder().encode(OK), 1, "END_HEADERS"),
}


@pytest.mark.parametrize("greeting", GREETINGS)
async def test_what_is_no_state_port_is_left_alone_and_hand_offs_come_in_their_streams(
    greeting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(state_reader, "KEPT_S", 0.1)
    impostor = Impostor(GREETINGS[greeting])
    async with await asyncio.start_server(impostor.serve, "127.0.0.1", 0) as server, attacked() as here:
        here.port.number = server.sockets[0].getsockname()[1]
        whole = await land(here, "first")
        await until(lambda: not here.peer._readers._opening and not here.peer._readers._unused)
        for name in ("second", "third"):
            assert await land(here, name) == whole
        assert impostor.num_connections == 1 or greeting == "no window"
        assert len(lines(caplog)) == 1


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_port_without_room_is_left_alone(is_full: bool, caplog: pytest.LogCaptureFixture):
    async with attacked(max_connections=1) as here:
        others = [await _proxied(here.between._target)] if is_full else []
        await until(lambda: len(here.port._connections) == len(others))
        whole = await land(here, "first")
        await until(lambda: not here.peer._readers._opening)
        if is_full:
            await until(lambda: not here.peer._readers._unused)
        assert await land(here, "second") == whole
        assert len(lines(caplog)) == is_full
        for _, writer in others:
            writer.close()


async def test_a_balancer_that_leads_to_another_service_costs_one_connection(caplog: pytest.LogCaptureFixture):
    """The port is that of another prefill service, which takes the call and never hears of its hand-off."""
    other = StatePort(access=Access(ServerSection(), None), max_connections=9)
    other.open("127.0.0.1", 0)
    async with attacked() as here:
        here.port.number = other.number
        whole = await land(here, "first")
        await a_reader_waits(here)
        for name in ("second", "third", "fourth"):
            assert await land(here, name) == whole
        await until(lambda: not other._connections)
        assert "does not know" in lines(caplog)[0]
        assert len(lines(caplog)) == 1
    await other.close()


async def test_a_firewall_that_forgets_connections_costs_one_silence(caplog: pytest.LogCaptureFixture):
    async with attacked(timeout_s=0.3) as here:
        whole = await land(here, "first")
        await a_reader_waits(here)
        assert await land(here, "second") == whole
        await a_reader_waits(here)
        here.between.is_silent = True
        assert await land(here, "third") == whole
        assert await land(here, "fourth") == whole
        # Each silence would say so.
        assert "nothing came" in lines(caplog)[0]
        assert len(lines(caplog)) == 1
        here.between.is_silent = False
        await until_idle(here.channel)


async def test_whoever_does_not_read_keeps_no_place(monkeypatch: pytest.MonkeyPatch):
    """Nobody who cannot show a token, either, may take all connections for good."""
    monkeypatch.setattr(state_port, "UNUSED_S", 0.2)
    small_buffers(monkeypatch)
    async with attacked(max_connections=3) as here:
        held = []
        for kind in ("pings", "nothing", "half a preface"):
            end = socket.create_connection(("127.0.0.1", here.between._target))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            if kind == "pings":
                end.setblocking(False)
                # The settings of the service are not read, and less than MOST_ANSWERS answers fit into the buffers.
                with suppress(BlockingIOError):
                    end.sendall(PREFACE + settings() + raw(0x6, 0, b"12345678") * 900)
            elif kind == "half a preface":
                end.sendall(PREFACE[:9])
            held.append(end)
        await until(lambda: len(here.port._connections) == 3)
        await until(lambda: not here.port._connections)
        for end in held:
            end.close()
