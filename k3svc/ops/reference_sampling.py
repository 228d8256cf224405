"""Log-softmax, the choice of a token and its law in plain torch: `Ops.log_softmax`, `Ops.sample`, `Ops.probabilities`.

The choice of a row is a function of its logits, its parameters and (seed, sample index, position) alone
(design.md 2, P1). Rows are worked on one at a time, so neither their number nor their order can leave a trace.

Noise, so that any backend can reproduce it. Numbers are unsigned 64 bit, sums and products wrap, >> shifts zeros in:

    G      = 0x9E3779B97F4A7C15
    mix(z) : z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    key    = mix((mix((mix(seed + G) ^ sample_index) + G) ^ position) + G)
    bits   = mix(key + G · (id + 1))                       splitmix64 started at key, output number id

From there on float64: u = ((bits >> 12) + 0.5) / 2^52, exact and inside (0, 1); noise = -ln(-ln(u)); the chosen id is
the argmax of logit / temperature + noise over the ids that the filters keep, the lowest on ties. The integers agree bit
by bit everywhere. Logarithms may differ in the last place between machines, which moves an argmax only where two scores
lie within about 1e-15 of each other.
"""

import math

import torch
from torch import Tensor

from k3svc.ops.table import SampleRows

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def log_softmax(logits: Tensor) -> Tensor:
    """float32 [R, X] → float32 [R, X]; float64 inside, a row at a time."""
    out = torch.empty_like(logits)
    for index, row in enumerate(logits):
        out[index] = torch.log_softmax(row.double(), dim=-1)
    return out


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """Choose a token per row: float32 [R, X] → int64 [R] (`Ops.sample`).

    A row whose largest logit is not finite gets an unspecified id inside the vocabulary and disturbs no other row.
    """
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    greedy = [index for index, is_greedy in enumerate(rows.host_greedy) if is_greedy]
    if greedy:
        chosen[greedy] = logits[greedy].argmax(dim=-1)
    if len(greedy) == len(rows.host_greedy):
        return chosen
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    keys = noise_keys(rows.seed, rows.sample_index, rows.position)
    temperature, is_filtered = rows.temperature.double(), rows.host_filtered
    for index, row in enumerate(logits):
        if rows.host_greedy[index]:
            continue
        scaled = row.double() / temperature[index]
        if not is_filtered[index]:
            chosen[index] = (scaled + gumbel(noise_bits(keys[index], vocabulary))).argmax()
            continue
        top_k, top_p, min_p = rows.host_filters[index]
        ids = kept_ids(row, scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        chosen[index] = ids[(scaled[ids] + gumbel(noise_bits(keys[index], ids))).argmax()]
    return chosen


def probabilities(logits: Tensor, rows: SampleRows) -> Tensor:
    """The law that `sample` draws from: float32 [R, X] → float32 [R, X] (`Ops.probabilities`)."""
    out = torch.zeros_like(logits)
    temperature, is_filtered = rows.temperature.double(), rows.host_filtered
    for index, row in enumerate(logits):
        if rows.host_greedy[index]:
            out[index, row.argmax()] = 1.0
            continue
        scaled = row.double() / temperature[index]
        if not is_filtered[index]:
            out[index] = scaled.softmax(dim=-1)
            continue
        top_k, top_p, min_p = rows.host_filters[index]
        ids = kept_ids(row, scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        out[index, ids] = scaled[ids].softmax(dim=-1).float()
    return out


def kept_ids(row: Tensor, scaled: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids that the filters keep, int64 ascending, never empty (speculation.md 3.3 and 3.4, `npu_top_k_top_p`).

    row float32 [X] logits, scaled float64 [X] the same over the temperature. Top-k keeps what is not below the k-th
    largest logit, so ties at the border stay. Top-p and min-p look at the softmax over what is left: an id goes while
    the ascending cumulative mass, its own included, is at most 1 - p (equal ones in the order of their ids; the last
    always stays), and when it has less than min_p times the mass of the most likely one.
    """
    ids = torch.arange(row.shape[0], device=row.device)
    peak = scaled.max()
    if not math.isfinite(peak):
        return ids
    if 0 < top_k < row.shape[0]:
        ids = (row >= row.topk(top_k).values[-1]).nonzero()[:, 0]
        scaled = scaled[ids]
    if top_p < 1.0 or min_p > 0.0:
        mass = (scaled - peak).exp()
        keep = mass >= min_p
        if top_p < 1.0:
            keep &= _nucleus(scaled, mass, top_p)
        ids = ids[keep]
    return ids


def _nucleus(scaled: Tensor, mass: Tensor, top_p: float) -> Tensor:
    """What top-p keeps, bool [C], of scaled logits and their softmax numerators (largest 1), float64 [C].

    All ids with less than 1/C of the mass to drop weigh less than it together, so they go unsorted; what remains to be
    sorted is a small part of a vocabulary. Totals are running sums, whose order no number of threads changes.
    """
    drop_mass = (1.0 - top_p) * mass.cumsum(0)[-1]
    keep = mass >= (drop_mass / mass.shape[0]).clamp(max=1.0)
    small, large = mass[~keep], keep.nonzero()[:, 0]
    order = large[scaled[large].argsort(stable=True)]
    below = torch.cat((small.cumsum(0)[-1:], mass[order])).cumsum(0)[-order.shape[0] :]
    keep[order[:-1]] = below[:-1] > drop_mass
    return keep


def noise_keys(seed: Tensor, sample_index: Tensor, position: Tensor) -> Tensor:
    """Key of each row, int64 [R] each (the bits of the unsigned numbers)."""
    key = _mix(seed + _GOLDEN)
    key = _mix((key ^ sample_index) + _GOLDEN)
    return _mix((key ^ position) + _GOLDEN)


def noise_bits(key: Tensor, ids: Tensor) -> Tensor:
    """64 hashed bits of each id under a key: int64 [] and int64 [C] → int64 [C]."""
    return _mix((ids + 1) * _GOLDEN + key)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise of hashed bits: int64 [C] → float64 [C], finite."""
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
