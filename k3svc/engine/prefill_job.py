"""One prompt of a prefill engine, and the stream that reads what it hands over."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from k3svc.core.prefill_scheduler import Prompt
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.engine.prompt_features import PromptFeatures
from k3svc.errors import InvalidRequest, K3svcError, Superseded
from k3svc.transfer.manifest import Frame, PrefillDone
from k3svc.transfer.outbox import FrameSink, Outbox

HEARTBEAT_S = 5.0
"""A reader that waits, in the queue or for a chunk, gets a sign of life as often."""


@dataclass(kw_only=True, eq=False)
class Job:
    """One attempt at one prompt."""

    call: PrefillCall
    prompt: Prompt
    opened: float
    outbox: Outbox | None = None
    started: float | None = None
    computed: float | None = None
    sent: float | None = None
    handoff: "Handoff | None" = None
    features: PromptFeatures | None = None
    """None: nobody wants them."""
    error: K3svcError | None = None
    idle_since: float | None = None
    """When the reader went, or was given what it has not come back from; None: a reader waits for more."""
    lease: asyncio.TimerHandle | None = None
    deadline: asyncio.TimerHandle | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Holder(Protocol):
    """What a reader needs of the engine that holds its job."""

    def come_back(self, job: Job, handoff: "Handoff") -> None: ...
    def hand_over(self, job: Job, handoff: "Handoff") -> None: ...
    def detach(self, job: Job, handoff: "Handoff") -> None: ...
    def sent(self, frames: list[Frame]) -> None: ...
    def done(self, job: Job) -> PrefillDone: ...


class Handoff:
    """The frames of one job, read by one stream at a time. A later stream of the same attempt takes over."""

    def __init__(self, engine: Holder, job: Job) -> None:
        self._engine = engine
        self._job = job
        self._sequence = job.call.next_sequence
        """The next frame to give."""
        self._is_begun = False
        """The manifest was given."""
        self._is_done = False
        self._beats = False
        self.sink: FrameSink | None = None
        """Where the bytes of frames go; None: into messages."""

    def __aiter__(self) -> AsyncIterator[HandoffEvent]:
        return self

    async def __anext__(self) -> HandoffEvent:
        self._engine.come_back(self._job, self)
        try:
            while not self._is_done:
                self._check()
                event = self._take()
                if event is not None:
                    return event
                if not await self._changed():
                    return []
        finally:
            self._engine.hand_over(self._job, self)
        raise StopAsyncIteration

    def detach(self) -> None:
        """The stream is gone: computing pauses and the lease runs. Safe to repeat."""
        self._engine.detach(self._job, self)

    def _take(self) -> HandoffEvent | None:
        """What is there to give; None: nothing yet."""
        job = self._job
        if job.outbox is None:
            return None
        if not self._is_begun:
            self._is_begun = True
            return job.outbox.manifest
        if self._sequence > job.outbox.num_frames:
            raise InvalidRequest("next_sequence", self._sequence, f"0 to {job.outbox.num_frames}")
        frames = job.outbox.frames(self._sequence, self.sink)
        if frames:
            self._sequence = frames[-1].sequence + 1
            self._engine.sent(frames)
            return frames
        if job.computed is None:
            return None
        self._is_done = True
        return self._engine.done(job)

    def _check(self) -> None:
        if self._job.error is not None:
            raise self._job.error
        if self._job.handoff is not self:
            raise Superseded("another stream reads this hand-off", reason="HANDOFF_TAKEN_OVER")

    async def _changed(self) -> bool:
        """Waits for the job to change; False when a sign of life is due before."""
        changed, self._beats = self._job.changed, False
        changed.clear()
        timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
        try:
            await changed.wait()
        finally:
            timer.cancel()
        return not self._beats

    def _beat(self) -> None:
        self._beats = True
        self._job.changed.set()
