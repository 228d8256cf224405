"""k3svc.v1.DraftService over a DraftEngine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from k3svc.engine.draft import DraftEngine
from k3svc.engine.draft_peers import DraftSession
from k3svc.engine.draft_protocol import SessionStep
from k3svc.errors import InvalidRequest
from k3svc.rpc import draft_codec, local_stream
from k3svc.rpc.local_stream import LocalStream
from k3svc.rpc.shm import ShmReader, ShmRecord
from k3svc.v1 import draft_service_pb2 as pb
from k3svc.v1 import draft_service_pb2_grpc

SERVICE = "k3svc.v1.DraftService"

_Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_service_pb2_grpc.DraftServiceServicer):
    """Session and PushContext."""

    def __init__(self, engine: DraftEngine, *, max_message_bytes: int, uses_shm: bool) -> None:
        self._engine = engine
        self._max_message_bytes = max_message_bytes
        self._uses_shm = uses_shm

    async def Session(  # noqa: N802  names of RPCs
        self, requests: AsyncIterator[pb.SessionRequest], _context: _Context
    ) -> AsyncIterator[pb.SessionResponse]:
        async for first in requests:
            stream = _Stream(self._engine, first, uses_shm=self._uses_shm, max_message_bytes=self._max_message_bytes)
            break
        else:
            return
        reader: asyncio.Task[None] | None = None
        try:
            await stream.connect(first.hello)
            reader = asyncio.create_task(stream.read(requests if stream.local is None else _messages(stream.local)))
            yield pb.SessionResponse(
                welcome=pb.DraftWelcome(
                    profile=draft_codec.profile_to_pb(self._engine.profile),
                    max_requests=self._engine.max_requests,
                    context_rows=self._engine.context_rows,
                    uses_shm=stream.shm is not None,
                    max_message_bytes=self._max_message_bytes,
                    uses_socket=stream.local is not None,
                )
            )
            async for answer in stream.session:
                message = draft_codec.answer_to_pb(answer)
                message.shm_read = stream.shm_read
                message.pong, stream.ping = stream.ping, 0
                if stream.local is None:
                    yield message
                else:
                    stream.local.send(message.SerializeToString())
                    await stream.local.drain()
            # The session ends when its reader does, or when the engine says so.
            if reader.done():
                reader.result()
        finally:
            stream.close()
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def PushContext(  # noqa: N802
        self, requests: AsyncIterator[pb.PushContextRequest], _context: _Context
    ) -> pb.PushContextResponse:
        push = None
        try:
            async for request in requests:
                if push is None:
                    if not request.HasField("start"):
                        raise InvalidRequest("start", "nothing", "a start in the first message")
                    push = self._engine.push_context(draft_codec.context_start_from_pb(request.start))
                if request.payload:
                    await push.add(request.position, memoryview(request.payload))
        finally:
            if push is not None:
                push.finish()
        return pb.PushContextResponse(num_rows=0 if push is None else push.num_rows)

    def register(self, server: grpc.aio.Server) -> None:
        draft_service_pb2_grpc.add_DraftServiceServicer_to_server(self, server)


class _Stream:
    """What a session's reader and writer share."""

    def __init__(
        self, engine: DraftEngine, first: pb.SessionRequest, *, uses_shm: bool, max_message_bytes: int
    ) -> None:
        """Raises InvalidRequest, Incompatible or Unavailable."""
        if not first.HasField("hello"):
            raise InvalidRequest("hello", "nothing", "a hello in the first message")
        profile = draft_codec.profile_from_pb(first.hello.profile)
        self.session: DraftSession = engine.connect(profile)
        self.shm = _open_shm(first.hello) if uses_shm else None
        self.local: LocalStream | None = None
        """Carries the messages instead of the call."""
        self._uses_local = uses_shm
        self.shm_read = 0
        self.ping = 0
        self._row_bytes = profile.row_bytes
        self._max_message_bytes = max_message_bytes

    async def connect(self, hello: pb.DraftHello) -> None:
        """Raises InvalidRequest for a name that cannot be."""
        if self._uses_local and hello.socket_name:
            self.local = await local_stream.connect(hello.socket_name, hello.socket_token, self._max_message_bytes)

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Until the peer ends. Raises InvalidRequest for what cannot be."""
        try:
            async for request in requests:
                if request.HasField("hello"):
                    raise InvalidRequest("hello", "a second one", "a hello in the first message only")
                self.session.apply(self._step(request))
                if request.ping:
                    self.ping = request.ping
                    self.session.touch()
                await self.session.room()
        finally:
            # A turn later, when this task is done and tells the writer how it ended.
            asyncio.get_running_loop().call_soon(self.session.close)

    def close(self) -> None:
        self.session.close()
        if self.local is not None:
            self.local.close()
        if self.shm is not None:
            self.shm.close()

    def _step(self, request: pb.SessionRequest) -> SessionStep:
        """Features that are not in shared memory any more are left out, as if they had been lost on the way."""
        if not request.features.HasField("shm"):
            payload = memoryview(request.features.payload)
            return draft_codec.step_from_pb(request, payload, self._row_bytes)
        record = request.features.shm
        if self.shm is None or record.size > self._max_message_bytes:
            allowed = "nothing" if self.shm is None else f"up to {self._max_message_bytes} bytes"
            raise InvalidRequest("features.shm", f"{record.size} bytes", f"{allowed} in this session")
        self.shm_read = record.sequence
        found = self.shm.read(ShmRecord(offset=record.offset, size=record.size, sequence=record.sequence))
        if found is None:
            request.ClearField("features")
            found = memoryview(b"")
        return draft_codec.step_from_pb(request, found, self._row_bytes)


async def _messages(stream: LocalStream) -> AsyncIterator[pb.SessionRequest]:
    async for data in stream:
        yield draft_codec.request_from_bytes(data)


def _open_shm(hello: pb.DraftHello) -> ShmReader | None:
    if not hello.shm_name:
        return None
    try:
        return ShmReader(hello.shm_name, hello.shm_token)
    except OSError:
        return None
