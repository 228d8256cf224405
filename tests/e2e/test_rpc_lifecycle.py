"""How a role starts, tells its health, drains, breaks and ends."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3svc.config import ServerSection
from k3svc.core.events import Load
from k3svc.errors import ConfigError, K3svcError, Unavailable
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.server import LIVENESS, Role, RoleServer, metrics_of
from k3svc.transfer.manifest import PrefillDone, StateManifest
from k3svc.v1 import admin_service_pb2, admin_service_pb2_grpc
from services.prefill.service import SERVICE as PREFILL_SERVICE
from tests.e2e.rpc_stack import (
    MIB,
    call_of,
    health_watch,
    prefill_role,
    role_of,
    served,
)


async def test_a_second_request_to_stop_does_not_wait():
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


async def test_a_drain_over_rpc_is_no_signal():
    """The usual end of a container is Drain, then SIGTERM: running requests finish all the same."""
    role, _, runner, _ = prefill_role()
    runner.gate.clear()
    server = RoleServer(role, ServerSection(drain_s=600.0))
    address = await server.start()
    ended = asyncio.create_task(server.run_until_stopped())
    peer = GrpcPrefillPeer(address, timeout_s=60.0, max_message_bytes=MIB)
    events = peer.prefill(call_of("r"))
    assert isinstance(await events.__anext__(), StateManifest)
    async with grpc.aio.insecure_channel(address) as channel:
        await admin_service_pb2_grpc.AdminServiceStub(channel).Drain(admin_service_pb2.DrainRequest())
    server.request_drain()
    runner.gate.set()
    rest = [event async for event in events]
    assert isinstance(rest[-1], PrefillDone)
    await peer.release("r", 1)
    assert await ended == 0
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


async def test_liveness_ends_when_the_engine_stays_stuck(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("k3svc.rpc.server.LIVENESS_S", 0.05)
    monkeypatch.setattr("k3svc.rpc.server.HEALTH_PERIOD_S", 0.01)
    engine = SwitchedEngine()
    async with served(switched_role(engine)) as here:
        watch = health_watch(here.channel, LIVENESS)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        engine.progressing = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        engine.progressing = True
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_a_role_that_drains_is_alive_and_refuses_with_a_hint():
    role, _, runner, _ = prefill_role()
    runner.gate.clear()
    async with served(role) as here:
        peer = GrpcPrefillPeer(here.address, timeout_s=60.0, max_message_bytes=MIB)
        running = peer.prefill(call_of("r"))
        assert isinstance(await anext(running), StateManifest)
        ready, alive = (health_watch(here.channel, name) for name in ("", LIVENESS))
        for watch in (ready, alive):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        here.server.request_drain()
        assert (await ready.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Unavailable) as caught:
            await anext(peer.prefill(call_of("s")))
        assert (caught.value.reason, caught.value.retry_after_s) == ("DRAINING", 1.0)
        stub: Any = health_pb2_grpc.HealthStub(here.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        runner.gate.set()
        assert isinstance([event async for event in running][-1], PrefillDone)
        await peer.release("r", 1)
        await peer.close()


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
        assert ("callers are not authenticated" in caplog.text) is warns, host


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
        ("services.draft",): "draft: draft.path: got nothing; allowed: the directory of a draft checkpoint",
        ("services.draft", "--set", "draft.path=models/k3-nano"): "draft config: architectures",
        ("services.decode",): "decode: decode.prefill: got no address",
        ("services.decode", "--set", "server.host=0.0.0.0"): "server.insecure = true allows every address",
        ("services.prefill", "--set", "auth.keys=nowhere.toml"): "cannot read nowhere.toml",
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
