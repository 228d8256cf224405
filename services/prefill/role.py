"""The prefill role, put together from its configuration. Loads torch."""

import dataclasses
from pathlib import Path

from k3svc.config import Config
from k3svc.engine.build import LoadedModel, build_prefill
from k3svc.engine.draft_build import profile_of
from k3svc.engine.observer import Observer
from k3svc.gateway.build import prefill_services, require_gateway
from k3svc.gateway.rooms import Rooms
from k3svc.obs.metrics import Metrics
from k3svc.rpc.access import Access
from k3svc.rpc.admin import role_info
from k3svc.rpc.credentials import HTTP2, peer_credentials, server_context
from k3svc.rpc.draft_push import ContextPusher
from k3svc.rpc.process import progress_log
from k3svc.rpc.server import Role, serve
from k3svc.rpc.state_port import StatePort
from services.prefill.service import SERVICE, PrefillServicer


async def serve_prefill(config: Config, start: float) -> int:
    """Serves until a signal or a drain; the exit code. Raises what `run_role` reports."""
    if config.gateway.enabled:
        require_gateway()
    metrics = Metrics("prefill")
    built = build_prefill(config, progress_log(), Observer(metrics))
    engine = built.engine
    pusher = _pusher(config, built.loaded, metrics) if config.draft.endpoint else None
    engine.features = pusher
    state_port: StatePort | None = None
    try:
        await built.loaded.runner.warm_up()
        metrics.follow(lambda: dataclasses.asdict(engine.load()))
        rooms = Rooms(timeout_s=config.gateway.room_timeout_s) if config.gateway.enabled else None
        state_port = _state_port(config) if config.transfer.state_port >= 0 else None
        servicer = PrefillServicer(
            engine,
            max_context_tokens=config.cache.max_context_tokens,
            metrics=metrics,
            rooms=rooms,
            uses_shm=config.transfer.transport != "grpc",
            state_port=state_port,
        )
        info = role_info("prefill", config, built.loaded)
        services = {SERVICE: servicer.register}
        if rooms is not None:
            services |= prefill_services(rooms, info, config, engine)
        role = Role(info=info, engine=engine, metrics=metrics, services=services)
        return await serve(role, config, start=start)
    finally:
        if state_port is not None:
            await state_port.close()
        built.loaded.runner.close()
        if pusher is not None:
            await pusher.stop()


def _state_port(config: Config) -> StatePort:
    """Raises ConfigError for an address that cannot be bound."""
    keys = Path(config.auth.keys) if config.auth.keys else None
    port = StatePort(
        access=Access(config.server, keys),
        max_connections=config.server.max_connections,
        tls=server_context(config.tls, HTTP2).get if config.tls.certificate else None,
    )
    port.open(config.server.host, config.transfer.state_port)
    return port


def _pusher(config: Config, loaded: LoadedModel, metrics: Metrics) -> ContextPusher:
    profile = profile_of(config, loaded)
    return ContextPusher(
        config.draft.endpoint,
        profile=profile,
        window=min(profile.window or config.draft.window, config.draft.window),
        max_message_bytes=config.server.max_request_bytes,
        credentials=peer_credentials(config.tls, config.auth),
        on_end=lambda outcome: metrics.context_pushes.labels(outcome).inc(),
    )
