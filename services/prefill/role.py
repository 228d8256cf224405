"""The prefill role, put together from its configuration. Loads torch."""

from k3svc.config import Config
from k3svc.engine.build import build_prefill
from k3svc.rpc.admin import role_info
from k3svc.rpc.process import progress_log
from k3svc.rpc.server import Role, metrics_of, serve
from services.prefill.service import SERVICE, PrefillServicer


async def serve_prefill(config: Config, start: float) -> int:
    """Serves until a signal or a drain; the exit code. Raises ConfigError, CheckpointError or BackendError."""
    built = build_prefill(config, progress_log())
    try:
        await built.loaded.runner.warm_up()
        servicer = PrefillServicer(built.engine, max_context_tokens=config.cache.max_context_tokens)
        role = Role(
            info=role_info("prefill", config, built.loaded),
            engine=built.engine,
            metrics=metrics_of(built.engine),
            services={SERVICE: servicer.register},
        )
        return await serve(role, config, start=start)
    finally:
        built.loaded.runner.close()
