"""AdminService: what a process says about itself. The same for every role."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

import k3svc
from k3svc.config import Config
from k3svc.core.events import Load
from k3svc.engine.build import LoadedModel
from k3svc.engine.ports import Fingerprint
from k3svc.rpc import codec
from k3svc.rpc.process import resident_bytes
from k3svc.v1 import admin_service_pb2, admin_service_pb2_grpc

SERVICE = "k3svc.v1.AdminService"

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True)
class RoleInfo:
    """What does not change while a process lives."""

    role: str
    fingerprint: Fingerprint
    model_name: str
    vocab_size: int
    max_context_tokens: int
    device: str
    stop_token_ids: tuple[int, ...]
    pool_bytes: int


def role_info(role: str, config: Config, loaded: LoadedModel) -> RoleInfo:
    spec = loaded.cache.spec
    return RoleInfo(
        role=role,
        fingerprint=loaded.fingerprint,
        model_name=Path(config.model.path).resolve().name,
        vocab_size=spec.vocab_size,
        max_context_tokens=min(config.cache.max_context_tokens, spec.num_pages * spec.page_size),
        device=config.model.device,
        stop_token_ids=tuple(loaded.tokenizer.stop_token_ids),
        pool_bytes=loaded.cache.nbytes,
    )


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """`drain` is called once for each Drain and returns at once."""

    def __init__(self, info: RoleInfo, load: Callable[[], Load], drain: Callable[[], None]) -> None:
        self._info = info
        self._load = load
        self._drain = drain

    async def GetModelInfo(  # noqa: N802  names of RPCs
        self, _request: admin_service_pb2.GetModelInfoRequest, _context: _Context
    ) -> admin_service_pb2.GetModelInfoResponse:
        info = self._info
        return admin_service_pb2.GetModelInfoResponse(
            role=info.role,
            version=k3svc.__version__,
            fingerprint=codec.fingerprint_to_pb(info.fingerprint),
            model_name=info.model_name,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            device=info.device,
            stop_token_ids=info.stop_token_ids,
        )

    async def GetLoad(  # noqa: N802
        self, _request: admin_service_pb2.GetLoadRequest, _context: _Context
    ) -> admin_service_pb2.GetLoadResponse:
        return codec.load_to_pb(self._load(), resident_bytes=resident_bytes(), pool_bytes=self._info.pool_bytes)

    async def Drain(  # noqa: N802
        self, _request: admin_service_pb2.DrainRequest, _context: _Context
    ) -> admin_service_pb2.DrainResponse:
        self._drain()
        return admin_service_pb2.DrainResponse()
