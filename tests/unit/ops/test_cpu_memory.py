"""Memory of the cpu backend in large pages."""

import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from k3svc.ops.cpu.memory import CHUNK, LARGE_PAGE, LargePages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_copies_are_equal_aligned_and_apart():
    memory, source = LargePages(), torch.Generator().manual_seed(0)
    given = [torch.randn(size, 3, generator=source) for size in (1, 7, 100, 5000)]
    given += [given[2].bfloat16(), given[3].t(), torch.randn(CHUNK // 4 + 1, generator=source)]
    copies = [memory.copy(x) for x in given]
    for x, copy in zip(given, copies, strict=True):
        assert copy.dtype == x.dtype
        assert copy.is_contiguous()
        assert torch.equal(copy, x)
        assert copy.data_ptr() % 64 == 0
    places = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))


def test_a_copy_outlives_the_memory_it_came_from():
    copy = LargePages().copy(torch.arange(1000))
    assert torch.equal(copy, torch.arange(1000))


def test_large_pages_are_taken_where_the_kernel_grants_them():
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        pytest.skip("the kernel grants no large pages")
    copy = LargePages().copy(torch.ones(LARGE_PAGE, dtype=torch.uint8))
    assert copy.data_ptr() % LARGE_PAGE == 0
    flags, is_own = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            is_own = low <= copy.data_ptr() < high
        elif is_own and head == "VmFlags:":
            flags = line
    assert " hg" in flags, "the memory was not asked for in large pages"


def test_a_kernel_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch):
    class Small(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Small)
    assert torch.equal(LargePages().copy(torch.arange(10)), torch.arange(10))
