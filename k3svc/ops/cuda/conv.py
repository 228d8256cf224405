"""The short convolution (model.md 2.3 step 2): width 4, SiLU, state of the last 3 raw rows.

Rows are rounded to the dtype of the state before they are used, so that cuts of a prompt do not show. Every path adds
the taps oldest first, so a row has the same bits in a prompt, in a decode step and in a verify step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.cache import KdaPool
from k3svc.ops.cuda.overlap import OVERLAP, begin
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import Step

WIDTH = 4
BLOCK = 512


@triton.jit
def _taps(a, b, c, d, t0, t1, t2, t3):
    y = tl.fma(d, t3, tl.fma(c, t2, tl.fma(b, t1, a * t0)))
    return y / (1.0 + tl.exp(-y))


@triton.jit
def _earlier(u, state, row, offset, own, start, stride, columns, C: tl.constexpr):
    """The row `own - offset` of a sequence whose row `own` is packed row `row`; behind its start the state's."""
    index = own - offset
    new = tl.load(u + (row - offset) * stride + columns, mask=columns < tl.where(index >= 0, C, 0), other=0.0)
    is_state = (index < 0) & (start > 0)
    old = tl.load(state + (3 + index) * C + columns, mask=columns < tl.where(is_state, C, 0), other=0.0)
    return tl.where(index >= 0, new.to(state.dtype.element_ty), old).to(tl.float32)


@triton.jit
def _extend(u, weight, state, y, row_sequence, slots, starts, bounds, stride, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    sequence = tl.load(row_sequence + row)
    slot = tl.load(slots + sequence, mask=sequence >= 0, other=-1)
    if slot < 0:
        tl.store(y + row * C + columns, tl.zeros([BLOCK], y.dtype.element_ty), mask=mask)
        return
    own = row - tl.load(bounds + sequence)
    start = tl.load(starts + sequence)
    pool = state + slot * 3 * C
    a = _earlier(u, pool, row, 3, own, start, stride, columns, C)
    b = _earlier(u, pool, row, 2, own, start, stride, columns, C)
    c = _earlier(u, pool, row, 1, own, start, stride, columns, C)
    d = tl.load(u + row * stride + columns, mask=mask, other=0.0).to(state.dtype.element_ty).to(tl.float32)
    taps = weight + columns * 4
    t0, t1 = tl.load(taps, mask=mask, other=0.0), tl.load(taps + 1, mask=mask, other=0.0)
    t2, t3 = tl.load(taps + 2, mask=mask, other=0.0), tl.load(taps + 3, mask=mask, other=0.0)
    out = _taps(a, b, c, d, t0, t1, t2, t3)
    tl.store(y + row * C + columns, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _tails(u, state, slots, starts, bounds, stride, C: tl.constexpr, BLOCK: tl.constexpr):
    """The last 3 rows of [state, rows of the sequence] become its state."""
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    slot = tl.load(slots + sequence)
    first, last = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    if (slot < 0) | (last == first):
        return
    start = tl.load(starts + sequence)
    pool = state + slot * 3 * C
    dtype: tl.constexpr = state.dtype.element_ty
    length = last - first
    a = _earlier(u, pool, last, 3, length, start, stride, columns, C)
    b = _earlier(u, pool, last, 2, length, start, stride, columns, C)
    c = _earlier(u, pool, last, 1, length, start, stride, columns, C)
    tl.store(pool + columns, a.to(dtype), mask=mask)
    tl.store(pool + C + columns, b.to(dtype), mask=mask)
    tl.store(pool + 2 * C + columns, c.to(dtype), mask=mask)


@triton.jit
def one_sequence(
    u,
    weight,
    state,
    y,
    slots,
    bounds,
    accepted,
    stride,
    sequence,
    columns,
    C: tl.constexpr,
    DECODE: tl.constexpr,
    COMMIT: tl.constexpr,
):
    """Some columns of the rows of a sequence one after the other. Decode has one row; verify writes the state after the
    first; commit takes `accepted` rows from the second on and writes the state after the last.
    """
    mask = columns < C
    slot = tl.load(slots + sequence)
    if DECODE:
        first, last = sequence, sequence + 1
    else:
        first, last = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    if COMMIT:
        first += 1
        last = tl.where(slot < 0, first, first + tl.load(accepted + sequence))
    elif slot < 0:
        for row in range(first, last):
            tl.store(y + row * C + columns, tl.zeros(columns.shape, y.dtype.element_ty), mask=mask)
    if (slot >= 0) & (last > first):
        pool = state + slot * 3 * C + columns
        dtype: tl.constexpr = state.dtype.element_ty
        taps = weight + columns * 4
        t0, t1 = tl.load(taps, mask=mask, other=0.0), tl.load(taps + 1, mask=mask, other=0.0)
        t2, t3 = tl.load(taps + 2, mask=mask, other=0.0), tl.load(taps + 3, mask=mask, other=0.0)
        a = tl.load(pool, mask=mask, other=0.0)
        b = tl.load(pool + C, mask=mask, other=0.0)
        c = tl.load(pool + 2 * C, mask=mask, other=0.0)
        for row in range(first, last):
            d = tl.load(u + row * stride + columns, mask=mask, other=0.0).to(dtype)
            if not COMMIT:
                out = _taps(a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32), t0, t1, t2, t3)
                tl.store(y + row * C + columns, out.to(y.dtype.element_ty), mask=mask)
            a, b, c = b, c, d
            if not COMMIT:
                if row == first:
                    tl.store(pool, a, mask=mask)
                    tl.store(pool + C, b, mask=mask)
                    tl.store(pool + 2 * C, c, mask=mask)
        if COMMIT:
            tl.store(pool, a, mask=mask)
            tl.store(pool + C, b, mask=mask)
            tl.store(pool + 2 * C, c, mask=mask)


@triton.jit
def _rows(
    u,
    weight,
    state,
    y,
    slots,
    bounds,
    accepted,
    stride,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DECODE: tl.constexpr,
    COMMIT: tl.constexpr,
):
    begin()
    sequence = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    one_sequence(u, weight, state, y, slots, bounds, accepted, stride, sequence, columns, C, DECODE, COMMIT)


def extend(u: Tensor, weight: Tensor, pool: KdaPool, step: Step) -> Tensor:
    """`Ops.kda_conv_extend`."""
    count, channels = u.shape
    u = unit_stride(u)
    y = torch.empty(count, channels, dtype=u.dtype, device=u.device)
    blocks = triton.cdiv(channels, BLOCK)
    _extend[(count, blocks)](
        u,
        weight,
        pool.conv,
        y,
        step.row_sequence,
        step.slots,
        step.starts,
        step.bounds,
        u.stride(0),
        C=channels,
        BLOCK=BLOCK,
    )
    _tails[(step.num_sequences, blocks)](
        u, pool.conv, step.slots, step.starts, step.bounds, u.stride(0), C=channels, BLOCK=BLOCK
    )
    return y


def decode(u: Tensor, weight: Tensor, pool: KdaPool, step: Step) -> Tensor:
    """`Ops.kda_conv_decode` and `Ops.kda_conv_verify`."""
    u = unit_stride(u)
    y = step.new_rows(u.shape[1], dtype=u.dtype)
    _launch(u, weight, pool, y, step, step.slots)
    return y


def commit(u: Tensor, weight: Tensor, pool: KdaPool, step: Step, accepted: Tensor) -> None:
    """Moves the state over the first accepted[b] draft rows of each sequence, int64 [B]."""
    _launch(u, weight, pool, u, step, accepted)


def _launch(u: Tensor, weight: Tensor, pool: KdaPool, y: Tensor, step: Step, accepted: Tensor) -> None:
    _rows[(step.num_sequences, triton.cdiv(u.shape[1], BLOCK))](
        u,
        weight,
        pool.conv,
        y,
        step.slots,
        step.bounds,
        accepted,
        u.stride(0),
        C=u.shape[1],
        BLOCK=BLOCK,
        DECODE=step.is_decode,
        COMMIT=accepted is not step.slots,
        **OVERLAP,
    )
