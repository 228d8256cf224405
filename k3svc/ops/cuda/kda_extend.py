"""Kimi Delta Attention of prompts in chunks of 16 tokens (model.md 2.4), for bfloat16 activations.

Two kernels. `_intra` treats every chunk by itself: gate, norms, the scores inside of the chunk, and the triangular
solve, which give W and U of V' = U - W S. `_scan` walks the chunks of a sequence with the state in registers, transposed,
[V, K]: V'ᵀ = Uᵀ - S Wᵀ, Oᵀ = S (Q 2^G)ᵀ + V'ᵀ Aᵀ, S ← S 2^G_C + V'ᵀ (K 2^(G_C - G)). The operands on the left come from
registers, so a step is a chain of two products.

A chunk is 16 tokens because the lower bound of the safe gate keeps the decay over half of it above 2^-58, so scores may
be split into factors around the middle of the chunk: one exponential each for the rows and the columns. The softplus gate
has no bound; there, halves of 8, 4, 2 and 1 tokens are joined around their common border, where every exponent is <= 0.

The inverse of I + L is put together from the inverses of its diagonal blocks of 1, 2, 4, 8 tokens. Powers of L, which
grow without bound for keys that resemble each other, appear nowhere.

Where a long prompt has too few heads to fill the GPU, it is cut into segments. A first scan gives of each segment the
state that it makes of nothing and its transition T (S_out = S_in T + S̃), these are composed in order, and a second scan
starts every segment from its right state. The bits then depend on the length of the step, so only the fast mode cuts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.cache import KdaPool
from k3svc.ops.cuda.kda_step import log_decay
from k3svc.ops.cuda.products import dot
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import CHUNK, Prompts, Step
from k3svc.ops.cuda.tuning import Tuning
from k3svc.ops.table import KdaGate

FULL, SUMMARY = 0, 1


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """What `_intra` leaves of each chunk and head. C is 16."""

    w: Tensor
    """-W, bfloat16 [chunks, H, C, K]."""
    q: Tensor
    """Q 2^G, like w."""
    k: Tensor
    """K 2^(G_C - G), like w."""
    u: Tensor
    """bfloat16 [chunks, H, C, V]."""
    scores: Tensor
    """bfloat16 [chunks, H, C, C], row by column."""
    decay: Tensor
    """2^G_C, float32 [chunks, H, K]."""


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _border(x, SIZE: tl.constexpr, K: tl.constexpr):
    """x [16, K]: of each row, the last row of the first half of its block of 2·SIZE rows."""
    blocks = tl.reshape(x, [8 // SIZE, 2 * SIZE, K])
    is_border = tl.arange(0, 2 * SIZE)[None, :, None] == SIZE - 1
    border = tl.sum(tl.where(is_border, blocks, 0.0), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(border, [8 // SIZE, 2 * SIZE, K]), [16, K])


@triton.jit
def _join(q, k, g, a, kk, SIZE: tl.constexpr, K: tl.constexpr):
    """Adds the scores between the two halves of each block of 2·SIZE tokens."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    mask = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    factor = tl.exp2(-tl.abs(g - _border(g, SIZE, K)))
    columns = tl.trans(k * factor)
    a += tl.where(mask, tl.dot(q * factor, columns), 0.0)
    kk += tl.where(mask, tl.dot(k * factor, columns), 0.0)
    return a, kk


@triton.jit
def _invert(lower):
    """(I + lower)^-1 of a strictly lower triangular [16, 16]."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), lower, 0.0)
    for level in tl.static_range(1, 4):
        size: tl.constexpr = 1 << level
        below = tl.where((i // (2 * size) == j // (2 * size)) & (i // size > j // size), lower, 0.0)
        inverse -= _product(inverse, _product(below, inverse))
    return inverse


@triton.jit
def _intra(
    qkv,
    f,
    b,
    a_table,
    bias_table,
    w_out,
    q_out,
    k_out,
    u_out,
    scores_out,
    decay_out,
    chunk_rows,
    chunk_lengths,
    qkv_stride,
    f_stride,
    b_stride,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SAFE: tl.constexpr,
):
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, keys, values = tl.arange(0, 16), tl.arange(0, K), tl.arange(0, V)
    first, length = tl.load(chunk_rows + chunk), tl.load(chunk_lengths + chunk)
    is_row = rows < length
    mask = is_row[:, None]
    base = qkv + (first + rows)[:, None] * qkv_stride
    q = tl.load(base + head * K + keys[None, :], mask=mask, other=0.0).to(tl.float32)
    k = tl.load(base + (H + head) * K + keys[None, :], mask=mask, other=0.0).to(tl.float32)
    raw = tl.load(f + (first + rows)[:, None] * f_stride + head * K + keys[None, :], mask=mask, other=0.0)
    v = tl.load(base + 2 * H * K + head * V + values[None, :], mask=mask, other=0.0).to(tl.float32)
    beta = tl.load(b + (first + rows) * b_stride + head, mask=is_row, other=0.0).to(tl.float32)
    beta = tl.where(is_row, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    bias = tl.load(bias_table + head * K + keys)[None, :]
    g = log_decay(raw.to(tl.float32), tl.load(a_table + head), bias, lower_bound, SAFE)
    g = tl.cumsum(tl.where(mask, g * 1.4426950408889634, 0.0), 0)
    q = q * ((K**-0.5) / tl.sqrt(tl.sum(q * q, 1) + 1e-6))[:, None]
    k = k * (1.0 / tl.sqrt(tl.sum(k * k, 1) + 1e-6))[:, None]
    total = tl.sum(tl.where(rows[:, None] == 15, g, 0.0), 0)[None, :]
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    if SAFE:
        middle = tl.sum(tl.where(rows[:, None] == 7, g, 0.0), 0)[None, :]
        up, down = tl.exp2(g - middle), tl.exp2(middle - g)
        columns = tl.trans(k * down)
        a = tl.where(i >= j, tl.dot(q * up, columns), 0.0)
        kk = tl.where(i > j, tl.dot(k * up, columns), 0.0)
        before = up * tl.exp2(middle)
        after = down * tl.exp2(total - middle)
    else:
        a = tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
        kk = tl.zeros([16, 16], tl.float32)
        a, kk = _join(q, k, g, a, kk, 1, K)
        a, kk = _join(q, k, g, a, kk, 2, K)
        a, kk = _join(q, k, g, a, kk, 4, K)
        a, kk = _join(q, k, g, a, kk, 8, K)
        before = tl.exp2(g)
        after = tl.exp2(total - g)
    solve = _invert(kk * beta[:, None]) * beta[None, :]
    cell = chunk * H + head
    tile = cell * 16 * K + rows[:, None] * K + keys[None, :]
    dtype: tl.constexpr = w_out.dtype.element_ty
    tl.store(w_out + tile, (-tl.dot(solve, k * before)).to(dtype))
    tl.store(q_out + tile, (q * before).to(dtype))
    tl.store(k_out + tile, (k * after).to(dtype))
    tl.store(u_out + cell * 16 * V + rows[:, None] * V + values[None, :], tl.dot(solve, v).to(dtype))
    tl.store(scores_out + cell * 256 + i * 16 + j, a.to(dtype))
    tl.store(decay_out + cell * K + keys, tl.exp2(tl.sum(total, 0)))


@triton.jit
def _scan(
    w_in,
    q_in,
    k_in,
    u_in,
    scores_in,
    decay_in,
    state,
    entering,
    out,
    slots,
    starts,
    piece_sequences,
    piece_bounds,
    sequence_bounds,
    chunk_rows,
    chunk_lengths,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MODE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """MODE 0: outputs, from the states in `entering` where there are segments. MODE 1: the state that a segment makes of
    nothing, and in the programs past those its transition, both into `entering` [pieces, H, V + K, K]."""
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys, values, rows = tl.arange(0, K), block * BV + tl.arange(0, BV), tl.arange(0, 16)
    first, last = tl.load(piece_bounds + piece), tl.load(piece_bounds + piece + 1)
    sequence = tl.load(piece_sequences + piece)
    is_last = piece + 1 == tl.load(sequence_bounds + sequence + 1)
    slot = tl.load(slots + sequence)
    cells = state + ((slot * H + head) * V + values[:, None]) * K + keys[None, :]
    own = entering + ((piece * H + head) * (V + K) + values[:, None]) * K + keys[None, :]
    if MODE == 1:
        # Nothing follows the last segment of a sequence.
        if is_last:
            return
        s = tl.where((values[:, None] - V) == keys[None, :], 1.0, 0.0)
    else:
        if SEGMENTS:
            s = tl.load(own)
        else:
            is_old = tl.load(starts + sequence) > 0
            s = tl.load(cells, mask=is_old & (values >= 0)[:, None] & (keys >= 0)[None, :], other=0.0).to(tl.float32)
    dtype: tl.constexpr = w_in.dtype.element_ty
    for chunk in tl.range(first, last, num_stages=STAGES):
        cell = chunk * H + head
        tile = cell * 16 * K + rows[:, None] * K + keys[None, :]
        w = tl.load(w_in + tile)
        k = tl.load(k_in + tile)
        u = tl.load(u_in + cell * 16 * V + rows[None, :] * V + values[:, None], mask=values[:, None] < V, other=0.0)
        decay = tl.load(decay_in + cell * K + keys)
        old = s.to(dtype)
        new = dot(old, tl.trans(w), u.to(tl.float32), False).to(dtype)
        if MODE == 0:
            q = tl.load(q_in + tile)
            a = tl.load(scores_in + cell * 256 + rows[:, None] * 16 + rows[None, :])
            o = dot(old, tl.trans(q), tl.zeros([BV, 16], tl.float32), False)
            o = dot(new, tl.trans(a), o, False)
            row, length = tl.load(chunk_rows + chunk), tl.load(chunk_lengths + chunk)
            place = out + ((row + rows)[None, :] * H + head) * V + values[:, None]
            tl.store(place, o.to(out.dtype.element_ty), mask=(rows < length)[None, :] & (values < V)[:, None])
        s = dot(new, k, s * decay[None, :], False)
    if MODE == 1:
        tl.store(own, s, mask=(values < V + K)[:, None] & (keys >= 0)[None, :])
    else:
        if is_last:
            tl.store(cells, s.to(state.dtype.element_ty))


@triton.jit
def _compose(
    state, entering, slots, starts, sequence_bounds, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):
    """Turns what each segment makes of nothing into the state that enters it, in the order of the segments."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, K), block * BV + tl.arange(0, BV)
    first, last = tl.load(sequence_bounds + sequence), tl.load(sequence_bounds + sequence + 1)
    if first == last:
        return
    cells = ((tl.load(slots + sequence) * H + head) * V + values[:, None]) * K + keys[None, :]
    is_old = tl.load(starts + sequence) > 0
    s = tl.load(state + cells, mask=is_old & (values >= 0)[:, None] & (keys >= 0)[None, :], other=0.0).to(tl.float32)
    for piece in range(first, last - 1):
        base = entering + (piece * H + head) * (V + K) * K
        own = base + values[:, None] * K + keys[None, :]
        from_nothing = tl.load(own)
        transition = tl.load(base + (V + keys[:, None]) * K + keys[None, :])
        tl.store(own, s)
        s = from_nothing + _product(s, transition)
    tl.store(entering + ((last - 1) * H + head) * (V + K) * K + values[:, None] * K + keys[None, :], s)


def takes(pool: KdaPool) -> bool:
    """Whether the kernels are made for heads of this size."""
    _, _, value_dim, key_dim = pool.state.shape
    return all(size in (16, 32, 64, 128) for size in (value_dim, key_dim))


def extend(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: Step,
    tuning: Tuning,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`Ops.kda_extend`, the output in a dtype."""
    prompts = step.prompts
    assert prompts is not None
    _, heads, value_dim, _ = pool.state.shape
    out = torch.empty(step.num_rows, heads, value_dim, dtype=dtype, device=qkv.device)
    if step.has_padding:
        out.zero_()
    if prompts.num_chunks:
        chunks = intra(qkv, f, b, gate, pool, prompts, tuning)
        scan(chunks, pool, step, tuning, out)
    return out


def intra(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, pool: KdaPool, prompts: Prompts, tuning: Tuning) -> Chunks:
    """All that depends on one chunk alone."""
    _, heads, value_dim, key_dim = pool.state.shape
    qkv, f, b = unit_stride(qkv), unit_stride(f), unit_stride(b)
    cells = (prompts.num_chunks, heads)

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*cells, *shape, dtype=dtype, device=qkv.device)

    chunks = Chunks(
        w=new(CHUNK, key_dim),
        q=new(CHUNK, key_dim),
        k=new(CHUNK, key_dim),
        u=new(CHUNK, value_dim),
        scores=new(CHUNK, CHUNK),
        decay=new(key_dim, dtype=torch.float32),
    )
    _intra[(heads, prompts.num_chunks)](
        qkv,
        f,
        b,
        gate.a,
        gate.dt_bias,
        chunks.w,
        chunks.q,
        chunks.k,
        chunks.u,
        chunks.scores,
        chunks.decay,
        prompts.chunk_rows,
        prompts.chunk_lengths,
        qkv.stride(0),
        f.stride(0),
        b.stride(0),
        gate.lower_bound or 0.0,
        H=heads,
        K=key_dim,
        V=value_dim,
        SAFE=gate.lower_bound is not None,
        num_warps=tuning.intra_warps,
    )
    return chunks


def scan(chunks: Chunks, pool: KdaPool, step: Step, tuning: Tuning, out: Tensor) -> None:
    """The states from chunk to chunk, and the outputs."""
    prompts = step.prompts
    assert prompts is not None
    pieces = prompts.pieces
    _, heads, value_dim, key_dim = pool.state.shape
    block_v = min(tuning.scan_block_v, value_dim)
    entering = out
    if pieces.is_cut:
        shape = (pieces.count, heads, value_dim + key_dim, key_dim)
        entering = torch.empty(shape, dtype=torch.float32, device=out.device)

    def launch(mode: int, width: int) -> None:
        _scan[(triton.cdiv(width, block_v), heads, pieces.count)](
            chunks.w,
            chunks.q,
            chunks.k,
            chunks.u,
            chunks.scores,
            chunks.decay,
            pool.state,
            entering,
            out,
            step.slots,
            step.starts,
            pieces.sequences,
            pieces.bounds,
            pieces.sequence_bounds,
            prompts.chunk_rows,
            prompts.chunk_lengths,
            H=heads,
            K=key_dim,
            V=value_dim,
            BV=block_v,
            SEGMENTS=pieces.is_cut,
            MODE=mode,
            STAGES=tuning.scan_stages,
            num_warps=tuning.scan_warps,
        )

    if pieces.is_cut:
        launch(SUMMARY, value_dim + key_dim)
        _compose[(triton.cdiv(value_dim, block_v), heads, step.num_sequences)](
            pool.state,
            entering,
            step.slots,
            step.starts,
            pieces.sequence_bounds,
            H=heads,
            K=key_dim,
            V=value_dim,
            BV=block_v,
            num_warps=4,
        )
    launch(FULL, value_dim)
