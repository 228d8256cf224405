"""Steps as programs: the calls that a decode, verify or draft step makes, noted once and from then on made by one call
of the library. Between the kernels of a step there is no Python, and its thread takes the interpreter's lock once.

A recording runs the model's own code on rows of no content. Calls of the library are noted, not made; so are the sums
and concatenations that the model leaves to torch; anything else that would compute fails. The arguments of a call are
addresses, all of which stay what they are: of weights and pools, of intermediates, and of the inputs, which a replay
fills in first. Only how many rows there are differs, so that one program serves steps of any size. Of a draft step the
rows that count are requests; tensors and calls may have several rows for each row of their step.
"""

import ctypes
import math
import struct
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from ctypes import memmove
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from k3svc.errors import BackendError
from k3svc.ops.cpu.library import SIGNATURES, NumRows
from k3svc.ops.cpu.steps import CpuStep

MOST_PROGRAMS = 8
CALL_WORDS = 13
"""Of a noted call: which function, and its arguments after the context."""

_aten = torch.ops.aten


@dataclass(kw_only=True)
class _Program:
    calls: npt.NDArray[np.int64]
    """[calls, CALL_WORDS]"""
    address: int
    """Of the calls."""
    num_live: int
    """Rows of a step that the calls are for."""
    counts: npt.NDArray[np.int64]
    """Flat places of the words that count rows."""
    factors: npt.NDArray[np.int64]
    """How many rows each of them counts for a row of the step."""
    inputs: list[Tensor]
    step: CpuStep
    result: Any
    kept: list[Any]
    """What the calls point to."""


class Programs:
    """The programs of a backend, one for each kind of arguments."""

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._library = library
        self._context = context
        self._intermediates = Intermediates()
        self._programs: dict[Hashable, _Program] = {}

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        recording: Callable[["Recorder"], AbstractContextManager[None]],
    ) -> Any:
        """`Ops.run`. `recording` lets the operations of the backend call a recorder for as long as it is open."""
        steps = [arg for arg in args if isinstance(arg, CpuStep)]
        if len(steps) != 1 or not 0 < steps[0].num_live <= steps[0].MOST or not steps[0].pads_at_end:
            return function(*args)
        step = steps[0]
        key = (function, *(_kind(arg, step.num_rows) for arg in args))
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) == MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            program = self._programs[key] = self._record(function, args, recording)
        for own, given in zip(program.inputs, _tensors(args), strict=True):
            rows = given.contiguous()
            memmove(own.data_ptr(), rows.data_ptr(), own.nbytes // step.MOST * step.num_live)
        program.step.take(step)
        if program.num_live != step.num_live:
            program.calls.reshape(-1)[program.counts] = program.factors * step.num_live
            program.num_live = step.num_live
        self._library.k3_replay(self._context, program.address, *program.calls.shape)
        step.keep(program.step)
        return _result(program.result, step)

    def _record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        recording: Callable[["Recorder"], AbstractContextManager[None]],
    ) -> _Program:
        step = next(arg for arg in args if isinstance(arg, CpuStep))
        recorder = Recorder(self._library, step.MOST)
        own = tuple(_placeholder(arg, step) for arg in args)
        # A program that was recorded in one mode of torch runs in another.
        with torch.inference_mode(), recording(recorder), _Recording(recorder, self._intermediates):
            result = function(*own)
        calls = np.array(recorder.calls, dtype=np.int64)
        return _Program(
            calls=calls,
            address=calls.ctypes.data,
            num_live=step.MOST,
            counts=np.array(recorder.counts, dtype=np.int64),
            factors=np.array(recorder.factors, dtype=np.int64),
            inputs=_tensors(own),
            step=next(arg for arg in own if isinstance(arg, CpuStep)),
            result=result,
            kept=recorder.kept,
        )


class Recorder:
    """Stands in for the library and notes the calls of its functions."""

    def __init__(self, library: ctypes.CDLL, num_rows: int) -> None:
        """num_rows: of the step that is recorded."""
        self._library, self._num_rows = library, num_rows
        self.calls: list[list[int]] = []
        self.counts: list[int] = []
        """Flat places of the words that count rows."""
        self.factors: list[int] = []
        """How many rows each of them counts for a row of the step."""
        self.kept: list[Any] = []
        """Arguments that own what is pointed to."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._note, name)

    def _note(self, name: str, _context: int, *arguments: Any) -> None:
        words: list[int] = [self._library.k3_replayed(name.encode())]
        for kind, argument in zip(SIGNATURES[name], arguments, strict=True):
            if kind is NumRows:
                factor, rest = divmod(argument, self._num_rows)
                assert factor and not rest, f"{name} of {argument} rows in a step of {self._num_rows}"
                self.counts.append(len(self.calls) * CALL_WORDS + len(words))
                self.factors.append(factor)
            words.append(_word(kind, argument))
        self.calls.append(words + [0] * (CALL_WORDS - len(words)))
        self.kept.append(arguments)


class Intermediates:
    """Memory of what is computed on the way. Only one step runs at a time, so programs share it, and within one the
    memory of a tensor that nothing refers to any more goes to the next one.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of unspecified content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [index for index, block in enumerate(self._free) if block.nbytes >= num_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        else:
            block = torch.empty(num_bytes, dtype=torch.uint8)
        memory = block.numpy().data[:num_bytes]
        # The storage of the tensor holds the view, and dies with the last tensor that looks at it.
        weakref.finalize(memory, self._free.append, block).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch is asked to do during a recording."""

    def __init__(self, recorder: Recorder, intermediates: Intermediates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._intermediates = intermediates

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's compiler is kept out of modes by a wrapper that loads it: seconds and 75 MB for every process, and a
        folder of its own in TMPDIR. Nothing is compiled here.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is _aten.empty.memory_format:
            return self._intermediates.new(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        if func is _aten.add.Tensor and not kwargs:
            return self._add(*args)
        if func is _aten.cat.default and args[1:] == (1,):
            return self._concatenate(args[0])
        if func is _aten.stack.default and args[1:] == (1,):
            return self._stack(args[0])
        out = func(*args, **kwargs)
        if func is _aten.reshape.default and not _is_view(out, args):
            return self._concatenate([args[0]]).view(args[1])
        is_mutable = func._schema.is_mutable  # noqa: SLF001 - torch tells it nowhere else
        if is_mutable or not _is_view(out, args):
            raise BackendError(f"a step of the cpu backend computes {func}, which its programs do not know")
        return out

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape == y.shape or x.shape[1:] == y.shape, f"a sum of {list(x.shape)} and {list(y.shape)}"
        out = self._new(*x.shape)
        self._recorder.k3_add_rows(0, *_rows(x), *_rows(y.expand(x.shape)), *x.shape, out.data_ptr())
        return out

    def _stack(self, parts: list[Tensor]) -> Tensor:
        """Of rows [N] or [N, D] side by side, whatever numbers of 4 or 8 bytes they hold."""
        rows = [part.view(torch.float32).view(part.shape[0], -1) for part in parts]
        return self._concatenate(rows).view(parts[0].dtype).view(parts[0].shape[0], len(parts), *parts[0].shape[1:])

    def _concatenate(self, parts: list[Tensor]) -> Tensor:
        num_rows, width = parts[0].shape[0], sum(part.shape[1] for part in parts)
        out = self._new(num_rows, width)
        place = out.data_ptr()
        for part in parts:
            self._recorder.k3_take_rows(0, *_rows(part), None, num_rows, *part.shape, place, width)
            place += part.shape[1] * out.itemsize
        return out

    def _new(self, *shape: int) -> Tensor:
        return self._intermediates.new(shape, torch.float32)


def _rows(x: Tensor) -> tuple[int, int]:
    """Address and stride of float32 rows [N, D]."""
    assert x.dtype == torch.float32, x.dtype
    assert x.dim() == 2 and x.stride(1) == 1, f"rows of {list(x.shape)}, strides {x.stride()}"
    return x.data_ptr(), x.stride(0)


def _is_view(out: Any, args: tuple[Any, ...]) -> bool:
    """Whether all of a result lies in the memory of the first argument."""
    if not args or not isinstance(args[0], Tensor):
        return False
    memory = args[0].untyped_storage().data_ptr()
    return all(
        part.untyped_storage().data_ptr() == memory for part in (out if isinstance(out, list | tuple) else [out])
    )


def _word(kind: Any, argument: Any) -> int:
    """An argument as the library unpacks it."""
    if kind is ctypes.c_float:
        word: int = struct.unpack("q", struct.pack("f4x", argument))[0]
        return word
    if argument is None or isinstance(argument, int):
        return argument or 0
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


def _kind(arg: Any, num_rows: int) -> Hashable:
    """`num_rows`: of the step."""
    if isinstance(arg, CpuStep):
        return arg.kind
    if isinstance(arg, Tensor):
        return (arg.dtype, arg.shape[0] // num_rows, *arg.shape[1:])
    if is_dataclass(arg):
        return (type(arg), *(_kind(part, num_rows) for part in _parts(arg).values()))
    return arg  # type: ignore[no-any-return]


def _placeholder(arg: Any, step: CpuStep) -> Any:
    if isinstance(arg, CpuStep):
        return arg.alike(step.MOST)
    if isinstance(arg, Tensor):
        return arg.new_zeros(arg.shape[0] // step.num_rows * step.MOST, *arg.shape[1:])
    if is_dataclass(arg) and not isinstance(arg, type):
        return replace(arg, **{name: _placeholder(part, step) for name, part in _parts(arg).items()})
    return arg


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """In order, those inside of dataclasses too."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif is_dataclass(arg) and not isinstance(arg, CpuStep):
            found += _tensors(tuple(_parts(arg).values()))
    return found


def _parts(arg: Any) -> dict[str, Any]:
    """Fields of a dataclass but for host copies of its tensors, which a recorded function does not read."""
    return {name: getattr(arg, name) for name in _names(arg.__class__)}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind) if not part.name.startswith("host_"))


def _result(own: Any, step: CpuStep) -> Any:
    """A copy of the live rows, and zeros for padding."""
    if isinstance(own, tuple):
        return tuple(_result(part, step) for part in own)
    if own is None:
        return None
    rows = own.contiguous()
    make = torch.empty if step.is_full else torch.zeros
    out = make(own.shape[0] // step.MOST * step.num_rows, *own.shape[1:], dtype=own.dtype)
    memmove(out.data_ptr(), rows.data_ptr(), rows.nbytes // step.MOST * step.num_live)
    return out
