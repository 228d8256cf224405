"""Device semantics that torch's CPU does not have, in force while adapters run.

- An index of -1 in index_select, index_copy_ and index_fill_ aliases the last row, silently.
- Products of bfloat16 matrices accumulate exactly and round once.
- While capturing, whatever moves a value or a shape to the host raises: item, tolist, cpu, numpy, bool, nonzero, masked
  indexing.
- Memory from torch.empty holds NaN, or the smallest integer.
- Calls of vendor operators and kernels are recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from k3svc.ops.npu_emulated.contract import (
    ContractViolation,
    Session,
    is_running,
    poison,
    running,
    session,
)

_ALIASING = ("aten::index_select", "aten::index_copy_", "aten::index_fill_.int_Scalar")
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::matmul")
_UNWRITTEN = ("aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::empty_strided")
_SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
_MASKABLE = ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")
_HOST_METHODS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
)
_VENDOR_NAMESPACES = ("npu", "atb")


class _DeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What reaches the dispatcher."""

    def __init__(self, current: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = current

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's compiler is kept out of modes by a wrapper that loads it, seconds for every process. Nothing is
        compiled here.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._session.is_in_kernel:
            return func(*args, **kwargs)
        if self._session.is_capturing:
            _require_no_sync(func, args)
        recorder = self._session.recorder
        if recorder is None:
            return self._run(func, args, kwargs)
        may_write = func.namespace in _VENDOR_NAMESPACES or func._schema.is_mutable  # noqa: SLF001 - no public name
        if may_write:
            recorder.protect(tensors_of((args, kwargs)))
        out = self._run(func, args, kwargs)
        recorder.add(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = func.name()
        if func.namespace in _VENDOR_NAMESPACES:
            with self._session.kernel(name, [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]):
                return func(*args, **kwargs)
        if name in _ALIASING:
            x, dim, index = args[:3]
            return func(x, dim, torch.where(index < 0, index + x.shape[dim], index), *args[3:], **kwargs)
        if name in _PRODUCTS and args[0].dtype == args[1].dtype == torch.bfloat16:
            return func(args[0].double(), args[1].double()).to(torch.bfloat16)
        if name in _UNWRITTEN:
            return poison(func(*args, **kwargs))
        return func(*args, **kwargs)


def _require_no_sync(func: Any, args: tuple[Any, ...]) -> None:
    name = func.name()
    is_masked = name in _MASKABLE and any(x is not None and x.dtype == torch.bool for x in args[1])
    if name in _SYNCS or is_masked:
        raise ContractViolation(f"{name}: syncs with the host, which a captured graph cannot")


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors inside of lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [x for item in value for x in tensors_of(item)] if isinstance(value, list | tuple) else []


class _HostMode(TorchFunctionMode):
    """Methods that leave the device without passing the dispatcher when the device is a CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _HOST_METHODS and not session().is_in_kernel:
            raise ContractViolation(f"Tensor.{func.__name__}: syncs with the host, which a captured graph cannot")
        return func(*args, **(kwargs or {}))


@contextmanager
def on_device(current: Session) -> Iterator[None]:
    """Runs what is inside as if on the device."""
    if is_running(current):
        yield
        return
    with running(current), _DeviceMode(current), no_host_methods() if current.is_capturing else nullcontext():
        yield


def no_host_methods() -> TorchFunctionMode:
    """What a capture forbids beside what reaches the dispatcher."""
    return _HostMode()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the emulation of a Python kernel: its calls are recorded, and inside it torch's CPU is itself again."""

    @wraps(function)
    def launch(*args: Any, **kwargs: Any) -> Any:
        current = session()
        recorder = None if current.is_in_kernel else current.recorder
        if recorder is not None:
            recorder.protect(tensors_of((args, kwargs)))
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        with current.kernel(function.__name__, tensors):
            out = function(*args, **kwargs)
        if recorder is not None:
            recorder.add(launch, args, kwargs, out)
        return out

    return launch
