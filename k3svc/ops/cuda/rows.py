"""Products of one row a program, on plain cores: for steps of one or two rows, which only read weights.

A program holds a block of columns over the whole depth. Its first weights are on their way before the kernel ahead has
ended. Around a product come what stands before and behind it in a layer: the norm of its input, the gated unit of its
two halves, the sum with what was there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.moe import PackedExperts
from k3svc.ops.cuda.overlap import OVERLAP, release, wait
from k3svc.ops.cuda.rowwise import gated_unit
from k3svc.ops.cuda.tuning import Tuning
from k3svc.ops.few_table import Norm, Unit


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Weights of several groups, one below the other."""

    weight: Tensor
    """[groups · out, in]."""
    count: int


@triton.jit
def _place(num_rows):
    """Row and block of columns of a program. Rows that read the same weights run together."""
    return (tl.program_id(0) % num_rows).to(tl.int64), tl.program_id(0) // num_rows


@triton.jit
def _cells(w_rows, columns, OUT: tl.constexpr, depth, IN: tl.constexpr):
    """Weights [columns, depth]; 0 outside."""
    return tl.load(w_rows + depth[None, :], mask=(columns < OUT)[:, None] & (depth < IN)[None, :], other=0.0)


@triton.jit
def one_block(
    x_row,
    norm,
    w,
    base_row,
    y_row,
    columns,
    eps,
    beta,
    linear_beta,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GLU: tl.constexpr,
    SITU: tl.constexpr,
    LINEAR: tl.constexpr,
    ADD: tl.constexpr,
):
    """Some columns of the product of a row. The scale of a norm is that of the whole row, and applied to the sums."""
    depth = tl.arange(0, BLOCK_K)
    w_rows = w + columns.to(tl.int64)[:, None] * IN
    cells = _cells(w_rows, columns, OUT, depth, IN)
    if GLU:
        up_cells = _cells(w_rows + OUT * IN, columns, OUT, depth, IN)
    wait()
    a = tl.load(x_row + depth, mask=depth < IN, other=0.0).to(tl.float32)
    squares = a * a
    if NORM:
        a *= tl.load(norm + depth, mask=depth < IN, other=0.0).to(tl.float32)
    acc = cells.to(tl.float32) * a[None, :]
    if GLU:
        up_acc = up_cells.to(tl.float32) * a[None, :]
    for first in tl.static_range(BLOCK_K, IN, BLOCK_K):
        own = first + depth
        a = tl.load(x_row + own, mask=own < IN, other=0.0).to(tl.float32)
        squares += a * a
        if NORM:
            a *= tl.load(norm + own, mask=own < IN, other=0.0).to(tl.float32)
        acc += _cells(w_rows, columns, OUT, own, IN).to(tl.float32) * a[None, :]
        if GLU:
            up_acc += _cells(w_rows + OUT * IN, columns, OUT, own, IN).to(tl.float32) * a[None, :]
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / IN + eps)
    out = tl.sum(acc, 1) * scale
    if GLU:
        out = gated_unit(out, tl.sum(up_acc, 1) * scale, beta, linear_beta, SITU, LINEAR)
    if ADD:
        out += tl.load(base_row + columns, mask=columns < OUT, other=0.0).to(tl.float32)
    tl.store(y_row + columns, out.to(y_row.dtype.element_ty), mask=columns < OUT)


@triton.jit
def _product(
    x,
    norm,
    w,
    base,
    y,
    x_stride,
    x_group,
    base_stride,
    num_rows,
    eps,
    beta,
    linear_beta,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GLU: tl.constexpr,
    SITU: tl.constexpr,
    LINEAR: tl.constexpr,
    ADD: tl.constexpr,
):
    """y [rows, groups, OUT]."""
    release()
    row, block = _place(num_rows)
    group = tl.program_id(1).to(tl.int64)
    one_block(
        x + row * x_stride + group * x_group,
        norm,
        w + group * OUT * IN,
        base + row * base_stride,
        y + (row * tl.num_programs(1) + group) * OUT,
        block * BLOCK_N + tl.arange(0, BLOCK_N),
        eps,
        beta,
        linear_beta,
        IN,
        OUT,
        BLOCK_K,
        NORM,
        GLU,
        SITU,
        LINEAR,
        ADD,
    )


@triton.jit
def _router(
    x,
    norm,
    router,
    logits,
    w,
    y,
    x_stride,
    num_rows,
    eps,
    beta,
    linear_beta,
    IN: tl.constexpr,
    E: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SITU: tl.constexpr,
    LINEAR: tl.constexpr,
):
    """Logits [rows, E] by the first programs, gated units y [rows, OUT] of the same rows by the others."""
    release()
    row, block = _place(num_rows)
    x_row = x + row * x_stride
    num_router: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    if block < num_router:
        columns = block * BLOCK_E + tl.arange(0, BLOCK_E)
        logits_row = logits + row * E
        one_block(
            x_row, norm, router, x_row, logits_row, columns, eps, 0.0, 1.0, IN, E, BLOCK_K, True, False, False, True,
            False,
        )  # fmt: skip
    else:
        columns = (block - num_router) * BLOCK_N + tl.arange(0, BLOCK_N)
        y_row = y + row * OUT
        one_block(
            x_row, norm, w, x_row, y_row, columns, eps, beta, linear_beta, IN, OUT, BLOCK_K, True, True, SITU, LINEAR,
            False,
        )  # fmt: skip


@triton.jit
def _experts_in(
    x,
    norm,
    w,
    ids,
    hidden,
    x_stride,
    eps,
    beta,
    linear_beta,
    PER_ROW: tl.constexpr,
    D: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SITU: tl.constexpr,
    LINEAR: tl.constexpr,
):
    """Gated units of the experts of a row: hidden [rows, PER_ROW, INNER]."""
    # `_experts_out` reads ids before it waits: it may start only when those who wrote them have ended.
    wait()
    release()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    gate_rows = w + (expert * 2 * INNER + columns)[:, None] * D
    up_rows = gate_rows + INNER * D
    x_row = x + pair // PER_ROW * x_stride
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for first in tl.static_range(0, D, BLOCK_K):
        own = first + depth
        a = tl.load(x_row + own, mask=own < D, other=0.0).to(tl.float32)
        if NORM:
            squares += a * a
            a *= tl.load(norm + own, mask=own < D, other=0.0).to(tl.float32)
        gate += _cells(gate_rows, columns, INNER, own, D).to(tl.float32) * a[None, :]
        up += _cells(up_rows, columns, INNER, own, D).to(tl.float32) * a[None, :]
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
    out = gated_unit(tl.sum(gate, 1) * scale, tl.sum(up, 1) * scale, beta, linear_beta, SITU, LINEAR)
    tl.store(hidden + pair * INNER + columns, out.to(hidden.dtype.element_ty), mask=columns < INNER)


@triton.jit
def _experts_out(
    hidden,
    w,
    ids,
    weights,
    shared,
    shared_w,
    base,
    y,
    base_stride,
    num_rows,
    PER_ROW: tl.constexpr,
    D: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ADD: tl.constexpr,
):
    """Weighted sum of the experts of a row, the product of its shared ones (of SHARED columns, or 0) and base."""
    release()
    row, block = _place(num_rows)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_rows = columns.to(tl.int64)[:, None]
    depth = tl.arange(0, BLOCK_K)
    first_rows = w + (tl.load(ids + row * PER_ROW) * D + column_rows) * INNER
    cells = _cells(first_rows, columns, D, depth, INNER)
    if SHARED:
        shared_depth = tl.arange(0, BLOCK_S)
        shared_cells = _cells(shared_w + column_rows * SHARED, columns, D, shared_depth, SHARED)
    wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.static_range(PER_ROW):
        pair = row * PER_ROW + k
        weight = tl.load(weights + pair)
        rows = w + (tl.load(ids + pair) * D + column_rows) * INNER
        for first in tl.static_range(0, INNER, BLOCK_K):
            own = first + depth
            a = tl.load(hidden + pair * INNER + own, mask=own < INNER, other=0.0).to(tl.float32) * weight
            if (k == 0) & (first == 0):
                acc += cells.to(tl.float32) * a[None, :]
            else:
                acc += _cells(rows, columns, D, own, INNER).to(tl.float32) * a[None, :]
    out = tl.sum(acc, 1)
    if SHARED:
        a = tl.load(shared + row * SHARED + shared_depth, mask=shared_depth < SHARED, other=0.0).to(tl.float32)
        out += tl.sum(shared_cells.to(tl.float32) * a[None, :], 1)
    if ADD:
        out += tl.load(base + row * base_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(y + row * D + columns, out.to(y.dtype.element_ty), mask=columns < D)


def block_sizes(cells: int, depth: int, parts: int = 1) -> tuple[int, int]:
    """Columns and depth of what a program loads at a time of `parts` weights, as many cells in all."""
    block_k = 1024 if depth % 1024 == 0 else min(512, triton.next_power_of_2(depth))
    return max(1, cells // parts // block_k), block_k


def product(
    x: Tensor,
    weight: Tensor | Groups,
    tuning: Tuning,
    *,
    norm: Norm | None = None,
    unit: Unit | None = None,
    base: Tensor | None = None,
    group_step: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`FewOps.product`, in the dtype of x or the one given."""
    count, groups = x.shape[0], 1
    if isinstance(weight, Groups):
        groups, weight = weight.count, weight.weight
    depth = weight.shape[1]
    out = weight.shape[0] // groups // (1 if unit is None else 2)
    y = torch.empty(count, groups * out, dtype=dtype or x.dtype, device=x.device)
    if count == 0:
        return y
    cells, warps = tuning.few_product
    block_n, block_k = block_sizes(cells, depth, 1 if unit is None else 2)
    _product[(count * triton.cdiv(out, block_n), groups)](
        x,
        weight if norm is None else norm[0],
        weight,
        x if base is None else base,
        y,
        x.stride(0),
        group_step,
        0 if base is None else base.stride(0),
        count,
        0.0 if norm is None else norm[1],
        0.0 if unit is None else unit.beta,
        1.0 if unit is None or unit.linear_beta is None else unit.linear_beta,
        IN=depth,
        OUT=out,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NORM=norm is not None,
        GLU=unit is not None,
        SITU=unit is not None and unit.activation == "situ",
        LINEAR=unit is None or unit.linear_beta is None,
        ADD=base is not None,
        num_warps=warps,
        **OVERLAP,
    )
    return y


def router(
    x: Tensor, norm: Norm, weight: Tensor, beside: tuple[Tensor, Unit] | None, tuning: Tuning
) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [N, experts] of rms_norm(x), and its product with the weight and the unit beside, if any."""
    if beside is None:
        return product(x, weight, tuning, norm=norm, dtype=torch.float32), None
    other, unit = beside
    (count, depth), num_experts, out = x.shape, weight.shape[0], other.shape[0] // 2
    logits = torch.empty(count, num_experts, dtype=torch.float32, device=x.device)
    y = torch.empty(count, out, dtype=x.dtype, device=x.device)
    cells, warps = tuning.few_router
    block_n, block_k = block_sizes(cells, depth, 2)
    _router[(count * (triton.cdiv(num_experts, block_n) + triton.cdiv(out, block_n)),)](
        x,
        norm[0],
        weight,
        logits,
        other,
        y,
        x.stride(0),
        count,
        norm[1],
        unit.beta,
        unit.linear_beta or 1.0,
        IN=depth,
        E=num_experts,
        OUT=out,
        BLOCK_E=block_n,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SITU=unit.activation == "situ",
        LINEAR=unit.linear_beta is None,
        num_warps=warps,
        **OVERLAP,
    )
    return logits, y


def experts(
    x: Tensor,
    norm: Norm | None,
    ids: Tensor,
    weights: Tensor,
    packed: PackedExperts,
    unit: Unit,
    tuning: Tuning,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """`FewOps.experts`."""
    count, per_row = ids.shape
    width, inner = packed.down.shape[1:]
    hidden = torch.empty(count * per_row, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(count, width, dtype=x.dtype, device=x.device)
    cells, warps = tuning.few_experts
    block_n, block_k = block_sizes(cells, width, 2)
    _experts_in[(triton.cdiv(inner, block_n), count * per_row)](
        x,
        packed.gate_up if norm is None else norm[0],
        packed.gate_up,
        ids,
        hidden,
        x.stride(0),
        0.0 if norm is None else norm[1],
        unit.beta,
        unit.linear_beta or 1.0,
        PER_ROW=per_row,
        D=width,
        INNER=inner,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NORM=norm is not None,
        SITU=unit.activation == "situ",
        LINEAR=unit.linear_beta is None,
        num_warps=warps,
        **OVERLAP,
    )
    block_n, block_k = block_sizes(cells, inner)
    own_hidden, own_weight = (hidden, packed.down) if shared is None else shared
    num_shared = 0 if shared is None else own_weight.shape[1]
    _experts_out[(count * triton.cdiv(width, block_n),)](
        hidden,
        packed.down,
        ids,
        weights,
        own_hidden,
        own_weight,
        x if base is None else base,
        y,
        0 if base is None else base.stride(0),
        count,
        PER_ROW=per_row,
        D=width,
        INNER=inner,
        SHARED=num_shared,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_S=triton.next_power_of_2(max(1, num_shared)),
        ADD=base is not None,
        num_warps=warps,
        **OVERLAP,
    )
    return y
