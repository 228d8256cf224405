"""The RPC layer on real sockets: both engines over a fake model whose tokens depend on every byte of state."""

import asyncio
import contextlib
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import k3svc
from k3svc.config import ServerSection
from k3svc.core.events import Load
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.errors import (
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    EngineFault,
    Incompatible,
    InvalidRequest,
    K3svcError,
    ResourceExhausted,
    Superseded,
    TransferError,
    Unavailable,
)
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.frames import decode_event, encode_event
from k3svc.rpc.server import Role, RoleServer, metrics_of
from k3svc.rpc.status import error_from_rpc
from k3svc.testing.fakes import VOCAB, expected_tokens
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest
from k3svc.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    types_pb2,
)
from services.prefill.service import SERVICE as PREFILL_SERVICE
from tests.e2e.rpc_stack import FINGERPRINT, MIB, NANO, prefill_role, role_of, served, stack

PROMPT = tuple(range(3, 60))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


def generate(channel: grpc.aio.Channel, *, timeout: float | None = None, **fields: Any) -> Any:
    """A call of Generate; by default greedy seeds and ids only."""
    values: dict[str, Any] = {
        "request_id": "r1",
        "tokens": types_pb2.TokenIds(ids=PROMPT),
        "sampling": types_pb2.SamplingParams(seed=5),
        "stop": types_pb2.StopParams(max_tokens=12),
        **fields,
    }
    stub: Any = decode_service_pb2_grpc.DecodeServiceStub(channel)
    return stub.Generate(decode_service_pb2.GenerateRequest(**values), timeout=timeout)


async def failure_of(call: Any) -> K3svcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_from_rpc(caught.value)


async def rest_of(call: Any) -> list[Any]:
    """The messages that follow those that were read one by one."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def load_of(channel: grpc.aio.Channel) -> Any:
    stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
    return await stub.GetLoad(admin_service_pb2.GetLoadRequest())


async def until_idle(*channels: grpc.aio.Channel) -> None:
    """Asks until nothing is held; the test's timeout ends it otherwise."""
    for channel in channels:
        load = await load_of(channel)
        while (load.free_pages, load.free_slots, load.running) != (load.total_pages, load.total_slots, 0):
            load = await load_of(channel)


def health_watch(channel: grpc.aio.Channel, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service))


async def test_a_request_streams_through_both_services(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        messages = [message async for message in generate(here.decode.channel)]
        started, finished = messages[0].started, messages[-1].finished
        assert (started.request_id, started.seed, tuple(started.prompt.ids)) == ("r1", 5, PROMPT)
        assert started.fingerprint.model == "m"
        deltas = [message.delta for message in messages[1:-1]]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected_tokens(PROMPT, 12, seed=5)
        assert "".join(delta.text for delta in deltas) == tokenizer.decode(tokens)
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [types_pb2.FINISH_REASON_LENGTH]
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(PROMPT), 12)
        load = await load_of(here.prefill.channel)
        assert finished.timings.handoff_bytes == load.handoff_bytes > 0
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_many_streams_at_once_and_several_samples(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:

        async def tokens_of(index: int) -> dict[int, list[int]]:
            call = generate(
                here.decode.channel,
                request_id=f"r{index}",
                tokens=types_pb2.TokenIds(ids=PROMPT[: 5 + 7 * index]),
                sampling=types_pb2.SamplingParams(seed=index, n=2),
                skip_text=True,
            )
            tokens: dict[int, list[int]] = {0: [], 1: []}
            async for message in call:
                tokens[message.delta.index] += message.delta.token_ids
            return tokens

        for index, tokens in enumerate(await asyncio.gather(*map(tokens_of, range(4)))):
            prompt = PROMPT[: 5 + 7 * index]
            assert tokens == {i: expected_tokens(prompt, 12, seed=index, index=i) for i in (0, 1)}
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_cancelling_a_call_frees_pages_and_slots(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        call = generate(here.decode.channel, stop=types_pb2.StopParams(max_tokens=300))
        while not (await call.read()).HasField("delta"):
            pass
        call.cancel()
        await until_idle(here.decode.channel, here.prefill.channel)
        assert dict((await load_of(here.decode.channel)).outcomes)["cancelled"] == 1


async def test_cancelling_during_the_hand_off_frees_both_sides(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        here.prefill_runner.gate.clear()
        call = generate(here.decode.channel)
        assert (await call.read()).HasField("started")
        await here.prefill_runner.waiting.wait()
        call.cancel()
        here.prefill_runner.gate.set()
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_a_deadline_ends_the_request_everywhere(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        here.decode_runner.gate.clear()
        error = await failure_of(generate(here.decode.channel, timeout=0.3))
        assert isinstance(error, DeadlineExceeded)
        here.decode_runner.gate.set()
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_the_deadline_of_a_call_reaches_the_engine(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        submit, deadlines = here.decode_engine.submit, []

        def recording(*values: Any, deadline: float | None) -> Any:
            deadlines.append(deadline)
            return submit(*values, deadline=deadline)

        here.decode_engine.submit = recording  # type: ignore[assignment, method-assign]
        now = time.monotonic()
        for request_id, timeout in (("a", 1000.0), ("b", None)):
            async for _ in generate(here.decode.channel, request_id=request_id, timeout=timeout):
                pass
        assert deadlines[0] == pytest.approx(now + 1000.0, abs=10.0)
        assert deadlines[1] is None


async def test_abort_closes_the_stream_with_its_reason(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        stub: Any = decode_service_pb2_grpc.DecodeServiceStub(here.decode.channel)
        here.decode_runner.gate.clear()
        call = generate(here.decode.channel)
        assert (await call.read()).HasField("started")
        await here.decode_runner.waiting.wait()
        assert (await stub.Abort(decode_service_pb2.AbortRequest(request_id="r1"))).was_live
        messages = await rest_of(call)
        here.decode_runner.gate.set()
        assert messages[0].delta.finish_reason == types_pb2.FINISH_REASON_ABORT
        assert messages[-1].HasField("finished")
        assert not (await stub.Abort(decode_service_pb2.AbortRequest(request_id="r1"))).was_live


async def test_errors_arrive_with_their_details(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        channel = here.decode.channel
        error = await failure_of(generate(channel, sampling=types_pb2.SamplingParams(top_p=3.5)))
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.metadata["allowed"]) == ("sampling.top_p", "a number in (0, 1]")
        assert error.metadata["request_id"] == "r1"
        error = await failure_of(generate(channel, tokens=types_pb2.TokenIds(ids=[1, VOCAB])))
        assert isinstance(error, InvalidRequest)
        assert error.field == "prompt[1]"
        error = await failure_of(generate(channel, request_id="", tokens=types_pb2.TokenIds()))
        assert isinstance(error, InvalidRequest)
        assert len(error.metadata["request_id"]) == 32

        here.decode_runner.gate.clear()
        live = generate(channel)
        assert (await live.read()).HasField("started")
        assert isinstance(await failure_of(generate(channel)), AlreadyExists)
        here.decode_runner.gate.set()
        assert (await rest_of(live))[-1].HasField("finished")


async def test_a_full_queue_says_when_to_come_back(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        here.prefill_runner.gate.clear()
        calls = [generate(here.decode.channel, request_id=f"r{index}") for index in range(20)]
        first = [asyncio.ensure_future(call.read()) for call in calls]
        done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error_from_rpc(task.exception()) for task in done if task.exception()]
        assert errors
        for error in errors:
            assert isinstance(error, ResourceExhausted)
            assert error.retry_after_s > 0
        here.prefill_runner.gate.set()
        for call in calls:
            call.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_a_bug_is_internal_without_internals(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    async with stack(tokenizer) as here:

        def broken(*_: object, **__: object) -> Any:
            raise ZeroDivisionError("secret")

        here.decode_engine.submit = broken  # type: ignore[method-assign]
        error = await failure_of(generate(here.decode.channel))
    assert isinstance(error, EngineFault)
    assert error.reason == "UNEXPECTED"
    assert "secret" not in str(error)
    (record,) = [record for record in caplog.records if record.name == "k3svc.rpc.interceptors"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_what_is_counted(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        async for _ in generate(here.decode.channel):
            pass
        await failure_of(generate(here.decode.channel, sampling=types_pb2.SamplingParams(top_p=3.5)))
        registry = here.decode_role.metrics.registry

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, labels)

        call = {"grpc_service": "k3svc.v1.DecodeService", "grpc_method": "Generate"}
        assert value("grpc_server_handled_total", **call, grpc_code="OK") == 1
        assert value("grpc_server_handled_total", **call, grpc_code="INVALID_ARGUMENT") == 1
        assert value("k3svc_generation_tokens_total") == 12
        assert value("k3svc_prompt_tokens_total") == len(PROMPT)
        assert value("k3svc_time_to_first_token_seconds_count") == 1
        assert value("k3svc_e2e_request_latency_seconds_count") == 1
        assert value("k3svc_requests_total", outcome="finished") == 1
        assert value("k3svc_slots_free") == 8


async def test_admin_reflection_and_channelz(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        admin: Any = admin_service_pb2_grpc.AdminServiceStub(here.prefill.channel)
        answer = await admin.GetModelInfo(admin_service_pb2.GetModelInfoRequest())
        assert (answer.role, answer.version, answer.device) == ("prefill", k3svc.__version__, "none")
        assert (answer.vocab_size, answer.max_context_tokens, list(answer.stop_token_ids)) == (VOCAB, 400, [7, 9])
        assert answer.fingerprint.wire_layout == FINGERPRINT.wire_layout
        load = await load_of(here.prefill.channel)
        assert load.resident_bytes > 10 * MIB
        assert load.pool_bytes == 12345

        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(here.decode.channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"k3svc.v1.DecodeService", "k3svc.v1.AdminService", "grpc.health.v1.Health"} <= names
        channelz: Any = channelz_pb2_grpc.ChannelzStub(here.decode.channel)
        assert (await channelz.GetServers(channelz_pb2.GetServersRequest())).server


async def test_drain_lets_running_requests_finish(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        watch = health_watch(here.decode.channel, "k3svc.v1.DecodeService")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        here.decode_runner.gate.clear()
        call = generate(here.decode.channel)
        assert (await call.read()).HasField("started")
        admin: Any = admin_service_pb2_grpc.AdminServiceStub(here.decode.channel)
        await admin.Drain(admin_service_pb2.DrainRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await load_of(here.decode.channel)).draining
        error = await failure_of(generate(here.decode.channel, request_id="late"))
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        here.decode_runner.gate.set()
        tokens = [token for message in await rest_of(call) for token in message.delta.token_ids]
        assert tokens == expected_tokens(PROMPT, 12, seed=5)
        watch.cancel()


async def test_a_second_request_to_stop_does_not_wait(tokenizer: Tokenizer):
    role, _, runner, _ = prefill_role()
    runner.gate.clear()
    server = RoleServer(role, ServerSection(drain_s=600.0))
    address = await server.start()
    ended = asyncio.create_task(server.run_until_stopped())
    peer = GrpcPrefillPeer(address, timeout_s=60.0, max_message_bytes=MIB)
    events = peer.prefill(call_of("r"))
    assert isinstance(await events.__anext__(), StateManifest)
    server.request_drain()
    server.request_drain()
    assert await ended == 0
    with pytest.raises(K3svcError):
        await events.__anext__()
    await peer.close()


def call_of(request_id: str, **changes: Any) -> PrefillCall:
    values: dict[str, Any] = {"attempt": 1, "prompt": PROMPT, "fingerprint": FINGERPRINT, **changes}
    return PrefillCall(request_id=request_id, **values)


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
        method, calls = peer._prefill, []

        def recording(request: Any) -> Any:
            calls.append(method(request))
            return calls[-1]

        peer._prefill = recording
        events = peer.prefill(call_of("r"))
        assert isinstance(await events.__anext__(), StateManifest)
        await events.aclose()
        assert calls[0].cancelled()
        runner.gate.set()
        while dict((await load_of(channel)).outcomes)["expired"] == 0:
            pass
        await until_idle(channel)


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
    async with prefill_peer(timeout_s=0.1) as (peer, _, runner, _channel):
        runner.gate.clear()
        events = peer.prefill(call_of("r"))
        assert isinstance(await events.__anext__(), StateManifest)
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


class SwitchedEngine:
    """An engine that does nothing but say whether it progresses."""

    def __init__(self) -> None:
        self.progressing = True
        self.drained = asyncio.Event()
        self.failure: Exception | None = None

    async def run(self) -> None:
        await self.drained.wait()
        if self.failure is not None:
            raise self.failure

    def drain(self) -> None:
        self.drained.set()

    def is_progressing(self) -> bool:
        return self.progressing

    def load(self) -> Load:
        figures = dict.fromkeys(Load.__dataclass_fields__, 0)
        return Load(**{**figures, "draining": False, "outcomes": {}})  # type: ignore[arg-type]


def switched_role(engine: SwitchedEngine) -> Role:
    return role_of("prefill", engine, PREFILL_SERVICE, lambda _: None)


@pytest.mark.parametrize("service", ["", PREFILL_SERVICE, "k3svc.v1.AdminService"])
async def test_health_follows_the_engine(service: str):
    engine = SwitchedEngine()
    async with served(switched_role(engine)) as here:
        watch = health_watch(here.channel, service)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        engine.progressing = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        engine.progressing = True
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize("failure", [None, MemoryError("no more")])
@pytest.mark.parametrize("draining", [False, True])
async def test_a_step_loop_that_breaks_ends_the_process(
    failure: Exception | None, draining: bool, caplog: pytest.LogCaptureFixture
):
    engine = SwitchedEngine()
    engine.failure = failure
    server = RoleServer(switched_role(engine), ServerSection())
    await server.start()
    if draining:
        server.request_drain()
    else:
        engine.drained.set()
    assert await server.run_until_stopped() == (0 if draining and failure is None else 1)
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert failure is None or failure in logged


async def test_a_step_loop_that_does_not_end_is_cut_off():
    engine = SwitchedEngine()
    engine.drain = lambda: None  # type: ignore[method-assign]
    server = RoleServer(switched_role(engine), ServerSection(drain_s=0.05))
    await server.start()
    server.request_drain()
    assert await server.run_until_stopped() == 0


async def test_a_port_in_use_names_the_setting():
    async with served(switched_role(SwitchedEngine())) as here:
        port = int(here.address.rpartition(":")[2])
        server = RoleServer(switched_role(SwitchedEngine()), ServerSection(port=port))
        with pytest.raises(ConfigError, match=r"server\.port"):
            await server.start()


async def test_only_loopback_binds_in_silence(caplog: pytest.LogCaptureFixture):
    for host, warns in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False), ("::1", False)):
        caplog.clear()
        engine = SwitchedEngine()
        server = RoleServer(switched_role(engine), ServerSection(host=host))
        address = await server.start()
        assert address.startswith("[::1]:" if host == "::1" else f"{host}:")
        server.request_drain()
        await server.run_until_stopped()
        assert ("neither TLS nor authentication" in caplog.text) is warns, host


async def test_metrics_read_the_load():
    registry = metrics_of(SwitchedEngine()).registry
    assert registry.get_sample_value("k3svc_num_requests_running") == 0


def start_python(*arguments: str) -> "subprocess.Popen[str]":
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_a_process_from_the_ready_line_to_its_exit_code():
    process = start_python("tests/e2e/rpc_stack.py")
    assert process.stdout is not None
    ready = json.loads(await asyncio.to_thread(process.stdout.readline))
    assert set(ready) == {"event", "role", "address", "device", "start_s"}
    assert (ready["event"], ready["role"], ready["device"]) == ("ready", "prefill", "none")
    assert 0 < ready["start_s"] < 60
    async with grpc.aio.insecure_channel(ready["address"]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=PREFILL_SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        second = start_python("tests/e2e/rpc_stack.py", "--set", f"server.port={ready['address'].rpartition(':')[2]}")
        output, errors = await asyncio.to_thread(second.communicate)
        assert second.returncode == 2
        assert output == ""
        assert "prefill: server.port: cannot bind" in errors
        assert "Traceback" not in errors

        process.send_signal(signal.SIGTERM)
        output, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    assert output == ""
    messages = [json.loads(line)["message"] for line in errors.splitlines() if line.startswith("{")]
    assert messages[-2:] == ["stopping", "stopped"]


async def test_what_stops_a_role_from_starting_is_one_line():
    cases = {
        ("services.draft",): "draft: this version of k3svc has no drafter; decode services run without one",
        ("services.decode",): "decode: decode.prefill: got no address",
        ("services.decode", "--set", "server.prt=1"): "did you mean server.port?",
        ("services.prefill", "--set", "model.path=nowhere"): "nowhere",
        ("services.prefill", "--set", "model.device=abacus"): "abacus",
    }
    processes = {case: start_python("-m", *case) for case in cases}
    for case, process in processes.items():
        output, errors = await asyncio.to_thread(process.communicate)
        assert process.returncode == 2, errors
        assert output == ""
        lines = [line for line in errors.splitlines() if not line.startswith("{")]
        assert len(lines) == 1, errors
        assert cases[case] in lines[0]


def test_logging_is_left_alone_by_imports():
    assert logging.getLogger("k3svc").level == logging.NOTSET
