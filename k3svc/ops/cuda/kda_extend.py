"""Kimi Delta Attention of prompts in chunks of 32 tokens (model.md 2.4), for bfloat16 activations.

Two kernels. `_intra` treats every chunk by itself: gate, norms, the scores inside of the chunk, and the inverse M of
the triangular system. `_scan` walks the chunks of a sequence with the state in registers, transposed, [V, K]:
X = Vᵀ - S (K 2^G)ᵀ, V'ᵀ = X Mᵀ, Oᵀ = S (Q 2^G)ᵀ + V'ᵀ Aᵀ, S ← S 2^G_C + V'ᵀ (K 2^(G_C - G)). All operands on the left
come from registers, so a step is a chain of products without a detour through memory.

A chunk is 32 tokens because the lower bound of the safe gate keeps the decay over half of it above 2^-116, so scores
may be split into factors around the middle of the chunk: one exponential each for the rows and the columns, both finite
in float32. The softplus gate has no bound, and that of a safe gate may be lower; there, halves of 16, 8, 4, 2 and 1
tokens are joined around their common border, where every exponent is <= 0. Exponents are differences of running sums,
so a decay that leaves nothing of a state is cut off: else its size would cost the tokens after it their digits.

The inverse of I + L is put together from the inverses of its diagonal blocks of 1, 2, 4, 8, 16 tokens. Powers of L,
which grow without bound for keys that resemble each other, appear nowhere.

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
from k3svc.ops.cuda.overlap import INTERPRETED
from k3svc.ops.cuda.products import dot
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import CHUNK, Prompts, Step
from k3svc.ops.cuda.tuning import Tuning
from k3svc.ops.table import KdaGate

FULL, SUMMARY = 0, 1
LEAST_BOUND = -5.4
"""Of a safe gate whose scores are split around the middle of a chunk: 15 tokens below it, and keys of norm 1, stay
finite, as do 16 above."""
LEAST_DECAY = tl.constexpr(-256.0)
"""Base 2; no float32 is left after it."""


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """What `_intra` leaves of each chunk and head. C is CHUNK."""

    q: Tensor
    """Q 2^G, bfloat16 [chunks, H, C, K]."""
    k: Tensor
    """K 2^(G_C - G), like q."""
    reads: Tensor
    """-K 2^G, like q."""
    scores: Tensor
    """A, bfloat16 [chunks, H, C, C], row by column."""
    solve: Tensor
    """M = (I + L)^-1 diag(β), like scores."""
    decay: Tensor
    """2^G_C, float32 [chunks, H, K]."""


@triton.jit
def exp2(x):
    """2^x in one instruction; what is denormal is 0."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def inverse(x):
    """1 / x in one instruction, to the last digit but one."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def _border(x, SIZE: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """x [C, K]: of each row, the last row of the first half of its block of 2·SIZE rows."""
    blocks = tl.reshape(x, [C // (2 * SIZE), 2 * SIZE, K])
    is_border = tl.arange(0, 2 * SIZE)[None, :, None] == SIZE - 1
    border = tl.sum(tl.where(is_border, blocks, 0.0), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(border, [C // (2 * SIZE), 2 * SIZE, K]), [C, K])


@triton.jit
def _is_between(SIZE: tl.constexpr, C: tl.constexpr):
    """Cells [C, C] of a row of the second half and a column of the first half of the same block of 2·SIZE tokens."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)


@triton.jit
def _join(q, k, g, a, kk, SIZE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRODUCT: tl.constexpr):
    """Adds the scores between the two halves of each block of 2·SIZE tokens."""
    mask = _is_between(SIZE, C)
    factor = exp2(-tl.abs(g - _border(g, SIZE, C, K)))
    rows = (k * factor).to(PRODUCT)
    columns = tl.trans(rows)
    a += tl.where(mask, tl.dot((q * factor).to(PRODUCT), columns), 0.0)
    kk += tl.where(mask, tl.dot(rows, columns), 0.0)
    return a, kk


@triton.jit
def _merge(known, lower, SIZE: tl.constexpr, C: tl.constexpr):
    """From the inverses of diagonal blocks of SIZE to those of 2·SIZE."""
    below = tl.where(_is_between(SIZE, C), lower, 0.0)
    return known - tl.dot(known, tl.dot(below, known))


@triton.jit
def _invert(lower, C: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular [32, 32]."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    pairs = tl.where(i == j, 1.0, 0.0) - tl.where(_is_between(1, C), lower, 0.0)
    return _merge(_merge(_merge(_merge(pairs, lower, 2, C), lower, 4, C), lower, 8, C), lower, 16, C)


@triton.jit
def _intra(
    qkv,
    f,
    b,
    a_table,
    bias_table,
    q_out,
    k_out,
    reads_out,
    scores_out,
    solve_out,
    decay_out,
    chunk_rows,
    chunk_lengths,
    qkv_stride,
    f_stride,
    b_stride,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    SAFE: tl.constexpr,
    MIDDLE: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Sums over K in parts of BK, which keeps the parts in registers; q and k are read once more before, for norms."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    first, length = tl.load(chunk_rows + chunk), tl.load(chunk_lengths + chunk)
    is_row = rows < length
    mask = is_row[:, None]
    # Offsets inside of a tile are 32 bit wide, which halves the registers that they take.
    q_rows = qkv + first * qkv_stride + head * K + rows[:, None] * qkv_stride
    f_rows = f + first * f_stride + head * K + rows[:, None] * f_stride
    wide = tl.arange(0, K)[None, :]
    q_all = tl.load(q_rows + wide, mask=mask, other=0.0).to(tl.float32)
    q_scale = ((K**-0.5) / tl.sqrt(tl.sum(q_all * q_all, 1) + 1e-6))[:, None]
    k_all = tl.load(q_rows + H * K + wide, mask=mask, other=0.0).to(tl.float32)
    k_scale = (1.0 / tl.sqrt(tl.sum(k_all * k_all, 1) + 1e-6))[:, None]
    rate = tl.load(a_table + head)
    i, j = rows[:, None], rows[None, :]
    dtype: tl.constexpr = q_out.dtype.element_ty
    cell = chunk * H + head
    a = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    # Not unrolled: loads of all parts at once would not fit into registers.
    for part in tl.range(0, K, BK, num_stages=1):
        keys = part + tl.arange(0, BK)
        columns = keys[None, :]
        bias = tl.load(bias_table + head * K + columns)
        raw = tl.load(f_rows + columns, mask=mask, other=0.0).to(tl.float32)
        if SAFE:
            # lower_bound · sigmoid, in base 2 throughout
            g = lower_bound * 1.4426950408889634 * inverse(1.0 + exp2(-1.4426950408889634 * rate * (raw + bias)))
        else:
            g = 1.4426950408889634 * log_decay(raw, rate, bias, lower_bound, SAFE)
        if not MIDDLE:
            g = tl.maximum(g, LEAST_DECAY)
        g = tl.cumsum(tl.where(mask, g, 0.0), 0)
        total = tl.sum(tl.where(i == C - 1, g, 0.0), 0)
        k = tl.load(q_rows + H * K + columns, mask=mask, other=0.0).to(tl.float32) * k_scale
        q = tl.load(q_rows + columns, mask=mask, other=0.0).to(tl.float32) * q_scale
        if MIDDLE:
            middle = tl.sum(tl.where(i == C // 2 - 1, g, 0.0), 0)
            up, down = exp2(g - middle[None, :]), exp2(middle[None, :] - g)
            q_up, k_up, k_down = q * up, k * up, k * down
            columns_down = tl.trans(k_down.to(PRODUCT))
            kk = tl.dot(k_up.to(PRODUCT), columns_down, kk)
            a = tl.dot(q_up.to(PRODUCT), columns_down, a)
            shift = exp2(middle)[None, :]
            q_before, k_before = q_up * shift, k_up * shift
            k_after = k_down * exp2(total - middle)[None, :]
        else:
            a += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
            a, kk = _join(q, k, g, a, kk, 1, C, BK, PRODUCT)
            a, kk = _join(q, k, g, a, kk, 2, C, BK, PRODUCT)
            a, kk = _join(q, k, g, a, kk, 4, C, BK, PRODUCT)
            a, kk = _join(q, k, g, a, kk, 8, C, BK, PRODUCT)
            a, kk = _join(q, k, g, a, kk, 16, C, BK, PRODUCT)
            before = exp2(g)
            q_before, k_before, k_after = q * before, k * before, k * exp2(total[None, :] - g)
        tile = i * K + columns
        tl.store(q_out + cell * C * K + tile, q_before.to(dtype))
        tl.store(reads_out + cell * C * K + tile, (-k_before).to(dtype))
        tl.store(k_out + cell * C * K + tile, k_after.to(dtype))
        tl.store(decay_out + cell * K + keys, exp2(total))
    beta = tl.load(b + first * b_stride + head + rows * b_stride, mask=is_row, other=0.0).to(tl.float32)
    beta = tl.where(is_row, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    square = i * C + j
    tl.store(scores_out + cell * C * C + square, tl.where(i >= j, a, 0.0).to(dtype))
    solve = _invert(tl.where(i > j, kk, 0.0) * beta[:, None], C) * beta[None, :]
    tl.store(solve_out + cell * C * C + square, solve.to(dtype))


@triton.jit
def _scan(
    qkv,
    q_in,
    k_in,
    reads_in,
    scores_in,
    solve_in,
    decay_in,
    state,
    entering,
    out,
    slots,
    starts,
    bounds,
    chunk_bounds,
    piece_sequences,
    piece_bounds,
    sequence_bounds,
    qkv_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MODE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """MODE 0: outputs, from the states in `entering` where there are segments. MODE 1: the state that a segment makes
    of nothing, and in the programs past those its transition, both into `entering` [pieces, H, V + K, K]."""
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys, values, rows = tl.arange(0, K), block * BV + tl.arange(0, BV), tl.arange(0, C)
    first, last = tl.load(piece_bounds + piece), tl.load(piece_bounds + piece + 1)
    sequence = tl.load(piece_sequences + piece)
    is_last = piece + 1 == tl.load(sequence_bounds + sequence + 1)
    slot = tl.load(slots + sequence)
    row = tl.load(bounds + sequence) + (first - tl.load(chunk_bounds + sequence)) * C
    row_end = tl.load(bounds + sequence + 1)
    cells = state + (slot * H + head) * V * K + values[:, None] * K + keys[None, :]
    own = entering + (piece * H + head) * (V + K) * K + values[:, None] * K + keys[None, :]
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
            s = tl.load(cells, mask=(values >= 0)[:, None] & (keys < tl.where(is_old, K, 0))[None, :], other=0.0).to(
                tl.float32
            )
    dtype: tl.constexpr = q_in.dtype.element_ty
    v_cells = rows[None, :] * qkv_stride + values[:, None]
    tile = rows[:, None] * K + keys[None, :]
    square = rows[:, None] * C + rows[None, :]
    out_cells = rows[None, :] * (H * V) + values[:, None]
    for chunk in tl.range(first, last, num_stages=STAGES):
        cell = chunk * H + head
        v_mask = (rows < row_end - row)[None, :] & (values < V)[:, None]
        v = tl.load(qkv + row * qkv_stride + 2 * H * K + head * V + v_cells, mask=v_mask, other=0.0)
        reads = tl.load(reads_in + cell * C * K + tile)
        solve = tl.load(solve_in + cell * C * C + square)
        k = tl.load(k_in + cell * C * K + tile)
        decay = tl.load(decay_in + cell * K + keys)
        old = s.to(dtype)
        x = dot(old, tl.trans(reads), v.to(tl.float32), False).to(dtype)
        new = dot(x, tl.trans(solve), tl.zeros([BV, C], tl.float32), False).to(dtype)
        if MODE == 0:
            q = tl.load(q_in + cell * C * K + tile)
            a = tl.load(scores_in + cell * C * C + square)
            o = dot(old, tl.trans(q), tl.zeros([BV, C], tl.float32), False)
            o = dot(new, tl.trans(a), o, False)
            tl.store(out + (row * H + head) * V + out_cells, o.to(out.dtype.element_ty), mask=v_mask)
        s = dot(new, k, s * decay[None, :], False)
        row += C
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
    s = tl.load(state + cells, mask=(values >= 0)[:, None] & (keys < tl.where(is_old, K, 0))[None, :], other=0.0).to(
        tl.float32
    )
    for piece in range(first, last - 1):
        base = entering + (piece * H + head) * (V + K) * K
        own = base + values[:, None] * K + keys[None, :]
        from_nothing = tl.load(own)
        transition = tl.load(base + (V + keys[:, None]) * K + keys[None, :])
        tl.store(own, s)
        s = tl.dot(s, transition, from_nothing, input_precision="tf32x3")
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
    out = step.new_rows(heads, value_dim, dtype=dtype)
    if prompts.num_chunks:
        qkv = unit_stride(qkv)
        scan(qkv, intra(qkv, f, b, gate, pool, prompts, tuning), pool, step, tuning, out)
    return out


def intra(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, pool: KdaPool, prompts: Prompts, tuning: Tuning) -> Chunks:
    """All that depends on one chunk alone."""
    _, heads, _, key_dim = pool.state.shape
    f, b = unit_stride(f), unit_stride(b)

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(prompts.num_chunks, heads, *shape, dtype=dtype, device=qkv.device)

    chunks = Chunks(
        q=new(CHUNK, key_dim),
        k=new(CHUNK, key_dim),
        reads=new(CHUNK, key_dim),
        scores=new(CHUNK, CHUNK),
        solve=new(CHUNK, CHUNK),
        decay=new(key_dim, dtype=torch.float32),
    )
    _intra[(heads, prompts.num_chunks)](
        qkv,
        f,
        b,
        gate.a,
        gate.dt_bias,
        chunks.q,
        chunks.k,
        chunks.reads,
        chunks.scores,
        chunks.solve,
        chunks.decay,
        prompts.chunk_rows,
        prompts.chunk_lengths,
        qkv.stride(0),
        f.stride(0),
        b.stride(0),
        gate.lower_bound or 0.0,
        H=heads,
        K=key_dim,
        C=CHUNK,
        BK=min(tuning.intra_part, key_dim),
        SAFE=gate.lower_bound is not None,
        MIDDLE=gate.lower_bound is not None and gate.lower_bound >= LEAST_BOUND,
        PRODUCT=tl.float32 if INTERPRETED.value else tuning.intra_product,
        num_warps=tuning.intra_warps,
    )
    return chunks


def scan(qkv: Tensor, chunks: Chunks, pool: KdaPool, step: Step, tuning: Tuning, out: Tensor) -> None:
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
            qkv,
            chunks.q,
            chunks.k,
            chunks.reads,
            chunks.scores,
            chunks.solve,
            chunks.decay,
            pool.state,
            entering,
            out,
            step.slots,
            step.starts,
            step.bounds,
            prompts.chunk_bounds,
            pieces.sequences,
            pieces.bounds,
            pieces.sequence_bounds,
            qkv.stride(0),
            H=heads,
            K=key_dim,
            V=value_dim,
            C=CHUNK,
            BV=block_v,
            SEGMENTS=pieces.is_cut,
            MODE=mode,
            STAGES=tuning.scan_stages,
            num_warps=tuning.scan_warps,
        )

    if pieces.is_cut:
        launch(SUMMARY, value_dim + key_dim)
        _compose[(triton.cdiv(value_dim, 16), heads, step.num_sequences)](
            pool.state,
            entering,
            step.slots,
            step.starts,
            pieces.sequence_bounds,
            H=heads,
            K=key_dim,
            V=value_dim,
            BV=16,
            num_warps=4,
            num_stages=1,
        )
    launch(FULL, value_dim)
