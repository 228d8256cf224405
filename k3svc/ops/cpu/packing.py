"""Weights in the layout of the kernels: panels of 32 outputs, each [in, 32], the last one filled up with zeros.

A matrix whose every element is a bfloat16 number is kept as bfloat16, which halves what a decode step reads and
changes no bit of any result: the kernels widen it before they multiply in float32. Its columns lie in pairs, i and
i + 8 of each 16, as the kernels take them apart.
"""

from collections.abc import Iterable
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3svc.ops.cpu.library import Weight
from k3svc.ops.cpu.memory import LargePages

PANEL = 32


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """One matrix, or several of one shape."""

    data: Tensor
    """float32 or bfloat16 (in pairs) [matrices, panels, in, 32]; owns the memory that `argument` points to."""
    out: int
    argument: Any
    """Reference to the C structure, as the library takes it."""


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Weights of the experts of a layer."""

    count: int
    gate_up: PackedWeight
    """Rows of w1, then of w3."""
    down: PackedWeight


def pack_linear(weight: Tensor, memory: LargePages) -> PackedWeight:
    """[out, in] of any float dtype that float32 holds exactly."""
    return _packed(_panels(weight)[None], weight.shape[0], memory)


def pack_experts(experts: Iterable[tuple[Tensor, Tensor, Tensor]], memory: LargePages) -> PackedExperts:
    """w1, w3 [inner, width] and w2 [width, inner] of one expert after the other."""
    gate_up: list[Tensor] = []
    down: list[Tensor] = []
    inner = width = 0
    for w1, w3, w2 in experts:
        inner, width = w1.shape
        gate_up.append(_panels(torch.cat([w1, w3])))
        down.append(_panels(w2))
    return PackedExperts(
        count=len(down),
        gate_up=_packed(torch.stack(gate_up), 2 * inner, memory),
        down=_packed(torch.stack(down), width, memory),
    )


def _panels(weight: Tensor) -> Tensor:
    out, width = weight.shape
    filled = F.pad(weight.float(), (0, 0, 0, -out % PANEL))
    return filled.view(-1, PANEL, width).transpose(1, 2).contiguous()


def _paired(panels: Tensor) -> Tensor:
    """Columns i and i + 8 of each 16 side by side."""
    return panels.view(*panels.shape[:-1], -1, 2, 8).transpose(-1, -2).reshape(panels.shape)


def _packed(panels: Tensor, out: int, memory: LargePages) -> PackedWeight:
    narrow = panels.bfloat16()
    is_exact = bool(torch.equal(narrow.float(), panels))
    data = memory.copy(_paired(narrow) if is_exact else panels)
    structure = Weight(data.data_ptr(), data.shape[2], out, int(is_exact), data[0].nbytes)
    return PackedWeight(data=data, out=out, argument=byref(structure))
