"""Latent attention on Ascend: expanded form over gathered rows for prompts, absorbed form over pages for decode."""

from dataclasses import dataclass

import torch
from torch import Tensor

from k3svc.ops.npu.cache import MlaPool
from k3svc.ops.npu.steps import DecodeStep, ExtendStep, VerifyStep
from k3svc.ops.npu.vendor import Vendor

MASK_SIZE = 2048
CAUSAL = 3
"""Sparse mode: causal with the last query at the last key."""
ABSORB_LIMIT = 65536
"""npu_transpose_batchmatmul wants width · heads below this."""
SPLIT_NORM_ROWS = 65534
"""fused_split_qk_norm takes no more rows at once."""


def causal_mask(device: torch.device) -> Tensor:
    """The compressed mask of sparse mode 3, bool [2048, 2048], True where a key is hidden."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """What fused_split_qk_norm reads of the module of a norm, which it wants in place of the weight."""

    weight: Tensor
    variance_epsilon: float


def split_norm(
    vendor: Vendor, kv: Tensor, q: Tensor, kv_weight: Tensor, q_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`Ops.split_norm`. The kernel reads [q | latent | rope] side by side, and knows one eps for both norms."""
    if kv.shape[0] == 0:
        return kv.clone(), q.clone()
    q_norm, kv_norm = (_Norm(weight=weight, variance_epsilon=eps) for weight in (q_weight, kv_weight))
    widths = (q.shape[1], kv_weight.shape[0], kv.shape[1] - kv_weight.shape[0])
    parts = [
        vendor.fused_split_qk_norm(rows, q_norm, kv_norm, *widths, eps=eps)
        for rows in torch.split(torch.cat([q, kv], dim=1), SPLIT_NORM_ROWS)
    ]
    normed, latent, rope = (torch.cat(column) for column in zip(*parts, strict=True))
    return torch.cat([latent.flatten(1), rope.flatten(1)], dim=1), normed


def write(rows: Tensor, pool: MlaPool, step: ExtendStep | DecodeStep | VerifyStep) -> None:
    """`Ops.mla_write`. The device's scatter rejects rank 4, so a cache is seen as [rows, 1, width]."""
    rank = pool.latent.shape[-1]
    for cache, part in ((pool.latent, rows[:, :rank]), (pool.rope, rows[:, rank:])):
        width = cache.shape[-1]
        flat, updates = cache.view(-1, 1, width), part.contiguous().view(-1, 1, width)
        torch.ops.npu.npu_scatter_nd_update_(flat, step.places, updates.to(cache.dtype))


def store(vendor: Vendor, rows: Tensor, pool: MlaPool, step: ExtendStep | DecodeStep | VerifyStep) -> None:
    """`Ops.mla_write` of latent and rope in one launch, seen as [rows, 1, width] too. The kernel stores the valid
    prefix of every block of rows; here each row is a block of its own, of one entry or, as padding, none.
    """
    rank = pool.latent.shape[-1]
    latent, rope = (
        part.contiguous().view(-1, 1, part.shape[1]).to(pool.latent.dtype) for part in (rows[:, :rank], rows[:, rank:])
    )
    vendor.store_kv_cache_prefix_valid_npu_triton(
        pool.latent.view(-1, 1, rank),
        pool.rope.view(-1, 1, pool.rope.shape[-1]),
        latent,
        rope,
        step.places,
        (~step.padding).to(torch.int32),
    )


def extend(
    q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: ExtendStep, scale: float, mask: Tensor
) -> Tensor:
    """`Ops.mla_extend`: keys and values of all cached rows are expanded, those of this step among them."""
    heads, nope, rank = w_kc.shape
    value_dim = w_vc.shape[1]
    if step.num_live == 0:
        return q.new_zeros(step.num_rows, heads * value_dim)
    latent = pool.latent.view(-1, rank).index_select(0, step.key_rows)
    rope = pool.rope.view(-1, 1, pool.rope.shape[-1]).index_select(0, step.key_rows)
    own = step.take(q)
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        own[..., :nope].contiguous(),
        torch.mm(latent, w_kc.reshape(heads * nope, rank).t()).view(-1, heads, nope),
        torch.mm(latent, w_vc.reshape(heads * value_dim, rank).t()).view(-1, heads, value_dim),
        query_rope=own[..., nope:].contiguous(),
        key_rope=rope.expand(-1, heads, -1).contiguous(),
        num_heads=heads,
        num_key_value_heads=heads,
        input_layout="TND",
        atten_mask=mask,
        sparse_mode=CAUSAL,
        next_tokens=0,
        actual_seq_lengths=step.query_ends,
        actual_seq_lengths_kv=step.key_ends,
        scale=scale,
    )
    return step.put(out.flatten(1))


def decode(q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: DecodeStep, scale: float) -> Tensor:
    """`Ops.mla_decode`. The operator wants a power of two of heads; the rows of the others are dropped."""
    count, heads, _ = q.shape
    nope, value_dim = w_kc.shape[1], w_vc.shape[1]
    padded = 1 << (heads - 1).bit_length()
    queries = with_heads(absorb(q[..., :nope], w_kc), padded)
    ropes = with_heads(q[..., nope:], padded)
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        queries[:, None],
        pool.latent,
        pool.latent,
        query_rope=ropes[:, None],
        key_rope=pool.rope,
        num_heads=padded,
        num_key_value_heads=1,
        input_layout="BSND",
        block_table=step.block_tables,
        block_size=pool.latent.shape[1],
        sparse_mode=0,
        actual_seq_lengths_kv=step.key_lengths,
        scale=scale,
    )
    mixed = absorb(out[:, 0, :heads], w_vc.transpose(1, 2))
    return step.hide_padding(mixed.reshape(count, heads * value_dim))


def verify(
    q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: VerifyStep, scale: float, mask: Tensor
) -> Tensor:
    """`Ops.mla_verify`: packed queries over pages, each at its own position, so that no draft sees the next one.

    Lengths of queries are cumulative, lengths of keys are those of each sequence, since there is a block table.
    """
    count, heads, _ = q.shape
    nope, value_dim = w_kc.shape[1], w_vc.shape[1]
    padded = 1 << (heads - 1).bit_length()
    latent, rope = pool.latent[:, None], pool.rope[:, None]
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        with_heads(absorb(q[..., :nope], w_kc), padded),
        latent,
        latent,
        query_rope=with_heads(q[..., nope:], padded),
        key_rope=rope,
        num_heads=padded,
        num_key_value_heads=1,
        input_layout="TND",
        atten_mask=mask,
        sparse_mode=CAUSAL,
        next_tokens=0,
        block_table=step.block_tables,
        block_size=pool.latent.shape[1],
        actual_seq_lengths=step.query_ends,
        actual_seq_lengths_kv=step.key_lengths,
        scale=scale,
    )
    mixed = absorb(out[:, :heads], w_vc.transpose(1, 2))
    return step.hide_padding(mixed.reshape(count, heads * value_dim))


def absorb(x: Tensor, w: Tensor) -> Tensor:
    """x [B, NH, i] · w [NH, i, o] → [B, NH, o], by as many heads at once as the operator takes."""
    per_call = (ABSORB_LIMIT - 1) // w.shape[1]
    parts = [
        torch.ops.npu.npu_transpose_batchmatmul(
            x[:, first : first + per_call], w[first : first + per_call], perm_x1=[1, 0, 2], perm_y=[1, 0, 2]
        )
        for first in range(0, w.shape[0], per_call)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def with_heads(x: Tensor, heads: int) -> Tensor:
    """x [B, NH, D] with zero heads added up to `heads`, contiguous."""
    missing = heads - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], missing, x.shape[2])], dim=1) if missing else x.contiguous()
