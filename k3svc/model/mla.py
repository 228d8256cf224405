"""The MLA mixer (model.md 2.6): latent attention without rotation, optional query LoRA and output gate."""

import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.model.config import ModelConfig
from k3svc.model.weights import Weights
from k3svc.ops.few_table import FewOps, Norm
from k3svc.ops.table import LayerCache, Mode, Ops, Step


class MlaMixer:
    """Latent attention of one layer."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, prefix: str) -> None:
        if config.q_lora_rank is None and ops.split_norm is not None:
            raise BackendError(
                "model.device: the fused split and norm of latents wants queries with a latent (q_lora_rank), which "
                "this model has not; leave it unfused"
            )
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self._ops = ops
        self._rank = config.kv_lora_rank
        self._eps = config.lora_norm_eps
        self._head_width = nope + rope
        self._scale = self._head_width**-0.5
        names = ["kv_a_proj_with_mqa", "q_proj" if config.q_lora_rank is None else "q_a_proj"]
        self._sizes = [config.cache_width, config.q_lora_rank or heads * (nope + rope)]
        if config.mla_output_gate:
            names.append("g_proj")
            self._sizes.append(heads * config.v_head_dim)
        self._has_gate = config.mla_output_gate
        self._in = weights.linear(ops, *(prefix + name for name in names))
        self._kv_norm = weights.norm(f"{prefix}kv_a_layernorm").to(ops.device)
        self._q_b = None
        if config.q_lora_rank is not None:
            self._q_norm = weights.norm(f"{prefix}q_a_layernorm").to(ops.device)
            self._q_b = weights.linear(ops, f"{prefix}q_b_proj")
        kv_b = weights.matrix(f"{prefix}kv_b_proj").view(heads, nope + config.v_head_dim, self._rank)
        self._w_kc = kv_b[:, :nope].contiguous().to(ops.device)
        self._w_vc = kv_b[:, nope:].contiguous().to(ops.device)
        if ops.few is not None:
            self._w_kc_rows = ops.few.pack_groups(self._w_kc.transpose(1, 2))
            self._w_vc_rows = ops.few.pack_groups(self._w_vc)
        self._out = weights.linear(ops, f"{prefix}o_proj")
        self._num_heads = heads

    def extend(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Normed prompt rows [N, H] → [N, H]; writes their cache rows first."""
        q, gate = self._project(x, cache, step)
        return self._finish(self._ops.mla_extend(q, self._w_kc, self._w_vc, cache, step, self._scale), gate)

    def decode(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The same for one row per sequence."""
        q, gate = self._project(x, cache, step)
        return self._finish(self._ops.mla_decode(q, self._w_kc, self._w_vc, cache, step, self._scale), gate)

    def verify(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """An anchor and drafts per sequence; all of them write their cache rows."""
        q, gate = self._project(x, cache, step)
        return self._finish(self._ops.mla_verify(q, self._w_kc, self._w_vc, cache, step, self._scale), gate)

    def few(
        self, few: FewOps, x: Tensor, norm: Norm, cache: LayerCache, step: Step, mode: Mode, base: Tensor | None
    ) -> Tensor:
        """base + decode or verify, which are one here, of rows that are yet to be normed."""
        del mode
        kv, q, *gates = torch.split(few.product(x, self._in, norm=norm), self._sizes, dim=1)
        kv_norm = (self._kv_norm, self._eps)
        group_step = self._head_width
        if self._q_b is None:
            latent = few.mla_write(kv, kv_norm, cache, step, q, self._w_kc_rows, group_step=group_step)
        else:
            q = few.mla_write(kv, kv_norm, cache, step, q, self._q_b, norm=(self._q_norm, self._eps))
            latent = few.product(q, self._w_kc_rows, group_step=group_step)
        heads = q.view(q.shape[0], self._num_heads, -1)
        mixed = few.mla_attend(latent.view(q.shape[0], self._num_heads, -1), heads, cache, step, self._scale)
        o = few.product(mixed.flatten(1), self._w_vc_rows, group_step=self._rank)
        if self._has_gate:
            o = self._ops.sigmoid_gate(o, gates[0])
        return few.product(o, self._out, base=base)

    def _project(self, x: Tensor, cache: LayerCache, step: Step) -> tuple[Tensor, Tensor | None]:
        kv, q, *gates = torch.split(self._ops.linear(x, self._in), self._sizes, dim=1)
        rows, q = self._normed(kv, q)
        self._ops.mla_write(rows, cache, step)
        if self._q_b is not None:
            q = self._ops.linear(q, self._q_b)
        return q.reshape(q.shape[0], self._num_heads, -1), gates[0] if self._has_gate else None

    def _normed(self, kv: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """kv [N, C] with its latent normed, and q [N, Q] normed where it is a latent: in one operation where the
        backend was told to, else apart.
        """
        ops, eps = self._ops, self._eps
        if ops.split_norm is not None:
            return ops.split_norm(kv, q, self._kv_norm, self._q_norm, eps)
        latent = ops.rms_norm(kv[:, : self._rank], self._kv_norm, eps)
        rows = torch.cat([latent, kv[:, self._rank :]], dim=1)
        return rows, q if self._q_b is None else ops.rms_norm(q, self._q_norm, eps)

    def _finish(self, o: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            o = self._ops.sigmoid_gate(o, gate)
        return self._ops.linear(o, self._out)
