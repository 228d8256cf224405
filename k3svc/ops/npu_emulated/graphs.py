"""torch.npu's graphs, emulated: what runs inside of a capture is recorded, and a replay runs it again.

As on the device nothing is computed while capturing: what operations wrote meanwhile is undone, and their results hold
NaN until the first replay. Host integers are baked; `update` changes those of the attention operator.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from k3svc.ops.npu_emulated.contract import ContractViolation, poison, require, session
from k3svc.ops.npu_emulated.device import no_host_methods, tensors_of

_FREE_BYTES = 256 << 20
_UPDATED = "npu_fused_infer_attention_score"


@dataclass(kw_only=True)
class _Record:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: list[Tensor]

    @property
    def is_updated(self) -> bool:
        return self.function is getattr(torch.ops.npu, _UPDATED).default


class NPUGraph:
    """What torch.npu.NPUGraph offers of capture, update and replay."""

    def __init__(self) -> None:
        self.auto_dispatch_capture = False
        self._records: list[_Record] = []
        self._born: set[int] = set()
        self._before: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}
        self._is_captured = False

    def protect(self, tensors: list[Tensor]) -> None:
        """`Recorder.protect`."""
        for x in tensors:
            key = (x.data_ptr(), tuple(x.shape))
            if _memory(x) not in self._born and key not in self._before:
                self._before[key] = (x, x.clone())

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """`Recorder.add`."""
        results = tensors_of([out])
        given = {_memory(x) for x in tensors_of((args, kwargs))}
        born = {_memory(x) for x in results} - given
        if not born and isinstance(function, OpOverload) and function.is_view:
            # A view of its argument stays one.
            return
        self._born |= born
        lists = {key: deepcopy(value) if _is_host(value) else value for key, value in kwargs.items()}
        self._records.append(_Record(function=function, args=args, kwargs=lists, out=results))

    def capture_end(self) -> None:
        """Takes back what was written, and leaves results unwritten."""
        for x, old in self._before.values():
            x.copy_(old)
        self._before.clear()
        for record in self._records:
            for x in record.out:
                if _memory(x) in self._born:
                    poison(x)
        self._is_captured = True

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Host integers of the attention operators; keys that a call did not have are ignored."""
        if not self.auto_dispatch_capture:
            raise RuntimeError("the graph was captured without auto_dispatch_capture")
        records = [record for record in self._records if record.is_updated]
        updates = cpu_update_input * len(records) if len(cpu_update_input) == 1 else cpu_update_input
        if len(updates) != len(records):
            raise RuntimeError(f"there are {len(records)} operators to update and {len(updates)} elements")
        for record, values in zip(records, updates, strict=True):
            for key in values.keys() & record.kwargs.keys():
                old, new = record.kwargs[key], values[key]
                require(all(type(n) is int for n in new), _UPDATED, f"{key} {new}: Python integers")
                require(len(old) == len(new), _UPDATED, f"{len(new)} {key}, captured with {len(old)}")
                record.kwargs[key] = list(new)

    def replay(self) -> None:
        """Runs what was captured, over the same memory."""
        if not self._is_captured:
            raise ContractViolation("NPUGraph.replay: nothing was captured")
        for record in self._records:
            for kept, new in zip(record.out, tensors_of([record.function(*record.args, **record.kwargs)]), strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class graph:  # noqa: N801 - torch.npu's name
    """Captures what runs inside."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        require(stream is None and capture_error_mode == "global", "torch.npu.graph", "other modes are not emulated")
        require(pool is not None, "torch.npu.graph", "graphs of a ladder share one pool")
        self._graph = npu_graph
        self._graph.auto_dispatch_capture = auto_dispatch_capture
        self._stack = ExitStack()

    def __enter__(self) -> None:
        current = session()
        require(current.recorder is None, "torch.npu.graph", "another capture is under way")
        current.recorder, current.is_capturing = self._graph, True
        self._stack.enter_context(no_host_methods())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current = session()
        self._stack.close()
        current.recorder, current.is_capturing = None, False
        outer, current.is_in_kernel = current.is_in_kernel, True
        try:
            self._graph.capture_end()
        finally:
            current.is_in_kernel = outer


def graph_pool_handle() -> Any:
    """Memory that graphs share."""
    return object()


def mem_get_info() -> tuple[int, int]:
    """Bytes of the device that are free, and all: those of a small one."""
    return _FREE_BYTES, 2 * _FREE_BYTES


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_host(value: Any) -> bool:
    return isinstance(value, list) and all(not isinstance(item, Tensor) for item in value)
