"""`DraftOps` in plain torch: block attention and rotary positions of drafts.

R requests, G rows of a block, C context cells, NH query heads, KVH key heads, D key width, V value width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from k3svc.ops.table import BlockMeta


class PlainDraft:
    """`DraftOps` of backends without kernels of their own for it; `rms_norm` is the backend's."""

    def __init__(self, rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        self._rms_norm = rms_norm

    def prepare(self, meta: BlockMeta) -> Tensor:
        """Cells that hold a visible context row: bool [R, C]."""
        return visible_cells(meta)

    def norm_rope(
        self, qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`DraftOps.norm_rope`."""
        width = q_weight.shape[0]
        q, k, v = torch.split(qkv, [heads * width, *[(qkv.shape[1] - heads * width) // 2] * 2], dim=1)
        turned = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            rows = self._rms_norm(x.reshape(-1, width), weight, eps)
            turned.append(rotate(rows.view(x.shape[0], -1, width), cos, sin, interleaved=False))
        return turned[0], turned[1], v.reshape(v.shape[0], -1, width)

    def block_attention(
        self,
        query: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        step: Tensor,
        *,
        scale: float,
        is_causal: bool,
    ) -> Tensor:
        """`DraftOps.block_attention`."""
        return block_attention(
            query, block_keys, block_values, context_keys, context_values, step, scale=scale, is_causal=is_causal
        )


def visible_cells(meta: BlockMeta) -> Tensor:
    """bool [R, C]."""
    newest = meta.base_lens[:, None] - 1
    positions = newest - (newest - torch.arange(meta.num_cells, device=newest.device)) % meta.capacity
    oldest = torch.maximum(meta.starts, meta.base_lens - meta.window).clamp_min(0)
    return positions >= oldest[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """RoPE: x [N, heads, D], cos and sin float32 [N, D/2] → [N, heads, D], in x's dtype.

    interleaved: channels 2i and 2i + 1 turn together (published latent-attention checkpoints); else i and D/2 + i.
    """
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def block_attention(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Attention of block rows over [context ; block], the block part without a causal mask unless `is_causal`.

    query [R, G, NH, D], block_keys [R, G, KVH, D], block_values [R, G, KVH, V], context_keys [R, C, KVH, D],
    context_values [R, C, KVH, V], visible bool [R, C] → [R, G, NH, V]. Query heads share key heads in groups of
    NH / KVH. A cell that is not visible may hold anything: scores are masked by selection and its value counts as 0.
    """
    requests, rows, heads, _ = query.shape
    groups = block_keys.shape[2]
    keys = torch.cat([context_keys, block_keys], dim=1).float().permute(0, 2, 3, 1)
    values = torch.cat([context_values, block_values], dim=1).float()
    mask = torch.cat([visible, visible.new_ones(requests, rows)], dim=1)
    values = values.masked_fill(~mask[..., None, None], 0).transpose(1, 2)
    grouped = query.float().mul(scale).view(requests, rows, groups, heads // groups, -1).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped.flatten(2, 3), keys).view(requests, groups, heads // groups, rows, -1)
    allowed = mask[:, None, None, None, :]
    if is_causal:
        order = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
        seen = torch.cat([order.new_ones(rows, visible.shape[1]), order], dim=1)
        allowed = allowed & seen
    mass = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    out = torch.matmul(mass.flatten(2, 3), values).view(requests, groups, heads // groups, rows, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(requests, rows, heads, -1).to(query.dtype)
