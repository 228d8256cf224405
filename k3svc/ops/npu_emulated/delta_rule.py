"""The gated delta rule in float64, token by token: what every KDA kernel must compute (model.md 2.3)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, ends: Sequence[int], chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs packed sequences; sequence n is rows ends[n - 1] : ends[n].

    q, k [T, H, K] (q scaled), v [T, HV, V], log_decay [T, HV, K], beta [T, HV], state [N, HV, V, K], all float64.
    Returns out [T, HV, V], final states, and the states at the start of each chunk [NC, HV, V, K].
    """
    group = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    decay = log_decay.exp()
    begins = [0, *ends[:-1]]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    counts = [-(-length // chunk) for length in lengths]
    first_chunk = [sum(counts[:n]) for n in range(len(counts))]
    out = torch.zeros_like(v)
    state = state.clone()
    starts = state.new_zeros(sum(counts), *state.shape[1:])
    for step in range(max(lengths, default=0)):
        active = [n for n, length in enumerate(lengths) if length > step]
        rows = [begins[n] + step for n in active]
        if step % chunk == 0:
            starts[[first_chunk[n] + step // chunk for n in active]] = state[active]
        now = state[active] * decay[rows][:, :, None]
        read = (now * k[rows][:, :, None]).sum(-1)
        delta = beta[rows][..., None] * (v[rows] - read)
        now = now + delta[..., None] * k[rows][:, :, None]
        out[rows] = (now * q[rows][:, :, None]).sum(-1)
        state[active] = now
    return out, state, starts


def log_decay(x: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """Decay logits plus bias [T, HV, K] and a_log [HV], float64 → g <= 0. Above 20 softplus is the identity."""
    a = a_log.exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(a * x)
    return -a * torch.nn.functional.softplus(x, beta=1.0, threshold=20.0)


def chunk_rows(ends: Sequence[int], chunk: int) -> list[tuple[int, int]]:
    """First and last row (exclusive) of every chunk, in order; an empty sequence has none."""
    rows = []
    begin = 0
    for end in ends:
        rows += [(first, min(first + chunk, end)) for first in range(begin, end, chunk)]
        begin = end
    return rows


def decayed_products(left: Tensor, right: Tensor, exponent: Tensor) -> Tensor:
    """[HV, C, C] of Σ_c left_ic right_jc exp(exponent_ic - exponent_jc) for i >= j, else 0; arguments [C, HV, K]."""
    i = torch.arange(left.shape[0])
    is_past = (i[:, None] >= i)[..., None, None]
    ratio = torch.where(is_past, exponent[:, None] - exponent, -torch.inf).exp()
    return torch.einsum("ihc,jhc,ijhc->hij", left, right, ratio)
