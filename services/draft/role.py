"""The draft role, put together from its configuration. Loads torch."""

import dataclasses
from pathlib import Path

from k3svc.config import Config
from k3svc.engine.draft_build import DraftRole, build_draft
from k3svc.engine.observer import Observer
from k3svc.obs.metrics import Metrics
from k3svc.rpc.admin import RoleInfo
from k3svc.rpc.process import progress_log
from k3svc.rpc.server import Role, serve
from services.draft.service import SERVICE, DraftServicer


async def serve_draft(config: Config, start: float) -> int:
    """Serves until a signal or a drain; the exit code. Raises what `run_role` reports."""
    metrics = Metrics("draft")
    built = build_draft(config, progress_log(), Observer(metrics))
    engine = built.engine
    try:
        await built.runner.warm_up()
        metrics.follow(lambda: dataclasses.asdict(engine.load()))
        servicer = DraftServicer(engine, max_message_bytes=config.server.max_request_bytes, uses_shm=config.draft.shm)
        role = Role(info=_info(config, built), engine=engine, metrics=metrics, services={SERVICE: servicer.register})
        return await serve(role, config, start=start)
    finally:
        built.runner.close()


def _info(config: Config, built: DraftRole) -> RoleInfo:
    return RoleInfo(
        role="draft",
        fingerprint=built.fingerprint,
        model_name=Path(config.draft.path).resolve().name,
        vocab_size=built.profile.vocab_size,
        max_context_tokens=config.cache.max_context_tokens,
        device=config.model.device,
        stop_token_ids=built.stop_token_ids,
        pool_bytes=built.pool_bytes,
    )
