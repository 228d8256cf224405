"""Steps of one or two rows in the fast mode: fewer kernels a layer, each near the speed at which weights are read."""

from typing import Any

import torch
from torch import Tensor

from k3svc.ops.cuda import mla, rows, rowwise
from k3svc.ops.cuda.cache import MlaPool
from k3svc.ops.cuda.steps import Step
from k3svc.ops.cuda.tuning import Tuning
from k3svc.ops.table import Norm


class Few:
    """`FewOps` of the fast mode with bfloat16 activations."""

    def __init__(self, tuning: Tuning, device: torch.device) -> None:
        self._tuning = tuning
        self._device = device

    def takes(self, step: Step) -> bool:
        """`FewOps.takes`."""
        return step.mode != "extend" and step.num_rows <= self._tuning.few_rows

    def part(self, weight: Tensor, first: int, last: int) -> Tensor:
        """`FewOps.part`."""
        return weight[first:last]

    def pack_groups(self, weight: Tensor) -> rows.Groups:
        """`FewOps.pack_groups`."""
        return rows.Groups(weight=weight.to(self._device).flatten(0, 1).contiguous(), count=weight.shape[0])

    product = staticmethod(rows.product)
    experts = staticmethod(rows.experts)

    def route(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor, **choice: Any) -> tuple[Tensor, Tensor]:
        """`FewOps.route`."""
        return rowwise.route(rows.product(x, weight, norm=norm, dtype=torch.float32), bias, **choice)

    def mla_write(self, rows: Tensor, norm: Norm, cache: MlaPool, step: Step) -> None:
        """`FewOps.mla_write`."""
        mla.write(rows, cache, step, norm)

    def mla_attend(self, latent: Tensor, q: Tensor, cache: MlaPool, step: Step, scale: float) -> Tensor:
        """`FewOps.mla_attend`."""
        return mla.attend(latent, q, cache, step, scale, self._tuning, is_fast=True)
