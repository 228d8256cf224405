"""Captured functions of fixed shapes: decode and verify steps grow to a rung of a ladder of sizes and are replayed.

The capture runs on padding, which moves no state of a request. A replay copies what a step brings into the tensors of
the capture; what lies behind it there is padding, or rows of earlier steps that no padding reads.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.capture import without_collection
from k3svc.ops.cuda.proposals import Proposals
from k3svc.ops.cuda.steps import Step
from k3svc.ops.reference_draft import PlainStep

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows, and sequences, of a captured step. A larger step runs eagerly."""
LEAST_KEYS = 512
WARM_UPS = 2


@dataclass(kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    step: Step
    tensors: list[Tensor]
    """The arguments beside the step, those that are tensors."""
    result: Any
    num_rows: int = 0
    """Of the last step; rows behind it are padding."""
    num_sequences: int = 0

    def take(self, step: Step, tensors: list[Tensor]) -> None:
        """Copies a step into the tensors of the capture."""
        own = self.step
        pairs = [(own.slots, step.slots), (own.slot_mapping, step.slot_mapping), (own.starts, step.starts)]
        pairs += zip(self.tensors, tensors, strict=True)
        count, pages = step.block_tables.shape
        tables = own.block_tables[:count, :pages]
        if count == 1:
            # In one piece, as all the rest, so that one call copies all.
            pairs.append((tables[0], step.block_tables[0]))
        if not step.is_decode:
            pairs += [(own.bounds, step.bounds), (own.row_sequence, step.row_sequence), (own.row_keys, step.row_keys)]
        targets = [own if own.shape == given.shape else own[: given.shape[0]] for own, given in pairs]
        torch._foreach_copy_(targets, [given for _, given in pairs], non_blocking=True)
        if count > 1:
            tables.copy_(step.block_tables, non_blocking=True)
        if step.num_rows < self.num_rows:
            own.slot_mapping[step.num_rows : self.num_rows] = -1
            if not step.is_decode:
                own.row_keys[step.num_rows : self.num_rows] = 0
        if step.num_sequences < self.num_sequences:
            own.slots[step.num_sequences : self.num_sequences] = -1
        if not step.is_decode:
            own.bounds[step.num_sequences + 1 :] = step.bounds[-1]
        self.num_rows, self.num_sequences = step.num_rows, step.num_sequences


class Graphs:
    """The captured functions of a backend, one for each kind of arguments."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, _Captured] = {}
        self._proposals = Proposals(self._graph)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`Ops.run`. Functions without a step, extend steps, and what is past the ladder run eagerly."""
        step = next((arg for arg in args if isinstance(arg, Step | PlainStep)), None)
        if isinstance(step, PlainStep):
            return self._proposals.run(function, args, step)
        if step is None or not _fits(step):
            return function(*args)
        rung = next(size for size in LADDER if size >= max(step.num_rows, step.num_sequences))
        keys = _rounded(step.max_keys)
        key = (function, step.mode, rung, keys, step.page_size, *(_kind(arg) for arg in args))
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(function, args, _padding(step, rung, keys))
        captured.take(step, [arg for arg in args if isinstance(arg, Tensor)])
        captured.graph.replay()
        step.commits[:] = captured.step.commits
        return _mapped(captured.result, lambda x: x[: step.num_rows].clone())

    def _capture(self, function: Callable[..., Any], args: tuple[Any, ...], step: Step) -> _Captured:
        tensors: list[Tensor] = []

        def own(arg: Any) -> Any:
            if isinstance(arg, Tensor):
                tensors.append(arg.new_zeros(step.num_rows, *arg.shape[1:]))
                return tensors[-1]
            return step if isinstance(arg, Step) else arg

        own_args = tuple(own(arg) for arg in args)

        def call() -> Any:
            step.commits.clear()
            return function(*own_args)

        graph, result = self._graph(call)
        return _Captured(graph=graph, step=step, tensors=tensors, result=result)

    def _graph(self, call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """What a call asks of the device, captured, and its result there."""
        # Not on the stream of the steps before, so that what they still do stays out of the capture.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on to copy to and from the device.
        with (
            without_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = call()
        return graph, result


def _fits(step: Step) -> bool:
    most = max(step.num_rows, step.num_sequences)
    pages = -(-_rounded(step.max_keys) // step.page_size)
    return step.mode != "extend" and most <= LADDER[-1] and step.block_tables.shape[1] <= pages


def _padding(step: Step, rung: int, keys: int) -> Step:
    """A step of the same mode that is padding alone."""
    like = step.slots
    return replace(
        step,
        num_rows=rung,
        num_sequences=rung,
        has_padding=True,
        slots=like.new_full((rung,), -1),
        starts=like.new_zeros(rung),
        bounds=torch.arange(rung + 1, device=like.device) if step.is_decode else like.new_zeros(rung + 1),
        slot_mapping=like.new_full((rung,), -1),
        block_tables=like.new_zeros(rung, -(-keys // step.page_size)),
        row_sequence=like.new_full((rung,), -1),
        row_keys=like.new_zeros(rung),
        max_keys=keys,
        commits=[],
    )


def _rounded(keys: int) -> int:
    """Up to a quarter of a power of two, so that there are few kinds and little is attended to in vain."""
    step = max(LEAST_KEYS, (1 << (keys - 1).bit_length()) // 4)
    return -(-keys // step) * step


def _kind(arg: Any) -> Hashable:
    """What a graph bakes of an argument: shape of a row, dtype, and values that are no tensors."""
    if isinstance(arg, Tensor):
        return (tuple(arg.shape[1:]), arg.dtype)
    return None if isinstance(arg, Step) else arg


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tuple with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    return tuple(_mapped(item, change) for item in value) if isinstance(value, tuple) else value
