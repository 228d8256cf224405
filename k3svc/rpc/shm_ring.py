"""The ring of k3svc.v1.ShmObject: bytes of a hand-off through shared memory, while the stream carries their positions.

Decode makes an object and offers it with a call, prefill opens it and takes its name away. Prefill copies frames out of
its pools into the ring, decode out of the ring into its own. Positions only rise: position p lies p mod size bytes into
the ring, and decode writes into the object up to where it has read. That is what makes room; nothing blocks while a
ring is full but the hand-off that it belongs to. What lies in the ring is trusted no more than what comes by stream:
frames carry their CRC32C, which is compared with the bytes that have landed.

Fresh memory costs as much as copying into it, so a ring whose hand-off came to its end is kept on both sides for the
next one: decode offers it again by its name, under which prefill remembers it. Decode forgets it first. It holds a lock
on the object meanwhile, by which prefill notices that decode has forgotten it or has ended.

Both map the object, which is twice as fast as reading and writing it as a file. Its pages are there from the start, so
that a full file system is an error of decode's call. Who could cut it short runs as the same user as both.
"""

import asyncio
import fcntl
import logging
import mmap
import os
from contextlib import suppress
from typing import Any

from k3svc.errors import TransferError
from k3svc.rpc.shm import FOLDER, TOKEN_BYTES, ShmObject, open_object
from k3svc.transfer.checked_copy import copy_out
from k3svc.transfer.manifest import Placed
from k3svc.v1 import prefill_service_pb2

RING_BYTES = 32 << 20
"""Size of a ring, unless all that it is made for takes less."""
SMALL_RING_BYTES = 2 << 20
"""A ring of this size is made in less time than another thread takes to begin."""
BATCH_BYTES = 8 << 20
"""Bytes of the frames of one message whose data goes through a ring; a message costs about as much as copying 2 MiB. A
ring holds four, since its writer looks only now and then whether there is room."""
HEAD_BYTES = 4096
LINE_BYTES = 64
"""Frames begin at multiples of it, where copies are fastest."""
MAX_POSITION = 1 << 62
ROOM_PATIENCE_S = 5.0
"""After so long without room, frames go by stream."""
ROOM_PERIOD_S = 0.001
"""Loops tell no less time apart; a full ring keeps its reader busy for longer."""
KEPT_RINGS = 2
"""Unused rings that decode keeps for one prefill service."""
KEPT_S = 20.0
"""How long decode keeps an unused ring."""
REMEMBERED_RINGS = 64
"""Rings that prefill remembers."""
REMEMBERED_S = 60.0
"""How long prefill remembers an unused ring, if decode does not forget it before."""
FORGET_PERIOD_S = 5.0

log = logging.getLogger(__name__)


class RingReader:
    """Decode's end of a ring that it makes. Raises OSError where there is no shared memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_shared = False
        """Whether the other side says that it sees the same memory."""
        self._object = ShmObject(HEAD_BYTES + size)
        self.name, self.token = self._object.name, self._object.token
        self.is_named = True
        """Nobody has seen it yet."""
        self._read = 0
        try:
            os.posix_fallocate(self._object.file, 0, HEAD_BYTES + size)
            self._memory = memoryview(mmap.mmap(self._object.file, HEAD_BYTES + size))
        except OSError:
            self.close()
            raise

    def span(self, position: int, nbytes: int) -> memoryview:
        """Bytes of a frame. Raises TransferError for what cannot be in the ring."""
        begin = position % self.size
        if not self.is_shared or begin + nbytes > self.size or position > MAX_POSITION:
            raise TransferError(
                f"a frame of {nbytes} bytes at position {position} of a ring of {self.size if self.is_shared else 0}",
                reason="HANDOFF_MALFORMED",
            )
        self._read = max(self._read, position + nbytes)
        return self._memory[HEAD_BYTES + begin : HEAD_BYTES + begin + nbytes]

    def make_room(self) -> None:
        """All frames that `span` was asked for have been read."""
        _read_position(self._memory)[0] = self._read

    def unlink(self) -> None:
        """Takes the name away. Safe to repeat."""
        if self.is_named:
            self._object.unlink()
            self.is_named = False

    def close(self) -> None:
        """Takes the name away; the memory ends with the last span of it. Safe to repeat."""
        self._object.close()

    def give_up(self) -> None:
        """Closes the ring; the loop does not wait for its memory to end."""
        self.close()
        held, self._memory = [self._memory], memoryview(b"")
        _let_go(held)


class KeptRings:
    """Decode's rings for hand-offs of one prefill service."""

    def __init__(self) -> None:
        self._unused: list[tuple[RingReader, asyncio.TimerHandle]] = []

    async def take(self, num_bytes: int) -> RingReader:
        """A ring for a hand-off of num_bytes in all. Raises OSError where there is no shared memory."""
        size = min(RING_BYTES, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        while self._unused:
            ring, timer = self._unused.pop()
            timer.cancel()
            if ring.size >= size:
                ring.is_shared = False
                return ring
            ring.give_up()
        return RingReader(size) if size <= SMALL_RING_BYTES else await asyncio.to_thread(RingReader, size)

    def give_back(self, ring: RingReader) -> None:
        """Nothing more will be written into the ring until it is offered again."""
        if len(self._unused) < KEPT_RINGS:
            timer = asyncio.get_running_loop().call_later(KEPT_S, self._forget, ring)
            self._unused.append((ring, timer))
        else:
            ring.give_up()

    def _forget(self, ring: RingReader) -> None:
        self._unused = [kept for kept in self._unused if kept[0] is not ring]
        ring.give_up()

    def close(self) -> None:
        """Forgets the unused rings."""
        for ring, timer in self._unused:
            timer.cancel()
            ring.give_up()
        self._unused = []


class RingWriter:
    """Prefill's end of a ring (`k3svc.transfer.outbox.FrameSink`)."""

    batch_bytes = BATCH_BYTES

    def __init__(self, name: str, token: bytes, size: int) -> None:
        """Takes the name away. Raises OSError when there is no such ring here."""
        self._file = -1
        self._file = open_object(name, token, os.O_RDWR)
        if not 0 < size <= os.fstat(self._file).st_size - HEAD_BYTES:
            raise OSError("an object of another size")
        self._memory = memoryview(mmap.mmap(self._file, HEAD_BYTES + size))
        (FOLDER / name).unlink(missing_ok=True)
        self.token = token
        self.size = size
        self._next = 0
        self._read = 0

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """The memory ends with the last view of it. Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def is_forgotten(self) -> bool:
        """Whether decode has given the ring up or has ended."""
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        return False

    def put(self, data: memoryview) -> Placed | None:
        """Copies data; None where there is no room. Other threads run meanwhile."""
        position = self._fitting(data.nbytes)
        if position is None:
            return None
        begin = HEAD_BYTES + position % self.size
        checksum = copy_out(data, self._memory[begin : begin + data.nbytes])
        self._next = position + data.nbytes
        return Placed(position=position, nbytes=data.nbytes, crc32c=checksum)

    async def room(self) -> None:
        """Waits for room for a batch, for a bounded time. A ring below the usual size was made for all that comes."""
        if self.size < RING_BYTES:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + ROOM_PATIENCE_S
        # What goes over the end begins anew, so no more than half can be had whatever has been read.
        nbytes = min(self.batch_bytes, self.size // 2)
        while self._fitting(nbytes) is None and loop.time() < until:  # noqa: ASYNC110  memory does not tell
            await asyncio.sleep(ROOM_PERIOD_S)

    def _fitting(self, nbytes: int) -> int | None:
        """Position of the next nbytes, past the end of the ring if they would go over it; None: there is no room."""
        position = -(-self._next // LINE_BYTES) * LINE_BYTES
        left = self.size - position % self.size
        position = position if nbytes <= left else position + left
        read = _read_position(self._memory)[0]
        if read <= self._next:
            self._read = max(self._read, read)
        return position if position + nbytes - self._read <= self.size else None


class RememberedRings:
    """Rings that prefill has been offered, by name."""

    def __init__(self) -> None:
        self._rings: dict[str, tuple[RingWriter, float]] = {}
        """With the time of the last offer, the oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def names(self) -> set[str]:
        return set(self._rings)

    def open(self, offered: prefill_service_pb2.ShmObject | None) -> RingWriter | None:
        """The ring that the maker of a call offers; None when there is none or it is not seen here."""
        if offered is None or not offered.name:
            return None
        loop = asyncio.get_running_loop()
        ring, _ = self._rings.pop(offered.name, (None, 0.0))
        if ring is None or (ring.token, ring.size) != (offered.token, offered.size):
            try:
                ring = RingWriter(offered.name, offered.token, offered.size)
            except (OSError, ValueError, OverflowError) as error:
                log.debug("decode offers shared memory that is not seen here: %s", error)
                return None
        self._rings[offered.name] = (ring, loop.time())
        if len(self._rings) > REMEMBERED_RINGS:
            _let_go([self._rings.pop(next(iter(self._rings)))])
        if self._timer is None:
            self._timer = loop.call_later(FORGET_PERIOD_S, self._forget)
        return ring

    def _forget(self) -> None:
        loop = asyncio.get_running_loop()
        old = loop.time() - REMEMBERED_S
        forgotten = [name for name, (ring, used) in self._rings.items() if used <= old or ring.is_forgotten]
        _let_go([self._rings.pop(name) for name in forgotten])
        self._timer = loop.call_later(FORGET_PERIOD_S, self._forget) if self._rings else None


def _let_go(held: list[Any]) -> None:
    """Forgets what is held in another thread: to give 32 MiB back takes milliseconds, and others run meanwhile."""
    if held:
        asyncio.get_running_loop().run_in_executor(None, held.clear)


def _read_position(memory: memoryview) -> memoryview:
    """Up to where decode has read, in one element."""
    return memory[TOKEN_BYTES : TOKEN_BYTES + 8].cast("Q")
