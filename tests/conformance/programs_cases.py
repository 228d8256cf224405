"""What the tests of programs share: the backend without them, and the memory that they compute in."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.cpu.programs import Intermediates
from k3svc.ops.table import Result


class OneByOne(Cpu):
    """The backend without programs."""

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        return function(*args)


class Memory:
    """Where the intermediates of programs lie."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.parts: list[tuple[int, int]] = []
        new = Intermediates.new

        def watched(own: Intermediates, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            out = new(own, shape, dtype)
            self.parts.append((out.data_ptr(), out.nbytes))
            return out

        patch.setattr(Intermediates, "new", watched)

    def poison(self) -> None:
        """Floats become NaN, and integers -1."""
        for place, num_bytes in self.parts:
            ctypes.memset(place, 255, num_bytes)
