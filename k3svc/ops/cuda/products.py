"""Matrix products whose tiles do not depend on the number of rows, so that neither do the bits of a row.

A tile of rows is a unit of work, not of arithmetic: every element of the result is one sum over the depth in blocks of
one size, in order. float32 operands are multiplied as float32 (`ieee`), not as TF32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.overlap import INTERPRETED, OVERLAP, begin
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.tuning import Tuning

FLOAT32_TILES = (16, 32, 32)


SKINNY_ROWS = 16
"""Up to this many rows a product is bound by reading its weights, and `skinny` is faster than the vendor's."""


@triton.jit
def dot(a, b, acc, EXACT: tl.constexpr):
    """a · b + acc in float32; EXACT for float32 operands."""
    # The interpreter has no products of bfloat16; there they are made of the same numbers in float32.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    if EXACT:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _linear(
    x,
    w,
    y,
    num_rows,
    stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    begin()
    # One axis, since only the first takes more than 65535 programs.
    blocks: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    rows = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_rows = x + rows.to(tl.int64)[:, None] * stride
    w_rows = w + columns.to(tl.int64)[None, :] * IN
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, IN, BLOCK_K):
        inside = first + depth < IN
        a = tl.load(x_rows + (first + depth)[None, :], mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
        a = a.to(w.dtype.element_ty)
        b = tl.load(w_rows + (first + depth)[:, None], mask=(columns < OUT)[None, :] & inside[:, None], other=0.0)
        acc = dot(a, b, acc, EXACT)
    out = y + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out, acc.to(y.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < OUT)[None, :])


@triton.jit
def _per_head(
    x,
    w,
    y,
    num_rows,
    x_row,
    x_head,
    w_head,
    w_in,
    w_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    begin()
    head = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_rows = x + rows.to(tl.int64)[:, None] * x_row + head * x_head
    w_columns = w + head * w_head + columns[None, :] * w_out
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, IN, BLOCK_K):
        inside = first + depth < IN
        a = tl.load(x_rows + (first + depth)[None, :], mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            w_columns + (first + depth)[:, None] * w_in, mask=(columns < OUT)[None, :] & inside[:, None], other=0.0
        )
        acc = dot(a.to(w.dtype.element_ty), b, acc, EXACT)
    out = y + (rows.to(tl.int64)[:, None] * tl.num_programs(2) + head) * OUT + columns[None, :]
    tl.store(out, acc.to(y.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < OUT)[None, :])


def linear(x: Tensor, weight: Tensor, tuning: Tuning) -> Tensor:
    """x [N, in], weight [out, in] → [N, out] in the dtype of x."""
    count, width = x.shape
    out = weight.shape[0]
    y = torch.empty(count, out, dtype=x.dtype, device=x.device)
    if count:
        x = unit_stride(x)
        exact = x.dtype == torch.float32
        block_m, block_n, block_k = FLOAT32_TILES if exact else tuning.linear_tiles
        _linear[(triton.cdiv(out, block_n) * triton.cdiv(count, block_m),)](
            x,
            weight,
            y,
            count,
            x.stride(0),
            IN=width,
            OUT=out,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EXACT=exact,
            num_warps=4,
            num_stages=2 if exact else 4,
            **OVERLAP,
        )
    return y


def skinny(x: Tensor, weight: Tensor, tuning: Tuning) -> Tensor:
    """x [N, in] of at most SKINNY_ROWS rows, weight [out, in] of bfloat16 → [N, out] in bfloat16."""
    count, width = x.shape
    out = weight.shape[0]
    y = torch.empty(count, out, dtype=weight.dtype, device=x.device)
    if count == 0:
        return y
    x = unit_stride(x)
    block_n, block_k, warps, stages = tuning.skinny
    _linear[(triton.cdiv(out, block_n),)](
        x,
        weight,
        y,
        count,
        x.stride(0),
        IN=width,
        OUT=out,
        BLOCK_M=SKINNY_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EXACT=False,
        num_warps=warps,
        num_stages=stages,
        **OVERLAP,
    )
    return y


def per_head(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """x [N, NH, in] · w [NH, in, out] (any strides) → [N, NH, out] in a dtype."""
    count, heads, width = x.shape
    out = w.shape[2]
    y = torch.empty(count, heads, out, dtype=dtype, device=x.device)
    if count:
        x = unit_stride(x)
        exact = w.dtype == torch.float32
        block_n, block_k = (32, 32) if exact else (64, 64)
        _per_head[(triton.cdiv(out, block_n), triton.cdiv(count, 16), heads)](
            x,
            w,
            y,
            count,
            x.stride(0),
            x.stride(1),
            w.stride(0),
            w.stride(1),
            w.stride(2),
            IN=width,
            OUT=out,
            BLOCK_M=16,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EXACT=exact,
            num_warps=4,
            num_stages=2,
            **OVERLAP,
        )
    return y
