"""Steps of one or two rows: a product in one launch with what it has nothing to do with, which saves the other launch.

The first programs convolve, or write rows of a cache; the others multiply, with weights that are on their way before
the kernel ahead has ended.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda import conv, mla, rows
from k3svc.ops.cuda.cache import KdaPool, MlaPool
from k3svc.ops.cuda.overlap import OVERLAP, release, wait
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import Step
from k3svc.ops.cuda.tuning import Tuning
from k3svc.ops.few_table import Norm

CONV_BLOCK = 256


@triton.jit
def _product(
    program,
    x,
    norm,
    w,
    y,
    x_stride,
    x_group,
    num_rows,
    eps,
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """One block of columns of y [rows, GROUPS, OUT]. Rows that read the same weights run together."""
    row, place = (program % num_rows).to(tl.int64), program // num_rows
    group, block = (place % GROUPS).to(tl.int64), place // GROUPS
    x_row, y_row = x + row * x_stride + group * x_group, y + (row * GROUPS + group) * OUT
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows.one_block(
        x_row, norm, w + group * OUT * IN, x_row, y_row, columns, eps, 0.0, 1.0, IN, OUT, BLOCK_K, NORM, False, False,
        True, False,
    )  # fmt: skip


@triton.jit
def _conv_product(
    u,
    taps,
    state,
    convolved,
    slots,
    bounds,
    u_stride,
    num_sequences,
    x,
    w,
    y,
    x_stride,
    x_group,
    num_rows,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DECODE: tl.constexpr,
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    release()
    program = tl.program_id(0)
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    num_conv = num_sequences * blocks
    if program < num_conv:
        wait()
        sequence = (program // blocks).to(tl.int64)
        columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
        conv.one_sequence(
            u, taps, state, convolved, slots, bounds, slots, u_stride, sequence, columns, C, DECODE, False
        )
    else:
        _product(
            program - num_conv, x, x, w, y, x_stride, x_group, num_rows, 0.0, GROUPS, IN, OUT, BLOCK_N, BLOCK_K, False
        )


@triton.jit
def _write_product(
    latents,
    latent_norm,
    pool,
    slot_mapping,
    latent_stride,
    latent_eps,
    x,
    norm,
    w,
    y,
    x_stride,
    x_group,
    num_rows,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):
    release()
    program = tl.program_id(0)
    if program < num_rows:
        wait()
        row = program.to(tl.int64)
        mla.write_row(latents, latent_norm, pool, slot_mapping, latent_stride, latent_eps, row, C, R, BLOCK, True)
    else:
        _product(
            program - num_rows, x, norm, w, y, x_stride, x_group, num_rows, eps, GROUPS, IN, OUT, BLOCK_N, BLOCK_K, NORM
        )


def conv_product(
    u: Tensor,
    taps: Tensor,
    pool: KdaPool,
    step: Step,
    x: Tensor,
    weight: Tensor | rows.Groups,
    tuning: Tuning,
    *,
    group_step: int = 0,
) -> tuple[Tensor, Tensor]:
    """`FewOps.kda_conv`, without the record of a verify step."""
    u = unit_stride(u)
    channels = u.shape[1]
    convolved = step.new_rows(channels, dtype=u.dtype)
    w, shape, blocks, y = _plan(x, weight, tuning)
    _conv_product[(step.num_sequences * triton.cdiv(channels, CONV_BLOCK) + blocks,)](
        u,
        taps,
        pool.conv,
        convolved,
        step.slots,
        step.bounds,
        u.stride(0),
        step.num_sequences,
        x,
        w,
        y,
        x.stride(0),
        group_step,
        x.shape[0],
        C=channels,
        BLOCK=CONV_BLOCK,
        DECODE=step.is_decode,
        **shape,
        num_warps=tuning.few_product[1],
        **OVERLAP,
    )
    return convolved, y


def write_product(
    latents: Tensor,
    latent_norm: Norm,
    pool: MlaPool,
    step: Step,
    x: Tensor,
    weight: Tensor | rows.Groups,
    tuning: Tuning,
    *,
    norm: Norm | None = None,
    group_step: int = 0,
) -> Tensor:
    """`FewOps.mla_write`."""
    latents = unit_stride(latents)
    width = pool.rows.shape[-1]
    w, shape, blocks, y = _plan(x, weight, tuning)
    _write_product[(x.shape[0] + blocks,)](
        latents,
        latent_norm[0],
        pool.rows,
        step.slot_mapping,
        latents.stride(0),
        latent_norm[1],
        x,
        x if norm is None else norm[0],
        w,
        y,
        x.stride(0),
        group_step,
        x.shape[0],
        0.0 if norm is None else norm[1],
        C=width,
        R=pool.rank,
        BLOCK=triton.next_power_of_2(width),
        NORM=norm is not None,
        **shape,
        num_warps=tuning.few_product[1],
        **OVERLAP,
    )
    return y


def _plan(x: Tensor, weight: Tensor | rows.Groups, tuning: Tuning) -> tuple[Tensor, dict[str, int], int, Tensor]:
    """The weight, its sizes and those of blocks, the number of programs, and memory for the product."""
    groups = 1
    if isinstance(weight, rows.Groups):
        groups, weight = weight.count, weight.weight
    out, depth = weight.shape[0] // groups, weight.shape[1]
    block_n, block_k = rows.block_sizes(tuning.few_product[0], depth)
    y = torch.empty(x.shape[0], groups * out, dtype=x.dtype, device=x.device)
    shape = {"GROUPS": groups, "IN": depth, "OUT": out, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return weight, shape, x.shape[0] * groups * triton.cdiv(out, block_n), y
