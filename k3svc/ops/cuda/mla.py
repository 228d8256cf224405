"""Latent attention over pages (model.md 2.6), NoPE: absorbed with split keys in decode and verify, else expanded.

Where a sequence is cut depends on its own length, and on the number of parts, which is fixed in the batch-invariant
mode; the parts are joined in order, so the bits of a row are its own there. Rows past the end are never read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.cache import MlaPool
from k3svc.ops.cuda.overlap import OVERLAP, SAME_BITS, begin
from k3svc.ops.cuda.products import dot, linear, per_head
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import QUERY_TILE, Step
from k3svc.ops.cuda.tuning import Tuning

SPLIT_UNIT = tl.constexpr(64)
PART = 128
"""Columns of a program that joins splits."""


@triton.jit
def write_row(
    rows,
    norm,
    pool,
    slot_mapping,
    stride,
    eps,
    row,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One row to its place in the pool, padding to none; with NORM its latent is normed first."""
    place = tl.load(slot_mapping + row)
    columns = tl.arange(0, BLOCK)
    values = tl.load(rows + row * stride + columns, mask=columns < C, other=0.0)
    if NORM:
        latent = tl.where(columns < R, values.to(tl.float32), 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / R + eps)
        normed = latent * scale * tl.load(norm + columns, mask=columns < R, other=0.0).to(tl.float32)
        values = tl.where(columns < R, normed, values.to(tl.float32))
    tl.store(pool + place * C + columns, values.to(pool.dtype.element_ty), mask=columns < tl.where(place < 0, 0, C))


@triton.jit
def _write(rows, pool, slot_mapping, stride, C: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    write_row(rows, rows, pool, slot_mapping, stride, 0.0, row, C, C, BLOCK, False)


@triton.jit
def _row_keys(row, sequences, keys, DECODE: tl.constexpr):
    """Sequence of a row, and how many cached rows it attends to. In decode a row is a sequence, and the arguments are
    slots and starts."""
    if DECODE:
        num_keys = tl.where(tl.load(sequences + row) >= 0, tl.load(keys + row) + 1, 0)
        return row, num_keys
    return tl.load(sequences + row), tl.load(keys + row)


@triton.jit
def _split_size(num_keys, num_splits):
    """Keys of a split: whole runs of SPLIT_UNIT."""
    return tl.cdiv(tl.cdiv(num_keys, num_splits), SPLIT_UNIT) * SPLIT_UNIT


@triton.jit
def _attend(
    q_latent,
    q,
    pool,
    sequences,
    keys_of,
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
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Largest score, sum of weights and weighted sum of latents of some heads of a row over one split of its keys."""
    begin()
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    sequence, num_keys = _row_keys(row, sequences, keys_of, DECODE)
    size = _split_size(num_keys, tl.num_programs(1))
    first = split * size
    if first >= num_keys:
        return
    last = tl.minimum(first + size, num_keys)
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
    table = tables + sequence * table_stride
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
    sequences,
    keys_of,
    out,
    NH: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    DECODE: tl.constexpr,
):
    begin()
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, num_keys = _row_keys(row, sequences, keys_of, DECODE)
    size = _split_size(num_keys, SPLITS)
    cells = row * SPLITS * NH + head
    splits = tl.arange(0, SPLITS)
    top = tl.load(tops + cells + splits * NH, mask=splits * size < num_keys, other=-float("inf"))
    best = tl.max(top, 0)
    mass = tl.load(masses + cells + splits * NH, mask=splits * size < num_keys, other=0.0)
    # A row of padding has no split, and best is no number to subtract.
    mass = tl.sum(tl.where(splits * size < num_keys, mass * tl.exp(top - best), 0.0), 0)
    acc = tl.zeros([BLOCK], tl.float32)
    for left in range(0, tl.minimum(tl.cdiv(num_keys, tl.maximum(size, 1)), SPLITS), STEP):
        own = left + tl.arange(0, STEP)
        is_used = own * size < num_keys
        share = tl.exp(tl.load(tops + cells + own * NH, mask=is_used, other=-float("inf")) - best)
        mask = is_used[:, None] & (columns < R)[None, :]
        part = tl.load(sums + (cells + own * NH)[:, None] * R + columns[None, :], mask=mask, other=0.0)
        acc += tl.sum(part * share[:, None], 0)
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
    count, width = rows.shape[0], pool.rows.shape[-1]
    if count:
        rows = unit_stride(rows)
        _write[(count,)](
            rows,
            pool.rows,
            step.slot_mapping,
            rows.stride(0),
            C=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=2,
            **OVERLAP,
        )


def decode(
    q: Tensor, w_kc: Tensor, w_vc: Tensor, pool: MlaPool, step: Step, scale: float, tuning: Tuning, *, is_fast: bool
) -> Tensor:
    """`Ops.mla_decode` and `Ops.mla_verify`."""
    nope = w_kc.shape[1]
    q = unit_stride(q)
    latent = per_head(q[..., :nope], w_kc, q.dtype)
    mixed = attend(latent, q, pool, step, scale, tuning, is_fast=is_fast)
    return per_head(mixed, w_vc.transpose(1, 2), q.dtype).flatten(1)


def attend(
    latent: Tensor, q: Tensor, pool: MlaPool, step: Step, scale: float, tuning: Tuning, *, is_fast: bool
) -> Tensor:
    """Attention of latent queries [N, NH, R] and the last columns of q [N, NH, nope + E] → [N, NH, R]."""
    count, heads, rank = latent.shape
    rope = pool.rows.shape[-1] - rank
    exact = q.dtype == torch.float32
    tile, splits = _cut(count, heads, tuning, is_fast=is_fast)
    tile = 16 if exact else tile
    located = (step.slots, step.starts) if step.is_decode else (step.row_sequence, step.row_keys)
    cells = (count, splits, heads)
    tops = torch.empty(cells, dtype=torch.float32, device=q.device)
    masses = torch.empty_like(tops)
    sums = torch.empty(*cells, rank, dtype=torch.float32, device=q.device)
    _attend[(triton.cdiv(heads, tile), splits, count)](
        latent,
        q,
        pool.rows,
        *located,
        step.block_tables,
        tops,
        masses,
        sums,
        scale,
        step.block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        NH=heads,
        NOPE=q.shape[2] - rope,
        R=rank,
        E=rope,
        BR=max(16, triton.next_power_of_2(rank)),
        BE=max(16, triton.next_power_of_2(rope)),
        PAGE=step.page_size,
        BLOCK_H=tile,
        BLOCK_N=16 if exact else tuning.attend_keys,
        EXACT=exact,
        DECODE=step.is_decode,
        num_warps=4 if tile == 16 else 8,
        num_stages=1 if exact or tile == 16 else tuning.attend_stages,
        **SAME_BITS,
        **OVERLAP,
    )
    mixed = torch.empty(count, heads, rank, dtype=q.dtype, device=q.device)
    part = min(PART, triton.next_power_of_2(rank))
    _join[(triton.cdiv(rank, part), heads, count)](
        tops,
        masses,
        sums,
        *located,
        mixed,
        NH=heads,
        R=rank,
        SPLITS=splits,
        STEP=min(16, splits),
        BLOCK=part,
        DECODE=step.is_decode,
        **SAME_BITS,
        **OVERLAP,
    )
    return mixed


def _cut(rows: int, heads: int, tuning: Tuning, *, is_fast: bool) -> tuple[int, int]:
    """Heads of a program, and splits of every sequence. Few rows need many programs; more splits cost more to join."""
    if not is_fast:
        return 32 if heads > 16 else 16, tuning.splits
    tile = 32 if heads > 16 and rows > 2 else 16
    programs = rows * triton.cdiv(heads, tile)
    return tile, min(64, max(4, triton.next_power_of_2(tuning.attend_programs // programs)))


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
