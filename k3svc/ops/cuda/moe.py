"""Routed experts: (row, expert) pairs in tiles of one expert, two products, and their sum in the order of the ids.

In a step of few pairs every pair is a tile by itself, which needs no sorting. A row of a tile depends on nothing else
in the tile, so both ways give the same bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.overlap import OVERLAP, begin
from k3svc.ops.cuda.products import dot
from k3svc.ops.cuda.rowwise import gated_unit, unit_stride
from k3svc.ops.table import Activation

TILE = 16
FEW_PAIRS = 32
MAX_LONE_PAIRS = 512
"""Up to this many pairs, each is a tile."""


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Weights of the experts of a layer."""

    gate_up: Tensor
    """[experts, 2·inner, D], w1 above w3."""
    down: Tensor
    """[experts, D, inner]."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Which pairs a tile holds."""

    count: int
    rows: int
    pairs: Tensor
    """int64 [count · rows], -1 for none; not read where a tile has one row."""
    experts: Tensor
    """int64 [count]; one past the last expert for a tile without pairs."""


@triton.jit
def _pairs(pairs, tile, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The pairs of a tile, -1 for none; a tile of one row is that of its own number."""
    lane = tl.arange(0, BLOCK_M)
    if ROWS == 1:
        return tl.where(lane == 0, tile, -1).to(tl.int64)
    return tl.load(pairs + tile * ROWS + lane)


@triton.jit
def _gate_up(
    x,
    w,
    hidden,
    pairs,
    experts,
    stride,
    beta,
    linear_beta,
    E: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SITU: tl.constexpr,
    LINEAR: tl.constexpr,
    EXACT: tl.constexpr,
):
    begin()
    # One axis, since only the first takes more than 65535 programs.
    blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    expert = tl.load(experts + tile)
    if expert >= E:
        return
    pair = _pairs(pairs, tile, ROWS, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_rows = x + (pair // PER_ROW)[:, None] * stride
    w_rows = w + (expert * 2 * INNER + columns)[None, :] * D
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, D, BLOCK_K):
        inside = first + depth < D
        a = tl.load(x_rows + (first + depth)[None, :], mask=(pair >= 0)[:, None] & inside[None, :], other=0.0)
        mask = (columns < INNER)[None, :] & inside[:, None]
        gate = dot(a, tl.load(w_rows + (first + depth)[:, None], mask=mask, other=0.0), gate, EXACT)
        up = dot(a, tl.load(w_rows + INNER * D + (first + depth)[:, None], mask=mask, other=0.0), up, EXACT)
    dtype: tl.constexpr = hidden.dtype.element_ty
    # The products are rounded as activations are everywhere.
    out = gated_unit(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), beta, linear_beta, SITU, LINEAR)
    tl.store(
        hidden + pair[:, None] * INNER + columns[None, :],
        out.to(dtype),
        mask=(pair >= 0)[:, None] & (columns < INNER)[None, :],
    )


@triton.jit
def _down(
    hidden,
    w,
    y,
    pairs,
    experts,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    begin()
    blocks: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    expert = tl.load(experts + tile)
    if expert >= E:
        return
    pair = _pairs(pairs, tile, ROWS, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    w_rows = w + (expert * D + columns)[None, :] * INNER
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, INNER, BLOCK_K):
        inside = first + depth < INNER
        a = tl.load(
            hidden + pair[:, None] * INNER + (first + depth)[None, :],
            mask=(pair >= 0)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(w_rows + (first + depth)[:, None], mask=(columns < D)[None, :] & inside[:, None], other=0.0)
        acc = dot(a, b, acc, EXACT)
    tl.store(
        y + pair[:, None] * D + columns[None, :],
        acc.to(y.dtype.element_ty),
        mask=(pair >= 0)[:, None] & (columns < D)[None, :],
    )


@triton.jit
def _sum(y, weights, out, PER_ROW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    acc = tl.zeros([BLOCK], tl.float32)
    for k in range(PER_ROW):
        pair = row * PER_ROW + k
        acc += tl.load(y + pair * D + columns, mask=mask, other=0.0).to(tl.float32) * tl.load(weights + pair)
    tl.store(out + row * D + columns, acc.to(out.dtype.element_ty), mask=mask)


def tiles_of(ids: Tensor, num_experts: int, tile: int) -> Tiles:
    """Cuts the pairs ids [N, k] into tiles of one expert; nothing waits for the device."""
    flat = ids.reshape(-1)
    if flat.shape[0] <= MAX_LONE_PAIRS:
        return Tiles(count=flat.shape[0], rows=1, pairs=flat, experts=flat)
    pairs = torch.arange(flat.shape[0], device=ids.device)
    order = flat.argsort(stable=True)
    chosen = flat[order]
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + tile - 1) // tile
    ends = tiles.cumsum(0)
    places = (ends - tiles)[chosen] * tile + pairs - (counts.cumsum(0) - counts)[chosen]
    most = flat.shape[0] // tile + num_experts
    slots = torch.full((most * tile,), -1, dtype=torch.int64, device=ids.device).scatter_(0, places, order)
    experts = torch.searchsorted(ends, torch.arange(most, device=ids.device), right=True)
    return Tiles(count=most, rows=tile, pairs=slots, experts=experts)


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: PackedExperts,
    activation: Activation,
    beta: float,
    linear_beta: float | None,
    *,
    tile: int = TILE,
    is_fast: bool = False,
) -> Tensor:
    """`Ops.experts`, with tiles of this many rows. The bits of a result may depend on `tile`, and on the number of rows
    if is_fast: few pairs are bound by reading weights, and more and narrower tiles read them faster."""
    count, width = x.shape
    num_experts, inner2, _ = packed.gate_up.shape
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if count == 0:
        return out
    x = unit_stride(x)
    exact = x.dtype == torch.float32
    tiles = tiles_of(ids, num_experts, tile)
    num_pairs = ids.numel()
    hidden = torch.empty(num_pairs, inner2 // 2, dtype=x.dtype, device=x.device)
    results = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    is_narrow = is_fast and not exact and num_pairs <= FEW_PAIRS
    block_n, block_k, warps = (32, 32, 4) if exact else (16, 128, 2) if is_narrow else (64, 64, 4)
    shape = {"BLOCK_M": tile, "BLOCK_N": block_n, "BLOCK_K": block_k, "EXACT": exact, "ROWS": tiles.rows}
    _gate_up[(triton.cdiv(inner2 // 2, block_n) * tiles.count,)](
        x,
        packed.gate_up,
        hidden,
        tiles.pairs,
        tiles.experts,
        x.stride(0),
        beta,
        linear_beta or 1.0,
        E=num_experts,
        PER_ROW=ids.shape[1],
        D=width,
        INNER=inner2 // 2,
        SITU=activation == "situ",
        LINEAR=linear_beta is None,
        num_warps=warps,
        num_stages=2 if exact else 4,
        **shape,
        **OVERLAP,
    )
    _down[(triton.cdiv(width, block_n) * tiles.count,)](
        hidden,
        packed.down,
        results,
        tiles.pairs,
        tiles.experts,
        E=num_experts,
        D=width,
        INNER=inner2 // 2,
        num_warps=warps,
        num_stages=2 if exact else 4,
        **shape,
        **OVERLAP,
    )
    _sum[(count, triton.cdiv(width, 1024))](
        results, weights.contiguous(), out, PER_ROW=ids.shape[1], D=width, BLOCK=1024, **OVERLAP
    )
    return out
