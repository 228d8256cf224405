"""Attention of one draft layer: what a context row keeps, and what the rows of a block do with it.

Context rows are projected once, when they become known, and stay in a `ContextPool`; block rows are projected anew
every step and forgotten. Grouped-query attention keeps keys and values; latent attention keeps one row
(latent | k_rope) and works absorbed, so it is attention with one key head whose values are the latents.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from k3svc.model.draft_config import DraftConfig, MlaShape
from k3svc.model.draft_rope import Rope
from k3svc.ops.table import Ops

Rotation = tuple[Tensor, Tensor]
"""cos and sin of N rows, float32 [N, rotated channels / 2]."""


class DraftAttention(Protocol):
    """Letters: N rows, H hidden size, NH query heads, KVH key heads, D key width, V value width."""

    key_heads: int
    key_width: int
    value_width: int
    values_in_keys: bool
    """Values are the first V channels of the keys and need no memory of their own."""
    scale: float
    context_weight: Tensor
    """[out, H]: what projects a context row. Rows of all layers may be stacked into one product."""

    def context_rows(self, projected: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """projected [N, out] → keys [N, KVH, D], normed and rotated, and values [N, KVH, V]."""
        ...

    def block_rows(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] → queries [N, NH, D], keys and values as of context rows."""
        ...

    def output(self, mixed: Tensor) -> Tensor:
        """Attention result [N, NH, V] → [N, H]."""
        ...


def new_attention(config: DraftConfig, weights: Mapping[str, Tensor], rope: Rope, ops: Ops) -> DraftAttention:
    """The attention of one layer from its tensors, named as below `self_attn.`."""
    if config.mla is None:
        return GroupedAttention(config, weights, ops)
    return LatentAttention(config, config.mla, weights, rope, ops)


class GroupedAttention:
    """GQA with RMSNorm on the heads of q and k. Block rows go through one fused q|k|v product."""

    values_in_keys = False

    def __init__(self, config: DraftConfig, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self._ops, self._eps, self._heads = ops, config.rms_norm_eps, config.num_heads
        self.key_heads, self.key_width, self.value_width = config.num_kv_heads, config.head_dim, config.head_dim
        self.scale = config.head_dim**-0.5
        self.context_weight = torch.cat([weights["k_proj.weight"], weights["v_proj.weight"]])
        self._qkv = ops.pack_linear(torch.cat([weights["q_proj.weight"], self.context_weight]))
        self._o = ops.pack_linear(weights["o_proj.weight"])
        self._q_norm, self._k_norm = weights["q_norm.weight"], weights["k_norm.weight"]

    def context_rows(self, projected: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        _, keys, values = self._norm_rope(projected, 0, rotation)
        return keys, values

    def block_rows(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return self._norm_rope(self._ops.linear(x, self._qkv), self._heads, rotation)

    def output(self, mixed: Tensor) -> Tensor:
        return self._ops.linear(mixed.flatten(1), self._o)

    def _norm_rope(self, rows: Tensor, heads: int, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return self._ops.draft.norm_rope(rows, heads, self._q_norm, self._k_norm, self._eps, *rotation)


class LatentAttention:
    """MLA with rotary keys, absorbed: queries meet the latents themselves."""

    key_heads = 1
    values_in_keys = True

    def __init__(self, config: DraftConfig, mla: MlaShape, weights: Mapping[str, Tensor], rope: Rope, ops: Ops) -> None:
        self._ops, self._eps, self._heads, self._mla = ops, config.rms_norm_eps, config.num_heads, mla
        self.key_width, self.value_width = mla.kv_lora_rank + mla.rope_dim, mla.kv_lora_rank
        self.scale = (mla.nope_dim + mla.rope_dim) ** -0.5 * rope.softmax_scale
        self.context_weight = weights["kv_a_proj_with_mqa.weight"]
        self._kv_norm = weights["kv_a_layernorm.weight"]
        self._kv: Any = ops.pack_linear(self.context_weight)
        expand = weights["kv_b_proj.weight"].view(config.num_heads, mla.nope_dim + mla.value_dim, mla.kv_lora_rank)
        self._to_latent = ops.draft.pack_heads(expand[:, : mla.nope_dim].transpose(1, 2))
        self._from_latent = ops.draft.pack_heads(expand[:, mla.nope_dim :])
        self._o = ops.pack_linear(weights["o_proj.weight"])
        self._q_norm: Tensor | None = None
        if mla.q_lora_rank is None:
            self._q = ops.pack_linear(weights["q_proj.weight"])
        else:
            self._q_a = ops.pack_linear(weights["q_a_proj.weight"])
            self._q_norm = weights["q_a_layernorm.weight"]
            self._q = ops.pack_linear(weights["q_b_proj.weight"])

    def context_rows(self, projected: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        rank = self._mla.kv_lora_rank
        latent = self._ops.rms_norm(projected[:, :rank], self._kv_norm, self._eps)
        turned = self._rotate(projected[:, None, rank:], rotation)
        keys = torch.cat([latent, turned.flatten(1)], dim=1)[:, None]
        return keys, keys[..., :rank]

    def block_rows(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        mla, low = self._mla, x
        if self._q_norm is not None:
            low = self._ops.rms_norm(self._ops.linear(x, self._q_a), self._q_norm, self._eps)
        query = self._ops.linear(low, self._q).view(-1, self._heads, mla.nope_dim + mla.rope_dim)
        absorbed = self._ops.draft.project_heads(query[..., : mla.nope_dim], self._to_latent)
        turned = self._rotate(query[..., mla.nope_dim :], rotation)
        joined = torch.cat([absorbed.flatten(0, 1), turned.flatten(0, 1)], dim=1)
        keys, values = self.context_rows(self._ops.linear(x, self._kv), rotation)
        return joined.view(-1, self._heads, self.key_width), keys, values

    def output(self, mixed: Tensor) -> Tensor:
        out = self._ops.draft.project_heads(mixed, self._from_latent)
        return self._ops.linear(out.flatten(1), self._o)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return self._ops.draft.rotate(x, *rotation, interleaved=self._mla.interleaved_rope)
