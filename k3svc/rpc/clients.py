"""The ports of the engines over gRPC."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from k3svc.core.targets import Report
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.errors import PermissionDenied, TransferError, Unauthenticated, Unavailable
from k3svc.rpc import codec
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.frames import StateRoute, decode_event
from k3svc.rpc.probe import probe
from k3svc.rpc.shm import sweep
from k3svc.rpc.shm_ring import KeptRings, RingReader
from k3svc.rpc.state_reader import KeptReaders, StateReader
from k3svc.rpc.status import error_from_rpc, unreachable
from k3svc.transfer import checked_copy
from k3svc.transfer.manifest import PrefillDone, StateManifest
from k3svc.v1 import prefill_service_pb2

SERVICE = "k3svc.v1.PrefillService"
RELEASE_TIMEOUT_S = 5.0
OLD_CHANNEL_S = 600.0
"""Time for the hand-offs of a channel whose certificates have changed."""

APART_S = 60.0
"""How long no shared memory is offered to a service that did not see some."""
SERVER_NAME_OPTION = "grpc.ssl_target_name_override"
"""Host that the certificate of a service must have."""

log = logging.getLogger(__name__)


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """A dead peer is noticed within 40 s, a restarted one found within half a second, which is less than the attempts
    of a hand-off take together. The server allows these pings.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.http2.lookahead_bytes", 64 << 20),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]


class GrpcPrefillPeer:
    """A PrefillService at `target`, over one long-lived channel that opens with the first call."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float,
        max_message_bytes: int,
        credentials: CallerCredentials | None = None,
        transport: str = "grpc",
        uses_state_port: bool = True,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """`timeout_s`: longest silence of a stream before it counts as broken. `credentials` None: no TLS, no token.
        `transport`: auto, grpc or shm (`k3svc.config.TransferSection`). `uses_state_port`: hand-offs come by the state
        port of the service, if it has one. `options`: more options of the channel.
        """
        self.name = target
        self._transport = transport
        self._rings = KeptRings()
        self._ring_at = 0.0
        """When shared memory is offered again."""
        checked_copy.announce()
        if transport != "grpc":
            sweep()
        self._timeout_s = timeout_s
        self._credentials = credentials or CallerCredentials()
        self._opened: _Opened | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._options = [*channel_options(max_message_bytes), *options]
        self._readers = KeptReaders(
            target,
            server_name=str(dict(options).get(SERVER_NAME_OPTION, "")),
            credentials=self._credentials,
            max_message_bytes=max_message_bytes,
        )
        self._uses_state_port = uses_state_port

    async def prefill(self, call: PrefillCall) -> AsyncGenerator[HandoffEvent, None]:
        """Closing the iterator cancels the call, unless its last event was read. The errors are those of the service; a
        connection that cannot be made or breaks is Unavailable, silence is Unavailable before the first message and
        TransferError after it.
        """
        request = codec.prefill_call_to_pb(call)
        beside = await self._beside(call)
        beside.offer(request)
        stream = self._open().prefill(request, metadata=self._credentials.metadata())
        silence: Unavailable | TransferError = Unavailable(
            f"prefill service {self.name} did not answer within {self._timeout_s:g} s", reason="PREFILL_SILENT"
        )
        is_complete = False
        try:
            while (message := await self._next(stream, beside, silence)) is not None:
                event = decode_event(message, beside.ring, beside.route)
                self._follow(event, beside)
                is_complete = isinstance(event, PrefillDone)
                yield event
                beside.make_room()
                silence = TransferError(
                    f"prefill service {self.name} fell silent for {self._timeout_s:g} s", reason="HANDOFF_SILENT"
                )
        except grpc.aio.AioRpcError as error:
            if nobody := unreachable(error, f"prefill service {self.name}"):
                raise Unavailable(nobody, reason="PREFILL_UNREACHABLE") from error
            raised = error_from_rpc(error)
            if isinstance(raised, Unauthenticated | PermissionDenied):
                # The caller of this service has done nothing wrong.
                log.warning("%s refuses this service: %s", self.name, raised)
                raise Unavailable(
                    f"prefill service {self.name} refuses this service", reason="PREFILL_REFUSED"
                ) from error
            raise raised from error
        finally:
            if is_complete:
                self._close_later(self._end(stream))
                self._keep(beside)
            else:
                stream.cancel()
                self._give_up(beside)

    async def _beside(self, call: PrefillCall) -> "_Beside":
        ring = await self._new_ring(call.state_bytes)
        return _Beside(ring=ring, reader=self._readers.take() if ring is None and call.state_bytes else None)

    def _follow(self, event: HandoffEvent, beside: "_Beside") -> None:
        is_fresh = beside.ring is not None and beside.ring.is_named
        if beside.ring is not None:
            beside.ring.unlink()
        if not isinstance(event, StateManifest):
            return
        is_shared = beside.ring is not None and beside.ring.is_shared
        if is_fresh and not is_shared:
            # An older ring may have been forgotten; a new one can only be out of sight.
            self._ring_at = asyncio.get_running_loop().time() + APART_S
        if self._transport == "shm" and not is_shared:
            raise Unavailable(
                f"transfer.transport = shm, but prefill service {self.name} does not see the shared memory of this one",
                reason="NO_SHM",
            )
        if self._uses_state_port and not is_shared and beside.reader is None:
            self._readers.learn(beside.route.port)

    def _keep(self, beside: "_Beside") -> None:
        """What a complete hand-off has used serves the next one."""
        ring, reader = beside.ring, beside.reader
        if ring is not None and ring.is_shared:
            ring.make_room()
            self._rings.give_back(ring)
        elif ring is not None:
            self._lose_rings(ring)
        if reader is not None:
            self._readers.give_back(reader, was_used=beside.route.is_taken)

    def _give_up(self, beside: "_Beside") -> None:
        if beside.ring is not None:
            self._lose_rings(beside.ring)
        if beside.reader is not None:
            beside.reader.abort()

    def _lose_rings(self, ring: RingReader) -> None:
        ring.give_up()
        # A service that broke off may be another process by now, which knows none of them.
        self._rings.close()

    async def _new_ring(self, num_bytes: int) -> RingReader | None:
        is_apart = self._transport == "auto" and asyncio.get_running_loop().time() < self._ring_at
        if self._transport == "grpc" or num_bytes == 0 or is_apart:
            return None
        try:
            return await self._rings.take(num_bytes)
        except OSError as error:
            if self._transport == "shm":
                raise Unavailable(f"transfer.transport = shm, but {error}", reason="NO_SHM") from error
            log.debug("no shared memory here: %s", error)
            return None

    async def release(self, request_id: str, attempt: int) -> None:
        """Never raises: a state that is not released ends with its lease."""
        request = prefill_service_pb2.ReleaseRequest(request_id=request_id, attempt=attempt)
        try:
            metadata = self._credentials.metadata()
            await self._open().release(request, timeout=RELEASE_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            log.info("%s did not release %s: %s", self.name, request_id, error.code().name)

    async def report(self, timeout_s: float) -> Report | None:
        """How the service says it is; None: it does not answer."""
        metadata = self._credentials.metadata()
        return await probe(self._open().channel, SERVICE, metadata=metadata, timeout_s=timeout_s)

    async def close(self) -> None:
        """Closes the channels and cancels their calls."""
        closing = [*self._closing]
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        self._rings.close()
        self._readers.close()
        if self._opened is not None:
            await self._opened.channel.close()

    def _open(self) -> "_Opened":
        """The channel, a new one when certificates have changed: the calls of the old one come to their end on it.

        Channels belong to the event loop that is running when they are made.
        """
        wanted = self._credentials.channel_credentials()
        if self._opened is None or self._opened.credentials is not wanted:
            if self._opened is not None:
                self._close_later(self._opened.channel.close(grace=OLD_CHANNEL_S))
            channel = self._credentials.open_channel(self.name, self._options)
            self._opened = _Opened(
                credentials=wanted,
                channel=channel,
                prefill=channel.unary_stream(
                    "/k3svc.v1.PrefillService/Prefill",
                    request_serializer=prefill_service_pb2.PrefillRequest.SerializeToString,
                    response_deserializer=None,
                ),
                release=channel.unary_unary(
                    "/k3svc.v1.PrefillService/Release",
                    request_serializer=prefill_service_pb2.ReleaseRequest.SerializeToString,
                    response_deserializer=prefill_service_pb2.ReleaseResponse.FromString,
                ),
            )
        return self._opened

    def _close_later(self, closing: Coroutine[Any, Any, None]) -> None:
        """Nobody waits for it but `close`, which cancels it."""
        task = asyncio.ensure_future(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, stream: Any) -> None:
        """Lets a call whose last event was read come to its end: cancelled, it would be a failure to the service."""
        try:
            await asyncio.wait({asyncio.ensure_future(stream.code())}, timeout=self._timeout_s)
        finally:
            stream.cancel()

    async def _next(
        self, stream: Any, beside: "_Beside", silence: Unavailable | TransferError
    ) -> bytes | memoryview | None:
        """The next message of a hand-off; None: there is none."""
        if beside.reader is not None and beside.route.is_taken:
            try:
                message = await self._read(beside.reader.read(), silence)
            except TransferError:
                self._readers.distrust()
                raise
            if message is not None:
                return cast("memoryview", message)
            log.info("a hand-off of %s broke off: %s", self.name, beside.reader.error)
        message = await self._read(stream.read(), silence)
        return None if message is grpc.aio.EOF else cast("bytes", message)

    async def _read(self, message: Coroutine[Any, Any, Any], silence: Unavailable | TransferError) -> Any:
        """What comes next. A task of its own, because wait_for may lose a cancellation that comes together with a
        message (bpo-37658).
        """
        reading = asyncio.ensure_future(message)
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({reading}, timeout=self._timeout_s)
            if not reading.done():
                raise silence
            if reading.cancelled():
                raise Unavailable(f"the channel to {self.name} was closed", reason="CHANNEL_CLOSED")
            return reading.result()
        finally:
            reading.cancel()


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """What a call offers for its hand-off beside its stream; at most one of the two."""

    ring: RingReader | None
    reader: StateReader | None
    route: StateRoute = field(default_factory=StateRoute)

    def offer(self, request: prefill_service_pb2.PrefillRequest) -> None:
        if self.ring is not None:
            request.shm.name, request.shm.token, request.shm.size = self.ring.name, self.ring.token, self.ring.size
        if self.reader is not None:
            request.read_ticket = self.reader.ticket

    def make_room(self) -> None:
        """An event has been read."""
        if self.ring is not None and self.ring.is_shared:
            self.ring.make_room()


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A channel, what it was made with, and its calls."""

    credentials: grpc.ChannelCredentials | None
    channel: grpc.aio.Channel
    prefill: Any
    release: Any
