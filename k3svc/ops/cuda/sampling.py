"""The choice of a token on the device; the noise is that of `reference_sampling`.

Greedy rows and rows without filters never leave the device and wait for nothing. Rows with top-k, top-p or min-p are
chosen by the reference code on the device's tensors, row by row.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops import reference_sampling
from k3svc.ops.table import SampleRows

BLOCK = 2048
PART = 2 * BLOCK
"""Ids that one program looks at."""


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _pick(
    logits, seed, sample_index, position, temperature, rows, best_scores, best_ids, stride,
    X: tl.constexpr, HAS_ROWS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each part of a row the argmax of logit / temperature + Gumbel noise, or of the logit where temperature is 0;
    the lowest id on ties. With one part it is the id of the row."""
    row = tl.load(rows + tl.program_id(0)) if HAS_ROWS else tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PART
    key = _mix(tl.load(seed + row).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    key = _mix((key ^ tl.load(sample_index + row).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    key = _mix((key ^ tl.load(position + row).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    heat = tl.load(temperature + row).to(tl.float64)
    best = tl.full([BLOCK], -float("inf"), tl.float64)
    place = tl.full([BLOCK], 0, tl.int64) + begin
    for first in range(0, PART, BLOCK):
        ids = begin + first + tl.arange(0, BLOCK)
        scores = tl.load(logits + row * stride + ids, mask=ids < X, other=-float("inf")).to(tl.float64)
        if heat != 0.0:
            bits = _mix((ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key)
            uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
            scores = scores / heat - tl.log(-tl.log(uniform))
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        place = tl.where(is_better, ids.to(tl.int64), place)
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, place, X - 1), 0)
    if PARTS == 1:
        tl.store(best_ids + row, winner)
    else:
        part = tl.program_id(0) * PARTS + tl.program_id(1)
        tl.store(best_scores + part, top)
        tl.store(best_ids + part, winner)


@triton.jit
def _join(
    best_scores, best_ids, rows, chosen,
    X: tl.constexpr, HAS_ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best of all parts of a row; the lowest id on ties."""
    row = tl.load(rows + tl.program_id(0)) if HAS_ROWS else tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, WIDTH)
    own = tl.program_id(0) * PARTS + parts
    best = tl.load(best_scores + own, mask=parts < PARTS, other=-float("inf"))
    ids = tl.load(best_ids + own, mask=parts < PARTS, other=X - 1)
    tl.store(chosen + row, tl.min(tl.where(best == tl.max(best, 0), ids, X - 1), 0))


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """`Ops.sample`."""
    device = logits.device
    own = [greedy or not cut for greedy, cut in zip(rows.host_greedy, rows.host_filtered, strict=True)]
    chosen = torch.empty(len(own), dtype=torch.int64, device=device)
    mine = [index for index, is_mine in enumerate(own) if is_mine]
    if len(mine) < len(own):
        # To the reference code the rows that are picked here are greedy, which costs it next to nothing.
        chosen = reference_sampling.sample(logits, replace(rows, host_greedy=tuple(own)))
    if mine:
        has_rows = len(mine) < len(own)
        index = torch.tensor(mine, dtype=torch.int64, device=device) if has_rows else chosen
        width = logits.shape[1]
        parts = triton.cdiv(width, PART)
        scores, ids = chosen, chosen
        if parts > 1:
            scores = torch.empty(len(mine), parts, dtype=torch.float64, device=device)
            ids = torch.empty(len(mine), parts, dtype=torch.int64, device=device)
        _pick[(len(mine), parts)](
            logits, rows.seed, rows.sample_index, rows.position, rows.temperature, index, scores, ids, logits.stride(0),
            X=width, HAS_ROWS=has_rows, PARTS=parts, PART=PART, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        if parts > 1:
            _join[(len(mine),)](
                scores, ids, index, chosen,
                X=width, HAS_ROWS=has_rows, PARTS=parts, WIDTH=triton.next_power_of_2(parts), num_warps=1,
            )  # fmt: skip
    return chosen


def log_softmax(logits: Tensor) -> Tensor:
    """`Ops.log_softmax`; float64 inside."""
    return torch.log_softmax(logits.double(), dim=-1).float()
