"""The mixture-of-experts operators of torch_npu."""

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import (
    require,
    require_contiguous,
    require_dtype,
    require_indices,
)
from k3svc.ops.npu_emulated.registry import operator

_SIGMOID = 1
_COUNTS = 1
_ROW_MAJOR = (2, 3)


@operator("npu_moe_gating_top_k")
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k], expert ids int32 [T, k], scores float32 [T, E] or empty); the bias only selects."""
    name = "npu_moe_gating_top_k"
    require_dtype(name, "x", x, torch.float16, torch.bfloat16, torch.float32)
    require(x.dim() == 2 and x.numel() > 0, name, f"x {tuple(x.shape)}")
    experts = x.shape[1]
    require(experts <= 2048 and 0 < k <= experts, name, f"{k} of {experts} experts")
    require(renorm == 0, name, f"renorm {renorm}, must be 0")
    require(norm_type == _SIGMOID, name, f"norm_type {norm_type} is not emulated")
    require(bias is None or bias.dtype == x.dtype, name, "bias and x differ in dtype")
    scores = x.double().sigmoid()
    ranked = scores if bias is None else scores + bias.double()
    if group_count > 1:
        require(
            experts % group_count == 0 and experts // group_count > 2,
            name,
            f"{experts} experts in {group_count} groups",
        )
        groups = ranked.view(-1, group_count, experts // group_count)
        best = groups.topk(2, dim=-1).values.sum(-1) if group_select_mode == 1 else groups.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(k_group, dim=-1).indices, True)
        ranked = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = scores.gather(1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), ids.int(), scores.float() if out_flag else torch.empty(0)


@operator("npu_moe_init_routing_v2")
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: list[int],
    row_idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows sorted by expert, row index int32, tokens of each expert int64, empty scales).

    With quant_mode 1 rows are int8 and scales float32.
    """
    name = "npu_moe_init_routing_v2"
    require(expert_idx.dtype == torch.int32 and expert_idx.dim() == 2, name, f"expert_idx {expert_idx.dtype}")
    require_dtype(name, "x", x, torch.float16, torch.bfloat16, torch.float32)
    require(x.dim() == 2 and x.shape[0] == expert_idx.shape[0] > 0, name, f"x {tuple(x.shape)}")
    require(
        expert_num > 0 and list(active_expert_range) == [0, expert_num], name, "the whole range of experts is emulated"
    )
    require(active_num in (-1, expert_idx.numel()), name, f"active_num {active_num}")
    require(expert_tokens_num_flag and expert_tokens_num_type in (0, 1), name, "token numbers are needed")
    require(row_idx_type == 0, name, "row_idx_type 1 is not emulated")
    # Its default changed between versions.
    require(quant_mode in (-1, 1), name, f"quant_mode {quant_mode}: pass -1 (none) or 1 (dynamic)")
    require_contiguous(name, x=x, expert_idx=expert_idx)
    require_indices(name, "expert_idx", expert_idx, expert_num)
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    counts = torch.bincount(flat, minlength=expert_num)
    numbers = counts if expert_tokens_num_type == 1 else counts.cumsum(0)
    rows = x[order // expert_idx.shape[1]]
    if quant_mode == -1:
        return rows, place.int(), numbers, torch.empty(0)
    scale = rows.double().abs().amax(-1) / 127
    quantised = (rows.double() / scale.clamp_min(1e-30)[:, None]).round().clamp(-128, 127).to(torch.int8)
    return quantised, place.int(), numbers, scale.float()


@operator("npu_moe_finalize_routing")
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor, scales: Tensor | None, expanded_src_to_dst_row: Tensor, drop_pad_mode: int | None
) -> Tensor:
    """Weighted sum of each token's rows. The row index is row-major in modes 2 and 3, column-major in 0 and 1."""
    name = "npu_moe_finalize_routing"
    rows, place = expanded_permuted_rows, expanded_src_to_dst_row
    require(scales is not None and scales.dtype == rows.dtype, name, "scales must have the dtype of the rows")
    require(place.dtype == torch.int32 and place.dim() == 1, name, f"row index {place.dtype}")
    assert scales is not None
    tokens, per_token = scales.shape
    require(
        place.numel() == tokens * per_token == rows.shape[0] > 0,
        name,
        f"{rows.shape[0]} rows, scales {tuple(scales.shape)}",
    )
    require_indices(name, "expanded_src_to_dst_row", place, rows.shape[0])
    require_contiguous(name, rows=rows, scales=scales, place=place)
    index = (
        place.long().view(tokens, per_token)
        if drop_pad_mode in _ROW_MAJOR
        else place.long().view(per_token, tokens).t()
    )
    return (rows[index].double() * scales.double()[..., None]).sum(1).to(rows.dtype)
