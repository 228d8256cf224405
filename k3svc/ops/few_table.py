"""The table of operations of steps of few rows (`Ops.few`): each does several of `Ops` at once."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from k3svc.ops.table import Activation, LayerCache, Step


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A gated unit (model.md 2.7); linear_beta None: the up part stays linear."""

    activation: Activation
    beta: float
    linear_beta: float | None


Norm: TypeAlias = tuple[Tensor, float]
"""Weight and eps of an rms_norm."""


class FewOps(Protocol):
    """Operations for decode and verify steps of few rows, where a backend does several at once. Letters as in `Ops`."""

    def takes(self, step: Step) -> bool:
        """Whether a step is to be computed with these."""
        ...

    def part(self, weight: Any, first: int, last: int) -> Any:
        """The rows first : last of a packed weight, for `product`."""
        ...

    def pack_groups(self, weight: Tensor) -> Any:
        """Re-lay a weight [groups, out, in] for `product`, once at load."""
        ...

    def product(
        self,
        x: Tensor,
        weight: Any,
        *,
        norm: Norm | None = None,
        unit: Unit | None = None,
        base: Tensor | None = None,
        group_step: int = 0,
    ) -> Tensor:
        """base + unit(rms_norm(x) · weight), each of base, unit and norm where given: x [N, in], weight [out, in] →
        [N, out], or half of that with a unit. Of a weight of groups each reads x from a multiple of group_step on, and
        the results lie side by side: [N, groups · out].
        """
        ...

    def route(
        self,
        x: Tensor,
        norm: Norm,
        weight: Any,
        bias: Tensor,
        beside: tuple[Any, Unit] | None,
        *,
        top_k: int,
        renormalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`Ops.route` of rms_norm(x), and `product` of it with what stands beside the router, if anything."""
        ...

    def experts(
        self,
        x: Tensor,
        norm: Norm | None,
        ids: Tensor,
        weights: Tensor,
        packed: Any,
        unit: Unit,
        *,
        shared: tuple[Tensor, Any] | None = None,
        base: Tensor | None = None,
    ) -> Tensor:
        """base + `Ops.experts` of rms_norm(x) + the product of shared: rows [N, S] and a weight [D, S]. ids and weights
        are what `route` returned.
        """
        ...

    def kda_conv(
        self,
        u: Tensor,
        taps: Tensor,
        cache: LayerCache,
        step: Step,
        x: Tensor,
        weight: Any,
        *,
        group_step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.kda_conv_decode` or `kda_conv_verify` of u with the weight `taps`, and `product` of other rows x."""
        ...

    def mla_write(
        self,
        latents: Tensor,
        latent_norm: Norm,
        cache: LayerCache,
        step: Step,
        x: Tensor,
        weight: Any,
        *,
        norm: Norm | None = None,
        group_step: int = 0,
    ) -> Tensor:
        """`Ops.mla_write` of rows [N, C] whose latents are yet to be normed, and `product` of other rows x."""
        ...

    def mla_attend(self, latent: Tensor, q: Tensor, cache: LayerCache, step: Step, scale: float) -> Tensor:
        """Attention in the latent space: latent queries [N, NH, R] and q [N, NH, nope + E] → [N, NH, R]."""
        ...
