"""What top-k, top-p and min-p keep of a row of logits (`reference_sampling.kept_ids`), found on the device.

All three keep what lies above a border. It is found by bisection over the logits themselves, as whole numbers of the
same order: the k-th largest, and the smallest whose ascending mass is more than top-p drops. Among logits equal to the
border the first ids go. One program works on one row, in a fixed order, so no other row can change a bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.table import SampleRows

BLOCK = 2048


@triton.jit
def ordered(values):
    """int64 numbers in the order of float32 ones."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _load(row, ids, X: tl.constexpr):
    return tl.load(row + ids, mask=ids < X, other=-float("inf"))


@triton.jit
def _kth_largest(row, lowest, highest, k, X: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that k logits or more reach."""
    low, high = lowest, highest
    for _ in range(33):
        middle = low + (high - low + 1) // 2
        count = tl.zeros([BLOCK], tl.int32)
        for first in range(0, X, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            count += ((ordered(_load(row, ids, X)) >= middle) & (ids < X)).to(tl.int32)
        is_reached = tl.sum(count, 0) >= k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle - 1)
    return low


@triton.jit
def _mass_to(row, masses, key, X: tl.constexpr, BLOCK: tl.constexpr):
    """Of the ids whose key is at most this."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, X, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        own = tl.load(masses + ids, mask=ids < X, other=0.0)
        total += tl.where(ordered(_load(row, ids, X)) <= key, own, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _nucleus(row, masses, lowest, highest, drop, X: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key that stays, and how many of the ids with that key go, in their order."""
    low, high = lowest, highest
    for _ in range(33):
        middle = low + (high - low) // 2
        is_enough = _mass_to(row, masses, middle, X, BLOCK) > drop
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, tl.minimum(middle + 1, high))
    count = tl.zeros([BLOCK], tl.int32)
    one = tl.zeros([BLOCK], tl.float64)
    for first in range(0, X, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        is_equal = (ordered(_load(row, ids, X)) == low) & (ids < X)
        count += is_equal.to(tl.int32)
        one = tl.maximum(one, tl.where(is_equal, tl.load(masses + ids, mask=ids < X, other=0.0), 0.0))
    equal, mass = tl.sum(count, 0), tl.max(one, 0)
    left = drop - _mass_to(row, masses, low - 1, X, BLOCK)
    gone = tl.floor(left / tl.where(mass > 0.0, mass, 1.0))
    # The last one always stays.
    return low, tl.minimum(tl.maximum(gone, 0.0), (equal - 1).to(tl.float64)).to(tl.int32)


@triton.jit
def _id_after(row, key, gone, X: tl.constexpr, BLOCK: tl.constexpr):
    """The first id with this key after so many with it."""
    best = tl.full([BLOCK], X, tl.int64)
    for first in range(0, X, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        is_equal = ((ordered(_load(row, ids, X)) == key) & (ids < X)).to(tl.int32)
        is_left = (is_equal == 1) & (tl.cumsum(is_equal, 0) > gone)
        best = tl.minimum(best, tl.where(is_left, ids.to(tl.int64), X))
        gone -= tl.sum(is_equal, 0)
    return tl.min(best, 0)


@triton.jit
def _filter(
    logits, temperature, top_k, top_p, min_p, masses, borders, stride, num_rows, X: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """borders int64 [2, R]: the key of the border, and the first id that stays of those with that key."""
    index = tl.program_id(0).to(tl.int64)
    row, masses_of = logits + index * stride, masses + index * X
    heat = tl.load(temperature + index).to(tl.float64)
    k, p = tl.load(top_k + index), tl.load(top_p + index).to(tl.float64)
    least = tl.load(min_p + index).to(tl.float64)
    border = tl.full([], -(2**40), tl.int64)
    first_id = tl.full([], 0, tl.int64)
    if (heat != 0.0) & ((k > 0) | (p < 1.0) | (least > 0.0)):
        low, high = tl.full([BLOCK], 2**40, tl.int64), tl.full([BLOCK], -(2**40), tl.int64)
        peaks = tl.full([BLOCK], -float("inf"), tl.float32)
        for first in range(0, X, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            values = _load(row, ids, X)
            own = ordered(values)
            low = tl.minimum(low, tl.where(ids < X, own, low))
            high = tl.maximum(high, tl.where(ids < X, own, high))
            peaks = tl.maximum(peaks, values)
        lowest, highest, peak = tl.min(low, 0), tl.max(high, 0), tl.max(peaks, 0).to(tl.float64) / heat
        if (k > 0) & (k < X):
            border = _kth_largest(row, lowest, highest, k, X, BLOCK)
        total = tl.zeros([BLOCK], tl.float64)
        likely = tl.full([BLOCK], 2**40, tl.int64)
        for first in range(0, X, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            values = _load(row, ids, X)
            own = tl.exp(values.to(tl.float64) / heat - peak)
            own = tl.where((ordered(values) >= border) & (ids < X), own, 0.0)
            likely = tl.minimum(likely, tl.where(own >= least, ordered(values), likely))
            tl.store(masses_of + ids, own, mask=ids < X)
            total += own
        # Other threads read them.
        tl.debug_barrier()
        if p < 1.0:
            smallest, gone = _nucleus(row, masses_of, lowest, highest, (1.0 - p) * tl.sum(total, 0), X, BLOCK)
            if smallest >= border:
                border = smallest
                first_id = _id_after(row, smallest, gone, X, BLOCK)
        if least > 0.0:
            is_higher = tl.min(likely, 0) > border
            first_id = tl.where(is_higher, 0, first_id)
            border = tl.where(is_higher, tl.min(likely, 0), border)
    tl.store(borders + index, border)
    tl.store(borders + num_rows + index, first_id)


def borders(logits: Tensor, rows: SampleRows) -> Tensor:
    """int64 [2, R] of logits float32 [R, X]: key of the border, and the first id that stays of those with that key; all
    of a row that is greedy or has no filter stays.
    """
    count, width = logits.shape
    masses = torch.empty(count, width, dtype=torch.float64, device=logits.device)
    found = torch.empty(2, count, dtype=torch.int64, device=logits.device)
    _filter[(count,)](
        logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, masses, found, logits.stride(0), count,
        X=width, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return found
