"""Copies of state bytes that take the CRC32C of what they copy on the way.

Where the C library of the cpu backend is built and the processor has the instruction, it is one pass over memory that
reads each byte once. Elsewhere numpy copies and the package crc32c takes the checksum of what is still in the
processor's cache; `announce` says which it is. Both leave other threads their turn, unless there are so few bytes that
letting them in takes longer. Source and target must be contiguous and of the same size.
"""

import functools
import logging
from collections.abc import Callable, Iterator

import numpy as np
from crc32c import crc32c

from k3svc.errors import BackendError
from k3svc.ops.cpu.library import load_checked_copy

FEW_BYTES = 1 << 14
"""Fewer are copied sooner than other threads are let in."""
PIECE_BYTES = 1 << 19
"""What was copied is still in the processor's cache when its checksum is taken."""

log = logging.getLogger(__name__)


def announce() -> None:
    """Says once in the log when copies and checksums take two passes."""
    _native()


def copy_out(source: memoryview, target: memoryview) -> int:
    """Copies own bytes to where another process reads them. Returns the CRC32C of the source."""
    _require_equal_sizes(source, target)
    native = _native()
    if native is not None:
        return native(source, target, 0)
    checksum = 0
    for piece, copied in _pieces(source, target):
        checksum = crc32c(piece, checksum)
        _copy(piece, copied)
    return checksum


def copy_in(source: memoryview, target: memoryview, checksum: int = 0) -> int:
    """Copies bytes to where they stay. Returns the CRC32C of what has landed, going on from `checksum`: another process
    may change the source at any time.
    """
    _require_equal_sizes(source, target)
    native = _native()
    if native is not None:
        return native(source, target, checksum)
    for piece, landed in _pieces(source, target):
        _copy(piece, landed)
        checksum = crc32c(landed, checksum)
    return checksum


def _require_equal_sizes(source: memoryview, target: memoryview) -> None:
    """The library trusts its caller."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes to copy to {target.nbytes}")


def _pieces(source: memoryview, target: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    for begin in range(0, source.nbytes, PIECE_BYTES):
        yield source[begin : begin + PIECE_BYTES], target[begin : begin + PIECE_BYTES]


def _copy(source: memoryview, target: memoryview) -> None:
    if source.nbytes < FEW_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


@functools.cache
def _native() -> Callable[[memoryview, memoryview, int], int] | None:
    """The function of the C library; None where there is none, after a line in the log."""
    try:
        freely, alone = load_checked_copy()
    except BackendError as error:
        log.warning("hand-offs copy and check state in two passes: %s", error)
        return None

    def copy(source: memoryview, target: memoryview, checksum: int) -> int:
        count = source.nbytes
        function = alone if count < FEW_BYTES else freely
        return function(_address(target), _address(source), count, checksum)

    return copy


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
