"""Feed-forward layers (model.md 2.7): the dense MLP, and routed experts with shared ones, latent or not."""

from typing import Any

from torch import Tensor

from k3svc.model.config import ModelConfig
from k3svc.model.weights import Weights
from k3svc.ops.few_table import FewOps, Norm, Unit
from k3svc.ops.table import Ops


class DenseFfn:
    """Gated MLP."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, prefix: str) -> None:
        self._ops = ops
        self._config = config
        self._gate_up = weights.linear(ops, f"{prefix}gate_proj", f"{prefix}up_proj")
        self._down = weights.linear(ops, f"{prefix}down_proj")

    def __call__(self, x: Tensor, num_live: int) -> Tensor:  # noqa: ARG002 - padding costs nothing here
        """Normed rows [N, H] → [N, H]."""
        return self._ops.linear(_glu(self._ops, self._config, self._ops.linear(x, self._gate_up)), self._down)

    def few(self, few: FewOps, x: Tensor, norm: Norm, base: Tensor) -> Tensor:
        """base + the same of rows that are yet to be normed."""
        hidden = few.product(x, self._gate_up, norm=norm, unit=_unit(self._config))
        return few.product(hidden, self._down, base=base)


class MoeFfn:
    """Routed and shared experts. With a latent size the routed ones work between two projections, normed after the sum.

    `_in` fuses what reads x in the activation dtype: latent projection and the shared experts' gate and up.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, prefix: str) -> None:
        self._ops = ops
        self._config = config
        self._router = ops.pack_linear(weights.float32(f"{prefix}gate.weight"))
        self._bias = weights.float32(f"{prefix}gate.e_score_correction_bias").to(ops.device)
        self._choice: dict[str, Any] = {
            "top_k": config.experts_per_token,
            "renormalize": config.renormalize,
            "scale": config.routed_scaling_factor,
            "num_groups": config.num_expert_groups,
            "top_groups": config.top_groups,
        }
        if weights.has_quantized_experts(prefix):
            self._experts = ops.pack_quantized_experts(weights.quantized_experts(prefix), ops.activation_dtype)
        else:
            self._experts = ops.pack_experts(weights.experts(prefix))
        names: list[str] = []
        self._latent_size = config.latent_size or 0
        if config.latent_size is not None:
            names.append("routed_expert_down_proj")
            self._norm = weights.norm(f"{prefix}routed_expert_norm").to(ops.device)
            self._up = weights.linear(ops, f"{prefix}routed_expert_up_proj")
        self._has_shared = config.num_shared_experts > 0
        if self._has_shared:
            names += ["shared_experts.gate_proj", "shared_experts.up_proj"]
            self._shared_down = weights.linear(ops, f"{prefix}shared_experts.down_proj")
        self._in = weights.linear(ops, *(prefix + name for name in names)) if names else None

    def __call__(self, x: Tensor, num_live: int) -> Tensor:
        """Normed rows [N, H] → [N, H]; only the first num_live rows go to routed experts."""
        ops, config = self._ops, self._config
        projected = x if self._in is None else ops.linear(x, self._in)
        z = projected[:, : self._latent_size] if self._latent_size else x
        y = self._routed(x, z, num_live)
        if self._latent_size:
            y = ops.linear(ops.rms_norm(y, self._norm, config.rms_norm_eps), self._up)
        if self._has_shared:
            shared = _glu(ops, config, projected[:, self._latent_size :])
            y = y + ops.linear(shared, self._shared_down)
        return y

    def few(self, few: FewOps, x: Tensor, norm: Norm, base: Tensor) -> Tensor:
        """base + the same of rows that are yet to be normed."""
        unit, latent, beside = _unit(self._config), self._latent_size, None
        if self._has_shared:
            rows = latent + 2 * self._config.num_shared_experts * self._config.moe_intermediate_size
            beside = (few.part(self._in, latent, rows), unit)
        ids, weights, shared = few.route(x, norm, self._router, self._bias, beside, **self._choice)
        if not latent:
            own = None if shared is None else (shared, self._shared_down)
            return few.experts(x, norm, ids, weights, self._experts, unit, shared=own, base=base)
        z = few.product(x, few.part(self._in, 0, latent), norm=norm)
        y = few.experts(z, None, ids, weights, self._experts, unit)
        if shared is not None:
            base = few.product(shared, self._shared_down, base=base)
        return few.product(y, self._up, norm=(self._norm, self._config.rms_norm_eps), base=base)

    def _routed(self, x: Tensor, z: Tensor, num_live: int) -> Tensor:
        """Weighted sum of the experts that x chooses, applied to z."""
        ops, config = self._ops, self._config
        ids, weights = ops.route(x, self._router, self._bias, **self._choice)
        y = ops.experts(
            z[:num_live],
            ids[:num_live],
            weights[:num_live],
            self._experts,
            config.activation,
            config.situ_beta,
            config.situ_linear_beta,
        )
        if num_live == x.shape[0]:
            return y
        padded = z.new_zeros(z.shape)
        padded[:num_live] = y
        return padded


def _unit(config: ModelConfig) -> Unit:
    return Unit(activation=config.activation, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


def _glu(ops: Ops, config: ModelConfig, gate_up: Tensor) -> Tensor:
    return ops.glu(gate_up, config.activation, config.situ_beta, config.situ_linear_beta)
