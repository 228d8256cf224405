"""Steps of one or two rows in the fast mode: fewer kernels a layer, each near the speed at which weights are read."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.cuda import beside, conv, mla, rows, rowwise
from k3svc.ops.cuda.cache import KdaPool, MlaPool
from k3svc.ops.cuda.moe import PackedExperts
from k3svc.ops.cuda.steps import Step
from k3svc.ops.cuda.tuning import Tuning
from k3svc.ops.few_table import Norm, Unit


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

    def product(self, x: Tensor, weight: Tensor | rows.Groups, **around: Any) -> Tensor:
        """`FewOps.product`."""
        return rows.product(x, weight, self._tuning, **around)

    def experts(
        self,
        x: Tensor,
        norm: Norm | None,
        ids: Tensor,
        weights: Tensor,
        packed: PackedExperts,
        unit: Unit,
        **around: Any,
    ) -> Tensor:
        """`FewOps.experts`."""
        return rows.experts(x, norm, ids, weights, packed, unit, self._tuning, **around)

    def route(
        self,
        x: Tensor,
        norm: Norm,
        weight: Tensor,
        bias: Tensor,
        beside: tuple[Tensor, Unit] | None,
        **choice: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`FewOps.route`."""
        logits, other = rows.router(x, norm, weight, beside, self._tuning)
        return *rowwise.route(logits, bias, **choice), other

    def kda_conv(
        self,
        u: Tensor,
        taps: Tensor,
        cache: KdaPool,
        step: Step,
        x: Tensor,
        weight: Tensor | rows.Groups,
        **around: Any,
    ) -> tuple[Tensor, Tensor]:
        """`FewOps.kda_conv`."""
        if not step.is_decode:
            step.commits.append(partial(conv.commit, u, taps, cache, step))
        return beside.conv_product(u, taps, cache, step, x, weight, self._tuning, **around)

    def mla_write(
        self,
        latents: Tensor,
        latent_norm: Norm,
        cache: MlaPool,
        step: Step,
        x: Tensor,
        weight: Tensor | rows.Groups,
        **around: Any,
    ) -> Tensor:
        """`FewOps.mla_write`."""
        return beside.write_product(latents, latent_norm, cache, step, x, weight, self._tuning, **around)

    def mla_attend(self, latent: Tensor, q: Tensor, cache: MlaPool, step: Step, scale: float) -> Tensor:
        """`FewOps.mla_attend`."""
        return mla.attend(latent, q, cache, step, scale, self._tuning, is_fast=True)
