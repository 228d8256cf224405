"""The KDA mixer (model.md 2.3): projections, short convolution, gated delta rule, gated output norm."""

import torch
from torch import Tensor

from k3svc.model.config import ModelConfig
from k3svc.model.weights import Weights
from k3svc.ops.few_table import FewOps, Norm
from k3svc.ops.table import KdaGate, LayerCache, Mode, Ops, Step


class KdaMixer:
    """Kimi Delta Attention of one layer; both output gates."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, prefix: str) -> None:
        channels, rank, heads = config.kda_channels, config.kda_head_dim, config.kda_heads
        names = ["q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj"]
        self._sizes = [3 * channels, rank, heads]
        self._channels, self._group_step = channels, rank + heads
        f_b = weights.linear(ops, f"{prefix}f_b_proj")
        self._g_b, self._f_b_g_b = None, None
        if config.full_rank_gate:
            names.append("g_proj")
            self._sizes.append(channels)
        else:
            self._g_b = weights.linear(ops, f"{prefix}g_b_proj")
            if ops.few is not None:
                both = [weights.matrix(f"{prefix}{name}_proj") for name in ("f_b", "g_b")]
                self._f_b_g_b = ops.few.pack_groups(torch.stack(both))
            names.append("g_a_proj")
            self._sizes.append(rank)
        self._ops = ops
        self._in = weights.linear(ops, *(prefix + name for name in names))
        self._f_b = f_b
        self._out = weights.linear(ops, f"{prefix}o_proj")
        convolutions = [weights.float32(f"{prefix}{name}_conv1d.weight")[:, 0] for name in "qkv"]
        self._conv = torch.cat(convolutions).to(ops.device)
        self._gate = KdaGate(
            a=weights.head_decay(f"{prefix}A_log").to(ops.device),
            dt_bias=weights.float32(f"{prefix}dt_bias").view(heads, -1).to(ops.device),
            lower_bound=config.gate_lower_bound,
        )
        self._norm = weights.float32(f"{prefix}o_norm.weight").to(ops.device)
        self._eps = config.rms_norm_eps

    def extend(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Normed prompt rows [N, H] → [N, H]; updates state and conv state."""
        u, f, b, z = self._project(x)
        qkv = self._ops.kda_conv_extend(u, self._conv, cache, step)
        return self._finish(self._ops.kda_extend(qkv, f, b, self._gate, cache, step), z)

    def decode(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The same for one row per sequence."""
        u, f, b, z = self._project(x)
        qkv = self._ops.kda_conv_decode(u, self._conv, cache, step)
        return self._finish(self._ops.kda_decode(qkv, f, b, self._gate, cache, step), z)

    def verify(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """An anchor and drafts per sequence; the states advance by the anchor alone."""
        u, f, b, z = self._project(x)
        qkv = self._ops.kda_conv_verify(u, self._conv, cache, step)
        return self._finish(self._ops.kda_verify(qkv, f, b, self._gate, cache, step), z)

    def few(
        self, few: FewOps, x: Tensor, norm: Norm, cache: LayerCache, step: Step, mode: Mode, base: Tensor | None
    ) -> Tensor:
        """base + decode or verify of rows that are yet to be normed."""
        ops = self._ops
        projected = few.product(x, self._in, norm=norm)
        u, f_a, b, g = torch.split(projected, self._sizes, dim=1)
        if self._f_b_g_b is None:
            (qkv, f), z = few.kda_conv(u, self._conv, cache, step, f_a, self._f_b), g
        else:
            tail = projected[:, 3 * self._channels :]
            qkv, fz = few.kda_conv(u, self._conv, cache, step, tail, self._f_b_g_b, group_step=self._group_step)
            f, z = fz.chunk(2, dim=1)
        recur = ops.kda_verify if mode == "verify" else ops.kda_decode
        o = recur(qkv, f, b, self._gate, cache, step)
        return few.product(ops.gated_norm(o, z, self._norm, self._eps), self._out, base=base)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        u, f_a, b, g = torch.split(self._ops.linear(x, self._in), self._sizes, dim=1)
        z = g if self._g_b is None else self._ops.linear(g, self._g_b)
        return u, self._ops.linear(f_a, self._f_b), b, z

    def _finish(self, o: Tensor, z: Tensor) -> Tensor:
        return self._ops.linear(self._ops.gated_norm(o, z, self._norm, self._eps), self._out)
