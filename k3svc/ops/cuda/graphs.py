"""Captured functions of fixed shapes: decode and verify steps grow to a rung of a ladder of sizes and are replayed.

The capture runs on zeros, which every index maps to the dummy slot and page, so it moves no state of a request.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.cuda.steps import Commit, Step

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows, and sequences, of a captured step. A larger step runs eagerly."""
LEAST_KEYS = 512
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffers: list[Tensor]
    commits: list[Commit]
    result: Any


class Graphs:
    """The captured functions of a backend, one for each kind of arguments."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, _Captured] = {}

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`Ops.run`. Functions without a decode or verify step, and steps past the ladder, run eagerly."""
        steps = [arg for arg in args if isinstance(arg, Step)]
        if len(steps) != 1 or (grown := _grown(steps[0])) is None:
            return function(*args)
        step = steps[0]
        wide = tuple(_wide(arg, step, grown) for arg in args)
        key = (function, _kind(wide))
        if key not in self._captured:
            self._captured[key] = self._capture(function, wide)
        captured = self._captured[key]
        for buffer, given in zip(captured.buffers, _tensors(wide), strict=True):
            buffer.copy_(given, non_blocking=True)
        captured.graph.replay()
        step.commits[:] = captured.commits
        return _mapped(captured.result, lambda x: x[: step.num_rows].clone())

    def _capture(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Captured:
        own = _mapped(args, torch.zeros_like)
        commits = next(arg.commits for arg in own if isinstance(arg, Step))
        # Not on the stream of the steps before, so that what they still do stays out of the capture.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function(*own)
        torch.cuda.current_stream().wait_stream(stream)
        commits.clear()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on to copy to and from the device.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = function(*own)
        return _Captured(graph=graph, buffers=_tensors(own), commits=list(commits), result=result)


def _grown(step: Step) -> Step | None:
    """The step with rows, sequences and keys of a rung; None past the ladder and for prompts."""
    most = max(step.num_rows, step.num_sequences)
    if step.mode == "extend" or most > LADDER[-1]:
        return None
    rung = next(size for size in LADDER if size >= most)
    keys = _rounded(step.max_keys)
    pages = -(-keys // step.page_size)
    rows, sequences = rung - step.num_rows, rung - step.num_sequences
    tables = step.block_tables
    pad = torch.nn.functional.pad
    if tables.shape[1] > pages:
        return None
    bounds = torch.cat([step.bounds, step.bounds[-1:].expand(sequences)])
    if step.is_decode:
        bounds = torch.arange(rung + 1, device=bounds.device)
    return replace(
        step,
        num_rows=rung,
        num_sequences=rung,
        has_padding=True,
        slots=pad(step.slots, (0, sequences), value=-1),
        starts=pad(step.starts, (0, sequences)),
        bounds=bounds,
        slot_mapping=pad(step.slot_mapping, (0, rows), value=-1),
        block_tables=pad(tables, (0, pages - tables.shape[1], 0, sequences)),
        row_sequence=pad(step.row_sequence, (0, rows), value=-1),
        row_keys=pad(step.row_keys, (0, rows)),
        max_keys=keys,
    )


def _rounded(keys: int) -> int:
    """Up to a quarter of a power of two, so that there are few kinds and little is attended to in vain."""
    step = max(LEAST_KEYS, (1 << (keys - 1).bit_length()) // 4)
    return -(-keys // step) * step


def _wide(arg: Any, step: Step, grown: Step) -> Any:
    if arg is step:
        return grown
    if isinstance(arg, Tensor):
        return torch.cat([arg, arg.new_zeros(grown.num_rows - arg.shape[0], *arg.shape[1:])])
    return arg


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other tensors and empty lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Step):
        parts = {part.name: _mapped(getattr(value, part.name), change) for part in fields(value)}
        return replace(value, **parts)
    if isinstance(value, list):
        return []
    return tuple(_mapped(item, change) for item in value) if isinstance(value, tuple) else value


def _leaves(value: Any) -> list[Any]:
    """Tensors and everything else in order; lists belong to the host."""
    if isinstance(value, Step):
        return [leaf for part in fields(value) for leaf in _leaves(getattr(value, part.name))]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if isinstance(value, list) else [value]


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in _leaves(args) if isinstance(leaf, Tensor)]


def _kind(args: tuple[Any, ...]) -> Hashable:
    """What a graph bakes: shapes, dtypes, and values that are no tensors."""
    return tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in _leaves(args))
