"""What a draft engine keeps of its peers: samples, tickets, and the sessions of decode services."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from k3svc.engine.draft_protocol import (
    ContextStart,
    DraftProfile,
    SampleGap,
    SampleOpen,
    SampleProposal,
    SessionAnswer,
    SessionStep,
)
from k3svc.engine.draft_span import ContextSpan
from k3svc.errors import Superseded, Unavailable

MAX_REFUSED = 4096
"""Refusals that wait to be read; the peer finds out of others when it commits."""
MAX_PENDING_BYTES = 32 << 20
"""Bytes of messages of one session that may wait for the engine thread; further ones are not read."""


@dataclass(kw_only=True, eq=False)
class Sample:
    session: "DraftSession"
    opened: SampleOpen
    slot: int
    span: ContextSpan
    dtype: str
    anchor: int
    want: int
    """Proposals that are wanted and not begun; 0: none."""
    touched: float
    since: float
    commits: int = 0
    was_complete: bool = False
    is_joined: bool = False
    """The prompt's context is in the slot, or will never be."""


@dataclass(kw_only=True, eq=False)
class Ticket:
    start: ContextStart
    slot: int
    span: ContextSpan
    touched: float
    is_done: bool = False
    """No more rows will come."""
    was_opened: bool = False
    error: Superseded | None = None
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no rows wait to be written."""


class SessionOwner(Protocol):
    """The engine, as a session sees it."""

    @property
    def credits(self) -> int: ...
    def apply(self, session: "DraftSession", step: SessionStep) -> None: ...
    def forget(self, session: "DraftSession") -> None: ...


class DraftSession:
    """One decode service. Answers that are not read are merged, so they stay as small as the samples are many."""

    def __init__(self, owner: SessionOwner, profile: DraftProfile) -> None:
        self.profile = profile
        self.samples: dict[int, Sample] = {}
        self.wished = self.answered = 0
        """The last step that wished for proposals, and the last whose wishes were answered."""
        self.pending_bytes = 0
        """Of messages whose rows have not been given to the engine thread."""
        self._owner = owner
        self._draft_us = 0
        self._proposals: dict[int, SampleProposal] = {}
        self._gaps: dict[int, SampleGap] = {}
        self._refused: dict[int, None] = {}
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._error: Unavailable | None = None
        self._is_closed = False

    def apply(self, step: SessionStep) -> None:
        """One message of the peer. Raises InvalidRequest, after which the session is to be closed."""
        self._owner.apply(self, step)

    async def room(self) -> None:
        """Returns when another message may come."""
        while self.pending_bytes > MAX_PENDING_BYTES and not self._is_closed:
            self._has_room.clear()
            await self._has_room.wait()

    def take(self) -> None:
        """The rows of all messages go to the engine thread."""
        self.pending_bytes = 0
        self._has_room.set()

    def close(self) -> None:
        """Frees the samples. Safe to repeat."""
        self._is_closed = True
        self._owner.forget(self)
        self._changed.set()
        self._has_room.set()

    def fail(self, error: Unavailable) -> None:
        """Ends the answers with an error."""
        self._error = error
        self._changed.set()
        self._has_room.set()

    def touch(self) -> None:
        """An answer is due, if only to a ping."""
        self._changed.set()

    def settle(self, step: int, draft_us: int) -> None:
        """What there is to tell goes out; the wishes up to a step have been answered as far as they will be."""
        if step > self.answered or self._proposals or self._gaps or self._refused:
            self.answered, self._draft_us = step, draft_us
            self._changed.set()

    def propose(self, proposal: SampleProposal) -> None:
        self._proposals[proposal.handle] = proposal

    def tell_gap(self, gap: SampleGap) -> None:
        self._gaps[gap.handle] = gap

    def refuse(self, handle: int) -> None:
        if len(self._refused) < MAX_REFUSED:
            self._refused[handle] = None

    def __aiter__(self) -> AsyncIterator[SessionAnswer]:
        return self

    async def __anext__(self) -> SessionAnswer:
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise StopAsyncIteration
        answer = SessionAnswer(
            step=self.answered,
            credits=self._owner.credits,
            draft_us=self._draft_us,
            proposals=tuple(self._proposals.values()),
            gaps=tuple(self._gaps.values()),
            refused=tuple(self._refused),
        )
        self._proposals, self._gaps, self._refused = {}, {}, {}
        return answer


class ContextOwner(Protocol):
    """The engine, as who pushes a prompt's features sees it."""

    def add_context(self, ticket: Ticket, position: int, data: memoryview) -> None: ...
    def finish_context(self, ticket: Ticket) -> None: ...


class ContextPush:
    """The features of one prompt, from one prefill service."""

    def __init__(self, owner: ContextOwner, ticket: Ticket) -> None:
        self._owner, self._ticket = owner, ticket

    @property
    def num_rows(self) -> int:
        """Rows that are held."""
        return self._ticket.span.end - self._ticket.span.start

    async def add(self, position: int, data: memoryview) -> None:
        """Rows from a position on; returns when they have been written. Raises InvalidRequest or Superseded."""
        self._owner.add_context(self._ticket, position, data)
        await self._ticket.taken.wait()
        if self._ticket.error is not None:
            raise self._ticket.error

    def finish(self) -> None:
        """No more rows will come. Safe to repeat."""
        self._owner.finish_context(self._ticket)
