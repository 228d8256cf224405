"""Latent attention in plain torch: expanded form for prompts, absorbed form for decode (model.md 2.6), NoPE.

Keys are walked in blocks of 64 rows from position 0, so the way a prompt was cut leaves no trace, and a block that a
row does not see changes nothing: scores are masked by selection, and rows past the end of a sequence are zeroed before
any product, so that whatever lies in unused pool memory (NaN too) stays there.
"""

import math

import torch
from torch import Tensor

from k3svc.ops.reference_cache import MlaPool
from k3svc.ops.reference_math import cast, scalar
from k3svc.ops.reference_steps import GRID, BlockGroup, DecodeStep, ExtendStep, KeyBlock, TileGroup, VerifyStep

ROW_TILE = 16


def write(rows: Tensor, pool: MlaPool, step: ExtendStep | DecodeStep | VerifyStep) -> None:
    """`Ops.mla_write`."""
    flat = pool.rows.view(-1, pool.rows.shape[-1])
    flat.index_copy_(0, step.places, cast(step.written.take(rows), flat.dtype))


def extend(q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: ExtendStep, scale: float) -> Tensor:
    """`Ops.mla_extend`: tiles of 64 queries on the absolute grid, online softmax over the key blocks."""
    heads, value_dim, _ = w_vc.shape
    out = q.new_zeros(step.num_rows + 1, heads * value_dim)
    for group in step.tiles:
        out.index_copy_(0, group.targets, _extend_group(q, w_kc, w_vc, pool, group, scale).to(q.dtype))
    return out[: step.num_rows]


def _extend_group(q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, group: TileGroup, scale: float) -> Tensor:
    """float32 [T·64, NH·V]."""
    heads, nope, _ = w_kc.shape
    value_dim = w_vc.shape[1]
    tiles = group.sequence.shape[0]
    queries = q.index_select(0, group.rows).float().mul_(scalar(scale)).view(tiles, GRID, heads, -1).transpose(1, 2)
    q_nope = queries[..., :nope].contiguous().view(tiles * heads, GRID, nope)
    q_rope = queries[..., nope:].contiguous().view(tiles, heads * GRID, -1)
    best = q_nope.new_full((tiles * heads, GRID, 1), -math.inf)
    mass = torch.zeros_like(best)
    out = q_nope.new_zeros(tiles * heads, GRID, value_dim)
    future = torch.ones(GRID, GRID, dtype=torch.bool).triu(1)
    weights = [w.reshape(-1, w.shape[-1]).float() for w in (w_kc, w_vc)]
    for block in group.blocks:
        latent, rope = _key_block(pool, block)
        owner = group.sequence[: block.num_tiles]
        keys, values = (
            torch.bmm(w.expand(block.num_sequences, -1, -1), latent.transpose(1, 2))
            .index_select(0, owner)
            .view(block.num_tiles * heads, -1, GRID)
            for w in weights
        )
        own = slice(block.num_tiles * heads)
        scores = torch.bmm(q_rope[: block.num_tiles], rope.index_select(0, owner).transpose(1, 2))
        scores = scores.view(-1, GRID, GRID).baddbmm_(q_nope[own], keys)
        scores[block.first_diagonal * heads :].masked_fill_(future, -math.inf)
        top = torch.maximum(best[own], scores.amax(-1, keepdim=True))
        fade = (best[own] - top).exp_()
        scores.sub_(top).exp_()
        best[own] = top
        mass[own].mul_(fade).add_(scores.sum(-1, keepdim=True))
        out[own].mul_(fade).baddbmm_(scores, values.transpose(1, 2))
    out.div_(mass)
    return out.view(tiles, heads, GRID, value_dim).transpose(1, 2).reshape(tiles * GRID, -1)


def _key_block(pool: MlaPool, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """float32 latent [sequences, 64, R] and k_rope [sequences, 64, E]."""
    width = pool.rows.shape[-1]
    rows = pool.rows.view(-1, width).index_select(0, block.rows)
    if block.unwritten is not None:
        rows.index_fill_(0, block.unwritten, 0)
    rows = rows.float().view(block.num_sequences, GRID, width)
    return rows[..., : pool.rank], rows[..., pool.rank :]


def decode(q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: DecodeStep, scale: float) -> Tensor:
    """`Ops.mla_decode`: the key blocks of a segment side by side, their sums joined by a tree; segments in order."""
    heads, nope, rank = w_kc.shape
    count = step.slots.shape[0]
    own = step.live.take(q).float() * scalar(scale)
    queries = torch.cat([per_head(own[..., :nope], w_kc.float()), own[..., nope:]], dim=-1)
    best = queries.new_empty(count, heads, 1)
    # Weighted sum of latents, and in the last column the sum of the weights
    total = queries.new_empty(count, heads, rank + 1)
    for group in step.blocks:
        top, part = _decode_group(queries, pool, group)
        if not group.is_first:
            old_top, old_part = best.index_select(0, group.members), total.index_select(0, group.members)
            new_top = torch.maximum(old_top, top)
            part = old_part.mul_(old_top.sub_(new_top).exp_()).add_(part.mul_(top.sub_(new_top).exp_()))
            top = new_top
        best.index_copy_(0, group.members, top)
        total.index_copy_(0, group.members, part)
    mixed = total[..., :rank] / total[..., rank:]
    out = per_head(mixed, w_vc.float().transpose(1, 2)).flatten(1)
    return step.live.put(cast(out, q.dtype), step.num_rows)


def _decode_group(queries: Tensor, pool: MlaPool, group: BlockGroup) -> tuple[Tensor, Tensor]:
    """Largest score [M, NH, 1] and sums [M, NH, R + 1] of the group's rows over their blocks."""
    width = pool.rows.shape[-1]
    heads, rank = queries.shape[1], pool.rank
    members, blocks = group.members.shape[0], group.owner.shape[0]
    keys = pool.rows.view(-1, width).index_select(0, group.rows).index_fill_(0, group.unwritten, 0)
    keys = keys.float().view(blocks, GRID, width)
    owner = group.members.index_select(0, group.owner)
    scores = torch.bmm(queries.index_select(0, owner), keys.transpose(1, 2)).masked_fill_(group.hidden, -math.inf)
    tops = queries.new_full((members * group.width, heads, 1), -math.inf)
    tops.index_copy_(0, group.cells, scores.amax(-1, keepdim=True))
    top = tops.view(members, group.width, heads, 1).amax(1)
    scores.sub_(top.index_select(0, group.owner)).exp_()
    sums = torch.cat([torch.bmm(scores, keys[..., :rank]), scores.sum(-1, keepdim=True)], dim=-1)
    cells = queries.new_zeros(members * group.width, heads, rank + 1).index_copy_(0, group.cells, sums)
    return top, tree_sum(cells.view(members, group.width, heads, rank + 1))


def tree_sum(x: Tensor) -> Tensor:
    """Sum over dim 1 in pairs, pairs of pairs and so on from index 0, so that zeros at the end do not change a bit."""
    while x.shape[1] > 1:
        pairs = x.shape[1] // 2
        joined = x[:, : 2 * pairs : 2] + x[:, 1 : 2 * pairs : 2]
        x = torch.cat([joined, x[:, 2 * pairs :]], dim=1) if x.shape[1] % 2 else joined
    return x[:, 0]


def per_head(x: Tensor, w: Tensor) -> Tensor:
    """x [B, NH, i] · w [NH, i, o] → [B, NH, o], in tiles of 16 rows."""
    count = x.shape[0]
    padded = -(-count // ROW_TILE) * ROW_TILE
    rows = x.new_zeros(x.shape[1], padded, x.shape[2])
    rows[:, :count] = x.transpose(0, 1)
    tiles = [torch.bmm(rows[:, first : first + ROW_TILE], w) for first in range(0, padded, ROW_TILE)]
    return torch.cat(tiles, dim=1)[:, :count].transpose(0, 1) if tiles else x.new_empty(0, x.shape[1], w.shape[2])
