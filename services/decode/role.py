"""The decode role, put together from its configuration. Loads torch."""

import dataclasses
from functools import partial

from k3svc.config import Config
from k3svc.engine.build import build_decode
from k3svc.engine.draft_protocol import DraftProfile
from k3svc.engine.observer import Observer
from k3svc.engine.speculation_build import add_speculation
from k3svc.errors import ConfigError
from k3svc.gateway.build import decode_services, require_gateway
from k3svc.obs.metrics import Metrics
from k3svc.rpc.admin import role_info
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.credentials import CallerCredentials, peer_credentials
from k3svc.rpc.discovery import Address, Discovery
from k3svc.rpc.draft_client import RemoteDrafter
from k3svc.rpc.prefill_targets import PrefillTargets
from k3svc.rpc.process import progress_log
from k3svc.rpc.server import Role, serve
from services.decode.service import SERVICE, DecodeServicer


async def serve_decode(config: Config, start: float) -> int:
    """Serves until a signal or a drain; the exit code. Raises what `run_role` reports."""
    if config.gateway.enabled:
        require_gateway()
    credentials = peer_credentials(config.tls, config.auth)
    targets = PrefillTargets(
        _prefill_services(config), partial(_peer, config, credentials), refresh_s=config.decode.refresh_s
    )
    metrics = Metrics("decode")
    built = build_decode(config, await targets.discover(), progress_log(), Observer(metrics))
    engine, loaded = built.engine, built.loaded
    drafter: RemoteDrafter | None = None

    def connect(profile: DraftProfile) -> RemoteDrafter:
        nonlocal drafter
        drafter = RemoteDrafter(
            config.draft.endpoint,
            profile=profile,
            window=config.draft.window,
            history_bytes=config.draft.history_bytes,
            max_message_bytes=config.server.max_request_bytes,
            uses_shm=config.draft.shm,
            credentials=credentials,
        )
        drafter.start()
        return drafter

    try:
        targets.start(engine.peers)
        await loaded.runner.warm_up()
        await add_speculation(config, built, connect)
        metrics.follow(lambda: dataclasses.asdict(engine.load()))
        servicer = DecodeServicer(
            engine,
            loaded.tokenizer,
            loaded.fingerprint,
            metrics,
            max_context_tokens=config.cache.max_context_tokens,
            gather_s=config.decode.gather_s,
        )
        info = role_info("decode", config, loaded)
        services = {SERVICE: servicer.register}
        if config.gateway.enabled:
            services |= decode_services(info, config, engine, loaded.tokenizer, servicer.observe)
        role = Role(info=info, engine=engine, metrics=metrics, services=services)
        return await serve(role, config, start=start)
    finally:
        loaded.runner.close()
        await targets.stop()
        if drafter is not None:
            await drafter.stop()


def _prefill_services(config: Config) -> Discovery:
    try:
        return Discovery(config.decode.prefill)
    except ConfigError as error:
        raise ConfigError(f"decode.prefill: {error.message}", key="decode.prefill") from error


def _peer(config: Config, credentials: CallerCredentials, address: Address) -> GrpcPrefillPeer:
    return GrpcPrefillPeer(
        address.target,
        timeout_s=config.decode.prefill_timeout_s,
        max_message_bytes=config.server.max_message_bytes,
        credentials=credentials,
        transport=config.transfer.transport,
        uses_state_port=config.transfer.state_port >= 0,
        options=address.channel_options(),
    )
