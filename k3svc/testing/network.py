"""A prefill service as decode sees it, without gRPC: the real PrefillEngine behind a link that can fail."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import Unavailable
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest

Fault = Callable[[HandoffEvent], Sequence[HandoffEvent] | None]
"""What the link makes of an event: the events that arrive, or None when the stream breaks here."""


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds of a link."""

    delay_s: float = 0.0005
    release_delay_s: float = 0.0005


class DirectPeer:
    """Calls a PrefillEngine in the same loop. `fault` sees each event; `up` False refuses all calls."""

    def __init__(self, name: str, engine: PrefillEngine, times: LinkTimes | None = None) -> None:
        self.name = name
        self.engine = engine
        self.up = True
        self.fault: Fault | None = None
        self.calls: list[PrefillCall] = []
        self._times = times or LinkTimes()

    async def prefill(self, call: PrefillCall) -> AsyncGenerator[HandoffEvent, None]:
        self.calls.append(call)
        await asyncio.sleep(self._times.delay_s)
        self._check()
        handoff = self.engine.open(call)
        try:
            async for event in handoff:
                copied = copy_event(event)
                arriving = [copied] if self.fault is None else self.fault(copied)
                await asyncio.sleep(self._times.delay_s)
                if arriving is None:
                    raise Unavailable("the link broke")
                self._check()
                for arrived in arriving:
                    yield arrived
        finally:
            handoff.detach()

    async def release(self, request_id: str, attempt: int) -> None:
        await asyncio.sleep(self._times.release_delay_s)
        if self.up:
            self.engine.release(request_id, attempt)

    def _check(self) -> None:
        if not self.up:
            raise Unavailable(f"{self.name} is down")


def copy_event(event: HandoffEvent) -> HandoffEvent:
    """What a wire does: the bytes that arrive are no longer the sender's memory."""
    if isinstance(event, StateManifest | PrefillDone):
        return event
    return [copy_frame(frame) for frame in event]


def copy_frame(frame: Frame, **changes: Any) -> Frame:
    """A frame over its own copy of the data."""
    return replace(frame, data=memoryview(bytes(frame.data)), **changes)
