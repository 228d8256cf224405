"""`DraftOps` in plain torch: block attention, rotary positions and heads of drafts.

R requests, G rows of a block, C context cells, NH query heads, KVH key heads, D key width, V value width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.draft_table import BlockMeta
from k3svc.ops.table import SampleRows


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """The cells that a step of blocks reads."""

    slots: Tensor
    """int64 [R]."""
    visible: Tensor
    """bool [R, C], cells that hold a visible context row."""


class PlainDraft:
    """`DraftOps` of backends without kernels of their own for it; `rms_norm` and `sample` are the backend's."""

    def __init__(
        self, rms_norm: Callable[[Tensor, Tensor, float], Tensor], sample: Callable[[Tensor, SampleRows], Tensor]
    ) -> None:
        self._rms_norm, self._sample = rms_norm, sample

    def prepare(self, meta: BlockMeta) -> Any:
        """`DraftOps.prepare`."""
        return PlainStep(slots=meta.slots, visible=visible_cells(meta))

    def rotation(
        self, positions: Tensor, num_rows: int, frequencies: Tensor, amplitude: float
    ) -> tuple[Tensor, Tensor]:
        """`DraftOps.rotation`."""
        every = positions[:, None] + torch.arange(num_rows, device=positions.device)
        angles = every.view(-1, 1).float() * frequencies
        return angles.cos() * amplitude, angles.sin() * amplitude

    def norm_rope(
        self, qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`DraftOps.norm_rope`."""
        num_rows, width = qkv.shape[0], q_weight.shape[0]
        key_heads = (qkv.shape[1] // width - heads) // 2
        parts = qkv.view(num_rows, heads + 2 * key_heads, width)
        q, k, v = torch.split(parts, [heads, key_heads, key_heads], dim=1)
        turned = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            rows = self._rms_norm(x.reshape(-1, width), weight, eps)
            turned.append(rotate(rows.view(x.shape), cos, sin, interleaved=False))
        return turned[0], turned[1], v

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """`DraftOps.rotate`."""
        return rotate(x, cos, sin, interleaved=interleaved)

    def pack_heads(self, weight: Tensor) -> Any:
        """`DraftOps.pack_heads`."""
        return weight

    def project_heads(self, x: Tensor, weight: Any) -> Tensor:
        """`DraftOps.project_heads`."""
        return torch.einsum("nhi,hoi->nho", x, weight)

    def write_context(self, rows: Tensor, pool: Tensor, slots: Tensor, positions: Tensor) -> None:
        """`DraftOps.write_context`."""
        pool[slots, positions % pool.shape[1]] = rows.to(pool.dtype)

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
        """`DraftOps.block_attention`."""
        cells = step.visible.shape[1]
        keys, values = context_keys[step.slots, :cells], context_values[step.slots, :cells]
        return block_attention(
            query, block_keys, block_values, keys, values, step.visible, scale=scale, is_causal=is_causal
        )

    def gate(self, x: Tensor, logits: Tensor) -> Tensor:
        """`DraftOps.gate`."""
        return torch.sigmoid(logits).to(x.dtype) * x

    def recur(self, joint: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """`DraftOps.recur`."""
        gate, change, out = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        kept = gate * memory.float() + (1 - gate) * torch.tanh(change)
        return torch.tanh(out).to(memory.dtype), kept.to(memory.dtype)

    def choose(
        self, logits: Tensor, bias: Tensor | None, banned: int, rows: SampleRows | None, offset: int
    ) -> tuple[Tensor, Tensor]:
        """`DraftOps.choose`."""
        scores = logits.clone() if bias is None else logits + bias.float()
        scores[:, banned] = -torch.inf
        if rows is None:
            return scores.argmax(-1), scores
        return self._sample(scores, replace(rows, position=rows.position + offset)), scores

    def confidences(
        self, states: Tensor, embedded: Tensor | None, weight: Tensor, bias: float, temperatures: Tensor
    ) -> Tensor:
        """`DraftOps.confidences`. A sum a row, which no other row can change."""
        rows = states if embedded is None else torch.cat([states, embedded], dim=-1)
        logits = (rows.float() * weight).sum(-1)
        return torch.sigmoid((logits + bias) / temperatures[: states.shape[1]])


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
