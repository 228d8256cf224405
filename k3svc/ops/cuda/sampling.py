"""The choice of a token on the device; the noise is that of `reference_sampling`. It waits for nothing."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.filters import borders, ordered
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
    logits, seed, sample_index, position, temperature, kept, best_scores, best_ids, stride,
    X: tl.constexpr, FILTERS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each part of a row the argmax of logit / temperature + Gumbel noise, or of the logit where temperature is 0;
    the lowest id on ties. With FILTERS what lies below `kept`, int64 [2, R] of `borders`, is left out. With one part it
    is the id of the row."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PART
    key = _mix(tl.load(seed + row).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    key = _mix((key ^ tl.load(sample_index + row).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    key = _mix((key ^ tl.load(position + row).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    heat = tl.load(temperature + row).to(tl.float64)
    best = tl.full([BLOCK], -float("inf"), tl.float64)
    place = tl.full([BLOCK], 0, tl.int64) + begin
    for first in range(0, PART, BLOCK):
        ids = begin + first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + ids, mask=ids < X, other=-float("inf"))
        scores = values.to(tl.float64)
        if heat != 0.0:
            bits = _mix((ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key)
            uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
            scores = scores / heat - tl.log(-tl.log(uniform))
        if FILTERS:
            own, border = ordered(values), tl.load(kept + row)
            first_id = tl.load(kept + tl.num_programs(0) + row)
            scores = tl.where((own > border) | ((own == border) & (ids >= first_id)), scores, -float("inf"))
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
    best_scores, best_ids, chosen, X: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The best of all parts of a row; the lowest id on ties."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, WIDTH)
    own = tl.program_id(0) * PARTS + parts
    best = tl.load(best_scores + own, mask=parts < PARTS, other=-float("inf"))
    ids = tl.load(best_ids + own, mask=parts < PARTS, other=X - 1)
    tl.store(chosen + row, tl.min(tl.where(best == tl.max(best, 0), ids, X - 1), 0))


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """`Ops.sample`."""
    device, (count, width) = logits.device, logits.shape
    has_filters = any(cut and not greedy for greedy, cut in zip(rows.host_greedy, rows.host_filtered, strict=True))
    chosen = torch.empty(count, dtype=torch.int64, device=device)
    kept = borders(logits, rows) if has_filters else chosen
    parts = triton.cdiv(width, PART)
    scores, ids = chosen, chosen
    if parts > 1:
        scores = torch.empty(count, parts, dtype=torch.float64, device=device)
        ids = torch.empty(count, parts, dtype=torch.int64, device=device)
    _pick[(count, parts)](
        logits, rows.seed, rows.sample_index, rows.position, rows.temperature, kept, scores, ids, logits.stride(0),
        X=width, FILTERS=has_filters, PARTS=parts, PART=PART, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    if parts > 1:
        _join[(count,)](scores, ids, chosen, X=width, PARTS=parts, WIDTH=triton.next_power_of_2(parts), num_warps=1)
    return chosen


def log_softmax(logits: Tensor) -> Tensor:
    """`Ops.log_softmax`; float64 inside."""
    return torch.log_softmax(logits.double(), dim=-1).float()
