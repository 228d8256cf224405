"""KvEvents: what the prefix cache of a prefill service keeps, told to gateways as it changes.

A subscription begins with a snapshot of all that is kept and goes on with every change, numbered from 1 without gaps.
It cannot be resumed: who comes with a number, or falls too far behind, is told DATA_LOSS and begins again.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from k3svc.core.prefix_cache import CacheEvent, Cleared, PrefixCache, Stored
from k3svc.errors import TransferError
from k3svc.gateway.protos import common_pb2

MAX_BACKLOG = 10_000
"""Events that may wait for one subscriber."""
BATCH_EVENTS = 256
"""Most events of one message."""
LOOK_S = 1.0
"""Between two looks whether the service goes on."""


class KvEvents:
    """The subscribers of one prefix cache. Belongs to its event loop."""

    def __init__(self, cache: PrefixCache, page_size: int, is_serving: Callable[[], bool]) -> None:
        self._cache = cache
        self._page_size = page_size
        self._is_serving = is_serving
        self._backlogs: list[_Backlog] = []
        self._last_id = 0
        cache.on_event = self._tell

    @property
    def num_subscribers(self) -> int:
        return len(self._backlogs)

    async def subscribe(self, start_sequence_number: int) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Ends when the service stops serving. Raises TransferError (DATA_LOSS)."""
        if start_sequence_number:
            raise TransferError(
                "a subscription cannot be resumed: subscribe from 0 and begin with its snapshot", reason="NO_HISTORY"
            )
        backlog = _Backlog()
        self._backlogs.append(backlog)
        try:
            sequence = 0
            for batch in self._snapshot():
                sequence += 1
                batch.sequence_number = sequence
                yield batch
            while self._is_serving():
                events = await backlog.take(LOOK_S)
                if events:
                    sequence += 1
                    yield common_pb2.KvEventBatch(sequence_number=sequence, timestamp=time.time(), events=events)
        finally:
            self._backlogs.remove(backlog)

    def _snapshot(self) -> list[common_pb2.KvEventBatch]:
        """All of it as it is now; what changes while it is sent waits in the backlog."""
        events = [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())]
        events += [self._event(0, stored) for stored in self._cache.contents()]
        parts = list(_parts(events, BATCH_EVENTS))
        return [
            common_pb2.KvEventBatch(
                timestamp=time.time(),
                events=part,
                snapshot=common_pb2.KvSnapshotChunk(index=index, count=len(parts), blocks=len(events) - 1),
            )
            for index, part in enumerate(parts)
        ]

    def _tell(self, event: CacheEvent) -> None:
        if self._backlogs:
            self._last_id += 1
            message = self._event(self._last_id, event)
            for backlog in self._backlogs:
                backlog.put(message)

    def _event(self, event_id: int, event: CacheEvent) -> common_pb2.KvCacheEvent:
        if isinstance(event, Cleared):
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())
        if not isinstance(event, Stored):
            removed = common_pb2.KvBlocksRemoved(block_hashes=[event.block_hash])
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        blocks = [
            common_pb2.KvBlock(block_hash=block_hash, token_ids=token_ids, block_size=self._page_size)
            for block_hash, token_ids in zip(event.block_hashes, event.token_ids, strict=True)
        ]
        stored = common_pb2.KvBlocksStored(
            blocks=blocks, parent_block_hash=event.parent_hash, cache_salt=event.namespace or None
        )
        return common_pb2.KvCacheEvent(event_id=event_id, stored=stored)


class _Backlog:
    """What one subscriber has not been sent yet."""

    def __init__(self) -> None:
        self._events: deque[common_pb2.KvCacheEvent] = deque()
        self._changed = asyncio.Event()
        self._is_lost = False

    def put(self, event: common_pb2.KvCacheEvent) -> None:
        if len(self._events) == MAX_BACKLOG:
            self._is_lost = True
            self._events.clear()
        if not self._is_lost:
            self._events.append(event)
        self._changed.set()

    async def take(self, timeout_s: float) -> list[common_pb2.KvCacheEvent]:
        """What waits, at most a message full; nothing after timeout_s. Raises TransferError when some was lost."""
        if not self._events and not self._is_lost:
            self._changed.clear()
            timer = asyncio.get_running_loop().call_later(timeout_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
        if self._is_lost:
            raise TransferError(f"more than {MAX_BACKLOG} events waited: subscribe again", reason="NO_HISTORY")
        return [self._events.popleft() for _ in range(min(len(self._events), BATCH_EVENTS))]


def _parts(events: Sequence[common_pb2.KvCacheEvent], size: int) -> Iterator[Sequence[common_pb2.KvCacheEvent]]:
    for first in range(0, len(events), size):
        yield events[first : first + size]
