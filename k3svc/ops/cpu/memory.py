"""Memory for weights in large pages, where the kernel grants them to those who ask (`madvise` or `always` in
/sys/kernel/mm/transparent_hugepage/enabled): a step reads all of it, and walks page tables once for 2 MB, not for 4 KB.
"""

import logging
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
CHUNK = 8 * LARGE_PAGE
ALIGNMENT = 64

log = logging.getLogger(__name__)


class LargePages:
    """Hands out memory piece by piece from chunks of large pages. A chunk goes back with the last tensor in it."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def copy(self, x: Tensor) -> Tensor:
        """The same tensor, contiguous, in this memory."""
        num_bytes = x.numel() * x.itemsize
        taken = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if taken > len(self._rest):
            self._rest = _chunk(max(CHUNK, -(-taken // LARGE_PAGE) * LARGE_PAGE))
        own, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return torch.frombuffer(own, dtype=x.dtype).view(x.shape).copy_(x)


def _chunk(num_bytes: int) -> memoryview:
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            log.debug("the kernel has no large pages for those who ask; weights lie in small ones", exc_info=True)
    return memoryview(memory)[first : first + num_bytes]
