"""Latent attention over pages (model.md 2.6), NoPE: absorbed with split keys in decode and verify, else expanded.

Every sequence is cut at fixed positions, whatever else runs beside it, and the parts are joined in order, so the bits
of a row are its own. Rows past the end of a sequence are never read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.cache import MlaPool
from k3svc.ops.cuda.overlap import OVERLAP, begin
from k3svc.ops.cuda.products import dot, linear, per_head
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import QUERY_TILE, Step
from k3svc.ops.cuda.tuning import Tuning

HEAD_TILE = 16


@triton.jit
def _write(rows, pool, slot_mapping, stride, C: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + row)
    if place < 0:
        return
    columns = tl.arange(0, BLOCK)
    values = tl.load(rows + row * stride + columns, mask=columns < C, other=0.0)
    tl.store(pool + place * C + columns, values.to(pool.dtype.element_ty), mask=columns < C)


@triton.jit
def _attend(
    q_latent,
    q,
    pool,
    row_sequence,
    row_keys,
    tables,
    tops,
    masses,
    sums,
    scale,
    table_stride,
    q_row,
    q_head,
    NH: tl.constexpr,
    NOPE: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Largest score, sum of weights and weighted sum of latents of some heads of a row over one split of its keys."""
    begin()
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_keys = tl.load(row_keys + row)
    first = split * SPLIT
    if first >= num_keys:
        return
    last = tl.minimum(first + SPLIT, num_keys)
    heads, columns, ropes = group * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BR), tl.arange(0, BE)
    head_mask = (heads < NH)[:, None]
    latent = tl.load(
        q_latent + (row * NH + heads[:, None]) * R + columns[None, :],
        mask=head_mask & (columns < R)[None, :],
        other=0.0,
    )
    rope = tl.load(
        q + row * q_row + heads[:, None] * q_head + NOPE + ropes[None, :],
        mask=head_mask & (ropes < E)[None, :],
        other=0.0,
    )
    table = tables + tl.load(row_sequence + row) * table_stride
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BR], tl.float32)
    for left in range(first, last, BLOCK_N):
        keys = left + tl.arange(0, BLOCK_N)
        is_key = keys < last
        page = tl.load(table + keys // PAGE, mask=is_key, other=0)
        cached = pool + (page * PAGE + keys % PAGE)[:, None] * (R + E)
        c = tl.load(cached + columns[None, :], mask=is_key[:, None] & (columns < R)[None, :], other=0.0)
        k = tl.load(cached + R + ropes[None, :], mask=is_key[:, None] & (ropes < E)[None, :], other=0.0)
        scores = dot(latent, tl.trans(c), tl.zeros([BLOCK_H, BLOCK_N], tl.float32), EXACT)
        scores = dot(rope, tl.trans(k), scores, EXACT) * scale
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - best[:, None])
        fade = tl.exp(top - best)
        mass = mass * fade + tl.sum(weights, 1)
        acc = dot(weights.to(c.dtype), c, acc * fade[:, None], EXACT)
        top = best
    cell = (row * tl.num_programs(1) + split) * NH + heads
    tl.store(tops + cell, top, mask=heads < NH)
    tl.store(masses + cell, mass, mask=heads < NH)
    tl.store(sums + cell[:, None] * R + columns[None, :], acc, mask=head_mask & (columns < R)[None, :])


@triton.jit
def _join(
    tops,
    masses,
    sums,
    row_keys,
    out,
    num_splits,
    NH: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    SPLIT: tl.constexpr,
):
    begin()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BR)
    num_keys = tl.load(row_keys + row)
    top = -float("inf")
    mass = 0.0
    acc = tl.zeros([BR], tl.float32)
    for split in range((num_keys + SPLIT - 1) // SPLIT):
        cell = (row * num_splits + split) * NH + head
        own_top = tl.load(tops + cell)
        best = tl.maximum(top, own_top)
        fade, own = tl.exp(top - best), tl.exp(own_top - best)
        mass = mass * fade + tl.load(masses + cell) * own
        acc = acc * fade + tl.load(sums + cell * R + columns, mask=columns < R, other=0.0) * own
        top = best
    acc = acc / tl.where(mass > 0.0, mass, 1.0)
    tl.store(out + (row * NH + head) * R + columns, acc.to(out.dtype.element_ty), mask=columns < R)


@triton.jit
def _prompt(
    q,
    keys_in,
    values_in,
    ropes_in,
    out,
    tile_sequences,
    tile_rows,
    bounds,
    starts,
    key_bounds,
    scale,
    rope_stride,
    NH: tl.constexpr,
    NOPE: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    BNOPE: tl.constexpr,
    BE: tl.constexpr,
    BVD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Causal attention of a tile of prompt rows and one head. keys [S, NH, NOPE], values [S, NH, V], ropes [S, E]."""
    head, tile = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    row = tl.load(tile_rows + tile)
    first, last = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    base = tl.load(key_bounds + sequence)
    rows = row + tl.arange(0, BLOCK_M)
    positions = tl.load(starts + sequence) + rows - first
    is_row = rows < last
    nopes, ropes, columns = tl.arange(0, BNOPE), tl.arange(0, BE), tl.arange(0, BVD)
    place = (rows[:, None] * NH + head) * (NOPE + E)
    q_nope = tl.load(q + place + nopes[None, :], mask=is_row[:, None] & (nopes < NOPE)[None, :], other=0.0)
    q_rope = tl.load(q + place + NOPE + ropes[None, :], mask=is_row[:, None] & (ropes < E)[None, :], other=0.0)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BVD], tl.float32)
    num_keys = tl.load(starts + sequence) + tl.minimum(row + BLOCK_M, last) - first
    for left in range(0, num_keys, BLOCK_N):
        own = left + tl.arange(0, BLOCK_N)
        is_key = own < num_keys
        cell = (base + own) * NH + head
        k = tl.load(
            keys_in + cell[:, None] * NOPE + nopes[None, :], mask=is_key[:, None] & (nopes < NOPE)[None, :], other=0.0
        )
        r = tl.load(
            ropes_in + (base + own)[:, None] * rope_stride + ropes[None, :],
            mask=is_key[:, None] & (ropes < E)[None, :],
            other=0.0,
        )
        v = tl.load(
            values_in + cell[:, None] * V + columns[None, :], mask=is_key[:, None] & (columns < V)[None, :], other=0.0
        )
        scores = dot(q_nope, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), EXACT)
        scores = dot(q_rope, tl.trans(r), scores, EXACT) * scale
        scores = tl.where(own[None, :] <= positions[:, None], scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - best[:, None])
        fade = tl.exp(top - best)
        mass = mass * fade + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * fade[:, None], EXACT)
        top = best
    result = acc / mass[:, None]
    mask = is_row[:, None] & (columns < V)[None, :]
    tl.store(out + (rows[:, None] * NH + head) * V + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


def write(rows: Tensor, pool: MlaPool, step: Step) -> None:
    """`Ops.mla_write`."""
    count, width = rows.shape
    if count:
        rows = unit_stride(rows)
        block = triton.next_power_of_2(width)
        _write[(count,)](
            rows, pool.rows, step.slot_mapping, rows.stride(0), C=width, BLOCK=block, num_warps=2, **OVERLAP
        )


def decode(q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: Step, scale: float, tuning: Tuning) -> Tensor:
    """`Ops.mla_decode` and `Ops.mla_verify`."""
    count, heads, _ = q.shape
    nope, rank = w_kc.shape[1:]
    rope = pool.rows.shape[-1] - rank
    q = unit_stride(q)
    exact = q.dtype == torch.float32
    latent = per_head(q[..., :nope], w_kc, q.dtype)
    splits = triton.cdiv(step.max_keys, tuning.split_keys)
    cells = (count, splits, heads)
    tops = torch.empty(cells, dtype=torch.float32, device=q.device)
    masses = torch.empty_like(tops)
    sums = torch.empty(*cells, rank, dtype=torch.float32, device=q.device)
    block_r = max(16, triton.next_power_of_2(rank))
    _attend[(triton.cdiv(heads, HEAD_TILE), splits, count)](
        latent,
        q,
        pool.rows,
        step.row_sequence,
        step.row_keys,
        step.block_tables,
        tops,
        masses,
        sums,
        scale,
        step.block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        NH=heads,
        NOPE=nope,
        R=rank,
        E=rope,
        BR=block_r,
        BE=max(16, triton.next_power_of_2(rope)),
        PAGE=step.page_size,
        SPLIT=tuning.split_keys,
        BLOCK_H=HEAD_TILE,
        BLOCK_N=16 if exact else 32,
        EXACT=exact,
        num_warps=4,
        num_stages=1 if exact else 3,
        **OVERLAP,
    )
    mixed = torch.empty(count, heads, rank, dtype=q.dtype, device=q.device)
    _join[(heads, count)](
        tops,
        masses,
        sums,
        step.row_keys,
        mixed,
        splits,
        NH=heads,
        R=rank,
        BR=block_r,
        SPLIT=tuning.split_keys,
        **OVERLAP,
    )
    return per_head(mixed, w_vc.transpose(1, 2), q.dtype).flatten(1)


def extend(q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: Step, scale: float, tuning: Tuning) -> Tensor:
    """`Ops.mla_extend`: keys and values of all heads are expanded once a call."""
    prompts = step.prompts
    assert prompts is not None
    heads = q.shape[1]
    nope, rank = w_kc.shape[1:]
    value_dim = w_vc.shape[1]
    rope = pool.rows.shape[-1] - rank
    out = step.new_rows(heads * value_dim, dtype=q.dtype)
    if not prompts.num_tiles:
        return out
    exact = q.dtype == torch.float32
    cached = pool.rows.view(-1, rank + rope).index_select(0, prompts.key_rows).to(q.dtype)
    keys = linear(cached[:, :rank], w_kc.reshape(-1, rank), tuning)
    values = linear(cached[:, :rank], w_vc.reshape(-1, rank), tuning)
    _prompt[(heads, prompts.num_tiles)](
        q.contiguous(),
        keys,
        values,
        cached[:, rank:],
        out,
        prompts.tile_sequences,
        prompts.tile_rows,
        step.bounds,
        step.starts,
        prompts.key_bounds,
        scale,
        cached.stride(0),
        NH=heads,
        NOPE=nope,
        E=rope,
        V=value_dim,
        BNOPE=max(16, triton.next_power_of_2(nope)),
        BE=max(16, triton.next_power_of_2(rope)),
        BVD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=QUERY_TILE,
        BLOCK_N=16 if exact else 64,
        EXACT=exact,
        num_warps=8 if exact else 4,
        num_stages=1 if exact else 2,
    )
    return out
