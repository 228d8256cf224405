"""Block attention and rotary positions of drafts in plain torch: what a draft needs beyond the operation table.

R requests, G rows of a block, C context cells, NH query heads, KVH key heads, D key width, V value width.
"""

import torch
from torch import Tensor


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
