"""ContextPusher: the features of prompts from a prefill service to the draft service, beside the computation.

One PushContext call a prompt, with a task of its own and a bounded queue. A draft service that is slow or cannot be
reached costs a prompt its features and nothing else.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import grpc

from k3svc.engine.draft_protocol import ContextStart, DraftProfile
from k3svc.rpc import draft_codec
from k3svc.rpc.clients import channel_options
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.draft_session import MESSAGE_MARGIN
from k3svc.rpc.waiting import within
from k3svc.v1 import draft_service_pb2 as pb
from k3svc.v1 import draft_service_pb2_grpc

MAX_PUSHES = 64
"""Prompts at once; the features of others are dropped."""
MAX_QUEUED_BYTES = 64 << 20
"""Bytes that wait to be sent, over all prompts; a prompt whose rows do not fit is given up."""
TAIL_S = 10.0
"""A call may go on for so long after its prompt was computed."""
PAUSE_S = 1.0
"""After a failure nothing is pushed for so long."""

log = logging.getLogger(__name__)


class ContextPusher:
    """A FeatureSink over DraftService.PushContext."""

    def __init__(
        self,
        target: str,
        *,
        profile: DraftProfile,
        window: int,
        max_message_bytes: int,
        credentials: CallerCredentials | None = None,
        on_end: Callable[[str], None] = lambda _outcome: None,
    ) -> None:
        """`on_end` is told how the features of each prompt fared: pushed, failed or dropped."""
        self.window = window
        self.queued_bytes = 0
        self.max_payload_bytes = max(profile.row_bytes, max_message_bytes - MESSAGE_MARGIN)
        self.profile = profile
        self._target = target
        self._max_message_bytes = max_message_bytes
        self._credentials = credentials or CallerCredentials()
        self._on_end = on_end
        self._channel: grpc.aio.Channel | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused_until = 0.0

    def open(self, *, ticket: str, attempt: int, num_tokens: int) -> "_Push":
        push = _Push(self, ContextStart(profile=self.profile, ticket=ticket, attempt=attempt, num_tokens=num_tokens))
        loop = asyncio.get_running_loop()
        if len(self._tasks) >= MAX_PUSHES or loop.time() < self._paused_until:
            push.give_up()
            self._on_end("dropped")
            return push
        task = loop.create_task(self._run(push))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return push

    async def stop(self) -> None:
        """Cancels what runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    async def _run(self, push: "_Push") -> None:
        outcome = "failed"
        try:
            outcome = await self._send(push)
        except grpc.aio.AioRpcError as error:
            log.info("features of a prompt did not reach %s: %s", self._target, error.details())
            self._paused_until = asyncio.get_running_loop().time() + PAUSE_S
        except asyncio.InvalidStateError:
            log.info("%s ended a push of features early", self._target)
        except Exception:
            log.exception("a push of features to %s failed", self._target)
        finally:
            push.give_up()
            self._on_end(outcome)

    async def _send(self, push: "_Push") -> str:
        if self._channel is None:
            options = channel_options(self._max_message_bytes)
            self._channel = self._credentials.open_channel(self._target, options)
        call = draft_service_pb2_grpc.DraftServiceStub(self._channel).PushContext(metadata=self._credentials.metadata())
        try:
            while (message := await push.next()) is not None:
                await within(TAIL_S, call.write(message))
            if push.is_lost:
                return "dropped"
            await call.done_writing()
            await within(TAIL_S, call)
        except asyncio.TimeoutError:
            log.info("%s is slow to take the features of a prompt", self._target)
            return "failed"
        finally:
            call.cancel()
        return "pushed"


class _Push:
    """The features of one prompt. A FeatureStream."""

    def __init__(self, pusher: ContextPusher, start: ContextStart) -> None:
        self._pusher = pusher
        self._start: ContextStart | None = start
        self._queue: deque[tuple[int, bytes]] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False
        self.is_lost = False
        """Rows were left out, so that those before them are of no use."""

    def push(self, position: int, data: memoryview) -> None:
        row_bytes, most = self._pusher.profile.row_bytes, self._pusher.max_payload_bytes
        if self.is_lost or self._is_closed:
            return
        if self._pusher.queued_bytes + data.nbytes > MAX_QUEUED_BYTES:
            self.give_up()
            return
        size = most // row_bytes * row_bytes
        for first in range(0, data.nbytes, size):
            self._queue.append((position + first // row_bytes, bytes(data[first : first + size])))
        self._pusher.queued_bytes += data.nbytes
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    def give_up(self) -> None:
        """Drops what waits. Safe to repeat."""
        self.is_lost = True
        self._pusher.queued_bytes -= sum(len(data) for _, data in self._queue)
        self._queue.clear()
        self._changed.set()

    async def next(self) -> pb.PushContextRequest | None:
        """The next message; None: there is none any more."""
        while not self._queue:
            if self._is_closed or self.is_lost:
                return None
            self._changed.clear()
            await self._changed.wait()
        position, data = self._queue.popleft()
        self._pusher.queued_bytes -= len(data)
        message = pb.PushContextRequest(position=position, payload=data)
        start, self._start = self._start, None
        if start is not None:
            message.start.CopyFrom(draft_codec.context_start_to_pb(start))
        return message
