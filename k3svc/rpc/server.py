"""The gRPC server of a role: what it registers, when it says that it serves, and how it ends.

start      bind, step loop, then SERVING and the ready line
serving    health follows engine.is_progressing()
drain      (SIGTERM, SIGINT, AdminService.Drain) NOT_SERVING, engine.drain(), wait for the step loop at most drain_s,
           stop the server, exit code 0; a second signal skips the waiting
broken     the step loop ended by itself: as drain, without waiting, exit code 1
"""

import asyncio
import dataclasses
import ipaddress
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from k3svc.config import ServerSection
from k3svc.core.events import Load
from k3svc.errors import ConfigError
from k3svc.obs.metrics import Metrics
from k3svc.rpc.admin import SERVICE as ADMIN_SERVICE
from k3svc.rpc.admin import AdminServicer, RoleInfo
from k3svc.rpc.interceptors import CallInterceptor
from k3svc.v1 import admin_service_pb2_grpc

HEALTH_PERIOD_S = 0.25
GRACE_S = 2.0
"""Time for the last messages of streams after the step loop has ended."""
EXIT_BROKEN = 1

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What a server needs of an engine, whatever its role."""

    async def run(self) -> None: ...
    def drain(self) -> None: ...
    def load(self) -> Load: ...
    def is_progressing(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Role:
    """One role to serve. `services` maps full service names to what registers their servicers."""

    info: RoleInfo
    engine: Engine
    metrics: Metrics
    services: Mapping[str, Callable[[grpc.aio.Server], None]]


async def serve(
    role: Role, config: ServerSection, *, start: float, announce: Callable[[str], None] | None = None
) -> int:
    """Serves until a signal or Drain; returns the exit code. `start`: time.monotonic() when the process started.

    `announce` gets the ready line; by default it is written to stdout. Raises ConfigError when the address is taken.
    """
    server = RoleServer(role, config)
    address = await server.start()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_drain)
    ready = {
        "event": "ready",
        "role": role.info.role,
        "address": address,
        "device": role.info.device,
        "start_s": round(time.monotonic() - start, 3),
    }
    (announce or _print)(json.dumps(ready))
    try:
        return await server.run_until_stopped()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def metrics_of(engine: Engine) -> Metrics:
    """Metrics with the load of `engine`."""
    return Metrics(lambda: dataclasses.asdict(engine.load()))


class RoleServer:
    """Server, step loop and health of one role. Belongs to the event loop that starts it."""

    def __init__(self, role: Role, config: ServerSection) -> None:
        self._role = role
        self._config = config
        self._health = health.aio.HealthServicer()
        self._health_names = ("", *role.services, ADMIN_SERVICE)
        self._drain_requested = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(role.metrics)], options=server_options(config.max_message_bytes)
        )
        self._register()

    async def start(self) -> str:
        """Binds and starts the step loop; returns host:port once the engine progresses."""
        address, engine = _bind(self._server, self._config), self._role.engine
        await self._set_health(_NOT_SERVING)
        self._engine_task = asyncio.create_task(engine.run())
        await self._server.start()
        while not (engine.is_progressing() or self._engine_task.done()):  # noqa: ASYNC110  it is asked, it does not tell
            await asyncio.sleep(0.01)
        self._health_task = asyncio.create_task(self._watch_engine())
        await self._set_health(_SERVING)
        return address

    def request_drain(self) -> None:
        """The first call drains, the second one stops without waiting. Returns at once."""
        if self._drain_requested.is_set():
            self._stop_requested.set()
        self._drain_requested.set()

    async def run_until_stopped(self) -> int:
        """Waits for a drain or the end of the step loop, then stops everything. Returns the exit code."""
        await _first(self._engine_task, self._drain_requested)
        is_broken = self._engine_task.done()
        log.info("stopping")
        self._health_task.cancel()
        await self._health.enter_graceful_shutdown()
        self._role.engine.drain()
        await _first(self._engine_task, self._stop_requested, timeout_s=self._config.drain_s)
        if not self._engine_task.done():
            log.warning("requests are still running; they are cancelled")
            self._engine_task.cancel()
        await asyncio.wait({self._engine_task})
        await self._server.stop(0 if self._stop_requested.is_set() else GRACE_S)
        error = None if self._engine_task.cancelled() else self._engine_task.exception()
        if is_broken or error is not None:
            log.error("the step loop ended by itself", exc_info=error)
            return EXIT_BROKEN
        log.info("stopped")
        return 0

    def _register(self) -> None:
        role = self._role
        for register in role.services.values():
            register(self._server)
        admin = AdminServicer(role.info, role.engine.load, self._drain_requested.set)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        channelz.add_channelz_servicer(self._server)
        names = (*role.services, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def _watch_engine(self) -> None:
        serving = True
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            if self._role.engine.is_progressing() is not serving:
                serving = not serving
                log.log(
                    logging.INFO if serving else logging.ERROR, "engine %s", "progresses" if serving else "is stuck"
                )
                await self._set_health(_SERVING if serving else _NOT_SERVING)

    async def _set_health(self, status: Any) -> None:
        for name in self._health_names:
            await self._health.set(name, status)


def server_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """One server a port; idle clients may ping every 10 s; a dead client is noticed within 40 s."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.http2.lookahead_bytes", 64 << 20),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.enable_channelz", 1),
    ]


def _bind(server: grpc.aio.Server, config: ServerSection) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    if not _is_loopback(config.host):
        log.warning("%s is not a loopback address: there is neither TLS nor authentication yet", config.host)
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError as error:
        raise ConfigError(
            f"server.port: cannot bind {host}:{config.port}; the port is in use, or server.host is no address of "
            "this machine",
            key="server.port",
        ) from error
    return f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _first(task: "asyncio.Task[None]", event: asyncio.Event, *, timeout_s: float | None = None) -> None:
    """Waits until the task is done, the event set, or the time over."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
