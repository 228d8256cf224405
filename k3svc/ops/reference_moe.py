"""Router and experts in plain torch (model.md 2.7)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3svc.ops.reference_math import cast, scalar, sigmoid, silu_glu, situ_glu
from k3svc.ops.table import Activation

ROW_TILE = 16
RENORMALISE_EPS = 1e-20


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Weights of the experts of a layer, ready for products from the right."""

    gate_up: Sequence[Tensor]
    """[D, 2·inner] each."""
    down: Sequence[Tensor]
    """[inner, D] each."""


def glu(gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None) -> Tensor:
    """`Ops.glu`."""
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half].float(), gate_up[:, half:].float()
    out = silu_glu(gate, up) if activation == "silu" else situ_glu(gate, up, beta, linear_beta)
    return cast(out, gate_up.dtype)


def choose_experts(
    logits: Tensor, bias: Tensor, *, top_k: int, renormalize: bool, scale: float, num_groups: int, top_groups: int
) -> tuple[Tensor, Tensor]:
    """Router logits float32 [N, experts] → ids int64 [N, top_k] and weights float32 [N, top_k].

    Ids are in descending order of score + bias, the lowest first on ties; weights come from the score without bias.
    """
    scores = sigmoid(logits)
    ranked = scores + bias
    if num_groups > 1:
        groups = ranked.view(ranked.shape[0], num_groups, ranked.shape[1] // num_groups)
        value = groups.sort(dim=-1, descending=True, stable=True).values[..., :2].sum(-1)
        dropped = value.sort(dim=-1, descending=True, stable=True).indices[:, top_groups:]
        is_dropped = torch.zeros_like(value, dtype=torch.bool).scatter_(1, dropped, True)
        ranked = groups.masked_fill(is_dropped[..., None], -torch.inf).flatten(1)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).add_(scalar(RENORMALISE_EPS))
    return ids, weights if scale == 1.0 else weights * scalar(scale)


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: PackedExperts,
    activation: Activation,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """`Ops.experts`: rows sorted by expert in tiles of 16, one product per expert and projection."""
    if x.shape[0] == 0:
        return x.clone()
    width, inner2 = packed.gate_up[0].shape
    per_row = ids.shape[1]
    flat = ids.reshape(-1).numpy()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=len(packed.gate_up))
    tiles = -(-counts // ROW_TILE)
    ends = np.cumsum(tiles)
    chosen = flat[order]
    places = (ends - tiles)[chosen] * ROW_TILE + np.arange(len(order)) - (np.cumsum(counts) - counts)[chosen]
    rows = np.zeros(int(ends[-1]) * ROW_TILE, dtype=np.int64)
    rows[places] = order // per_row
    place_of = np.empty_like(order)
    place_of[order] = places

    tiled = x.index_select(0, torch.from_numpy(rows)).view(-1, ROW_TILE, width)
    hidden = x.new_empty(tiled.shape[0], ROW_TILE, inner2)
    spans = [
        (expert, int(ends[expert] - tiles[expert]), int(ends[expert])) for expert in np.flatnonzero(counts).tolist()
    ]
    for expert, first, last in spans:
        torch.bmm(tiled[first:last], packed.gate_up[expert].expand(last - first, -1, -1), out=hidden[first:last])
    hidden = glu(hidden.view(-1, inner2), activation, beta, linear_beta).view(-1, ROW_TILE, inner2 // 2)
    for expert, first, last in spans:
        torch.bmm(hidden[first:last], packed.down[expert].expand(last - first, -1, -1), out=tiled[first:last])
    results = tiled.view(-1, width)
    columns = torch.from_numpy(place_of.reshape(-1, per_row).T.copy())
    out = results.index_select(0, columns[0]).float().mul_(weights[:, :1])
    for column in range(1, per_row):
        out.addcmul_(results.index_select(0, columns[column]).float(), weights[:, column : column + 1])
    return cast(out, x.dtype)
