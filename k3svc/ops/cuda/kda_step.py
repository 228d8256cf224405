"""Kimi Delta Attention row by row (model.md 2.3, 2.5), in place over the slots of the pool.

One program holds some value rows of one head's state and walks the rows of one sequence: one in decode, the anchor and
drafts of a verify step, all tokens of a prompt. A row takes the same operations in the same order everywhere, so that
decode, verify with commit, and prompts agree bit by bit. The fast mode lets the compiler fuse operations as it likes,
each time it compiles the kernel, so there it may be otherwise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.cache import KdaPool
from k3svc.ops.cuda.overlap import OVERLAP, SAME_BITS, begin
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import Step
from k3svc.ops.cuda.tuning import Tuning
from k3svc.ops.table import KdaGate

DECODE, VERIFY, COMMIT, EXTEND = 0, 1, 2, 3


@triton.jit
def log_decay(f, a, bias, lower_bound, SAFE: tl.constexpr):
    """Natural logarithm of the decay (model.md 2.3 step 5)."""
    x = f + bias
    if SAFE:
        return lower_bound / (1.0 + tl.exp(-a * x))
    # log(1 + e) to the last digit: 1 + e rounds, and e / (1 + e - 1) takes that back. Above 20 softplus is identity.
    e = tl.exp(tl.minimum(x, 20.0))
    sum_ = 1.0 + e
    small = tl.where(sum_ == 1.0, e, tl.log(sum_) * (e / (sum_ - 1.0)))
    return -a * tl.where(x > 20.0, x, small)


@triton.jit
def _read(cells, mask, WHOLE: tl.constexpr, EVICTION: tl.constexpr):
    """float32; 0 outside. A mask that is true everywhere still costs instructions, so WHOLE says that it is."""
    if WHOLE:
        return tl.load(cells, eviction_policy=EVICTION).to(tl.float32)
    return tl.load(cells, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def _write(cells, values, mask, WHOLE: tl.constexpr, EVICTION: tl.constexpr):
    if WHOLE:
        tl.store(cells, values.to(cells.dtype.element_ty), eviction_policy=EVICTION)
    else:
        tl.store(cells, values.to(cells.dtype.element_ty), mask=mask, eviction_policy=EVICTION)


@triton.jit
def _inputs(
    qkv,
    f,
    b,
    a,
    bias,
    lower_bound,
    keys,
    key_mask,
    values,
    value_mask,
    H: tl.constexpr,
    K: tl.constexpr,
    SAFE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """q, k, decay [BK], v [BV] and beta of a row. Pointers are those of the row and head."""
    q = _read(qkv + keys, key_mask, WHOLE, "")
    k = _read(qkv + H * K + keys, key_mask, WHOLE, "")
    v = _read(qkv + values, value_mask, WHOLE, "")
    decay = tl.exp(log_decay(_read(f + keys, key_mask, WHOLE, ""), a, bias, lower_bound, SAFE))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b).to(tl.float32)))
    q = q * (1.0 / tl.sqrt(tl.sum(q * q, 0) + 1e-6)) * (K**-0.5)
    k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))
    return q, k, v, decay, beta


@triton.jit
def _advance(state, q, k, v, decay, beta):
    """state [BV, BK] after one row, and the output [BV]."""
    # Both reads of the state are of the old one: S α k̂ and S α q̂; the new one adds r k̂·q̂ to the second.
    state = state * decay[None, :]
    read_k = tl.sum(state * k[None, :], 1)
    read_q = tl.sum(state * q[None, :], 1)
    r = beta * (v - read_k)
    out = tl.fma(r, tl.sum(k * q, 0), read_q)
    return tl.fma(r[:, None], k[None, :], state), out


@triton.jit
def _kernel(
    qkv,
    f,
    b,
    a_table,
    bias_table,
    state,
    out,
    slots,
    starts,
    bounds,
    accepted,
    qkv_stride,
    f_stride,
    b_stride,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SAFE: tl.constexpr,
    MODE: tl.constexpr,
    WHOLE: tl.constexpr,
    NARROW: tl.constexpr,
    EVICTION: tl.constexpr,
):
    begin()
    # Programs that run together read the same rows, and states that lie side by side.
    v_block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys, values = tl.arange(0, BK), v_block * BV + tl.arange(0, BV)
    key_mask, value_mask = keys < K, values < V
    slot = tl.load(slots + sequence)
    if MODE == 0:
        first, last = sequence, sequence + 1
    else:
        first, last = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    if MODE == 2:
        first += 1
        last = first + tl.load(accepted + sequence)
        if (slot < 0) | (last == first):
            return
    elif slot < 0:
        for row in range(first, last):
            tl.store(out + (row * H + head) * V + values, tl.zeros([BV], tl.float32), mask=value_mask)
        return
    cells = state + ((slot * H + head) * V + values[:, None]) * K + keys[None, :]
    cell_mask = value_mask[:, None] & key_mask[None, :]
    a = tl.load(a_table + head)
    bias = _read(bias_table + head * K + keys, key_mask, WHOLE, "")
    head_qkv, head_f, head_b = qkv + head * K, f + head * K, b + head
    # In qkv the values of a head lie 2·H·K columns after its queries, when K = V; the difference else.
    v_columns = 2 * H * K - head * K + head * V + values
    if MODE == 0:
        row_qkv, row_f, row_b = head_qkv + first * qkv_stride, head_f + first * f_stride, head_b + first * b_stride
        # A narrow state takes twice its registers once it is float32, so it is asked for as late as may be.
        if not NARROW:
            s = _read(cells, cell_mask, WHOLE, EVICTION)
        q, k, v, decay, beta = _inputs(
            row_qkv, row_f, row_b, a, bias, lower_bound, keys, key_mask, v_columns, value_mask, H, K, SAFE, WHOLE
        )
        if NARROW:
            s = _read(cells, cell_mask, WHOLE, EVICTION)
        s, o = _advance(s, q, k, v, decay, beta)
        _write(cells, s, cell_mask, WHOLE, EVICTION)
        _write(out + (first * H + head) * V + values, o, value_mask, WHOLE, "")
    else:
        if MODE == 3:
            is_kept = keys < tl.where(tl.load(starts + sequence) > 0, K, 0)
            s = tl.load(cells, mask=value_mask[:, None] & is_kept[None, :], other=0.0).to(tl.float32)
        else:
            s = _read(cells, cell_mask, WHOLE, EVICTION)
        for row in range(first, last):
            row_qkv, row_f, row_b = head_qkv + row * qkv_stride, head_f + row * f_stride, head_b + row * b_stride
            q, k, v, decay, beta = _inputs(
                row_qkv, row_f, row_b, a, bias, lower_bound, keys, key_mask, v_columns, value_mask, H, K, SAFE, WHOLE
            )
            s, o = _advance(s, q, k, v, decay, beta)
            # A state of bfloat16 is rounded after every row of decode, so drafts start from the rounded one too.
            if MODE != 3:
                s = s.to(state.dtype.element_ty).to(tl.float32)
            if MODE == 1:
                if row == first:
                    _write(cells, s, cell_mask, WHOLE, "")
            if MODE != 2:
                _write(out + (row * H + head) * V + values, o, value_mask, WHOLE, "")
        if MODE >= 2:
            _write(cells, s, cell_mask, WHOLE, "")


def decode(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: Step,
    tuning: Tuning,
    *,
    is_fast: bool = False,
) -> Tensor:
    """`Ops.kda_decode`."""
    return _run(DECODE, qkv, f, b, gate, pool, step, tuning, is_fast=is_fast)


def verify(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: Step,
    tuning: Tuning,
    *,
    is_fast: bool = False,
) -> Tensor:
    """`Ops.kda_verify`, without the record."""
    return _run(VERIFY, qkv, f, b, gate, pool, step, tuning, is_fast=is_fast)


def extend(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: Step,
    tuning: Tuning,
    *,
    is_fast: bool = False,
) -> Tensor:
    """`Ops.kda_extend` in the order of decode."""
    return _run(EXTEND, qkv, f, b, gate, pool, step, tuning, is_fast=is_fast)


def commit(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: Step,
    tuning: Tuning,
    accepted: Tensor,
    *,
    is_fast: bool = False,
) -> None:
    """Moves the state over the first accepted[b] draft rows of each sequence, int64 [B]."""
    _launch(COMMIT, qkv, f, b, gate, pool, step, tuning, out=qkv, accepted=accepted, is_fast=is_fast)


def _run(
    mode: int,
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: Step,
    tuning: Tuning,
    *,
    is_fast: bool,
) -> Tensor:
    _, heads, value_dim, _ = pool.state.shape
    out = step.new_rows(heads, value_dim, dtype=torch.float32)
    _launch(mode, qkv, f, b, gate, pool, step, tuning, out=out, accepted=step.slots, is_fast=is_fast)
    return out


def _launch(
    mode: int,
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: Step,
    tuning: Tuning,
    *,
    out: Tensor,
    accepted: Tensor,
    is_fast: bool,
) -> None:
    _, heads, value_dim, key_dim = pool.state.shape
    qkv, f, b = unit_stride(qkv), unit_stride(f), unit_stride(b)
    block_v = min(tuning.step_block_v, triton.next_power_of_2(value_dim))
    block_k = triton.next_power_of_2(key_dim)
    _kernel[(triton.cdiv(value_dim, block_v), heads, step.num_sequences)](
        qkv,
        f,
        b,
        gate.a,
        gate.dt_bias,
        pool.state,
        out,
        step.slots,
        step.starts,
        step.bounds,
        accepted,
        qkv.stride(0),
        f.stride(0),
        b.stride(0),
        gate.lower_bound or 0.0,
        H=heads,
        K=key_dim,
        V=value_dim,
        BK=block_k,
        BV=block_v,
        SAFE=gate.lower_bound is not None,
        MODE=mode,
        WHOLE=key_dim == block_k and value_dim % block_v == 0,
        NARROW=pool.state.element_size() < 4,
        # Until a state is met again the whole model passes through the level-2 cache.
        EVICTION="evict_first" if mode == DECODE else "",
        num_warps=tuning.step_warps,
        **({} if is_fast else SAME_BITS),
        **OVERLAP,
    )
