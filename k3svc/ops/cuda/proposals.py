"""Captured proposals of draft models: one graph for each kind of blocks, which grow to a rung of a ladder of counts.

A proposal is some hundred small operations, which take longer to ask for than to compute. It reads contexts and writes
nothing that lasts, so a block that was drafted before may stay in the rows behind those of a replay.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.draft_table import BlockMeta
from k3svc.ops.reference_draft import PlainDraft, PlainStep, visible_cells
from k3svc.ops.table import SampleRows

LADDER = (1, 2, 4, 8, 16, 32, 64)
"""Blocks of a captured proposal. More are drafted eagerly."""
LEAST_CELLS = 512
"""Of a context, as far as it has them: fewer would save nothing, and want graphs of their own."""
Capture = Callable[[Callable[[], Any]], tuple[torch.cuda.CUDAGraph, Any]]
"""Captures what a function asks of the device: the graph, and the function's result in it."""


class CudaDraft(PlainDraft):
    """`DraftOps` whose proposals are of few kinds."""

    def prepare(self, meta: BlockMeta) -> PlainStep:
        """`DraftOps.prepare`."""
        cells = min(meta.capacity, max(meta.num_cells, LEAST_CELLS))
        return PlainStep(slots=meta.slots, visible=visible_cells(replace(meta, num_cells=cells)))


@dataclass(frozen=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    tensors: list[Tensor]
    result: Any


class Proposals:
    """The captured proposals of a backend."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._captured: dict[Hashable, _Captured] = {}

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], step: PlainStep) -> Any:
        """`Ops.run` of a function with such a step."""
        count = step.slots.shape[0]
        if count > LADDER[-1]:
            return function(*args)
        rung = next(size for size in LADDER if size >= count)
        args = tuple(_without_host(arg, rung) for arg in args)
        given = [leaf for leaf in _leaves(args) if isinstance(leaf, Tensor)]
        kinds = tuple((tuple(x.shape[1:]), x.dtype) if isinstance(x, Tensor) else x for x in _leaves(args))
        key = (function, rung, kinds)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._new(function, args, count, rung)
        for dtype in {x.dtype for x in given}:
            pairs = [(own[: x.shape[0]], x) for own, x in zip(captured.tensors, given, strict=True) if x.dtype == dtype]
            torch._foreach_copy_([own for own, _ in pairs], [x for _, x in pairs], non_blocking=True)
        captured.graph.replay()
        return _mapped(captured.result, lambda x: x[:count].clone())

    def _new(self, function: Callable[..., Any], args: tuple[Any, ...], count: int, rung: int) -> _Captured:
        tensors: list[Tensor] = []

        def own(x: Tensor) -> Tensor:
            tensors.append(x.new_zeros(x.shape[0] // count * rung, *x.shape[1:]))
            return tensors[-1]

        own_args = _mapped(args, own)
        graph, result = self._capture(lambda: function(*own_args))
        return _Captured(graph=graph, tensors=tensors, result=result)


def _without_host(arg: Any, rung: int) -> Any:
    """The kernel that chooses goes by the tensors of the rows; of the host it learns whether any row has filters."""
    if not isinstance(arg, SampleRows):
        return arg
    filters = (1, 1.0, 0.0) if any(arg.host_filtered) else (0, 1.0, 0.0)
    return replace(arg, host_greedy=(False,) * rung, host_filters=(filters,) * rung)


def _leaves(value: Any) -> list[Any]:
    """Tensors and everything else, in order."""
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [leaf for part in fields(value) for leaf in _leaves(getattr(value, part.name))]
    return [value]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: _mapped(getattr(value, part.name), change) for part in fields(value)})
    return value
