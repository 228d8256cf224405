"""The prefill role, put together from its configuration. Loads torch."""

import dataclasses

from k3svc.config import Config
from k3svc.engine.build import LoadedModel, build_prefill
from k3svc.engine.draft_build import profile_of
from k3svc.engine.observer import Observer
from k3svc.gateway.build import prefill_services, require_gateway
from k3svc.gateway.rooms import Rooms
from k3svc.obs.metrics import Metrics
from k3svc.rpc.admin import role_info
from k3svc.rpc.credentials import peer_credentials
from k3svc.rpc.draft_push import ContextPusher
from k3svc.rpc.process import progress_log
from k3svc.rpc.server import Role, serve
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
    try:
        await built.loaded.runner.warm_up()
        metrics.follow(lambda: dataclasses.asdict(engine.load()))
        rooms = Rooms(timeout_s=config.gateway.room_timeout_s) if config.gateway.enabled else None
        servicer = PrefillServicer(
            engine,
            max_context_tokens=config.cache.max_context_tokens,
            metrics=metrics,
            rooms=rooms,
            uses_shm=config.transfer.transport != "grpc",
        )
        info = role_info("prefill", config, built.loaded)
        services = {SERVICE: servicer.register}
        if rooms is not None:
            services |= prefill_services(rooms, info, config, engine)
        role = Role(info=info, engine=engine, metrics=metrics, services=services)
        return await serve(role, config, start=start)
    finally:
        built.loaded.runner.close()
        if pusher is not None:
            await pusher.stop()


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
