"""The choice of a token on Ascend: filters on the device, noise on the host.

The noise is a function of 64-bit integers and float64 logarithms, which the device lacks, so what a filter keeps is
copied to the host and the rest is `reference_sampling`, bit by bit. Rows are grouped by the filters that they use, on
the host; a row without a finite logit never reaches an operator, where it would turn to NaN.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from k3svc.ops.reference_sampling import gumbel, noise_bits, noise_keys
from k3svc.ops.table import SampleRows

MAX_TOP_K = 1024


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """`Ops.sample`."""
    peaks, chosen = logits.max(dim=-1)
    drawn = [index for index, is_greedy in enumerate(rows.host_greedy) if not is_greedy]
    if not drawn:
        return chosen
    finite = peaks.isfinite().tolist()
    drawn = [index for index in drawn if finite[index]]
    keys = noise_keys(rows.seed.cpu(), rows.sample_index.cpu(), rows.position.cpu())
    ids = chosen.tolist()
    for index, kept, values in _laws(logits, rows, drawn):
        ids[index] = int(kept[(values + gumbel(noise_bits(keys[index], kept))).argmax()])
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def probabilities(logits: Tensor, rows: SampleRows) -> Tensor:
    """`Ops.probabilities`. A row without a finite logit is certain of its first id and disturbs no other."""
    peaks, chosen = logits.max(dim=-1)
    out = torch.zeros_like(logits).scatter_(1, chosen[:, None], 1.0)
    finite = peaks.isfinite().tolist()
    drawn = [index for index, is_greedy in enumerate(rows.host_greedy) if not is_greedy and finite[index]]
    for index, kept, values in _laws(logits, rows, drawn):
        law = torch.zeros(logits.shape[1])
        law[kept] = values.softmax(-1).float()
        out[index] = law.to(logits.device)
    return out


def _laws(logits: Tensor, rows: SampleRows, drawn: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(row, ids that its filters keep, their logits over the temperature in float64) of the drawn rows, on the host."""
    min_p = rows.min_p.tolist()
    for index, row in zip(drawn, filtered(logits, rows, drawn), strict=True):
        kept = (row > -torch.inf).nonzero()[:, 0]
        values = row[kept].double()
        if min_p[index] > 0.0:
            is_likely = (values - values.max()).exp() >= min_p[index]
            kept, values = kept[is_likely], values[is_likely]
        yield index, kept, values


def filtered(logits: Tensor, rows: SampleRows, drawn: list[int]) -> Tensor:
    """Logits over temperature of the drawn rows, -inf where a filter drops an id: float32 [drawn, X], on the host."""
    if not drawn:
        return torch.empty(0, logits.shape[1])
    picked = torch.tensor(drawn, device=logits.device)
    scaled = logits.index_select(0, picked) / rows.temperature.index_select(0, picked)[:, None]
    top_k, top_p = rows.top_k.tolist(), rows.top_p.tolist()
    groups: dict[tuple[bool, bool], list[int]] = {}
    for place, index in enumerate(drawn):
        has_k = 0 < top_k[index] < logits.shape[1]
        if has_k and top_k[index] > MAX_TOP_K:
            border = scaled[place].topk(top_k[index]).values[-1]
            scaled[place].masked_fill_(scaled[place] < border, -torch.inf)
            has_k = False
        if has_k or top_p[index] < 1.0:
            groups.setdefault((has_k, top_p[index] < 1.0), []).append(place)
    for (has_k, has_p), places in groups.items():
        own = torch.tensor(places, device=logits.device)
        k = torch.tensor([top_k[drawn[place]] for place in places], dtype=torch.int32, device=logits.device)
        p = torch.tensor([top_p[drawn[place]] for place in places], dtype=scaled.dtype, device=logits.device)
        kept = torch.ops.npu.npu_top_k_top_p(scaled.index_select(0, own), p if has_p else None, k if has_k else None)
        scaled.index_copy_(0, own, kept)
    return scaled.cpu()
