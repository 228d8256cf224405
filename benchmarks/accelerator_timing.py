"""How the accelerator benchmark measures: replays of CUDA graphs, medians, and the two ceilings of the card."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]

L2_BYTES = 256 << 20
"""What is rotated over: several times any level-2 cache."""


def graph_seconds(calls: Sequence[Call], *, rounds: int = 15, least_s: float = 2e-3) -> float:
    """Median seconds of one call. All calls, each over memory of its own, are captured in one graph, as often as takes
    least_s, and the graph is replayed.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    once_s = begin.elapsed_time(end) * 1e-3
    repeats = max(1, min(200, int(least_s / max(once_s, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return float(statistics.median(times)) / (repeats * len(calls))


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the card does at best."""

    copy_bytes_per_s: float
    """Bytes read and written by an elementwise kernel over 4 GiB, the better of a copy and an addition."""
    matrix_flops: float
    """bfloat16, 8192 x 8192 x 8192, random numbers."""


def measure_ceilings() -> Ceilings:
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    copy_s = min(
        graph_seconds([lambda: target.copy_(source)], rounds=9), graph_seconds([lambda: add(source, target)], rounds=9)
    )
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = graph_seconds([lambda: torch.mm(a, b)], rounds=9)
    return Ceilings(copy_bytes_per_s=2 * source.nbytes / copy_s, matrix_flops=2 * 8192**3 / product_s)


def copy_seconds(num_bytes: int) -> float:
    """Seconds to read and write this many bytes in all, in one elementwise kernel, cold."""
    size = num_bytes // 8
    sets = max(2, -(-L2_BYTES // num_bytes))
    source = torch.empty(sets, size, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return graph_seconds([lambda i=i: add(source[i], target[i]) for i in range(sets)])  # type: ignore[misc]


def add(source: Tensor, target: Tensor) -> None:
    """A copy as a kernel; `copy_` in a graph may be left to a copy engine, which is slower."""
    torch.add(source, 1.0, out=target)


def error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| as norms; NaN where actual has any."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())
