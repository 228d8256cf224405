"""One DraftService.Session as its caller sees it: hello and welcome, a bounded queue out, answers in, signs of life.

On one host its messages go through a Unix socket, and the gRPC stream says only how the session ends.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import grpc

from k3svc.engine.draft_protocol import DraftProfile, SessionAnswer, SessionStep
from k3svc.errors import Incompatible, K3svcError, PermissionDenied, Unauthenticated, Unavailable
from k3svc.rpc import draft_codec
from k3svc.rpc.clients import channel_options
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.local_stream import LocalListener, LocalStream
from k3svc.rpc.shm import ShmWriter
from k3svc.rpc.status import error_from_rpc
from k3svc.rpc.waiting import within
from k3svc.v1 import draft_service_pb2 as pb
from k3svc.v1 import draft_service_pb2_grpc

WELCOME_TIMEOUT_S = 10.0
PING_S = 0.5
"""A session that is silent for so long is asked for a sign of life."""
SILENCE_S = 2.0
"""After so long without one, nobody is there to propose."""
DEAD_S = 15.0
"""After so long the session is given up."""
MAX_QUEUED = 256
MAX_QUEUED_BYTES = 32 << 20
SHM_BYTES = 16 << 20
MESSAGE_MARGIN = 1 << 16
"""Bytes of a message that are not payload, at most."""

log = logging.getLogger(__name__)


class DraftConnection:
    """A session that was welcomed."""

    def __init__(self, call: Any, welcome: pb.DraftWelcome, shm: ShmWriter | None, stream: LocalStream | None) -> None:
        self.max_payload_bytes = max(1, welcome.max_message_bytes - MESSAGE_MARGIN)
        self.max_requests = welcome.max_requests
        self._call = call
        self._shm = shm
        self._stream = stream
        self._queue: deque[tuple[pb.SessionRequest, int]] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._pings = 0
        self._is_given_up = False
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._tasks = [self._loop.create_task(work) for work in (self._write(), self._watch())]

    @property
    def is_alive(self) -> bool:
        """Whether the service has given a sign of life lately."""
        return self._loop.time() - self._heard < SILENCE_S

    def send(self, step: SessionStep) -> bool:
        """Queues a message; the data of features is copied. False: there is no room, and it is dropped."""
        size = MESSAGE_MARGIN // 16 + sum(piece.data.nbytes for piece in step.features)
        num_bytes = self._queued_bytes if self._stream is None else self._stream.num_unsent
        if len(self._queue) >= MAX_QUEUED or num_bytes + size > MAX_QUEUED_BYTES:
            return False
        self._put(self._encode(step), size)
        return True

    async def answers(self) -> AsyncGenerator[SessionAnswer, None]:
        """Until the session ends. Raises K3svcError."""
        try:
            if self._stream is not None:
                async for data in self._stream:
                    yield self._decode(draft_codec.response_from_bytes(data))
            while (message := await self._call.read()) is not grpc.aio.EOF:
                yield self._decode(message)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            # A call that `_watch` has given up says so by a cancellation, which is not one of this task.
            if self._is_given_up:
                raise Unavailable(f"no sign of life for {DEAD_S:g} s", reason="DRAFT_SILENT") from None
            raise
        raise Unavailable("the draft service ended the session", reason="DRAFT_ENDED")

    async def close(self) -> None:
        """Safe to repeat."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        if self._stream is not None:
            self._stream.close()
        if self._shm is not None:
            self._shm.close()

    def _decode(self, message: pb.SessionResponse) -> SessionAnswer:
        self._heard = self._loop.time()
        if self._shm is not None:
            self._shm.release(message.shm_read)
        return draft_codec.answer_from_pb(message)

    def _encode(self, step: SessionStep) -> pb.SessionRequest:
        if self._shm is not None and step.features:
            record = self._shm.write([piece.data for piece in step.features])
            if record is not None:
                message = draft_codec.step_to_pb(step, inline=False)
                message.features.shm.CopyFrom(
                    pb.ShmPayload(offset=record.offset, size=record.size, sequence=record.sequence)
                )
                return message
        return draft_codec.step_to_pb(step)

    def _put(self, message: pb.SessionRequest, size: int) -> None:
        if self._stream is not None:
            self._stream.send(message.SerializeToString())
            return
        self._queue.append((message, size))
        self._queued_bytes += size
        self._wake.set()

    async def _write(self) -> None:
        # The reader learns how a call ended.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._queue:
                    message, size = self._queue.popleft()
                    self._queued_bytes -= size
                    await self._call.write(message)
                self._wake.clear()
                await self._wake.wait()

    async def _watch(self) -> None:
        while self._loop.time() - self._heard < DEAD_S:
            await asyncio.sleep(PING_S)
            if self._loop.time() - self._heard >= PING_S and len(self._queue) < MAX_QUEUED:
                self._pings += 1
                self._put(pb.SessionRequest(ping=self._pings), 0)
        self._is_given_up = True
        self._call.cancel()
        if self._stream is not None:
            self._stream.close()


class DraftChannel:
    """Connects to a draft service, again and again."""

    def __init__(
        self,
        target: str,
        *,
        profile: DraftProfile,
        max_message_bytes: int,
        uses_shm: bool,
        credentials: CallerCredentials,
    ) -> None:
        self._target = target
        self._profile = profile
        self._uses_shm = uses_shm
        self._max_message_bytes = max_message_bytes
        self._credentials = credentials
        # Whoever reconnects waits as long as it means to; gRPC's own back-off would come on top.
        names = ("grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms", "grpc.min_reconnect_backoff_ms")
        self._options = [
            *(option for option in channel_options(max_message_bytes) if option[0] not in names),
            *((name, 100) for name in names),
        ]
        self._channel: grpc.aio.Channel | None = None

    async def connect(self) -> DraftConnection:
        """Raises Incompatible when the two sides differ, and Unavailable for all else."""
        await self.close()
        self._channel = self._credentials.open_channel(self._target, self._options)
        shm = _new_shm() if self._uses_shm else None
        listener = self._listen() if self._uses_shm else None
        stream = None
        call = draft_service_pb2_grpc.DraftServiceStub(self._channel).Session(metadata=self._credentials.metadata())
        try:
            welcome = await within(WELCOME_TIMEOUT_S, self._greet(call, shm, listener))
            if listener is not None and welcome.uses_socket:
                stream = await listener.accept()
        except BaseException as error:
            call.cancel()
            if shm is not None:
                shm.close()
            if isinstance(error, asyncio.TimeoutError):
                raise Unavailable(f"no welcome within {WELCOME_TIMEOUT_S:g} s", reason="DRAFT_SILENT") from error
            raise
        finally:
            if listener is not None:
                listener.close()
        if shm is not None:
            shm.unlink()
            if not welcome.uses_shm:
                shm.close()
                shm = None
        return DraftConnection(call, welcome, shm, stream)

    async def close(self) -> None:
        """Cancels what runs. Safe to repeat."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _listen(self) -> LocalListener | None:
        try:
            return LocalListener(self._max_message_bytes)
        except OSError as error:
            log.info("no Unix sockets here: %s", error)
            return None

    async def _greet(self, call: Any, shm: ShmWriter | None, listener: LocalListener | None) -> pb.DraftWelcome:
        hello = pb.DraftHello(profile=draft_codec.profile_to_pb(self._profile))
        if shm is not None:
            hello.shm_name, hello.shm_token = shm.name, shm.token
        if listener is not None:
            hello.socket_name, hello.socket_token = listener.name, listener.token
        try:
            await call.write(pb.SessionRequest(hello=hello))
            first = await call.read()
        except grpc.aio.AioRpcError as error:
            raise _as_caller(error_from_rpc(error)) from error
        except asyncio.InvalidStateError as error:
            raise Unavailable("the draft service ended the session", reason="DRAFT_ENDED") from error
        if first is grpc.aio.EOF or not first.HasField("welcome"):
            raise Unavailable("the draft service sent no welcome", reason="DRAFT_ENDED")
        draft_codec.profile_from_pb(first.welcome.profile).check(self._profile)
        welcome: pb.DraftWelcome = first.welcome
        return welcome


def _as_caller(error: K3svcError) -> K3svcError:
    """Nobody's request has failed: what is no mismatch may pass."""
    if isinstance(error, Incompatible | Unavailable):
        return error
    if isinstance(error, Unauthenticated | PermissionDenied):
        return Unavailable(f"the draft service refuses this service: {error.message}", reason="DRAFT_REFUSED")
    return Unavailable(error.message, reason=error.reason)


def _new_shm() -> ShmWriter | None:
    try:
        return ShmWriter(SHM_BYTES)
    except OSError as error:
        log.info("no shared memory here: %s", error)
        return None
