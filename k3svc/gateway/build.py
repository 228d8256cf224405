"""The gateway's service of a role, put together. Nothing here loads smg-grpc-proto before it is asked to."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from k3svc.config import Config
from k3svc.core.events import Finished, Load
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import ConfigError
from k3svc.gateway.rooms import Rooms
from k3svc.rpc.admin import RoleInfo
from k3svc.text.tokenizer import Tokenizer

Services = Mapping[str, Callable[[grpc.aio.Server], None]]


def require_gateway() -> None:
    """Raises ConfigError when a package is missing, which no role should find out after it has loaded a model."""
    for name in ("smg_grpc_proto", "llguidance"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"gateway.enabled needs the package {name.replace('_', '-')}: pip install 'k3svc[gateway]'",
                key="gateway.enabled",
            )


def prefill_services(rooms: Rooms, info: RoleInfo, config: Config, engine: PrefillEngine) -> Services:
    """Full service name → what registers it."""
    from k3svc.gateway.kv_events import KvEvents  # noqa: PLC0415  needs an extra
    from k3svc.gateway.protos import SERVICE  # noqa: PLC0415  an extra
    from k3svc.gateway.servicer import PrefillGateway  # noqa: PLC0415  needs it

    common, cache = _common(info, config, engine), engine.scheduler.cache
    events = None if cache is None else KvEvents(cache, config.cache.page_size, common["is_serving"])
    servicer = PrefillGateway(rooms, info.vocab_size, events, engine.flush_cache, **common)
    return {SERVICE: servicer.register}


def decode_services(
    info: RoleInfo,
    config: Config,
    engine: DecodeEngine,
    tokenizer: Tokenizer,
    observe: Callable[[Finished, float], None],
) -> Services:
    """Full service name → what registers it. `observe` takes the end of a request and its seconds."""
    from k3svc.gateway.protos import SERVICE  # noqa: PLC0415  an extra
    from k3svc.gateway.servicer import DecodeGateway  # noqa: PLC0415  needs it

    servicer = DecodeGateway(engine, observe, tokenizer, **_common(info, config, engine))
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
