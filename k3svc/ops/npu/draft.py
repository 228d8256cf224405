"""What draft models need on Ascend: fused norm and rotation of grouped-query rows, block attention without a mask.

The attention operator masks nothing here, so it is handed the visible rows alone: those of the ring, then the block's,
with as many keys as there are. Their order among themselves does not matter, but that the block comes last, which a
causal block needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.draft_table import BlockMeta
from k3svc.ops.npu.mla import CAUSAL, with_heads
from k3svc.ops.npu.vendor import Vendor
from k3svc.ops.reference_draft import PlainDraft
from k3svc.ops.table import SampleRows


@dataclass(frozen=True, kw_only=True)
class BlockStep:
    """R requests, S = C + G rows of context cells and block side by side."""

    slots: Tensor
    """int64 [R]."""
    num_cells: int
    """C."""
    order: Tensor
    """int64 [R · S], which of those comes at each place; past a request's keys any."""
    key_lengths: list[int]
    """Keys of each request."""


class NpuDraft(PlainDraft):
    """`DraftOps`."""

    def __init__(
        self,
        vendor: Vendor,
        mask: Tensor,
        rms_norm: Callable[[Tensor, Tensor, float], Tensor],
        sample: Callable[[Tensor, SampleRows], Tensor],
    ) -> None:
        super().__init__(rms_norm, sample)
        self._vendor, self._mask = vendor, mask

    def prepare(self, meta: BlockMeta) -> BlockStep:
        """`DraftOps.prepare`."""
        total = meta.num_cells + meta.num_rows
        device = meta.base_lens.device
        lengths = torch.tensor(meta.host_lengths, dtype=torch.int64).to(device)[:, None]
        place = torch.arange(total, device=device)
        cell = (meta.base_lens[:, None] - lengths + place) % meta.capacity
        row = (meta.num_cells + place - lengths).clamp_max(total - 1)
        first = torch.arange(len(meta.host_lengths), device=device)[:, None] * total
        return BlockStep(
            slots=meta.slots,
            num_cells=meta.num_cells,
            order=(torch.where(place < lengths, cell, row) + first).flatten(),
            key_lengths=[length + meta.num_rows for length in meta.host_lengths],
        )

    def norm_rope(
        self, qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`DraftOps.norm_rope`. The kernel takes sin before cos, one value for each channel, and no rows without q."""
        if heads == 0:
            return super().norm_rope(qkv, heads, q_weight, k_weight, eps, cos, sin)
        width = q_weight.shape[0]
        sines, cosines = (torch.cat([x, x], dim=-1).to(qkv.dtype) for x in (sin, cos))
        q, k, v = self._vendor.split_qkv_rmsnorm_rope(
            qkv.contiguous(),
            sines,
            cosines,
            heads * width,
            (qkv.shape[1] - heads * width) // 2,
            width,
            eps=eps,
            q_weight=q_weight,
            k_weight=k_weight,
            is_neox_style=True,
        )
        q, k, v = (torch.unflatten(x, -1, (-1, width)) for x in (q, k, v))
        return q, k, v

    def block_attention(
        self,
        query: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        step: Any,
        *,
        scale: float,
        is_causal: bool,
    ) -> Tensor:
        """`DraftOps.block_attention`. Latent keys go in two parts, and their heads are a power of two."""
        context_keys = context_keys[step.slots, : step.num_cells]
        heads, key_width, value_width = query.shape[2], query.shape[3], block_values.shape[3]
        keys = _ordered(context_keys, block_keys, step)
        if key_width > value_width:
            padded = 1 << (heads - 1).bit_length()
            whole = with_heads(query.flatten(0, 1), padded).view(*query.shape[:2], padded, key_width)
            query, rope = (part.contiguous() for part in torch.split(whole, [value_width, key_width - value_width], -1))
            keys, key_rope = (part.contiguous() for part in torch.split(keys, [value_width, rope.shape[-1]], -1))
            values, ropes = keys, {"query_rope": rope, "key_rope": key_rope}
        else:
            values, ropes = _ordered(context_values[step.slots, : step.num_cells], block_values, step), {}
        masked = {"atten_mask": self._mask, "sparse_mode": CAUSAL} if is_causal else {"sparse_mode": 0}
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(
            query.contiguous(),
            keys,
            values,
            **ropes,
            **masked,
            num_heads=query.shape[2],
            num_key_value_heads=keys.shape[2],
            input_layout="BSND",
            actual_seq_lengths_kv=step.key_lengths,
            scale=scale,
        )
        result: Tensor = out[:, :, :heads]
        return result


def _ordered(context: Tensor, block: Tensor, step: BlockStep) -> Tensor:
    """[R, C, KVH, D] and [R, G, KVH, D] → [R, C + G, KVH, D], a request's keys first."""
    both = torch.cat([context, block], dim=1)
    return both.flatten(0, 1).index_select(0, step.order).view(both.shape)
