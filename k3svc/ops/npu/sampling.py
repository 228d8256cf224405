"""The choice of a token on Ascend: filters on the device, noise on the host.

The noise is a function of 64-bit integers and float64 logarithms, which the device lacks, so what a filter keeps is
copied to the host and the rest is `reference_sampling`, bit by bit. Rows are grouped by the filters that they use, as
the host knows them, so the device is waited for once, when all of it has been asked for. A row without a finite logit
reaches an operator as zeros, where it would turn to NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from k3svc.ops.reference_sampling import gumbel, noise_bits, noise_keys
from k3svc.ops.table import SampleRows
from k3svc.ops.upload import to_host

MAX_TOP_K = 1024


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """`Ops.sample`."""
    peaks, chosen = logits.max(dim=-1)
    drawn = _drawn(rows)
    if not drawn:
        return chosen
    given = (chosen, rows.seed, rows.sample_index, rows.position)
    scaled, finite, picked, *noise = to_host(*_filtered(logits, peaks, rows, drawn), *given)
    keys, ids = noise_keys(*noise), picked.tolist()
    for place, index in enumerate(drawn):
        if finite[index]:
            kept, values = _law(scaled[place], rows.host_filters[index][2])
            ids[index] = int(kept[(values + gumbel(noise_bits(keys[index], kept))).argmax()])
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def probabilities(logits: Tensor, rows: SampleRows) -> Tensor:
    """`Ops.probabilities`. A row without a finite logit is certain of its first id and disturbs no other."""
    peaks, chosen = logits.max(dim=-1)
    out = torch.zeros_like(logits).scatter_(1, chosen[:, None], 1.0)
    drawn = _drawn(rows)
    if not drawn:
        return out
    scaled, finite = to_host(*_filtered(logits, peaks, rows, drawn))
    for place, index in enumerate(drawn):
        if finite[index]:
            kept, values = _law(scaled[place], rows.host_filters[index][2])
            law = torch.zeros(logits.shape[1])
            law[kept] = values.softmax(-1).float()
            out[index] = law.to(logits.device)
    return out


def _drawn(rows: SampleRows) -> list[int]:
    return [index for index, is_greedy in enumerate(rows.host_greedy) if not is_greedy]


def _law(row: Tensor, min_p: float) -> tuple[Tensor, Tensor]:
    """Ids that min-p keeps of what other filters left, and their logits over the temperature in float64."""
    kept = (row > -torch.inf).nonzero()[:, 0]
    values = row[kept].double()
    if min_p > 0.0:
        is_likely = (values - values.max()).exp() >= min_p
        kept, values = kept[is_likely], values[is_likely]
    return kept, values


def _filtered(logits: Tensor, peaks: Tensor, rows: SampleRows, drawn: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits over temperature of the drawn rows, -inf where top-k or top-p drops an id: float32 [drawn, X]; and whether
    each row has a finite logit, bool [R]. Both on the device, which nothing waits for.
    """
    finite = peaks.isfinite()
    whole = torch.where(finite[:, None], logits, torch.zeros_like(logits))
    picked = torch.tensor(drawn, device=logits.device)
    scaled = whole.index_select(0, picked) / rows.temperature.index_select(0, picked)[:, None]
    groups: dict[tuple[bool, bool], list[int]] = {}
    for place, index in enumerate(drawn):
        top_k, top_p, _ = rows.host_filters[index]
        has_k = 0 < top_k < logits.shape[1]
        if has_k and top_k > MAX_TOP_K:
            border = scaled[place].topk(top_k).values[-1]
            scaled[place].masked_fill_(scaled[place] < border, -torch.inf)
            has_k = False
        if has_k or top_p < 1.0:
            groups.setdefault((has_k, top_p < 1.0), []).append(place)
    for (has_k, has_p), places in groups.items():
        own = torch.tensor(places, device=logits.device)
        filters = [rows.host_filters[drawn[place]] for place in places]
        k = torch.tensor([top_k for top_k, _, _ in filters], dtype=torch.int32, device=logits.device)
        p = torch.tensor([top_p for _, top_p, _ in filters], dtype=scaled.dtype, device=logits.device)
        kept = torch.ops.npu.npu_top_k_top_p(scaled.index_select(0, own), p if has_p else None, k if has_k else None)
        scaled.index_copy_(0, own, kept)
    return scaled, finite
