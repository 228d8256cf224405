"""The gRPC server of a role: what it registers, when it says that it serves, and how it ends.

start      bind, step loop, then SERVING and the ready line
serving    health follows engine.is_progressing()
drain      (SIGTERM, SIGINT, AdminService.Drain) NOT_SERVING, engine.drain(), wait for the step loop at most drain_s,
           stop the server, exit code 0; a second signal skips the waiting
broken     the step loop ended by itself: as drain, without waiting, exit code 1

Names of grpc.health.v1: "" and each service of the role are readiness, as above; "liveness" is SERVING from the start
to the end, drain included, unless the step loop has stood still for LIVENESS_S: then a restart is the cure.
"""

import asyncio
import dataclasses
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import k3svc
from k3svc.config import AuthSection, Config, ServerSection, TlsSection, is_loopback
from k3svc.core.events import Load
from k3svc.errors import ConfigError, InvalidRequest
from k3svc.obs.loop_lag import watch_loop
from k3svc.obs.metrics import Metrics
from k3svc.rpc.access import Access
from k3svc.rpc.admin import SERVICE as ADMIN_SERVICE
from k3svc.rpc.admin import AdminServicer, RoleInfo
from k3svc.rpc.credentials import server_credentials
from k3svc.rpc.interceptors import CallInterceptor
from k3svc.rpc.scrape import Endpoint
from k3svc.v1 import admin_service_pb2_grpc

LIVENESS = "liveness"
LIVENESS_S = 300.0
HEALTH_PERIOD_S = 0.25
CHANNELZ_SERVICE = "grpc.channelz.v1.Channelz"
MAX_SERVICE_NAME_CHARS = 256
MAX_METADATA_BYTES = 8192
UNREAD_FACTOR = 2
"""Calls of which no request has come yet, as a multiple of those that may run."""
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


async def serve(role: Role, config: Config, *, start: float, announce: Callable[[str], None] | None = None) -> int:
    """Serves until a signal or Drain; returns the exit code. `start`: time.monotonic() when the process started.

    `announce` gets the ready line; by default it is written to stdout. Raises ConfigError when the address is taken or
    a file of certificates or keys cannot be used.
    """
    server = RoleServer(role, config.server, tls=config.tls, auth=config.auth)
    async with _measured(role, config) as metrics_address:
        return await _serve(server, role, start, announce or _print, metrics_address)


@asynccontextmanager
async def _measured(role: Role, config: Config) -> AsyncIterator[str | None]:
    """The metrics of a role while it serves; the address of their endpoint, if there is one."""
    info, metrics = role.info, role.metrics
    metrics.build_info.labels(k3svc.__version__, info.role, info.model_name, info.device, info.fingerprint.variant).set(
        1
    )
    lag = asyncio.create_task(watch_loop(metrics.loop_lag_s.observe))
    endpoint = Endpoint(metrics.registry, config) if config.metrics.port else None
    try:
        if endpoint is not None:
            endpoint.start()
        yield None if endpoint is None else endpoint.address
    finally:
        lag.cancel()
        if endpoint is not None:
            endpoint.close()


async def _serve(
    server: "RoleServer", role: Role, start: float, announce: Callable[[str], None], metrics_address: str | None
) -> int:
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
    if metrics_address is not None:
        ready["metrics"] = metrics_address
    # A collection that walks what lives as long as the process, all of torch, keeps the loop busy for 0.1 s.
    gc.collect()
    gc.freeze()
    announce(json.dumps(ready))
    try:
        return await server.run_until_stopped()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def metrics_of(engine: Engine, role: str = "decode") -> Metrics:
    """Metrics with the load of `engine`."""
    return Metrics(role, lambda: dataclasses.asdict(engine.load()))


class RoleServer:
    """Server, step loop and health of one role. Belongs to the event loop that starts it."""

    def __init__(
        self, role: Role, config: ServerSection, *, tls: TlsSection | None = None, auth: AuthSection | None = None
    ) -> None:
        """Raises ConfigError for files that cannot be used."""
        tls, auth = tls or TlsSection(), auth or AuthSection()
        self._role = role
        self._config = config
        self._credentials = server_credentials(tls) if tls.certificate else None
        self._is_open = not (auth.keys or tls.client_ca)
        access = Access(config, Path(auth.keys) if auth.keys else None)
        self._health = _Health()
        self._health_names = ("", *role.services, ADMIN_SERVICE)
        self._drain_requested = asyncio.Event()
        self._signalled = False
        self._stop_requested = asyncio.Event()
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(role.metrics, access)],
            options=server_options(config),
            maximum_concurrent_rpcs=UNREAD_FACTOR * (config.max_streams + config.max_watches),
        )
        self._register()

    async def start(self) -> str:
        """Binds and starts the step loop; returns host:port once the engine progresses."""
        address, engine = self._bind(), self._role.engine
        await self._set_health(_NOT_SERVING)
        await self._health.set(LIVENESS, _SERVING)
        self._engine_task = asyncio.create_task(engine.run())
        await self._server.start()
        while not (engine.is_progressing() or self._engine_task.done()):  # noqa: ASYNC110  it is asked, it does not tell
            await asyncio.sleep(0.01)
        self._health_task = asyncio.create_task(self._watch_engine())
        await self._set_health(_SERVING)
        return address

    def request_drain(self) -> None:
        """A signal: the first one drains, the second one stops without waiting. Returns at once. A drain that was asked
        for over RPC is no signal, since what asks for it often sends the first one right after.
        """
        if self._signalled:
            self._stop_requested.set()
        self._signalled = True
        self._drain_requested.set()

    async def run_until_stopped(self) -> int:
        """Waits for a drain or the end of the step loop, then stops everything. Returns the exit code."""
        await _first(self._engine_task, self._drain_requested)
        is_broken = self._engine_task.done()
        log.info("stopping")
        self._health_task.cancel()
        await self._set_health(_NOT_SERVING)
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

    def _bind(self) -> str:
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        if self._is_open and not is_loopback(config.host):
            log.warning("whoever reaches %s may use this service: callers are not authenticated", config.host)
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(f"{host}:{config.port}")
            else:
                port = self._server.add_secure_port(f"{host}:{config.port}", self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"server.port: cannot bind {host}:{config.port}; the port is in use, or server.host is no address of "
                "this machine",
                key="server.port",
            ) from error
        return f"{host}:{port}"

    def _register(self) -> None:
        role = self._role
        for register in role.services.values():
            register(self._server)
        admin = AdminServicer(role.info, role.engine.load, self._drain_requested.set)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        channelz.add_channelz_servicer(self._server)
        names = (*role.services, ADMIN_SERVICE, CHANNELZ_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def _watch_engine(self) -> None:
        serving, loop = True, asyncio.get_running_loop()
        progressed = loop.time()
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            now, progresses = loop.time(), self._role.engine.is_progressing()
            if progresses is not serving:
                serving = progresses
                log.log(
                    logging.INFO if serving else logging.ERROR, "engine %s", "progresses" if serving else "is stuck"
                )
                await self._set_health(_SERVING if serving else _NOT_SERVING)
            progressed = now if progresses else progressed
            is_alive = now - progressed < LIVENESS_S
            await self._health.set(LIVENESS, _SERVING if is_alive else _NOT_SERVING)

    async def _set_health(self, status: Any) -> None:
        for name in self._health_names:
            await self._health.set(name, status)


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Health of bounded names: a stream keeps the name that it watches."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        if len(request.service) > MAX_SERVICE_NAME_CHARS:
            raise InvalidRequest("service", request.service, f"at most {MAX_SERVICE_NAME_CHARS} characters")
        await super().Watch(request, context)


def server_options(config: ServerSection) -> list[tuple[str, Any]]:
    """One server a port; idle clients may ping every 10 s; a dead client is noticed within 40 s.

    Requests are small, so no more than one of them is read ahead; what is sent is paced by the reader's window.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_concurrent_streams", config.max_connection_streams),
        # Connections are bounded, so nobody may keep one for nothing.
        ("grpc.server_handshake_timeout_ms", 20_000),
        ("grpc.max_connection_idle_ms", 600_000),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.enable_channelz", 1),
    ]


async def _first(task: "asyncio.Task[None]", event: asyncio.Event, *, timeout_s: float | None = None) -> None:
    """Waits until the task is done, the event set, or the time over."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
