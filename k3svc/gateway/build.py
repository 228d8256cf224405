"""The gateway's service of a role, put together. Nothing here loads smg-grpc-proto before it is asked to."""

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from k3svc.config import Config
from k3svc.core.events import Finished, Load
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.prefill import PrefillEngine
from k3svc.gateway.rooms import Rooms
from k3svc.rpc.admin import RoleInfo

Services = Mapping[str, Callable[[grpc.aio.Server], None]]


def require_gateway() -> None:
    """Raises ConfigError when the package is missing, which no role should find out after it has loaded a model."""
    from k3svc.gateway import protos  # noqa: F401, PLC0415  an extra


def prefill_services(rooms: Rooms, info: RoleInfo, config: Config, engine: PrefillEngine) -> Services:
    """Full service name → what registers it."""
    from k3svc.gateway.protos import SERVICE  # noqa: PLC0415  an extra
    from k3svc.gateway.servicer import PrefillGateway  # noqa: PLC0415  needs it

    servicer = PrefillGateway(rooms, info.vocab_size, **_common(info, config, engine))
    return {SERVICE: servicer.register}


def decode_services(
    info: RoleInfo, config: Config, engine: DecodeEngine, observe: Callable[[Finished, float], None]
) -> Services:
    """Full service name → what registers it. `observe` takes the end of a request and its seconds."""
    from k3svc.gateway.protos import SERVICE  # noqa: PLC0415  an extra
    from k3svc.gateway.servicer import DecodeGateway  # noqa: PLC0415  needs it

    servicer = DecodeGateway(
        engine, observe, config.decode.prefill, info.stop_token_ids, **_common(info, config, engine)
    )
    return {SERVICE: servicer.register}


def _common(info: RoleInfo, config: Config, engine: PrefillEngine | DecodeEngine) -> dict[str, Any]:
    from k3svc.gateway.about import About  # noqa: PLC0415  needs the extra

    load: Callable[[], Load] = engine.load
    return {
        "about": About(info, config, load),
        "is_serving": lambda: engine.is_progressing() and not load().draining,
        "seed": config.gateway.seed,
        "max_context_tokens": info.max_context_tokens,
    }
