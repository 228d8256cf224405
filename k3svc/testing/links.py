"""What lies between simulated hosts: calls and streams that are late, break, fall silent, or bring what nobody sent.

A stream is served by a task on the server's host and read through a bounded window, as over gRPC: the reader's pace is
the back-pressure, the server learns late that its reader is gone, and a host that crashes takes all of it along.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from k3svc.engine.decode import DecodeEngine
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.engine.stream import TokenStream
from k3svc.errors import K3svcError, TransferError, Unavailable
from k3svc.testing.network import copy_event
from k3svc.transfer.manifest import Frame

Event = TypeVar("Event")


class Broken(AssertionError):
    """An invariant of the simulation does not hold."""


@dataclass(frozen=True, kw_only=True)
class LinkFaults:
    """What links do to traffic. Probabilities are per event of a stream unless the name says per call."""

    delay_min_s: float = 0.0001
    delay_max_s: float = 0.001
    straggler_probability_per_call: float = 0.0
    straggler_delay_max_s: float = 0.2
    break_probability: float = 0.0
    silence_probability: float = 0.0
    loss_probability: float = 0.0
    duplicate_probability: float = 0.0
    swap_probability: float = 0.0
    corrupt_probability: float = 0.0
    foreign_probability_per_call: float = 0.0
    """A stream brings the events of an earlier one."""
    repeat_probability_per_call: float = 0.0
    """A call arrives a second time later, and nobody reads the answer."""
    loss_probability_per_release: float = 0.0
    window_events: int = 2
    silence_timeout_s: float = 0.3
    """Silence after which a reader gives its stream up."""
    keepalive_s: float = 0.5
    """Time after which a server notices that a reader behind a partition is gone."""


class Host:
    """One incarnation of a service at an address. `crash` takes its tasks and its memory."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_alive = True
        self.is_leaving = False
        """It is about to stop; nothing else may happen to it."""
        self.pipes: dict[_Pipe, None] = {}
        self.streams: dict[TokenStream, float | None] = {}
        """What clients read of a decode engine, with the deadline of each."""
        self.broken = ""
        """What a call saw that must not be."""
        # Dictionaries, because the order of a set is not the same in every process.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, engine: PrefillEngine | DecodeEngine) -> None:
        self.engine = engine
        self.begun_s = asyncio.get_running_loop().time()
        self.loop_task = self.spawn(engine.run())

    @property
    def prefill(self) -> PrefillEngine:
        assert isinstance(self.engine, PrefillEngine)
        return self.engine

    @property
    def decode(self) -> DecodeEngine:
        assert isinstance(self.engine, DecodeEngine)
        return self.engine

    def spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def crash(self) -> None:
        self.is_alive = False
        for task in list(self._tasks):
            task.cancel()
        for pipe in self.pipes:
            pipe.end(Unavailable(f"{self.address} crashed"))

    async def gone(self) -> None:
        """Waits until all tasks of a crashed or drained host have ended. Raises what they raised."""
        for error in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(error, Exception):
                raise error


class _Pipe:
    """A bounded FIFO between the two ends of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[object] = deque()
        self._end: K3svcError | StopAsyncIteration | None = None
        self._changed = asyncio.Event()

    async def put(self, item: object) -> None:
        while len(self._items) >= self._limit:
            self._changed.clear()
            await self._changed.wait()
        self._items.append(item)
        self._changed.set()

    def end(self, error: K3svcError | StopAsyncIteration) -> None:
        if self._end is None:
            self._end = error
            self._changed.set()

    async def get(self) -> object:
        while not self._items:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        self._changed.set()
        return self._items.popleft()


class Network:
    """Links between all addresses. `calm` ends all faults."""

    def __init__(self, rng: random.Random, faults: LinkFaults) -> None:
        self.faults = faults
        self.hosts: dict[str, Host] = {}
        self.partitions: set[frozenset[str]] = set()
        self.num_calls = 0
        self._rng = rng
        self._earlier: list[list[HandoffEvent]] = []

    def calm(self) -> None:
        self.faults = LinkFaults()
        self.partitions.clear()

    def happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    async def travel(self) -> None:
        """The way of one call; calls overtake each other."""
        faults = self.faults
        is_late = self.happens(faults.straggler_probability_per_call)
        delay_max_s = faults.straggler_delay_max_s if is_late else faults.delay_max_s
        await asyncio.sleep(self._rng.uniform(faults.delay_min_s, delay_max_s))

    async def reach(self, client: str, address: str) -> Host:
        """The host at an address after the way of a call. Raises Unavailable."""
        self.num_calls += 1
        await self.travel()
        if self._cut(client, address):
            await asyncio.sleep(self.faults.silence_timeout_s)
            raise Unavailable(f"{address} does not answer {client}")
        host = self.hosts.get(address)
        if host is None or not host.is_alive:
            raise Unavailable(f"nothing listens at {address}")
        return host

    async def stream(
        self, client: str, address: str, serve: Callable[[Host], AsyncGenerator[Event, None]]
    ) -> AsyncGenerator[Event, None]:
        """Events of a generator that runs on the host at `address`. Raises its K3svcErrors, Unavailable when the link
        breaks, TransferError when it falls silent.
        """
        host = await self.reach(client, address)
        pipe = _Pipe(self.faults.window_events)
        host.pipes[pipe] = None
        server = host.spawn(_serve(serve(host), pipe))
        try:
            while True:
                event = await self._receive(pipe, client, address)
                await asyncio.sleep(self._rng.uniform(self.faults.delay_min_s, self.faults.delay_max_s))
                if self.happens(self.faults.break_probability):
                    raise Unavailable("the link broke")
                yield event  # type: ignore[misc]
        except StopAsyncIteration:
            return
        finally:
            del host.pipes[pipe]
            noticed_s = self.faults.keepalive_s if self._cut(client, address) else self.faults.delay_max_s
            asyncio.get_running_loop().call_later(noticed_s, server.cancel)

    async def _receive(self, pipe: _Pipe, client: str, address: str) -> object:
        limit_s = self.faults.silence_timeout_s
        silent = self.happens(self.faults.silence_probability)
        started = asyncio.get_running_loop().time()
        if silent:
            await asyncio.sleep(limit_s)
        while not silent and self._cut(client, address):
            await asyncio.sleep(0.01)
            silent = asyncio.get_running_loop().time() - started > limit_s
        if silent:
            raise TransferError(f"{address} fell silent", reason="HANDOFF_SILENT")
        return await pipe.get()

    def spoil(self, event: HandoffEvent) -> list[HandoffEvent]:
        """What arrives of an event of a hand-off: damage that a checksummed, sequenced landing must notice."""
        if not isinstance(event, list) or not event:
            return [event]
        faults = self.faults
        if self.happens(faults.loss_probability):
            return []
        if self.happens(faults.duplicate_probability):
            return [event, event]
        if len(event) > 1 and self.happens(faults.swap_probability):
            return [event[::-1]]
        if self.happens(faults.corrupt_probability):
            return [self._corrupt(event)]
        return [event]

    def foreign(self, events: list[HandoffEvent]) -> list[HandoffEvent] | None:
        """The events of an earlier stream to be given instead, now and then; remembers these for later."""
        earlier = None
        if self._earlier and self.happens(self.faults.foreign_probability_per_call):
            earlier = self._rng.choice(self._earlier)
        self._earlier = [*self._earlier[-7:], events]
        return earlier

    def _corrupt(self, frames: Sequence[Frame]) -> list[Frame]:
        index = self._rng.randrange(len(frames))
        frame = frames[index]
        data = bytearray(frame.data)
        changed = self._rng.choice(("data", "data", "sequence", "offset", "tensor"))
        if changed == "data":
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            damaged = replace(frame, data=memoryview(bytes(data)))
        else:
            by = self._rng.choice((-1, 1, 16, 1 << 40))
            damaged = replace(frame, **{changed: max(0, getattr(frame, changed) + by)})
        return [*frames[:index], damaged, *frames[index + 1 :]]

    def _cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.partitions


class LinkedPeer:
    """A PrefillPeer over the network. A call of an owner that has crashed goes nowhere."""

    def __init__(self, network: Network, owner: Host, address: str) -> None:
        self.name = address
        self._network = network
        self._owner = owner

    async def prefill(self, call: PrefillCall) -> AsyncGenerator[HandoffEvent, None]:
        network = self._network
        if network.happens(network.faults.repeat_probability_per_call):
            self._repeat(call)
        seen: list[HandoffEvent] = []
        earlier = network.foreign(seen)
        stream = network.stream(self._owner.address, self.name, lambda host: _hand_off(host, call))
        async with aclosing(stream) as events:
            async for event in events:
                seen.append(event)
                if earlier:
                    arriving = [earlier.pop(0)]
                else:
                    arriving = network.spoil(event)
                for arrived in arriving:
                    yield arrived

    async def release(self, request_id: str, attempt: int) -> None:
        network = self._network
        for _ in range(2 if network.happens(network.faults.repeat_probability_per_call) else 1):
            if not self._owner.is_alive or network.happens(network.faults.loss_probability_per_release):
                return
            try:
                host = await network.reach(self._owner.address, self.name)
            except Unavailable:
                return
            if self._owner.is_alive:
                host.prefill.release(request_id, attempt)

    def _repeat(self, call: PrefillCall) -> None:
        host = self._network.hosts.get(self.name)
        if host is not None and host.is_alive:
            host.spawn(self._ghost(call))

    async def _ghost(self, call: PrefillCall) -> None:
        """The same call once more; its answer is not read, and the server is told so late."""
        await self._network.travel()
        host = self._network.hosts.get(self.name)
        if host is None or not host.is_alive:
            return
        try:
            async with aclosing(_hand_off(host, call)) as events:
                async for _ in events:
                    await asyncio.sleep(self._network.faults.keepalive_s)
                    return
        except K3svcError:
            return


async def _hand_off(host: Host, call: PrefillCall) -> AsyncGenerator[HandoffEvent, None]:
    """What services.prefill does with a call."""
    loop = asyncio.get_running_loop()
    deadline = None if call.remaining_s is None else loop.time() + call.remaining_s
    handoff = host.prefill.open(call)
    try:
        async for event in handoff:
            if deadline is not None and loop.time() > deadline + 1e-6:
                host.broken = f"{call.request_id} is served after its deadline"
            yield copy_event(event)
    finally:
        handoff.detach()


async def _serve(events: AsyncIterator[Event], pipe: _Pipe) -> None:
    async with aclosing(events):  # type: ignore[type-var]
        try:
            async for event in events:
                await pipe.put(event)
        except K3svcError as error:
            pipe.end(error)
        else:
            pipe.end(StopAsyncIteration())
