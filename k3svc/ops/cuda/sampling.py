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


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _pick(
    logits, seed, sample_index, position, temperature, rows, chosen, stride,
    X: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """argmax of logit / temperature + Gumbel noise, or of the logit where temperature is 0; the lowest id on ties."""
    row = tl.load(rows + tl.program_id(0)) if HAS_ROWS else tl.program_id(0).to(tl.int64)
    key = _mix(tl.load(seed + row).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    key = _mix((key ^ tl.load(sample_index + row).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    key = _mix((key ^ tl.load(position + row).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    heat = tl.load(temperature + row).to(tl.float64)
    is_greedy = heat == 0.0
    best = tl.full([BLOCK], -float("inf"), tl.float64)
    place = tl.zeros([BLOCK], tl.int64)
    for first in range(0, X, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + ids, mask=ids < X, other=-float("inf")).to(tl.float64)
        bits = _mix((ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key)
        uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        noise = -tl.log(-tl.log(uniform))
        scores = tl.where(is_greedy, values, values / tl.where(is_greedy, 1.0, heat) + noise)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        place = tl.where(is_better, ids.to(tl.int64), place)
    top = tl.max(best, 0)
    tl.store(chosen + row, tl.min(tl.where(best == top, place, X - 1), 0))


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
        _pick[(len(mine),)](
            logits, rows.seed, rows.sample_index, rows.position, rows.temperature, index, chosen, logits.stride(0),
            X=logits.shape[1], HAS_ROWS=has_rows, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return chosen


def log_softmax(logits: Tensor) -> Tensor:
    """`Ops.log_softmax`; float64 inside."""
    return torch.log_softmax(logits.double(), dim=-1).float()
