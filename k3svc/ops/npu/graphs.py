"""Captured functions of fixed shapes on Ascend: decode, verify and draft steps replayed with new inputs.

A graph bakes shapes, addresses and host integers. So a step grows to a rung of the ladder of sizes before it is
captured, inputs are copied into buffers that the graph reads, and the lengths of the attention operator, which are host
integers, are updated before a replay. The capture runs on zeros, which every index maps to the dummies, so it moves no
state of a request. What syncs with the host stays outside: extend, and the choice of sampled tokens.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from k3svc.ops.capture import without_collection
from k3svc.ops.npu.steps import DecodeStep, Scratch, VerifyStep
from k3svc.ops.table import CacheSpec, SampleRows

LADDER = (16, 32, 64, 128, 256)
"""Rows of a captured step. A larger step runs eagerly."""
LENGTHS = {"query_ends": "actual_seq_lengths", "key_lengths": "actual_seq_lengths_kv"}
"""Fields of steps that hold host integers, and the keywords of npu_fused_infer_attention_score that read them."""
WARM_UPS = 2


class Graph(Protocol):
    """torch.npu.NPUGraph."""

    def replay(self) -> None:
        """Runs what was captured."""
        ...

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Host integers of the captured attention operators: one dict for all of them. Unknown keys are ignored."""
        ...


class GraphApi(Protocol):
    """What is used of torch.npu."""

    def NPUGraph(self) -> Graph:  # noqa: N802 - torch_npu's name
        """A graph without content."""
        ...

    def graph(self, npu_graph: Graph, *, pool: Any, auto_dispatch_capture: bool) -> AbstractContextManager[None]:
        """Captures what is run inside."""
        ...

    def graph_pool_handle(self) -> Any:
        """Memory that graphs share."""
        ...

    def mem_get_info(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Captured:
    graph: Graph
    buffers: list[Tensor]
    scratch: list[Scratch]
    result: Any


class Graphs:
    """The captured functions of a backend, one for each kind of arguments."""

    def __init__(self, api: GraphApi) -> None:
        self._api = api
        self._pool = api.graph_pool_handle()
        self._captured: dict[Hashable, _Captured] = {}
        self._memory: Scratch | None = None
        """What all captured verify steps keep their states in: a step is committed before the next one begins."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`Ops.run`."""
        if any(isinstance(arg, SampleRows) and not all(arg.host_greedy) for arg in args):
            return function(*args)
        kept = _scratch(args)
        grown = _grow(args)
        if grown is None:
            return function(*args)
        args, num_rows = grown
        key = (function, _kind(args))
        if key not in self._captured:
            self._captured[key] = self._capture(function, args)
        captured = self._captured[key]
        for buffer, given in zip(captured.buffers, _tensors(args), strict=True):
            buffer.copy_(given)
        lengths = _lengths(args)
        if lengths:
            captured.graph.update(cpu_update_input=[lengths])
        captured.graph.replay()
        for scratch, own in zip(kept, captured.scratch, strict=True):
            scratch.adopt(own)
        return _mapped(captured.result, lambda x: x[:num_rows].clone())

    def _capture(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Captured:
        own = _mapped(args, torch.zeros_like, self._room)
        for _ in range(WARM_UPS):
            function(*own)
        graph = self._api.NPUGraph()
        with without_collection(), self._api.graph(graph, pool=self._pool, auto_dispatch_capture=True):
            result = function(*own)
        return _Captured(graph=graph, buffers=_tensors(own), scratch=_scratch(own), result=result)

    def _room(self, scratch: Scratch) -> Scratch:
        """Of the shared memory. Where that is too small it is made anew, and what was captured on it goes with it."""
        if self._memory is None or not self._memory.covers(scratch):
            self._memory = scratch.joined(self._memory or scratch)
            self._captured = {key: own for key, own in self._captured.items() if not own.scratch}
        return scratch.within(self._memory)


def _grow(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], int] | None:
    """The arguments with their step at a rung, tensors beside it with as many rows, and the rows before; None past the
    ladder. Without such a step shapes stay.
    """
    for index, step in enumerate(args):
        if isinstance(step, DecodeStep | VerifyStep):
            for rung in LADDER:
                if (grown := step.grown(rung)) is not None:
                    wide = [_padded(arg, rung) if isinstance(arg, Tensor) else arg for arg in args]
                    wide[index] = grown
                    return tuple(wide), step.padding.shape[0]
            return None
    return args, next(len(arg) for arg in args if isinstance(arg, Tensor))


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def captured_bytes(spec: CacheSpec, sequences: int, width: int) -> int:
    """What steps that verify up to `sequences` of `width` rows keep: captured ones share memory for the widest of them,
    and one past the ladder has its own for as long as it lasts. Padding is a sequence, and that up to a rung another.
    """
    grown, rows = _power(sequences + 2), -(-sequences * width // LADDER[0]) * LADDER[0]
    is_past = rows + grown - sequences > LADDER[-1]
    return spec.verify_bytes(grown, _power(width)) + is_past * spec.verify_bytes(sequences + 1, width)


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _mapped(value: Any, change: Callable[[Tensor], Tensor], room: Callable[[Scratch], Scratch] | None = None) -> Any:
    """The same structure with other tensors, and scratch memory from `room`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Scratch):
        assert room is not None, "scratch memory where none belongs"
        return room(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: _mapped(getattr(value, part.name), change, room) for part in fields(value)})
    return tuple(_mapped(item, change, room) for item in value) if isinstance(value, tuple) else value


def _leaves(value: Any) -> list[Any]:
    """Tensors, scratch memory and everything else, in order; lists belong to the host."""
    if is_dataclass(value) and not isinstance(value, type):
        return [leaf for part in fields(value) for leaf in _leaves(getattr(value, part.name))]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if isinstance(value, list) else [value]


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in _leaves(args) if isinstance(leaf, Tensor)]


def _scratch(args: tuple[Any, ...]) -> list[Scratch]:
    return [leaf for leaf in _leaves(args) if isinstance(leaf, Scratch)]


def _kind(args: tuple[Any, ...]) -> Hashable:
    """What a graph bakes: classes, shapes, dtypes, and values that are no tensors."""
    parts: list[Hashable] = [type(arg).__name__ for arg in args]
    for leaf in _leaves(args):
        if isinstance(leaf, Tensor):
            parts.append((tuple(leaf.shape), leaf.dtype))
        elif not isinstance(leaf, Scratch):
            parts.append(leaf)
    return tuple(parts)


def _lengths(args: tuple[Any, ...]) -> dict[str, list[int]]:
    """By the operator's keywords."""
    return {
        LENGTHS[part.name]: getattr(arg, part.name)
        for arg in args
        if is_dataclass(arg) and not isinstance(arg, type)
        for part in fields(arg)
        if part.name in LENGTHS
    }
