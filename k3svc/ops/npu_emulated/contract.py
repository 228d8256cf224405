"""What the emulated operators share: the rules in force, checks of a contract, poisoned memory, the record of calls.

A breach raises ContractViolation at the call, where the device would fault, refuse or silently compute something else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from k3svc.errors import BackendError


class ContractViolation(RuntimeError):
    """An operator was called outside of its contract."""


RELAXATIONS = ("fp32", "shape-relaxed")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the emulator enforces. Nothing relaxed is contract mode: what the device accepts, and no more."""

    fp32: bool = False
    """float32 passes where the operator wants bfloat16. Only dtype rules are lifted."""
    shape_relaxed: bool = False
    """Any head, latent and page size passes. Ranks and the agreement of shapes are still checked."""

    @classmethod
    def parse(cls, names: Sequence[str]) -> "Rules":
        """Rules with the relaxations of these names. Raises BackendError for an unknown one."""
        for name in names:
            if name not in RELAXATIONS:
                raise BackendError(
                    f"model.device: npu-emulated has no relaxation {name!r}; it has: {', '.join(RELAXATIONS)}",
                    device=name,
                )
        return cls(fp32="fp32" in names, shape_relaxed="shape-relaxed" in names)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operator."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors among its arguments, in their order."""


class Recorder(Protocol):
    """What a captured operation is told to."""

    def protect(self, tensors: list[Tensor]) -> None:
        """Before it runs, of what it may write to."""
        ...

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """After it ran."""
        ...


@dataclass(kw_only=True)
class Session:
    """The state of the emulated device while adapters run on it."""

    rules: Rules = field(default_factory=Rules)
    calls: list[Call] = field(default_factory=list)
    is_capturing: bool = False
    fractal: set[int] = field(default_factory=set)
    """Addresses of tensors in NZ format."""
    recorder: Recorder | None = None
    """The graph that is being captured."""
    is_in_kernel: bool = False
    """Inside an operator: what runs there is the emulation, not the caller."""

    @contextmanager
    def kernel(self, name: str, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Records a call and runs it."""
        self.calls.append(Call(name=name, shapes=tuple(tuple(x.shape) for x in tensors)))
        outer, self.is_in_kernel = self.is_in_kernel, True
        try:
            yield
        finally:
            self.is_in_kernel = outer


_SESSION: ContextVar[Session | None] = ContextVar("npu_emulated_session", default=None)


def is_running(current: Session) -> bool:
    """Whether a session is in force."""
    return _SESSION.get() is current


def session() -> Session:
    """The session in force; outside of any, contract mode."""
    return _SESSION.get() or Session()


@contextmanager
def running(current: Session) -> Iterator[None]:
    """Puts a session in force."""
    token = _SESSION.set(current)
    try:
        yield
    finally:
        _SESSION.reset(token)


def require(holds: bool, operator: str, rule: str) -> None:
    """Raises ContractViolation unless the rule holds."""
    if not holds:
        raise ContractViolation(f"{operator}: {rule}")


def require_size(holds: bool, operator: str, rule: str) -> None:
    """The same for a rule on sizes that `shape-relaxed` lifts."""
    require(holds or session().rules.shape_relaxed, operator, rule)


def require_dtype(operator: str, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raises unless the dtype is allowed. With `fp32`, float32 passes wherever bfloat16 does."""
    lifted = session().rules.fp32 and tensor.dtype == torch.float32 and torch.bfloat16 in allowed
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    require(tensor.dtype in allowed or lifted, operator, f"{name} is {tensor.dtype}, must be {names}")


def require_contiguous(operator: str, **tensors: Tensor | None) -> None:
    """Raises for the first tensor that is not contiguous. The device reads a view's memory as if it were."""
    for name, tensor in tensors.items():
        require(tensor is None or tensor.is_contiguous(), operator, f"{name} must be contiguous")


def require_indices(operator: str, name: str, index: Tensor, size: int, *, pad: int | None = None) -> None:
    """Raises for an index outside of [0, size) that is not the documented pad id."""
    is_wrong = (index < 0) | (index >= size)
    if pad is not None:
        is_wrong &= index != pad
    require(not bool(is_wrong.any()), operator, f"{name} holds {index[is_wrong].tolist()}, outside of [0, {size})")


def require_eager(operator: str) -> None:
    """Raises while capturing: the operator copies an argument to the host."""
    require(not session().is_capturing, operator, "syncs with the host, which a captured graph cannot")


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that nobody wrote: NaN, or the smallest integer."""
    return poison(torch.empty(tuple(shape), dtype=dtype))


def poison(x: Tensor) -> Tensor:
    """Fills x with NaN, or with the smallest integer."""
    if x.dtype == torch.bool:
        return x.fill_(True)
    return x.fill_(float("nan") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min)
