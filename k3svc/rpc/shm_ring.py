"""The ring of k3svc.v1.ShmObject: bytes of a hand-off through shared memory, while the stream carries their positions.

Decode makes an object for each call, prefill opens it and takes its name away. Prefill copies frames out of its pools
into the ring, decode out of the ring into its own. Positions only rise: position p lies p mod size bytes into the ring,
and decode writes into the object up to where it has read. That is what makes room; nothing blocks while a ring is full
but the hand-off that it belongs to. What lies in the ring is trusted no more than what comes by stream: frames carry
their CRC32C, which is compared with the bytes that have landed.

Both map the object, which is twice as fast as reading and writing it as a file. Its pages are there from the start, so
that a full file system is an error of decode's call. Who could cut it short runs as the same user as both.
"""

import asyncio
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from crc32c import crc32c

from k3svc.errors import TransferError
from k3svc.rpc.shm import FOLDER, TOKEN_BYTES, ShmObject, open_object
from k3svc.transfer.manifest import Placed
from k3svc.v1 import prefill_service_pb2

RING_BYTES = 8 << 20
"""Size of a ring, unless all that it is made for takes less."""
SMALL_RING_BYTES = 2 << 20
"""A ring of this size is made in less time than another thread takes to begin."""
BATCH_BYTES = 4 << 20
"""Bytes of the frames of one message whose data goes through a ring; a message costs about as much as copying 1 MiB."""
HEAD_BYTES = 4096
PIECE_BYTES = 1 << 19
"""What was copied is still in the processor's cache when its checksum is taken."""
MAX_POSITION = 1 << 62
ROOM_PATIENCE_S = 5.0
"""After so long without room, frames go by stream."""
ROOM_PERIOD_S = 0.001
"""Loops tell no less time apart; a full ring keeps its reader busy for longer."""

log = logging.getLogger(__name__)


async def make_ring(num_bytes: int) -> "RingReader":
    """A ring for a hand-off of num_bytes in all. Raises OSError where there is no shared memory."""
    size = min(RING_BYTES, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return RingReader(size) if size <= SMALL_RING_BYTES else await asyncio.to_thread(RingReader, size)


class RingReader:
    """Decode's end of a ring that it makes. Raises OSError where there is no shared memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_shared = False
        """Whether the other side says that it sees the same memory."""
        self._object = ShmObject(HEAD_BYTES + size)
        self.name, self.token = self._object.name, self._object.token
        self._read = 0
        try:
            os.posix_fallocate(self._object.file, 0, HEAD_BYTES + size)
            self._memory = memoryview(mmap.mmap(self._object.file, HEAD_BYTES + size))
        except OSError:
            self.close()
            raise

    def span(self, position: int, nbytes: int) -> "RingSpan":
        """Bytes of a frame. Raises TransferError for what cannot be in the ring."""
        begin = position % self.size
        if not self.is_shared or begin + nbytes > self.size or position > MAX_POSITION:
            raise TransferError(
                f"a frame of {nbytes} bytes at position {position} of a ring of {self.size if self.is_shared else 0}",
                reason="HANDOFF_MALFORMED",
            )
        self._read = max(self._read, position + nbytes)
        return RingSpan(self._memory[HEAD_BYTES + begin : HEAD_BYTES + begin + nbytes])

    def make_room(self) -> None:
        """All frames that `span` was asked for have been read."""
        _read_position(self._memory)[0] = self._read

    def unlink(self) -> None:
        """Takes the name away. Safe to repeat."""
        self._object.unlink()

    def close(self) -> None:
        """Takes the name away; the memory ends with the last span of it. Safe to repeat."""
        self._object.close()


class RingSpan:
    """Bytes in a ring (`k3svc.transfer.manifest.Payload`)."""

    def __init__(self, memory: memoryview) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory

    def read_into(self, target: memoryview, offset: int) -> None:
        """Copies the bytes from `offset` on, as many as the target has; other threads run meanwhile."""
        _copy(self._memory[offset : offset + target.nbytes], target)


class RingWriter:
    """Prefill's end of a ring (`k3svc.transfer.outbox.FrameSink`)."""

    batch_bytes = BATCH_BYTES

    def __init__(self, name: str, token: bytes, size: int) -> None:
        """Takes the name away. Raises OSError when there is no such ring here."""
        file = open_object(name, token, os.O_RDWR)
        try:
            if not 0 < size <= os.fstat(file).st_size - HEAD_BYTES:
                raise OSError("an object of another size")
            self._memory = memoryview(mmap.mmap(file, HEAD_BYTES + size))
        finally:
            os.close(file)
        (FOLDER / name).unlink(missing_ok=True)
        self._size = size
        self._next = 0
        self._read = 0

    def put(self, data: memoryview) -> Placed | None:
        """Copies data; None where there is no room. Other threads run meanwhile."""
        position = self._fitting(data.nbytes)
        if position is None:
            return None
        begin, checksum = HEAD_BYTES + position % self._size, 0
        for done in range(0, data.nbytes, PIECE_BYTES):
            piece = data[done : done + PIECE_BYTES]
            _copy(piece, self._memory[begin + done : begin + done + piece.nbytes])
            checksum = crc32c(piece, checksum)
        self._next = position + data.nbytes
        return Placed(position=position, nbytes=data.nbytes, crc32c=checksum)

    async def room(self) -> None:
        """Waits for room for a batch, for a bounded time. A ring below the usual size was made for all that comes."""
        if self._size < RING_BYTES:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + ROOM_PATIENCE_S
        # What goes over the end begins anew, so no more than half can be had whatever has been read.
        nbytes = min(self.batch_bytes, self._size // 2)
        while self._fitting(nbytes) is None and loop.time() < until:  # noqa: ASYNC110  memory does not tell
            await asyncio.sleep(ROOM_PERIOD_S)

    def _fitting(self, nbytes: int) -> int | None:
        """Position of the next nbytes, past the end of the ring if they would go over it; None: there is no room."""
        left = self._size - self._next % self._size
        position = self._next if nbytes <= left else self._next + left
        read = _read_position(self._memory)[0]
        if read <= self._next:
            self._read = max(self._read, read)
        return position if position + nbytes - self._read <= self._size else None


@contextmanager
def open_ring(offered: prefill_service_pb2.ShmObject | None) -> Iterator[RingWriter | None]:
    """The ring that the maker of a call offers; None when there is none or it is not seen here."""
    ring = None
    if offered is not None and offered.name:
        try:
            ring = RingWriter(offered.name, offered.token, offered.size)
        except (OSError, ValueError, OverflowError) as error:
            log.debug("decode offers shared memory that is not seen here: %s", error)
    yield ring


def _read_position(memory: memoryview) -> memoryview:
    """Up to where decode has read, in one element."""
    return memory[TOKEN_BYTES : TOKEN_BYTES + 8].cast("Q")


def _copy(data: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
