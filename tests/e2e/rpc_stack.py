"""Real engines over a fake model, served on real sockets; and a role as a program of its own:

python tests/e2e/rpc_stack.py --set server.port=50051
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3svc.config import AuthSection, Config, ServerSection, TlsSection
from k3svc.core.batch import DecodeBatch, ExtendBatch, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.pages import PagePool
from k3svc.core.prefill_scheduler import PrefillScheduler
from k3svc.core.prefix_cache import PrefixCache
from k3svc.core.slots import SlotPool
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.ports import Fingerprint, PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.rpc.admin import RoleInfo
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.process import run_role
from k3svc.rpc.server import Engine, Role, RoleServer, metrics_of, serve
from k3svc.testing.fakes import VOCAB, FakeCache, FakeRunner, fake_spec
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import wire_layout
from k3svc.v1 import admin_service_pb2, admin_service_pb2_grpc
from services.decode.service import SERVICE as DECODE_SERVICE
from services.decode.service import DecodeServicer
from services.prefill.service import SERVICE as PREFILL_SERVICE
from services.prefill.service import PrefillServicer

NANO = Path(__file__).parents[2] / "models" / "k3-nano"
FINGERPRINT = Fingerprint(protocol=1, model="m", tokenizer="t", wire_layout=wire_layout(fake_spec()), variant="f")
MIB = 1 << 20
PROMPT = tuple(range(3, 60))


class GatedRunner:
    """A FakeRunner whose steps wait while the gate is closed."""

    def __init__(self, cache: FakeCache) -> None:
        self._runner = FakeRunner(cache, step_s=0.0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()
        self.close_after: int | None = None
        """Steps that still pass before the gate closes by itself; None: it does not."""

    async def extend(
        self,
        batch: ExtendBatch,
        on_layer: Callable[[int], None],
        on_features: Callable[[memoryview], None] | None = None,
    ) -> StepOutput:
        await self._pass()
        return await self._runner.extend(batch, on_layer, on_features)

    async def decode(
        self,
        batch: DecodeBatch,
        on_features: Callable[[memoryview], None] | None = None,
        *,
        features_may_wait: bool = False,
    ) -> StepOutput:
        await self._pass()
        return await self._runner.decode(batch, on_features, features_may_wait=features_may_wait)

    async def _pass(self) -> None:
        if self.close_after is not None:
            self.close_after -= 1
            if self.close_after < 0:
                self.close_after = None
                self.gate.clear()
        if not self.gate.is_set():
            self.waiting.set()
        await self.gate.wait()


def info(role: str) -> RoleInfo:
    return RoleInfo(
        role=role,
        fingerprint=FINGERPRINT,
        model_name="fake",
        vocab_size=VOCAB,
        max_context_tokens=400,
        device="none",
        stop_token_ids=(7, 9),
        pool_bytes=12345,
    )


def prefill_role(
    *, lease_s: float = 30.0, frame_bytes: int = 512, snapshots: int = 0
) -> tuple[Role, PrefillEngine, GatedRunner, FakeCache]:
    """`snapshots`: states that its prefix cache keeps; 0: it has none."""
    cache = FakeCache(fake_spec(num_slots=8 + snapshots, num_pages=64))
    runner = GatedRunner(cache)
    pages, slots = PagePool(64), SlotPool(snapshots, first=9)
    engine = PrefillEngine(
        scheduler=PrefillScheduler(
            pages=pages,
            slots=SlotPool(8),
            page_size=16,
            chunk_tokens=64,
            grid=16,
            max_waiting=8,
            max_waiting_tokens=MIB,
            max_prompt_tokens=1024,
            cache=PrefixCache(pages=pages, slots=slots, page_size=16, interval=16) if snapshots else None,
        ),
        runner=runner,
        cache=cache,
        fingerprint=FINGERPRINT,
        clock=asyncio.get_running_loop().time,
        lease_s=lease_s,
        frame_bytes=frame_bytes,
    )
    return (
        role_of("prefill", engine, PREFILL_SERVICE, PrefillServicer(engine, max_context_tokens=1025).register),
        engine,
        runner,
        cache,
    )


def role_of(name: str, engine: Engine, service: str, register: Callable[[grpc.aio.Server], None]) -> Role:
    return Role(info=info(name), engine=engine, metrics=metrics_of(engine), services={service: register})


def decode_role(peers: Sequence[GrpcPrefillPeer], tokenizer: Tokenizer) -> tuple[Role, DecodeEngine, GatedRunner]:
    cache = FakeCache(fake_spec(num_slots=8, num_pages=32))
    runner = GatedRunner(cache)
    engine = DecodeEngine(
        scheduler=DecodeScheduler(
            pages=PagePool(32),
            slots=SlotPool(8),
            page_size=16,
            max_batch=8,
            max_waiting=4,
            max_transfers=4,
            max_context_tokens=400,
            stop_token_ids=(),
        ),
        runner=runner,
        cache=cache,
        peers=peers,
        tokenizer=tokenizer,
        fingerprint=FINGERPRINT,
        clock=asyncio.get_running_loop().time,
        instance="d0",
        prefill_attempts=2,
        max_samples=4,
    )
    metrics = metrics_of(engine)
    servicer = DecodeServicer(engine, tokenizer, FINGERPRINT, metrics, max_context_tokens=400)
    role = Role(info=info("decode"), engine=engine, metrics=metrics, services={DECODE_SERVICE: servicer.register})
    return role, engine, runner


@dataclass(kw_only=True)
class Served:
    """A role that serves, and a channel to it."""

    server: RoleServer
    address: str
    channel: grpc.aio.Channel


@asynccontextmanager
async def served(
    role: Role,
    *,
    drain_s: float = 20.0,
    section: ServerSection | None = None,
    tls: TlsSection | None = None,
    auth: AuthSection | None = None,
    credentials: CallerCredentials | None = None,
) -> AsyncIterator[Served]:
    """Ends the server without waiting, whatever the test left behind."""
    server = RoleServer(role, section or ServerSection(drain_s=drain_s), tls=tls, auth=auth)
    address = await server.start()
    ended = asyncio.create_task(server.run_until_stopped())
    try:
        async with (credentials or CallerCredentials()).open_channel(address, ()) as channel:
            yield Served(server=server, address=address, channel=channel)
    finally:
        server.request_drain()
        server.request_drain()
        await ended


@dataclass(kw_only=True)
class Stack:
    """One prefill and one decode service."""

    prefill: Served
    prefill_engine: PrefillEngine
    prefill_runner: GatedRunner
    decode: Served
    decode_engine: DecodeEngine
    decode_role: Role
    decode_runner: GatedRunner


@asynccontextmanager
async def stack(tokenizer: Tokenizer) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as cleanup:
        role, prefill_engine, prefill_runner, _ = prefill_role()
        prefill = await cleanup.enter_async_context(served(role))
        peer = GrpcPrefillPeer(prefill.address, timeout_s=20.0, max_message_bytes=MIB)
        cleanup.push_async_callback(peer.close)
        role, decode_engine, decode_runner = decode_role([peer], tokenizer)
        decode = await cleanup.enter_async_context(served(role))
        yield Stack(
            prefill=prefill,
            prefill_engine=prefill_engine,
            prefill_runner=prefill_runner,
            decode=decode,
            decode_engine=decode_engine,
            decode_role=role,
            decode_runner=decode_runner,
        )


def call_of(request_id: str, **changes: Any) -> PrefillCall:
    values: dict[str, Any] = {"attempt": 1, "prompt": PROMPT, "fingerprint": FINGERPRINT, **changes}
    return PrefillCall(request_id=request_id, **values)


async def load_of(channel: grpc.aio.Channel) -> Any:
    stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
    return await stub.GetLoad(admin_service_pb2.GetLoadRequest())


async def until_idle(*channels: grpc.aio.Channel) -> None:
    """Asks until nothing is held; the test's timeout ends it otherwise."""
    for channel in channels:
        load = await load_of(channel)
        while (load.free_pages, load.free_slots, load.running) != (load.total_pages, load.total_slots, 0):
            load = await load_of(channel)


def health_watch(channel: grpc.aio.Channel, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service))


async def _serve_prefill(config: Config, start: float) -> int:
    return await serve(prefill_role()[0], config, start=start)


if __name__ == "__main__":
    sys.exit(run_role("prefill", _serve_prefill))
