"""Copies between the pools of a GPU and the host, beside steps: one stream, and a ring of pinned memory each way.

To the host, copies are asked for ahead of their use. Nobody gives ring memory back: what has lain there longest is
written over, and who comes too late for it copies again. To the device, a copy follows as soon as its bytes are in the
ring; memory of the ring is used again once the copy that reads it has ended. Used on one thread, the event loop's.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops.table import WireBytes

FETCH_RING_BYTES = 64 << 20
"""A hand-off through shared memory has up to 12 MiB under way."""
PLACE_RING_BYTES = 32 << 20
MOST_OF_RING = 4
"""A copy takes at most this part of a ring, so that what is asked for together never writes over itself."""
LINE_BYTES = 256
"""Copies begin at multiples of it."""


class Mark(Protocol):
    """A point in a queue of the device."""

    def query(self) -> bool:
        """Whether all that was asked for before it has been done."""
        ...

    def synchronize(self) -> None:
        """Returns when it has."""
        ...


class Queue(Protocol):
    """Copies on the device, done in the order in which they are asked for, beside the steps."""

    def copy(self, target: Tensor, target_begin: int, source: Tensor, source_begin: int, count: int) -> Mark:
        """Asks for a copy of bytes, both uint8 [n] and one of them on the host; the mark after it."""
        ...

    def steps(self) -> Mark:
        """The point that the queue of the steps has come to: what it has been asked for so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is asked for from now on begins after this point of the other queue."""
        ...


class CopyStream:
    """`Queue` on a GPU, for the thread that made it."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The driver itself: to ask torch takes as long as it takes to copy a mebibyte.
        self._ask: Any = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
        self._ask.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(self, target: Tensor, target_begin: int, source: Tensor, source_begin: int, count: int) -> Mark:
        """`Queue.copy`. Memory of the host must be pinned. Raises BackendError when the device has failed."""
        places = target.data_ptr() + target_begin, source.data_ptr() + source_begin
        status = self._ask(*places, count, self._stream.cuda_stream)
        if status:
            raise BackendError(f"the GPU does not copy {count} bytes: error {status} of the driver", device="cuda")
        mark: Mark = self._stream.record_event()
        return mark

    def steps(self) -> Mark:
        """`Queue.steps`."""
        mark: Mark = torch.cuda.current_stream().record_event()
        return mark

    def wait(self, mark: Mark) -> None:
        """`Queue.wait`."""
        self._stream.wait_event(mark)


class PoolBytes:
    """Bytes of pool memory on the device. Slices read and write like memory, by way of pinned memory, in the order of
    the steps: they wait for what has been asked for before.
    """

    def __init__(self, pool: Tensor, begin: int, nbytes: int) -> None:
        """`pool` is uint8 [n]."""
        self._pool = pool
        self._first = begin
        self.nbytes = nbytes

    def place(self, begin: int, count: int) -> tuple[Tensor, int]:
        """The pool, and where in it some of these bytes begin."""
        if not 0 <= begin <= begin + count <= self.nbytes:
            raise ValueError(f"bytes {begin} to {begin + count} of {self.nbytes}")
        return self._pool, self._first + begin

    def __getitem__(self, span: slice) -> memoryview:
        begin, end = self._bounds(span)
        host = self._staging(end - begin)
        return _bytes(host.copy_(self._part(begin, end)))

    def __setitem__(self, span: slice, data: memoryview | bytes) -> None:
        begin, end = self._bounds(span)
        if len(data) != end - begin:
            raise ValueError(f"{len(data)} bytes for {end - begin}")
        if end > begin:
            host = self._staging(end - begin)
            _bytes(host)[:] = data
            self._part(begin, end).copy_(host, non_blocking=True)

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    def _part(self, begin: int, end: int) -> Tensor:
        return self._pool[self._first + begin : self._first + end]

    def _bounds(self, span: slice) -> tuple[int, int]:
        begin, end, step = span.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"a slice of bytes with step {step}")
        return begin, max(begin, end)

    def _staging(self, size: int) -> Tensor:
        """Host memory that the copy engines reach by themselves. torch keeps what is freed for the next of its size,
        once the copies that use it have ended."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pool.device.type == "cuda")


class Fetch:
    """A copy to the host that is under way (`k3svc.ops.table.Fetch`)."""

    def __init__(self, ask: Callable[[], tuple[int, Mark]], ring: "_Ring", count: int) -> None:
        self._ask = ask
        self._ring = ring
        self._count = count
        self._is_there = False
        self._position, self._mark = ask()

    def data(self) -> memoryview:
        """`Fetch.data`."""
        if self._ring.is_lost(self._position):
            self._is_there = False
            self._position, self._mark = self._ask()
        if not self._is_there:
            self._mark.synchronize()
            self._is_there = True
        return self._ring.span(self._position, self._count)


class Writer:
    """Where one hand-off lands (`k3svc.ops.table.PoolWriter`)."""

    def __init__(self, queue: Queue, ring: "_Ring", under_way: "deque[tuple[int, Mark]]") -> None:
        self._queue = queue
        self._ring = ring
        self._under_way = under_way
        self._after: Mark | None = queue.steps()
        """Steps that may still touch the memory that has been given to this hand-off; None: they have ended, or the
        queue of copies waits for them."""

    def takes(self, view: WireBytes, count: int) -> bool:
        """`PoolWriter.takes`."""
        return isinstance(view, PoolBytes) and self._ring.holds(count)

    @contextmanager
    def place(self, view: PoolBytes, begin: int, count: int) -> Iterator[memoryview]:
        """`PoolWriter.place`."""
        pool, place = view.place(begin, count)
        position = self._ring.take(count)
        while self._under_way and self._ring.is_lost(self._under_way[0][0]):
            self._under_way.popleft()[1].synchronize()
        yield self._ring.span(position, count)
        if self._after is not None:
            if not self._after.query():
                self._queue.wait(self._after)
            self._after = None
        self._under_way.append((position, self._queue.copy(pool, place, *self._ring.place(position), count)))

    def settle(self) -> None:
        """`PoolWriter.settle`. Copies end in order."""
        if self._under_way:
            self._under_way[-1][1].synchronize()
            self._under_way.clear()


class Staging:
    """`k3svc.ops.table.Staging` over two rings."""

    def __init__(self, queue: Queue, fetched: Tensor, placed: Tensor) -> None:
        """Memory of the rings, uint8 [n] on the host, pinned."""
        self._queue = queue
        self._fetched = _Ring(fetched)
        self._placed = _Ring(placed)
        self._under_way: deque[tuple[int, Mark]] = deque()
        """Copies to the device: position in the ring, and the mark after it."""

    def fetch(self, view: WireBytes, begin: int, count: int) -> Fetch | None:
        """`Staging.fetch`."""
        if not isinstance(view, PoolBytes) or not self._fetched.holds(count):
            return None
        pool, place = view.place(begin, count)

        def ask() -> tuple[int, Mark]:
            position = self._fetched.take(count)
            return position, self._queue.copy(*self._fetched.place(position), pool, place, count)

        return Fetch(ask, self._fetched, count)

    def writer(self) -> Writer:
        """`Staging.writer`."""
        return Writer(self._queue, self._placed, self._under_way)


def cuda_staging(device: torch.device) -> Staging:
    """On a GPU, with a stream and pinned rings of its own."""
    fetched, placed = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (FETCH_RING_BYTES, PLACE_RING_BYTES)
    )
    return Staging(CopyStream(device), fetched, placed)


class _Ring:
    """Memory that is given out front to back, then from the front again. Positions only rise."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._view = _bytes(memory)
        self._size = memory.shape[0]
        self._end = 0

    def holds(self, count: int) -> bool:
        """Whether so many bytes may be asked for at once."""
        return 0 < count <= self._size // MOST_OF_RING

    def take(self, count: int) -> int:
        """Position of the next `count` bytes, which lie side by side."""
        position = -(-self._end // LINE_BYTES) * LINE_BYTES
        left = self._size - position % self._size
        position = position if count <= left else position + left
        self._end = position + count
        return position

    def is_lost(self, position: int) -> bool:
        """Whether bytes from this position on have been given to others since."""
        return self._end - position > self._size

    def span(self, position: int, count: int) -> memoryview:
        """The bytes."""
        begin = position % self._size
        return self._view[begin : begin + count]

    def place(self, position: int) -> tuple[Tensor, int]:
        """The memory, and where in it a position is."""
        return self._memory, position % self._size


def _bytes(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)
