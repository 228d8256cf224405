"""k3svc.v1.PrefillService over a PrefillEngine."""

import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import grpc

from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.errors import InvalidRequest
from k3svc.gateway.rooms import Room, Rooms
from k3svc.obs import trace
from k3svc.obs.metrics import Metrics
from k3svc.rpc import codec
from k3svc.rpc.access import tokens_in_flight
from k3svc.rpc.frames import StateRoute, encode_event, event_pieces
from k3svc.rpc.shm_ring import RememberedRings
from k3svc.rpc.state_port import StateConnection, StatePort
from k3svc.transfer import checked_copy
from k3svc.transfer.manifest import PrefillDone, StateManifest
from k3svc.transfer.outbox import FrameSink
from k3svc.v1 import prefill_service_pb2

SERVICE = "k3svc.v1.PrefillService"

_Context = grpc.aio.ServicerContext[Any, Any]


class Handoff(AsyncIterable[HandoffEvent], Protocol):
    """k3svc.engine.prefill_job.Handoff."""

    sink: FrameSink | None

    def detach(self) -> None: ...


class Engine(Protocol):
    """What the service needs of k3svc.engine.prefill.PrefillEngine."""

    def open(self, call: PrefillCall) -> Handoff: ...
    def release(self, request_id: str, attempt: int) -> bool: ...


class PrefillServicer:
    """Prefill answers with bytes (k3svc.rpc.frames), so it is registered here and not by generated code."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_context_tokens: int,
        metrics: Metrics | None = None,
        rooms: Rooms | None = None,
        uses_shm: bool = True,
        state_port: StatePort | None = None,
    ) -> None:
        """`rooms`: where prompts wait that a gateway has told this service of; None: there is no gateway. `uses_shm`:
        frames go through shared memory where decode offers some that is seen here. `state_port`: where decode may read
        hand-offs; None: in their calls alone.
        """
        self._state_port = state_port
        self._uses_shm = uses_shm
        self._rings = RememberedRings()
        checked_copy.announce()
        self._engine = engine
        self._rooms = rooms
        self._metrics = metrics
        self._max_context_tokens = max_context_tokens

    async def prefill(
        self, request: prefill_service_pb2.PrefillRequest, _context: _Context
    ) -> AsyncGenerator[bytes, None]:
        num_tokens = len(request.prompt.ids)
        codec.check_num_tokens("prompt", num_tokens, self._max_context_tokens)
        call = codec.prefill_call_from_pb(request)
        room = await self._room_of(call)
        stop = partial(self._engine.release, call.request_id, call.attempt)
        ring = self._rings.open(request.shm) if self._uses_shm else None
        reader = None
        if ring is None and self._state_port is not None and request.read_ticket:
            reader = self._state_port.take(request.read_ticket)
        route = StateRoute(port=self._state_port.number if self._state_port else 0, is_taken=reader is not None)
        with (
            nullcontext() if reader is None else reader.carrying(),
            tokens_in_flight(num_tokens),
            nullcontext() if room is None else room.pull(stop),
        ):
            handoff = self._engine.open(call)
            try:
                handoff.sink = ring
                async for event in handoff:
                    if isinstance(event, PrefillDone):
                        self._observe(event, _way(ring, reader))
                        if room is not None:
                            room.cached_tokens = event.cached_tokens
                            room.end()
                    if reader is not None and not isinstance(event, StateManifest):
                        await reader.send(event_pieces(event))
                    else:
                        yield encode_event(event, uses_shm=ring is not None, route=route)
                    if ring is not None:
                        await ring.room()
                if reader is not None:
                    reader.end()
            finally:
                handoff.detach()

    async def release(
        self, request: prefill_service_pb2.ReleaseRequest, _context: _Context
    ) -> prefill_service_pb2.ReleaseResponse:
        was_held = self._engine.release(request.request_id, request.attempt)
        return prefill_service_pb2.ReleaseResponse(was_held=was_held)

    async def _room_of(self, call: PrefillCall) -> Room | None:
        if call.room is None:
            return None
        if self._rooms is None:
            raise InvalidRequest("room", call.room, "none: gateway.enabled is false on this service")
        return await self._rooms.join(call)

    def _observe(self, done: PrefillDone, way: str) -> None:
        now = time.monotonic()
        computed = now - done.send_tail_ms / 1e3
        started = computed - done.compute_ms / 1e3
        trace.record("queue", started - done.queue_ms / 1e3, started)
        trace.record("prefill", started, computed, {"chunks": done.chunks, "cached_tokens": done.cached_tokens})
        trace.record("transfer tail", computed, now, {"frames": done.num_frames})
        if self._metrics is not None:
            self._metrics.observe_prefill(
                queue_s=done.queue_ms / 1e3,
                compute_s=done.compute_ms / 1e3,
                send_tail_s=done.send_tail_ms / 1e3,
                way=way,
            )

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Prefill": grpc.unary_stream_rpc_method_handler(
                self.prefill,
                request_deserializer=prefill_service_pb2.PrefillRequest.FromString,
                response_serializer=None,
            ),
            "Release": grpc.unary_unary_rpc_method_handler(
                self.release,
                request_deserializer=prefill_service_pb2.ReleaseRequest.FromString,
                response_serializer=prefill_service_pb2.ReleaseResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _way(ring: FrameSink | None, reader: StateConnection | None) -> str:
    """One of k3svc.obs.metrics.HANDOFF_WAYS."""
    if ring is not None:
        return "shm"
    return "stream" if reader is None else "state_port"
